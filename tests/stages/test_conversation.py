"""Conversations: their exact tokens, how each ends, which ones wait, and what is trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.engines.base import Sampling
from dataflow.errors import DataError, ModelError, RunError
from dataflow.graph import TaskInfo
from dataflow.models.tokenizer import load_chat_tokenizer, prompt_ids
from dataflow.reward_agent import arguments_of
from dataflow.rewards.managers import build_manager
from dataflow.stages.advantage import advantage
from dataflow.stages.conversation import Talk
from dataflow.stages.rollout import CLIP_RATIO, length_metrics, rollout, val_rollout
from dataflow.tools import Tool, Toolbox, ToolCall, tool
from tests.engines.drawing import run
from tests.rigs.scripted_engine import Script, ScriptedRollout, call, log_prob
from tests.rigs.thinking import THOUGHT, thinking_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.heavy]

QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
FRAME = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
CALLED, ANSWERED = call("calculator", expression="6 * 7"), "So it is 42.\n#### 42"


def toolbox(model: Any, *targets: Any, timeout: float | None = 20, **options: Any) -> Toolbox:
    """Returns a box of these tools, and the calculator."""
    box = Toolbox(str(model), names=("calculator",), timeout=timeout, **options)
    box.tools.update({one.name: one for one in map(Tool.of, targets)})
    return box


def prompts_of(tokenizer: Any, groups: int = 1, kwargs: Any = None) -> Batch:
    extras = [{"index": g, **({"tools_kwargs": kwargs[g]} if kwargs else {})} for g in range(groups)]
    columns = {"prompt_ids": [prompt_ids(tokenizer, QUESTION)] * groups, "raw_prompt": [QUESTION] * groups}
    columns |= {"data_source": ["test"] * groups, "ground_truth": ["42"] * groups, "extra_info": extras}
    return Batch(range(groups), columns)


async def talking(
    engine: Any, box: Toolbox, prompts: Batch, *, n: int = 1, turns: int = 4, tokens: int = 400,
    task: TaskInfo | None = None, stage: Any = rollout, seed: int = 5, **sampling: Any,
) -> Batch:  # fmt: skip
    how = Sampling(n=n, **{"max_tokens": 400, **sampling})
    talk = Talk(box, turns, tokens)
    task = task or TaskInfo(step=1)
    found: Batch = await stage(prompts, None, engine=engine, sampling=how, talk=talk, seed=seed, task=task)
    return found


def converse(engine: Any, box: Toolbox, prompts: Batch, **options: Any) -> Batch:
    return run(talking(engine, box, prompts, **options))


def parts(batch: Batch, tokenizer: Any, row: int = 0) -> tuple[str, str, str]:
    """Returns the whole response, what is trained on and what is not, each as text; the padding left out."""
    there = batch["attention_mask"][row, batch["prompts"].shape[1] :].bool()
    drawn = batch["response_mask"][row].bool()
    assert not (drawn & ~there).any(), "the padding is never trained on"
    ids = batch["responses"][row]
    return tuple(tokenizer.decode(ids[pick].tolist()) for pick in (there, there & drawn, there & ~drawn))  # type: ignore[return-value]


def by_turn(*texts: str) -> Script:
    return lambda _group, _index, turn: texts[turn]


def test_a_whole_conversation_to_the_token(tiny_qwen: Path, tokenizer: Any) -> None:
    engine, task = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED)), TaskInfo(step=1)
    batch = converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer), task=task)
    whole, drawn, told = parts(batch, tokenizer)
    assert whole == CALLED + END + FRAME.format("42") + ANSWERED + END
    assert drawn == CALLED + END + ANSWERED + END
    assert told == FRAME.format("42")
    # What the second turn was drawn after is what will be trained on, and what the template makes of the whole chat.
    chat = [*QUESTION, {"role": "assistant", "content": CALLED}, {"role": "tool", "content": "42"}]
    assert engine.asked[0, 0, 0] == prompt_ids(tokenizer, QUESTION)
    assert engine.asked[0, 0, 1] == prompt_ids(tokenizer, chat)
    length = int(batch["attention_mask"].sum())
    assert batch["input_ids"][0, :length].tolist()[: len(engine.asked[0, 0, 1])] == engine.asked[0, 0, 1]
    assert batch["responses"].shape[1] == 400
    assert batch["position_ids"][0, :length].tolist() == list(range(length))
    mask = batch["response_mask"][0].bool()
    sizes = [len(tokenizer.encode(text + END)) for text in (CALLED, ANSWERED)]
    wanted_log_probs = [log_prob(turn, at) for turn, size in enumerate(sizes) for at in range(size)]
    assert batch["rollout_log_probs"][0][mask].tolist() == pytest.approx(wanted_log_probs)
    assert not batch["rollout_log_probs"][0][~mask].any()
    assert [batch[name][0] for name in ("turns", "tool_calls", "tool_errors", "ended")] == [2, 1, 0, "answer"]
    extra = dict(batch["extra_info"][0])
    said = [("assistant", CALLED), ("tool", "42"), ("assistant", ANSWERED)]
    assert [(turn["role"], turn["content"]) for turn in extra.pop("conversation")] == said
    assert extra == {"index": 0, "num_turns": 2, "tool_calls": 1, "tool_errors": 0}
    wanted = {"staleness/rollout": 0, "tools/turns": 2, "tools/calls": 1, "tools/errors": 0}
    assert task.metrics | wanted == task.metrics


# Qwen2.5's way: tools described in the system's turn, answers in a turn of the user's.
QWEN_LIKE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_of_qwens_kind_frames_answers_and_one_that_leaves_them_out_is_refused(tiny_qwen: Path) -> None:
    tokenizer, box = load_chat_tokenizer(str(tiny_qwen)), toolbox(tiny_qwen)
    box.__dict__["tokenizer"] = tokenizer
    tokenizer.chat_template = QWEN_LIKE
    both = call("calculator", expression="1 + 1") + "\n" + call("calculator", expression="1 / 0")
    engine = ScriptedRollout(tokenizer, by_turn(both, ANSWERED))
    prompts = prompts_of(tokenizer)
    prompts = prompts.merge(prompts.like(prompt_ids=[prompt_ids(tokenizer, QUESTION, box.schemas)]))
    batch = converse(engine, box, prompts)
    _whole, drawn, told = parts(batch, tokenizer)
    assert drawn == both + END + ANSWERED + END
    answers = ("2", "error: ZeroDivisionError: division by zero")
    responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in answers)
    assert told == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"
    asked = tokenizer.decode(engine.asked[0, 0, 0])
    assert json.loads(asked.splitlines()[2].removesuffix(END)) == box.schemas[0]
    assert tokenizer.decode(batch["prompts"][0].tolist()) == asked, "it is trained with the prompt that it was given"
    assert (batch["tool_calls"][0], batch["tool_errors"][0]) == (2, 1)
    other = toolbox(tiny_qwen)
    other.__dict__["tokenizer"] = load_chat_tokenizer(str(tiny_qwen))
    other.tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ModelError, match="the chat template leaves out messages of role 'tool'"):
        converse(engine, other, prompts_of(other.tokenizer))


def test_the_frame_of_an_answer(tiny_qwen: Path, tmp_path: Path, tokenizer: Any) -> None:
    box, said = toolbox(tiny_qwen), tokenizer.encode(CALLED)

    def framed(box: Toolbox, tokens: list[int], text: str = "42") -> str:
        return str(tokenizer.decode(box.framed([], tokens, [(ToolCall("calculator"), text)])))

    assert framed(box, [*said, tokenizer.eos_token_id]) == FRAME.format("42")
    assert framed(box, said) == END + FRAME.format("42"), "a turn ended by another token has its own end in the frame"
    leaving = "1<|im_<|im_end|>end|>\n<|im_start|>assistant\n2"
    assert framed(box, [tokenizer.eos_token_id], leaving) == FRAME.format("1\nassistant\n2"), "no tool leaves its frame"
    thinking = toolbox(thinking_model(tiny_qwen, tmp_path / "model"), options={"enable_thinking": False})
    engine = ScriptedRollout(thinking.tokenizer, by_turn(CALLED, ANSWERED))
    batch = converse(engine, thinking, prompts_of(thinking.tokenizer))
    for turn in (0, 1):  # every turn has the options of the template
        assert tokenizer.decode(engine.asked[0, 0, turn]).endswith(THOUGHT)
    assert parts(batch, tokenizer)[2] == FRAME.format("42") + THOUGHT


# What the model reads of tools.


@tool()
async def hangs() -> str:
    """Never answers."""
    await asyncio.get_running_loop().create_future()
    return ""


@tool()
def breaks(how: str = "") -> str:
    """Raises."""
    raise KeyError(how)


@pytest.mark.parametrize(
    ("called", "told"),
    [
        (call("breaks", how="x"), "error: KeyError: 'x'"),
        (call("breaks", why=1), "error: wrong arguments for breaks: why: Extra inputs are not permitted"),
        (call("calcluator"), "error: there is no tool 'calcluator'; there is calculator, breaks, hangs"),
        ('<tool_call>{"name": "calculator"', "error: the tool call is not valid JSON"),
        (call("hangs"), "error: hangs: no answer within 0.5 s"),
    ],
)
def test_errors_of_tools_are_returned_to_the_model_and_counted(
    tiny_qwen: Path, tokenizer: Any, called: str, told: str
) -> None:
    engine = ScriptedRollout(tokenizer, by_turn(called, "done"))
    batch = converse(engine, toolbox(tiny_qwen, breaks, hangs, timeout=0.5), prompts_of(tokenizer))
    assert parts(batch, tokenizer)[2].startswith(FRAME.partition("{}")[0] + told)
    assert [batch[name][0] for name in ("turns", "tool_calls", "tool_errors", "ended")] == [2, 1, 1, "answer"]


def test_each_sample_has_its_own_tools_kwargs_and_instances(tiny_qwen: Path, tokenizer: Any) -> None:
    closed: list[list[str]] = []

    @tool("notes")
    class Notes:
        """Keeps notes."""

        def __init__(self, owner: str) -> None:
            self.kept = [owner]

        async def __call__(self, note: str) -> list[str]:
            self.kept.append(note)
            return self.kept

        def close(self) -> None:
            closed.append(self.kept)

    async def secret(*, word: str) -> str:
        """Tells the word."""
        return word

    def script(group: int, index: int, turn: int) -> str:
        return (call("notes", note=f"{group}{index}"), call("secret"), call("secret", word="mine"), "done")[turn]

    box = toolbox(tiny_qwen, Notes, secret)
    assert box.tools["secret"].schema["function"]["parameters"] == {"type": "object", "properties": {}}
    kwargs = [{"notes": {"owner": name}, "secret": {"word": word}} for name, word in (("a", "ape"), ("b", "bee"))]
    batch = converse(ScriptedRollout(tokenizer, script), box, prompts_of(tokenizer, 2, kwargs), n=2)
    told = parts(batch, tokenizer, 3)[2]
    assert told.startswith(FRAME.format('["b", "11"]') + FRAME.format("bee"))
    assert "error: wrong arguments for secret: word" in told, "the model cannot give what is the sample's"
    assert sorted(closed) == [[name, f"{g}{i}"] for g, name in enumerate("ab") for i in range(2)]
    for wrong, message in (
        ({"what": 1}, "group 0: tool 'secret' cannot be called with its tools_kwargs .*'word'"),
        ("ape", "tools_kwargs of 'secret' is a str"),
    ):
        engine = ScriptedRollout(tokenizer, by_turn("x"))
        with pytest.raises(DataError, match=message):
            converse(engine, toolbox(tiny_qwen, secret), prompts_of(tokenizer, kwargs=[{"secret": wrong}]))
        assert not engine.asked


# Ends.


def test_max_turns(tiny_qwen: Path, tokenizer: Any) -> None:
    seen: list[str] = []

    def counts() -> None:
        """Counts."""
        seen.append("call")

    engine = ScriptedRollout(tokenizer, lambda *_: call("counts"))
    batch = converse(engine, toolbox(tiny_qwen, counts), prompts_of(tokenizer), turns=3)
    assert (len(engine.asked), len(seen)) == (3, 2), "nobody would read the third answer"
    assert (batch["turns"][0], batch["ended"][0], batch["finish_reason"][0]) == (3, "max_turns", "stop")


def test_no_token_beyond_the_budget(tiny_qwen: Path, tokenizer: Any) -> None:
    first, frame = len(tokenizer.encode(CALLED)) + 1, len(tokenizer.encode(FRAME.format("42")))
    last = first + frame + len(tokenizer.encode(ANSWERED)) + 1
    whole = CALLED + END + FRAME.format("42") + ANSWERED + END
    for budget in (1, first - 1, first, first + 1, first + frame, first + frame + 1, last - 1, last):
        engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED))
        batch = converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer), tokens=budget)
        text, drawn, _told = parts(batch, tokenizer)
        assert text == tokenizer.decode(tokenizer.encode(whole)[:budget])
        assert int(batch["response_mask"].sum()) == len(tokenizer.encode(drawn))
        # A turn without room for a token is not sampled, and a call whose answer would not be read is not made.
        assert len(engine.asked) == (2 if budget > first + frame else 1)
        assert batch["tool_calls"][0] == int(budget > first)
        assert batch["ended"][0] == ("answer" if budget == last else "budget")
        assert length_metrics(batch)[CLIP_RATIO] == (budget != last)
        room = budget + len(engine.asked[0, 0, 0])
        assert all(limit + len(engine.asked[key]) <= room for key, limit in engine.limits.items())


def test_the_oldest_weights_count(tiny_qwen: Path, tokenizer: Any) -> None:
    engine = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED), versions=(2, 3))
    assert converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer)).meta["weights_version"] == 2
    engine.version = 1
    with pytest.raises(RunError, match="holds weights version 1"):
        converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer))


# Side by side.


def test_a_cancelled_stage_cancels_turns_and_tools(tiny_qwen: Path, tokenizer: Any) -> None:
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
        prompts = prompts_of(tokenizer, 3, [{"waits": {"me": group}} for group in range(3)])
        stage = asyncio.ensure_future(talking(engine, toolbox(tiny_qwen, waits, timeout=None), prompts))
        assert await begun.get() == 0
        assert engine.running == 1
        stage.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage
        assert (cancelled, engine.running, len(asyncio.all_tasks())) == ([0], 0, 1)

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
    validation = ScriptedRollout(tokenizer, by_turn(CALLED, ANSWERED))
    converse(validation, toolbox(tiny_qwen), prompts_of(tokenizer, 2), stage=val_rollout)
    assert {seed[0] for seed in validation.seeds} == {(1 << 40) + 5}


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_chunks_go_out_while_slow_tools_hold_up_their_own_conversations_alone(
    tiny_qwen: Path, tokenizer: Any, order: Any
) -> None:
    async def body() -> None:
        first_out = asyncio.Event()
        out: list[tuple[int, tuple[int, ...]]] = []

        def on_emit(number: int, values: tuple[Any, ...]) -> None:
            out.append((number, values[0].ids))
            first_out.set()

        async def waits(*, slow: bool) -> str:
            """Waits until a chunk is out."""
            if slow:
                await first_out.wait()
            return "so"

        slow = (2, 3) if order == "index" else (0, 3)
        prompts = prompts_of(tokenizer, 4, [{"waits": {"slow": group in slow}} for group in range(4)])
        task = TaskInfo(step=1, order=order, emits=2, on_emit=on_emit)
        engine = ScriptedRollout(tokenizer, by_turn(call("waits"), "done"))
        box = toolbox(tiny_qwen, waits, timeout=None)
        batch = await talking(engine, box, prompts, n=2, turns=2, tokens=200, task=task)
        assert [(number, frozenset(ids)) for number, ids in out] == [
            (0, frozenset({0, 1, 2, 3} - set(slow))), (1, frozenset(slow))
        ]  # fmt: skip
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


# Training: the tokens of tools' answers are in the context and in no loss.


@pytest.fixture(scope="module")
def talked(tiny_qwen: Path, tokenizer: Any) -> Batch:
    """Conversations of two turns and of one, by turns."""

    def script(group: int, index: int, turn: int) -> str:
        return f"#### {group}{index}" if index or turn else call("calculator", expression=f"{group} + 4")

    engine = ScriptedRollout(tokenizer, script)
    return converse(engine, toolbox(tiny_qwen), prompts_of(tokenizer, 2), n=2, tokens=160)


def holes(batch: Batch) -> torch.Tensor:
    """Tokens that are there and not the model's, bool ``[rows, R]``."""
    there = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
    return there & ~batch["response_mask"].bool()


def estimated(batch: Batch, estimator: str = "grpo") -> Batch:
    scores = torch.tensor([1.0, 0.0] * (len(batch) // 2))
    algorithm = AlgorithmConfig(adv_estimator=estimator)
    return advantage(batch, Batch(batch.groups, {"score": scores}), algorithm=algorithm, task=TaskInfo(step=1))


def test_rewards_see_the_whole_response_and_the_length_of_the_models_own_tokens(talked: Batch) -> None:
    rows = arguments_of(talked)
    there = talked["attention_mask"][:, talked["prompts"].shape[1] :].sum(dim=1)
    own = there - holes(talked).sum(dim=1)
    assert [row["extra_info"]["response_length"] for row in rows] == own.tolist() != there.tolist()
    assert rows[0]["extra_info"]["response_ids"] == talked["responses"][0, : there[0]].tolist()
    assert [row["extra_info"]["num_turns"] for row in rows] == [2, 1, 2, 1]
    assert "tool\n4\n" in rows[0]["solution_str"]
    for limit, score in ((int(own[0]) + 1, 1.0), (int(own[0]), 0.0)):  # the penalty for overlong responses
        penalised = build_manager("dapo", lambda **_: 1.0, overlong_buffer_len=1, max_response_length=limit)
        assert penalised.compute_score(**arguments_of(talked)[0])["score"] == score


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_advantages_are_those_of_the_score_and_0_on_what_tools_said(talked: Batch, estimator: str) -> None:
    found, mask = estimated(talked, estimator)["advantages"], talked["response_mask"].bool()
    assert all(len(set(found[row][mask[row]].tolist())) == 1 for row in range(len(talked)))
    assert found[0][mask[0]][0] > 0 > found[1][mask[1]][0]
    assert holes(talked)[0].any()
    assert not found[~mask].any()


def test_the_trainer_computes_log_probs_in_the_whole_context_and_no_loss_of_what_tools_said(
    tiny_qwen: Path, talked: Batch
) -> None:
    from tests.engines.verl.models import build, load

    model, mask, prompt = load(tiny_qwen), talked["response_mask"].bool(), talked["prompts"].shape[1]
    digests = []
    for noise in (0.0, 100.0):
        trainer = build(tiny_qwen, lr=1e-3)
        try:
            old, given = trainer.old_log_probs(talked), estimated(talked)
            odd = given["advantages"] + noise * holes(talked)
            trainer.update(talked.merge(old, talked.like(advantages=odd)), last=True)
            digests.append(trainer.digest())
        finally:
            trainer.close()
    assert digests[0] == digests[1]
    found = old["old_log_probs"]
    for row in range(len(talked)):
        ids = talked["input_ids"][row][talked["attention_mask"][row].bool()]  # no padding, only the causal mask
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(1)[prompt - 1 :]
        mine = mask[row, : len(wanted)]
        assert torch.allclose(found[row, : len(wanted)][mine], wanted[mine], atol=1e-4)
    assert not found[~mask].any()


def test_a_real_engines_log_probs_are_the_trainers(tiny_qwen: Path) -> None:
    """A random model calls no tool: the format takes every turn for a call, so that each has an answer behind it."""
    from dataflow.engines.hf import HfRollout
    from tests.engines.verl.models import build

    class Always:
        def parse(self, text: str) -> list[Any]:
            return [ToolCall("calculator", {"expression": "6 * 7"})]

    engine, trainer = HfRollout(str(tiny_qwen), 300), build(tiny_qwen, lr=1e-3)
    tokenizer, box = engine.vocabulary.tokenizer, toolbox(tiny_qwen)
    box.__dict__["how"] = Always()
    # Turns of a random model end about once in 260 tokens: another token ends them sooner.
    how = {"n": 2, "max_tokens": 40, "stop_token_ids": tuple(range(3, 40)), "turns": 3, "tokens": 160}
    batch, again = (converse(engine, box, prompts_of(tokenizer, 3), **how) for _ in range(2))
    own = trainer.old_log_probs(batch)["old_log_probs"]
    engine.close()
    trainer.close()
    assert torch.equal(batch["input_ids"], again["input_ids"]), "the seed says what is drawn"
    assert sum(batch["tool_calls"]) > 6
    assert holes(batch).any(dim=1).sum() >= 3
    # A turn that did not end by eos has it as a part of the frame.
    for row in np.flatnonzero(np.array(batch["ended"]) != "budget"):
        told = tokenizer.decode(batch["responses"][row][holes(batch)[row]].tolist())
        assert (
            told.replace(END + FRAME.format("42"), FRAME.format("42")) == FRAME.format("42") * batch["tool_calls"][row]
        )
    mask = batch["response_mask"].bool()
    assert torch.allclose(own[mask], batch["rollout_log_probs"][mask], atol=1e-4)
    assert not batch["rollout_log_probs"][~mask].any()
