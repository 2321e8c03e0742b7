"""Probe: whether the servers that a reward model has elsewhere answer, and serve a model of its name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import root_of
from dataflow.system.address import without_login
from dataflow.system.http import reason

if TYPE_CHECKING:
    import aiohttp

_AGAIN_S = 0.5
"""Seconds between two tries: nothing says when a server elsewhere has started."""
_TRY_S = 10.0


def check_servers(wanted: Sequence[tuple[str, str, float]]) -> None:
    """Waits until all servers that are given by url answer.

    Args:
        wanted: the model's name and a url of it, and the seconds in which it shall answer.

    Raises:
        ConfigError: one does not answer in time, or serves no model of the name.
    """
    if wanted:
        asyncio.run(_all(wanted))


async def _all(wanted: Sequence[tuple[str, str, float]]) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(_answered(session, name, url, limit_s) for name, url, limit_s in wanted))


async def _answered(session: aiohttp.ClientSession, name: str, url: str, limit_s: float) -> None:
    import aiohttp

    shown, login = without_login(url)
    what = f"reward.models.{name}.url={shown}"
    headers = {"Authorization": login} if login else {}
    end, reported = time.monotonic() + limit_s, False
    while True:
        left = end - time.monotonic()
        try:
            limit = aiohttp.ClientTimeout(total=max(0.1, min(_TRY_S, left)))
            async with session.get(f"{root_of(shown)}/v1/models", headers=headers, timeout=limit) as reply:
                if reply.status == 200:
                    _check_name(await reply.read(), name, what)
                    return
                if reply.status in (401, 403):
                    raise ConfigError(
                        f"{what}: the server asks for a login ({reply.status}); give http://USER:PASSWORD@host:port."
                    )
                if reply.status in (404, 405, 501):
                    return  # it answers, and does not say which models it has
                why = f"{reply.status} {reply.reason}"
        except TimeoutError:
            why = "no answer"
        except (aiohttp.ClientError, OSError) as error:
            why = reason(error)
        if time.monotonic() + _AGAIN_S > end:
            raise ConfigError(
                f"{what}: the server does not answer GET /v1/models ({why}) within {limit_s:g} s; start it, correct "
                f"the url, or give a start more time (reward.models.{name}.start_timeout)."
            )
        if not reported:
            reported = True
            logger.warning(f"{what}: {why}; waiting for it, at most {limit_s:g} s")
        await asyncio.sleep(_AGAIN_S)


def _check_name(reply: bytes, name: str, what: str) -> None:
    try:
        data: Any = json.loads(reply)["data"]
        known = [str(each["id"]) for each in data]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ConfigError(
            f"{what}: GET /v1/models is not answered with a list of models; give the url of a server that speaks "
            "OpenAI's protocol, as vllm serve does."
        ) from None
    if name not in known:
        raise ConfigError(
            f"{what}: that server has no model '{name}' but {', '.join(known) or 'none'}; start it with "
            f"--served-model-name {name}, or name the section as the server names its model."
        )
