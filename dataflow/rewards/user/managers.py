"""Reward managers: what stands between the agent and a reward function, picked by name as in verl's reward loop.

A manager is a reward object itself: it scores through what it wraps, sync where that is sync, and hands on whatever
else the agent may ask of that. It neither waits nor retries; those are the agent's.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dataflow.errors import ConfigError, DataError, nearest
from dataflow.rewards.user.results import read_amount, read_result
from dataflow.usercode.copies import own_copy, own_options
from dataflow.usercode.failures import is_interrupt
from dataflow.usercode.load import describe, is_async, load_file, name_of, pick, scorer_of

FORWARDED = ("post_process_scores", "log", "close", "usage", "retry_on", "endpoint", "endpoints", "tokens", "limits")
"""What a manager hands on of the reward object that it wraps."""

Kind = TypeVar("Kind", bound=type)
Finish = Callable[[Any, Mapping[str, Any]], Any]

_managers: dict[str, type] = {}


class LengthUnknown(DataError):
    """A manager needs the response's length in tokens, and nothing says it."""

    fatal = True
    fix = "give the agent samples with a response_mask"


class Manager:
    """Base of the managers; users' own may build on it.

    Args:
        reward: a function, or an object with ``compute_score``.

    Attributes:
        compute_score: takes verl's four keywords; async if that of the reward is.

    Raises:
        ConfigError: the reward cannot be called.
    """

    compute_score: Callable[..., Any]

    def __init__(self, reward: Any) -> None:
        score = scorer_of(reward)
        if isinstance(reward, type) or not callable(score):
            raise ConfigError(f"reward manager: {reward!r} cannot score; give a function or an object.")
        self._reward = reward
        changes = type(self).finish is not Manager.finish
        self.compute_score = _followed(score, self.finish) if changes else score

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns what becomes of what the reward returned; here nothing. Runs wherever the reward does."""
        return result

    def __getattr__(self, name: str) -> Any:
        if name in FORWARDED:
            return getattr(self._reward, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def _followed(score: Callable[..., Any], finish: Finish) -> Callable[..., Any]:
    # ``finish`` reads the arguments after the reward has, and must find them as they were.
    async def later(**arguments: Any) -> Any:
        return finish(await score(**own_copy(arguments)), arguments)

    async def after(awaitable: Any, arguments: Mapping[str, Any]) -> Any:
        return finish(await awaitable, arguments)

    def now(**arguments: Any) -> Any:
        result = score(**own_copy(arguments))
        return after(result, arguments) if inspect.isawaitable(result) else finish(result, arguments)

    later.__name__ = now.__name__ = name_of(score)
    return later if is_async(score) else now


def register(name: str) -> Callable[[Kind], Kind]:
    """Makes a class known as a manager; it is built with the reward and the options.

    Raises:
        ConfigError: another class has that name.
    """

    def enter(kind: Kind) -> Kind:
        other = _managers.setdefault(name, kind)
        # A user's file may be loaded twice.
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ConfigError(f"reward manager '{name}' is {other.__qualname__} already; register it by another name.")
        _managers[name] = kind
        return kind

    return enter


def build_manager(
    name: str, compute_score: Any, path: str | None = None, *, tokenizer: Any = None, **options: Any
) -> Any:
    """Returns a manager around a reward.

    Args:
        name: of a registered manager, or of a class in the file.
        compute_score: a function, or an object with ``compute_score``.
        path: Python file that defines the class: one built with the reward and the options, or one for verl's
            reward loop, with ``run_single``: see :class:`~dataflow.rewards.user.verl_manager.VerlManager`.
        tokenizer: that of the policy, or its path; only for classes with ``run_single``.
        options: the manager's own.

    Raises:
        ConfigError: an unknown name, an option that the manager does not take, lacks or cannot use.
    """
    what = f"reward manager '{name}'"
    options = own_options(options)
    kind = find_manager(name, path, options)
    if callable(getattr(kind, "run_single", None)):
        from dataflow.rewards.user.verl_manager import VerlManager

        return VerlManager(compute_score, kind, tokenizer=tokenizer, **options)
    try:
        manager = kind(compute_score, **options)
    except ConfigError:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise ConfigError(f"{what} cannot be built: {describe(error)}.") from error
    if not callable(getattr(manager, "compute_score", None)):
        raise ConfigError(f"{what}: class '{kind.__name__}' has neither compute_score nor verl's run_single.")
    return manager


def find_manager(name: str, path: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Returns a manager's class; cheap enough to call before a run starts, only to see it fail there.

    Raises:
        ConfigError: an unknown name, or an option that the manager does not take or lacks.
    """
    what = f"reward manager '{name}'"
    kind = _find(name, path)
    if not isinstance(kind, type):
        raise ConfigError(f"{what} is a {type(kind).__name__}; give a class.")
    if not callable(getattr(kind, "run_single", None)):
        _check_options(what, kind, options or {})
    return kind


def _find(name: str, path: str | None) -> Any:
    if path is not None:
        where = f"reward manager '{name}': path={path}"
        module = load_file(path, where)
        if getattr(module, name, None) is not None or name not in _managers:
            return pick(module, name, where)
    if name not in _managers:
        hint = nearest(name, _managers) or f"; give {', '.join(_managers)}, or the path of a file that defines it."
        raise ConfigError(f"reward manager '{name}' is unknown{hint}")
    return _managers[name]


def _check_options(what: str, kind: type, options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    takes = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for option in options:
            if option not in takes:
                hint = nearest(option, takes) or f"; it takes {', '.join(takes) or 'none'}."
                raise ConfigError(f"{what} takes no option '{option}'{hint}")
    for each in parameters:
        if each.name in takes and each.default is each.empty and each.name not in options:
            raise ConfigError(f"{what} needs the option '{each.name}'.")


@register("naive")
class Naive(Manager):
    """The reward as it is."""

    def __init__(self, reward: Any) -> None:
        super().__init__(reward)


@register("dapo")
class Dapo(Manager):
    """Takes a penalty off the score of a response that is nearly as long as it may be, as DAPO does.

    It grows in proportion over the last ``overlong_buffer_len`` tokens of ``max_response_length``, from 0 to
    ``overlong_penalty_factor``. The length is ``extra_info["response_length"]``, which the agent fills in where the
    samples have a response mask. The score before the penalty becomes the column ``acc``.

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
            return result  # the agent says what is wrong with it
        penalty = min(0.0, (self._free - tokens) / self._buffer * self._factor)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self._logs else {}
        return {"acc": score, **columns, **logged, "score": score + penalty}


@register("rate_limited")
class RateLimited(Manager):
    """Declares the limits of the service that the reward asks; the agent keeps them, for all of a job's agents.

    Unlike verl's, a call that fails or takes too long is not scored 0: the agent's failure rule says what becomes of
    it.

    Args:
        reward: see :class:`Manager`.
        max_concurrent: calls in flight.
        max_rpm: requests a minute; None for no limit.
        max_tpm: tokens a minute; None for no limit.
        estimated_tokens_per_request: None takes the reward's own estimate, or 2000 if it has none.
        timeout: seconds that one call may take; None leaves it to the agent.

    Attributes:
        limits: ``concurrency``, ``rpm``, ``tpm`` and ``timeout_s``.

    Raises:
        ConfigError: a limit that is not above 0.
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
        """Returns the tokens that a call is expected to use."""
        tokens: int = self._tokens if self._estimate is None else self._estimate(**arguments)
        return tokens


@register("remote")
class Remote(Manager):
    """Scores in other processes: for sync functions that keep a core busy, or that set alarms.

    The processes start at once. Each loads the reward's file, and builds its class, for itself; what a script of the
    user's that starts the run imports at its top, each imports too. A call that the agent gives up on is stopped by
    killing its process, and another is started in its place.

    Args:
        reward: from :func:`~dataflow.usercode.load.build_reward`, or a function at the top of a module; sync.
        workers: processes; None takes one a core.
        start_method: ``spawn``, or ``forkserver``, which starts them faster.

    Attributes:
        limits: ``concurrency``, as many calls as there are workers, so that no time-out counts a wait for one.

    Raises:
        ConfigError: an async reward, one that the processes could not load, or an option out of range.
    """

    def __init__(self, reward: Any, workers: int | None = None, start_method: str = "spawn") -> None:
        super().__init__(reward)
        from dataflow.rewards.user.processes import Pool
        from dataflow.rewards.user.worker import recipe_of

        score = self.compute_score
        if is_async(score):
            raise ConfigError(
                f"reward manager 'remote': '{name_of(score)}' is async, which needs no process of its own; take the "
                "manager 'naive' for it."
            )
        count = (os.cpu_count() or 1) if workers is None else workers
        pool = self._pool = Pool(recipe_of(reward), count, start_method)
        pool.start()  # so that they are ready, or nearly, by the first call
        self.limits = {"concurrency": count, "rpm": None, "tpm": None, "timeout_s": None}

        async def call(**arguments: Any) -> Any:
            return await pool.call(arguments)

        call.__name__ = name_of(score)
        self.compute_score = call

    def usage(self) -> dict[str, float]:
        """Returns the reward's own usage and how many workers died or were killed."""
        own = getattr(self._reward, "usage", None)
        counts = {f"workers_{name}": float(self._pool.counts[name]) for name in ("died", "killed")}
        return {**(own() if callable(own) else {}), **counts}

    async def close(self) -> None:
        """Ends the processes, then closes the reward."""
        await asyncio.to_thread(self._pool.close)
        close = getattr(self._reward, "close", None)
        if callable(close) and inspect.isawaitable(ending := close()):
            await ending
