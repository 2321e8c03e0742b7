"""Kills processes of a run at random moments, and checks that the run ends with the weights of an untouched one.

    python benchmarks/resumes.py [times=N] [seed=N] [victims=driver,judge+raylet] [policies=both] [kind=hf]

Kills with SIGKILL, in a short run under each policy: each of ``victims`` in a run of its own, those joined by + in one
run, in random order, each some time after a step that is drawn (0: while the run starts). A run that this ends is
resumed with `dataflow resume`, or begun again with ``resume=auto`` if it was killed before its first checkpoint or
after its end; the run itself should recover from the death of a service. Prints a table, then JSON; exits with 1 if
a check fails:

- weights, steps, evaluations and status are those of the run of the same policy that was not killed; an evaluation
  that was being scored at a kill may be absent, if a warning says so;
- each step is once in metrics.jsonl, and nothing of the run is left in processes or shared memory;
- no reward is requested twice, except those without an answer LATE_S before a kill.

The runs whose victim is the judge use the judge that the run starts, whose requests are not counted here. ``keep=DIR``
keeps the untouched runs, which later calls of the same version then take over; ``out=FILE`` gets the JSON after each
run. ``kind=inline`` runs without Ray, in one process, which is killed as ``driver``; a run takes seconds. With
``kind=vllm`` the weights may differ, as its samples may depend on what else is in the batch.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import begin, parsed, refuse, table, whole
from kills import Run

VICTIMS = ("driver", "command", "trainer", "rollout", "reward", "judge", "raylet")
KINDS = {
    "hf": ("engine.rollout=hf",),
    "vllm": ("engine.rollout=vllm",),
    "inline": ("engine.rollout=hf", "executor=inline"),
}
POLICIES = ("baseline", "mini-batch", "off-policy", "both", "both+stream")
STEPS = 6
LATE_S = 1.0
RESUMES = 8
DRAWS = 5
"""Runs of which one must be killed; those that end before are not counted."""
SMALL = (
    f"steps={STEPS}", "policy.order=index", "checkpoint.every=2", "data.prompts=8", "engine.n=2",
    "engine.max_tokens=8", "data.max_prompt_length=200", "data.val_size=8", "reward.share_equal=false",
    "judge.latency=uniform:0.02:0.1", "judge.time_scale=1", "ray.num_cpus=2", "trainer.restarts=9",
)  # fmt: skip
REWARD = """
import asyncio, json, time
from pathlib import Path

HERE = Path(__file__).parent

def log(name, key):
    with (HERE / name).open("a") as file:
        file.write(json.dumps([key, time.time()]) + "\\n")

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    key = json.dumps([solution_str, ground_truth, extra_info.get("index")])
    log("asked.jsonl", key)
    await asyncio.sleep(0.02)
    log("answered.jsonl", key)
    return len(solution_str) / 100
"""


class Trial:
    """One run with what its reward function was asked, in a directory of its own.

    Args:
        directory: to make; the reward function is in it, the run in ``runs/a`` below it.
        policy: of the run.
        judged: whether the run's own judge gives the rewards.
        kind: which of KINDS.
    """

    def __init__(self, directory: Path, policy: str, judged: bool, kind: str = "hf") -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.run = directory / "runs" / "a"
        self.keys = [*SMALL, f"policy={policy}", *KINDS[kind]]
        if judged:  # it gives a random model the same score each time: without another loss, nothing would be learned
            self.keys.append("algorithm.entropy_coeff=0.01")
        else:
            (directory / "reward.py").write_text(REWARD)
            self.keys.append(f"custom_reward_function.path={directory / 'reward.py'}")

    def start(self) -> Run:
        """Begins the run, or resumes it."""
        saved = any((self.run / "checkpoints").glob("step_*")) and self.facts().get("status") != "finished"
        return Run(self.run.parent, "a", [] if saved else [*self.keys, "resume=auto"], resumes=saved)

    def log(self, name: str, until: float = float("inf")) -> Counter[str]:
        """Returns how often each request was asked or answered, up to a moment (unix time)."""
        file = self.directory / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return Counter(key for key, at in rows if at <= until)

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same as in a run that is not killed."""
        facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            summary = json.loads((self.run / "summary.json").read_text())
            facts |= {name: summary[name] for name in ("weights_sha256", "status", "steps", "evaluations")}
        with suppress(OSError, ValueError):
            rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
            facts["rows"] = [row["step"] for row in rows if "timing_s/step" in row]
        return facts

    def step(self) -> int:
        """Returns the last step that was trained, 0 if none was."""
        return max(self.facts().get("rows", ()), default=0)

    def killed(self, run: Run, victim: str, step: int, pause: float) -> bool:
        """Kills a process some seconds after a step was trained; returns False if the run ended before.

        A step is trained again if the run goes back to a checkpoint; then it is the first time that counts.
        """
        run.victim(victim)
        while self.step() < step and run.process.poll() is None:
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(pause)
        while run.process.poll() is None:
            process = run.alive(victim)
            try:
                if process is not None:
                    process.kill()
                    return True
            except psutil.NoSuchProcess:
                continue
            time.sleep(0.05)  # it is being rebuilt, as another one was killed
        return False

    def compared(self, whole: dict[str, Any], kills: list[float], ends: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns what is wrong with a run that has ended, and how many requests were asked again.

        Args:
            whole: of the run that was not killed.
            kills: their moments (unix time).
            ends: how each process of the run ended.
        """
        found = self.facts()
        said = "\n".join(line for end in ends for line in end["said"])
        lost = {step for steps in re.findall(r"no evaluation of step ([\d, ]+)", said) for step in steps.split(", ")}
        expected = dict(whole["facts"])
        lost -= {*found.get("evaluations", ())}  # it may have been made after all, from an earlier checkpoint
        expected["evaluations"] = {at: value for at, value in expected["evaluations"].items() if at not in lost}
        wrong = [f"{name}: {found.get(name)}" for name, value in expected.items() if found.get(name) != value]
        wrong += [f"left {end['left'] or end['shared_memory']}" for end in ends if end["left"] or end["shared_memory"]]
        if ends[-1]["code"] != 0 or any(end["code"] is None for end in ends):
            wrong.append(f"exit codes {[end['code'] for end in ends]}")
        # Requests that were cut off have no answer; the answers of the last moment may not have been stored.
        lost = self.log("asked") - self.log("answered")
        for at in kills:
            lost += self.log("answered", at + LATE_S) - self.log("answered", at - LATE_S)
        twice = self.log("asked") - Counter(whole["asked"])
        if not twice <= lost:
            wrong.append(f"{(twice - lost).total()} requests asked again")
        return {"again": twice.total(), "wrong": wrong}


def untouched(directory: Path, policy: str, judged: bool, kind: str = "hf") -> dict[str, Any]:
    """Returns the facts of a run that is not killed, its requests, and when its processes appeared."""
    kept = directory / f"{policy}-{kind}{'-judged' * judged}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    trial = Trial(directory / kept.stem, policy, judged, kind)
    run = trial.start()
    end = run.end()
    if end["code"]:
        sys.exit(f"a run without a kill ended with exit code {end['code']}: {end['said']}")
    rows = [json.loads(line) for line in (trial.run / "metrics.jsonl").read_text().splitlines()]
    if not all(row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row):
        sys.exit(f"{trial.run}: a step had no gradient, so equal weights would prove nothing")
    summary = json.loads((trial.run / "summary.json").read_text())
    found = {
        "facts": trial.facts(), "asked": trial.log("asked"), "appeared": run.appeared,
        "start_s": end["took_s"] - summary["wall_s"], "step_s": summary["step_s"],
    }  # fmt: skip
    kept.write_text(json.dumps(found))
    return found


def measure(
    directory: Path, victims: str, policy: str, draw: random.Random, whole: dict[str, Any], kind: str = "hf"
) -> dict[str, Any]:
    """Kills processes of a new run, resumes the run each time that ends it, until it finishes, and checks it."""
    trial = Trial(directory, policy, "judge" in victims, kind)
    names = victims.split("+")
    draw.shuffle(names)
    kills: list[tuple[str, float]] = []
    run, ends = trial.start(), list[dict[str, Any]]()
    for victim, step in zip(names, sorted(draw.randrange(STEPS) for _name in names), strict=True):
        longest = whole["step_s"] if step else max(0.0, whole["start_s"] - whole["appeared"][victim])
        while not trial.killed(run, victim, step, draw.uniform(0.0, longest)):
            ends.append(run.end())
            if not ends[-1]["code"] or len(ends) > RESUMES:
                break
            run = trial.start()
        else:
            kills.append((victim, time.time()))
            print(f"  {victim} after step {trial.step()}", file=sys.stderr, flush=True)
            continue
        break
    else:
        ends.append(run.end())
    while ends[-1]["code"] and len(ends) <= RESUMES:
        ends.append(trial.start().end())
    return {
        "policy": policy, "kills": [victim for victim, _ in kills], "missed": len(names) - len(kills),
        "resumes": len(ends) - 1, "restarts": sum(end["restarts"] for end in ends),
        "took_s": [end["took_s"] for end in ends], "said": [end["said"] for end in ends],
        **trial.compared(whole, [at for _, at in kills], ends),
    }  # fmt: skip


def trials(
    kept: Path, times: int, seed: int, victims: list[str], policies: list[str], kind: str
) -> Iterator[dict[str, Any]]:
    """Yields the result of each run that is killed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        for number, names, policy in ((n, v, p) for n in range(times) for v in victims for p in policies):
            whole = untouched(kept, policy, "judge" in names, kind)
            for draws in range(DRAWS):
                row = measure(Path(place, f"{names}-{policy}-{number}-{draws}"), names, policy, draw, whole, kind)
                if row["kills"]:
                    break
            else:
                row["wrong"].append("it ended before each kill")
            print(f"{names} {policy}: {row['wrong'] or 'ok'}", file=sys.stderr, flush=True)
            yield row


def main(arguments: list[str]) -> int:
    known = f"victims= of {','.join(VICTIMS)}, joined by + or , policies= of {','.join(POLICIES)}"
    use = f"use times=N seed=N keep=DIR out=FILE kind={'|'.join(KINDS)} {known}"
    defaults = {"times": "1", "seed": "0", "victims": ",".join(VICTIMS), "policies": ",".join(POLICIES)}
    given = parsed(arguments, {**defaults, "keep": "", "out": "", "kind": "hf"}, use)
    times, seed = whole("times", given["times"]), whole("seed", given["seed"], 0)
    victims, policies = given["victims"].split(","), given["policies"].split(",")
    keep, out, kind = given["keep"], given["out"], given["kind"]
    struck = {victim for names in victims for victim in names.split("+")}
    if kind not in KINDS or not struck <= {*VICTIMS} or not {*policies} <= {*POLICIES}:
        refuse(f"{use}.")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        kept = Path(keep or place).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        for row in trials(kept, times, seed, victims, policies, kind):
            rows.append(row)
            if out:  # so that a stopped benchmark keeps its results
                Path(out).write_text(json.dumps(rows, indent=1) + "\n")
    lines: list[tuple[str, ...]] = [("killed", "policy", "missed", "restarts", "resumes", "again", "wrong")]
    for row in rows:
        words = [row[name] for name in ("policy", "missed", "restarts", "resumes", "again")]
        lines.append((" ".join(row["kills"]), *map(str, words), "; ".join(row["wrong"]) or "-"))
    print(table(lines))
    print("missed: the run had ended before; again: requests asked again, as they had no answer or it was not stored")
    print(json.dumps(rows, indent=1))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    begin(main, ["kind=inline", "victims=driver", "policies=baseline"])
