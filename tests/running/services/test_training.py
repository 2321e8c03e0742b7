"""Whether a model can be trained as its section says: a LoRA adapter against the model's layers."""

from __future__ import annotations

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
