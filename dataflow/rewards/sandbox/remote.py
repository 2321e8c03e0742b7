"""A sandbox behind HTTP that speaks the protocol of SandboxFusion, as verl's ``sandbox_fusion`` does.

verl's own client waits in threads, cannot be cancelled, and returns a failure of the service as a failed test case.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dataflow.errors import ConfigError
from dataflow.rewards.retry import Retry, may_pass, read_retry_after
from dataflow.rewards.sandbox.outcome import Outcome, SandboxError, Status, short

if TYPE_CHECKING:
    import aiohttp

_EXTRA_S = 10.0
"""Seconds for a request, besides those of the program."""
_STDERR = 2000  # characters that are kept


class RemoteSandbox:
    """Runs programs at a service.

    Args:
        url: of the service; without a path, ``/run_code`` is added.
        timeout: seconds that compiling may take, and again that the program may.
        memory_limit_mb: of the program.
        language: of the program, as the service names it.
        retry: tries of one program after transient errors of the service.

    Attributes:
        retried: number of such tries.

    Raises:
        ConfigError: the url is not an address.
    """

    def __init__(self, url: str, timeout: float, memory_limit_mb: int, language: str, retry: Retry) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"reward manager 'sandbox': url={url} is not an address; give http://host:port/run_code.")
        self._url = url if parts.path.strip("/") else f"{url.rstrip('/')}/run_code"
        self._timeout, self._retry = timeout, retry
        self._options = {
            "compile_timeout": timeout,
            "run_timeout": timeout,
            "memory_limit_MB": memory_limit_mb,
            "language": language,
            "files": {},
            "fetch_files": [],
        }
        self._session: aiohttp.ClientSession | None = None
        self.retried = 0

    async def run(self, source: str, stdin: str) -> Outcome:
        """Runs a program.

        Raises:
            SandboxError: the service fails, or cannot be reached.
        """
        for tried in itertools.count(1):
            try:
                return outcome_of(await self._sent({**self._options, "code": source, "stdin": stdin}), self._url)
            except SandboxError as error:
                if tried >= self._retry.tries or not self._retry.again(error):
                    raise
                self.retried += 1
                await asyncio.sleep(self._retry.wait_s(tried, error))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _sent(self, body: Mapping[str, Any]) -> Any:
        import aiohttp

        if self._session is None:  # made here: it belongs to the running event loop
            limit = aiohttp.ClientTimeout(total=2 * self._timeout + _EXTRA_S)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit)
        try:
            async with self._session.post(self._url, json=body) as reply:
                text = await reply.text(errors="replace")
                if reply.status != 200:
                    raise SandboxError(
                        f"the sandbox {self._url} answered {reply.status}: {short(text) or 'without a message'}",
                        status=reply.status,
                        retry=may_pass(reply.status),
                        retry_after=read_retry_after(reply.headers) or None,
                    )
            return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            reason = short(str(error)) or "no answer in time"
            raise SandboxError(f"the sandbox {self._url}: {type(error).__name__}: {reason}") from error


def outcome_of(reply: Any, url: str) -> Outcome:
    """Reads the reply of a service.

    Raises:
        SandboxError: it is an error of the service, or unknown.
    """
    reply = reply if isinstance(reply, Mapping) else {}
    whole, compiled, ran = reply.get("status"), reply.get("compile_result") or {}, reply.get("run_result") or {}
    if whole == "Failed" and (failed := _failed(compiled)):
        return Outcome("compile_error", stderr=f"{failed}: {compiled.get('stderr') or ''}"[-_STDERR:])
    if whole == "Failed" and (status := _failed(ran)):
        return Outcome(status, str(ran.get("stdout") or ""), str(ran.get("stderr") or "")[-_STDERR:])
    if whole == "Success" and ran.get("status") == "Finished":
        return Outcome("finished", str(ran.get("stdout") or ""), str(ran.get("stderr") or "")[-_STDERR:])
    message = short(str(reply.get("message") or json.dumps(reply, default=str)))
    raise SandboxError(f"the sandbox {url} answered with status {whole!r}: {message}")


def _failed(result: Mapping[str, Any]) -> Status | None:
    """Returns how compiling or running failed; None if it did not."""
    if result.get("status") == "TimeLimitExceeded":
        return "timeout"
    wrong = result.get("status") == "Error" or (result.get("status") == "Finished" and result.get("return_code") != 0)
    return "runtime_error" if wrong else None
