"""What vLLM's and SGLang's servers share: the HTTP client, and what a run needs of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError
from dataflow.system.address import without_login
from dataflow.system.http import THROTTLED, may_pass, message_in, reason, short, wait_asked

if TYPE_CHECKING:
    import aiohttp

KEY = "engine.api_key_env"
PROBE_S = 30.0
"""Seconds for the answer to a question about the server."""
_CONNECT_S = 10.0
SHAPE = ("architectures", "vocab_size", "num_hidden_layers", "hidden_size", "tie_word_embeddings")
"""Entries of config.json in which the models of run and server must agree."""
_TEXT = "The quick brown fox: 12 + 34 = 46.\nNa\u00efve? Yes, #### 7"


class ServerError(Exception):
    """A request to an inference server was not answered as it should.

    Attributes:
        status: HTTP status of the reply, if that is the error.
        wait_s: seconds to wait before the next request, as the server asks.
    """

    def __init__(self, message: str, *, status: int | None = None, wait_s: float = 0.0) -> None:
        super().__init__(short(message).rstrip(": "))
        self.status = status
        self.wait_s = wait_s

    @property
    def throttled(self) -> bool:
        """Whether the server takes no more load for now."""
        return self.status in THROTTLED

    @property
    def refused(self) -> bool:
        """Whether the server would refuse this request again."""
        return self.status is not None and not may_pass(self.status)


class Client:
    """Sends JSON to one server, and reads JSON.

    Args:
        url: ``http://host:port``, with or without ``/v1``; a user name and a password in it are sent as a header.
        key: the API key, if the server requires one.
        timeout_s: of a request that has no limit of its own.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = base_of(url)
        header = f"Bearer {key}" if key else without_login(url)[1]
        self._headers = {"Authorization": header} if header else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, limit_s: float = PROBE_S) -> Any:
        """Returns the JSON of a page; raises as :meth:`post` does."""
        return await self._send("GET", path, None, limit_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends JSON, and returns that of the reply; None if it is empty.

        Raises:
            ServerError: there is no reply in time, or it is an error.
            ConfigError: the server refuses the key.
        """
        return await self._send("POST", path, body, self._timeout_s)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        import aiohttp

        if self._session is None:
            # The engine limits the requests. Servers close idle connections after 5 s: close them earlier.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        what = f"{method} {path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(_CONNECT_S, limit_s))
        # The library's own errors hold the headers: they are not chained.
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as reply:
                raw = await reply.read()
        except TimeoutError:
            raise ServerError(f"{what} was not answered within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{what}: {reason(error)}") from None
        if reply.status == 200:
            with reading(what):
                return json.loads(raw) if raw else None
        failure = f"{what} answered {reply.status}: {message_in(raw.decode(errors='replace')) or reply.reason}"
        if reply.status in (401, 403):
            raise ConfigError(
                f"engine.urls: {self.url} refuses the key ({short(failure)}); give {KEY}=VARIABLE, an environment "
                "variable that holds one which this server accepts."
            )
        wait_s = wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", ""))
        raise ServerError(failure, status=reply.status, wait_s=wait_s)

    async def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def base_of(url: str) -> str:
    """Returns the address of a server without user name, password and the path of OpenAI's API.

    >>> base_of("http://me:secret@h:8000/v1/")
    'http://h:8000'
    """
    return without_login(url)[0].rstrip("/").removesuffix("/v1").rstrip("/")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what goes wrong in reading the reply to a request into a :class:`ServerError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"{what} is not answered as expected ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Wanted:
    """What a run needs of its servers.

    Attributes:
        model: directory of the actor; None if it is not on this machine yet.
        tokenizer: of the actor.
        longest: tokens of a prompt and its response together.
        sampling: of training.
    """

    model: str | None
    tokenizer: Any
    longest: int
    sampling: Sampling


async def check_model(
    client: Client, wanted: Wanted, longest: int, root: str, asked: Mapping[str, Any], shape: Mapping[str, Any]
) -> None:
    """Checks that a server has the model of a run, as far as it shows that.

    Args:
        client, wanted: the server, and what the run needs.
        longest: tokens of a prompt and its response together that the server reads.
        root: directory or hub id of its model.
        asked: what ``/tokenize`` needs beside the text.
        shape: entries of its model's config.json; empty if it does not tell them.

    Raises:
        ServerError: it does not answer.
        ConfigError: it has another model or tokenizer, or a shorter context.
    """
    where = f"engine.urls: {client.url}"
    if longest < wanted.longest:
        raise ConfigError(
            f"{where} reads {longest} tokens, and a prompt with its response may have {wanted.longest}; start it with "
            "a longer context, or lower data.max_prompt_length or engine.max_tokens."
        )
    if wanted.model is None:
        return
    own, other = _config(wanted.model), shape or _config(root)
    for name in SHAPE:
        if other.get(name) not in (None, own.get(name)):
            raise ConfigError(
                f"{where} serves another model ({root}: {name} {other[name]}, of model.path {own.get(name)}); start it "
                f"with {wanted.model}."
            )
    reply = await client.post("/tokenize", {"prompt": _TEXT, "add_special_tokens": False, **asked})
    with reading("POST /tokenize"):
        tokens = reply["tokens"]
    if tokens != wanted.tokenizer.encode(_TEXT, add_special_tokens=False):
        raise ConfigError(f"{where} has another tokenizer than model.path={wanted.model}; start it with that model.")


def _config(model: str) -> Mapping[str, Any]:
    """Returns the configuration of a model that may be on this machine."""
    file = Path(model, "config.json")
    return json.loads(file.read_text()) if file.is_file() else {}
