"""Conversation: a rollout of several turns. The model may call tools, and continues with their answers.

Each sample is a conversation with a coroutine of its own, so a slow tool delays only its own conversation. A sample is
emitted when its conversation ends. The tokens of a tool's answer have mask 0 and log-prob 0, so the loss ignores them.

    prompt | model's turn ... <tool_call> ... eos | frame, answer, frame | model's turn ... eos |
    mask     1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1     0 0 0 0 0 0 0 0 0 0 0  1 1 1 1 1 1 1 1 1 1
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from dataflow.tools import Toolbox, ToolCall
    from dataflow.tools.toolbox import ToolCaller, ToolState


@dataclass(frozen=True)
class Talk:
    """How a rollout converses.

    Attributes:
        tools: that the model may call.
        max_turns: turns of the model in a conversation; a call in the last one is not answered.
        max_tokens: R, the tokens of all turns together, including the tools' answers; the engine must accept prompts of
            ``max_prompt_length + max_tokens`` tokens.
        max_prompt_length: tokens that a prompt with its descriptions of tools may have; None does not check.
    """

    tools: Toolbox
    max_turns: int
    max_tokens: int
    max_prompt_length: int | None = None


def turn_metrics(responses: Batch) -> dict[str, float]:
    """Returns ``tools/turns`` and ``tools/calls``, means over samples, and ``tools/errors``, the share that failed."""
    calls = sum(responses["tool_calls"])
    return {
        "tools/turns": sum(responses["turns"]) / len(responses),
        "tools/calls": calls / len(responses),
        "tools/errors": sum(responses["tool_errors"]) / max(1, calls),
    }


async def conversations(
    prompts: Batch, engine: RolloutEngine, sampling: Sampling, talk: Talk, seed: int
) -> AsyncGenerator[Sample, None]:
    """Yields each conversation as a sample when it ends; a caller that stops early abandons the others.

    A sample has the facts ``turns``, ``tool_calls``, ``tool_errors`` (ints), ``ended`` (``answer``, ``max_turns``,
    ``length`` or ``budget``), and ``extra_info``, which repeats the first three for the rewards, ``turns`` under verl's
    name ``num_turns``, and has the chat messages that follow the prompt as ``conversation``.

    Args:
        prompts: a row per prompt: ``prompt_ids``, and in ``extra_info`` the ``tools_kwargs`` of its tools.
        engine: draws the turns.
        sampling: how to draw a turn; ``n`` conversations per prompt, ``max_tokens`` of each turn.
        talk: tools and limits.
        seed: common to all conversations; turn t is drawn from the seed of (seed, group, index, t).

    Raises:
        DataError: ``tools_kwargs`` do not fit the tools.
        ModelError: the chat template cannot frame a tool's answer.
    """
    ended: asyncio.Queue[asyncio.Task[Sample]] = asyncio.Queue()
    extras = prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)
    async with talk.tools.open() as caller:
        going = [
            asyncio.create_task(Conversation(ids, extra, caller, talk).run(engine, sampling, (seed, group, index)))
            for group, ids, extra in zip(prompts.ids, prompts["prompt_ids"], extras, strict=True)
            for index in range(sampling.n)
        ]
        for one in going:
            one.add_done_callback(ended.put_nowait)
        try:
            for _ in going:
                yield (await ended.get()).result()
        finally:
            for one in going:
                one.cancel()
            await asyncio.gather(*going, return_exceptions=True)


@dataclass
class Conversation:
    """One conversation.

    Attributes:
        prompt: its token ids.
        extra_info: of its row.
        caller: calls tools.
        talk: tools and limits.
        tokens: of all turns so far, with mask and log-prob of each.
        messages: chat messages of all turns so far, of roles ``assistant`` and ``tool``.
    """

    prompt: Sequence[int]
    extra_info: Any
    caller: ToolCaller
    talk: Talk
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    errors: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    async def run(self, engine: RolloutEngine, sampling: Sampling, seed: tuple[int, int, int]) -> Sample:
        """Returns the whole conversation; the last two numbers of ``seed`` are its group and index."""
        state = self.caller.state(self.extra_info)
        version: int | None = None
        try:
            while True:
                room = self.talk.max_tokens - len(self.tokens)
                asked = replace(sampling, n=1, max_tokens=min(sampling.max_tokens, room))
                before = [*self.prompt, *self.tokens]
                turn = await engine.sample(before, asked, (*seed, self.turns))
                version = turn.version if version is None else min(version, turn.version)
                self._add(turn.tokens, turn.log_probs)
                self.turns += 1
                said, calls = await self.caller.apart(
                    self.talk.tools.read, before, turn.tokens, turn.finish != "length"
                )
                self.messages.append({"role": "assistant", "content": said})
                ended = await self._answer(before, turn, calls, state)
                if ended is not None:
                    break
        finally:
            await state.close()
        counts = {"tool_calls": self.calls, "tool_errors": self.errors}
        told = {"num_turns": self.turns, **counts, "conversation": self.messages}
        extra_info = {**own_copy(self.extra_info or {}), **told}
        facts = {"turns": self.turns, **counts, "ended": ended, "extra_info": extra_info}
        cut: Literal["stop", "length"] = "length" if ended in ("length", "budget") else "stop"
        return Sample(seed[1], seed[2], self.tokens, self.log_probs, version, cut, self.mask, facts)

    async def _answer(self, before: list[int], turn: Sample, calls: list[ToolCall], state: ToolState) -> str | None:
        """Calls the tools that the turn asks for; returns how the conversation ends, or None if it continues."""
        if turn.finish == "length":  # the turn was cut off, so no answer can follow it
            return "budget" if len(self.tokens) >= self.talk.max_tokens else "length"
        if not calls:
            return "answer"
        if self.turns >= self.talk.max_turns:
            return "max_turns"
        if len(self.tokens) >= self.talk.max_tokens:
            return "budget"
        answers = await asyncio.gather(*(state.answer(call) for call in calls))
        self.calls += len(answers)
        self.errors += sum(answer.failed for answer in answers)
        texts = [(call, answer.text) for call, answer in zip(calls, answers, strict=True)]
        self.messages += [{"role": "tool", "name": call.name, "content": text} for call, text in texts]
        room = self.talk.max_tokens - len(self.tokens)
        frame = await self.caller.apart(self.talk.tools.framed, before, turn.tokens, texts)
        self._add(frame[:room])
        return "budget" if len(frame) >= room else None

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Adds tokens of the model or, without log-probs, of a tool's answer."""
        self.tokens += tokens
        self.mask += [int(log_probs is not None)] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs
