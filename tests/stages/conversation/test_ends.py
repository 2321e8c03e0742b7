"""Concurrent conversations: how each ends, which ones wait, and when chunks are emitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.errors import RunError
from dataflow.graph import TaskInfo
from dataflow.stages.conversation import Limits, conversation, conversations, val_conversation
from dataflow.stages.rollout import CLIP_RATIO, length_metrics
from tests.engines.drawing import run
from tests.rigs.scripted_engine import ScriptedRollout, call
from tests.stages.conversation.conversation_rig import (
    ANSWERED,
    CALLED,
    END,
    FRAME,
    by_turn,
    converse,
    parts,
    prompts_of,
    toolbox,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.heavy]


# --- ends ----------------------------------------------------------------------------------------------------------


def test_max_turns(tiny_qwen: Path, tokenizer: Any) -> None:
    seen: list[str] = []

    def counts() -> None:
        """Counts."""
        seen.append("call")

    engine = ScriptedRollout(tokenizer, lambda *_: call("counts"))
    batch = converse(engine, toolbox(tiny_qwen, counts), prompts_of(tokenizer), turns=3)
    assert len(engine.asked) == 3
    assert len(seen) == 2, "nobody would read the third answer"
    assert parts(batch, tokenizer)[0].endswith(call("counts") + END)
    assert (batch["turns"][0], batch["ended"][0], batch["finish_reason"][0]) == (3, "max_turns", "stop")


def test_no_token_beyond_the_budget(tiny_qwen: Path, tokenizer: Any) -> None:
    first, frame = len(tokenizer.encode(CALLED)) + 1, len(tokenizer.encode(FRAME.format("42")))
    second = len(tokenizer.encode(ANSWERED)) + 1
    whole = CALLED + END + FRAME.format("42") + ANSWERED + END
    for budget in range(1, first + frame + second + 1):
        engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED))
        batch = converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer), tokens=budget)
        text, drawn, _told = parts(batch, tokenizer)
        assert text == tokenizer.decode(tokenizer.encode(whole)[:budget])
        assert int(batch["response_mask"].sum()) == len(tokenizer.encode(drawn))
        # A turn without room for a token is not sampled, and a call whose answer would not be read is not made.
        assert len(engine.asked) == (2 if budget > first + frame else 1)
        assert batch["tool_calls"][0] == int(budget > first)
        whole_one = budget == first + frame + second  # which ends at exactly the limit
        assert batch["ended"][0] == ("answer" if whole_one else "budget")
        assert length_metrics(batch)[CLIP_RATIO] == (not whole_one)
        assert all(
            limit + len(engine.asked[key]) <= budget + len(engine.asked[0, 0, 0])
            for key, limit in engine.limits.items()
        )


def test_the_oldest_weights_count(tiny_qwen: Path, tokenizer: Any) -> None:
    engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED), versions=(2, 3))
    assert converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer)).meta["weights_version"] == 2
    engine.version = 1
    with pytest.raises(RunError, match="holds weights version 1"):
        converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer))


# --- side by side ---------------------------------------------------------------------------------------------------


def test_a_slow_tool_holds_up_no_other_conversation(tiny_qwen: Path, tokenizer: Any) -> None:
    async def body() -> list[tuple[Any, ...]]:
        others = asyncio.Event()
        events: list[tuple[Any, ...]] = []

        async def waits(*, slow: bool = False) -> str:
            """Waits for all others."""
            events.append(("called", slow))
            if slow:
                await others.wait()  # which would never be, if it held them up
            return "so"

        kwargs = [{"waits": {"slow": group == 0}} for group in range(4)]
        engine = ScriptedRollout(tokenizer, by_turn(call("waits"), "done"))
        box = toolbox(tiny_qwen, waits, timeout=None)
        samples = conversations(
            prompts_of(tokenizer, 4, kwargs), engine, Sampling(max_tokens=99), box, Limits(4, 300), seed=1
        )
        async for sample in samples:
            events.append(("ended", sample.group))
            if len([event for event in events if event[0] == "ended"]) == 3:
                others.set()
        return events

    events = run(body())
    assert events[-1] == ("ended", 0)
    assert {group for what, group in events if what == "ended"} == {0, 1, 2, 3}
    assert ("called", True) in events[:-1]


def test_a_closed_generator_cancels_turns_and_tools(tiny_qwen: Path, tokenizer: Any) -> None:
    async def body() -> None:
        cancelled: list[int] = []
        begun: asyncio.Queue[int] = asyncio.Queue()

        async def waits(*, me: int) -> str:
            """Waits for ever."""
            begun.put_nowait(me)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.append(me)
            return ""

        async def hold(group: int, _index: int, _turn: int) -> None:
            if group == 1:
                await asyncio.get_running_loop().create_future()

        engine = ScriptedRollout(tokenizer, lambda g, _i, _t: "done" if g == 2 else call("waits"), hold=hold)
        box = toolbox(tiny_qwen, waits, timeout=None)
        prompts = prompts_of(tokenizer, 3, [{"waits": {"me": group}} for group in range(3)])
        stage = asyncio.ensure_future(
            conversation(
                prompts,
                None,
                engine=engine,
                sampling=Sampling(max_tokens=99),
                tools=box,
                max_turns=2,
                max_response_tokens=300,
                seed=0,
                task=TaskInfo(step=1),
            )
        )
        assert await begun.get() == 0
        assert engine.running == 1
        stage.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage
        assert cancelled == [0]
        assert engine.running == 0
        assert len(asyncio.all_tasks()) == 1, "nothing is left"

    run(body())


def test_seeds_depend_on_sample_and_turn_alone(tiny_qwen: Path, tokenizer: Any) -> None:
    def seeds(late: Callable[[int, int], bool]) -> tuple[list[tuple[int, ...]], Batch]:
        async def hold(group: int, index: int, _turn: int) -> None:
            for _ in range(50 if late(group, index) else 0):
                await asyncio.sleep(0)

        engine = ScriptedRollout(tokenizer, by_turn(CALLED, CALLED, "done"), hold=hold)
        batch = converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer, 3), n=2, task=TaskInfo(step=7))
        return engine.seeds, batch

    one, batch = seeds(lambda group, _index: group == 0)
    other, again = seeds(lambda group, index: group + index == 2)
    assert one != other, "they ended in another order"
    wanted = [((5 << 20) + 7, g, i, t) for g in range(3) for i in range(2) for t in range(3)]
    assert sorted(one) == sorted(other) == wanted
    assert torch.equal(batch["input_ids"], again["input_ids"])


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_sets_go_out_while_others_still_talk(tiny_qwen: Path, tokenizer: Any, order: Any) -> None:
    async def body() -> None:
        first_out = asyncio.Event()
        out: list[tuple[int, tuple[int, ...]]] = []

        def on_emit(number: int, values: tuple[Any, ...]) -> None:
            out.append((number, values[0].ids))
            first_out.set()

        async def waits(*, slow: bool) -> str:
            """Waits until a set is out."""
            if slow:
                await first_out.wait()
            return "so"

        slow = (2, 3) if order == "index" else (0, 3)
        prompts = prompts_of(tokenizer, 4, [{"waits": {"slow": group in slow}} for group in range(4)])
        task = TaskInfo(step=1, order=order, emits=2, on_emit=on_emit)
        batch = await conversation(
            prompts,
            None,
            engine=ScriptedRollout(tokenizer, by_turn(call("waits"), "done")),
            sampling=Sampling(n=2, max_tokens=99),
            tools=toolbox(tiny_qwen, waits, timeout=None),
            max_turns=2,
            max_response_tokens=200,
            seed=0,
            task=task,
        )
        assert [number for number, _ in out] == [0, 1]
        assert {frozenset(ids) for _, ids in out} == {frozenset(slow), frozenset({0, 1, 2, 3} - set(slow))}
        assert frozenset(out[1][1]) == frozenset(slow)
        assert batch.ids == (0, 1, 2, 3)

    run(body())


def test_after_a_restart_emitted_chunks_are_not_sampled_again(tiny_qwen: Path, tokenizer: Any) -> None:
    prompts = prompts_of(tokenizer, 4)
    before = converse(ScriptedRollout(tokenizer, by_turn("a")), toolbox(tiny_qwen), prompts)
    engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED))
    task = TaskInfo(step=1, emits=2, emitted={0: before.select([1, 2])}, on_emit=lambda *_: None)
    batch = converse(engine, toolbox(tiny_qwen), prompts, task=task)
    assert {group for group, _index, _turn in engine.asked} == {0, 3}
    assert batch["turns"].tolist() == [2, 1, 1, 2]


def test_validation(tiny_qwen: Path, tokenizer: Any) -> None:
    engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED))
    found = val_conversation(
        prompts_of(tokenizer, 2),
        None,
        engine=engine,
        sampling=Sampling(max_tokens=99),
        tools=toolbox(tiny_qwen),
        max_turns=2,
        max_response_tokens=200,
        seed=3,
        task=TaskInfo(step=1),
    )
    assert run(found)["ended"].tolist() == ["answer", "answer"]
    assert {seed[0] for seed in engine.seeds} == {(1 << 40) + 3}
