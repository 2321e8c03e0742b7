"""Probe: whether all servers answer and serve the run's model, before anything is started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from loguru import logger

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError
from dataflow.engines.servers.connect import Wanted, check, check_settings, clients, connect
from dataflow.engines.servers.protocol import About, ServerProtocol
from dataflow.engines.vocabulary import read_vocabulary
from dataflow.errors import ConfigError

_AGAIN_S = 0.5
"""Seconds between two tries: nothing says when a server elsewhere has started."""
_TRY_S = 10.0


def check_servers(
    urls: Sequence[str], api_key_env: str | None, model: str | None, longest: int, sampling: Sampling, patience_s: float
) -> str:
    """Waits until all servers answer, and checks what they serve; nothing is changed.

    Args:
        urls, api_key_env, sampling: see :class:`~dataflow.engines.servers.engine.ServerRollout`.
        model: directory of the actor, which the servers' model is compared with; None if it is not here yet.
        longest: tokens of a prompt and its response together.
        patience_s: seconds in which a server shall answer.

    Returns:
        What they are, as a clause.

    Raises:
        ConfigError: one does not answer, or cannot serve the run.
        ModelError: the model's tokenizer or configuration cannot be read.
    """
    wanted = None if model is None else Wanted(model, read_vocabulary(model)[0], longest, sampling)

    def checked(server: ServerProtocol) -> Awaitable[About]:
        return check_settings(server, longest, sampling) if wanted is None else check(server, wanted)

    async def all_kinds() -> list[str]:
        opened = clients(urls, api_key_env, _TRY_S)
        asking = [asyncio.ensure_future(_kind(client, checked, patience_s)) for client in opened]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:  # after the first error
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            for client in opened:
                await client.close()

    kinds = asyncio.run(all_kinds())
    return "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


async def _kind(client: Client, checked: Callable[[ServerProtocol], Awaitable[About]], patience_s: float) -> str:
    end, reported = time.monotonic() + patience_s, False
    while True:
        left = end - time.monotonic()
        try:
            server = await connect(client, max(0.1, min(_TRY_S, left)))
            return (await checked(server)).kind
        except ServerError as error:
            why = str(error)
        if time.monotonic() + _AGAIN_S > end:
            raise ConfigError(
                f"engine.urls: {client.url} does not answer within {patience_s:g} s ({why}); start it, or "
                "correct the url."
            )
        if not reported:
            reported = True
            logger.warning(f"engine.urls: {client.url}: {why}; waiting for it, at most {patience_s:g} s")
        await asyncio.sleep(_AGAIN_S)
