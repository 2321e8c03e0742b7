"""A service that dies during a run and is rebuilt: each group is used once, and none is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import StageFailed
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Carried, Hosted, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.system import clock
from dataflow.testing import check_trace
from dataflow.timeline.spans import Span, Trace
from tests.rigs.processes import left

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(240),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]

GROUPS, N, PARTS = 8, 2, 4
WIDE = 32768  # bytes a row: values above 100 kB live in the object store, not in the controller


@pytest.fixture(autouse=True)
def nothing_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No asyncio task may end with an error that was not retrieved."""
    yield
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


class Desk:
    """Scores groups one after another in the background, and keeps them only in memory, as the agent does.

    Args:
        journal: a file that outlives it.
        lives: what each of its processes does, in turn: "scores"; "half": never ends the second half of the groups;
            "dies": at its first collect; "dies in build", "hangs in build". The last one continues.
    """

    def __init__(self, journal: str, lives: Sequence[str] = ("scores",)) -> None:
        self.journal = journal
        self.note("built")
        life = sum(line["what"] == "built" for line in read(journal)) - 1
        self.life = lives[min(life, len(lives) - 1)]
        if self.life == "dies in build":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.life == "hangs in build":
            with open(f"{journal}.hangs", "w") as fifo:
                fifo.write("now")
            time.sleep(300)
        self.changed = asyncio.Condition()
        self.arrived: dict[int | str, list[int]] = {}
        self.scoring: set[asyncio.Task[None]] = set()

    def note(self, what: str, **facts: Any) -> None:
        with open(self.journal, "a") as f:
            f.write(json.dumps({"what": what, "pid": os.getpid(), **facts}) + "\n")

    def submit(self, step: int | str, samples: Batch) -> int | str:
        assert step not in self.arrived, f"{step} was submitted twice"
        self.note("submitted", step=step, groups=samples.ids)
        self.arrived[step] = []
        self.scoring.add(asyncio.create_task(self._score(step, samples.ids)))
        return step

    async def _score(self, step: int | str, groups: Sequence[int]) -> None:
        for group in groups:
            if self.life == "half" and group >= GROUPS // 2:
                return
            await asyncio.sleep(0.03)
            async with self.changed:
                self.arrived[step].append(group)
                self.changed.notify_all()

    async def collect(self, step: int | str, k: int) -> Batch:
        if self.life == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.arrived[step]) >= k)
            mine, self.arrived[step] = self.arrived[step][:k], self.arrived[step][k:]
        return scored(mine, step)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Dies of being closed."""
        os.kill(os.getpid(), signal.SIGKILL)


def wide(rows: Sequence[Any]) -> list[bytes]:
    """Bytes instead of a tensor, since importing torch would double the start of each process."""
    return [bytes(WIDE) for _ in rows]


def scored(groups: Sequence[int], step: int | str) -> Batch:
    rows = [g for g in sorted(groups) for _ in range(N)]
    return Batch(rows, {"score": [f"{step}/{g}" for g in rows], "wide": wide(rows)})


def read(journal: str | Path) -> list[dict[str, Any]]:
    with open(journal) as f:
        return [json.loads(line) for line in f]


@stage(writes="responses", on="gpu")
async def rollout(prompts, weights: Carried):
    rows = prompts.repeat(N)
    return Batch(rows.groups, {"question": rows["question"], "wide": wide(rows.groups)})


@stage(writes="ticket", on="controller", replays=True)
async def request(responses, *, desk, task):
    return desk.submit(task.step, responses)


@stage(writes="rewards", on="reward", role="collects")
async def collect(ticket, *, desk, task):
    return await desk.collect(ticket, task.take)


@stage(writes="actor", on="gpu", per_mini_batch=True)
async def use(responses, rewards, actor: Latest, *, task):
    assert responses.ids == rewards.ids
    assert list(rewards["score"]) == [f"{q}" for q in responses["question"]]
    task.mark("used", clock.now(), clock.now(), groups=rewards.ids)


@stage(writes="weights", on="gpu")
async def sync(actor): ...


@stage(writes="accuracy", on="reward", every=2)
async def validate(responses, *, desk, task):
    step = f"val:{task.step}"
    scores = await desk.collect(desk.submit(step, responses), GROUPS)
    assert scores.ids == tuple(range(GROUPS))
    return set(scores["score"]) == {f"{step}/{g}" for g in range(GROUPS)}


def prompts(step: int) -> Batch:
    return Batch(range(GROUPS), {"question": [f"{step}/{g}" for g in range(GROUPS)]})


def pipeline(path: Path, restarts: int = 2, **options: Any) -> Pipeline:
    """The training loop around a desk; validation rides along where ``lives`` is not given."""
    desk = Hosted("desk", Desk, {"journal": str(path), **options}, concurrent=True, restarts=restarts)
    stages = [rollout, request.bind(desk=desk), collect.bind(desk=desk), use, sync]
    if not options:
        stages.append(validate.bind(desk=desk))
    return Pipeline(stages, inputs=["prompts"])


class Run:
    """One run of a pipeline; ``on_span`` is called with it and each span, ``after`` with the executor at the end."""

    def __init__(
        self,
        pipeline: Pipeline,
        policy: SchedulingPolicy | None = None,
        steps: int = 1,
        on_span: Callable[[Run, Span], None] = lambda run, span: None,
        after: Callable[[RayExecutor], Awaitable[None]] | None = None,
    ) -> None:
        self.graph = expand(pipeline, policy or SchedulingPolicy(PARTS), steps, PARTS, groups=GROUPS)
        self.executor = RayExecutor(num_cpus=2)
        self.trace = Trace(meta={"resources": dict(pipeline.resources)}, sink=self._seen)
        self.on_span, self.after = on_span, after
        self.most_kept = 0
        self.used: dict[int, list[int]] = {}

    @property
    def workers(self) -> Any:
        return self.executor._hosts["desk"]

    def _seen(self, span: Span, *_inside: object) -> None:
        self.most_kept = max(self.most_kept, len(self.workers.replays))
        self.on_span(self, span)

    async def main(self) -> None:
        runner = Runner(self.graph, self.executor, inputs={"prompts": prompts}, trace=self.trace)
        try:
            async with asyncio.timeout(180):
                await self.executor.open(self.graph.pipeline)
                workers = self.workers
                await runner.run()
                assert (len(workers.replays), workers._calls, workers._restarting) == (0, set(), None)
                self.deaths = workers.deaths
                if self.after is not None:
                    await self.after(self.executor)
        finally:
            await self.executor.close()
        for mark in self.trace.marks:
            self.used.setdefault(mark.args["step"], []).extend(mark.args["groups"])


def run(*arguments: Any, **options: Any) -> Run:
    made = Run(*arguments, **options)
    asyncio.run(made.main())
    return made


def gone(pids: set[int]) -> bool:
    return not left(pids, timeout=20)


def pids(journal: Path) -> set[int]:
    return {line["pid"] for line in read(journal)}


class Killer:
    """Kills the desk once by Ray and once by a signal, each a random while after a random task ended."""

    def __init__(self, seed: int, journal: Path) -> None:
        self.dice = random.Random(seed)
        self.journal = journal
        self.kills = 0
        self.wait = self.dice.randint(1, 8)

    def __call__(self, run: Run, span: Span) -> None:
        workers = run.workers
        if self.kills == 2 or workers.deaths < self.kills or workers._restarting is not None:
            return
        self.wait -= 1
        if self.wait == 0:
            asyncio.get_running_loop().call_later(self.dice.uniform(0, 0.2), self._kill, workers)

    def _kill(self, workers: Any) -> None:
        import ray

        self.kills += 1
        self.wait = self.dice.randint(1, 12)
        if self.kills == 1:
            ray.kill(workers.actors.handles[0], no_restart=True)
        else:
            os.kill(read(self.journal)[-1]["pid"], signal.SIGKILL)


def test_killed_at_random_moments_the_run_uses_each_group_once(tmp_path, warned):
    journal, steps = tmp_path / "journal", 4
    killer = Killer(2, journal)
    done = run(pipeline(journal), preset("both", PARTS), steps, killer)
    assert killer.kills == done.deaths == 2
    assert {step: sorted(groups) for step, groups in done.used.items()} == {
        step: list(range(GROUPS)) for step in range(1, steps + 1)
    }
    check_trace(done.trace, done.graph, tolerance=0.01, busy=False)
    assert [line.split(":")[1].split(";")[0] for line in warned] == [" restart 1 of 2", " restart 2 of 2"]
    assert done.most_kept <= done.graph.max_staleness + 1
    built = [line["pid"] for line in read(journal) if line["what"] == "built"]
    assert len(set(built)) == 3
    assert gone(pids(journal))


def test_groups_that_were_returned_are_not_requested_again_and_the_next_call_repairs_an_idle_death(tmp_path, warned):
    journal = tmp_path / "journal"

    def kill_in_the_middle(run: Run, span: Span) -> None:
        if span.task == "collect[1.2]":
            os.kill(read(journal)[0]["pid"], signal.SIGKILL)

    async def kill_idle(executor: RayExecutor) -> None:
        pid = await executor.ask("desk", "pid")
        os.kill(pid, signal.SIGKILL)
        assert gone({pid})
        assert await executor.ask("desk", "pid") != pid

    made = pipeline(journal, restarts=3, lives=["half", "dies in build", "scores"])
    done = run(made, on_span=kill_in_the_middle, after=kill_idle)
    lines = read(journal)
    lives = [line["pid"] for line in lines if line["what"] == "built"]
    assert len(set(lives)) == 4
    asked = [(lives.index(line["pid"]), line["step"], line["groups"]) for line in lines if line["what"] == "submitted"]
    assert asked == [(0, 1, [0, 1, 2, 3, 4, 5, 6, 7]), (2, 1, [4, 5, 6, 7])]
    assert done.used == {1: [0, 1, 2, 3, 4, 5, 6, 7]}
    again = ", request[1] for 4 groups"
    assert warned == [
        f"'desk' died (killed, or out of memory): restart {n} of 3; rebuilding it, then running its tasks "
        f"again{again if n < 3 else ''}."
        for n in (1, 2, 3)
    ]
    facts = {span.task: span.args.get("restarted") for span in done.trace.spans if span.stage == "collect"}
    assert facts == {"collect[1.1]": None, "collect[1.2]": None, "collect[1.3]": 1, "collect[1.4]": None}
    assert gone(set(lives))


def test_a_rebuilt_service_that_dies_again_ends_the_run(tmp_path, warned):
    journal = tmp_path / "journal"
    with pytest.raises(StageFailed) as error:
        run(pipeline(journal, restarts=1, lives=["dies"]))
    assert "2 deaths of 'desk' with restarts=1; the last: the process that ran it died" in str(error.value)
    assert len(warned) == 1
    assert len(pids(journal)) == 2
    assert gone(pids(journal))


def test_an_interrupt_ends_the_rebuilding_of_a_service(tmp_path, warned):
    journal = tmp_path / "journal"
    made = Run(pipeline(journal, lives=["dies", "hangs in build"]))
    os.mkfifo(f"{journal}.hangs")
    fifo = os.open(f"{journal}.hangs", os.O_RDONLY | os.O_NONBLOCK)

    async def main() -> None:
        hangs = asyncio.Event()
        asyncio.get_running_loop().add_reader(fifo, hangs.set)
        running = asyncio.create_task(made.main())
        async with asyncio.timeout(150):
            await hangs.wait()
            asyncio.get_running_loop().remove_reader(fifo)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    try:
        asyncio.run(main())
    finally:
        os.close(fifo)
    assert len(warned) == 1
    assert len(pids(journal)) == 2
    assert gone(pids(journal))
