"""Whether a model can be trained as its section says: a LoRA adapter against the model's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import TrainerConfig
from dataflow.config.training import LoraConfig
from dataflow.errors import ConfigError
from dataflow.running.services.training import check_training
from tests.rigs.stand_ins import QWEN_05B, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen", QWEN_05B | {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({}, None),
        ({"target_modules": ["q_proj", "layers.1.mlp.up_proj"], "exclude_modules": ["down_proj"]}, None),
        ({"target_modules": ".*mlp.*_proj"}, None),
        ({"target_modules": ["qproj"]}, "target_modules: model .* has no layer 'qproj'; did you mean 'q_proj'?"),
        ({"adapter": "nowhere"}, "trainer.lora.adapter=nowhere has no readable adapter_config.json"),
    ],
)
def test_an_adapter_names_layers_of_the_model(lora: dict[str, Any], message: str | None, model: Path) -> None:
    options = TrainerConfig(lora=LoraConfig(**{"rank": 2} | lora))
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            check_training(options, model)
        return
    for place in (model, None, "org/model"):
        check_training(options, place)


def test_an_adapter_to_begin_with_has_the_rank_that_is_given(tmp_path: Path, model: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    lora = LoraConfig(rank=8, adapter=str(tmp_path))
    check_training(TrainerConfig(lora=lora), model)
    with pytest.raises(ConfigError, match=r"is of rank 8, and trainer\.lora\.rank is 4; give the same"):
        check_training(TrainerConfig(lora=lora.model_copy(update={"rank": 4})), model)
