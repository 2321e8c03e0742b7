"""The keys of a trained model: verl's configurations that they become, checkpoints with each, and LoRA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.config.run import TrainerConfig
from dataflow.config.training import CriticConfig
from dataflow.engines.verl.export import with_adapter, write_adapter
from dataflow.engines.verl.model import digest
from dataflow.engines.verl.state import read_weights
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.engines.verl.worker import worker_config
from tests.engines.verl.models import Make, build, largest_difference, load, plain_log_probs, responses, save, scored
from tests.rigs.ranks import RankHost

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

LORA = {"rank": 4, "alpha": 8}
CASES: Mapping[str, Mapping[str, Any]] = {
    "lora": {"lora": LORA, "lr": 1e-2},
    "cosine": {"lr_scheduler": "cosine", "warmup_ratio": 0.2, "min_lr_ratio": 0.1, "lora": {"rank": 2}},
    "momentum": {"optimizer": "SGD", "optimizer_kwargs": {"momentum": 0.9}, "gradient_checkpointing": True},
    "bfloat16": {"optimizer": "RMSprop", "dtype": "bfloat16", "model_dtype": "bfloat16"},
    "adagrad": {"optimizer": "Adagrad"},
}


def step(trainer: VerlTrainer, seed: int) -> float:
    """Takes a training step of one update; returns its learning rate."""
    return trainer.update(scored(trainer, responses(4, seed), seed), last=True)["actor/lr"]


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_trainer_continues_bit_for_bit(name: str, make: Make, tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = make(tiny_qwen, **CASES[name])
    start = trainer.digest()
    rates = [step(trainer, 0)]
    save(trainer, tmp_path / "saved")
    rates += [step(trainer, 1), step(trainer, 2)]
    end = trainer.digest()
    trainer.load(str(tmp_path / "saved"))
    assert [step(trainer, 1), step(trainer, 2)] == rates[1:]
    assert trainer.digest() == end != start
    if name == "cosine":  # 10 steps, 2 of them a warm-up; then a cosine, of which a tenth remains behind the last step
        assert rates == pytest.approx([5e-4, 1e-3, 1e-3 * (0.55 + 0.45 * 0.9396926)])


def merged_digest(model: Path, checkpoint: Path, names: Any) -> str:
    """Returns the digest of a model with the adapter of a checkpoint merged into it, as the export has it."""
    whole = with_adapter(model, *read_weights(checkpoint)).merge_and_unload().state_dict()
    return digest({name: whole[name] for name in names})


def test_outside_the_trainer_an_adapter_is_merged(make: Make, tiny_qwen: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    batch, frozen = responses(6), load(tiny_qwen)
    trainer = make(tiny_qwen, lora=LORA, lr=1e-2, reference=True, use_kl_loss=True)
    first, mask = trainer.old_log_probs(batch)["old_log_probs"], batch["response_mask"]
    data = scored(trainer, batch)
    for _ in range(2):
        trainer.update(data.merge(trainer.ref_log_probs(data)), last=True)
    # The reference is the same model with the adapter off: no other one is held.
    assert trainer.reference is trainer.worker
    assert torch.equal(trainer.ref_log_probs(batch)["ref_log_prob"], first)
    torch.testing.assert_close(first, plain_log_probs(frozen, batch)[0] * mask, atol=1e-5, rtol=0)

    weights = trainer.weights()
    assert set(weights) == {name for name, _ in frozen.named_parameters()}  # the engine and vLLM know these names
    moved = {name for name, each in frozen.named_parameters() if not torch.equal(each, weights[name])}
    assert moved
    assert all(name.endswith("_proj.weight") for name in moved)
    frozen.load_state_dict(weights, strict=False)
    after = trainer.old_log_probs(batch)["old_log_probs"]
    assert (after - first).abs().max() > 1e-3
    torch.testing.assert_close(after, plain_log_probs(frozen, batch)[0] * mask, atol=1e-5, rtol=0)

    save(trainer, tmp_path / "saved")
    adapter, config = read_weights(tmp_path / "saved")
    assert all("lora_" in name for name in adapter)  # the rest is the model's
    assert merged_digest(tiny_qwen, tmp_path / "saved", weights) == trainer.digest()
    write_adapter(adapter, config, tiny_qwen, tmp_path / "adapter", "a card", merge=False)
    theirs = PeftModel.from_pretrained(load(tiny_qwen), str(tmp_path / "adapter")).merge_and_unload()
    assert digest(dict(theirs.named_parameters())) == trainer.digest()

    # An adapter that a run has exported is one to begin with.
    begun = make(tiny_qwen, lora={**LORA, "adapter": str(tmp_path / "adapter")})
    assert begun.digest() == digest(weights)


def be_a_rank(out: str, *jobs: str) -> None:
    """Trains an adapter on its own half of the model, then all weights on a copy of its own; saves each in between."""
    (port, _, directory), (other, _, _) = jobs[:3], jobs[3:]
    found = {}
    for name, at, options in (("lora", port, {"lora": LORA}), ("copies", other, {"fsdp_size": 1})):
        os.environ["MASTER_PORT"] = at
        trainer = build(Path(directory) / "model", micro_batch_size=2, lr=1e-2, world_size=2, **options)
        begun = trainer.digest()
        step(trainer, 0)
        save(trainer, Path(directory) / name)
        step(trainer, 1)
        end = trainer.digest()
        trainer.load(str(Path(directory) / name))
        step(trainer, 1)
        found[name] = {"digests": [begun, end, trainer.digest()], "weights": trainer.weights()}
        trainer.close()
    torch.save(found, out)


@pytest.mark.timeout(700)
def test_two_ranks_do_what_one_does(ranks: RankHost, make: Make, tiny_qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_qwen)
    first, second = ranks.run(__name__, [("lora", tmp_path), ("copies", tmp_path)], 2, tmp_path)
    for name, options in (("lora", {"lora": LORA}), ("copies", {})):
        begun, end, again = first[name]["digests"]
        assert begun != end == again
        assert first[name]["digests"] == second[name]["digests"]
        trainer = make(tiny_qwen, micro_batch_size=2, lr=1e-2, **options)
        assert trainer.digest() == begun
        step(trainer, 0)
        step(trainer, 1)
        assert largest_difference(first[name]["weights"], trainer.weights()) < 1e-3
    # A checkpoint of two ranks, merged without any, has the bits that the engine got.
    trainer = make(tiny_qwen, lora=LORA)
    trainer.load(str(tmp_path / "lora"))
    assert merged_digest(tiny_qwen, tmp_path / "lora", first["lora"]["weights"]) == trainer.digest()


def config_of(model: Path, options: Any, **more: Any) -> Any:
    return worker_config(str(model), options, **{"total_steps": 20, "seed": 7, "device": "cuda"} | more)


def test_the_keys_are_those_of_verl(tiny_qwen: Path) -> None:
    options = TrainerConfig(
        lr=3e-5, optimizer="Adam", optimizer_kwargs={"eps": 1e-6}, betas=(0.8, 0.9), weight_decay=0.2, grad_clip=0.5,
        lr_scheduler="cosine", warmup_steps=3, min_lr_ratio=0.2, lr_cycles=1.0, dtype="float32", model_dtype="bfloat16",
        gradient_checkpointing=False, activation_offload=True, param_offload=True, optimizer_offload=True, fsdp_size=4,
        reshard_after_forward=False, forward_prefetch=True, micro_batch_size=2, world_size=8,
        lora={"rank": 8, "alpha": 32, "target_modules": ["q_proj"], "exclude_modules": ".*layers.0.*"},
    )  # fmt: skip
    made = config_of(tiny_qwen, options)
    model, engine, optimizer = made.model_config, made.engine_config, made.optimizer_config
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 32, ["q_proj"])
    assert (model.exclude_modules, model.lora_adapter_path) == (".*layers.0.*", None)
    assert (model.enable_gradient_checkpointing, model.enable_activation_offload) == (False, True)
    assert (engine.model_dtype, engine.mixed_precision["param_dtype"]) == ("bf16", "fp32")
    assert (engine.param_offload, engine.optimizer_offload, engine.fsdp_size) == (True, True, 4)
    assert (engine.reshard_after_forward, engine.forward_prefetch, engine.seed) == (False, True, 7)
    assert (optimizer.optimizer, optimizer.override_optimizer_config) == ("Adam", {"eps": 1e-6})
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (3e-5, (0.8, 0.9), 0.2)
    assert (optimizer.lr_scheduler_type, optimizer.lr_warmup_steps) == ("cosine", 3)
    assert (optimizer.min_lr_ratio, optimizer.num_cycles, optimizer.clip_grad) == (0.2, 1.0, 0.5)

    plain = config_of(tiny_qwen, TrainerConfig())
    assert plain.engine_config.mixed_precision["param_dtype"] == "bf16"
    assert (plain.engine_config.model_dtype, plain.engine_config.fsdp_size) == ("fp32", -1)
    assert config_of(tiny_qwen, TrainerConfig(), offload=True).engine_config.param_offload
    value = config_of(tiny_qwen, CriticConfig(lora={"rank": 1}), valued=True)  # type: ignore[arg-type]
    assert value.model_config.exclude_modules == ["score", "classifier"]
