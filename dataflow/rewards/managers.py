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
from functools import partial
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, DataError, an, nearest
from dataflow.models.tokenizer import load_tokenizer
from dataflow.rewards.functions import RewardAdapter, scorer_of, wrapped
from dataflow.rewards.results import read_result
from dataflow.rewards.sandbox.manager import Sandbox
from dataflow.usercode.copies import own_copy, own_options
from dataflow.usercode.failures import is_interrupt
from dataflow.usercode.load import describe, is_async, load_file, name_of, pick

if TYPE_CHECKING:
    from verl import DataProto

    from dataflow.rewards.processes import Pool


class TokensUnknown(DataError):
    """A manager needs the response's tokens or their number, and the samples do not have them."""

    fatal = True
    fix = "give the agent samples with responses and a response_mask"


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
            score = wrapped(score, own_copy, self.finish)  # which must see the arguments unchanged
        super().__init__(reward, score)

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns the final result of a call; runs where the reward runs.

        Args:
            result: what the reward returned.
            arguments: the keywords of the call.
        """
        return result


class Dapo(Manager):
    """Subtracts DAPO's soft penalty for overlong responses from the score, which becomes the column ``acc``.

    The penalty grows linearly from 0 to ``overlong_penalty_factor`` over the last ``overlong_buffer_len`` tokens of
    ``max_response_length``. The length is ``extra_info["response_length"]``, which the agent fills in if the samples
    have a response mask: the tokens that the model sampled, where verl counts those of tools' answers, too. ``log``
    adds the columns ``overlong_reward``, the penalty as a number of 0 or below, and ``overlong``, a bool.
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
        buffer, longest, factor = overlong_buffer_len, max_response_length, overlong_penalty_factor
        if not 1 <= buffer <= longest:
            raise ConfigError(
                f"reward manager 'dapo': overlong_buffer_len={buffer}; give 1 to max_response_length={longest}."
            )
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"reward manager 'dapo': overlong_penalty_factor={factor}; give a finite number of 0 or more."
            )
        self._buffer, self._free, self._factor, self._logs = buffer, longest - buffer, factor, log

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        length = (arguments.get("extra_info") or {}).get("response_length")
        if length is None:
            raise TokensUnknown("the reward manager 'dapo' needs extra_info['response_length'], tokens of the response")
        try:
            score, columns = read_result(result)
        except ValueError:
            return result  # the agent reports what is wrong with it
        penalty = min(0.0, (self._free - length) / self._buffer * self._factor)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self._logs else {}
        return {"acc": score, **columns, **logged, "score": score + penalty}


class RateLimited(Manager):
    """Declares the limits of the service that the reward calls, by verl's names; the agent enforces them.

    Unlike in verl, a call that fails or times out is not scored 0: it is handled by the agent's failure rule. Without
    ``estimated_tokens_per_request`` the reward's own estimate is used, or 2000 if it has none.

    Attributes:
        limits: ``concurrency``, ``rpm``, ``tpm`` and ``timeout_s``.
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
        self.limits = {"concurrency": max_concurrent, "rpm": max_rpm, "tpm": max_tpm, "timeout_s": timeout}
        for name, value in (*self.limits.items(), ("estimated_tokens_per_request", estimated_tokens_per_request)):
            if value is not None and not value > 0:
                names = {"concurrency": "max_concurrent", "rpm": "max_rpm", "tpm": "max_tpm", "timeout_s": "timeout"}
                option = names.get(name, name)
                raise ConfigError(f"reward manager 'rate_limited': {option}={value}; give a number above 0.")
        self._estimate = getattr(reward, "tokens", None) if estimated_tokens_per_request is None else None
        self._tokens = estimated_tokens_per_request or 2000

    def tokens(self, **arguments: Any) -> int:
        """Returns the estimated number of tokens that a call uses."""
        tokens: int = self._tokens if self._estimate is None else self._estimate(**arguments)
        return tokens


class Remote(Manager):
    """Scores in ``workers`` processes (None: one per core), which start at once: for sync functions that compute.

    Each loads the reward's file and builds its class; each also imports what a user's script that starts the run
    imports at its top. A call that the agent gives up on is stopped by killing its process, which is then replaced.

    Attributes:
        limits: ``concurrency`` is the number of workers, so that no time-out includes a wait for a worker.

    Raises:
        ConfigError: the reward is async or cannot be loaded in another process, or there are less than 1 workers.
    """

    def __init__(self, reward: Any, workers: int | None = None) -> None:
        super().__init__(reward)
        score = self.compute_score
        pool = self._pool = self.pool_of(reward, workers)
        pool.start()  # now, so that they are ready by the first call
        self.limits = {"concurrency": pool.workers}

        async def call(**arguments: Any) -> Any:
            return await pool.call(arguments)

        call.__name__ = name_of(score)
        self.compute_score = call

    @staticmethod
    def pool_of(reward: Any, workers: int | None = None) -> Pool:
        """Returns the worker processes, which are not started, of a reward or of the class that it is built from."""
        from dataflow.rewards.processes import Pool, Recipe

        if is_async(score := scorer_of(reward)):
            raise ConfigError(
                f"reward manager 'remote': '{name_of(score)}' is async, which needs no process of its own; take the "
                "manager 'naive' for it."
            )
        return Pool(Recipe.of(reward), (os.cpu_count() or 1) if workers is None else workers)

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


MANAGERS: dict[str, type] = {
    "naive": Manager, "dapo": Dapo, "rate_limited": RateLimited, "remote": Remote, "sandbox": Sandbox,
}  # fmt: skip


def build_manager(
    name: str, compute_score: Any, path: str | None = None, *, tokenizer: Any = None, **options: Any
) -> Any:
    """Returns a manager around a reward: one of :data:`MANAGERS`, or a class of that name in the Python file ``path``.

    Such a class takes the reward and the options, or has ``run_single`` as verl's reward loop requires (see
    :class:`VerlManager`); only then ``tokenizer``, the model's or its path, is used.
    """
    kind, options = find_manager(name, path, options), own_options(options)
    if callable(getattr(kind, "run_single", None)):
        return VerlManager(compute_score, kind, tokenizer=tokenizer, **options)
    manager = _built(name, partial(kind, compute_score), options)
    if not callable(getattr(manager, "compute_score", None)):
        raise ConfigError(f"reward manager '{name}': its class has neither compute_score nor verl's run_single.")
    return manager


def find_manager(name: str, path: str | None = None, options: Mapping[str, Any] | None = None) -> Any:
    """Returns a manager's class; ConfigError if the name or an option is unknown, or an option is missing."""
    what = f"reward manager '{name}'"
    if path is not None:
        where = f"{what}: path={path}"
        kind = pick(load_file(path, where), name, where)
    elif name in MANAGERS:
        kind = MANAGERS[name]
    else:
        hint = nearest(name, MANAGERS) or f"; give {', '.join(MANAGERS)}, or the path of a file that defines it."
        raise ConfigError(f"{what} is unknown{hint}")
    if not isinstance(kind, type):
        raise ConfigError(f"{what} is {an(type(kind).__name__)}; give a class.")
    if not callable(getattr(kind, "run_single", None)):
        try:
            inspect.signature(kind).bind(None, **(options or {}))
        except TypeError as error:
            takes = ", ".join([*inspect.signature(kind).parameters][1:]) or "none"
            raise ConfigError(f"{what}: {error}; its options (reward.manager_kwargs) are {takes}.") from error
    return kind


def check_manager(name: str, found: Any, path: str | None = None, **options: Any) -> Mapping[str, Any]:
    """Builds a manager as a check, but for a user's own class and worker processes; returns the limits it declares."""
    kind, options = find_manager(name, path, options), own_options(options)
    if path is not None:
        return {}
    if kind is Remote:
        return {"concurrency": _built(name, partial(Remote.pool_of, found), options).workers}
    return limits_declared(_built(name, partial(kind, lambda **_fields: 0.0), options))


def scores_alone(name: str, path: str | None = None) -> bool:
    """Whether a manager scores by itself, so that no function, judge or model of the run is used."""
    return path is None and bool(getattr(MANAGERS.get(name), "alone", False))


def limits_declared(reward: Any) -> dict[str, Any]:
    """Returns the limits that a reward object or a manager declares for its calls; {} if it declares none."""
    return dict(getattr(reward, "limits", None) or {})


def _built(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return make(**options)
    except BaseException as error:
        if isinstance(error, ConfigError) or is_interrupt(error):
            raise
        given = f"; correct reward.manager_kwargs ({', '.join(options)})" if options else ""
        raise ConfigError(f"reward manager '{name}' cannot be built: {describe(error)}{given}.") from error


class VerlManager(Manager):
    """A reward object around a class with verl's ``async run_single(data)``.

    ``run_single`` gets a DataProto of one row with what verl's own managers read: ``responses``, ``attention_mask``,
    ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info`` and, if present, ``raw_prompt``; no tokens
    of the prompt. A sync ``compute_score`` runs where the class runs it: verl's classes use the event loop's default
    threads, which the agent can neither stop nor count.

    Args:
        kind: the class; built at the first call, as verl's base class uses the running event loop.
        tokenizer: the model's tokenizer or its path.
        config: verl's configuration, as much of it as the class reads.
    """

    wants_response_ids = True
    """The agent passes ``extra_info["response_ids"]``."""

    def __init__(
        self, reward: Any, kind: type, *, tokenizer: Any = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(reward)
        what = f"reward manager '{kind.__name__}'"
        if tokenizer is None:
            raise ConfigError(f"{what} decodes responses, as verl's managers do: give the option 'tokenizer'.")
        tokenizer = load_tokenizer(tokenizer, what) if isinstance(tokenizer, str) else tokenizer
        given = {"config": config or {}, "tokenizer": tokenizer, "compute_score": self.compute_score, **options}
        try:
            inspect.signature(kind).bind(**given)
        except TypeError as error:
            raise ConfigError(f"{what} cannot be built with {', '.join(given)} ({error}).") from error
        manager: Any = None

        async def call(**arguments: Any) -> dict[str, Any]:
            nonlocal manager
            if manager is None:
                from omegaconf import OmegaConf

                manager = kind(**{**given, "config": OmegaConf.create({"reward": {}, **given["config"]})})
            answer = await manager.run_single(row_of(**arguments))
            if not isinstance(answer, Mapping) or "reward_score" not in answer:
                raise ValueError(f"run_single returned {an(type(answer).__name__)} without 'reward_score'")
            score, columns = answer["reward_score"], dict(answer.get("reward_extra_info") or {})
            return {"acc": columns.get("score", score), **columns, "score": score}

        call.__name__ = kind.__name__
        self.compute_score = call


def row_of(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> DataProto:
    """Returns a sample as verl's DataProto of one row, ``responses`` and ``attention_mask`` int64 ``[1, length]``."""
    import numpy as np
    import torch
    from verl import DataProto

    facts = dict(extra_info or {})
    if (ids := facts.pop("response_ids", None)) is None:
        raise TokensUnknown("verl's managers need the response's tokens")
    responses = torch.as_tensor(ids, dtype=torch.int64).reshape(1, -1)
    objects = {"data_source": data_source, "reward_model": {"ground_truth": ground_truth}, "extra_info": facts}
    if "raw_prompt" in facts:
        objects["raw_prompt"] = own_copy(facts["raw_prompt"])
    columns = {name: np.empty(1, dtype=object) for name in objects}
    for name, value in objects.items():
        columns[name][0] = value
    tensors = {"responses": responses, "attention_mask": torch.ones_like(responses)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)
