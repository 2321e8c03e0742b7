"""The trainer's state: copied, written, loaded and gone on from, at one and two ranks."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.engines.verl.model import digest
from dataflow.engines.verl.state import Checkpointed, read_weights
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.errors import ConfigError
from tests.engines.verl.models import build, largest_difference, responses, save, scored
from tests.rigs.ranks import RankHost

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

OPTIONS = {"micro_batch_size": 2, "warmup_steps": 4}
DEADLINE_S = 180


def step(trainer: VerlTrainer, seed: int) -> list[float]:
    """Takes a training step; returns its learning rate, and a random number of each generator."""
    rate = trainer.update(scored(trainer, responses(8, seed), seed), last=True)["actor/lr"]
    return [rate, torch.rand(1).item(), float(np.random.rand()), random.random()]


def after(trainer: VerlTrainer, seeds: list[int]) -> dict[str, Any]:
    """Takes steps; returns what they find and leave."""
    before = trainer.digest()
    drawn = [step(trainer, seed) for seed in seeds]
    steps = [float(one["step"]) for one in trainer.worker.engine.optimizer.state.values()]
    return {
        "before": before,
        "drawn": drawn,
        "steps": steps,
        "digest": trainer.digest(),
        "weights": trainer.weights(),
    }


def saved(trainer: VerlTrainer, directory: Path) -> list[dict[str, Any]]:
    """Saves before the first step and after two; returns the first two steps and the three after them."""
    save(trainer, directory / "fresh")
    first = after(trainer, [0, 1])
    save(trainer, directory / "second")
    return [first, after(trainer, [2, 3, 4])]


def loaded(trainer: VerlTrainer, directory: Path) -> list[dict[str, Any]]:
    """Loads what :func:`saved` saved, the later one first; returns the same steps."""
    np.random.seed(7)
    random.seed(7)
    trainer.load(str(directory / "second"))
    later = after(trainer, [2, 3, 4])
    trainer.load(str(directory / "fresh"))
    return [after(trainer, [0, 1]), later]


class Held:
    """Holds the writes of the last rank: before their first byte, or after their last.

    Attributes:
        reached: set where a write is held.
        go: lets it continue.
    """

    def __init__(self, trainer: VerlTrainer, *, at_end: bool) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._trainer: Checkpointed = trainer
        self._write: Callable[..., None] = trainer._write
        self._at_end = at_end
        self.holds = trainer.rank == trainer.world - 1
        if self.holds:
            self._trainer._write = self._held  # type: ignore[method-assign]

    def _held(self, *words: Any) -> None:
        if self._at_end:
            self._write(*words)
        self.reached.set()
        assert self.go.wait(DEADLINE_S)
        if not self._at_end:
            self._write(*words)

    def release(self) -> None:
        self.go.set()
        self._trainer._write = self._write  # type: ignore[method-assign]


def overlapped(trainer: VerlTrainer, directory: Path) -> bool:
    """Trains between a snapshot and the files of its last rank, while the others wait for these; returns it worked."""
    held = Held(trainer, at_end=False)

    async def work() -> None:
        step(trainer, 0)
        before = trainer.digest()
        assert await trainer.snapshot(wait=False)
        step(trainer, 1)
        writing = asyncio.create_task(trainer.write(str(directory / "overlapped")))
        await asyncio.sleep(0)
        if held.holds:
            assert await asyncio.to_thread(held.reached.wait, DEADLINE_S)
        step(trainer, 2)
        assert not writing.done()
        now = trainer.digest()  # all ranks have trained
        held.release()
        await writing
        found, _ = read_weights(directory / "overlapped")
        # A tied weight is one parameter, but has two names in the files.
        assert all(torch.equal(found.pop(name), found["model.embed_tokens.weight"]) for name in set(found) - names)
        assert digest(found) == before != now

    names = {name for name, _ in trainer.worker.engine.module.named_parameters()}
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
    return True


def busy(trainer: VerlTrainer, directory: Path) -> list[bool]:
    """Asks for snapshots while the last rank alone still writes, and after that; returns the answers."""
    held = Held(trainer, at_end=True)

    async def work() -> list[bool]:
        answers = [await trainer.snapshot(wait=False)]
        writing = asyncio.create_task(trainer.write(str(directory / "busy")))
        if held.holds:
            await asyncio.sleep(0)
            assert await asyncio.to_thread(held.reached.wait, DEADLINE_S)
        else:
            await writing
        answers.append(await trainer.snapshot(wait=False))
        waiting = asyncio.create_task(trainer.snapshot(wait=True))
        if held.holds:
            await asyncio.sleep(0)
            assert not waiting.done()
            held.release()
        answers.append(await waiting)
        await writing
        await trainer.settle()
        return answers

    return asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def full(trainer: VerlTrainer, directory: Path) -> bool:
    """Fails writes on the disk of the last rank alone, at its first and at a later file; then saves on a sound one."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (100, 20_000):
        if trainer.rank == trainer.world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited[1]))
        try:
            with pytest.raises(OSError, match=str(directory)) as failed:
                save(trainer, directory / f"full-{most}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert failed.value.errno
        step(trainer, most)
    save(trainer, directory / "sound")
    now = trainer.digest()
    trainer.load(str(directory / "sound"))
    return trainer.digest() == now


def refused(trainer: VerlTrainer, directory: Path) -> bool:
    """Loads what was saved with another model."""
    before = trainer.digest()
    with pytest.raises(ConfigError, match="not those that the run began with"):
        trainer.load(str(directory / "second"))
    return trainer.digest() == before


def stuck(trainer: VerlTrainer, directory: Path) -> bool:
    """Leaves a write that never ends, at which the process must exit all the same.

    For the inline executor, and so for one rank: Ray kills the processes of several.
    """
    held = Held(trainer, at_end=False)
    held.go.wait = lambda timeout=None: threading.Event().wait()  # type: ignore[method-assign]

    async def work() -> bool:
        assert await trainer.snapshot(wait=False)
        writing = asyncio.create_task(trainer.write(str(directory / "stuck")))
        await asyncio.sleep(0)
        return not writing.done()

    return asyncio.run(work())


JOBS: dict[str, Callable[[VerlTrainer, Path], Any]] = {
    job.__name__: job for job in (saved, loaded, overlapped, busy, full, refused, stuck)
}


def be_a_rank(out: str, *jobs: str) -> None:
    """Runs jobs with one trainer, and with a new one from each that says something of a start."""
    results: list[Any] = []
    trainer: Any = None
    for port, name, directory in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        if name in ("saved", "loaded", "refused"):
            if trainer is not None:
                trainer.close()
            os.environ["MASTER_PORT"] = port
            trainer = build(Path(directory) / "model", **OPTIONS)
        results.append(JOBS[name](trainer, Path(directory)))
    torch.save(results, out)


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(ranks: RankHost, tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """Results of each rank by world size and job; ``other`` is :func:`loaded` with what the other world saved."""
    from transformers import AutoModelForCausalLM

    places: dict[Any, Path] = {name: tmp_path_factory.mktemp(f"state-{name}") for name in (1, 2, "refused")}
    for world in (1, 2):
        (places[world] / "model").symlink_to(tiny_qwen)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(places["refused"] / "model")
    (places["refused"] / "second").symlink_to(places[1] / "second")

    def run(world: int, *jobs: tuple[str, str, Any]) -> Ranks:
        """Runs (name of the result, job, place), one after another."""
        out = tmp_path_factory.mktemp("out")
        found = ranks.run(__name__, [(job, places[place]) for _, job, place in jobs], world, out)
        return [dict(zip((name for name, _, _ in jobs), rank, strict=True)) for rank in found]

    one = run(1, ("saved", "saved", 1), ("loaded", "loaded", 1), ("refused", "refused", "refused"))
    trains = [(job, job, 2) for job in ("saved", "overlapped", "busy", "full", "loaded")]
    two = run(2, *trains, ("other", "loaded", 1))
    last = run(1, ("other", "loaded", 2), ("overlapped", "overlapped", 1), ("stuck", "stuck", 1))
    return {1: [one[0] | last[0]], 2: two}


@pytest.mark.timeout(700)  # the first one waits for the processes of all
@pytest.mark.parametrize("world", [1, 2])
def test_a_loaded_trainer_continues_as_the_saved_one(results: dict[int, Ranks], world: int) -> None:
    for rank in results[world]:
        for mine, again in zip(rank["saved"], rank["loaded"], strict=True):
            assert {**mine, "weights": None} == {**again, "weights": None}
        first, later = rank["loaded"]
        assert first["before"] != first["digest"] == later["before"] != later["digest"]
        assert set(first["steps"]) == {2.0}
        assert set(later["steps"]) == {5.0}
        rates = [found[0] for found in first["drawn"] + later["drawn"]]
        assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


@pytest.mark.parametrize(("world", "other"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_continues(results: dict[int, Ranks], world: int, other: int) -> None:
    saved_there, loaded_here = results[other][0]["saved"], results[world][0]["other"]
    for there, here in zip(saved_there, loaded_here, strict=True):
        assert here["before"] == there["before"], "the weights are the same bit for bit"
        assert here["steps"][0] == there["steps"][0]
        assert [found[0] for found in here["drawn"]] == [found[0] for found in there["drawn"]]
        assert 0 < largest_difference(here["weights"], there["weights"]) < 1e-4
    assert len({rank["other"][1]["digest"] for rank in results[world]}) == 1


def test_updates_go_on_while_an_older_copy_is_written(results: dict[int, Ranks]) -> None:
    assert all(rank["overlapped"] for rank in results[1] + results[2])


def test_there_is_no_copy_while_any_rank_still_writes(results: dict[int, Ranks]) -> None:
    assert [rank["busy"] for rank in results[2]] == [[True, False, True]] * 2


def test_a_full_disk_is_an_error_on_all_ranks_and_the_next_write_succeeds(results: dict[int, Ranks]) -> None:
    assert [rank["full"] for rank in results[2]] == [True, True]


def test_another_model_is_refused(results: dict[int, Ranks]) -> None:
    assert results[1][0]["refused"]


def test_a_write_that_hangs_does_not_keep_the_process(results: dict[int, Ranks]) -> None:
    assert results[1][0]["stuck"]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A trainer of one weight, with its state and ``train(value)``, which sets the weight."""
    import torch.distributed as dist

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        module = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(module.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
        engine = SimpleNamespace(module=module, optimizer=optimizer, lr_scheduler=scheduler)

        def train(value: float) -> None:
            with torch.no_grad():
                module.weight.fill_(value)

        yield SimpleNamespace(state=Checkpointed(engine, str(tmp_path / "model")), train=train)
    finally:
        dist.destroy_process_group()


def test_a_copy_whose_turn_on_the_disk_has_not_come_stays(trained: SimpleNamespace, tmp_path: Path) -> None:
    state = trained.state

    async def work() -> None:
        trained.train(1.0)
        assert await state.snapshot(wait=False)
        trained.train(2.0)
        assert not await state.snapshot(wait=False)
        last = asyncio.create_task(state.snapshot(wait=True))
        await asyncio.sleep(0)
        assert not last.done()
        await state.write(str(tmp_path / "first"))
        assert await last
        trained.train(3.0)
        await state.write(str(tmp_path / "last"))
        # One that is given up makes room.
        assert await state.snapshot(wait=False)
        await state.settle()
        trained.train(5.0)
        assert await state.snapshot(wait=True)
        await state.write(str(tmp_path / "next"))

    asyncio.run(asyncio.wait_for(work(), 60))
    found = [float(read_weights(tmp_path / name)[0]["weight"]) for name in ("first", "last", "next")]
    assert found == [1.0, 2.0, 5.0]
