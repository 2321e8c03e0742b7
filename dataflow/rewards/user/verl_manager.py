"""VerlManager: scores with a manager class written for verl's reward loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dataflow.errors import ConfigError, DataError, an
from dataflow.models.tokenizer import load_tokenizer
from dataflow.rewards.user.managers import LengthUnknown, Manager
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from verl import DataProto


class InexactResponse(DataError):
    """The tokens of a response cannot be recovered from its text."""

    fix = "pass the response's own tokens as extra_info['response_ids'], or score without this manager"


class VerlManager(Manager):
    """A reward object around a class with verl's ``async run_single(data)``.

    ``run_single`` gets a DataProto of one row with what verl's own managers read: ``responses``, ``attention_mask``,
    ``data_source``, ``reward_model`` (with ``ground_truth``), ``extra_info`` and, if present, ``raw_prompt``; no tokens
    of the prompt. The tokens of the response are ``extra_info["response_ids"]`` if present. Otherwise the text is
    encoded and padded with eos to ``extra_info["response_length"]``; a call fails if the result does not decode to the
    same text and length.

    A sync ``compute_score`` runs where the class runs it. verl's classes use the event loop's default threads, which
    the agent can neither stop nor count.

    Args:
        reward: a function, or an object with ``compute_score``, which is passed to the class.
        kind: the class; built at the first call, as verl's base class uses the running event loop.
        tokenizer: the model's tokenizer or its path.
        config: verl's configuration, as much of it as the class reads.
        options: further keywords of the class.

    Raises:
        ConfigError: there is no tokenizer, or the class does not accept the options.
    """

    wants_response_ids = True
    """The agent passes ``response_ids`` if the samples have them."""

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
            raise ConfigError(f"{what} decodes responses, as verl's managers do: give the option 'tokenizer'.")
        tokenizer = load_tokenizer(tokenizer, what) if isinstance(tokenizer, str) else tokenizer
        given = {"config": config or {}, "tokenizer": tokenizer, "compute_score": self.compute_score, **options}
        try:
            inspect.signature(kind).bind(**given)
        except TypeError as error:
            raise ConfigError(f"{what} cannot be built with {', '.join(given)} ({error}).") from error
        self._kind, self._given, self._tokenizer = kind, given, tokenizer
        self._manager: Any = None

        async def call(**arguments: Any) -> Any:
            return await self._run(arguments)

        call.__name__ = kind.__name__
        self.compute_score = call

    async def _run(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._built().run_single(row_of(self._tokenizer, **arguments))
        if not isinstance(answer, Mapping) or "reward_score" not in answer:
            raise ValueError(f"run_single returned {an(type(answer).__name__)} without 'reward_score'")
        score, columns = answer["reward_score"], dict(answer.get("reward_extra_info") or {})
        return {"acc": columns.get("score", score), **columns, "score": score}

    def _built(self) -> Any:
        from omegaconf import OmegaConf

        if self._manager is None:
            config = OmegaConf.create({"reward": {}, **self._given["config"]})
            self._manager = self._kind(**{**self._given, "config": config})
        return self._manager


def row_of(
    tokenizer: Any,
    *,
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> DataProto:
    """Returns a sample as verl's DataProto of one row.

    Returns:
        ``responses`` and ``attention_mask`` are int64 ``[1, length]``; see :class:`VerlManager` for the rest.

    Raises:
        LengthUnknown: ``extra_info`` has neither ``response_ids`` nor ``response_length``.
        InexactResponse: the text does not determine the tokens.
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
        raise LengthUnknown("verl's managers need the response's tokens, or at least their number")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    fill = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    ids += [fill] * (length - len(ids))
    if len(ids) != length or tokenizer.decode(ids, skip_special_tokens=True) != text:
        raise InexactResponse(
            f"the {length} tokens of a response cannot be recovered from its text: it encodes to others"
        )
    return ids
