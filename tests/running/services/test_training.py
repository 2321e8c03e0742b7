"""Whether a model can be trained as its section says: LoRA against the model's layers, GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import TrainerConfig
from dataflow.config.training.trained import LoraConfig
from dataflow.errors import ConfigError
from dataflow.running.services.training import adapted, check_training, linear_layers
from tests.rigs.stand_ins import QWEN_05B, shapes, write_model

SMALL: dict[str, Any] = QWEN_05B | {"num_hidden_layers": 2}
LAYERS = linear_layers({name: list(shape) for name, shape in shapes(SMALL | {"tie_word_embeddings": False})})
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen", SMALL)


@pytest.mark.parametrize(
    ("lora", "number"),
    [
        ({}, 14),
        ({"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}, 3),
        ({"target_modules": r".*layers\.0\..*", "exclude_modules": ["down_proj"]}, 6),
        ({"exclude_modules": ".*self_attn.*"}, 6),
        ({"target_modules": ["lm_head"]}, 1),
    ],
)
def test_the_layers_with_an_adapter(lora: dict[str, Any], number: int) -> None:
    found = adapted(LoraConfig(rank=2, **lora), LAYERS)
    assert len(found) == number
    assert {name.rpartition(".")[2] for name in LAYERS} == {*KINDS, "lm_head"}


@pytest.mark.parametrize("lora", [{}, {"target_modules": ["q_proj"]}, {"target_modules": ".*mlp.*_proj"}])
def test_an_adapter_that_fits_is_accepted(lora: dict[str, Any], model: Path) -> None:
    options = TrainerConfig(lora=LoraConfig(rank=2, **lora))
    for place in (model, None, "org/model"):
        check_training(options, place, "cpu")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["qproj"]}, "has no linear layer 'qproj'; did you mean 'q_proj'? it has down_proj,"),
        ({"target_modules": ["q_proj", "zzz"]}, "has no linear layer 'zzz'; it has down_proj, gate_proj, k_proj,"),
        ({"target_modules": ["embed_tokens"]}, "has no linear layer 'embed_tokens'; it has"),
        ({"target_modules": "q_proj"}, "as a whole, such as model.layers.0.mlp.down_proj; give .*q_proj, or [NAME"),
        ({"exclude_modules": ["o_prj"]}, "trainer.lora.exclude_modules: model"),
        ({"target_modules": "(q"}, "trainer.lora.target_modules=(q is no regular expression"),
        ({"target_modules": []}, "leave no layer of model"),
        ({"exclude_modules": ".*"}, "exclude_modules=.* leave no layer of model"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "leave no layer of model"),
        ({"target_modules": ".*"}, "target_modules=.* also matches the whole of model"),
        ({"target_modules": ".*(q_proj|norm)"}, "also matches model.layers.0.input_layernorm of model"),
        ({"target_modules": ".*(q_proj|self_attn)"}, "also matches model.layers.0.self_attn of model"),
        ({"rank": 10**9}, "trainer.lora.rank=1000000000 is above 896, the highest rank that a layer of"),
        ({"rank": 129, "target_modules": ["k_proj"]}, "trainer.lora.rank=129 is above 128, the highest rank"),
        ({"adapter": "nowhere"}, "trainer.lora.adapter=nowhere has no readable adapter_config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_sentence(lora: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_training(TrainerConfig(lora=LoraConfig(**{"rank": 2} | lora)), model, "cpu")
    assert message in str(caught.value)
    assert str(caught.value).startswith("trainer.lora.")


def test_an_adapter_to_begin_with_has_the_rank_that_is_given(tmp_path: Path, model: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    lora = LoraConfig(rank=8, adapter=str(tmp_path))
    check_training(TrainerConfig(lora=lora), model, "cpu")
    with pytest.raises(ConfigError, match=r"is of rank 8, and trainer\.lora\.rank is 4; give the same"):
        check_training(TrainerConfig(lora=lora.model_copy(update={"rank": 4})), model, "cpu")
