"""One copy of the trainer's state at a time: the next one waits, or is left out, until it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataflow.errors import DataflowError
from dataflow.graph import TaskInfo
from dataflow.stages.checkpoint import FAILED, _copy_first, write_checkpoint

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A trainer of one weight, with its state and ``train(value)``, which sets the weight."""
    import torch
    import torch.distributed as dist

    from dataflow.engines.verl.state import TrainerState

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

        yield SimpleNamespace(state=TrainerState(engine, str(tmp_path / "model")), train=train)
    finally:
        dist.destroy_process_group()


def saved(directory: Path) -> float:
    from dataflow.engines.verl.state import full_weights

    return float(full_weights(directory)["weight"])


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

    asyncio.run(asyncio.wait_for(work(), 60))
    assert [saved(tmp_path / "first"), saved(tmp_path / "last")] == [1.0, 2.0]


def test_a_copy_that_is_given_up_makes_room(trained: SimpleNamespace, tmp_path: Path) -> None:
    state = trained.state

    async def work() -> None:
        assert await state.snapshot(wait=False)
        await state.settle()
        with pytest.raises(DataflowError, match="call snapshot first"):
            await state.write(str(tmp_path / "none"))
        trained.train(5.0)
        assert await state.snapshot(wait=True)
        await state.write(str(tmp_path / "next"))

    asyncio.run(asyncio.wait_for(work(), 60))
    assert saved(tmp_path / "next") == 5.0


class Full:
    """A store on a disk on which no directory can be made."""

    def begin(self, step: int) -> Path:
        raise OSError(28, "No space left on device", f"step_{step:06}")


def test_a_directory_that_cannot_be_made_costs_one_checkpoint(trained: SimpleNamespace, tmp_path: Path) -> None:
    state = trained.state
    state.rank = 0

    async def save(step: int) -> dict[str, float]:
        task = TaskInfo(step, "write_checkpoint")
        common = {"service": state, "store": Full(), "steps": 9}
        snapshot = await _copy_first(fields=(), task=task, **common)
        assert snapshot is not None
        await write_checkpoint(snapshot, folder="trainer", task=task, **common)
        return task.metrics

    async def work() -> None:
        for step in (1, 2):
            assert (await save(step))[FAILED] == 1.0
        assert await state.snapshot(wait=False), "none is left that was not written"

    asyncio.run(asyncio.wait_for(work(), 60))
