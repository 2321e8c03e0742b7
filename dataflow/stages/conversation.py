"""Conversation: a rollout of several turns. The model may call tools, and continues with their answers.

Each sample is a conversation with a coroutine of its own, so a slow tool delays only its own conversation. A sample is
emitted when its conversation ends. The tokens of a tool's answer have mask 0 and log-prob 0, so the loss ignores them.

    prompt | model's turn ... <tool_call> ... eos | frame, answer, frame | model's turn ... eos |
    mask     1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1     0 0 0 0 0 0 0 0 0 0 0  1 1 1 1 1 1 1 1 1 1
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from dataflow.tools import Toolbox
    from dataflow.tools.toolbox import ToolCaller


@dataclass(frozen=True)
class Talk:
    """How a rollout converses: a call in the last of ``max_turns`` turns of the model is not answered.

    ``max_tokens`` is R, the tokens of all turns together, including the tools' answers; the engine must accept prompts
    that are longer by as many.
    """

    tools: Toolbox
    max_turns: int
    max_tokens: int


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
    name ``num_turns``, and has the chat messages that follow the prompt as ``conversation``. ``prompts`` have
    ``prompt_ids``, and in ``extra_info`` the ``tools_kwargs`` of the tools. ``sampling.max_tokens`` is of each turn;
    turn t is drawn from the seed of (seed, group, index, t).
    """
    ended: asyncio.Queue[asyncio.Task[Sample]] = asyncio.Queue()
    extras = prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)
    async with talk.tools.open() as caller:
        going = [
            asyncio.create_task(_conversation(ids, extra, caller, talk, engine, sampling, (seed, group, index)))
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


async def _conversation(
    prompt: Sequence[int],
    extra_info: Any,
    caller: ToolCaller,
    talk: Talk,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: tuple[int, int, int],
) -> Sample:
    """Returns one whole conversation; the last two numbers of ``seed`` are its group and index."""
    tokens, mask, log_probs = list[int](), list[int](), list[float]()
    messages: list[dict[str, str]] = []  # of all turns so far, of roles assistant and tool
    turns, calls, errors, ended = 0, 0, 0, ""
    versions: list[int] = []
    state = caller.state(extra_info)
    try:
        while not ended:
            before = [*prompt, *tokens]
            asked = replace(sampling, n=1, max_tokens=min(sampling.max_tokens, talk.max_tokens - len(tokens)))
            turn = await engine.sample(before, asked, (*seed, turns))
            versions.append(turn.version)
            tokens += turn.tokens
            mask += [1] * len(turn.tokens)
            log_probs += turn.log_probs
            turns += 1
            cut = turn.finish == "length"  # so that no answer can follow the turn
            said, wanted = await caller.apart(talk.tools.read, before, turn.tokens, not cut)
            messages.append({"role": "assistant", "content": said})
            full = len(tokens) >= talk.max_tokens
            if cut:
                ended = "budget" if full else "length"
            elif not wanted:
                ended = "answer"
            elif turns >= talk.max_turns:
                ended = "max_turns"
            elif full:
                ended = "budget"
            if ended:
                break
            answers = await asyncio.gather(*(state.answer(call) for call in wanted))
            calls += len(answers)
            errors += sum(failed for _, failed in answers)
            texts = [(call, text) for call, (text, _) in zip(wanted, answers, strict=True)]
            messages += [{"role": "tool", "name": call.name, "content": text} for call, text in texts]
            frame = await caller.apart(talk.tools.framed, before, turn.tokens, texts)
            room = talk.max_tokens - len(tokens)
            ended = "budget" if len(frame) >= room else ""
            frame = frame[:room]
            tokens += frame
            mask += [0] * len(frame)
            log_probs += [0.0] * len(frame)
    finally:
        await state.close()
    counts = {"tool_calls": calls, "tool_errors": errors}
    told = {"num_turns": turns, **counts, "conversation": messages}
    facts = {"turns": turns, **counts, "ended": ended, "extra_info": {**own_copy(extra_info or {}), **told}}
    finish: Literal["stop", "length"] = "length" if ended in ("length", "budget") else "stop"
    return Sample(seed[1], seed[2], tokens, log_probs, min(versions), finish, mask, facts)
