"""VerlManager: scores through a manager class that was written for verl's reward loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, DataError
from dataflow.rewards.user.managers import LengthUnknown, Manager
from dataflow.usercode.copies import own_copy
from dataflow.usercode.load import describe

if TYPE_CHECKING:
    from verl import DataProto


class InexactResponse(DataError):
    """The tokens of a response cannot be told from its text."""

    fix = "pass the response's own tokens as extra_info['response_ids'], or score without this manager"


class VerlManager(Manager):
    """A reward object around a class with verl's ``async run_single(data)``.

    It is called with a DataProto of one row, which holds what verl's own managers read: ``responses``,
    ``attention_mask``, ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info`` and, if there is one,
    ``raw_prompt``; no tokens of the prompt. The tokens of the response are ``extra_info["response_ids"]`` where those
    are passed. Otherwise the text is encoded anew and filled up with eos to ``extra_info["response_length"]``, and a
    call is refused if that does not give the same text and length.

    A sync ``compute_score`` runs where the class runs it: in verl's own that is the event loop's default threads,
    which the agent can neither end nor count.

    Args:
        reward: a function, or an object with ``compute_score``, which is what the class gets.
        kind: the class; built with the first call, since verl's base class takes the running event loop.
        tokenizer: that of the policy, or its path.
        config: in the shape of verl's, as much of it as the class reads.
        options: further keywords of the class.

    Raises:
        ConfigError: no tokenizer, or options that the class does not take.
    """

    wants_response_ids = True
    """The agent passes them where the samples have them."""

    def __init__(
        self,
        reward: Any,
        kind: type,
        *,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(reward)
        what = f"reward manager '{kind.__name__}'"
        if tokenizer is None:
            raise ConfigError(f"{what} is one of verl's, which decode the response: give the option 'tokenizer'.")
        tokenizer = _loaded(tokenizer, what) if isinstance(tokenizer, str) else tokenizer
        given = {"config": config or {}, "tokenizer": tokenizer, "compute_score": self.compute_score, **options}
        try:
            inspect.signature(kind).bind(**given)
        except TypeError as error:
            raise ConfigError(f"{what} cannot be built with {', '.join(given)} ({error}).") from error
        self._kind, self._given, self._tokenizer = kind, given, tokenizer
        self._manager: Any = None

        async def call(**arguments: Any) -> Any:
            return await self._ask(arguments)

        call.__name__ = kind.__name__
        self.compute_score = call

    async def _ask(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._built().run_single(row_of(self._tokenizer, **arguments))
        if not isinstance(answer, Mapping) or "reward_score" not in answer:
            raise ValueError(f"run_single returned a {type(answer).__name__} without 'reward_score'")
        score, columns = answer["reward_score"], dict(answer.get("reward_extra_info") or {})
        return {"acc": columns.get("score", score), **columns, "score": score}

    def _built(self) -> Any:
        from omegaconf import OmegaConf

        if self._manager is None:
            config = OmegaConf.create({"reward": {}, **self._given["config"]})
            self._manager = self._kind(**{**self._given, "config": config})
        return self._manager


def _loaded(path: str, what: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: no tokenizer can be loaded from {path} ({describe(error)}).") from error


def row_of(
    tokenizer: Any,
    *,
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> DataProto:
    """Returns the sample as verl's DataProto of one row: ``responses`` and ``attention_mask`` int64 ``[1, length]``.

    Raises:
        LengthUnknown: ``extra_info`` has neither ``response_ids`` nor ``response_length``.
        InexactResponse: the text alone does not give the tokens.
    """
    import numpy as np
    import torch
    from verl import DataProto

    facts = dict(extra_info or {})
    given = facts.pop("response_ids", None)
    ids = _encoded(tokenizer, solution_str, facts.get("response_length")) if given is None else given
    responses = torch.as_tensor(ids, dtype=torch.int64).reshape(1, -1)
    objects = {
        "data_source": data_source,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": facts,
        **({"raw_prompt": own_copy(facts["raw_prompt"])} if "raw_prompt" in facts else {}),
    }
    columns = {name: np.empty(1, dtype=object) for name in objects}
    for name, value in objects.items():
        columns[name][0] = value
    tensors = {"responses": responses, "attention_mask": torch.ones_like(responses)}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def _encoded(tokenizer: Any, text: str, length: int | None) -> list[int]:
    if length is None:
        raise LengthUnknown("a manager of verl's needs the response's tokens, or at least their number")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    fill = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    ids += [fill] * (length - len(ids))
    if len(ids) != length or tokenizer.decode(ids, skip_special_tokens=True) != text:
        raise InexactResponse(f"a response of {length} tokens cannot be told from its text: encoded anew, it differs")
    return ids
