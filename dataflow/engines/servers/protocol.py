"""What the pool needs of a server, whichever protocol it speaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError

SHAPE = ("architectures", "vocab_size", "num_hidden_layers", "hidden_size", "tie_word_embeddings")
"""Entries of config.json in which the models of run and server must agree."""
_TOKEN_BYTES = 1024
"""Bytes of a reply for each token of a response: its id and log-prob, and its text, which vLLM repeats three times."""
_PROMPT_BYTES = 16
"""Bytes for each token of the prompt: its id."""
_FRAME_BYTES = 1 << 20
"""Bytes for all else."""
LogProbs = Literal["uncut", "raw", "processed", "none"]
"""Which log-probs a server reports: ``uncut`` are those that the trainer computes, at the sampling temperature and
before the cuts; ``raw`` are at temperature 1 and without penalties; ``processed`` are after the cuts."""


@dataclass(frozen=True)
class About:
    """What a server says about itself.

    Attributes:
        kind: of the server, with its version.
        model: name of the model in requests.
        root: directory or hub id that the server has loaded.
        longest: tokens of a prompt and its response together; None if it does not say.
        log_probs: that it reports.
        cpu: whether it computes on a CPU.
        extended: whether its workers are of this package (vLLM).
        shape: entries of its model's config.json, as far as it tells them.
    """

    kind: str
    model: str
    root: str
    longest: int | None = None
    log_probs: LogProbs = "uncut"
    cpu: bool = False
    extended: bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DrawnSample:
    """A sample as a server returned it.

    Attributes:
        tokens, log_probs, finish: as of :class:`~dataflow.engines.base.Sample`.
        cached: prompt tokens found in the prefix cache.
        version: label of the weights, if the reply has it.
    """

    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    cached: int
    version: str | None


class ServerProtocol(Protocol):
    """Makes the requests of one server. Each method raises :class:`~dataflow.engines.servers.client.ServerError`."""

    client: Client

    async def about(self) -> About:
        """Reads what the server says about itself.

        Raises:
            ConfigError: it is not started as it must be.
        """
        ...

    async def tokens_of(self, text: str) -> list[int] | None:
        """Returns the token ids of a text by the server's tokenizer; None if it does not offer that."""
        ...

    async def knows(self, token: int) -> bool:
        """Whether the server's model has a token, as far as the server says."""
        ...

    async def sample(self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int) -> DrawnSample:
        """Samples one response.

        Args:
            prompt: token ids.
            sampling: how to draw.
            ends: tokens that end a response.
            seed: of its random numbers, below 2**63.
        """
        ...

    async def version(self, limit_s: float) -> str:
        """Returns the label of the weights that the server holds, which is that of its start if nobody set one."""
        ...

    async def load(self, directory: Path, version: str) -> None:
        """Makes the server load all weights of a directory, in which nothing may be in flight.

        Args:
            directory: which the server can read, with safetensors by Hugging Face name.
            version: their label, which the server holds once all are loaded.
        """
        ...


def reply_bytes(prompt: Sequence[int], sampling: Sampling) -> int:
    """Returns the bytes that the reply with a sample can need.

    Args:
        prompt: token ids.
        sampling: how it is drawn.
    """
    return _FRAME_BYTES + _PROMPT_BYTES * len(prompt) + _TOKEN_BYTES * sampling.max_tokens


def checked(tokens: Any, log_probs: Any, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Returns the tokens and log-probs of a reply.

    Raises:
        ServerError: they are not what was asked for.
    """
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ServerError("the reply has no token ids")
    if not 1 <= len(tokens) <= sampling.max_tokens:
        raise ServerError(f"the reply has {len(tokens)} tokens, where 1 to {sampling.max_tokens} were asked for")
    if not isinstance(log_probs, list) or len(log_probs) != len(tokens):
        number = len(log_probs) if isinstance(log_probs, list) else "no"
        raise ServerError(f"the reply has {number} log-probs for {len(tokens)} tokens")
    if not all(map(_is_log_prob, log_probs)):
        raise ServerError("the reply has log-probs that are no logarithms of probabilities")
    return tokens, [float(value) for value in log_probs]


def _is_log_prob(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value) and value <= 1e-3
    except OverflowError:  # an integer beyond all floats
        return False


def cached_of(number: Any) -> int:
    """Returns the prompt tokens that a server found in its prefix cache; 0 if it does not say.

    Raises:
        ServerError: it is no number of tokens.
    """
    if number is None:
        return 0
    if type(number) is not int or number < 0:
        raise ServerError(f"the reply has {str(number)[:40]} cached tokens, which is no number of tokens")
    return number


def finish_of(reason: Any, tokens: Sequence[int], ends: Sequence[int]) -> Literal["stop", "length"]:
    """Returns why a sample ended; by its last token, as SGLang says ``length`` of an end that is the last one allowed.

    Args:
        reason: what the server says.
        tokens: of the sample.
        ends: tokens that end a response.

    Raises:
        ServerError: the server did not finish it.
    """
    if reason in ("stop", "length"):
        return "stop" if reason == "stop" or tokens[-1] in ends else "length"
    raise ServerError(f"the server ended the sample with '{reason}'")


async def tokenized(client: Client, body: Mapping[str, Any], limit_s: float) -> list[int] | None:
    """Returns the token ids that ``/tokenize`` answers; None if the server does not have that page.

    Raises:
        ServerError: it does not answer.
    """
    try:
        return list((await client.post("/tokenize", body, limit_s))["tokens"])
    except ServerError as error:
        if error.refused:
            return None
        raise
    except (LookupError, TypeError) as error:
        raise ServerError("POST /tokenize is not answered with tokens") from error
