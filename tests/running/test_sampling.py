"""The sampling of a run, from its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.run import RunConfig
from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError
from dataflow.running.sampling import sampling_of


def test_training_and_validation_sample_by_their_own_keys() -> None:
    config = RunConfig.model_validate(
        {
            "engine": {"n": 4, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_tokens": 9},
            "val": {"n": 2, "temperature": 0.3, "top_p": 0.7, "top_k": 5},
        }
    )
    training, held_out = sampling_of(config)
    assert training == Sampling(4, 0.8, 0.9, 20, 9)
    assert held_out == Sampling(2, 0.3, 0.7, 5, max_tokens=9)


@pytest.mark.heavy
def test_stop_tokens_are_looked_up(tiny_qwen: Path) -> None:
    config = RunConfig.model_validate({"engine": {"stop": "<|im_start|>"}})
    assert sampling_of(config)[0].stop_token_ids == (), "there is no model yet"
    config.model.path = str(tiny_qwen)
    assert sampling_of(config)[0].stop_token_ids == sampling_of(config)[1].stop_token_ids == (1,)
    config.engine.stop = ["<|im_stop|>"]
    with pytest.raises(ConfigError, match=r"engine.stop: the tokenizer has no token '<\|im_stop\|>'; did you mean"):
        sampling_of(config)
