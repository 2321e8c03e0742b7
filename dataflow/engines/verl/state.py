"""The trainer's state in checkpoints: copied to CPU memory, then written while training continues.

    snapshot ─▶ copy in CPU memory ─▶ write: a thread, with a gloo group of its own ─▶ DIRECTORY/
                                                                        __*.distcp, .metadata   weights and optimizer
                                                                        rank_*.pt               random state
                                                                        trainer.json            LR scheduler, model
                                                                        adapter_config.json     of a LoRA adapter

torch.distributed.checkpoint stores weights and optimizer by parameter name and in shards, so another number of ranks
can load them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import json
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

from dataflow.engines.verl.lora import has_adapter, save_config
from dataflow.errors import ConfigError, DataError, DataflowError

_SHARED = "trainer.json"
_WEIGHTS = "model."


class TrainerState:
    """Copies, writes and loads the state of one rank's engine; every rank makes the same calls.

    Args:
        engine: verl's, with ``module``, ``optimizer`` and ``lr_scheduler``.
        model: directory of the initial weights; a checkpoint of another model is refused.
    """

    def __init__(self, engine: Any, model: str) -> None:
        self._engine = engine
        self._model = model
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # The writer's collectives run beside those of training, so they need a group of their own.
        self._group = dist.new_group(backend="gloo")
        self._control = dist.new_group(backend="gloo")
        self._staged: dict[str, Any] | None = None
        self._extra: dict[str, Any] = {}
        self._random: dict[str, Any] = {}
        self._idle = asyncio.Event()
        """Set while no copy waits to be written or is being written."""
        self._idle.set()
        self._sha256 = ""

    async def snapshot(self, wait: bool) -> bool:
        """See :meth:`dataflow.engines.base.Trainer.snapshot`."""
        while self._any(
            not self._idle.is_set()
        ):  # a rank may finish before the others, so all of them check again together
            if not wait:
                return False
            await self._idle.wait()
        optimizer = self._engine.optimizer
        # If no step was taken yet, reading the optimizer's state would take one.
        state = self._present(stepped=bool(optimizer.state))
        self._staged = _copied(state)
        self._extra = {"stepped": "optimizer" in state, "lr_scheduler": self._engine.lr_scheduler.state_dict()}
        self._random = _random_state()
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
        path = Path(directory)
        extra = json.loads((path / _SHARED).read_text(encoding="utf-8"))
        self._check_model(extra["model_sha256"])
        module, optimizer = self._engine.module, self._engine.optimizer
        state = self._present(extra["stepped"])
        self._check_names(path, state)
        dcp.load(state, checkpoint_id=directory, process_group=self._control)
        set_state_dict(
            module,
            optimizer if extra["stepped"] else (),
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
            options=StateDictOptions(strict=False),  # frozen weights are those of the model; names were checked
        )
        if not extra["stepped"]:
            optimizer.state.clear()
        scheduler = self._engine.lr_scheduler
        scheduler.load_state_dict(extra["lr_scheduler"])
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr  # the scheduler sets it only at its next step
        own = path / f"rank_{self._rank}.pt"
        if own.is_file():  # with more ranks than before, the others keep their seeds
            _set_random_state(torch.load(own, weights_only=False))

    def close(self) -> None:
        """Leaves a write in progress to its thread, which ends with the process."""
        self._staged = None

    def _present(self, stepped: bool) -> dict[str, Any]:
        """Returns the state of weights and, if a step was taken, of the optimizer, without frozen weights."""
        module, state = self._engine.module, dict[str, Any]()
        if stepped:
            weights, state["optimizer"] = get_state_dict(module, self._engine.optimizer)
        else:
            weights = get_model_state_dict(module)
        frozen = {name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad}
        state["model"] = {name: each for name, each in weights.items() if name not in frozen}
        return state

    def _any(self, here: bool) -> bool:
        """Whether a value is true on any rank."""
        if self._world == 1:
            return here
        found = torch.tensor(int(here))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._control)
        return bool(found)

    def _write(self, path: Path, staged: dict[str, Any]) -> None:
        """Writes the files of this rank, in a thread; an error on one rank is raised on all of them."""
        failed: Exception | None = None
        try:
            self._write_rest(path)
        except OSError as error:
            failed = _with_file(error, path)
        except Exception as error:
            failed = error
        # No rank begins with the weights unless all do: the others would wait for it.
        failures: list[Exception | None] = [None] * self._world
        dist.all_gather_object(failures, failed, group=self._group)
        for error in failures:
            if error is not None:
                raise error
        try:
            dcp.save(staged, storage_writer=FileSystemWriter(path), process_group=self._group)
        except CheckpointException as error:
            raise _cause(error, path) from error

    def _write_rest(self, path: Path) -> None:
        """Writes everything but weights and optimizer."""
        path.mkdir(parents=True, exist_ok=True)
        random_state = io.BytesIO()
        torch.save(self._random, random_state)  # to a full disk it would raise a RuntimeError
        (path / f"rank_{self._rank}.pt").write_bytes(random_state.getvalue())
        if self._rank == 0:
            self._sha256 = self._sha256 or model_sha256(Path(self._model))
            text = json.dumps({**self._extra, "model_sha256": self._sha256, "world_size": self._world})
            (path / _SHARED).write_text(text, encoding="utf-8")
            if has_adapter(self._engine.module):
                save_config(self._engine.module, path)

    def _check_model(self, expected: str) -> None:
        """Raises a ConfigError on all ranks if the run began with another model."""
        found = [model_sha256(Path(self._model)) if self._rank == 0 else ""]
        dist.broadcast_object_list(found, src=0, group=self._control)
        if found[0] != expected:
            raise ConfigError(
                f"model.path={self._model}: its weights are not those that the run began with; put the model back, or "
                "begin a new run."
            )

    def _check_names(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raises a DataError unless the checkpoint holds exactly the parameters of this model."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        own = set(flatten_state_dict(dict(state))[0])
        if odd := own.symmetric_difference(FileSystemReader(path).read_metadata().state_dict_metadata):
            raise DataError(f"checkpoint {path} has other parameters than the model, such as {sorted(odd)[0]}.")


def full_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a checkpoint by Hugging Face name (an adapter's by peft's), without a process group.

    Args:
        directory: that :meth:`TrainerState.write` wrote.

    Raises:
        DataError: it holds no weights.
    """
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in found.items()
        if name.startswith(_WEIGHTS) and hasattr(about, "properties")
    }
    if not state:
        raise DataError(f"checkpoint {directory} holds no weights; take another one.")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # intended: no process group is needed
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in state.items()}


def model_sha256(model: Path) -> str:
    """Returns the SHA-256 of a model directory's weight files."""
    found = hashlib.sha256()
    for file in sorted(f for f in model.iterdir() if f.suffix in (".safetensors", ".bin")):
        found.update(file.name.encode())
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


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
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Runs a function in a daemon thread: one that hangs on a dead disk or rank must not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no caller is left
            loop.call_soon_threadsafe(end, failed)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _with_file(error: OSError, path: Path) -> OSError:
    """Returns the error with a path, which an error of a write lacks."""
    return OSError(error.errno, error.strerror or str(error), error.filename or str(path))


def _cause(error: CheckpointException, path: Path) -> Exception:
    """Returns the error that made a rank's write fail; an OSError if the disk failed."""
    failures = [one for one, _trace in error.failures.values()]
    for one in failures:
        if isinstance(one, OSError):
            return _with_file(one, path)
    for one in failures:
        if isinstance(one, RuntimeError):  # torch's own file format raises it for a short write
            return OSError(errno.EIO, " ".join(str(one).split())[:200], str(path))
    return error
