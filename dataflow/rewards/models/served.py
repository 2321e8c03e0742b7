"""ServedReward: the reward object of a served model, of any kind."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.limits.router import Router, Routing
from dataflow.rewards.models.classifier import Classifier

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
    """Scores with the servers of one reward model; a reward object for the RewardAgent.

    Args:
        name: of the model in ``reward.models``, under which it is served.
        url: of the servers; None before they run, for checks of the other options.
        path: directory of the model, None for one that is served elsewhere.
        kind: ``classify`` and ``pooling`` ask for the raw score of a head, ``chat`` asks a judge.
        template: file of a chat template.
        max_model_len: longest input in tokens.
        slots: calls in flight at one server.
        routing: see :class:`~dataflow.rewards.limits.router.Router`.
        timeout: of one call, in seconds.
        normalize: ``none`` or ``sigmoid``; with the latter a column ``raw_score`` has what the model returned. With
            ``running`` the score is raw, too, since a stage of the graph normalises it.
        prompt: of kind ``chat``, see :class:`~dataflow.rewards.judge.judge.Judge`.

    Attributes:
        router: of the servers.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        name: str,
        url: str | Sequence[str] | None = None,
        path: str | None = None,
        kind: Literal["classify", "pooling", "chat"] = "classify",
        template: str | None = None,
        max_model_len: int | None = None,
        slots: int = 64,
        routing: Routing = "least",
        timeout: float | None = 60.0,
        normalize: str = "none",
        prompt: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._kind = name, kind
        if normalize not in ("none", "sigmoid", "running"):
            raise ConfigError(f"reward.models.{name}.normalize={normalize}; give none, sigmoid or running.")
        self._sigmoid = normalize == "sigmoid"
        if url is None:  # the address is not called
            url, path = "http://127.0.0.1", None if kind == "chat" else path
        urls = [url] if isinstance(url, str) else list(url)
        how: dict[str, Any] = {"slots": slots, "routing": routing, "timeout": timeout}
        self._model: Judge | Classifier
        try:
            if kind == "chat":
                self._model = Judge(urls, model=name, what=f"reward model '{name}'", **how, **(prompt or {}))
            else:
                self._model = Classifier(name, urls, kind, path, template, max_model_len, **how)
        except ConfigError as error:
            raise ConfigError(self._with_keys(str(error))) from error
        assert self._model.router is not None
        self.router: Router = self._model.router
        self.endpoints, self.tokens, self.usage = self._model.endpoints, self._model.tokens, self._model.usage
        self.close = self._model.close

    async def compute_score(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests the score of a response; see the kinds for what is returned and raised."""
        try:
            columns = await self._model.compute_score(data_source, solution_str, ground_truth, extra_info)
        except JudgeError as error:
            error.args, error.fix = (self._with_keys(str(error)),), self._with_keys(error.fix)
            raise
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
