"""The critic against plain transformers and PyTorch, at one and two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.verl.state import read_weights
from dataflow.engines.verl.trainer import VerlCritic, VerlTrainer
from tests.engines.verl.models import (
    build,
    build_critic,
    largest_difference,
    load,
    plain_logits,
    responses,
    save,
    scored,
    with_returns,
)
from tests.rigs.ranks import RankHost

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

CLIP = 0.05


@pytest.fixture
def critic(make: Any, tiny_qwen: Path) -> Callable[..., VerlCritic]:
    return lambda **options: make(tiny_qwen, by=build_critic, **options)  # type: ignore[no-any-return]


def plain_model(critic: VerlCritic, model: Path) -> Any:
    """Returns transformers' model with the critic's weights."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(model)
    config.num_labels, config.classifier_dropout = 1, 0.0
    plain = AutoModelForTokenClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    plain.load_state_dict(critic.weights())
    return plain.eval()


def plain_values(model: Any, batch: Batch) -> torch.Tensor:
    return plain_logits(model, batch).squeeze(-1) * batch["response_mask"]


def test_values_equal_a_plain_forward_of_the_models_body_and_a_head_from_the_seed(critic: Any, tiny_qwen: Path) -> None:
    batch = responses(11)
    # 11 rows in micro-batches of at most 4: three pieces, the last filled up.
    made = critic(micro_batch_size=4)
    with torch.no_grad():
        expected = plain_values(plain_model(made, tiny_qwen), batch)
    found = made.values(batch)["values"]
    assert found.dtype == torch.float32
    assert found.abs().max() > 1e-3, "the head is not zero"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    weights, body = made.weights(), dict(load(tiny_qwen).named_parameters())
    assert set(weights) - set(body) == {"score.weight", "score.bias"}
    assert set(body) - set(weights) <= {"lm_head.weight"}
    other = critic(seed=1).weights()
    assert {name for name in weights if not torch.equal(weights[name], other[name])} == {"score.weight"}
    assert all(torch.equal(weights[name], body[name]) for name in set(body) & set(weights))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_an_update_is_one_hand_written_adamw_step(critic: Any, tiny_qwen: Path, mode: str) -> None:
    made = critic(micro_batch_size=3, cliprange_value=CLIP, loss_agg_mode=mode)
    model = plain_model(made, tiny_qwen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for seed in (1, 2, 3):
        batch = responses(8, seed)
        batch = with_returns(batch, made.values(batch)["values"], seed)
        metrics = made.update(batch, last=seed == 3)

        mask, values, returns = batch["response_mask"], batch["values"], batch["returns"]
        predicted = plain_values(model, batch)
        clipped = predicted.clamp(values - CLIP, values + CLIP)
        error = 0.5 * torch.maximum((predicted - returns) ** 2, (clipped - returns) ** 2) * mask
        per_row = error.sum(dim=1) / mask.sum(dim=1)
        loss = error.sum() / mask.sum() if mode == "token-mean" else per_row.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), abs=1e-4)
        assert metrics["critic/vf_clipfrac"] > 0, "the test must clip something"
        assert metrics["critic/vpred_mean"] == pytest.approx(((predicted * mask).sum() / mask.sum()).item(), abs=1e-5)
        assert largest_difference(made.weights(), dict(model.named_parameters())) < 1e-5


def test_actor_and_critic_share_a_process(critic: Any, make: Any, tiny_qwen: Path) -> None:
    batch = responses(8)

    def train_critic(critic: VerlCritic) -> tuple[dict[str, float], str]:
        return critic.update(with_returns(batch, critic.values(batch)["values"]), last=True), critic.digest()

    def train_actor(actor: VerlTrainer) -> str:
        actor.update(scored(actor, batch), last=True)
        return actor.digest()

    apart = train_critic(critic())
    first = critic()
    actor = make(tiny_qwen, by=build, keep=True)
    trained = train_actor(actor)
    assert train_critic(first) == apart, "the actor's step does not change the critic"
    assert actor.digest() == trained, "nor the critic's the actor"
    assert train_actor(make(tiny_qwen)) == trained


def test_an_adapter_leaves_the_head_trained(critic: Any, tmp_path: Path) -> None:
    made = critic(lr=1e-2, lora={"rank": 2, "target_modules": ["q_proj"]})
    batch = responses(6)
    data = with_returns(batch, made.values(batch)["values"])
    before = made.weights()
    made.update(data, last=True)
    save(made, tmp_path / "saved")
    weights = made.weights()
    names = set(read_weights(tmp_path / "saved")[0])
    assert {name.rpartition("model.")[2] for name in names if "lora" not in name} == {"score.weight", "score.bias"}
    moved = {name for name, each in before.items() if not torch.equal(each, weights[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "score"}
    made.update(data, last=True)
    end = made.digest()
    made.load(str(tmp_path / "saved"))
    made.update(data, last=True)
    assert made.digest() == end


# Two ranks: each is a process that runs jobs, which this process runs alone.


def trains(critic: VerlCritic, seeds: range) -> dict[str, Any]:
    """Takes a step of two updates for each seed on rows that nothing divides."""
    metrics = []
    for seed in seeds:
        batch = responses(14, seed, group=7)
        data = with_returns(batch, critic.values(batch)["values"], seed)
        metrics += [critic.update(part, last=i == 1) for i, part in enumerate(data.split(2))]
    return {
        "values": critic.values(responses(5))["values"],
        "metrics": metrics,
        "digest": critic.digest(),
        "weights": critic.weights(),
    }


def saved(critic: VerlCritic, directory: Path) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    trains(critic, range(2))
    save(critic, directory / "critic")
    return trains(critic, range(2, 4))


def loaded(critic: VerlCritic, directory: Path) -> dict[str, Any]:
    """Goes on from what :func:`saved` saved."""
    critic.load(str(directory / "critic"))
    return trains(critic, range(2, 4))


JOBS: dict[str, Callable[[VerlCritic, Path], Any]] = {job.__name__: job for job in (saved, loaded)}
OPTIONS = {"micro_batch_size": 2, "warmup_steps": 2}


def be_a_rank(out: str, *jobs: str) -> None:
    results = []
    for port, name, directory in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        os.environ["MASTER_PORT"] = port
        critic = build_critic(Path(directory) / "model", **OPTIONS)
        results.append(JOBS[name](critic, Path(directory)))
        critic.close()
    torch.save(results, out)


@pytest.mark.timeout(700)
def test_ranks_do_what_one_does_and_go_on_from_a_checkpoint(
    critic: Any, ranks: RankHost, tiny_qwen: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_qwen)
    found = ranks.run(__name__, [("saved", tmp_path), ("loaded", tmp_path)], 2, tmp_path)
    two = found[0][0]
    for first, again in found:
        assert first["digest"] == again["digest"] == two["digest"]
        assert first["metrics"] == again["metrics"] == two["metrics"]
        assert torch.equal(first["values"], two["values"])
    one = saved(critic(**OPTIONS), tmp_path / "one")
    torch.testing.assert_close(two["values"], one["values"], atol=1e-3, rtol=0)
    for at_two, at_one in zip(two["metrics"], one["metrics"], strict=True):
        for name in ("critic/vf_loss", "critic/grad_norm", "critic/lr"):
            assert at_two[name] == pytest.approx(at_one[name], abs=1e-4)
    assert largest_difference(two["weights"], one["weights"]) < 1e-4
