"""What handing on costs in a step of the real size: 1,024 prompts, 5 responses of up to 1,024 tokens each.

    python benchmarks/real_size.py [--prompts 10240] [--ranks 8] [--loaded 100000] [--long 300]

Runs the stages of GRPO on Ray, with services that sleep instead of computing (benchmarks/_emulated.py) and all else
real: batches, executor, runner, reward agent, advantages by verl. All tasks of a step run one after another, so that
nothing hides a delay. The exposed time of a step is the time in which no service works: the engine, the trainer, or the
agent from its first call to its last (for which see benchmarks/reward_agent.py). The table divides it by what happens
meanwhile; what verl computes with whole matrices, estimators and metrics, is no handing on and has lines of its own.
Also the bytes that each process reads and writes, and its memory.

``--loaded N`` measures how long N prompts of training data take to load instead, ``--long N`` the memory of the run's
own process over N steps. Prints tables and writes JSON; exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _emulated
import cloudpickle
from _emulated import memory, noting
from _run import ROOT, begin, table

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.executors.base import Done
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Hosted, Pipeline, Task
from dataflow.policy import expand, preset
from dataflow.runner import Runner
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.reward import reward_collect, reward_request
from dataflow.stages.rollout import rollout
from dataflow.stages.samples import write_samples
from dataflow.stages.sync import gather_weights, sync_weights
from dataflow.stages.update import actor_update
from dataflow.system.loopback import ray_stays_on_loopback
from dataflow.timeline.spans import Span, Trace

BOUND_S, LOAD_S, GROWTH_MB, REQUEST_B = 0.8, 10.0, 8.0, 500
"""Bounds: seconds exposed and of loading; the run's process may grow by MB, and by bytes for each reward request."""
SEEN = 1024
"""Rows that the bound holds for, in thousands of prompts: a step of more rows may take longer in proportion."""
PROMPT, LONGEST, N = 200, 1024, 5
BESIDE = ("rollout_correction", "write_samples")
"""Stages that no other one waits for: beside the path of training."""


class Counting(RayExecutor):
    """Counts what each process reads and writes through Ray's object store."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._where: dict[Any, tuple[str, int]] = {}

    def start(self, task: Task, call: Any, values: Sequence[Any]) -> None:
        host = task.stage.host
        name, ranks = (host.name, host.ranks) if host else ("controller", 1)
        self._where[task.id] = name, ranks
        self.read[name] += ranks * _bytes(values)
        super().start(task, call, values)

    async def events(self) -> Any:
        async for event in super().events():
            if isinstance(event, Done) and event.id in self._where:
                self.written[self._where.pop(event.id)[0]] += _bytes(event.values)
            yield event


def _bytes(values: Iterable[Any]) -> int:
    from ray import ObjectRef
    from ray.experimental import get_local_object_locations

    refs = [value for value in values if isinstance(value, ObjectRef)]
    return sum(found.get("object_size") or 0 for found in get_local_object_locations(refs).values())


def pipeline_of(options: argparse.Namespace, samples: str) -> Pipeline:
    """Returns the stages of pipelines/gsm8k_grpo.py with a KL loss, on services that sleep."""
    sys.path.insert(0, str(ROOT))
    from pipelines.gsm8k_grpo import Config

    config = Config()
    config.algorithm.use_kl_loss = True
    config.trainer.max_tokens_per_gpu = 32768
    scale = options.seconds
    engine = Hosted("rollout", _emulated.Engine, {"seconds": 3 * scale, "longest": options.longest}, concurrent=True)
    how = {"seconds": (2 * scale, scale), "options": config.trainer, "algorithm": config.algorithm}
    trainer = Hosted("trainer", _emulated.Trainer, how, ranks=options.ranks, concurrent=True)
    agent = Hosted("reward", _emulated.rewarding, concurrent=True)
    sampling = Sampling(n=N, max_tokens=options.longest)
    stages = [
        rollout.bind(engine=engine, sampling=sampling, seed=0),
        # One after another, so that nothing hides what a task costs, and processes do not compete for few cores.
        replace(reward_request.bind(agent=agent), after=("old_log_prob", "ref_log_prob")),
        *log_prob_stages(config.algorithm, trainer=trainer),
        reward_collect.bind(agent=agent),
        noting(advantage_stage(config.algorithm)),
        noting(actor_update.bind(trainer=trainer, groups=options.prompts)),
        gather_weights.bind(trainer=trainer),
        sync_weights.bind(engine=engine),
        write_samples.bind(every=1, directory=samples, most=2048),
    ]
    return Pipeline(stages, ["prompts"], {"gpu": 1, "reward": None, "controller": 1, "io": 1})


def prompts(count: int, tokens: int) -> Batch:
    """Returns the prompts of a step, as ``data.prompts`` does."""
    text = "Tom has 12 apples and buys 7 more. " * (tokens // 10)
    return Batch(
        range(count),
        {
            "raw_prompt": [[{"role": "user", "content": text}] for _ in range(count)],
            "prompt_ids": [[1 + row % 7] * max(1, tokens - row % (tokens // 2)) for row in range(count)],
            "data_source": ["openai/gsm8k"] * count,
            "ground_truth": [str(row) for row in range(count)],
            "extra_info": [{"index": row, "split": "train", "question": text} for row in range(count)],
        },
    )


async def measure(options: argparse.Namespace, samples: str) -> dict[str, Any]:
    """Runs the steps; returns the exposed time of each but the first, by cause, and bytes and memory by process."""
    pipeline = pipeline_of(options, samples)
    graph = expand(pipeline, preset(options.policy, 4), options.steps, 4, groups=options.prompts)
    executor = Counting(num_cpus=4)
    trace = Trace()
    driver: list[float] = []
    given = prompts(options.prompts, PROMPT)
    await executor.open(pipeline)
    try:
        runner = Runner(
            graph,
            executor,
            inputs={"prompts": lambda step: given},
            trace=trace,
            origin=0.0,
            on_step=lambda step, metrics: driver.append(memory()["now"]),
        )
        await runner.run()
        reports = {name: await executor.ask(name, "report") for name in ("rollout", "trainer", "reward")}
    finally:
        await executor.close()
    worked = sorted(piece for times, _memory in reports.values() for piece in times)
    steps = [by_cause(trace.spans, worked, step) for step in range(2, options.steps + 1)]
    return {
        "exposed": steps,
        "bytes": {
            name: {"read": executor.read[name] / options.steps, "written": executor.written[name] / options.steps}
            for name in sorted({*executor.read, *executor.written})
        },
        "memory": {**{name: found for name, (_times, found) in reports.items()}, "driver": memory()},
        "driver_mb": driver,
    }


def by_cause(spans: Sequence[Span], worked: Sequence[tuple[float, float]], step: int) -> dict[str, float]:
    """Returns the seconds of a step in which no service worked, by the stage that ran then.

    A step lasts from the end of the sync before it to the end of its own.
    """
    begin, end = (max(s.end for s in spans if s.stage == "sync_weights" and s.step == at) for at in (step - 1, step))
    mine = [s for s in spans if s.stage not in BESIDE]
    verl = [piece for s in mine for piece in s.args.get("verl", ())]
    pieces = [(s.begin, s.end) for s in mine] + [*worked, *verl]
    edges = sorted({begin, end, *(t for piece in pieces for t in piece)})
    found: dict[str, float] = defaultdict(float)
    for left, right in itertools.pairwise(edges):
        middle = (left + right) / 2
        if not begin <= middle <= end or any(b <= middle <= e for b, e in worked):
            continue
        name = next((s.stage for s in mine if s.begin <= middle <= s.end), _before(mine, middle))
        found[f"verl in {name}" if any(b <= middle <= e for b, e in verl) else name] += right - left
    return dict(found)


def _before(spans: Sequence[Span], at: float) -> str:
    """Returns what the time between two spans is called: after the task that starts next."""
    following = min((s for s in spans if s.begin >= at), key=lambda s: s.begin, default=None)
    return f"-> {following.stage}" if following else "->"


def report(found: Mapping[str, Any], options: argparse.Namespace) -> bool:
    steps = found["exposed"]
    causes = sorted(
        {name for each in steps for name in each},
        key=lambda name: (name.startswith("->"), name.startswith("verl"), name),
    )
    typical = {name: statistics.median(each.get(name, 0.0) for each in steps) for name in causes}
    total = statistics.median(sum(s for name, s in each.items() if not name.startswith("verl")) for each in steps)
    bound = BOUND_S * max(1.0, options.prompts / SEEN)
    lines = [("exposed, ms a step", "")]
    lines += [(name, f"{1000 * seconds:.0f}") for name, seconds in typical.items()]
    between = sum(seconds for name, seconds in typical.items() if name.startswith("->"))
    lines += [("between tasks (->)", f"{1000 * between:.0f}"), ("all but verl's", f"{1000 * total:.0f}")]
    lines += [("bound", f"{1000 * bound:.0f}")]
    print(table(lines))
    print()
    lines = [("process", "reads MB a step", "writes MB a step", "own memory MB", "peak with shared MB")]
    for name in sorted({*found["bytes"], *found["memory"]}):
        passed, held = found["bytes"].get(name, {}), found["memory"].get(name, {})
        each = [passed.get("read"), passed.get("written"), held.get("now"), held.get("peak")]
        units = [1e6, 1e6, 1, 1]
        lines.append((name, *(f"{n / u:.0f}" if n is not None else "" for n, u in zip(each, units, strict=True))))
    print(table(lines))
    found["exposed_s"], found["bound_s"] = total, bound  # type: ignore[index]
    return bool(total <= bound)


def flat(found: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Prints how the memory of the run's own process grew over the steps after the first tenth."""
    driver = found["driver_mb"]
    early = statistics.median(driver[len(driver) // 10 : len(driver) // 5])
    late = statistics.median(driver[-len(driver) // 10 :])
    print(
        f"\nmemory of the run's process: {early:.1f} MB after a tenth of {len(driver)} steps, {late:.1f} MB at the end"
    )
    requests = 0.8 * len(driver) * options.prompts * N  # of the steps between the middles of both stretches
    return bool(late - early <= GROWTH_MB + requests * REQUEST_B / 2**20)


def load(count: int) -> float:
    """Returns the seconds that it takes to read, check and tokenize rows of a parquet file, as a run does."""
    import pandas

    from dataflow.models.tiny import tiny_model

    sys.path.insert(0, str(ROOT))
    from dataflow.data.prompts import load_prompts, read_problems
    from pipelines.gsm8k_grpo import Config

    text = (
        "Tom has 12 apples and buys 7 more. He gives 5 to Ann, who had 3 pears, and then counts all that he has left. "
    )
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": text * 3 + str(row)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(row)},
            "extra_info": {"index": row, "split": "train"},
        }
        for row in range(count)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        files = {name: Path(temporary, f"{name}.parquet") for name in ("train", "val")}
        pandas.DataFrame(rows).to_parquet(files["train"])
        pandas.DataFrame(rows[:64]).to_parquet(files["val"])
        config = Config(
            data={**{name: str(path) for name, path in files.items()}, "max_prompt_length": 512, "prompts": 1024},
            model={"path": str(tiny_model())},
        )
        begin = time.perf_counter()
        train, _val = load_prompts(config, *read_problems(config.data))
        train.batch(1)
        return time.perf_counter() - begin


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1024, help="of a step, with 5 responses each")
    parser.add_argument("--longest", type=int, default=LONGEST, help="response, in tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an update; log-probs take twice that")
    parser.add_argument("--policy", default="baseline")
    parser.add_argument("--loaded", type=int, help="measure the loading of as many prompts instead")
    parser.add_argument("--long", type=int, help="measure the memory of the run's process over as many steps instead")
    parser.add_argument("-o", dest="out", default="real_size.json")
    options = parser.parse_args(arguments)
    ray_stays_on_loopback()  # before verl imports Ray
    cloudpickle.register_pickle_by_value(_emulated)
    if options.loaded:
        seconds = load(options.loaded)
        print(f"{options.loaded:,} prompts are loaded in {seconds:.1f} s (bound: {LOAD_S:.0f} s)")
        found: dict[str, Any] = {"prompts": options.loaded, "seconds": seconds, "bound_s": LOAD_S}
        held = seconds <= LOAD_S
    else:
        if options.long:
            options = SimpleNamespace(**{**vars(options), "steps": options.long, "seconds": 0.0})
        with tempfile.TemporaryDirectory() as samples:
            found = asyncio.run(measure(options, samples))
        held = report(found, options)
        held = flat(found, options) if options.long else held
    Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    begin(main, ["--prompts", "8", "--longest", "16", "--steps", "2", "--seconds", "0.01"])
