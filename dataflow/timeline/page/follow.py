"""Serves the timeline page of a running run on a loopback address and refreshes it as trace.json grows.

Nothing polls: the server watches the file and notifies browsers with server-sent events.
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
"""Minimum seconds between two refreshes."""
_REST = 4  # minimum pause after a refresh, as a multiple of the time it took


def follow(run: str, port: int, on_address: Callable[[str], None], least_s: float = LEAST_S) -> None:
    """Serves a run's page until Ctrl-C or SIGTERM.

    Args:
        run: directory of the run, which must exist but may be empty, or its trace.json.
        port: port to listen on; 0 for any free port.
        on_address: called with the address once the page can be opened.
        least_s: see :data:`LEAST_S`.

    Raises:
        Interrupted: Ctrl-C or SIGTERM ended it.
        DataError: the directory does not exist.
        ConfigError: the port is taken.
    """
    path = Path(run)
    path = path if path.suffix == ".json" else path / "trace.json"
    if not path.parent.is_dir():
        raise DataError(f"no run at '{run}': there is no directory {path.parent}; give one that a run writes to.")
    asyncio.run(_serve(path, port, on_address, least_s))


async def _serve(path: Path, port: int, on_address: Callable[[str], None], least_s: float) -> None:
    import watchfiles  # noqa: F401 - the watcher's, which is missed before an address is printed
    from aiohttp import web

    follower = Follower(path, least_s)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, stop.set)
    # A closed connection cancels its handler at once.
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
        on_address(f"http://127.0.0.1:{runner.addresses[0][1]}/")
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
    """Holds the newest page of a run and serves it, with an event for each new version.

    Args:
        path: the run's trace.json.
        least_s: minimum seconds between two refreshes.
    """

    def __init__(self, path: Path, least_s: float) -> None:
        self._path, self._least_s = path, least_s
        self._name = path.resolve().parent.name
        self._version = 1
        self._page = waiting(self._name, "This run has not begun.", 1)
        self._shown = False  # True once the page shows a trace
        self._next = asyncio.Event()
        self._ended = False

    def app(self) -> web.Application:
        """Returns the web application: the page at ``/``, its version numbers at ``/events``."""
        from aiohttp import web

        app = web.Application()
        app.add_routes([web.get("/", self._get), web.get("/events", self._events)])
        return app

    def end(self) -> None:
        """Ends all open connections."""
        self._ended = True
        self._next.set()

    async def watch(self, stop: asyncio.Event) -> None:
        """Renders the page, and again after each change of the file."""
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
        # Start watching before the file is first read, so that no change in between is missed.
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
                # The page of a long run takes seconds to render, on cores that the run needs.
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
        """Returns the page of the file as it is now; None to keep the current page."""
        if not self._path.is_file():
            return None
        try:
            trace = perfetto.read(self._path)
        except DataError as error:
            # Keep the last complete page while the file is incomplete.
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
    """Imports bokeh ahead of the first page, as importing takes longer than rendering."""
    import bokeh.embed
    import bokeh.layouts
    import bokeh.plotting  # noqa: F401
