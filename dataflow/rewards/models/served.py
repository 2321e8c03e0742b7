"""ServedReward: the reward object of a reward model, which sends each request to the model's server or router."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.models.chat import calls_of, text_of, without
from dataflow.models.tokenizer import load_tokenizer
from dataflow.rewards.judge.client import Client, JudgeError, JudgeUnreachable, address_of
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.judge.rubric import estimate, question_of
from dataflow.system.http import short

_AGAIN_S = 0.5
"""Seconds between two tries while the server is down: nothing says when it listens again."""


class ServedReward:
    """Scores with a reward model; a reward object for the RewardAgent.

    While the server is down, such as when the run restarts it, a request tries again until the agent's time-out.

    Args:
        name: of the model in ``reward.models``, under which it is served.
        url: of its server, or of the router in front of several; None before they run, for checks of the others.
        path: directory of the model, whose special tokens are left out of the texts; None leaves the texts as they are.
        kind: ``classify`` and ``pooling`` ask for the raw score of a head, ``chat`` asks a judge.
        normalize: ``none`` or ``sigmoid``; with the latter a column ``raw_score`` has what the model returned.
        prompt: of kind ``chat``, see :class:`~dataflow.rewards.judge.judge.Judge`.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        path: str | None = None,
        kind: Literal["classify", "pooling", "chat"] = "classify",
        normalize: Literal["none", "sigmoid"] = "none",
        prompt: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._down, self._sigmoid = name, False, normalize == "sigmoid"
        base = "http://127.0.0.1" if url is None else url
        self._model: Judge | _Head
        try:
            self._model = Judge(base, name, **(prompt or {})) if kind == "chat" else _Head(name, base, kind, path)
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
        """Requests the score of a response; raises a JudgeError if there is an HTTP error, or no score in the reply.

        Returns ``score``; ``tokens`` where they are known; of kind ``chat`` what a judge returns.
        """
        while True:
            try:
                columns = await self._model.compute_score(data_source, solution_str, ground_truth, extra_info)
                break
            except JudgeError as error:
                # 502 and 503 are those of a router without servers.
                down = isinstance(error, JudgeUnreachable) or (error.status in (502, 503) and error.retry_after is None)
                if not down:
                    error.args, error.fix = (self._with_keys(str(error)),), self._with_keys(error.fix)
                    raise
                if not self._down:  # which a time-out would not say
                    self._down = True
                    logger.warning(f"reward model '{self.name}': {error}; it is asked again until reward.timeout.")
            await asyncio.sleep(_AGAIN_S)
        self._down = False
        if self._sigmoid:
            raw = columns["score"]
            columns |= {"score": 0.5 * (1.0 + math.tanh(raw / 2)), "raw_score": raw}
        return columns

    def _with_keys(self, text: str) -> str:
        """Returns a message of a judge with the keys of this model."""
        text = text.replace("judge.", f"reward.models.{self.name}.prompt.")
        return text.replace("the judge", f"reward model '{self.name}'")


class _Head:
    """The client of a model with a classification head, behind vLLM's ``/classify`` or ``/pooling``."""

    def __init__(self, name: str, url: str, kind: Literal["classify", "pooling"], path: str | None) -> None:
        self._name, self._kind, self._url = name, kind, address_of(url, f"/{kind}")
        self._client = Client()
        key = f"reward.models.{name}"
        # A response could spell them out, end its own turn with them, and write the next one.
        found = [] if path is None else load_tokenizer(str(Path(path).expanduser()), f"{key}.path").all_special_tokens
        self._special = [str(token) for token in found]
        self._counts = {"tokens": 0, "calls": 0}

    async def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """See :meth:`ServedReward.compute_score`."""
        chat = [
            {**turn, "content": without(turn["content"], self._special)} for turn in _chat(solution_str, extra_info)
        ]
        # The activation would be a sigmoid, or a softmax over one label, which is always 1.
        body = {"model": self._name, "use_activation": False, "messages": chat}
        score, tokens = self._read(await self._client.post(self._url, body))
        self._counts["calls"] += 1
        self._counts["tokens"] += tokens
        return {"score": score, "tokens": tokens}

    def _read(self, answer: Any) -> tuple[float, int]:
        """Returns the score in a reply, and the tokens that the server counted."""
        try:
            (row,) = answer["data"]
            numbers = row["probs"] if self._kind == "classify" else row["data"]
            if numbers and isinstance(numbers[0], list):
                numbers = numbers[-1]  # one for each token, of which the last has seen all
            (score,) = map(float, numbers)
            tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError):
            text = short(json.dumps(answer))
            fix = f"serve a model with one label, and see reward.models.{self._name}.kind"
            raise JudgeError(f"{self._url} answered without a score: {text}", fix=fix) from None
        if not math.isfinite(score):
            fix = f"see the model's weights, and reward.models.{self._name}.dtype"
            raise JudgeError(f"{self._url} answered a score that is {score}", retry=False, fix=fix)
        return score, tokens

    def tokens(self, solution_str: str, extra_info: Mapping[str, Any] | None = None, **_arguments: Any) -> int:
        """Returns the estimated number of tokens of the input for this response."""
        return estimate(sum(len(turn["content"]) for turn in _chat(solution_str, extra_info)))

    def usage(self) -> dict[str, float]:
        """Returns the tokens and calls so far."""
        return dict(self._counts)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _chat(solution: str, extra_info: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the chat that is scored: the prompt's messages, then the response or the turns of the conversation."""
    facts = extra_info or {}
    prompt, turns = facts.get("raw_prompt"), facts.get("conversation")
    chat = [{"role": "user", "content": question_of(facts)}] if prompt is None else list(prompt)
    chat += [{"role": "assistant", "content": solution}] if turns is None else list(turns)
    found = []
    for turn in chat:
        content, calls = turn.get("content"), calls_of(turn)
        named = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key) is not None}
        said = {"role": str(turn.get("role", "user")), "content": "" if content is None else text_of(content)}
        found.append({**said, **named, **({"tool_calls": calls} if calls else {})})
    return found
