"""Kills one of a run's processes at a random moment, and checks how the run ends.

    python benchmarks/kills.py [times=10] [seed=0] [victims=raylet,judge] [engines=hf,vllm] [out=kills.json]

Kills each process of a short run with SIGKILL, ``times`` times, and prints a table, then JSON. A run ends well if it
finishes (exit code 0) or prints one sentence (exit code 1 or 130), and if no process and no shared memory of it is left
LEFT_S after its end. Exits with 1 if a run does not end well. Only descendants of the run are killed, so other runs and
other Ray clusters on the machine are not affected.

The victims: ``command`` is the process that the user started, ``driver`` the process below it that runs the pipeline;
``rollout`` is the engine, ``reward`` the agent. A killed command cannot print anything; its run must still end.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import PIPELINE, ROOT, begin, parsed, refuse, table, whole

VICTIMS = ("command", "driver", "raylet", "gcs", "trainer", "rollout", "reward", "judge", "controller")
ENGINES = ("hf", "vllm")
LEFT_S = 5.0
MAPS_EVERY = 10  # looks, of 0.1 s each
DEADLINE_S = 300.0
SIZES = ("steps=2", "data.prompts=4", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200", "val.every=0")
SMALL = (*SIZES, "trainer.mini_batches=2", "judge.latency=uniform:0.1:0.5", "judge.time_scale=1", "ray.num_cpus=2")
# Lines that a run prints during normal operation and recovery.
PROGRESS = re.compile(
    r"(step \d+/|starting workers|evaluating|training|making the tiny model|writing the model|stopped after"
    r"|'?\w.* died .*restart \d)"
)
# Ray's own words about the death of its processes, which no public setting turns off.
RAYS = re.compile(r"(\x1b\[\d+m)?\(raylet\)|\[\d{4}-\d\d-\d\d [\d:,]+ E ")
SENTENCE = re.compile(r"(\w+(Error|Failed|Lost)|interrupted)\b")


class Run:
    """A run under observation: all processes that ever descended from it, and the shared memory they used.

    Args:
        runs: directory of runs.
        name: of the run.
        keys: its ``key=value`` arguments.
        resumes: whether it resumes the run of that name.
    """

    def __init__(self, runs: Path, name: str, keys: list[str], *, resumes: bool = False) -> None:
        words = ["resume", str(runs / name)] if resumes else ["run", str(PIPELINE), f"runs={runs}", f"name={name}"]
        command = [sys.executable, "-m", "dataflow", *words, *keys]
        self.begin = time.monotonic()
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # A process group of its own, so that Ctrl-C ends only the benchmark, which then ends the run.
        self.process = subprocess.Popen(command, stdout=self._out, stderr=self._out, cwd=ROOT, process_group=0)
        self.directory = runs / name
        self.seen: dict[int, psutil.Process] = {}
        self.memory: set[str] = set()
        self.appeared: dict[str, float] = {}
        self._news = threading.Condition()
        self._ended = False
        self._looks = 0
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._ended:
            self.look()
            if self.process.poll() is not None:
                with self._news:
                    self._news.notify_all()
            time.sleep(0.1)

    def look(self) -> None:
        """Records the run's present processes, including orphans that were seen before."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
            if process.pid == self.process.pid and process.pid not in self.seen:
                self._note(process)
        left = [process.pid for process in self.seen.values() if process.is_running()]
        while left:
            for process in children.pop(left.pop(), []):
                self._note(process)
                left.append(process.pid)
        self._looks += 1
        if self._looks % MAPS_EVERY == 0:
            for process in list(self.seen.values()):
                self._map(process)

    def _note(self, process: psutil.Process) -> None:
        new = process.pid not in self.seen
        self.seen.setdefault(process.pid, process)
        try:
            what = self._what(process)
        except psutil.Error:
            return
        if what and (new or what not in self.appeared):
            self._map(process)
            with self._news:
                self.appeared.setdefault(what, time.monotonic() - self.begin)
                self._news.notify_all()

    def _map(self, process: psutil.Process) -> None:
        """Records the shared memory of a process; reading the maps of a large one takes milliseconds."""
        with suppress(psutil.Error):
            self.memory |= {m.path.split(" ")[0] for m in process.memory_maps() if m.path.startswith("/dev/shm/")}

    def _what(self, process: psutil.Process) -> str:
        if process.pid == self.process.pid:
            return "command"
        name, words = process.name(), " ".join(process.cmdline())
        if process.ppid() == self.process.pid and "-m dataflow " in words:
            return "driver"
        if title := re.match(r"ray::(\w+)", words):
            return title[1].lower()
        return {"raylet": "raylet", "gcs_server": "gcs"}.get(name, "judge" if "judge.server" in words else "")

    def victim(self, what: str) -> psutil.Process | None:
        """Returns a process as soon as one exists, or None if the run ends before."""
        with self._news:
            self._news.wait_for(lambda: what in self.appeared or self.process.poll() is not None, DEADLINE_S)
        return self.alive(what)

    def alive(self, what: str) -> psutil.Process | None:
        """Returns a process that exists now."""
        for process in list(self.seen.values()):
            try:
                if process.is_running() and self._what(process) == what:
                    return process
            except psutil.Error:
                continue
        return None

    def end(self) -> dict[str, Any]:
        """Waits for the end; returns how the run ended, what it printed, and what it left behind."""
        hung = False
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            hung = True
        took = time.monotonic() - self.begin
        self.look()
        end = time.monotonic() + LEFT_S
        _gone, left = psutil.wait_procs(list(self.seen.values()), timeout=LEFT_S)
        left = [process for process in left if not self._ended_unreaped(process)]
        memory = {path for path in self.memory if os.path.exists(path)}
        time.sleep(max(0.0, end - time.monotonic()) if memory else 0.0)
        memory = {path for path in memory if os.path.exists(path)}
        self._ended = True
        self._watcher.join()
        names = sorted({self._title(process) for process in left})
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        self._out.seek(0)
        said = [line for line in self._out.read().splitlines() if line.strip()]
        return {
            "code": None if hung else self.process.returncode,
            "took_s": round(took, 1),
            "said": [line for line in said if not (PROGRESS.match(line) or RAYS.match(line))],
            "restarts": sum("restart" in line and " died " in line for line in said),
            "status": self._status(),
            "left": names,
            "shared_memory": sorted(memory),
        }

    def _ended_unreaped(self, process: psutil.Process) -> bool:
        """Whether nothing is left of a process but its exit code, which the system's init has not taken yet."""
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _title(self, process: psutil.Process) -> str:
        try:
            return " ".join(process.cmdline())[:60] or process.name()
        except psutil.Error:
            return f"process {process.pid}, which ended after {LEFT_S:g} s"

    def _status(self) -> str | None:
        try:
            return str(json.loads((self.directory / "summary.json").read_text())["status"])
        except (OSError, ValueError, KeyError):
            return None


def verdict(found: dict[str, Any], victim: str) -> str:
    """Returns how a run ended: "finished", "one sentence", or what went wrong."""
    if found["left"] or found["shared_memory"]:
        return "left something behind"
    code, said = found["code"], found["said"]
    if code is None:
        return "hung"
    if victim == "command":
        return "ended in silence" if code == -9 else f"exit code {code}"
    if code == 0:
        return "finished" if found["status"] == "finished" else f"exit code 0, {found['status']}"
    # An indented line belongs to the sentence above it: the history of a task.
    heads = [line for line in said if not line[0].isspace()]
    # A run killed before it has a directory has no status; one killed after its summary was written is finished.
    if code in (1, 130) and len(heads) == 1 and SENTENCE.match(heads[0]) and found["status"] != "running":
        return "one sentence"
    return f"exit code {code}, {found['status']}, {len(heads)} lines"


GOOD = ("finished", "one sentence", "ended in silence")


def measure(runs: Path, times: int, seed: int, victims: list[str], engines: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the result of each kill."""
    draw = random.Random(seed)
    for engine in engines:
        keys = [*SMALL, f"engine.rollout={engine}"]
        untouched = Run(runs, f"{engine}-untouched", keys)
        found = untouched.end()
        if found["code"]:
            sys.exit(f"a run without a kill ended with exit code {found['code']}: {found['said']}")
        # The trainer, the judge and Ray are the same processes under each engine.
        for victim in victims if engine == engines[0] else [v for v in victims if v == "rollout"]:
            span = found["took_s"] - untouched.appeared[victim]
            for number in range(times):
                for attempt in range(5):
                    run = Run(runs, f"{engine}-{victim}-{number}-{attempt}", keys)
                    after = draw.uniform(0.0, span)
                    process = run.victim(victim)
                    try:
                        run.process.wait(after)
                    except subprocess.TimeoutExpired:
                        process = run.alive(victim) or process
                    hit = process is not None and process.is_running() and run.process.poll() is None
                    at = time.monotonic() - run.begin
                    if hit and process is not None:
                        process.kill()
                    result = run.end()
                    if hit:
                        break
                    if result["code"]:
                        sys.exit(f"a run that was not killed ended with exit code {result['code']}: {result['said']}")
                    if victim in run.appeared:  # the machine is faster than it was when the span was measured
                        span = min(span, result["took_s"] - run.appeared[victim])
                else:
                    sys.exit(f"'{victim}' had ended before it was killed, five times.")
                name = f"{victim} ({engine})" if victim == "rollout" else victim
                row = {"victim": name, "at_s": round(at, 1), "verdict": verdict(result, victim), **result}
                print(f"{name} at {at:.1f} s: {row['verdict']}", file=sys.stderr, flush=True)
                yield row


def main(arguments: list[str]) -> int:
    defaults = {"times": "10", "seed": "0", "victims": ",".join(VICTIMS), "engines": ",".join(ENGINES), "out": ""}
    use = f"use times=N seed=N out=FILE engines= of {','.join(ENGINES)} victims= of {','.join(VICTIMS)}"
    given = parsed(arguments, defaults, use)
    times, seed, out = whole("times", given["times"]), whole("seed", given["seed"], 0), given["out"]
    victims, engines = given["victims"].split(","), given["engines"].split(",")
    if not (set(victims) <= set(VICTIMS) and set(engines) <= set(ENGINES)):
        refuse(f"{use}.")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as runs:
        for row in measure(Path(runs), times, seed, victims, engines):
            rows.append(row)
            if out:  # so that a stopped benchmark keeps its results
                Path(out).write_text(json.dumps(rows, indent=1) + "\n")
    lines: list[tuple[str, ...]] = [("killed", "times", "finished", "one sentence", "otherwise", "seconds", "said")]
    for name in dict.fromkeys(row["victim"] for row in rows):
        own = [row for row in rows if row["victim"] == name]
        count = {good: sum(row["verdict"] == good for row in own) for good in GOOD}
        other = "; ".join(sorted({row["verdict"] for row in own} - set(GOOD))) or "-"
        heads = [line for row in own for line in row["said"] if SENTENCE.match(line)]
        sentence = str(count["one sentence"] + count["ended in silence"])
        slowest = f"{max(row['took_s'] - row['at_s'] for row in own):.1f}"
        lines.append((name, str(len(own)), str(count["finished"]), sentence, other, slowest, (heads or ["-"])[0][:80]))
    print(table(lines))
    print("seconds: maximum from the kill to the end; a killed command prints nothing, and counts as one sentence")
    print(json.dumps(rows, indent=1))
    return 0 if all(row["verdict"] in GOOD for row in rows) else 1


if __name__ == "__main__":
    begin(main, ["times=1", "victims=driver", "engines=hf"])
