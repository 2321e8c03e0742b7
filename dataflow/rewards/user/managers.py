"""Reward managers: wrappers around a reward function, chosen by name as in verl's reward loop.

A manager is a reward object itself: it scores through the wrapped reward, sync if that is sync, and forwards its other
public attributes. Limits, time-outs and retries belong to the agent.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.errors import ConfigError, DataError
from dataflow.rewards.user.adapter import RewardAdapter, adapted_call, scorer_of
from dataflow.rewards.user.results import read_amount, read_result
from dataflow.usercode.copies import own_copy
from dataflow.usercode.load import is_async, name_of

if TYPE_CHECKING:
    from dataflow.rewards.user.processes import Pool

Kind = TypeVar("Kind", bound=type)

MANAGERS: dict[str, type] = {}
"""The registered managers by name."""


class LengthUnknown(DataError):
    """A manager needs the response's length in tokens, and the samples do not have it."""

    fatal = True
    fix = "give the agent samples with a response_mask"


class Manager(RewardAdapter):
    """Base class of the managers, for users' own as well.

    Args:
        reward: a function, or an object with ``compute_score``.

    Attributes:
        compute_score: takes verl's four keywords; async if that of the reward is.

    Raises:
        ConfigError: the reward cannot be called.
    """

    def __init__(self, reward: Any) -> None:
        score = scorer_of(reward)
        if isinstance(reward, type) or not callable(score):
            raise ConfigError(f"reward manager: {reward!r} cannot score; give a function or an object.")
        if type(self).finish is not Manager.finish:
            # The reward gets a copy of the arguments: ``finish`` must see them unchanged.
            score = adapted_call(score, lambda arguments: ((), own_copy(arguments)), self.finish)
        super().__init__(reward, score)

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns the final result of a call; runs where the reward runs.

        Args:
            result: what the reward returned.
            arguments: the keywords of the call.
        """
        return result


def register(name: str) -> Callable[[Kind], Kind]:
    """Returns a class decorator that registers a manager, which is built with the reward and the options.

    Args:
        name: what ``reward.manager`` selects it by.

    Raises:
        ConfigError: another class is registered by that name.
    """

    def enter(kind: Kind) -> Kind:
        other = MANAGERS.setdefault(name, kind)
        # A user's file may be loaded twice.
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ConfigError(f"reward manager '{name}' is {other.__qualname__} already; register it by another name.")
        MANAGERS[name] = kind
        return kind

    return enter


@register("naive")
class Naive(Manager):
    """The reward as it is."""

    def __init__(self, reward: Any) -> None:
        super().__init__(reward)


@register("dapo")
class Dapo(Manager):
    """Subtracts DAPO's soft penalty for overlong responses from the score.

    The penalty grows linearly from 0 to ``overlong_penalty_factor`` over the last ``overlong_buffer_len`` tokens of
    ``max_response_length``. The length is ``extra_info["response_length"]``, which the agent fills in if the samples
    have a response mask: the tokens that the model sampled, where verl counts those of tools' answers, too. The score
    before the penalty becomes the column ``acc``.

    Args:
        reward: see :class:`Manager`.
        overlong_buffer_len: tokens.
        max_response_length: tokens.
        overlong_penalty_factor: the largest penalty.
        log: adds the columns ``overlong_reward``, the penalty as a number of 0 or below, and ``overlong``, a bool.

    Raises:
        ConfigError: a length or a factor out of range.
    """

    def __init__(
        self,
        reward: Any,
        overlong_buffer_len: int,
        max_response_length: int,
        overlong_penalty_factor: float = 1.0,
        log: bool = False,
    ) -> None:
        super().__init__(reward)
        if not 1 <= overlong_buffer_len <= max_response_length:
            raise ConfigError(
                f"reward manager 'dapo': overlong_buffer_len={overlong_buffer_len}; give 1 to "
                f"max_response_length={max_response_length}."
            )
        if not 0 <= overlong_penalty_factor < math.inf:
            raise ConfigError(
                f"reward manager 'dapo': overlong_penalty_factor={overlong_penalty_factor}; give a finite number of "
                "0 or more."
            )
        self._buffer = overlong_buffer_len
        self._free = max_response_length - overlong_buffer_len
        self._factor = overlong_penalty_factor
        self._logs = log

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        length = (arguments.get("extra_info") or {}).get("response_length")
        if length is None:
            raise LengthUnknown("the reward manager 'dapo' needs extra_info['response_length'], tokens of the response")
        try:
            tokens = int(read_amount(length))
        except ValueError as error:
            raise LengthUnknown(f"extra_info['response_length'] is {error}, no number of tokens") from error
        try:
            score, columns = read_result(result)
        except ValueError:
            return result  # the agent reports what is wrong with it
        penalty = min(0.0, (self._free - tokens) / self._buffer * self._factor)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self._logs else {}
        return {"acc": score, **columns, **logged, "score": score + penalty}


@register("rate_limited")
class RateLimited(Manager):
    """Declares the limits of the service that the reward calls; the agent enforces them across all of a run's agents.

    Unlike in verl, a call that fails or times out is not scored 0: it is handled by the agent's failure rule.

    Args:
        reward: see :class:`Manager`.
        max_concurrent: calls in flight.
        max_rpm: requests per minute; None for no limit.
        max_tpm: tokens per minute; None for no limit.
        estimated_tokens_per_request: None uses the reward's own estimate, or 2000 if it has none.
        timeout: of one call, in seconds; None uses the agent's.

    Attributes:
        limits: ``concurrency``, ``rpm``, ``tpm`` and ``timeout_s``.

    Raises:
        ConfigError: a limit is not above 0.
    """

    def __init__(
        self,
        reward: Any,
        max_concurrent: int = 1,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        estimated_tokens_per_request: int | None = None,
        timeout: float | None = 300.0,
    ) -> None:
        super().__init__(reward)
        given = {
            "max_concurrent": max_concurrent,
            "max_rpm": max_rpm,
            "max_tpm": max_tpm,
            "estimated_tokens_per_request": estimated_tokens_per_request,
            "timeout": timeout,
        }
        for option, value in given.items():
            if value is not None and not value > 0:
                raise ConfigError(f"reward manager 'rate_limited': {option}={value}; give a number above 0.")
        self.limits = {"concurrency": max_concurrent, "rpm": max_rpm, "tpm": max_tpm, "timeout_s": timeout}
        own = getattr(reward, "tokens", None)
        self._estimate = own if estimated_tokens_per_request is None else None
        self._tokens = estimated_tokens_per_request or 2000

    def tokens(self, **arguments: Any) -> int:
        """Returns the estimated number of tokens that a call uses."""
        tokens: int = self._tokens if self._estimate is None else self._estimate(**arguments)
        return tokens


@register("remote")
class Remote(Manager):
    """Scores in worker processes: for sync functions that are CPU-bound or set alarms.

    The processes start immediately. Each loads the reward's file and builds its class; each also imports what a user's
    script that starts the run imports at its top. A call that the agent gives up on is stopped by killing its process,
    which is then replaced.

    Args:
        reward: from :func:`~dataflow.rewards.user.function.build_reward`, or a function at the top of a module; sync.
        workers: number of processes; None uses one per core.
        start_method: ``spawn``, or ``forkserver``, which starts them faster.

    Attributes:
        limits: ``concurrency`` is the number of workers, so that no time-out includes a wait for a worker.

    Raises:
        ConfigError: the reward is async or cannot be loaded in another process, or an option is out of range.
    """

    def __init__(self, reward: Any, workers: int | None = None, start_method: str = "spawn") -> None:
        super().__init__(reward)
        score = self.compute_score
        pool = self._pool = self.pool_of(reward, workers, start_method)
        pool.start()  # now, so that they are ready by the first call
        self.limits = self.limits_of(pool)

        async def call(**arguments: Any) -> Any:
            return await pool.call(arguments)

        call.__name__ = name_of(score)
        self.compute_score = call

    @staticmethod
    def limits_of(pool: Pool) -> dict[str, Any]:
        """Returns the limits of calls in these worker processes."""
        return {"concurrency": pool.workers, "rpm": None, "tpm": None, "timeout_s": None}

    @staticmethod
    def pool_of(reward: Any, workers: int | None = None, start_method: str = "spawn") -> Pool:
        """Returns the worker processes, which are not started, of a reward or of the class that it will be built from.

        Raises:
            ConfigError: see the class.
        """
        from dataflow.rewards.user.processes import Pool
        from dataflow.rewards.user.worker import recipe_of

        if is_async(score := scorer_of(reward)):
            raise ConfigError(
                f"reward manager 'remote': '{name_of(score)}' is async, which needs no process of its own; take the "
                "manager 'naive' for it."
            )
        return Pool(recipe_of(reward), (os.cpu_count() or 1) if workers is None else workers, start_method)

    def usage(self) -> dict[str, float]:
        """Returns the reward's own usage, and the numbers of workers that died and that were killed."""
        own = getattr(self._reward, "usage", None)
        counts = {f"workers_{name}": float(self._pool.counts[name]) for name in ("died", "killed")}
        return {**(own() if callable(own) else {}), **counts}

    async def close(self) -> None:
        """Ends the worker processes, then closes the reward."""
        await asyncio.to_thread(self._pool.close)
        close = getattr(self._reward, "close", None)
        if callable(close) and inspect.isawaitable(ending := close()):
            await ending
