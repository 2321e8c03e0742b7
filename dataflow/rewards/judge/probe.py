"""Probe: whether the servers of a judge answer, without asking for a score, which may cost money."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from dataflow.errors import ConfigError
from dataflow.rewards.judge.address import root_of
from dataflow.system.address import without_login
from dataflow.system.http import reason
from dataflow.system.secrets import key_of

_MODELS = "/v1/models"


def check_judge(urls: Sequence[str], model: str, api_key_env: str | None, patience_s: float) -> str:
    """Asks each server for its models.

    Args:
        urls: of the servers, maybe with a login.
        model: that the requests name.
        api_key_env: environment variable that holds the API key.
        patience_s: seconds in which a server shall answer.

    Returns:
        What they answered, as a clause.

    Raises:
        ConfigError: one does not answer, or not without another key.
    """

    async def all_answers() -> list[str]:
        key = key_of(api_key_env, "judge.api_key_env")
        return await asyncio.gather(*(_answer(url, model, key, patience_s) for url in urls))

    return "; ".join(dict.fromkeys(asyncio.run(all_answers())))


async def _answer(url: str, model: str, key: str | None, patience_s: float) -> str:
    import aiohttp

    shown, login = without_login(url)
    given = f"Bearer {key}" if key else login
    limit = aiohttp.ClientTimeout(total=patience_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers={"Authorization": given} if given else {}) as session,
            session.get(f"{root_of(shown)}{_MODELS}", allow_redirects=False) as reply,
        ):
            status, body = reply.status, await reply.content.read(1 << 20)
    except TimeoutError:
        why = f"no answer within {patience_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        why = reason(error)
    else:
        if status in (401, 403):
            fix = "another key in the variable of judge.api_key_env" if given else "judge.api_key_env=VARIABLE"
            raise ConfigError(f"judge.url={shown}: the server refuses GET {_MODELS} ({status}); give {fix}.")
        if status < 500:
            return f"{shown} answers{_without(model, body) if status == 200 else ''}"
        why = f"{status} to GET {_MODELS}"
    raise ConfigError(f"judge.url={shown}: the server does not answer ({why}); start it, or correct the url.")


def _without(model: str, body: bytes) -> str:
    """Returns a remark if a server lists its models, and not this one: some have further names for them."""
    try:
        data: Any = json.loads(body)["data"]
        known = [str(each["id"]) for each in data]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    some = ", ".join(known[:3]) + (", ..." if len(known) > 3 else "")
    return "" if model in known else f", but does not list judge.model={model} (it has {some or 'none'})"
