"""The trainer against plain transformers and PyTorch, at one and two ranks."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from dataflow.algorithms.losses import LOSSES
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.engines.verl.model import digest
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.errors import ConfigError, DataflowError
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.advantage import advantage
from dataflow.stages.correction import correct

if TYPE_CHECKING or "." in __name__:  # in a rank, ``tests`` may be another package
    from tests.rigs.ranks import RankHost, alone

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

P, R, VOCABULARY = 9, 7, 259
TRAINER = {
    "micro_batch_size": 64,
    "max_tokens_per_gpu": None,
    "balance_batch": True,
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "warmup_steps": 0,
    "grad_clip": 1.0,
    "threads": 1,
}
ALGORITHM = {"clip_ratio_high": 0.3, "kl_loss_coef": 0.1}

Make = Callable[..., VerlTrainer]


def build(model: Path | str, **options: Any) -> VerlTrainer:
    """Builds a trainer; options go to the section, or the argument, that has that name."""
    trainer = {**TRAINER, **{k: options.pop(k) for k in list(options) if k in TrainerConfig.model_fields}}
    known = AlgorithmConfig.model_fields
    algorithm = {**ALGORITHM, **{k: options.pop(k) for k in list(options) if k in known}}
    return VerlTrainer(
        str(model),
        TrainerConfig(**trainer),
        AlgorithmConfig(**algorithm),
        total_steps=10,
        response_length=R,
        **options,
    )


def responses(rows: int, seed: int = 0, group: int = 2) -> Batch:
    """Random rows with prompts of 2 to P tokens, left-padded, and answers of 1 to R tokens, right-padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, P + R), generator=draw)
    prompt = torch.randint(2, P + 1, (rows, 1), generator=draw)
    answer = torch.randint(1, R + 1, (rows, 1), generator=draw)
    prompt[0], answer[0] = P, R
    at = torch.arange(P + R)
    mask = ((at >= P - prompt) & (at < P + answer)).long()
    ids = ids * mask
    return Batch(
        [row // group for row in range(rows)],
        {
            "prompts": ids[:, :P],
            "responses": ids[:, P:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": mask[:, P:],
            "raw_prompt": [f"row {row}" for row in range(rows)],
        },
        {"weights_version": 0},
    )


def training_batch(log_probs: torch.Tensor, batch: Batch, seed: int = 0) -> Batch:
    """Adds advantages and old log-probs far enough from the present ones that some ratios are clipped."""
    draw = torch.Generator().manual_seed(seed + 1000)
    mask = batch["response_mask"]
    off = 0.3 * torch.randn(mask.shape, generator=draw) * mask
    advantages = torch.randn((len(batch), 1), generator=draw) * mask
    return batch.merge(batch.like(old_log_probs=log_probs + off, advantages=advantages))


def load(model: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")


def plain_log_probs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens and entropies, ``[rows, R]``, by one padded forward of transformers."""
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        use_cache=False,
    ).logits[:, P - 1 : -1]
    every = torch.log_softmax(logits / temperature, dim=-1)
    mask = batch["response_mask"]
    chosen = every.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    return chosen * mask, -(every.exp() * every).sum(-1) * mask


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds trainers in this process, closes them, and leaves its environment as it was."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    built: list[VerlTrainer] = []

    def one(model: Path, **options: Any) -> VerlTrainer:
        while built:
            built.pop().close()
        built.append(build(model, **options))
        return built[0]

    yield one
    while built:
        built.pop().close()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def untied_qwen(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with an output layer of its own and without a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(tiny_qwen))
    config.tie_word_embeddings = False
    path = tmp_path_factory.mktemp("models") / "untied-qwen"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_log_probs_equal_a_plain_forward(make: Make, tiny_qwen: Path) -> None:
    batch = responses(11)
    with torch.no_grad():
        expected, entropy = plain_log_probs(load(tiny_qwen), batch, temperature=0.7)
    # 11 rows in micro-batches of at most 4: three pieces, the last filled up.
    scored = make(tiny_qwen, temperature=0.7, micro_batch_size=4).old_log_probs(batch)
    assert scored.groups.tolist() == batch.groups.tolist()
    assert scored.meta["weights_version"] == 0
    assert scored["old_log_probs"].dtype == torch.float32
    torch.testing.assert_close(scored["old_log_probs"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored["entropy"], entropy, atol=1e-5, rtol=0)
    assert not scored["old_log_probs"][batch["response_mask"] == 0].any()


def test_weights_are_those_of_the_model_and_follow_it(make: Make, tiny_qwen: Path, untied_qwen: Path) -> None:
    batch = responses(8)
    for path in (tiny_qwen, untied_qwen):
        trainer = make(path)
        model = load(path)
        before = trainer.weights()
        expected = {name: p.detach() for name, p in model.named_parameters()}
        assert before.keys() == expected.keys()
        assert ("lm_head.weight" in before) == (path == untied_qwen)
        assert largest_difference(before, expected) == 0
        assert trainer.digest() == digest(expected)

        log_probs = trainer.old_log_probs(batch)["old_log_probs"]
        trainer.update(training_batch(log_probs, batch), last=True)
        assert largest_difference(before, expected) == 0, "the weights given out are copies"
        after = trainer.weights()
        assert largest_difference(before, after) > 1e-4
        assert trainer.digest() == digest(after) != digest(before)
        model.load_state_dict(after, strict=False)
        model.tie_weights()
        with torch.no_grad():
            now, _ = plain_log_probs(model, batch)
        torch.testing.assert_close(trainer.old_log_probs(batch)["old_log_probs"], now, atol=1e-5, rtol=0)


def test_an_update_is_one_hand_written_adamw_step(make: Make, tiny_qwen: Path) -> None:
    trainer, model = make(tiny_qwen, micro_batch_size=3), load(tiny_qwen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for seed in (1, 2, 3):
        batch = responses(8, seed)
        with torch.no_grad():
            present, _ = plain_log_probs(model, batch)
        batch = training_batch(present, batch, seed)
        metrics = trainer.update(batch, last=seed == 3)

        mask, advantages = batch["response_mask"], batch["advantages"]
        log_probs, _ = plain_log_probs(model, batch)
        ratio = (log_probs - batch["old_log_probs"]).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        loss = -(gain * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), abs=1e-5)
        assert metrics["actor/pg_clipfrac"] > 0, "the test must clip something"
        assert largest_difference(trainer.weights(), dict(model.named_parameters())) < 1e-5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_do_not_change_the_step(make: Make, tiny_qwen: Path, mode: str) -> None:
    batch = responses(10)
    seen = []
    for size in (64, 4, 1):
        trainer = make(tiny_qwen, micro_batch_size=size, loss_agg_mode=mode, entropy_coeff=0.01)
        scored = trainer.old_log_probs(batch)["old_log_probs"]
        seen.append(trainer.update(training_batch(scored, batch), last=True))
    assert {"actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"} < set(seen[0])
    assert seen[1] == pytest.approx(seen[0], abs=1e-5)
    assert seen[2] == pytest.approx(seen[0], abs=1e-5)


def test_the_metrics_of_updates_are_weighed_by_what_they_count(make: Make, tiny_qwen: Path) -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        trainer, batch = make(tiny_qwen, lr=1e-12, entropy_coeff=0.01, loss_agg_mode=mode), responses(10)
        data = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
        whole = trainer.update(data, last=False)
        parts = [trainer.update(data.rows(rows), last=False) for rows in (range(3), range(3, 4), range(4, 10))]
        for name in ("pg_loss", "loss", "entropy", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"):
            found = of_step(f"actor/{name}", [part[f"actor/{name}"] for part in parts])
            assert found == pytest.approx(whole[f"actor/{name}"], abs=1e-5), name


def test_the_learning_rate_ramps_once_a_step(make: Make, tiny_qwen: Path) -> None:
    trainer, batch = make(tiny_qwen, lr=3e-4, warmup_steps=3), responses(4)
    batch = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
    rates = [trainer.update(batch, last=part == 2)["actor/lr"] for _ in range(5) for part in range(3)]
    assert rates == pytest.approx([1e-4] * 3 + [2e-4] * 3 + [3e-4] * 9)


def test_the_reference_stays_where_it_was(make: Make, tiny_qwen: Path) -> None:
    trainer, batch = make(tiny_qwen, reference=True, use_kl_loss=True, kl_loss_coef=1.0), responses(6)
    scored, reference = trainer.old_log_probs(batch), trainer.ref_log_probs(batch)
    assert torch.equal(scored["old_log_probs"], reference["ref_log_prob"])
    data = batch.merge(scored, reference, training_batch(scored["old_log_probs"], batch))
    first = trainer.update(data, last=False)
    second = trainer.update(data, last=True)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert second["actor/kl_loss"] > 1e-4
    assert second["actor/loss"] == pytest.approx(second["actor/pg_loss"] + second["actor/kl_loss"], abs=1e-5)
    assert torch.equal(trainer.ref_log_probs(batch)["ref_log_prob"], reference["ref_log_prob"])
    assert not torch.allclose(trainer.old_log_probs(batch)["old_log_probs"], scored["old_log_probs"])


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_torch_only_keeps_is_given_back_where_the_gpu_is_shared(
    make: Make, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    trainer, batch = make(tiny_qwen, shares_gpu=shared), responses(4)
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    scored = trainer.old_log_probs(batch)
    assert len(freed) == shared
    trainer.update(batch.merge(training_batch(scored["old_log_probs"], batch)), last=True)
    assert len(freed) == 2 * shared
    trainer.weights()
    assert len(freed) == 3 * shared


def test_rollout_correction_weighs_tokens_by_how_stale_they_are(make: Make, tiny_qwen: Path) -> None:
    algorithm = AlgorithmConfig(**ALGORITHM, rollout_is="token")
    batch = responses(6)
    data = training_batch(make(tiny_qwen).old_log_probs(batch)["old_log_probs"], batch)
    same = data.merge(data.like(rollout_log_probs=data["old_log_probs"]))
    older = data.merge(data.like(rollout_log_probs=data["old_log_probs"] - 0.5 * data["response_mask"]))
    plain = make(tiny_qwen).update(data, last=True)
    task = TaskInfo(step=1)

    def corrected(samples: Batch) -> Batch:
        return samples.merge(correct(samples, samples, algorithm, task))

    found = make(tiny_qwen, rollout_is="token").update(corrected(same), last=True)
    assert found["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], abs=1e-7)
    assert task.metrics["rollout_corr/kl"] == 0
    metrics = make(tiny_qwen, rollout_is="token").update(corrected(older), last=True)
    assert task.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.6487, abs=1e-3)
    assert metrics["actor/pg_loss"] == pytest.approx(1.6487 * plain["actor/pg_loss"], abs=1e-4)
    assert all(isinstance(value, float) for value in metrics.values())


def test_with_bypass_mode_the_rollout_s_log_probs_are_the_old_ones(make: Make, tiny_qwen: Path) -> None:
    from verl.trainer.ppo import core_algos

    batch = responses(6)
    data = training_batch(make(tiny_qwen).old_log_probs(batch)["old_log_probs"], batch)
    plain = make(tiny_qwen, micro_batch_size=3).update(data, last=True)
    sampled = batch.merge(batch.like(rollout_log_probs=data["old_log_probs"], advantages=data["advantages"]))
    trainer = make(tiny_qwen, micro_batch_size=3, bypass_mode=True)
    found = trainer.update(sampled, last=True)
    assert (found["actor/pg_loss"], found["actor/grad_norm"]) == (plain["actor/pg_loss"], plain["actor/grad_norm"])
    assert found["rollout_corr/k3_kl"] > 0
    # A rank may get a micro-batch that only pads: it adds nothing.
    mode = trainer.worker.loss_fn.keywords["config"].policy_loss.loss_mode
    loss, metrics = core_algos.get_policy_loss_fn(mode)(
        log_prob=torch.zeros(2, R), response_mask=torch.zeros(2, R, dtype=torch.bool)
    )
    assert (loss.item(), metrics) == (0.0, {})


def test_micro_batches_by_tokens_give_the_same_update(make: Make, tiny_qwen: Path) -> None:
    batch = responses(9, group=3)
    fixed = make(tiny_qwen)
    known = fixed.old_log_probs(batch)
    data = training_batch(known["old_log_probs"], batch)
    expected = fixed.update(data, last=True)
    longest = int(batch["attention_mask"].sum(dim=1).max())
    trainer = make(tiny_qwen, max_tokens_per_gpu=longest)  # one or two rows in each
    torch.testing.assert_close(trainer.old_log_probs(batch)["old_log_probs"], known["old_log_probs"], atol=1e-6, rtol=0)
    metrics = trainer.update(data, last=True)
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    trainer.max_tokens = longest - 1
    with pytest.raises(ConfigError, match=f"max_tokens_per_gpu={longest - 1}: a sample has {longest} tokens, prompt"):
        trainer.update(data, last=True)


def test_the_share_of_a_gpus_flops_is_verls(make: Make, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import flops_counter

    told: list[list[int]] = []

    def estimate(_counter: Any, tokens: list[int], _seconds: float, **_: Any) -> tuple[float, float]:
        told.append(tokens)
        return 2.0, 8.0

    monkeypatch.setattr(flops_counter.FlopsCounter, "estimate_flops", estimate)
    batch = responses(8)
    trainer = make(tiny_qwen)
    data = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
    assert not any(name.startswith("perf/") for name in trainer.update(data, last=False))  # a CPU's are not known
    trainer.counts_flops = True
    metrics = trainer.update(data, last=True)
    assert (metrics["perf/mfu/actor"], told) == (0.25, [batch["attention_mask"].sum(dim=1).tolist()])
    assert metrics["global_seqlen/mean"] == sum(told[0])
    monkeypatch.setattr(flops_counter.FlopsCounter, "estimate_flops", lambda *_, **__: (2.0, float("inf")))
    assert "perf/mfu/actor" not in trainer.update(data, last=True)


def test_ranks_get_rows_of_about_the_same_number_of_tokens() -> None:
    lengths = np.array([9, 9, 8, 8, 1, 1, 2, 2])
    model: Any = SimpleNamespace(world=2, micro_batch_size=2, max_tokens=None, balance=True)
    slots = VerlTrainer._slots(model, lengths)
    assert slots.shape == (4, 2)
    assert sorted(slots.flatten().tolist()) == list(range(8))
    tokens = [int(lengths[mine].sum()) for mine in slots.reshape(2, -1)]
    assert tokens == [20, 20]
    found = VerlTrainer._imbalance(model, lengths, slots)
    assert (found["global_seqlen/minmax_diff"], found["global_seqlen/balanced_max"]) == (28.0, 20.0)
    model.balance = False
    assert VerlTrainer._slots(model, lengths).flatten().tolist() == list(range(8))
    model.balance, model.world = True, 3  # rows that do not divide evenly are padded where they are
    assert [row for row in VerlTrainer._slots(model, lengths).flatten().tolist() if row >= 0] == list(range(8))
    model.max_tokens, model.world = 9, 2
    assert VerlTrainer._slots(model, lengths).shape == (2, 4)


def test_the_optimal_token_baselines_get_the_sum_of_squared_probabilities(make: Make, tiny_qwen: Path) -> None:
    batch = responses(4)
    found = make(tiny_qwen, adv_estimator="optimal_token_baseline").old_log_probs(batch)["sum_pi_squared"]
    model = load(tiny_qwen)
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
    expected = logits[:, P - 1 : -1].softmax(dim=-1).square().sum(dim=-1) * batch["response_mask"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [*LOSSES])
def test_micro_batches_do_not_change_the_gradient(make: Make, tiny_qwen: Path, name: str) -> None:
    batch = responses(6)
    data = training_batch(make(tiny_qwen).old_log_probs(batch)["old_log_probs"], batch)
    more = {"policy_loss": name, "dro_beta": 0.5, "loss_agg_mode": "seq-mean-token-mean"}
    norms = [
        make(tiny_qwen, micro_batch_size=size, **more).update(data, last=True)["actor/grad_norm"] for size in (64, 4)
    ]
    same = norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert same or LOSSES[name].per_micro_batch is not None


def test_runs_repeat_bit_for_bit_and_the_order_of_updates_matters(make: Make, tiny_qwen: Path) -> None:
    batch = responses(8)

    def run(order: list[int]) -> str:
        trainer = make(tiny_qwen, micro_batch_size=2)
        scored = batch.merge(trainer.old_log_probs(batch))
        parts = training_batch(scored["old_log_probs"], scored).split(4)
        for i in order:
            trainer.update(parts[i], last=i == order[-1])
        return trainer.digest()

    assert run([0, 1, 2, 3]) == run([0, 1, 2, 3])
    assert run([0, 1, 2, 3]) != run([1, 0, 2, 3])


def test_entropy_is_reported_of_the_old_log_probs_or_of_the_update(make: Make, tiny_qwen: Path) -> None:
    trainer, batch = make(tiny_qwen), responses(6)
    scored = trainer.old_log_probs(batch)
    data = training_batch(scored["old_log_probs"], batch)
    mask = batch["response_mask"]
    expected = ((scored["entropy"] * mask).sum() / mask.sum()).item()
    with_column = trainer.update(data.merge(scored.like(entropy=scored["entropy"])), last=False)
    assert with_column["actor/entropy"] == pytest.approx(expected, abs=1e-5)
    without = make(tiny_qwen).update(data, last=False)
    assert without["actor/entropy"] == pytest.approx(expected, abs=1e-5)


def test_building_is_quiet_and_keeps_vllm_out(tiny_qwen: Path) -> None:
    script = (
        "import logging, sys\n"
        f"sys.argv = ['x']; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_trainer as t\n"
        f"trainer = t.build({str(tiny_qwen)!r})\n"
        "batch = t.responses(4)\n"
        "data = t.training_batch(trainer.old_log_probs(batch)['old_log_probs'], batch)\n"
        "trainer.update(data, last=True); trainer.close()\n"
        "assert 'vllm' not in sys.modules and not logging.getLogger().handlers\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, env=alone(), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_cannot_be_trained_with_is_said_in_one_sentence(make: Make, tiny_qwen: Path) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        make(tiny_qwen, temperature=0.0)
    with pytest.raises(ConfigError, match="reference=True"):
        make(tiny_qwen, use_kl_loss=True)
    with pytest.raises(ConfigError, match="'tpu'"):
        make(tiny_qwen, device="tpu")
    trainer, batch = make(tiny_qwen), responses(4)
    with pytest.raises(ConfigError, match="reference=True"):
        trainer.ref_log_probs(batch)
    with pytest.raises(DataflowError, match="no column 'advantages'"):
        trainer.update(batch, last=True)
    with pytest.raises(DataflowError, match="without rows"):
        trainer.old_log_probs(batch.rows([]))


# Samples whose reward failed: they come with an empty mask.

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KEPT = [1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1]  # of four groups of four: one loses all, one all but one


def kept_and_dropped(batch: Batch, keep: list[int]) -> tuple[Batch, Batch]:
    """Returns the batch as the advantage stage leaves it with these samples kept, and one without the others."""
    draw = torch.Generator().manual_seed(7)
    kept = torch.tensor(keep, dtype=torch.bool)
    scores = torch.rand(len(batch), generator=draw)
    rewards = batch.like(score=scores.masked_fill(~kept, torch.nan), kept=kept)
    grpo = AlgorithmConfig(adv_estimator="grpo")
    whole = batch.merge(advantage(batch, rewards, algorithm=grpo, task=TaskInfo(step=1)))
    trains = whole["response_mask"].any(dim=1).nonzero().flatten()
    few, alone = batch.rows(trains), rewards.rows(trains).like(score=scores[trains])
    if len(few):
        few = few.merge(advantage(few, alone, algorithm=grpo, task=TaskInfo(step=1)))
    return whole, few


def spoilt(batch: Batch) -> Batch:
    """Returns the batch with numbers that would show in any sum, where nothing trains."""
    off = ~batch["response_mask"].any(dim=1, keepdim=True)
    columns = ("old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs", "entropy")
    return batch.merge(batch.like(**{name: batch[name].masked_fill(off, 1e3) for name in columns}))


def plain_aggregate(loss: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """The five modes as their names say them."""
    by_row = (loss * mask).sum(dim=1)
    if mode.startswith("token"):
        return by_row.sum() / (mask.sum() if mode == "token-mean" else 1)
    each = {"seq-mean-token-sum": 1, "seq-mean-token-mean": mask.sum(dim=1), "seq-mean-token-sum-norm": R}[mode]
    return (by_row / each).mean()


@pytest.mark.parametrize(("mode", "size"), [*((mode, 5) for mode in MODES), ("seq-mean-token-mean", 2)])
def test_dropped_rows_leave_no_trace_in_loss_kl_and_entropy(make: Make, tiny_qwen: Path, mode: str, size: int) -> None:
    more = {"use_kl_loss": True, "reference": True, "entropy_coeff": 0.01, "rollout_is": "token"}
    correction, task = AlgorithmConfig(rollout_is="token"), TaskInfo(step=1)
    seen = []
    for which in ("dropped", "removed"):
        trainer = make(tiny_qwen, micro_batch_size=size, loss_agg_mode=mode, **more)
        batch = responses(16, group=4)
        scored = trainer.old_log_probs(batch)
        batch = batch.merge(scored, trainer.ref_log_probs(batch))
        off = 0.3 * torch.randn((16, R), generator=torch.Generator().manual_seed(3)) * batch["response_mask"]
        batch = batch.merge(batch.like(rollout_log_probs=batch["old_log_probs"] + off))
        batch = batch.merge(correct(batch, batch, correction, task))
        dropped, removed = kept_and_dropped(batch, KEPT)
        assert (len(dropped), len(removed)) == (16, 6)
        batch = spoilt(dropped) if which == "dropped" else removed
        # The reference differs from the second update on; then all three terms have a gradient.
        metrics = [trainer.update(batch, last=i == 1) for i in range(3)]
        seen.append((metrics, trainer.digest()))
    assert seen[0] == seen[1]
    assert seen[0][0][2]["actor/kl_loss"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_the_kept_rows_is_the_one_by_hand(make: Make, tiny_qwen: Path, mode: str) -> None:
    trainer, model = make(tiny_qwen, micro_batch_size=3, loss_agg_mode=mode, entropy_coeff=0.5), load(tiny_qwen)
    batch = responses(16, group=4)
    scored = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
    dropped, removed = kept_and_dropped(batch.merge(scored.like(old_log_probs=scored["old_log_probs"])), KEPT)
    metrics = trainer.update(dropped, last=True)
    with torch.no_grad():
        log_probs, entropy = plain_log_probs(model, removed)
    mask, advantages = removed["response_mask"], removed["advantages"]
    ratio = (log_probs - removed["old_log_probs"]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    loss, spread = plain_aggregate(-gain, mask, mode), plain_aggregate(entropy, mask, mode)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert metrics["actor/entropy_loss"] == pytest.approx(spread.item(), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx((loss - 0.5 * spread).item(), rel=1e-4, abs=1e-5)


def optimizer_state(trainer: VerlTrainer) -> list[torch.Tensor]:
    state = trainer.worker.engine.optimizer.state.values()
    return [value.clone() for one in state for value in one.values()]


def test_a_mini_batch_of_dropped_rows_takes_no_step(make: Make, tiny_qwen: Path) -> None:
    trainer = make(tiny_qwen, warmup_steps=4, lr=4e-4)
    batch = responses(8, group=4)
    data = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
    nothing = data.merge(data.like(response_mask=torch.zeros_like(data["response_mask"])))
    trainer.update(data, last=False)
    weights, moments = trainer.digest(), optimizer_state(trainer)
    assert trainer.update(nothing, last=False) == {
        "actor/lr": pytest.approx(1e-4),
        "actor/skipped_updates": 1.0,
    }
    # The rate moves on after a step's last update, taken or not.
    assert trainer.update(nothing, last=True)["actor/lr"] == pytest.approx(1e-4)
    assert trainer.digest() == weights
    after = optimizer_state(trainer)
    assert len(after) == len(moments) > 0
    assert all(map(torch.equal, after, moments))
    metrics = trainer.update(data, last=True)
    assert metrics["actor/lr"] == pytest.approx(2e-4)
    assert "actor/skipped_updates" not in metrics
    assert trainer.digest() != weights


@pytest.mark.parametrize("value", [math.nan, 1e38])
def test_an_update_whose_gradient_is_not_finite_is_skipped_and_says_so(
    make: Make, tiny_qwen: Path, value: float
) -> None:
    trainer = make(tiny_qwen, lr=4e-4)
    batch = responses(8, group=4)
    data = training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch)
    weights = trainer.digest()
    bad = data.merge(data.like(advantages=data["advantages"] * 0 + value))
    assert trainer.update(bad, last=False) == {"actor/lr": pytest.approx(4e-4), "actor/skipped_updates": 1.0}
    assert trainer.digest() == weights
    assert "actor/skipped_updates" not in trainer.update(data, last=True)
    assert trainer.digest() != weights


# Two ranks: each is a process that runs a scenario, the same that this process runs alone.


def scenario(trainer: VerlTrainer) -> dict[str, Any]:
    """Two steps of two updates on rows that nothing divides; returns what all ranks must agree on."""
    batch = responses(14, group=7)
    scored, reference = trainer.old_log_probs(batch), trainer.ref_log_probs(batch)
    data = batch.merge(reference, training_batch(scored["old_log_probs"], batch))
    metrics = [trainer.update(part, last=i == 1) for _ in range(2) for i, part in enumerate(data.split(2))]
    return {
        "log_probs": scored["old_log_probs"],
        "after": trainer.old_log_probs(batch)["old_log_probs"],
        "reference": trainer.ref_log_probs(batch)["ref_log_prob"],
        "metrics": metrics,
        "weights": trainer.weights(),
        "digest": trainer.digest(),
    }


def with_drops(trainer: VerlTrainer, drop: bool = True) -> dict[str, Any]:
    """Updates on what would leave the second rank nothing, on one row, on none, on all; or without those rows."""
    batch = responses(12, group=4)
    scored, reference = trainer.old_log_probs(batch), trainer.ref_log_probs(batch)
    data = batch.merge(reference, scored)
    metrics = []
    for keep in ([1] * 6 + [0] * 6, [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 12, [1] * 12):
        dropped, removed = kept_and_dropped(data, keep)
        if drop or len(removed):
            metrics.append(trainer.update(dropped if drop else removed, last=False))
    one = data.merge(data.like(advantages=torch.ones(12, R) * data["response_mask"])).rows([3])
    if drop:
        filler = data.rows([0, 1]).merge(data.rows([0, 1]).like(advantages=torch.zeros(2, R)))
        filler = filler.merge(filler.like(response_mask=torch.zeros_like(filler["response_mask"])))
        one = Batch([0, 0, 0], {n: torch.cat([filler[n], one[n]]) for n in one.tensors})
    metrics.append(trainer.update(one, last=True))
    return {"metrics": metrics, "digest": trainer.digest(), "weights": trainer.weights()}


def without_drops(trainer: VerlTrainer) -> dict[str, Any]:
    return with_drops(trainer, drop=False)


SCENARIOS = {f.__name__: f for f in (scenario, with_drops, without_drops)}
OPTIONS = {"micro_batch_size": 2, "reference": True, "use_kl_loss": True, "warmup_steps": 2}


def be_a_rank(out: str, *jobs: str) -> None:
    results = []
    for port, name, model in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        os.environ["MASTER_PORT"] = port
        trainer = build(model, **OPTIONS)
        results.append(SCENARIOS[name](trainer))
        sockets = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
        assert set(sockets) == {"127.0.0.1"}, "where the ranks meet is no business of other machines"
        trainer.close()
    torch.save(results, out)


@pytest.fixture(scope="module")
def two_ranks(
    ranks: RankHost, tiny_qwen: Path, untied_qwen: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    """Results by rank of the scenario with two models, then of the one with drops and the one without."""
    jobs = [("scenario", tiny_qwen), ("scenario", untied_qwen), ("with_drops", tiny_qwen), ("without_drops", tiny_qwen)]
    return ranks.run(Path(__file__).stem, jobs, 2, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_do_what_one_does(
    make: Make,
    ranks: RankHost,
    tiny_qwen: Path,
    untied_qwen: Path,
    two_ranks: list[list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    models = [tiny_qwen, untied_qwen]
    again = ranks.run(Path(__file__).stem, [("scenario", model) for model in models], 2, tmp_path)
    for i, model in enumerate(models):
        one, first, second = scenario(make(model, **OPTIONS)), two_ranks[0][i], two_ranks[1][i]
        assert first["digest"] == second["digest"] == digest(first["weights"])
        assert second["weights"] == {}, "a machine holds them once, not once a rank"
        assert first["metrics"] == second["metrics"]
        assert torch.equal(first["log_probs"], second["log_probs"])
        assert torch.equal(first["reference"], first["log_probs"]), "the reference has moved"
        torch.testing.assert_close(first["log_probs"], one["log_probs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(first["after"], one["after"], atol=1e-3, rtol=0)
        for at_two, at_one in zip(first["metrics"], one["metrics"], strict=True):
            assert {"actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/pg_clipfrac"} < set(at_one)
            for name in (name for name in at_one if name.startswith("actor/")):
                assert at_two[name] == pytest.approx(at_one[name], abs=1e-5), name
        assert largest_difference(first["weights"], one["weights"]) < 1e-4
        # The same once more, in other processes: bit for bit.
        assert again[0][i]["digest"] == first["digest"]


def test_two_ranks_leave_out_dropped_rows_and_skip_together(
    make: Make, tiny_qwen: Path, two_ranks: list[list[dict[str, Any]]]
) -> None:
    ranks = [results[2:] for results in two_ranks]
    one = with_drops(make(tiny_qwen, **OPTIONS))
    for dropped, removed in ranks:
        assert dropped["digest"] == removed["digest"] == ranks[0][0]["digest"]
        taken = [metrics for metrics in dropped["metrics"] if "actor/skipped_updates" not in metrics]
        assert taken == removed["metrics"]
        assert len(dropped["metrics"]) == 5 == len(taken) + 1
        assert all(math.isfinite(value) for metrics in taken for value in metrics.values())
    for at_two, at_one in zip(ranks[0][0]["metrics"], one["metrics"], strict=True):
        for name in ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr"):
            assert at_two.get(name) == pytest.approx(at_one.get(name), abs=1e-5)
    assert largest_difference(ranks[0][0]["weights"], one["weights"]) < 1e-4
