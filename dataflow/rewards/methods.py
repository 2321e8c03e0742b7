"""The user's other methods: ``endpoint``, ``tokens``, ``usage``, ``close``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from loguru import logger

from dataflow.errors import DataflowError, RewardFailed
from dataflow.rewards.results import read_amount, read_usage
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import message_of
from dataflow.usercode.load import name_of, raised

_CLOSE_S = 10.0  # time limit of close


def result_of(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Returns what the user's ``endpoint`` or ``tokens`` returns for a request.

    Raises:
        RewardFailed: it raised an error.
    """
    try:
        return method(**own_copy(arguments))
    except Exception as error:
        raise RewardFailed(raised("before a request is sent", method, error).rstrip(".")) from error


def estimate_of(method: Callable[..., Any], arguments: Mapping[str, Any]) -> int:
    """Returns the tokens that a request is expected to use, as the user's ``tokens`` says.

    Raises:
        RewardFailed: it raised an error, or returned no number of 0 or more.
    """
    amount = result_of(method, arguments)
    try:
        return int(read_amount(amount))
    except Exception as error:
        what = f"before a request is sent: '{name_of(method)}' returned {message_of(error)}"
        raise RewardFailed(f"{what}; return a number of 0 or more") from error


def usage_of(reward: Any, tokens: int) -> Mapping[str, float]:
    """Returns what the calls have used: the tokens of the answers, and what the user's ``usage`` says.

    Args:
        reward: what scores.
        tokens: of the answers; ``usage`` may give another number.

    Raises:
        DataflowError: it raised an error, or returned something else than finite numbers.
    """
    usage = getattr(reward, "usage", None)
    if not callable(usage):
        return {"tokens": tokens}
    try:
        used = usage()
    except Exception as error:
        raise DataflowError(raised("reward agent: stats", usage, error)) from error
    try:
        return {"tokens": tokens, **read_usage(used)}
    except Exception as error:
        what = f"reward agent: stats: '{name_of(usage)}' returned {message_of(error)}"
        raise DataflowError(f"{what}; return finite numbers by name.") from error


async def close_reward(reward: Any) -> None:
    """Calls the user's ``close``, if there is one.

    Raises:
        DataflowError: it raised an error.
    """
    close = getattr(reward, "close", None)
    if not callable(close):
        return
    limit = asyncio.timeout(_CLOSE_S)
    try:
        ending = close()
        if inspect.isawaitable(ending):
            async with limit:
                await ending
    except DataflowError:
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            logger.warning("reward agent: '{}' has not closed within {:g} s.", name_of(reward), _CLOSE_S)
        elif isinstance(error, Exception | SystemExit):
            raise DataflowError(raised("reward agent", close, error)) from error
        else:
            raise
