"""Runs the GSM8K recipe on several machines, loses some of them, and compares the weights with those of one machine.

    python benchmarks/machines.py [cases=spread,engine,cut,trainer,refused,delay] [delay_ms=20] [keep=DIR]

The machines are network namespaces of this one (root, Linux), with shared memory of their own
(:mod:`_machines`): a head with the command, the judge and a rank of the trainer; one with the other rank and the reward
agent; one with the engine. The disk of ``keep`` is shared. Without root it says why and exits with 0.

- ``spread``: nothing is lost;
- ``engine``: the machine of the engine is killed, and with it what else is there; others take over;
- ``cut``: the network of that machine is cut, its processes live on;
- ``trainer``: the machine of a rank is killed: the run resumes from a checkpoint on the others;
- ``refused``: a run's directory that is not shared, a missing token, a label that no node has;
- ``delay``: as ``spread``, but each packet between two machines takes ``delay_ms``, which a process adds
  (:mod:`_delay`); the table has the time of its steps as a multiple of that of ``spread``, too.

Prints a table, then JSON; exits with 1 unless each run ends with the weights of the same run on one machine, each
service was on the machines that its labels name, and each refusal has exit code 2 or 1 and one sentence.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _delay as delay
from _machines import Machines, why_not
from _run import PIPELINE, ROOT, begin, explain, table

CASES = ("spread", "engine", "cut", "trainer", "refused", "delay")
SMALL = (
    "steps=8", "policy=both", "policy.order=index", "checkpoint.every=2", "data.prompts=8", "engine.n=2",
    "engine.max_tokens=8", "data.max_prompt_length=200", "data.val_size=8", "judge.latency=uniform:0.3:0.6",
    "judge.time_scale=1", "engine.rollout=hf", "trainer.world_size=2", "val.every=0",
)  # fmt: skip
LABELS: list[dict[str, str]] = [{"role": "head"}, {"role": "train"}, {"role": "sample"}]
NODES = (
    "ray.nodes.trainer.labels.role='!sample'",
    "ray.nodes.rollout.labels.role=in(sample,spare)",
    "ray.nodes.reward.labels.role=in(train,spare)",
)
PLACED = {"trainer": [0, 1], "rollout": [2], "reward": [1], "controller": [0], "judge": [0]}
"""Machines of each process while nothing is lost."""
ANYWHERE = (
    "ray.nodes.rollout.labels.role=in(train,sample)",
    "ray.nodes.reward.labels.role=in(train,sample)",
)
"""Rules for runs that lose a machine, so that another may take over."""
VICTIM = {"engine": "rollout", "cut": "rollout", "trainer": "trainer"}
"""The service that loses its machine."""
DEADLINE_S = 240.0
REFUSED = {
    "directory": (2, r"runs=\S+: node 10\.231\.7\.\d, where '\w+' runs, does not see \S+ of this machine; give runs="),
    "token": (2, r"ray\.address=\S+: (no Ray cluster answers there|this process cannot join the cluster)"),
    "label": (1, r"'rollout' was not up after 15 s; no node of the cluster has the label role=none\."),
}


def command(runs: Path, name: str, *overrides: str) -> list[str]:
    words = [sys.executable, "-m", "dataflow", "run", str(PIPELINE), f"runs={runs}", f"name={name}", *SMALL]
    return [*words, *overrides, "--json", "--quiet"]


def processes(machines: Machines) -> dict[str, list[int]]:
    """Returns the machines of each process of a run, by the name of its service."""
    found: dict[str, list[int]] = {}
    for number, machine in enumerate(machines.machines):
        for pid in machine.pids():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            match = re.match(r"ray::(\w+)", words) or re.search(r"rewards\.(judge)\.server", words)
            if match and match[1] in PLACED:
                found.setdefault(match[1], []).append(number)
    return found


def reached(directory: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Waits until a run has ended a step."""
    metrics, end = directory / "metrics.jsonl", time.monotonic() + DEADLINE_S
    while not (metrics.exists() and metrics.read_text().count("\n") >= step):
        if process.poll() is not None or time.monotonic() > end:
            return
        time.sleep(0.1)


def run(machines: Machines, runs: Path, case: str) -> dict[str, Any]:
    """Runs one case; returns what came of it."""
    nodes = ANYWHERE if case in VICTIM else NODES
    begin = time.monotonic()
    process = machines.machines[0].start(
        command(runs, case, f"ray.address={machines.address}", *nodes),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=machines.environment, cwd=ROOT,
    )  # fmt: skip
    reached(runs / case, 4, process)
    placed = processes(machines)
    lost = time.monotonic()
    if case in VICTIM:
        number = max(placed[VICTIM[case]])  # not 0, where the command is
        victim = machines.machines[number]
        victim.unplug() if case == "cut" else victim.kill()
    try:
        out, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    summary = json.loads(out) if process.returncode == 0 else {}
    after_s = time.monotonic() - lost
    if case in VICTIM:
        victim.plug()
        victim.kill()
        machines.join(number)
    return {
        "code": process.returncode,
        "s": time.monotonic() - begin,
        "steps_s": summary.get("wall_s", 0.0),
        "after_s": after_s,
        "placed": placed,
        "weights": summary.get("weights_sha256"),
        "messages": [line for line in errors.splitlines() if "died" in line or "restart" in line or "gone" in line][:4]
        if summary
        else errors.splitlines()[-4:],
    }


def refused(machines: Machines, runs: Path, what: str) -> dict[str, Any]:
    """Starts a run that cannot work; returns its exit code and its sentence."""
    environment, own = dict(machines.environment), list(NODES)
    if what == "token":
        environment |= {"RAY_AUTH_TOKEN": "0" * 64}
    if what == "label":
        own = ["ray.nodes.rollout.labels.role=none", "ray.start_timeout=15"]
    # The head's own memory is on no other machine.
    place = Path("/dev/shm/runs") if what == "directory" else runs
    process = machines.machines[0].start(
        command(place, f"refused-{what}", f"ray.address={machines.address}", *own),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
    code, words = REFUSED[what]
    held = process.returncode == code and bool(re.search(words, errors)) and "Traceback" not in errors
    return {"code": process.returncode, "messages": errors.splitlines()[-3:], "held": held}


def weights_alone(runs: Path, name: str, *overrides: str) -> tuple[str, float]:
    """Runs on one machine; returns the digest of the weights, and the seconds that its steps took."""
    alone = subprocess.run(command(runs, name, *overrides), capture_output=True, text=True, cwd=ROOT)
    if alone.returncode:
        sys.exit(f"the run on one machine failed:\n{alone.stderr}")
    summary = json.loads(alone.stdout)
    return str(summary["weights_sha256"]), float(summary["wall_s"])


def main(arguments: list[str]) -> int:
    explain(arguments)
    given = dict(argument.split("=", 1) for argument in arguments)
    cases, delay_s = given.get("cases", ",".join(CASES)).split(","), float(given.get("delay_ms", 20)) / 1000
    if why := why_not() or (delay.why_not() if "delay" in cases else ""):
        print(f"not run: {why}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the machines are removed
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dataflow-machines-") as made:
        runs = Path(given.get("keep", made))
        weights, alone_s = weights_alone(runs, "alone")

        def add(machines: Machines, case: str) -> None:
            found = results[case] = run(machines, runs, case)
            found["placed"] = {name: sorted(at) for name, at in found["placed"].items()}
            found["held"] = found["weights"] == weights and (case in VICTIM or found["placed"] == PLACED)

        with Machines(LABELS) as machines:
            for case in cases:
                if case == "refused":
                    results |= {
                        f"refused: {what}": refused(machines, runs, what)
                        for what in given.get("refuse", ",".join(REFUSED)).split(",")
                    }
                elif case != "delay":
                    add(machines, case)
        if "delay" in cases:
            with Machines(LABELS, delay_s=delay_s) as machines:
                add(machines, "delay")
                results["delay"]["delay_ms"] = 1000 * delay_s
                results["delay"]["alone"] = results["delay"]["steps_s"] / alone_s
                if "spread" in results:
                    results["delay"]["spread"] = results["delay"]["steps_s"] / results["spread"]["steps_s"]
    rows: list[tuple[str, ...]] = [("case", "exit code", "s", "steps, s", "after the loss, s", "x spread", "held")]
    for name, found in results.items():
        seconds = [f"{found[key]:.1f}" if key in found else "" for key in ("s", "steps_s", "after_s", "spread")]
        rows.append((name, str(found["code"]), *seconds, "yes" if found["held"] else "NO"))
    print(table(rows))
    print(json.dumps({"weights": weights, "alone_steps_s": alone_s, "cases": results}, indent=1))
    return 0 if all(found["held"] for found in results.values()) else 1


if __name__ == "__main__":
    begin(main, ["cases=refused", "refuse=directory"])
