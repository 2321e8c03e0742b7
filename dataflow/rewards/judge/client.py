"""The client of judges and reward models: JSON over HTTP, and the errors of a call. The agent retries and limits."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.system.address import is_address, without_login
from dataflow.system.http import may_pass, message_in, reason, short, wait_asked
from dataflow.system.secrets import key_of, redact

if TYPE_CHECKING:
    import aiohttp

_AGAIN_S = 0.5
"""Seconds between two tries: nothing says when a server elsewhere has started."""


class JudgeError(Exception):
    """The judge did not return a score.

    Attributes:
        status: HTTP status of the reply, if that is the error.
        retry: whether another try may succeed.
        retry_after: seconds to wait before it, if the server states them.
        fatal: whether the error ends the run, whatever the failure rule.
        fix: what the user can do.
    """

    status: int | None = None
    retry = True
    retry_after: float | None = None
    fatal = False
    fix = "see that the server replies as the OpenAI API does, and a judge with one line 'Score: <0..1>'"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(redact(message))
        vars(self).update({name: value for name, value in attributes.items() if value is not None})


class JudgeUnreachable(JudgeError, ConnectionError):
    """There was no connection to the judge, or it broke."""

    fix = "see that the server is up and can be reached from this machine"


class Client:
    """Sends JSON over one aiohttp session, which the first call opens; a call lasts until its caller gives it up."""

    def __init__(self, key: str | None = None) -> None:
        self._headers = _headers(key)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Sends one request, with a login in the url as basic authentication, and returns the JSON of the reply.

        Raises a JudgeError if there is no reply, or it is an error or no JSON.
        """
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The agent limits the calls. Many servers close idle connections after 5 s, and a request sent
                # meanwhile would be lost: close them earlier.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),  # a load balancer's would bind all calls to one server
            )
        failure: JudgeError | None = None
        try:
            # A redirect could take the key to another host.
            async with self._session.post(url, json=body, allow_redirects=False) as reply:
                text = await reply.text(errors="replace")
            answer = json.loads(text) if reply.status == 200 else {"error": {"code": reply.status}}
        except (aiohttp.ClientError, OSError) as error:
            failure = JudgeUnreachable(f"{url}: {type(error).__name__}: {reason(error)}")
        except ValueError as error:
            failure = JudgeError(f"{url} sent broken JSON, {short(str(error))}: '{short(text)}'")
        if failure is not None:
            raise failure  # not from another error: aiohttp's hold the request with its key, that of JSON the text
        # An error may come with status 200, as proxies of several providers send it.
        if isinstance(answer, Mapping) and (found := answer.get("error")):
            code = found.get("code") if isinstance(found, Mapping) else None
            wait_s = wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", "")) or None
            raise _refused(url, code if isinstance(code, int) else None, message_in(text), wait_s)
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _refused(url: str, status: int | None, text: str, wait_s: float | None) -> JudgeError:
    again = status is None or may_pass(status)
    fix = "correct what it objects to: the address, the model, the key or the request"
    if again:
        fix = "see the server's log, or lower reward.concurrency or reward.rpm"
    message = f"{url} answered {status or 'an error'}: {short(text) or 'without a message'}"
    return JudgeError(message, status=status, retry=again, retry_after=wait_s, fix=fix)


def address_of(url: str, path: str = "/v1/chat/completions") -> str:
    """Returns the full address of a server whose url may lack ``/v1``, or all of ``path``."""
    parts = urlsplit(url) if is_address(url) else None
    if parts is None or parts.query or parts.fragment:
        shown = redact(str(url).partition("?")[0])  # a key may follow
        raise ConfigError(f"judge.url={shown} is not an address; give http://host:port, without a query.")
    base = url.rstrip("/")
    return base if base.endswith(path.removeprefix("/v1")) else f"{base.removesuffix('/v1')}{path}"


def root_of(url: str) -> str:
    """Returns the address of a server without the path of its API.

    >>> root_of("http://v1.rewards:8000/"), root_of("http://h/proxy/v1"), root_of("https://h/classify")
    ('http://v1.rewards:8000', 'http://h/proxy', 'https://h')
    """
    return re.sub(r"(/v1)?(/chat/completions|/classify|/pooling)?/*$", "", url)


async def models_of(url: str, setting: str, patience_s: float, api_key_env: str | None = None) -> list[str]:
    """Waits until a server answers ``GET /v1/models``, and returns the models that it lists; none if it has no list.

    Raises a ConfigError, which names ``setting``, after ``patience_s`` seconds or if the server refuses the key.
    """
    import aiohttp

    what = f"{setting}={without_login(url)[0]}: the server"
    headers = _headers(key_of(api_key_env, "judge.api_key_env"))
    end, told = time.monotonic() + patience_s, False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience_s), headers=headers) as session:
        while True:
            try:
                async with session.get(f"{root_of(url)}/v1/models", allow_redirects=False) as reply:
                    text = await reply.text(errors="replace")
            except (aiohttp.ClientError, OSError) as error:
                why = reason(error)
            else:
                if reply.status in (401, 403):
                    raise ConfigError(f"{what} refuses GET /v1/models ({reply.status}); give a key that it accepts.")
                if reply.status < 500:
                    return _listed(text) if reply.status == 200 else []
                why = f"it answers {reply.status}"
            if time.monotonic() + _AGAIN_S > end:
                raise ConfigError(
                    f"{what} does not answer GET /v1/models within {patience_s:g} s ({why}); start it, or correct the "
                    "url."
                )
            if not told:
                logger.warning(f"{what} does not answer ({why}); waiting for it, at most {patience_s:g} s")
            told = True
            await asyncio.sleep(_AGAIN_S)


def _listed(text: str) -> list[str]:
    try:
        return [str(each["id"]) for each in json.loads(text)["data"]]
    except (ValueError, LookupError, TypeError):  # some servers list their models in another form, or not at all
        return []
