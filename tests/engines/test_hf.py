"""The transformers rollout against transformers' own generate and plain forwards of the same weights."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.engines.hf import HfRollout
from dataflow.errors import Aborted, DataError, DataflowError, ModelError
from dataflow.stages.rollout import CLIP_RATIO, length_metrics
from tests.engines import tiny_models
from tests.engines.drawing import draw, generate, run
from tests.engines.tiny_models import ENDS, EOS, PAD, VOCAB

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

WIDE = 12
# Four heads, two of which share their keys, which decoding treats in a way of its own.
SHAPE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.4,
}


def save_model(path: Path, seed: int, tie: bool = True) -> str:
    return tiny_models.save_model(path, seed, tie, **SHAPE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def engine(model: str) -> HfRollout:
    return HfRollout(model, WIDE)


def prompts(lengths: list[int], first: int = 0) -> Batch:
    ids = [
        np.random.default_rng(first + i).integers(2, VOCAB, size=length).tolist() for i, length in enumerate(lengths)
    ]
    groups = list(range(first, first + len(lengths)))
    return Batch(groups, {"prompt_ids": ids, "data_source": [f"s{g}" for g in groups]}, {"epoch": 1})


def plain_log_probs(path: str, batch: Batch, temperature: float) -> torch.Tensor:
    """As a trainer does: one forward of the padded rows."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits
    logits = logits[:, WIDE - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(2, batch["responses"][:, :, None]).squeeze(2) * batch["response_mask"]


def test_greedy_equals_generate(model: str, engine: HfRollout) -> None:
    batch = prompts([3, 12, 7, 1, 5, 9])
    out = generate(engine, batch, Sampling(temperature=0.0, max_tokens=20), seed=0)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, ids in enumerate(batch["prompt_ids"]):
        expected = reference.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
        got = out["responses"][row][out["response_mask"][row].bool()]
        assert got.tolist() == expected.tolist()
    torch.testing.assert_close(out["rollout_log_probs"], plain_log_probs(model, out, 1.0), atol=1e-4, rtol=0)


def test_a_batch_of_it(engine: HfRollout) -> None:
    batch = prompts([3, 12, 7])
    out = generate(engine, batch, Sampling(n=4, temperature=3.0, max_tokens=16), seed=3)
    assert out.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert out["data_source"].tolist() == ["s0"] * 4 + ["s1"] * 4 + ["s2"] * 4
    assert out.meta == {"epoch": 1, "weights_version": 0}
    for row in range(12):
        ids, length = batch["prompt_ids"][row // 4], int(out["response_mask"][row].sum())
        assert out["prompts"][row].tolist() == [PAD] * (WIDE - len(ids)) + ids
        response = out["responses"][row].tolist()
        assert response[length:] == [PAD] * (16 - length)
        assert not set(ENDS) & set(response[: length - 1])
        assert length == 16 or response[length - 1] in ENDS
        words = "".join(f"w{token}" for token in response[:length] if token not in (PAD, EOS))
        assert out["response_text"][row].replace(" ", "") == words
    assert len(set(out["response_mask"].sum(1).tolist())) > 3, "rows should end at different times"


def test_a_sample_does_not_depend_on_its_company(engine: HfRollout, model: str) -> None:
    sampling = Sampling(n=4, temperature=0.7, top_p=0.8, top_k=20)
    together = generate(engine, prompts([3, 12, 7, 5]), sampling, seed=5)
    alone = generate(engine, prompts([3, 12, 7, 5]).select([2]), sampling, seed=5)
    chunked = generate(HfRollout(model, WIDE, max_batch=3), prompts([3, 12, 7, 5]), sampling, seed=5)
    for other, part in ((alone, together.select([2])), (chunked, together)):
        assert torch.equal(other["responses"], part["responses"])
        assert torch.equal(other["response_mask"], part["response_mask"])
        torch.testing.assert_close(other["rollout_log_probs"], part["rollout_log_probs"], atol=1e-4, rtol=0)


def test_seeds(engine: HfRollout) -> None:
    batch = prompts([4, 4])
    one, other = (generate(engine, batch, Sampling(n=4), seed=s)["responses"] for s in (1, 2))
    assert not torch.equal(one, other)
    assert len({tuple(row) for row in one.tolist()}) >= 6, "samples of a group differ"
    # Each token position has its own number, so a larger limit only adds tokens.
    longer = generate(engine, batch, Sampling(n=4, max_tokens=30), seed=1)["responses"]
    assert torch.equal(longer[:, :24], one)


def test_log_probs_are_the_trainers(engine: HfRollout, model: str) -> None:
    sampling = Sampling(n=3, temperature=0.6, top_p=0.7, top_k=9)
    out = generate(engine, prompts([2, 8, 12]), sampling, seed=0)
    torch.testing.assert_close(out["rollout_log_probs"], plain_log_probs(model, out, 0.6), atol=1e-4, rtol=0)


def first_tokens(engine: HfRollout, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how often each token came first, and the probabilities at temperature 2."""
    batch = prompts([6])
    out = generate(engine, batch, sampling, seed=0)
    with torch.no_grad():
        logits = engine.model(torch.tensor([batch["prompt_ids"][0]])).logits[0, -1]
    return torch.bincount(out["responses"][:, 0], minlength=VOCAB), (logits / 2.0).softmax(-1)


def test_cuts_restrict_the_support(engine: HfRollout) -> None:
    def drawn(**cut: Any) -> tuple[set[int], torch.Tensor]:
        counts, p = first_tokens(engine, Sampling(n=600, temperature=2.0, max_tokens=1, **cut))
        return set(counts.nonzero().flatten().tolist()), p

    found, p = drawn(top_k=3)
    assert found == set(p.topk(3).indices.tolist())
    found, p = drawn(top_p=0.5)
    order = p.argsort(descending=True)
    nucleus = order[: int((p[order].cumsum(0) < 0.5).sum()) + 1]
    assert found <= set(nucleus.tolist())
    assert len(nucleus) > 1


def test_samples_follow_the_distribution(engine: HfRollout) -> None:
    counts, p = first_tokens(engine, Sampling(n=2000, temperature=2.0, max_tokens=1))
    # A chi-square of the tokens expected 5 times or more: mean degrees, deviation sqrt(2 degrees).
    expected = p * 2000
    enough = expected >= 5
    chi = ((counts[enough] - expected[enough]) ** 2 / expected[enough]).sum()
    degrees = int(enough.sum())
    assert degrees > 5
    assert chi < degrees + 5 * (2 * degrees) ** 0.5


def test_stop_tokens(engine: HfRollout) -> None:
    free = draw(engine, prompts([5, 6]), Sampling(n=4, temperature=2.0), seed=1)
    stop = next(token for sample in free for token in sample.tokens[:-1])
    cut = draw(engine, prompts([5, 6]), Sampling(n=4, temperature=2.0, stop_token_ids=(stop,)), seed=1)
    tokens = {(s.group, s.index): list(s.tokens) for s in cut}
    for sample in free:
        whole = list(sample.tokens)
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert tokens[sample.group, sample.index] == whole[:end], "the token that ends a response is part of it"
    assert any(s.tokens[-1] == stop and s.finish == "stop" for s in cut)


def test_an_end_at_the_limit_is_an_end(engine: HfRollout) -> None:
    free = Sampling(n=4, temperature=3.0, max_tokens=16)
    whole = [sample for sample in draw(engine, prompts([5, 6]), free, seed=1) if sample.finish == "stop"]
    longest = max(whole, key=lambda sample: len(sample.tokens))
    for short, reason in ((0, "stop"), (1, "length")):
        limit = len(longest.tokens) - short
        samples = draw(engine, prompts([5, 6]), replace(free, max_tokens=limit), seed=1)
        batch = engine.batch(prompts([5, 6]), samples, limit)
        row = 4 * longest.group + longest.index
        assert batch["response_mask"][row].all()
        assert batch["finish_reason"][row] == reason
        assert length_metrics(batch)[CLIP_RATIO] == sum(sample.tokens[-1] not in ENDS for sample in samples) / 8


def test_samples_come_as_they_end(engine: HfRollout) -> None:
    batch, sampling = prompts([3, 12, 7]), Sampling(n=4, temperature=3.0, max_tokens=16)
    samples = draw(engine, batch, sampling, seed=3)
    lengths = [len(sample.tokens) for sample in samples]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    assert {(s.group, s.index) for s in samples} == {(g, i) for g in range(3) for i in range(4)}
    assert all((s.finish == "stop") == (s.tokens[-1] in ENDS) for s in samples)


def test_a_generator_closed_early_frees_the_engine(engine: HfRollout) -> None:
    async def body() -> None:
        endless = engine.generate(prompts([3, 12]), Sampling(n=4, temperature=0.5, max_tokens=100_000), seed=0)
        reader = asyncio.ensure_future(anext(endless))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        # It would wait behind the other for ever.
        assert [s async for s in engine.generate(prompts([3]), Sampling(max_tokens=2), seed=0)]

    run(body())


def test_closing_gives_up_what_is_in_flight(model: str) -> None:
    engine = HfRollout(model, WIDE)

    async def body() -> None:
        # Prompts that none of the few likeliest tokens ends would run for hours.
        long = Sampling(temperature=0.1, max_tokens=100_000)
        waiting = [
            asyncio.ensure_future(anext(engine.generate(prompts([4] * 64), long, seed=0))),
            asyncio.ensure_future(engine.sample([5, 6], long, (1,))),
        ]
        await asyncio.sleep(0.1)
        engine.close()
        for one in waiting:
            with pytest.raises(Aborted, match="closed"):
                await one

    run(body())


def test_turns_are_sampled_together_and_equal_those_of_a_batch(engine: HfRollout) -> None:
    async def body() -> None:
        batch = prompts([3])
        alone = await engine.sample(batch["prompt_ids"][0], Sampling(max_tokens=2), (0, 0, 0))
        assert alone.tokens == (await anext(engine.generate(batch, Sampling(max_tokens=2), seed=0))).tokens
        turns = [engine.sample([5, 6, token], Sampling(max_tokens=3), (1, token)) for token in range(7, 12)]
        together = await asyncio.gather(*turns)
        for token, turn in zip(range(7, 12), together, strict=True):
            assert turn.tokens == (await engine.sample([5, 6, token], Sampling(max_tokens=3), (1, token))).tokens

    run(body())


def test_sync_refuses_wrong_names(model: str, tmp_path: Path) -> None:
    engine = HfRollout(model, WIDE)
    own = {name: w.clone() + 1 for name, w in engine.model.state_dict().items() if name != "lm_head.weight"}
    kept = {name: w.clone() for name, w in engine.model.state_dict().items()}

    def without(name: str) -> dict[str, torch.Tensor]:
        return {key: value for key, value in own.items() if key != name}

    for wrong, name in (
        ({**without("model.norm.weight"), "model.norm.wait": torch.ones(32)}, "2 weights .* 'model.norm.wait'"),
        (without("model.norm.weight"), r"1 weights .* 'model.norm.weight' \(its shape is None, in the model \(32,\);"),
        ({**own, "model.norm.weight": torch.ones(3)}, r"1 weights .* \(its shape is \(3,\), in the model \(32,\);"),
    ):
        with pytest.raises(DataflowError, match=f"weight sync 1: {name}"):
            run(engine.sync(wrong, 1))
    assert engine.version == 0
    assert all(torch.equal(kept[name], w) for name, w in engine.model.state_dict().items()), "all or nothing"
    run(engine.sync(kept, 1))  # with the tied head as well
    assert engine.version == 1
    untied = HfRollout(save_model(tmp_path, seed=1, tie=False), WIDE)
    with pytest.raises(DataflowError, match=r"lm_head\.weight"):
        run(untied.sync(own, 1))


def test_bad_input(engine: HfRollout, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"group 1 has 13 tokens; give 1 to data\.max_prompt_length=12"):
        generate(engine, prompts([3, 13]), Sampling(), seed=0)
    with pytest.raises(DataError, match="group 0 has 0 tokens"):
        generate(engine, prompts([0]), Sampling(), seed=0)
    with pytest.raises(DataError, match=f"group 0 has tokens {VOCAB} to {VOCAB}, and the model 0 to {VOCAB - 1}"):
        run(engine.sample([VOCAB], Sampling(), (0,)))
    for message, model in (
        ("does not exist", str(tmp_path / "nowhere")),
        ("cannot be loaded", str(tmp_path)),
        ("names no eos_token_id", tiny_models.save_model(tmp_path / "endless", 0, ends=())),
    ):
        with pytest.raises(ModelError, match=message):
            HfRollout(model, WIDE)
