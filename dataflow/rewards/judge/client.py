"""Client: one POST to an OpenAI-style server, and the errors of a call. The agent retries and limits the calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dataflow.errors import ConfigError
from dataflow.system.address import is_address, without_login
from dataflow.system.http import beginning_of_error, error_within, may_pass, message_in, reason, short, wait_asked
from dataflow.system.secrets import key_of, redact

if TYPE_CHECKING:
    import aiohttp

_FIXES = {
    400: "correct what the server objects to: judge.model, judge.options, or a prompt that is too long for the model",
    401: "see that the environment variable that judge.api_key_env names holds a key that this server accepts",
    404: "correct judge.url or judge.model: the server has no such address or no such model",
    429: "lower reward.rpm or reward.concurrency",
}
_FIXES |= {403: _FIXES[401], 422: _FIXES[400]}


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
    fix = "see that the judge at judge.url is up and replies with one line 'Score: <0..1>'"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(redact(message))
        vars(self).update({name: value for name, value in attributes.items() if value is not None})


class JudgeTimeout(JudgeError, TimeoutError):
    """The judge did not reply in time."""

    fix = "raise judge.timeout, or lower reward.concurrency if the judge is overloaded"


class JudgeUnreachable(JudgeError, ConnectionError):
    """There was no connection to the judge, or it broke."""

    fix = "see that the judge at judge.url is up and can be reached from this machine"


class Client:
    """Sends JSON over one aiohttp session, which the first call opens.

    Args:
        key: the API key, if the server requires one.
        timeout: seconds for a whole exchange; None for no limit.
    """

    def __init__(self, key: str | None = None, timeout: float | None = None) -> None:
        self._headers = _headers(key)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """Sends one request, with a login in the url as basic authentication, and returns the JSON of the reply.

        Raises:
            JudgeError: the server returns an error, no reply, or no JSON.
        """
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The agent limits the calls. Many servers close idle connections after 5 s, and a request sent
                # meanwhile would be lost: close them earlier.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),  # a load balancer's would bind all calls to one server
            )
        try:
            # A redirect could take the key to another host.
            async with self._session.post(url, json=body, allow_redirects=False) as reply:
                if reply.status != 200:
                    text = await beginning_of_error(reply.content.iter_any(), self._timeout)
                    wait_s = wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", ""))
                    raise _refused(url, reply.status, message_in(text), wait_s, reply.headers.get("Location"))
                raw = await reply.read()
                answer = json.loads(raw)
                found = error_within(answer, reply.headers)
                if found is not None:  # as proxies of several providers send it
                    raise _refused(url, found.status, found.message, found.wait_s)
                return answer
        except TimeoutError:
            failure: JudgeError = JudgeTimeout(f"{url} did not answer in time (judge.timeout={self._timeout})")
        except (aiohttp.ClientError, OSError) as error:
            failure = JudgeUnreachable(f"{url}: {type(error).__name__}: {short(str(error))}")
        except ValueError as error:
            sent = short(raw[:1000].decode(errors="replace"))
            failure = JudgeError(f"{url} sent broken JSON, {short(str(error))}: '{sent}'")
        raise failure  # not from aiohttp's error, which holds the headers of the request, and with them the key

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _refused(url: str, status: int | None, text: str, wait_s: float, location: str | None = None) -> JudgeError:
    again = status is None or may_pass(status)
    fix = _FIXES.get(status or 0, "see the log of the server at judge.url" if again else "see what the server says")
    if location:
        fix = redact(f"set judge.url to the address that it redirects to: {short(location)}")
    message = f"{url} answered {status or 'an error'}: {short(text) or 'without a message'}"
    return JudgeError(message, status=status, retry=again, retry_after=wait_s or None, fix=fix)


def address_of(url: str, path: str = "/v1/chat/completions") -> str:
    """Returns the full address of a server.

    Args:
        url: ``http://host:port``, with or without ``/v1`` or all of the path.
        path: of the requests.

    Raises:
        ConfigError: the url is no address.
    """
    parts = urlsplit(url) if is_address(url) else None
    if parts is None or parts.query or parts.fragment:
        shown = redact(str(url).partition("?")[0])  # a key may follow
        raise ConfigError(
            f"judge.url={shown} is not an address; give http://host:port, without a query; "
            "for several servers give a router's."
        )
    base = url.rstrip("/")
    return base if base.endswith(path.removeprefix("/v1")) else f"{base.removesuffix('/v1')}{path}"


def root_of(url: str) -> str:
    """Returns the address of a server without the path of its API.

    >>> root_of("http://v1.rewards:8000/"), root_of("http://h/proxy/v1"), root_of("https://h/classify")
    ('http://v1.rewards:8000', 'http://h/proxy', 'https://h')
    """
    return re.sub(r"(/v1)?(/chat/completions|/classify|/pooling)?/*$", "", url)


def models_in(text: str) -> list[str]:
    """Returns the names of the models in a reply to ``GET /v1/models``; ValueError if it is no list of models."""
    try:
        return [str(each["id"]) for each in json.loads(text)["data"]]
    except (LookupError, TypeError) as error:
        raise ValueError("the reply is no list of models") from error


def check_judge(url: str, api_key_env: str | None, model: str, patience_s: float) -> str:
    """Asks a server for its models, and for no score, which may cost money; returns that it answers, as a clause.

    A model that the server does not list is named in the clause, and no error: some servers list no aliases.

    Raises:
        ConfigError: it does not answer within these seconds, or not without another key.
    """
    name = without_login(url)[0]
    what = f"judge.url={name}: the server"

    async def ask() -> str:
        import aiohttp

        key = key_of(api_key_env, "judge.api_key_env")
        limit = aiohttp.ClientTimeout(total=patience_s)
        async with aiohttp.ClientSession(timeout=limit, headers=_headers(key)) as session:
            try:
                async with session.get(f"{root_of(url)}/v1/models", allow_redirects=False) as reply:
                    status, text = reply.status, await reply.text(errors="replace")
            except (aiohttp.ClientError, OSError) as error:
                raise ConfigError(f"{what} does not answer ({reason(error)}); start it, or correct the url.") from None
            if status in (401, 403):
                raise ConfigError(f"{what} refuses GET /v1/models ({status}); {_FIXES[401]}.")
            if status >= 500:
                raise ConfigError(f"{what} answers {status} to GET /v1/models; see its log, or correct the url.")

        return text if status == 200 else ""

    text, listed = asyncio.run(ask()), list[str]()
    with suppress(ValueError):  # it lists its models in another form, or not at all
        listed = models_in(text)
    unknown = f", but lists no model '{model}' (judge.model): it has {', '.join(listed[:5])}"
    return f"{name} answers{unknown if listed and model not in listed else ''}"
