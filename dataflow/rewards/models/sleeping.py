"""Puts the servers of a reward model to sleep, so that their GPUs' memory is free, and wakes them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.errors import RunError
from dataflow.rewards.judge.client import root_of
from dataflow.system.address import without_login
from dataflow.system.http import short

if TYPE_CHECKING:
    import aiohttp

_AGAIN_S = 0.5
"""Seconds between two tries to reach a server that is being restarted."""


@dataclass(frozen=True)
class Sleeper:
    """The servers of one reward model.

    Attributes:
        model: its name.
        urls: of its servers, maybe with a login.
        limit_s: seconds that a server may take, a restart included.
        flag: file that is there while the servers sleep, for their keeper, which may be in another process.
    """

    model: str
    urls: Sequence[str]
    limit_s: float
    flag: str | None = None

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

        flag = None if self.flag is None else Path(self.flag)
        if flag is not None and not asleep:
            flag.unlink(missing_ok=True)
        if not self.urls:
            raise RunError(f"reward model '{self.model}' has no server; give reward.models.{self.model}.path or url.")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.limit_s)) as session:
            await asyncio.gather(*(self._one(session, url, call, asleep) for url in self.urls))
        if flag is not None and asleep:
            flag.parent.mkdir(parents=True, exist_ok=True)
            flag.touch()

    async def _one(self, session: aiohttp.ClientSession, url: str, call: str, asleep: bool) -> None:
        import aiohttp

        shown, login = without_login(url)
        root, headers = root_of(shown), {"Authorization": login} if login else {}
        end = time.monotonic() + self.limit_s
        while True:
            try:
                found, answer = await self._ask(session, root, call, headers)
                break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
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
            fix = "start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on a GPU"
            if "answered 5" in answer:  # it knows the call
                fix = "see its log, and give it less of the GPU's memory (gpu_memory)"
            does = f"server {root} does not {'sleep' if asleep else 'wake up'}"
            raise RunError(f"reward model '{self.model}': {does} ({answer}); {fix}, or give placement=own.")

    async def _ask(
        self, session: aiohttp.ClientSession, root: str, call: str, headers: Mapping[str, str]
    ) -> tuple[bool | None, str]:
        """Sends a call; returns whether the server sleeps then, None if it does not say so, and its answer."""
        async with session.post(f"{root}/{call}", headers=headers) as reply:
            if reply.status >= 400:
                return None, await _answer(f"/{call}", reply)
        async with session.get(f"{root}/is_sleeping", headers=headers) as reply:
            answer = await _answer("/is_sleeping", reply)
            try:
                found = json.loads(await reply.read())["is_sleeping"] if reply.status == 200 else None
            except (ValueError, RecursionError, LookupError, TypeError):
                found = None
        return found if isinstance(found, bool) else None, answer


async def _answer(call: str, reply: aiohttp.ClientResponse) -> str:
    """Returns the status and the begin of an answer in a few words."""
    return f"{call} answered {reply.status}: {short((await reply.read())[:1000].decode(errors='replace'))}"
