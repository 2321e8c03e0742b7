"""Classifier: a reward model with a classification head, behind vLLM's ``/classify`` or ``/pooling``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import Client, JudgeError, addresses
from dataflow.rewards.judge.rubric import estimate, question_of
from dataflow.rewards.limits.router import Router, Routing
from dataflow.rewards.models.conversation import Renderer, messages_of
from dataflow.rewards.results import read_number
from dataflow.system.address import without_login
from dataflow.system.http import short
from dataflow.usercode.numeric import count_of


class Classifier:
    """A reward object that asks servers of one model for its raw score; one call is one request.

    Args:
        name: of the model, in requests and messages.
        url: of the servers.
        kind: which of the two addresses they serve.
        path: directory of the model, whose tokenizer makes the token ids that are sent; None sends messages, which the
            server renders.
        template: file of another chat template than the tokenizer's.
        max_model_len: longest input in tokens; None for the model's positions.
        slots: calls in flight at one server.
        routing: see :class:`~dataflow.rewards.limits.router.Router`.
        timeout: of one call, in seconds.

    Attributes:
        router: of the servers.

    Raises:
        ConfigError: an address, or what is needed of the model's directory.
    """

    def __init__(
        self,
        name: str,
        url: Sequence[str],
        kind: Literal["classify", "pooling"],
        path: str | None = None,
        template: str | None = None,
        max_model_len: int | None = None,
        slots: int | None = None,
        routing: Routing = "least",
        timeout: float | None = 60.0,
    ) -> None:
        self._key = f"reward.models.{name}"
        if path is None:
            for option, value in (("template", template), ("max_model_len", max_model_len)):
                if value is not None:
                    raise ConfigError(
                        f"{self._key}.{option}={value}: without {self._key}.path the server renders the chat with its "
                        f"own; give path, the directory of the model, or leave {option} out."
                    )
        self._name, self._kind = name, kind
        given = [without_login(each)[0] for each in url]
        self._address = dict(zip(given, addresses(url, f"/{kind}"), strict=True))
        self._client = Client(timeout=timeout)
        self.router = Router(given, slots, routing, _prompt_of, f"reward model '{name}'")
        self._render = None if path is None else Renderer(path, template, max_model_len, self._key)
        # Rendering takes milliseconds for a long chat, and tokenizers may not be used by two threads at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"render {name}")
        self._counts = {"tokens": 0, "calls": 0, "truncated": 0}

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests the score of a response.

        Returns:
            ``score``; ``tokens``, the length of the input; if that is rendered here ``truncated``, the tokens cut off.

        Raises:
            JudgeError: there is no reply in time, an HTTP error, or no score in the reply.
        """
        chat = messages_of(solution_str, extra_info)
        # The activation would be a sigmoid, or a softmax over one label, which is always 1.
        body: dict[str, Any] = {"model": self._name, "use_activation": False}
        columns: dict[str, Any] = {}
        if self._render is None:
            body["messages"] = chat
        else:
            loop = asyncio.get_running_loop()
            ids, cut = await loop.run_in_executor(self._thread, self._render, chat)
            body["input"] = [ids]
            columns = {"tokens": len(ids), "truncated": cut}
            self._count_cut(cut)
        name = self.router.server()
        url = self._address[name]
        try:
            answer = await self.router.guarded(name, self._client.post(url, body))
        except JudgeError as error:
            if error.status in _FIXES:
                error.fix = _FIXES[error.status].format(key=self._key, name=self._name, kind=self._kind)
            raise
        score, tokens = self._read(url, answer)
        self._counts["calls"] += 1
        self._counts["tokens"] += columns.setdefault("tokens", tokens)
        return {"score": score, **columns}

    def _count_cut(self, cut: int) -> None:
        if not cut:
            return
        assert self._render is not None
        if not self._counts["truncated"]:
            logger.warning(
                f"reward model '{self._name}': an input has {cut} tokens more than its {self._render.limit} "
                f"({self._key}.max_model_len, or the model's positions); the begin of its prompt was cut off. The "
                "column and the metric 'truncated' say for which inputs, and for how many."
            )
        self._counts["truncated"] += 1

    def _read(self, url: str, answer: Any) -> tuple[float, int]:
        """Returns the score in a reply, and the tokens that the server counted."""
        try:
            (row,) = answer["data"]
            if row.get("index", 0) != 0:
                raise LookupError
            numbers = row["probs"] if self._kind == "classify" else row["data"]
            if numbers and isinstance(numbers[0], list):
                numbers = numbers[-1]  # one for each token, of which the last has seen all
            count, value = len(numbers), numbers[0]
            tokens = (answer.get("usage") or {}).get("total_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            what = f"{url} answered without the scores of /{self._kind}: {short(json.dumps(answer))}"
            fix = f"see that a server of {self._key}.kind={self._kind} listens there"
            raise JudgeError(what, fix=fix) from None
        if count != 1:
            fix = f"serve a model with one label, or give {self._key}.kind=chat if it is a generative one"
            raise JudgeError(f"{url} answered {count} numbers, where a score is one", retry=False, fix=fix)
        try:
            return read_number(value), count_of(tokens) or 0
        except ValueError as error:
            fix = f"see the model's weights, and {self._key}.dtype"
            raise JudgeError(f"{url} answered a score that is {error}", retry=False, fix=fix) from None

    @property
    def endpoints(self) -> list[str]:
        """The names of the servers: the urls as given, without passwords."""
        return list(self.router.names)

    def tokens(self, solution_str: str, extra_info: Mapping[str, Any] | None = None, **_arguments: Any) -> int:
        """Returns the estimated number of tokens of the input for this response."""
        letters = sum(len(turn["content"]) for turn in messages_of(solution_str, extra_info))
        tokens = estimate(letters)
        return tokens if self._render is None else min(tokens, self._render.limit)

    def usage(self) -> dict[str, float]:
        """Returns the tokens, calls and truncated inputs so far, and the router's counts."""
        return {**self._counts, **self.router.counts}

    async def close(self) -> None:
        """Closes the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._client.close()


_FIXES = {
    400: "correct what the server objects to; an input that is too long is truncated only with {key}.path, the "
    "directory of the model",
    404: "see that the server serves /{kind} (vllm serve --runner pooling) and a model of the name '{name}' "
    "(--served-model-name)",
}
_FIXES[422] = _FIXES[400]


def _prompt_of(arguments: Mapping[str, Any]) -> str:
    return question_of(arguments.get("extra_info"))
