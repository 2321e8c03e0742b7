"""Builds several rollout engines as one, in the process of the service ``rollout``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.engines.base import RolloutEngine
from dataflow.engines.replicas import Replicas
from dataflow.executors.ray import replicas


def build_replicas(
    factory: str | Callable[..., RolloutEngine], options: Mapping[str, Any], number: int, slots: int = 256, **where: Any
) -> Replicas:
    """Starts engines in actors of their own; ``where`` is for :func:`dataflow.executors.ray.replicas.start`.

    An engine's options ``model``, ``max_prompt_length`` and ``in_flight`` are read here as well; ``slots`` is the
    number of samples that it decodes at once (vLLM's ``max_num_seqs``).
    """
    engines, release = replicas.start(factory, options, number, **where)
    own = {name: options[name] for name in ("model", "max_prompt_length", "in_flight") if name in options}
    return Replicas(engines, **own, slots=slots, share=replicas.share, release=release)
