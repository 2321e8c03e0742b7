"""HTTP router: one address for all reward models of a run, for users' reward functions (``reward_router_address``).

    python -m dataflow.rewards.models.http_router --models FILE --port 0

prints ``{"url": ...}`` on one line when it is ready; it ends on SIGTERM and at the end of its standard input. FILE
holds ``{NAME: {"url": [...], "slots": 64, "routing": "least", "timeout": 60}}``. A request of any path goes to a server
of the model that its body names (``model``); with one model the body need not name it. Replies of up to 1 MiB are
passed on whole, others as they arrive, so they may be streams. A call that fails before the first byte of its reply is
passed on goes to another server, and one that is answered with a status 4xx does once. ``GET /health`` says which
servers answer, ``GET /v1/models`` lists the models.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.judge.client import addresses
from dataflow.rewards.judge.server import serve
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import EndpointQueue, Limiter
from dataflow.rewards.limits.router import Probing, Router, is_doubtful
from dataflow.rewards.retry import is_overload
from dataflow.system import clock
from dataflow.system.address import listening, without_login
from dataflow.system.http import short
from dataflow.system.loopback import ADDRESS

if TYPE_CHECKING:
    from aiohttp import web
    from multidict import CIMultiDict

_BODY = 1 << 28  # bytes
_WHOLE = 1 << 20  # bytes of a reply that is passed on only when it is there: until then another server may give one
_PREFIX = 500  # letters of an input by which it is recognised as having the same prompt
_HOP = frozenset({
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te",
    "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers that concern one connection only."""


class RoutedModel(BaseModel):
    """The servers of one model."""

    model_config = ConfigDict(extra="ignore")

    url: list[str]
    slots: PositiveInt = 64
    routing: Literal["least", "prefix"] = "least"
    timeout: PositiveFloat = 60.0
    """Seconds until a reply of up to 1 MiB is there; until a longer one begins, and between two parts of it."""


class _Failed(Exception):
    """A server answered with a status of 400 or more."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.status = status


class _Slot:
    """A request that waits for a slot of a server."""

    endpoint = ""
    tokens = 0
    second = False

    def __init__(self, number: int, prefers: str, avoids: tuple[str, ...]) -> None:
        self.priority = (0, 0, number)
        self.prefers, self.avoids = prefers, avoids
        self.granted: asyncio.Future[EndpointQueue] = asyncio.get_running_loop().create_future()

    @property
    def wanted(self) -> bool:
        return not self.granted.done()


class _Servers:
    """The servers of one model, with their limits and their health; on the running event loop.

    Args:
        name: of the model.
        model: its servers.
        probing: how ejected servers are probed; by default calls fail after the model's time-out without any server.
    """

    def __init__(self, name: str, model: RoutedModel, probing: Probing | None = None) -> None:
        import aiohttp

        given, logins = zip(*map(without_login, model.url), strict=True)
        self._logins = dict(zip(given, logins, strict=True))
        self._roots = {url: url.rstrip("/").removesuffix("/v1") for url in given}
        self._name, self._timeout = name, model.timeout
        self._router = Router(given, model.slots, model.routing, _prompt_of, f"reward model '{name}'", probing)
        self._limiter = Limiter(self._router.limits(Limits(model.slots * len(given))), self._grant)
        self._router.open(self._limiter.queues, None if probing else model.timeout)
        self._numbers = itertools.count()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=model.timeout, sock_read=model.timeout),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _grant(self, slot: _Slot, queue: EndpointQueue) -> None:
        slot.granted.set_result(queue)

    async def pass_on(self, request: web.Request, raw: bytes, body: Mapping[str, Any]) -> web.StreamResponse:
        """Returns the reply of a server, or of another one after a failure."""
        failed: list[str] = []
        doubted: list[str] = []

        def may_resend(name: str, error: Exception) -> bool:
            again = self._router.failed(name, error) or self._router.may_differ(name, doubted, error)
            if is_doubtful(error):
                doubted.append(name)
            failed.append(name)
            return again and len(failed) < len(self._router.names)

        while True:
            queue = await self._slot(body, tuple(failed))
            begun, error, reply = clock.now(), None, None
            try:
                reply, error = await self._call(request, queue.name, raw, may_resend)
            finally:
                overloaded = error is not None and is_overload(error)
                self._limiter.release(queue, begun, overloaded, 0, error)
            if error is None:
                self._router.answered(queue.name)
            if reply is not None:
                return reply
            assert error is not None
            if not isinstance(error, _Failed) and not may_resend(queue.name, error):
                raise _no_reply(self._name, queue.name, error, self._timeout)
            self._router.counts["resent"] += 1

    async def _slot(self, body: Mapping[str, Any], avoids: tuple[str, ...]) -> EndpointQueue:
        slot = _Slot(next(self._numbers), self._router.prefers(body), avoids)
        self._limiter.push(slot)
        self._limiter.fill()
        try:
            return await slot.granted
        except asyncio.CancelledError:  # the client has left
            if slot.granted.done() and not slot.granted.cancelled():
                self._limiter.release(slot.granted.result(), clock.now())
            raise

    async def _call(
        self, request: web.Request, name: str, raw: bytes, may_resend: Callable[[str, Exception], bool]
    ) -> tuple[web.StreamResponse | None, Exception | None]:
        """Calls a server.

        Returns:
            Its reply, as far as it came, None for none that should be passed on; and how it failed.
        """
        import aiohttp

        headers = _own(request.headers)
        if self._logins[name]:
            headers["Authorization"] = self._logins[name]
        begun: list[web.StreamResponse] = []
        try:
            address = f"{self._roots[name]}{request.rel_url.raw_path_qs}"
            call = self._session.request(request.method, address, data=raw, headers=headers, allow_redirects=False)
            return await self._router.guarded(name, self._copied(request, call, begun, partial(may_resend, name)))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not begun:
                return None, error
            if request.transport is None or request.transport.is_closing():
                return begun[0], None  # the client has left
            # The client has a part of the reply: it must see that the rest is missing.
            request.transport.abort()
            self._router.failed(name, error)
            return begun[0], error

    async def _copied(
        self, request: web.Request, call: Any, begun: list[web.StreamResponse], may_resend: Callable[[Exception], bool]
    ) -> tuple[web.StreamResponse | None, Exception | None]:
        """Passes a reply on as it arrives; ``begun`` takes one of which the client gets a part."""
        from aiohttp import web

        async with call as reply:
            failed = _Failed(reply.status) if reply.status >= 400 else None
            if failed is not None and may_resend(failed):
                return None, failed
            headers = _own(reply.headers)
            if reply.content_length is not None and reply.content_length <= _WHOLE:
                async with asyncio.timeout(self._timeout):
                    return web.Response(status=reply.status, headers=headers, body=await reply.read()), failed
            copy = web.StreamResponse(status=reply.status, headers=headers)
            begun.append(copy)
            await copy.prepare(request)
            async for piece in reply.content.iter_any():
                await copy.write(piece)
            await copy.write_eof()
            return copy, failed

    def health(self) -> dict[str, bool]:
        """Returns which servers take calls."""
        return self._router.health()

    async def close(self) -> None:
        """Ends probes and connections."""
        self._limiter.close()
        await self._router.close()
        await self._session.close()


class HttpRouter:
    """The application of the router.

    Args:
        models: by name.
        probing: how ejected servers are probed.
    """

    def __init__(self, models: Mapping[str, RoutedModel], probing: Probing | None = None) -> None:
        self._models, self._probing = models, probing
        self._servers: dict[str, _Servers] = {}

    def application(self) -> web.Application:
        """Returns the application; its servers are opened with it."""
        from aiohttp import web

        app = web.Application(client_max_size=_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._list)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        app.on_startup.append(self._open)
        app.on_cleanup.append(self._close)
        return app

    async def _open(self, _app: web.Application) -> None:
        for name, model in self._models.items():
            self._servers[name] = _Servers(name, model, self._probing)

    async def _close(self, _app: web.Application) -> None:
        for servers in self._servers.values():
            await servers.close()

    async def _health(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        found = {name: servers.health() for name, servers in self._servers.items()}
        good = all(any(servers.values()) for servers in found.values())
        return web.json_response({"status": "ok" if good else "out", "models": found}, status=200 if good else 503)

    async def _list(self, _request: web.Request) -> web.Response:
        from aiohttp import web

        now = int(clock.now())
        models = [{"id": name, "object": "model", "created": now, "owned_by": "dataflow"} for name in self._models]
        return web.json_response({"object": "list", "data": models})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            body = {}  # for the server to object to
        body = body if isinstance(body, dict) else {}
        return await self._of(body.get("model")).pass_on(request, raw, body)

    def _of(self, name: Any) -> _Servers:
        """Returns the servers of the model that a body names.

        Raises:
            HTTPNotFound: there are several models, and none of that name.
        """
        from aiohttp import web

        if isinstance(name, str) and name in self._servers:
            return self._servers[name]
        if len(self._servers) == 1:
            return next(iter(self._servers.values()))
        what = "the body names no model" if name is None else f"there is no reward model '{name}'"
        hint = (
            None if name is None else nearest(str(name), self._servers)
        ) or f"; there are {', '.join(self._servers)}."
        raise web.HTTPNotFound(text=_error(f"{what}{hint}", 404), content_type="application/json")


def _own(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Returns the headers of a message that do not concern one connection only; one may be there several times."""
    from multidict import CIMultiDict

    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)


def _no_reply(model: str, server: str, error: Exception, timeout: float) -> web.HTTPServiceUnavailable:
    from aiohttp import web

    why = f"{server}: {type(error).__name__}: {short(str(error))}".rstrip(": ")
    if isinstance(error, TimeoutError):
        why = f"{server} did not answer within {timeout:g} s (reward.models.{model}.timeout)"
    message = f"no server of reward model '{model}' answered; the last was {why}; see the logs of its servers."
    return web.HTTPServiceUnavailable(text=_error(message, 503), content_type="application/json")


def _error(message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "code": code}})


def _prompt_of(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        asked = next(
            (at for at, turn in enumerate(messages) if isinstance(turn, dict) and turn.get("role") == "user"), 0
        )
        return json.dumps(messages[: asked + 1])
    return json.dumps(body.get("prompt", body.get("input")))[:_PREFIX]


def read_models(file: Path) -> dict[str, RoutedModel]:
    """Returns the models that a file describes.

    Raises:
        ConfigError: it cannot be read, or describes none.
    """
    try:
        found = json.loads(file.read_text())
        models = {name: RoutedModel.model_validate(options) for name, options in found.items()}
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise ConfigError(f"--models={file} cannot be read: {short(str(error))}.") from error
    if not models:
        raise ConfigError(f"--models={file} names no model; give one.")
    for model in models.values():
        addresses([without_login(url)[0] for url in model.url], "")
    return models


def main(arguments: list[str] | None = None) -> int:
    """Runs the router from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dataflow.rewards.models.http_router", description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="JSON file with the servers of each model")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--listener", type=int, help="descriptor of a listening socket, in place of --port")
    given: Any = parser.parse_args(arguments)
    try:
        app = HttpRouter(read_models(given.models)).application()
        bound = listening(ADDRESS, given.port) if given.listener is None else socket.socket(fileno=given.listener)
        serve(app, bound, handler_cancellation=True)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
