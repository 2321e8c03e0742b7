"""Puts the servers of a reward model to sleep, so that their GPUs' memory is free, and wakes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataflow.errors import RunError

if TYPE_CHECKING:
    import aiohttp

_AGAIN_S = 0.5
"""Seconds between two tries to reach a server that is being restarted."""


@dataclass(frozen=True)
class Sleeper:
    """The servers of one reward model.

    Attributes:
        model: its name.
        urls: of its servers.
        limit_s: seconds that a server may take, a restart included.
    """

    model: str
    urls: Sequence[str]
    limit_s: float

    async def wake(self) -> None:
        """Wakes all servers; one that has been restarted meanwhile is awake.

        Raises:
            RunError: one does not answer, or stays asleep.
        """
        await self._all("wake_up", False)

    async def sleep(self) -> None:
        """Puts all servers to sleep.

        Raises:
            RunError: one does not answer, or cannot sleep.
        """
        await self._all("sleep?level=1", True)

    async def _all(self, call: str, asleep: bool) -> None:
        import aiohttp

        if not self.urls:
            raise RunError(f"reward model '{self.model}' has no server; give reward.models.{self.model}.path or url.")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.limit_s)) as session:
            await asyncio.gather(*(self._one(session, _root(url), call, asleep) for url in self.urls))

    async def _one(self, session: aiohttp.ClientSession, root: str, call: str, asleep: bool) -> None:
        import aiohttp

        end = time.monotonic() + self.limit_s
        while True:
            try:
                found = await self._ask(session, root, call)
                break
            except (aiohttp.ClientConnectionError, ConnectionError) as error:
                # Its keeper is restarting it; nothing says when another process listens.
                if time.monotonic() + _AGAIN_S > end:
                    raise RunError(
                        f"reward model '{self.model}': server {root} did not answer /{call} within {self.limit_s:g} s; "
                        "see its log in the run's directory servers/."
                    ) from error
            except TimeoutError as error:
                raise RunError(
                    f"reward model '{self.model}': server {root} took over {self.limit_s:g} s for /{call}; raise "
                    f"reward.models.{self.model}.start_timeout."
                ) from error
            await asyncio.sleep(_AGAIN_S)
        if found is not asleep:
            raise RunError(
                f"reward model '{self.model}': server {root} does not {'sleep' if asleep else 'wake up'}; start vLLM "
                "with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on a GPU, or give placement=own."
            )

    async def _ask(self, session: aiohttp.ClientSession, root: str, call: str) -> bool | None:
        """Sends a call; returns whether the server sleeps then, None if it does not say so."""
        async with session.post(f"{root}/{call}") as reply:
            if reply.status >= 400:
                return None
        async with session.get(f"{root}/is_sleeping") as reply:
            said = await reply.json() if reply.status == 200 else {}
        return said.get("is_sleeping") if isinstance(said, dict) else None


def _root(url: str) -> str:
    """Returns the address of a server, without the path of its API."""
    return url.split("/v1", 1)[0].rstrip("/")
