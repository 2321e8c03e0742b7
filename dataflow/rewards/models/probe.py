"""Probe: whether the servers that a reward model has elsewhere answer, and serve a model of its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import models_in, root_of
from dataflow.system.address import without_login
from dataflow.system.http import reason

if TYPE_CHECKING:
    import aiohttp

_AGAIN_S = 0.5
"""Seconds between two tries: nothing says when a server elsewhere has started."""


def check_servers(wanted: Sequence[tuple[str, str, float]]) -> None:
    """Waits until all servers that are given by url answer.

    Args:
        wanted: the model's name and a url of it, and the seconds in which it shall answer.

    Raises:
        ConfigError: one does not answer in time, or serves no model of the name.
    """

    async def answered(name: str, url: str, limit_s: float) -> None:
        import aiohttp

        what = f"reward.models.{name}.url={without_login(url)[0]}"
        end, why = time.monotonic() + limit_s, ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=max(limit_s, 0.1))) as session:
            while (now := await _asked(session, f"{root_of(url)}/v1/models", name, what)) is not None:
                if time.monotonic() + _AGAIN_S > end:
                    raise ConfigError(
                        f"{what}: the server does not answer GET /v1/models ({now}) within {limit_s:g} s; start it, "
                        f"correct the url, or give a start more time (reward.models.{name}.start_timeout)."
                    )
                if not why:
                    logger.warning(f"{what}: {now}; waiting for it, at most {limit_s:g} s")
                why = now
                await asyncio.sleep(_AGAIN_S)

    async def all_answered() -> None:
        await asyncio.gather(*(answered(*each) for each in wanted))

    asyncio.run(all_answered())


async def _asked(session: aiohttp.ClientSession, url: str, name: str, what: str) -> str | None:
    """Returns why a server does not answer yet; None if it does, and has the model as far as it says."""
    import aiohttp

    try:
        async with session.get(url) as reply:
            status, text = reply.status, await reply.text(errors="replace")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return reason(error) or "no answer"
    if status in (401, 403):
        raise ConfigError(f"{what}: the server asks for a login ({status}); give http://USER:PASSWORD@host:port.")
    if status != 200:
        return None if status in (404, 405, 501) else f"it answers {status}"
    try:
        known = models_in(text)
    except ValueError:
        raise ConfigError(
            f"{what}: GET /v1/models is not answered with a list of models; give the url of a server that speaks "
            "OpenAI's protocol, as vllm serve does."
        ) from None
    if name not in known:
        raise ConfigError(
            f"{what}: that server has no model '{name}' but {', '.join(known) or 'none'}; start it with "
            f"--served-model-name {name}, or name the section as the server names its model."
        )
    return None
