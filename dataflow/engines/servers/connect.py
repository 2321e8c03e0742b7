"""Connecting: which protocol a server speaks, and whether it serves the model of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError, base_of, same_server
from dataflow.engines.servers.protocol import SHAPE, About, ServerProtocol
from dataflow.engines.servers.sglang import INFO, SglangServer
from dataflow.engines.servers.vllm import EXTENSION, VllmServer
from dataflow.engines.vocabulary import Vocabulary
from dataflow.errors import ConfigError
from dataflow.system.address import is_address, without_login
from dataflow.system.secrets import key_of, redact

KEY = "engine.api_key_env"
_TEXT = "The quick brown fox: 12 + 34 = 46.\nNa\u00efve? Yes, #### 7"


@dataclass(frozen=True)
class Wanted:
    """What a run needs of its servers.

    Attributes:
        model: directory of the actor.
        vocabulary: of the actor.
        longest: tokens of a prompt and its response together.
        sampling: of training.
    """

    model: str
    vocabulary: Vocabulary
    longest: int
    sampling: Sampling


def clients(urls: Sequence[str], api_key_env: str | None, timeout_s: float) -> list[Client]:
    """Returns a client for each url.

    Raises:
        ConfigError: there is no url, one is no address or is given twice, or the environment variable holds no key.
    """
    check_urls(urls)
    key = key_of(api_key_env, KEY)
    if key and any(without_login(url)[1] for url in urls):
        raise ConfigError(f"{KEY} is given, and engine.urls also hold a password; give one of the two.")
    return [Client(url, key, timeout_s) for url in urls]


def check_urls(urls: Sequence[str]) -> None:
    """Checks the addresses of servers.

    Raises:
        ConfigError: there is none, or one is no address or is given twice.
    """
    if not urls:
        raise ConfigError("engine.rollout=server needs the servers' addresses; give engine.urls=[http://host:port].")
    for url in urls:
        if not is_address(url):
            raise ConfigError(f"engine.urls: {redact(str(url))} is not an address; give http://host:port.")
        if "?" in url or "#" in url:
            raise ConfigError(f"engine.urls: {redact(url)} has a query; put a key into the variable of {KEY}.")
    names = [same_server(url) for url in urls]
    if twice := next((url for url, name in zip(urls, names, strict=True) if names.count(name) > 1), None):
        raise ConfigError(f"engine.urls names {redact(base_of(twice))} twice; give each server once.")


async def connect(client: Client, limit_s: float) -> ServerProtocol:
    """Finds out which protocol a server speaks.

    Raises:
        ServerError: it does not answer.
        ConfigError: it speaks none that is known, or refuses the key.
    """
    try:
        answer = await _page(client, "/version", limit_s)
        if isinstance(answer, dict) and "version" in answer:
            return VllmServer(client, str(answer["version"]))
        for page in INFO:
            answer = await _page(client, page, limit_s)
            if isinstance(answer, dict) and "model_path" in answer:
                return SglangServer(client, page)
    except ServerError as error:
        raise explained(client.url, error) from error
    raise ConfigError(
        f"engine.urls: {client.url} is neither vLLM's OpenAI server nor SGLang's; give the address of one of these."
    )


def explained(url: str, error: ServerError) -> Exception:
    """Returns an error as one for the user if only the configuration can help, else as it is."""
    if error.status in (401, 403):
        return ConfigError(
            f"engine.urls: {url} refuses the key ({error}); give {KEY}=VARIABLE, an environment variable that holds "
            "one which this server accepts."
        )
    return error


async def _page(client: Client, path: str, limit_s: float) -> Any:
    try:
        return await client.get(path, limit_s)
    except ServerError as error:
        if error.status in (404, 405):
            return None
        raise


async def check(server: ServerProtocol, wanted: Wanted) -> About:
    """Checks that a server serves the model of the run, and reports what it is.

    Raises:
        ServerError: it does not answer.
        ConfigError: it has another model, tokenizer or vocabulary, or is not started as it must be.
    """
    about = await check_settings(server, wanted.longest, wanted.sampling)
    where = f"engine.urls: {server.client.url}"
    try:
        _check_shape(about, wanted.model, where)
        await _check_tokenizer(server, wanted, where)
    except ServerError as error:
        raise explained(server.client.url, error) from error
    return about


async def check_settings(server: ServerProtocol, longest: int, sampling: Sampling) -> About:
    """Checks that a server is started as the run needs it, whatever its model is, and reports what it is.

    Args:
        server: the server.
        longest, sampling: see :class:`Wanted`.

    Raises:
        ServerError: it does not answer.
        ConfigError: it is not started as it must be.
    """
    try:
        about = await server.about()
    except ServerError as error:
        raise explained(server.client.url, error) from error
    where = f"engine.urls: {server.client.url}"
    if about.longest is not None and about.longest < longest:
        raise ConfigError(
            f"{where} reads {about.longest} tokens, and a prompt with its response may have {longest}; "
            "start it with a longer context, or lower data.max_prompt_length or engine.max_tokens."
        )
    _check_log_probs(about, sampling, where)
    if about.cpu and not about.extended:
        raise ConfigError(
            f"{where} computes on a CPU, where vLLM's own reload keeps a part of the old weights; start it with "
            f"--worker-extension-cls {EXTENSION} --logprobs-mode processed_logits."
        )
    return about


def _check_log_probs(about: About, sampling: Sampling, where: str) -> None:
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    plain = sampling.temperature in (0, 1) and sampling.repetition_penalty == 1
    fits = {"uncut": True, "raw": plain, "processed": not cuts, "none": False}[about.log_probs]
    if fits:
        return
    choices = [] if cuts else ["--logprobs-mode processed_logprobs"]
    choices.append(f"--worker-extension-cls {EXTENSION} --logprobs-mode processed_logits")
    raise ConfigError(
        f"{where} does not report the log-probs of what these settings sample (temperature, top_p, top_k, min_p, "
        f"repetition_penalty); start it with {' or '.join(choices)}."
    )


def _check_shape(about: About, model: str, where: str) -> None:
    """Compares the configurations of the models, where the server tells its own, or has it on this machine, too."""
    own = _config(model)
    other = about.shape or _config(about.root)
    for name in SHAPE:
        if name in own and other.get(name) not in (None, own[name]):
            raise ConfigError(
                f"{where} serves another model ({about.root}: {name} {other[name]}, of model.path {own[name]}); "
                f"start it with {model}."
            )


def _config(model: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(model, "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def _check_tokenizer(server: ServerProtocol, wanted: Wanted, where: str) -> None:
    model, own = wanted.model, wanted.vocabulary
    there = await server.tokens_of(_TEXT)
    if there is not None and there != own.tokenizer.encode(_TEXT, add_special_tokens=False):
        raise ConfigError(f"{where} has another tokenizer than model.path={model}; start it with that model.")
    if not await server.knows(own.size - 1):
        raise ConfigError(
            f"{where} has a smaller vocabulary than the {own.size} tokens of model.path={model}; "
            "start it with that model."
        )
