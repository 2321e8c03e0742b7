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
from dataflow.rewards.retry import Retry, read_retry_after
from dataflow.rewards.sandbox.outcome import Outcome, SandboxError, Status, short
from dataflow.system.address import is_address
from dataflow.system.http import may_pass
from dataflow.system.secrets import redact

if TYPE_CHECKING:
    import aiohttp

_EXTRA_S = 10.0
"""Seconds for a request, besides those of the program."""
_STDERR = 2000  # characters that are kept
_MOST = 16 << 20
"""Bytes of a reply: 1 MiB of output, as on this machine, takes at most 6 as JSON."""
_TOO_LONG = {"status": "output_limit"}


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
        if not is_address(url):
            shown = short(redact(str(url)))
            raise ConfigError(
                f"reward manager 'sandbox': url={shown} is not an address; give http://host:port/run_code."
            )
        parts = urlsplit(url)
        self._url = url if parts.path.strip("/") else parts._replace(path="/run_code").geturl()
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
                raw = await _beginning(reply.content, _MOST if reply.status == 200 else _STDERR)
                text = raw.decode(errors="replace")
                if reply.status != 200:
                    raise SandboxError(
                        f"the sandbox {self._url} answered {reply.status}: {short(text) or 'without a message'}",
                        status=reply.status,
                        retry=may_pass(reply.status),
                        retry_after=read_retry_after(reply.headers) or None,
                    )
            if len(raw) > _MOST:
                if b'"run_result"' in raw:  # what the program printed is too long, which is its own fault
                    return _TOO_LONG
                raise SandboxError(f"the sandbox {self._url} answered with more than {_MOST >> 20} MiB")
            return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            reason = short(str(error)) or "no answer in time"
            raise SandboxError(f"the sandbox {self._url}: {type(error).__name__}: {reason}") from error


async def _beginning(stream: aiohttp.StreamReader, most: int) -> bytes:
    """Returns a reply, or of a longer one a little more than ``most`` bytes."""
    raw = bytearray()
    while len(raw) <= most and (piece := await stream.read(1 << 16)):
        raw += piece
    return bytes(raw)


def outcome_of(reply: Any, url: str) -> Outcome:
    """Reads the reply of a service.

    Raises:
        SandboxError: it is an error of the service, or lacks what an outcome has.
    """
    if reply is _TOO_LONG:
        return Outcome("output_limit")
    whole = reply.get("status") if isinstance(reply, Mapping) else None
    compiled, ran = _result(reply, "compile_result"), _result(reply, "run_result")
    status = _ended(compiled)
    if whole == "Failed" and status in ("timeout", "runtime_error"):
        return Outcome("compile_error", stderr=f"{status}: {compiled.get('stderr') or ''}"[-_STDERR:])
    if compiled == {} or status == "finished":
        status = _ended(ran)
        stdout, stderr = ran.get("stdout"), str(ran.get("stderr") or "")[-_STDERR:]
        if whole == "Failed" and status in ("timeout", "runtime_error"):
            return Outcome(status, str(stdout or ""), stderr)
        if whole == "Success" and status == "finished" and isinstance(stdout, str):
            return Outcome(status, stdout, stderr)
    message = reply.get("message") if isinstance(reply, Mapping) else None
    message = short(str(message or json.dumps(reply, default=str)))
    raise SandboxError(f"the sandbox {url} answered with status {whole!r}: {message}")


def _result(reply: Any, name: str) -> Mapping[str, Any]:
    result = reply.get(name) if isinstance(reply, Mapping) else None
    return result if isinstance(result, Mapping) else {} if result is None else {"status": result}


def _ended(result: Mapping[str, Any]) -> Status | None:
    """Returns how compiling or running ended; None if the service does not say, or failed itself: status ``Error``."""
    if result.get("status") == "TimeLimitExceeded":
        return "timeout"
    code = result.get("return_code")
    if result.get("status") != "Finished" or not isinstance(code, int) or isinstance(code, bool):
        return None
    return "runtime_error" if code else "finished"
