"""A sandbox behind HTTP that speaks the protocol of SandboxFusion, as verl's ``sandbox_fusion`` does.

verl's own client waits in threads, cannot be cancelled, loads torch and Ray, and scores failures of the service 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dataflow.errors import ConfigError
from dataflow.rewards.sandbox.cases import STDERR, Outcome, SandboxError, Status
from dataflow.system.address import is_address
from dataflow.system.http import may_pass, reason, short, wait_asked

if TYPE_CHECKING:
    import aiohttp

_EXTRA_S = 10.0
"""Seconds for a request, besides those of the program."""
_MOST = 16 << 20
"""Bytes of a reply: it is longer only by what the program printed."""


class RemoteSandbox:
    """Runs programs at a service; ``/run_code`` is added to a ``url`` without a path.

    ``timeout`` is the number of seconds that compiling may take, and again that the program may.
    """

    def __init__(self, url: str, timeout: float, memory_limit_mb: int, language: str) -> None:
        if not is_address(url):
            raise ConfigError(
                f"reward manager 'sandbox': url={short(str(url))} is not an address; give http://host:port/run_code."
            )
        parts = urlsplit(url)
        self._url = url if parts.path.strip("/") else parts._replace(path="/run_code").geturl()
        self._longest = 2 * timeout + _EXTRA_S
        limits = {"compile_timeout": timeout, "run_timeout": timeout, "memory_limit_MB": memory_limit_mb}
        self._options = {**limits, "language": language, "files": {}, "fetch_files": []}
        self._session: aiohttp.ClientSession | None = None

    async def run(self, source: str, stdin: str) -> Outcome:
        """Runs a program; SandboxError if the service fails or cannot be reached."""
        import aiohttp

        if self._session is None:  # made here: it belongs to the running event loop
            limit = aiohttp.ClientTimeout(total=self._longest)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit)
        try:
            async with self._session.post(self._url, json={**self._options, "code": source, "stdin": stdin}) as reply:
                if reply.status != 200:
                    text = short(await reply.text(errors="replace"))
                    raise SandboxError(
                        f"the sandbox {self._url} answered {reply.status}: {text or 'without a message'}",
                        status=reply.status,
                        retry=may_pass(reply.status),
                        retry_after=wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", "")),
                    )
                try:
                    await reply.content.readexactly(_MOST + 1)
                    return Outcome("output_limit")
                except asyncio.IncompleteReadError as whole:
                    return outcome_of(json.loads(whole.partial), self._url)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = f"no answer within {self._longest:g} s" if isinstance(error, TimeoutError) else reason(error)
            raise SandboxError(f"the sandbox {self._url}: {type(error).__name__}: {why}") from error

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


def outcome_of(reply: Any, url: str) -> Outcome:
    """Reads the reply of a service; SandboxError if it is an error of the service, or lacks what an outcome has."""
    reply = reply if isinstance(reply, Mapping) else {"message": reply}
    whole, compiled, ran = (reply.get(name) for name in ("status", "compile_result", "run_result"))
    ended = "finished" if compiled is None else _ended(compiled)
    if whole == "Failed" and ended in ("timeout", "runtime_error"):
        return Outcome("compile_error", stderr=f"{ended}: {compiled.get('stderr') or ''}"[-STDERR:])
    status = _ended(ran) if ended == "finished" else None
    if status is not None and (whole == "Success") == (status == "finished") and whole in ("Success", "Failed"):
        stdout, stderr = ran.get("stdout"), str(ran.get("stderr") or "")
        if status != "finished" or isinstance(stdout, str):
            return Outcome(status, str(stdout or ""), stderr[-STDERR:])
    said = short(str(reply.get("message") or json.dumps(reply, default=str)))
    raise SandboxError(f"the sandbox {url} answered with status {whole!r}: {said}")


def _ended(result: Any) -> Status | None:
    """Returns how compiling or running ended; None if the service does not say, or failed itself: status ``Error``."""
    if not isinstance(result, Mapping):
        return None
    if result.get("status") == "TimeLimitExceeded":
        return "timeout"
    code = result.get("return_code")
    if result.get("status") != "Finished" or type(code) is not int:
        return None
    return "runtime_error" if code else "finished"
