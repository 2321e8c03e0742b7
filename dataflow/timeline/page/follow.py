"""The timeline of a run that goes on: its page on a loopback address, made anew as trace.json grows.

Nothing polls: a change of the file wakes the server, which wakes the browsers by server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from dataflow.errors import ConfigError, DataError, Interrupted
from dataflow.timeline import perfetto
from dataflow.timeline.page.html import text, waiting

if TYPE_CHECKING:
    from aiohttp import web

LEAST_S = 2.0
"""Seconds from one refresh to the next, at least."""
_REST = 4  # times as long as a refresh took, at least, until the next


def follow(run: str, port: int, told: Callable[[str], None], least_s: float = LEAST_S) -> None:
    """Serves a run's page until Ctrl-C or SIGTERM.

    Args:
        run: its directory, or its trace.json; neither needs to have anything in it yet, the directory must be there.
        port: to listen on; 0 for one that is free.
        told: gets the address once it can be opened.
        least_s: see :data:`LEAST_S`.

    Raises:
        Interrupted: it was told to end.
        DataError: there is no such directory.
        ConfigError: the port is taken.
    """
    path = Path(run)
    path = path if path.suffix == ".json" else path / "trace.json"
    if not path.parent.is_dir():
        raise DataError(f"no run at '{run}': there is no directory {path.parent}; give one that a run writes to.")
    asyncio.run(_serve(path, port, told, least_s))


async def _serve(path: Path, port: int, told: Callable[[str], None], least_s: float) -> None:
    from aiohttp import web

    follower = Follower(path, least_s)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop.set)
    # A browser that leaves ends its handler at once.
    runner = web.AppRunner(follower.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    watching = asyncio.create_task(follower.watch(stop))
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"--port {port}: {str(why).rstrip('.')}; give another one, or none.") from error
        told(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait([ended, watching], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # raises what ended it
        raise Interrupted("the page is no longer served")
    finally:
        stop.set()
        follower.end()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await runner.cleanup()


class Follower:
    """The newest page of a run, and who waits for the next one.

    Args:
        path: of its trace.json.
        least_s: seconds from one refresh to the next, at least.
    """

    def __init__(self, path: Path, least_s: float) -> None:
        self._path, self._least_s = path, least_s
        self._name = path.resolve().parent.name
        self._version = 1
        self._page = waiting(self._name, "This run has not begun.", 1)
        self._shown = False  # whether the page is of a trace
        self._next = asyncio.Event()
        self._ended = False

    def app(self) -> web.Application:
        """Returns what answers: the page at ``/``, the versions of it at ``/events``."""
        from aiohttp import web

        app = web.Application()
        app.add_routes([web.get("/", self._get), web.get("/events", self._events)])
        return app

    def end(self) -> None:
        """Lets the browsers' connections go."""
        self._ended = True
        self._next.set()

    async def watch(self, stop: asyncio.Event) -> None:
        """Makes the page, and makes it anew each time the file has changed."""
        from watchfiles import awatch

        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        changed.set()

        def ours(_kind: object, path: str) -> bool:
            return Path(path).name == self._path.name

        async def listen() -> None:
            changes = awatch(
                self._path.parent,
                watch_filter=ours,
                recursive=False,
                debounce=500,
                stop_event=stop,
                force_polling=False,
            )
            async for _ in changes:
                changed.set()

        listening = asyncio.create_task(listen())
        # It begins to watch before the first look at the file, so that no change falls between the two.
        await asyncio.sleep(0)
        try:
            await asyncio.to_thread(_load)
            while not self._ended:
                waited = asyncio.create_task(changed.wait())
                await asyncio.wait([waited, listening], return_when=asyncio.FIRST_COMPLETED)
                waited.cancel()
                if listening.done():
                    listening.result()
                    return
                changed.clear()
                begin = loop.time()
                await self._refresh()
                # A long run's page takes seconds to make, on cores that the run wants too.
                await asyncio.sleep(max(self._least_s, _REST * (loop.time() - begin)))
        finally:
            stop.set()
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _refresh(self) -> None:
        made = await asyncio.to_thread(self._make, self._version + 1)
        if made is not None:
            self._page, self._version = made, self._version + 1
            before, self._next = self._next, asyncio.Event()
            before.set()

    def _make(self, version: int) -> str | None:
        """The page of what the file holds now; None where that says nothing new."""
        if not self._path.is_file():
            return None
        try:
            trace = perfetto.read(self._path)
        except DataError as error:
            # Half a file is no reason to take the last whole one away.
            logger.debug(str(error))
            return None if self._shown else waiting(self._name, "Its trace cannot be read yet.", version)
        if not trace.spans:
            return None if self._shown else waiting(self._name, "No task of this run has ended yet.", version)
        self._shown = True
        policy = str(trace.meta.get("policy", "run"))
        return text({policy: trace}, title=f"{self._name} ({policy})", version=version)

    async def _get(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(text=self._page, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        while not self._ended:
            following = self._next
            await response.write(f"data: {self._version}\n\n".encode())
            await following.wait()
        return response


def _load() -> None:
    """Loads what makes the page, which takes longer than the first page does."""
    import bokeh.embed
    import bokeh.layouts
    import bokeh.plotting  # noqa: F401
