"""Adapters around a user's reward: they change how it is called and forward everything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dataflow.usercode.load import is_async, name_of

Prepare: TypeAlias = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], Mapping[str, Any]]]
"""Returns the positional and the keyword arguments for the reward, given the agent's keywords."""

Finish: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
"""Returns the final result, given the reward's result and the agent's keywords."""


class RewardAdapter:
    """A reward object that scores with another callable and forwards all other public attributes.

    Args:
        reward: the wrapped function or object.
        score: becomes ``compute_score``.
    """

    compute_score: Callable[..., Any]

    def __init__(self, reward: Any, score: Callable[..., Any]) -> None:
        self._reward = reward
        self.compute_score = score

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._reward, name)


def scorer_of(reward: Any) -> Any:
    """Returns the callable of a reward: its method ``compute_score`` if it has one, else the reward itself."""
    return getattr(reward, "compute_score", reward)


def adapted_call(score: Callable[..., Any], prepare: Prepare, finish: Finish | None = None) -> Callable[..., Any]:
    """Returns a function around ``score`` that is async if ``score`` is.

    Args:
        score: the reward's callable.
        prepare: makes its arguments.
        finish: makes the result; None returns the reward's own.
    """

    async def finished(awaitable: Any, keywords: Mapping[str, Any]) -> Any:
        result = await awaitable
        return result if finish is None else finish(result, keywords)

    async def call_async(**keywords: Any) -> Any:
        arguments, options = prepare(keywords)
        return await finished(score(*arguments, **options), keywords)

    def call_sync(**keywords: Any) -> Any:
        arguments, options = prepare(keywords)
        result = score(*arguments, **options)
        if finish is None:
            return result
        return finished(result, keywords) if inspect.isawaitable(result) else finish(result, keywords)

    call_async.__name__ = call_sync.__name__ = name_of(score)
    return call_async if is_async(score) else call_sync
