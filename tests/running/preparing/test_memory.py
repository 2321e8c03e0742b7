"""The estimate of memory follows the keys of the trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file, pipeline_of
from dataflow.config.run import TrainerConfig
from dataflow.running.preparing.memory import Need, need_of, state_of
from tests.rigs.stand_ins import PARAMETERS, QWEN_7B, write_model

P = PARAMETERS["7B"]
GIB = 2**30
Needed = Callable[..., Need]


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Needed:
    """Returns what a run of 7B on eight GPUs needs with further keys."""
    model = write_model(tmp_path_factory.mktemp("stand-in") / "qwen", QWEN_7B, weights=False)
    module = load_pipeline_file(Path(__file__).parents[3] / "pipelines" / "gsm8k_grpo.py")

    def needs(*keys: str) -> Need:
        base = ("trainer.world_size=8", "ray.gpus_per_worker=1", "engine.rollout=vllm", f"model.path={model}",
                "data.prompts=64", "trainer.max_tokens_per_gpu=8192", "algorithm.use_kl_loss=true")  # fmt: skip
        config = parse_overrides(module.Config, [*base, *keys])
        return need_of(config, pipeline_of(module, config).hosts())

    return needs


def of_actor(need: Need) -> tuple[float, float]:
    (part,) = (each for each in need.pools["GPU"] if each.name == "actor")
    return part.held, part.works


def test_all_weights_take_twelve_bytes_and_four_for_the_gradient(needed: Needed) -> None:
    need = needed()
    held, works = of_actor(need)
    assert held == pytest.approx(12 * P / 8 + GIB, rel=1e-3)
    assert works > 4 * P / 8
    assert need.checkpoint == pytest.approx(12 * P, rel=1e-3)


def test_an_adapter_saves_gradient_optimizer_and_checkpoint(needed: Needed) -> None:
    need = needed("trainer.lora.rank=32")
    held, works = of_actor(need)
    assert held == pytest.approx(4 * P / 8 + GIB, rel=0.05)
    assert works < of_actor(needed())[1] - 3.9 * P / 8
    assert 0.08e9 * 12 < need.checkpoint < 0.11e9 * 12  # 81 million weights by peft's own count


def test_what_is_moved_to_the_cpu_is_on_the_gpus_while_it_computes(needed: Needed) -> None:
    plain, moved = needed(), needed("trainer.param_offload=true", "trainer.optimizer_offload=true")
    assert of_actor(moved)[0] == GIB
    assert sum(of_actor(moved)) == pytest.approx(sum(of_actor(plain)))


@pytest.mark.heavy
def test_types_optimizers_and_copies(needed: Needed) -> None:
    whole = of_actor(needed())[0] - GIB
    assert of_actor(needed("trainer.model_dtype=bfloat16"))[0] - GIB == pytest.approx(whole / 2)
    assert of_actor(needed("trainer.optimizer=SGD"))[0] - GIB == pytest.approx(whole / 3)
    momentum = ("trainer.optimizer=SGD", "trainer.optimizer_kwargs.momentum=0.9")
    assert of_actor(needed(*momentum))[0] - GIB == pytest.approx(whole * 2 / 3)
    eight = TrainerConfig(optimizer="AdamW8bit", optimizer_impl="bitsandbytes.optim")
    assert state_of(eight) == 2
    assert of_actor(needed("trainer.fsdp_size=4"))[0] - GIB == pytest.approx(whole * 2)


def test_activations_that_are_kept_or_moved(needed: Needed) -> None:
    again, kept = of_actor(needed())[1], of_actor(needed("trainer.gradient_checkpointing=false"))[1]
    moved = of_actor(needed("trainer.gradient_checkpointing=false", "trainer.activation_offload=true"))[1]
    assert kept > again + 10 * GIB
    assert moved < kept
