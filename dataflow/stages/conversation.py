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
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.graph import Carried, TaskInfo, stage
from dataflow.metrics import Provisional
from dataflow.stages.rollout import VALIDATION_SEED, check_version, emit_batches, length_metrics, not_emitted
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from dataflow.tools import Toolbox, ToolCall
    from dataflow.tools.toolbox import ToolCaller, ToolState


@stage(writes="responses", on="gpu", role="samples", streams=True)
async def conversation(
    prompts: Batch,
    weights_version: Annotated[int | None, Carried],
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    tools: Toolbox,
    max_turns: int,
    max_response_tokens: int,
    seed: int,
    max_prompt_length: int | None = None,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Samples ``sampling.n`` conversations per prompt with the weights the policy allows. Replaces ``rollout``.

    Args:
        prompts: a row per prompt: ``prompt_ids``, ``raw_prompt`` (chat messages), ``extra_info`` (its ``tools_kwargs``
            hold arguments of the tools for this sample) and what the reward needs.
        weights_version: of the weights that the engine must hold; None before the first sync.
        engine: holds the weights; must accept prompts of ``max_prompt_length + max_response_tokens`` tokens.
        sampling: how to draw a turn; ``max_tokens`` bounds each turn.
        tools: the tools that the model may call.
        max_turns: turns of the model in a conversation; a call in the last one is not answered.
        max_response_tokens: R, the tokens of all turns together, including the tools' answers.
        seed: of the run; turn t of a sample is drawn from the seed of (run and step, group, index, t).
        max_prompt_length: tokens that a prompt with its descriptions of tools may have; None does not check.
        sleeps: see :func:`~dataflow.stages.rollout.rollout`.
        task: gives the step, and takes rollout's metrics, ``tools/turns`` and ``tools/calls`` (means over samples) and
            ``tools/errors`` (the share of calls that failed).

    Returns:
        What :meth:`RolloutEngine.batch` returns, padded to ``max_response_tokens``, with columns ``turns``,
        ``tool_calls``, ``tool_errors`` (ints) and ``ended`` (``answer``, ``max_turns``, ``length`` or ``budget``).
        ``extra_info`` repeats the first three for the rewards, ``turns`` under verl's name ``num_turns``, and has the
        chat messages that follow the prompt as ``conversation``: what the model said, and read of the tools.

    Raises:
        RunError: the engine holds another version.
        DataError: ``tools_kwargs`` do not fit the tools, or a prompt is too long.
        ModelError: the chat template cannot frame a tool's answer.
    """
    check_version(engine, weights_version, task)
    described = await asyncio.to_thread(tools.ready, prompts, max_prompt_length)
    limits = Limits(max_turns, max_response_tokens)
    left, drawn = not_emitted(described, task), (seed << 20) + task.step
    samples = conversations(left, engine, sampling, tools, limits, drawn)
    responses = await emit_batches(described, samples, engine, sampling.n, max_response_tokens, task, sleeps)
    calls = sum(responses["tool_calls"])
    task.log(
        {
            "staleness/rollout": float(task.step - 1 - responses.meta["weights_version"]),
            "tools/turns": sum(responses["turns"]) / len(responses),
            "tools/calls": calls / len(responses),
            "tools/errors": sum(responses["tool_errors"]) / max(1, calls),
            **{name: Provisional(value) for name, value in length_metrics(responses).items()},
        }
    )
    return responses


@stage(writes="val_responses", on="gpu", role="validates")
async def val_conversation(
    val_prompts: Batch,
    weights_version: int | None,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    tools: Toolbox,
    max_turns: int,
    max_response_tokens: int,
    seed: int,
    max_prompt_length: int | None = None,
    sleeps: bool = False,
    task: TaskInfo,
) -> Batch:
    """Answers the held-out prompts with the weights of this step and the tools; see :func:`conversation`."""
    check_version(engine, weights_version, task)
    described = await asyncio.to_thread(tools.ready, val_prompts, max_prompt_length)
    limits = Limits(max_turns, max_response_tokens)
    drawn = VALIDATION_SEED + seed
    samples = conversations(described, engine, sampling, tools, limits, drawn)
    return await emit_batches(described, samples, engine, sampling.n, max_response_tokens, task, sleeps)


@dataclass(frozen=True)
class Limits:
    """Bounds of a conversation: turns of the model, and tokens of all turns including the tools' answers."""

    turns: int
    tokens: int


async def conversations(
    prompts: Batch,
    engine: RolloutEngine,
    sampling: Sampling,
    tools: Toolbox,
    limits: Limits,
    seed: int,
) -> AsyncGenerator[Sample, None]:
    """Yields each conversation as a sample when it ends; a caller that stops early abandons the others.

    Args:
        prompts: a row per prompt.
        engine: draws the turns.
        sampling: how to draw a turn; ``n`` conversations per prompt.
        tools: the tools that the model may call.
        limits: of each conversation.
        seed: common to all conversations.
    """
    ended: asyncio.Queue[asyncio.Task[Sample]] = asyncio.Queue()
    rows = zip(prompts.ids, prompts["prompt_ids"], _extras(prompts), strict=True)
    async with tools.open() as caller:
        going = [
            asyncio.create_task(
                Conversation(ids, extra, caller, tools).run(engine, sampling, limits, (seed, group, index))
            )
            for group, ids, extra in rows
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


def _extras(prompts: Batch) -> Sequence[Any]:
    return prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)


@dataclass
class Conversation:
    """One conversation.

    Attributes:
        prompt: its token ids.
        extra_info: of its row.
        caller: calls tools.
        tools: parses the calls and frames the answers.
        tokens: of all turns so far, with mask and log-prob of each.
        messages: chat messages of all turns so far, of roles ``assistant`` and ``tool``.
    """

    prompt: Sequence[int]
    extra_info: Any
    caller: ToolCaller
    tools: Toolbox
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    errors: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    async def run(
        self, engine: RolloutEngine, sampling: Sampling, limits: Limits, seed: tuple[int, int, int]
    ) -> Sample:
        """Returns the whole conversation; the last two numbers of ``seed`` are its group and index."""
        state = self.caller.state(self.extra_info)
        version: int | None = None
        try:
            while True:
                room = limits.tokens - len(self.tokens)
                asked = replace(sampling, n=1, max_tokens=min(sampling.max_tokens, room))
                before = [*self.prompt, *self.tokens]
                turn = await engine.sample(before, asked, (*seed, self.turns))
                version = turn.version if version is None else min(version, turn.version)
                self._add(turn.tokens, turn.log_probs)
                self.turns += 1
                said, calls = await self.caller.apart(self.tools.read, before, turn.tokens, turn.finish != "length")
                self.messages.append({"role": "assistant", "content": said})
                ended = await self._answer(before, turn, calls, limits, state)
                if ended is not None:
                    break
        finally:
            await state.close()
        counts = {"turns": self.turns, "tool_calls": self.calls, "tool_errors": self.errors}
        numbers = {"num_turns": self.turns, "tool_calls": self.calls, "tool_errors": self.errors}
        extra_info = {**own_copy(self.extra_info or {}), **numbers, "conversation": self.messages}
        facts = {**counts, "ended": ended, "extra_info": extra_info}
        cut: Literal["stop", "length"] = "length" if ended in ("length", "budget") else "stop"
        return Sample(seed[1], seed[2], self.tokens, self.log_probs, version, cut, self.mask, facts)

    async def _answer(
        self, before: list[int], turn: Sample, calls: list[ToolCall], limits: Limits, state: ToolState
    ) -> str | None:
        """Calls the tools that the turn asks for; returns how the conversation ends, or None if it continues."""
        if turn.finish == "length":  # the turn was cut off, so no answer can follow it
            return "budget" if len(self.tokens) >= limits.tokens else "length"
        if not calls:
            return "answer"
        if self.turns >= limits.turns:
            return "max_turns"
        if len(self.tokens) >= limits.tokens:
            return "budget"
        answers = await asyncio.gather(*(state.answer(call) for call in calls))
        self.calls += len(answers)
        self.errors += sum(answer.failed for answer in answers)
        texts = [(call, answer.text) for call, answer in zip(calls, answers, strict=True)]
        self.messages += [{"role": "tool", "name": call.name, "content": text} for call, text in texts]
        room = limits.tokens - len(self.tokens)
        frame = await self.caller.apart(self.tools.framed, before, turn.tokens, texts)
        self._add(frame[:room])
        return "budget" if len(frame) >= room else None

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Adds tokens of the model or, without log-probs, of a tool's answer."""
        self.tokens += tokens
        self.mask += [int(log_probs is not None)] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs
