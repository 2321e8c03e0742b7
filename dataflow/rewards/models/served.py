"""ServedReward: the reward object of a reward model, which sends each request to the model's server or router."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import Client, JudgeError, JudgeUnreachable, address_of
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.judge.rubric import estimate
from dataflow.rewards.models.conversation import Renderer, messages_of
from dataflow.system.http import short

_AGAIN_S = 0.5
"""Seconds between two tries while the server is down: nothing says when it listens again."""
_JUDGE_KEY = re.compile(r"\bjudge\.([a-z_]+)")
_LOGIN = "http://USER:PASSWORD@HOST:PORT"
_OTHER = {
    "the log of the server at judge.url": "the server's log, in servers/ of the run's directory if the run serves it",
    "the environment variable that judge.api_key_env names holds a key that this server accepts": (
        f"judge.url holds a login that this server accepts, {_LOGIN}"
    ),
}
"""What a message says of keys that a judge has and a reward model has not, and what it says in place of that."""
_OWN = ("url", "timeout")
"""Keys of a judge that are keys of the model itself; the others are those of its prompt."""


class ServedReward:
    """Scores with a reward model; a reward object for the RewardAgent.

    While the server is down, such as when the run restarts it, a request tries again until the agent's time-out.

    Args:
        name: of the model in ``reward.models``, under which it is served.
        url: of its server, or of the router in front of several; None before they run, for checks of the others.
        path: directory of the model, whose tokenizer makes the token ids that are sent; None sends messages.
        kind: ``classify`` and ``pooling`` ask for the raw score of a head, ``chat`` asks a judge.
        template: file of a chat template.
        max_model_len: longest input in tokens.
        timeout: of one call, in seconds.
        normalize: ``none`` or ``sigmoid``; with the latter a column ``raw_score`` has what the model returned.
        prompt: of kind ``chat``, see :class:`~dataflow.rewards.judge.judge.Judge`.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        path: str | None = None,
        kind: Literal["classify", "pooling", "chat"] = "classify",
        template: str | None = None,
        max_model_len: int | None = None,
        timeout: float | None = 60.0,
        normalize: str = "none",
        prompt: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._down = name, False
        self._sigmoid = normalize == "sigmoid"
        base = "http://127.0.0.1" if url is None else url
        self._model: Judge | _Head
        try:
            if kind == "chat":
                self._model = Judge(base, model=name, timeout=timeout, **(prompt or {}))
            else:
                self._model = _Head(name, base, kind, path, template, max_model_len, timeout)
        except ConfigError as error:
            raise ConfigError(self._with_keys(str(error))) from error
        self.tokens, self.usage, self.close = self._model.tokens, self._model.usage, self._model.close

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests the score of a response.

        Returns:
            ``score``; ``tokens`` where they are known; of kind ``chat`` what a judge returns; of the others, if the
            input is rendered here, ``truncated``, the tokens cut off.

        Raises:
            JudgeError: there is no reply in time, an HTTP error, or no score in the reply.
        """
        while True:
            try:
                columns = await self._model.compute_score(data_source, solution_str, ground_truth, extra_info)
                break
            except JudgeError as error:
                if not _is_down(error):
                    error.args, error.fix = (self._with_keys(str(error)),), self._with_keys(error.fix)
                    raise
                if not self._down:  # which a time-out would not say
                    self._down = True
                    why = self._with_keys(str(error))
                    logger.warning(f"reward model '{self.name}': {why}; it is asked again until reward.timeout.")
            await asyncio.sleep(_AGAIN_S)
        self._down = False
        if self._sigmoid:
            raw = columns["score"]
            columns |= {"score": 0.5 * (1.0 + math.tanh(raw / 2)), "raw_score": raw}
        return columns

    def _with_keys(self, text: str) -> str:
        """Returns a message of a judge with the keys of this model."""
        section = f"reward.models.{self.name}"

        def own(key: re.Match[str]) -> str:
            return f"{section}.{key[1]}" if key[1] in _OWN else f"{section}.prompt.{key[1]}"

        for words, own_words in _OTHER.items():
            text = text.replace(words, own_words)
        text = _JUDGE_KEY.sub(own, text.replace("judge.model", section))
        return text.replace("the judge", f"reward model '{self.name}'")


def _is_down(error: JudgeError) -> bool:
    """Whether nothing listens at the address, or a router has no server: 502 and 503 are the router's own."""
    return isinstance(error, JudgeUnreachable) or (error.status in (502, 503) and error.retry_after is None)


class _Head:
    """The client of a model with a classification head, behind vLLM's ``/classify`` or ``/pooling``."""

    def __init__(
        self,
        name: str,
        url: str,
        kind: Literal["classify", "pooling"],
        path: str | None,
        template: str | None,
        max_model_len: int | None,
        timeout: float | None,
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
        self._url = address_of(url, f"/{kind}")
        self._client = Client(timeout=timeout)
        self._render = None if path is None else Renderer(path, template, max_model_len, self._key)
        # Rendering takes milliseconds for a long chat, and tokenizers may not be used by two threads at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"render {name}")
        self._counts = {"tokens": 0, "calls": 0, "truncated": 0}

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """See :meth:`ServedReward.compute_score`."""
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
        try:
            answer = await self._client.post(self._url, body)
        except JudgeError as error:
            if error.status in _FIXES:
                error.fix = _FIXES[error.status].format(key=self._key, name=self._name, kind=self._kind)
            raise
        score, tokens = self._read(answer)
        self._counts["calls"] += 1
        self._counts["tokens"] += columns.setdefault("tokens", tokens)
        self._count_cut(columns.get("truncated", 0))
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

    def _read(self, answer: Any) -> tuple[float, int]:
        """Returns the score in a reply, and the tokens that the server counted."""
        try:
            (row,) = answer["data"]
            numbers = row["probs"] if self._kind == "classify" else row["data"]
            if numbers and isinstance(numbers[0], list):
                numbers = numbers[-1]  # one for each token, of which the last has seen all
            count, value = len(numbers), numbers[0]
            tokens = (answer.get("usage") or {}).get("total_tokens")
        except (ValueError, LookupError, TypeError, AttributeError):
            text = short(json.dumps(answer))
            what = f"{self._url} answered without the scores of /{self._kind}: {text}"
            fix = f"see that a server of {self._key}.kind={self._kind} listens there"
            raise JudgeError(what, fix=fix) from None
        if count != 1:
            fix = f"serve a model with one label, or give {self._key}.kind=chat if it is a generative one"
            raise JudgeError(f"{self._url} answered {count} numbers, where a score is one", retry=False, fix=fix)
        if not isinstance(value, int | float) or not math.isfinite(value):
            fix = f"see the model's weights, and {self._key}.dtype"
            raise JudgeError(f"{self._url} answered a score that is {value!r}", retry=False, fix=fix)
        return float(value), tokens if isinstance(tokens, int) else 0

    def tokens(self, solution_str: str, extra_info: Mapping[str, Any] | None = None, **_arguments: Any) -> int:
        """Returns the estimated number of tokens of the input for this response."""
        letters = sum(len(turn["content"]) for turn in messages_of(solution_str, extra_info))
        tokens = estimate(letters)
        return tokens if self._render is None else min(tokens, self._render.limit)

    def usage(self) -> dict[str, float]:
        """Returns the tokens, calls and truncated inputs so far."""
        return dict(self._counts)

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
