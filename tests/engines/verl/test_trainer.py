"""The trainer against plain transformers and PyTorch, at one and two ranks."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from dataflow.algorithms import LOSSES
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.engines.verl.model import digest
from dataflow.engines.verl.rows import Division
from dataflow.engines.verl.trainer import VerlTeacher, VerlTrainer
from dataflow.errors import ConfigError
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.advantage import advantage
from dataflow.stages.log_prob import rollout_correction
from tests.engines.verl.models import (
    Fresh,
    Make,
    R,
    build,
    largest_difference,
    load,
    plain_log_probs,
    plain_logits,
    responses,
    scored,
    training_batch,
)
from tests.rigs.ranks import RankHost

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]


def test_log_probs_equal_a_plain_forward(make: Make, tiny_qwen: Path) -> None:
    batch = responses(11)
    with torch.no_grad():
        model = load(tiny_qwen)
        expected, entropy = plain_log_probs(model, batch, temperature=0.7)
        squares = (plain_logits(model, batch) / 0.7).softmax(dim=-1).square().sum(dim=-1) * batch["response_mask"]
    # 11 rows in micro-batches of at most 4: three pieces, the last filled up.
    trainer = make(tiny_qwen, temperature=0.7, micro_batch_size=4, adv_estimator="optimal_token_baseline")
    found = trainer.old_log_probs(batch)
    assert found.groups.tolist() == batch.groups.tolist()
    assert found.meta["weights_version"] == 0
    assert found["old_log_probs"].dtype == torch.float32
    torch.testing.assert_close(found["old_log_probs"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["sum_pi_squared"], squares, atol=1e-6, rtol=1e-5)
    assert not found["old_log_probs"][batch["response_mask"] == 0].any()
    teacher = make(tiny_qwen, by=lambda path: VerlTeacher(str(path), TrainerConfig(), temperature=0.7))
    torch.testing.assert_close(teacher.log_probs(batch)["teacher_log_probs"], expected, atol=1e-5, rtol=0)


def test_weights_are_those_of_the_model_and_follow_it(make: Make, tiny_qwen: Path, untied_qwen: Path) -> None:
    batch = responses(8)
    for path in (tiny_qwen, untied_qwen):
        trainer, model = make(path), load(path)
        before = trainer.weights()
        expected = {name: p.detach() for name, p in model.named_parameters()}
        assert ("lm_head.weight" in before) == (path == untied_qwen)
        assert largest_difference(before, expected) == 0
        assert trainer.digest() == digest(expected)

        trainer.update(scored(trainer, batch), last=True)
        assert largest_difference(before, expected) == 0, "the weights given out are copies"
        after = trainer.weights()
        assert largest_difference(before, after) > 1e-4
        assert trainer.digest() == digest(after) != digest(before)
        model.load_state_dict(after, strict=False)
        model.tie_weights()
        with torch.no_grad():
            now, _ = plain_log_probs(model, batch)
        torch.testing.assert_close(trainer.old_log_probs(batch)["old_log_probs"], now, atol=1e-5, rtol=0)


def test_an_update_is_one_hand_written_adamw_step(fresh: Fresh, tiny_qwen: Path) -> None:
    trainer, model = fresh(micro_batch_size=3), load(tiny_qwen)
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
def test_micro_batches_do_not_change_the_step_nor_its_metrics(fresh: Fresh, mode: str) -> None:
    options = {"loss_agg_mode": mode, "entropy_coeff": 0.01}
    data = scored(fresh(), responses(10))
    seen = [fresh(size, **options).update(data, last=True) for size in (64, 4, 1)]
    assert {"actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"} < set(seen[0])
    assert seen[1] == pytest.approx(seen[0], abs=1e-5)
    assert seen[2] == pytest.approx(seen[0], abs=1e-5)


def test_the_metrics_of_updates_are_weighed_by_what_they_count(fresh: Fresh) -> None:
    data = scored(fresh(), responses(10))
    whole, *parts = (
        fresh(entropy_coeff=0.01).update(data.rows(rows), last=False)
        for rows in (range(10), range(3), range(3, 4), range(4, 10))
    )
    for name in ("pg_loss", "loss", "entropy", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"):
        found = of_step(f"actor/{name}", [part[f"actor/{name}"] for part in parts])
        assert found == pytest.approx(whole[f"actor/{name}"], abs=1e-5), name


@pytest.mark.parametrize("name", [*LOSSES])
def test_micro_batches_do_not_change_the_gradient(fresh: Fresh, name: str) -> None:
    data = scored(fresh(), responses(6))
    more = {"policy_loss": name, "dro_beta": 0.5, "loss_agg_mode": "seq-mean-token-mean"}
    norms = [fresh(size, **more).update(data, last=True)["actor/grad_norm"] for size in (64, 4)]
    same = norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert same or LOSSES[name].per_micro_batch is not None


def test_the_reference_stays_where_it_was(fresh: Fresh) -> None:
    trainer, batch = fresh(use_kl_loss=True, kl_loss_coef=1.0), responses(6)
    old, reference = trainer.old_log_probs(batch), trainer.ref_log_probs(batch)
    assert torch.equal(old["old_log_probs"], reference["ref_log_prob"])
    data = scored(trainer, batch).merge(reference)
    first = trainer.update(data, last=False)
    second = trainer.update(data, last=True)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert second["actor/kl_loss"] > 1e-4
    assert second["actor/loss"] == pytest.approx(second["actor/pg_loss"] + second["actor/kl_loss"], abs=1e-5)
    assert torch.equal(trainer.ref_log_probs(batch)["ref_log_prob"], reference["ref_log_prob"])
    assert not torch.allclose(trainer.old_log_probs(batch)["old_log_probs"], old["old_log_probs"])


def test_rollout_correction_weighs_tokens_by_how_stale_they_are(fresh: Fresh) -> None:
    algorithm, task = AlgorithmConfig(rollout_is="token"), TaskInfo(step=1)
    data = scored(fresh(), responses(6))
    plain = fresh().update(data, last=True)["actor/pg_loss"]
    for off, weight in ((0.0, 1.0), (0.5, 1.6487)):
        samples = data.merge(data.like(rollout_log_probs=data["old_log_probs"] - off * data["response_mask"]))
        samples = samples.merge(rollout_correction(samples, samples, algorithm=algorithm, task=task))
        found = fresh(rollout_is="token").update(samples, last=True)
        assert task.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weight, abs=1e-3)
        assert found["actor/pg_loss"] == pytest.approx(weight * plain, abs=1e-4)


def test_with_bypass_mode_the_rollout_s_log_probs_are_the_old_ones(fresh: Fresh) -> None:
    from verl.trainer.ppo import core_algos

    batch = responses(6)
    data = scored(fresh(), batch)
    plain = fresh(3).update(data, last=True)
    sampled = batch.merge(batch.like(rollout_log_probs=data["old_log_probs"], advantages=data["advantages"]))
    trainer = fresh(3, bypass_mode=True)
    found = trainer.update(sampled, last=True)
    assert (found["actor/pg_loss"], found["actor/grad_norm"]) == (plain["actor/pg_loss"], plain["actor/grad_norm"])
    assert found["rollout_corr/k3_kl"] > 0
    # A rank may get a micro-batch that only pads: it adds nothing.
    mode = trainer.worker.loss_fn.keywords["config"].policy_loss.loss_mode
    loss, metrics = core_algos.get_policy_loss_fn(mode)(
        log_prob=torch.zeros(2, R), response_mask=torch.zeros(2, R, dtype=torch.bool)
    )
    assert (loss.item(), metrics) == (0.0, {})


def test_micro_batches_by_tokens_give_the_same_update(fresh: Fresh, make: Make, tiny_qwen: Path) -> None:
    batch = responses(9, group=3)
    fixed = fresh()
    known = fixed.old_log_probs(batch)["old_log_probs"]
    data = training_batch(known, batch)
    expected = fixed.update(data, last=True)
    longest = int(batch["attention_mask"].sum(dim=1).max())
    trainer = make(tiny_qwen, max_tokens_per_gpu=longest)  # one or two rows in each
    torch.testing.assert_close(trainer.old_log_probs(batch)["old_log_probs"], known, atol=1e-6, rtol=0)
    metrics = trainer.update(data, last=True)
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    with pytest.raises(ConfigError, match="max_tokens_per_gpu=3: a sample has 9 tokens, prompt"):
        Division(0, 1, 1, max_tokens=3).slots(np.array([2, 9]))


def test_ranks_get_rows_of_about_the_same_number_of_tokens() -> None:
    lengths = np.array([9, 9, 8, 8, 1, 1, 2, 2])
    division = Division(rank=0, world=2, size=2, balance=True)
    slots = division.slots(lengths)
    assert slots.shape == (4, 2)
    assert sorted(slots.flatten().tolist()) == list(range(8))
    assert [int(lengths[mine].sum()) for mine in slots.reshape(2, -1)] == [20, 20]
    found = division.imbalance(lengths, slots)
    assert (found["global_seqlen/minmax_diff"], found["global_seqlen/balanced_max"]) == (28.0, 20.0)
    assert Division(0, 2, 2).slots(lengths).flatten().tolist() == list(range(8))
    # Rows that do not divide evenly are padded where they are.
    odd = Division(0, 3, 2, balance=True).slots(lengths)
    assert [row for row in odd.flatten().tolist() if row >= 0] == list(range(8))
    assert Division(0, 2, 2, max_tokens=9).slots(lengths).shape == (2, 4)


# Samples whose reward failed: they come with an empty mask.

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


@pytest.mark.parametrize(("mode", "size"), [("token-mean", 5), ("seq-mean-token-mean", 2)])
def test_dropped_rows_leave_no_trace_in_loss_kl_and_entropy(fresh: Fresh, mode: str, size: int) -> None:
    correction, task = AlgorithmConfig(rollout_is="token"), TaskInfo(step=1)
    seen = []
    for which in (0, 1):
        trainer = fresh(size, loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.01, rollout_is="token")
        batch = responses(16, group=4)
        batch = batch.merge(trainer.old_log_probs(batch), trainer.ref_log_probs(batch))
        off = 0.3 * torch.randn((16, R), generator=torch.Generator().manual_seed(3)) * batch["response_mask"]
        batch = batch.merge(batch.like(rollout_log_probs=batch["old_log_probs"] + off))
        corrected = batch.merge(rollout_correction(batch, batch, algorithm=correction, task=task))
        batch = kept_and_dropped(corrected, KEPT)[which]
        off = ~batch["response_mask"].any(dim=1, keepdim=True)
        # Numbers that would show in any sum, where nothing trains.
        columns = ("old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs", "entropy")
        batch = batch.merge(batch.like(**{name: batch[name].masked_fill(off, 1e3) for name in columns}))
        # The reference differs from the second update on; then all three terms have a gradient.
        metrics = [trainer.update(batch, last=i == 1) for i in range(3)]
        seen.append((metrics, trainer.digest()))
    assert seen[0] == seen[1]
    assert seen[0][0][2]["actor/kl_loss"] > 0


@pytest.mark.parametrize("spoilt", ["response_mask", "advantages"])
def test_an_update_that_can_teach_nothing_takes_no_step(make: Make, tiny_qwen: Path, spoilt: str) -> None:
    trainer = make(tiny_qwen, warmup_steps=4, lr=4e-4)

    def moments() -> list[torch.Tensor]:
        return [value.clone() for one in trainer.worker.engine.optimizer.state.values() for value in one.values()]

    data = scored(trainer, responses(8, group=4))
    bad = data[spoilt] * 0 if spoilt == "response_mask" else data[spoilt] * math.nan
    nothing = data.merge(data.like(**{spoilt: bad}))
    trainer.update(data, last=False)
    weights, before = trainer.digest(), moments()
    skipped = {"actor/lr": pytest.approx(1e-4), "actor/skipped_updates": 1.0}
    assert trainer.update(nothing, last=False) == skipped
    # The rate moves on after a step's last update, taken or not.
    assert trainer.update(nothing, last=True) == skipped
    assert trainer.digest() == weights
    assert len(before) == len(moments()) > 0
    assert all(map(torch.equal, moments(), before))
    metrics = trainer.update(data, last=True)
    assert metrics["actor/lr"] == pytest.approx(2e-4)
    assert "actor/skipped_updates" not in metrics
    assert trainer.digest() != weights


# Two ranks: each is a process that runs a scenario, the same that this process runs alone.


def scenario(trainer: VerlTrainer) -> dict[str, Any]:
    """Two steps of two updates on rows that nothing divides; returns what all ranks must agree on."""
    batch = responses(14, group=7)
    old, reference = trainer.old_log_probs(batch)["old_log_probs"], trainer.ref_log_probs(batch)
    data = batch.merge(reference, training_batch(old, batch))
    metrics = [trainer.update(part, last=i == 1) for _ in range(2) for i, part in enumerate(data.split(2))]
    return {
        "log_probs": old,
        "after": trainer.old_log_probs(batch)["old_log_probs"],
        "reference": trainer.ref_log_probs(batch)["ref_log_prob"],
        "metrics": metrics,
        "weights": trainer.weights(),
        "digest": trainer.digest(),
    }


def with_drops(trainer: VerlTrainer, drop: bool = True) -> dict[str, Any]:
    """Updates on what would leave the second rank nothing, on one row, on none, on all; or without those rows."""
    batch = responses(12, group=4)
    data = batch.merge(trainer.ref_log_probs(batch), trainer.old_log_probs(batch))
    metrics = []
    for keep in ([1] * 6 + [0] * 6, [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 12, [1] * 12):
        dropped, removed = kept_and_dropped(data, keep)
        if drop or len(removed):
            metrics.append(trainer.update(dropped if drop else removed, last=False))
    mask = data["response_mask"] * (torch.arange(12) == 3)[:, None] if drop else data["response_mask"]
    one = data.merge(data.like(advantages=torch.ones(12, R) * data["response_mask"], response_mask=mask))
    metrics.append(trainer.update(one if drop else one.rows([3]), last=True))
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
    assert "vllm" not in sys.modules, "it would change the threads and the garbage collector of this process"
    torch.save(results, out)


def test_two_ranks_do_what_one_does(
    make: Make, ranks: RankHost, tiny_qwen: Path, untied_qwen: Path, tmp_path: Path
) -> None:
    models = [tiny_qwen, untied_qwen]
    jobs = [("scenario", model) for model in models] + [("with_drops", tiny_qwen), ("without_drops", tiny_qwen)]
    found = ranks.run(__name__, jobs, 2, tmp_path)
    for at, model in enumerate(models):
        one = scenario(make(model, **OPTIONS))
        first, second = (results[at] for results in found)
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

    # Ranks leave out dropped rows, and skip together.
    one = with_drops(make(tiny_qwen, **OPTIONS))
    for _tied, _untied, dropped, removed in found:
        assert dropped["digest"] == removed["digest"] == found[0][2]["digest"]
        taken = [metrics for metrics in dropped["metrics"] if "actor/skipped_updates" not in metrics]
        assert taken == removed["metrics"]
        assert len(dropped["metrics"]) == 5 == len(taken) + 1
        assert all(math.isfinite(value) for metrics in taken for value in metrics.values())
    for at_two, at_one in zip(found[0][2]["metrics"], one["metrics"], strict=True):
        for name in ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr"):
            assert at_two.get(name) == pytest.approx(at_one.get(name), abs=1e-5)
    assert largest_difference(found[0][2]["weights"], one["weights"]) < 1e-4
