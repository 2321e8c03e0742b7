"""The critic against plain transformers and PyTorch, at one and two ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.training.critic import CriticConfig
from dataflow.engines.verl.critic import VerlCritic
from dataflow.engines.verl.model import digest
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.errors import ConfigError

if TYPE_CHECKING or "." in __name__:
    from tests.engines.verl.test_trainer import P, largest_difference, responses, training_batch
    from tests.engines.verl.test_trainer import build as build_actor
    from tests.rigs.ranks import RankHost, alone
else:  # in a rank, ``tests`` may be another package
    from test_trainer import P, largest_difference, responses, training_batch
    from test_trainer import build as build_actor

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

CRITIC = {
    "micro_batch_size": 64,
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    "weight_decay": 0.1,
    "warmup_steps": 0,
    "grad_clip": 1.0,
    "cliprange_value": 0.5,
    "loss_agg_mode": "token-mean",
}
CLIP = 0.05

Make = Callable[..., VerlCritic]


def build(model: Path | str, **options: Any) -> VerlCritic:
    """Builds a critic; options go to the section, or the argument, that has that name."""
    critic = {**CRITIC, **{k: options.pop(k) for k in list(options) if k in CriticConfig.model_fields}}
    return VerlCritic(str(model), CriticConfig(**critic), total_steps=10, **options)


def with_returns(batch: Batch, values: torch.Tensor, seed: int = 0) -> Batch:
    """Adds values far enough from the present ones that some predictions are clipped, and random returns."""
    draw = torch.Generator().manual_seed(seed + 1000)
    mask = batch["response_mask"]
    off, gain = (torch.randn(mask.shape, generator=draw) * mask for _ in range(2))
    return batch.merge(batch.like(values=values + 0.1 * off, returns=values + gain))


def plain_model(critic: VerlCritic, model: Path) -> Any:
    """Returns transformers' model with the critic's weights."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(model)
    config.num_labels, config.classifier_dropout = 1, 0.0
    plain = AutoModelForTokenClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    plain.load_state_dict(critic.weights())
    return plain.eval()


def plain_values(model: Any, batch: Batch) -> torch.Tensor:
    """Values before each token of the responses, ``[rows, R]``, by one padded forward of transformers."""
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        use_cache=False,
    ).logits.squeeze(-1)
    return logits[:, P - 1 : -1] * batch["response_mask"]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds critics in this process, closes them, and leaves its environment as it was."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    for name in set(environment) - set(alone()):
        os.environ.pop(name, None)
    built: list[VerlCritic] = []

    def one(model: Path, **options: Any) -> VerlCritic:
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


def test_values_equal_a_plain_forward(make: Make, tiny_qwen: Path) -> None:
    batch = responses(11)
    # 11 rows in micro-batches of at most 4: three pieces, the last filled up.
    critic = make(tiny_qwen, micro_batch_size=4)
    with torch.no_grad():
        expected = plain_values(plain_model(critic, tiny_qwen), batch)
    found = critic.values(batch)
    assert found.groups.tolist() == batch.groups.tolist()
    assert found.meta["weights_version"] == 0
    assert found["values"].dtype == torch.float32
    assert found["values"].abs().max() > 1e-3, "the head is not zero"
    torch.testing.assert_close(found["values"], expected, atol=1e-5, rtol=0)


def test_the_body_is_that_of_the_model_and_the_head_is_drawn_from_the_seed(make: Make, tiny_qwen: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = make(tiny_qwen).weights()
    body = dict(AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float32).named_parameters())
    assert set(weights) - set(body) == {"score.weight", "score.bias"}
    assert set(body) - set(weights) <= {"lm_head.weight"}
    assert all(torch.equal(weights[name], body[name]) for name in set(body) & set(weights))
    assert digest(make(tiny_qwen).weights()) == digest(weights)
    other = make(tiny_qwen, seed=1).weights()
    assert {name for name in weights if not torch.equal(weights[name], other[name])} == {"score.weight"}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_an_update_is_one_hand_written_adamw_step(make: Make, tiny_qwen: Path, mode: str) -> None:
    critic = make(tiny_qwen, micro_batch_size=3, cliprange_value=CLIP, loss_agg_mode=mode)
    model = plain_model(critic, tiny_qwen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for seed in (1, 2, 3):
        batch = responses(8, seed)
        batch = with_returns(batch, critic.values(batch)["values"], seed)
        metrics = critic.update(batch, last=seed == 3)

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
        assert largest_difference(critic.weights(), dict(model.named_parameters())) < 1e-5


def test_it_learns_what_the_responses_return(make: Make, tiny_qwen: Path) -> None:
    critic, batch = make(tiny_qwen, cliprange_value=10.0), responses(16)
    returns = (batch["responses"][:, :1] % 2).float() * batch["response_mask"]
    losses = []
    for _ in range(40):
        data = batch.merge(critic.values(batch).like(returns=returns), critic.values(batch))
        losses.append(critic.update(data, last=True)["critic/vf_loss"])
    assert losses[-1] < 0.2 * losses[0], losses


def test_rows_without_tokens_train_nothing(make: Make, tiny_qwen: Path) -> None:
    critic, batch = make(tiny_qwen, lr=4e-4, warmup_steps=4), responses(8)
    data = with_returns(batch, critic.values(batch)["values"])
    mask = data["response_mask"].clone()
    mask[1::2] = 0
    half = data.merge(data.like(response_mask=mask))
    metrics, after = critic.update(half, last=False), critic.digest()
    nothing = data.merge(data.like(response_mask=torch.zeros_like(mask)))
    assert critic.update(nothing, last=True) == {"critic/lr": pytest.approx(1e-4), "critic/skipped_updates": 1.0}
    assert critic.digest() == after
    critic = make(tiny_qwen, lr=4e-4, warmup_steps=4)
    assert critic.update(data.rows(list(range(0, 8, 2))), last=True) == metrics
    assert critic.digest() == after
    assert critic.update(data, last=True)["critic/lr"] == pytest.approx(2e-4)


def test_actor_and_critic_share_a_process(make: Make, tiny_qwen: Path) -> None:
    batch = responses(8)

    def train_critic(critic: VerlCritic) -> tuple[dict[str, float], str]:
        return critic.update(with_returns(batch, critic.values(batch)["values"]), last=True), critic.digest()

    def train_actor(actor: VerlTrainer) -> str:
        actor.update(training_batch(actor.old_log_probs(batch)["old_log_probs"], batch), last=True)
        return actor.digest()

    apart = train_critic(make(tiny_qwen))
    critic = make(tiny_qwen)
    actor = build_actor(tiny_qwen)
    trained = train_actor(actor)
    assert train_critic(critic) == apart, "the actor's step does not change the critic"
    assert actor.digest() == trained, "nor the critic's the actor"
    critic.close()
    actor = build_actor(tiny_qwen)
    assert train_actor(actor) == trained
    actor.close()


def test_what_cannot_be_trained_with_is_said_in_one_sentence(make: Make, tiny_qwen: Path) -> None:
    with pytest.raises(ConfigError, match="device 'tpu' is neither"):
        make(tiny_qwen, device="tpu")


# One and two ranks: each is a process that runs jobs.


def trains(critic: VerlCritic, seeds: range) -> dict[str, Any]:
    """Takes a step of two updates for each seed on rows that nothing divides."""
    metrics = []
    for seed in seeds:
        batch = responses(14, seed, group=7)
        data = with_returns(batch, critic.values(batch)["values"], seed)
        metrics += [critic.update(part, last=i == 1) for i, part in enumerate(data.split(2))]
    batch = responses(5)
    return {
        "values": critic.values(batch)["values"],
        "metrics": metrics,
        "digest": critic.digest(),
        "weights": critic.weights(),
    }


def saved(critic: VerlCritic, directory: Path) -> dict[str, Any]:
    """Trains, saves, and trains on."""

    async def save() -> None:
        assert await critic.snapshot(wait=False)
        await critic.write(str(directory / "critic"))

    trains(critic, range(2))
    asyncio.run(save())
    return trains(critic, range(2, 4))


def loaded(critic: VerlCritic, directory: Path) -> dict[str, Any]:
    """Goes on from what :func:`saved` saved."""
    critic.load(str(directory / "critic"))
    return trains(critic, range(2, 4))


JOBS: dict[str, Callable[[VerlCritic, Path], Any]] = {job.__name__: job for job in (saved, loaded)}


def be_a_rank(out: str, *jobs: str) -> None:
    results = []
    for port, name, directory in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        os.environ["MASTER_PORT"] = port
        critic = build(Path(directory) / "model", micro_batch_size=2, warmup_steps=2)
        results.append(JOBS[name](critic, Path(directory)))
        critic.close()
    torch.save(results, out)


@pytest.mark.timeout(700)
def test_ranks_do_what_one_does_and_go_on_from_a_checkpoint(ranks: RankHost, tiny_qwen: Path, tmp_path: Path) -> None:
    found = {}
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        (place / "model").symlink_to(tiny_qwen)
        found[world] = ranks.run(Path(__file__).stem, [("saved", place), ("loaded", place)], world, place)
        for rank in found[world]:
            first, again = rank
            assert first["digest"] == again["digest"] == found[world][0][0]["digest"]
            assert first["metrics"] == again["metrics"] == found[world][0][0]["metrics"]
            assert torch.equal(first["values"], found[world][0][0]["values"])
    (one, _), (two, _) = found[1][0], found[2][0]
    torch.testing.assert_close(two["values"], one["values"], atol=1e-3, rtol=0)
    for at_two, at_one in zip(two["metrics"], one["metrics"], strict=True):
        for name in ("critic/vf_loss", "critic/grad_norm", "critic/lr"):
            assert at_two[name] == pytest.approx(at_one[name], abs=1e-4)
    assert largest_difference(two["weights"], one["weights"]) < 1e-4
