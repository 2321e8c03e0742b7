"""Connecting: the addresses of the servers, the protocol that each speaks, and the check before a start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from loguru import logger

from dataflow.engines.base import Sampling
from dataflow.engines.http.server import KEY, Client, ServerError, Wanted, base_of
from dataflow.engines.http.sglang import PAGE, SglangServer
from dataflow.engines.http.vllm import VllmServer
from dataflow.engines.vocabulary import read_vocabulary
from dataflow.errors import ConfigError
from dataflow.system.address import is_address, without_login
from dataflow.system.secrets import key_of, redact

_AGAIN_S = 0.5
"""Seconds between two tries: nothing says when a server elsewhere has started."""


def check_urls(urls: Sequence[str]) -> None:
    """Checks the addresses of servers.

    Raises:
        ConfigError: there is none, or one is no address or is given twice.
    """
    if not urls:
        raise ConfigError("engine.rollout=http needs the servers' addresses; give engine.urls=[http://host:port].")
    for url in urls:
        if not is_address(url):
            raise ConfigError(f"engine.urls: {redact(str(url))} is not an address; give http://host:port.")
    bases = [base_of(url) for url in urls]
    if twice := next((base for base in bases if bases.count(base) > 1), None):
        raise ConfigError(f"engine.urls names {twice} twice; give each server once.")


def clients(urls: Sequence[str], api_key_env: str | None, timeout_s: float) -> list[Client]:
    """Returns a client for each url.

    Raises:
        ConfigError: the urls are not valid, or the environment variable holds no key.
    """
    check_urls(urls)
    key = key_of(api_key_env, KEY)
    if key and any(without_login(url)[1] for url in urls):
        raise ConfigError(f"{KEY} is given, and engine.urls also hold a password; give one of the two.")
    return [Client(url, key, timeout_s) for url in urls]


async def connect(client: Client) -> VllmServer | SglangServer:
    """Finds out which protocol a server speaks.

    Raises:
        ServerError: it does not answer.
        ConfigError: it speaks none that is known.
    """
    if "version" in await _page(client, "/version"):
        return VllmServer(client)
    if "model_path" in await _page(client, PAGE):
        return SglangServer(client)
    raise ConfigError(
        f"engine.urls: {client.url} is neither vLLM's OpenAI server nor SGLang's; give the address of one of these."
    )


async def _page(client: Client, path: str) -> Any:
    try:
        return await client.get(path)
    except ServerError as error:
        if error.status == 404:
            return ()
        raise


def check_servers(
    urls: Sequence[str], api_key_env: str | None, model: str | None, longest: int, sampling: Sampling, patience_s: float
) -> str:
    """Waits until all servers answer, and checks what they serve; nothing is changed.

    Args:
        urls, api_key_env: see :class:`~dataflow.engines.http.engine.HttpRollout`.
        model, longest, sampling: see :class:`~dataflow.engines.http.server.Wanted`.
        patience_s: seconds in which a server shall answer.

    Returns:
        What they are, as a clause.

    Raises:
        ConfigError: one does not answer, or cannot serve the run.
        ModelError: the model's tokenizer or configuration cannot be read.
    """
    wanted = Wanted(model, read_vocabulary(model)[0].tokenizer if model else None, longest, sampling)

    async def kinds() -> list[str]:
        opened = clients(urls, api_key_env, patience_s)
        try:
            return await asyncio.gather(*(_kind(client, wanted, patience_s) for client in opened))
        finally:
            for client in opened:
                await client.close()

    found = asyncio.run(kinds())
    return "; ".join(f"{found.count(kind)} x {kind}" for kind in dict.fromkeys(found))


async def _kind(client: Client, wanted: Wanted, patience_s: float) -> str:
    end, why = time.monotonic() + patience_s, ""
    while True:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                return await (await connect(client)).check(wanted)
        except (ServerError, TimeoutError) as error:
            if not why:
                logger.warning(f"engine.urls: {client.url}: {error}; waiting for it, at most {patience_s:g} s")
            why = str(error) or why or "no reply"
        if time.monotonic() + _AGAIN_S > end:
            raise ConfigError(
                f"engine.urls: {client.url} does not answer within {patience_s:g} s ({why}); start it, or correct the "
                "url."
            )
        await asyncio.sleep(_AGAIN_S)
