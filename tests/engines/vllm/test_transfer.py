"""The sending side of a weight sync, with a fake engine and fake GPUs; vLLM packs and unpacks.

What real workers make of it: tests/engines/vllm/test_engine.py, and test_gpu.py on a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dataflow.errors import RunError

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

WEIGHTS = [
    ("odd", torch.arange(3, dtype=torch.bfloat16)),  # what follows would not be aligned
    ("wide", torch.arange(6.0).reshape(2, 3)),
    ("across", torch.arange(8.0).reshape(2, 4).t()),
    ("largest", torch.arange(10.0)),
]


class Engine:
    """An ``AsyncLLM`` that records its calls, with transfers between GPUs if it has workers there."""

    def __init__(self, workers: int = 0) -> None:
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="ipc") if workers else None,
            parallel_config=SimpleNamespace(world_size=workers),
        )
        self.asked: list[str] = []

    async def _note(self, what: str) -> None:
        await asyncio.sleep(0)
        self.asked.append(what)


class FileEngine(Engine):
    async def collective_rpc(self, method: str, kwargs: Any = None) -> None:
        await self._note(method)
        if kwargs:
            self.path = Path(kwargs["weights_path"])
            self.got = load_file(self.path / "model.safetensors")


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == dict(WEIGHTS).keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in WEIGHTS
    )


def send_weights(engine: Engine) -> None:
    from dataflow.engines.vllm.engine import send_weights

    asyncio.run(asyncio.wait_for(send_weights(engine, dict(WEIGHTS)), 30))


def test_a_file_is_there_while_it_is_read() -> None:
    engine = FileEngine()
    send_weights(engine)
    assert engine.asked == ["reload_weights", "refresh_head"]
    assert same(engine.got)
    assert not engine.path.exists()


def test_no_room_for_the_file() -> None:
    engine = FileEngine()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(RunError, match=r"cannot be written to .*dataflow-weights-.*; give /dev/shm more room"):
            send_weights(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.asked == [], "nothing has changed"


class Gpus:
    """GPUs in this process's memory: as much of CUDA as a packed transfer asks of it."""

    def __init__(self) -> None:
        self.at = 0
        self.buffers: dict[int, torch.Tensor] = {}

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.at = self.at, index
        yield
        self.at = before

    def properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"GPU-{index}")

    def export(self, tensor: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        self.buffers[self.at] = tensor
        # Where the real ones name the device, which the receiver overwrites by its own.
        return None, (self.at, 0, 0, 0, 0, 0, -1)

    def rebuild(self, arguments: list[int]) -> torch.Tensor:
        assert arguments[0] == arguments[6], "a worker maps the buffer of its own GPU"
        return self.buffers[arguments[0]]


class IpcEngine(Engine):
    """Its workers keep what they unpack, after a moment in which a hasty sender would pack the next chunk over it."""

    def __init__(self, gpus: Gpus, workers: int) -> None:
        super().__init__(workers)
        self.gpus = gpus
        self.open = 0
        self.got: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._note("init")
        self.packed = request.init_info["packed"]

    async def start_weight_update(self) -> None:
        await self._note("start")

    async def update_weights(self, request: Any) -> None:
        self.open += 1
        assert self.open == 1, "one update at a time"
        await self._note("update")
        await self.take(request.update_info)
        self.open -= 1

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._note("finish")

    async def take(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

        assert self.packed
        await asyncio.sleep(0.01)
        for worker, got in enumerate(self.got):
            facts = {name: info[name] for name in ("names", "shapes", "dtype_names", "tensor_sizes")}
            importer: Any = self.gpus
            got.update(packed_ipc_consumer(info["ipc_handles"], **facts, device_index=worker, importer=importer))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    from vllm.distributed.weight_transfer import packed_tensor

    gpus, empty = Gpus(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    for name, value in (
        ("device", gpus.device),
        ("get_device_properties", gpus.properties),
        ("current_stream", lambda: SimpleNamespace(synchronize=lambda: None)),
        ("ipc_collect", lambda: None),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", gpus.export)
    return gpus


@pytest.mark.parametrize(("workers", "buffer", "updates"), [(1, 1 << 20, 1), (2, 1, 4), (2, 64, 2)])
def test_each_worker_unpacks_all_from_its_own_gpu(
    workers: int, buffer: int, updates: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.engines.vllm.engine._BUFFER_BYTES", buffer)
    engine = IpcEngine(gpus, workers)
    send_weights(engine)
    assert engine.asked == ["init", "start", *["update"] * updates, "finish"]
    assert all(map(same, engine.got))
    room = sum(value.numel() * value.element_size() for _name, value in WEIGHTS)
    assert [len(held) for held in gpus.buffers.values()] == [min(room, max(buffer, 40))] * workers
    assert gpus.at == 0, "the thread is on the device that it was on"
