"""One of vLLM's OpenAI servers, started with ``VLLM_SERVER_DEV_MODE=1`` and this package's worker extension.

Samples come from ``/v1/completions`` with token ids there and back. New weights are read from a directory by the
worker's own ``reload_weights``. With the extension the server reports log-probs as the trainer computes them, and
follows tied weights on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError
from dataflow.system.address import is_address, without_login
from dataflow.system.http import THROTTLED, may_pass, message_in, reason, short, wait_asked
from dataflow.system.secrets import key_of, redact

if TYPE_CHECKING:
    import aiohttp

KEY = "engine.api_key_env"
EXTENSION = "dataflow.engines.vllm.worker.RolloutWorker"
_PROBE_S, _CONNECT_S = 60.0, 10.0
_SHAPE = ("architectures", "vocab_size", "num_hidden_layers", "hidden_size", "tie_word_embeddings")
"""Entries of config.json in which the models of run and server must agree."""


class ServerError(Exception):
    """A request to an inference server was not answered as it should; ``status`` is the reply's, if that is the error.

    ``wait_s`` are the seconds to wait before the next request, as the server asks.
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


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turns what goes wrong in reading the reply to a request into a :class:`ServerError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"{what} is not answered as expected ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Wanted:
    """What a run needs of its servers.

    ``model`` is the directory of the actor, None if it is not on this machine yet; ``longest`` the tokens of a prompt
    and its response together.
    """

    model: str | None
    longest: int


class Server:
    """The requests to one server; each raises :class:`ServerError` if it is not answered as it should.

    A user name and a password in ``url`` are sent as a header.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = _base_of(url)
        header = f"Bearer {key}" if key else without_login(url)[1]
        self._headers = {"Authorization": header} if header else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    async def check(self, wanted: Wanted) -> str:
        """Returns what the server is, in words; raises ConfigError if it cannot serve the run."""
        where = f"engine.urls: {self.url}"
        try:
            version, models = await self._get("/version"), await self._get("/v1/models")
            info = await self._get("/server_info?config_format=json")
        except ServerError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"{where}: {error}; give vLLM's OpenAI server, started with VLLM_SERVER_DEV_MODE=1 in its environment, "
                "where nobody else can reach it."
            ) from error
        with _reading("GET /server_info"):
            (first, *_), config = models["data"], info["vllm_config"]
            self._model, longest = first["id"], int(first["max_model_len"])
            extension = config["parallel_config"].get("worker_extension_cls")
            mode = config["model_config"]["logprobs_mode"]
        if (extension, mode) != (EXTENSION, "processed_logits"):
            raise ConfigError(
                f"{where} does not report the log-probs that the trainer computes; start it with "
                f"--worker-extension-cls {EXTENSION} --logprobs-mode processed_logits."
            )
        if longest < wanted.longest:
            raise ConfigError(
                f"{where} reads {longest} tokens, and a prompt with its response may have {wanted.longest}; start it "
                "with a longer context, or lower data.max_prompt_length or engine.max_tokens."
            )
        if wanted.model is not None:
            # vLLM would keep the old values of weights that it has and the run has not.
            own = json.loads(Path(wanted.model, "config.json").read_text(encoding="utf-8"))
            found = await self._post("/collective_rpc", {"method": "shape_of_model", "args": list(_SHAPE)})
            with _reading("POST /collective_rpc"):
                shape = found["results"][0]
            if odd := [name for name in _SHAPE if shape.get(name) not in (None, own.get(name))]:
                raise ConfigError(
                    f"{where} serves another model ({odd[0]} {shape[odd[0]]}, of model.path {own.get(odd[0])}); start "
                    f"it with {wanted.model}."
                )
        return f"vLLM {version['version']}"

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int
    ) -> tuple[list[int], list[float], str]:
        """Samples one response; returns its token ids, the log-prob of each, and why it ended.

        ``ends`` are all tokens that end a response, and ``seed`` is below 2**63.
        """
        reply = await self._post(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": list(prompt),
                # All of them: else the server takes those of the model's generation_config.json.
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(0, sampling.top_k),
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": list(ends),
                "seed": seed,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        with _reading("POST /v1/completions"):
            (choice,) = reply["choices"]
            log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            return list(choice["token_ids"]), log_probs, choice["finish_reason"]

    async def label(self) -> str:
        """Returns the label of the weights that the server holds, which a restart loses."""
        reply = await self._get("/weight_info")
        with _reading("GET /weight_info"):
            return str(reply["weight_version"])

    async def load(self, directory: Path, label: str) -> None:
        """Makes the server load all weights of a directory, and hold their label once it has.

        If it fails, the server stays paused until it takes weights: a sample from half of them could end vLLM.
        """
        # First, so that a server that fails on the way does not pass for one with the old weights.
        await self._post("/update_weight_version", {"new_version": f"{label}, loading"})
        await self._post("/pause?mode=abort")  # mode=keep would go on with requests in flight from the new ones
        await self._post("/collective_rpc", {"method": "prepare_sampler"})
        try:
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self._post("/collective_rpc", asked)
        except ServerError as error:
            # 500 is an exception of its worker, and another try would have the same end. Others may pass.
            raise ServerError(str(error), status=400 if error.status == 500 else error.status) from error
        await self._post("/collective_rpc", {"method": "refresh_head"})
        await self._post("/reset_prefix_cache")
        await self._post("/resume")
        # Last, so that no paused server passes for one with the new weights.
        await self._post("/update_weight_version", {"new_version": label})

    async def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _get(self, path: str) -> Any:
        return await self._send("GET", path, None, _PROBE_S)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return await self._send("POST", path, body, self._timeout_s)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        """Sends JSON, and returns that of the reply; None if it is empty."""
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
            with _reading(what):
                return json.loads(raw) if raw else None
        failure = f"{what} answered {reply.status}: {message_in(raw.decode(errors='replace')) or reply.reason}"
        if reply.status in (401, 403):
            raise ConfigError(
                f"engine.urls: {self.url} refuses the key ({short(failure)}); give {KEY}=VARIABLE, an environment "
                "variable that holds one which this server accepts."
            )
        wait_s = wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", ""))
        raise ServerError(failure, status=reply.status, wait_s=wait_s)


def check_urls(urls: Sequence[str]) -> None:
    """Checks the addresses of servers: there is one at least, and none is given twice."""
    if not urls:
        raise ConfigError("engine.rollout=http needs the servers' addresses; give engine.urls=[http://host:port].")
    for url in urls:
        if not is_address(url):
            raise ConfigError(f"engine.urls: {redact(str(url))} is not an address; give http://host:port.")
    bases = [_base_of(url) for url in urls]
    if twice := next((base for base in bases if bases.count(base) > 1), None):
        raise ConfigError(f"engine.urls names {twice} twice; give each server once.")


def servers_at(urls: Sequence[str], api_key_env: str | None, timeout_s: float) -> list[Server]:
    """Returns the server at each url; raises ConfigError if the environment variable holds no key."""
    check_urls(urls)
    key = key_of(api_key_env, KEY)
    if key and any(without_login(url)[1] for url in urls):
        raise ConfigError(f"{KEY} is given, and engine.urls also hold a password; give one of the two.")
    return [Server(url, key, timeout_s) for url in urls]


def _base_of(url: str) -> str:
    """Returns the address of a server without user name, password and the path of OpenAI's API.

    >>> _base_of("http://me:secret@h:8000/v1/")
    'http://h:8000'
    """
    return without_login(url)[0].rstrip("/").removesuffix("/v1").rstrip("/")
