"""The trainer's state in checkpoints: copied to CPU memory, then written while training continues.

    snapshot ─▶ copy in CPU memory ─▶ write: a thread, with a gloo group of its own ─▶ DIRECTORY

torch.distributed.checkpoint writes all of it: weights and optimizer by parameter name and in shards, so that another
number of ranks can load them; the LR scheduler, the model's hash and peft's configuration once; the random state of
each rank.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import hashlib
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from dataflow.errors import ConfigError, DataError, DataflowError

ADAPTER = "default"
"""The name of a LoRA adapter, peft's own. A checkpoint holds the adapter alone: the frozen weights are the model's."""
HEADS = ("score", "classifier")
"""Names of the layer of a value model that computes the values, in transformers' models; it is trained as a whole."""
_WEIGHTS, _OPTIMIZER, _SHARED, _RANDOM = "model", "optimizer", "shared", "random"


class Checkpointed:
    """A trained model whose state can be copied, written and loaded; every rank makes the same calls.

    ``model`` is the directory of the initial weights: a checkpoint of another model is refused.
    """

    def __init__(self, engine: Any, model: str) -> None:
        self._engine, self._model = engine, model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # The writer's collectives run beside those of training, so they need a group of their own.
        self._group = dist.new_group(backend="gloo")
        self._control = dist.new_group(backend="gloo")
        self._staged: dict[str, Any] | None = None
        self._idle = asyncio.Event()
        """Set while no copy waits to be written or is being written."""
        self._idle.set()

    async def snapshot(self, wait: bool) -> bool:
        """See :meth:`dataflow.engines.base.Trainer.snapshot`."""
        # A rank may finish before the others, so all of them check again together.
        while self._any(not self._idle.is_set()):
            if not wait:
                return False
            await self._idle.wait()
        module, optimizer = self._engine.module, self._engine.optimizer
        # If no step was taken yet, reading the optimizer's state would take one.
        state = _copied(self._present(stepped=bool(optimizer.state)))
        state[f"{_RANDOM}_{self.rank}"] = pickle.dumps(_random_state())
        adapter = module.peft_config[ADAPTER] if hasattr(module, "peft_config") else None
        state[_SHARED] = {"lr_scheduler": self._engine.lr_scheduler.state_dict(), "adapter": adapter}
        self._staged = state
        self._idle.clear()
        return True

    async def write(self, directory: str) -> None:
        """See :meth:`dataflow.engines.base.Trainer.write`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise DataflowError("trainer: there is no snapshot to write; call snapshot first.")
        writing = _in_thread(lambda: self._write(Path(directory), staged))
        writing.add_done_callback(lambda _future: self._idle.set())
        await asyncio.shield(writing)  # a caller that is cancelled does not end the thread

    async def settle(self) -> None:
        """See :meth:`dataflow.engines.base.Trainer.settle`.

        Uses no collective, since on another rank this call may run before or after one that trains.
        """
        if self._staged is not None:
            self._staged = None
            self._idle.set()
        await self._idle.wait()

    def load(self, directory: str) -> None:
        """See :meth:`dataflow.engines.base.Trainer.load`."""
        there = FileSystemReader(directory).read_metadata().state_dict_metadata
        shared = pickle.loads(self._read({_SHARED: b""}, directory)[_SHARED])
        if shared["model_sha256"] != self._model_sha256:
            raise ConfigError(
                f"model.path={self._model}: its weights are not those that the run began with; put the model back, or "
                "begin a new run."
            )
        stepped, own = any(name.startswith(f"{_OPTIMIZER}.") for name in there), f"{_RANDOM}_{self.rank}"
        state = self._present(stepped)
        if own in there:  # with more ranks than before, the others keep their seeds
            state[own] = b""
        self._read(state, directory)
        optimizer, scheduler = self._engine.optimizer, self._engine.lr_scheduler
        set_state_dict(
            self._engine.module,
            optimizer if stepped else (),
            model_state_dict=state[_WEIGHTS],
            optim_state_dict=state.get(_OPTIMIZER, {}),
            options=StateDictOptions(strict=False),  # frozen weights are those of the model
        )
        if not stepped:
            optimizer.state.clear()
        scheduler.load_state_dict(shared["lr_scheduler"])
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # the scheduler sets it only at its next step
        if own in there:
            _set_random_state(pickle.loads(state[own]))

    def _read(self, state: dict[str, Any], directory: str) -> dict[str, Any]:
        dcp.load(state, checkpoint_id=directory, process_group=self._control)
        return state

    def _present(self, stepped: bool) -> dict[str, Any]:
        """Returns the state of weights and, if a step was taken, of the optimizer, without frozen weights."""
        module, state = self._engine.module, dict[str, Any]()
        if stepped:
            weights, state[_OPTIMIZER] = get_state_dict(module, self._engine.optimizer)
        else:
            weights = get_model_state_dict(module)
        frozen = {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}
        state[_WEIGHTS] = {name: each for name, each in weights.items() if name not in frozen}
        return state

    def _any(self, here: bool) -> bool:
        """Whether a value is true on any rank."""
        found = torch.tensor(int(here))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return bool(found)

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        """Writes the files of this rank, in a thread; an error on one rank is raised on all of them."""
        # torch would store each value of a dict apart, and load those alone that one names.
        state[_SHARED] = pickle.dumps(state[_SHARED] | {"model_sha256": self._model_sha256})
        try:
            dcp.save(state, storage_writer=FileSystemWriter(path), process_group=self._group)
        except CheckpointException as error:
            raise _cause(error, path) from error

    @functools.cached_property
    def _model_sha256(self) -> str:
        """The SHA-256 of the model's weight files; each rank reads them, so that they fail together."""
        found = hashlib.sha256()
        for file in sorted(f for f in Path(self._model).iterdir() if f.suffix in (".safetensors", ".bin")):
            with file.open("rb") as stream:
                found.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
        return found.hexdigest()


def read_weights(directory: str | Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Returns the weights of a checkpoint by Hugging Face name, and None; needs no process group.

    For a LoRA adapter it returns those by peft's names, and peft's configuration. Raises DataError if there are none.
    """
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in found.items()
        if name.startswith(f"{_WEIGHTS}.") and hasattr(about, "properties")
    }
    if not state:
        raise DataError(f"checkpoint {directory} holds no weights; take another one.")
    state[_SHARED] = b""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    adapter = pickle.loads(state.pop(_SHARED))["adapter"]
    return {name.removeprefix(f"{_WEIGHTS}."): tensor for name, tensor in state.items()}, adapter


def _copied(value: Any) -> Any:
    """Returns a state with its tensors copied to CPU memory, each once; torch's own stager copies them twice."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    return value


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Runs a function in a daemon thread: one that hangs on a dead disk or rank must not keep the process alive."""
    future = concurrent.futures.Future[None]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return asyncio.wrap_future(future)


def _cause(error: CheckpointException, path: Path) -> Exception:
    """Returns the error that made a rank's write fail; an OSError with a path if the disk failed."""
    failures = [one for one, _trace in error.failures.values()]
    for one in failures:
        if isinstance(one, OSError):
            return OSError(one.errno, one.strerror or str(one), one.filename or str(path))
        if isinstance(one, RuntimeError):  # torch's own file format raises it for a short write
            return OSError(errno.EIO, " ".join(str(one).split())[:200], str(path))
    return error
