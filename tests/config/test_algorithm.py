"""Section algorithm: presets, the order of precedence, thresholds, and keys that do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dataflow.algorithms import PRESETS
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.loading.saved import Saved, dump
from dataflow.config.run import RunConfig, dump_yaml, parse_overrides
from dataflow.errors import ConfigError


def section(*args: str) -> AlgorithmConfig:
    return parse_overrides(RunConfig, args).algorithm


def test_a_preset_sets_its_keys() -> None:
    for name, sets in PRESETS.items():
        found = section(f"algorithm={name}")
        assert {each: getattr(found, each) for each in sets} == sets


def test_explicit_keys_win_over_presets() -> None:
    found = section("algorithm=gspo", "algorithm.clip_ratio_low=0.1", "algorithm.use_kl_loss=true")
    assert (found.clip_ratio_low, found.clip_ratio_high, found.policy_loss) == (0.1, 4e-4, "gspo")
    assert found.use_kl_loss
    # clip_ratio is the default of the other two, so it also replaces a preset's.
    both = section("algorithm=dapo", "algorithm.clip_ratio=0.1")
    assert (both.clip_ratio_low, both.clip_ratio_high, both.clip_ratio_c) == (0.1, 0.1, 10.0)


def test_a_preset_replaces_the_one_that_is_a_pipeline_s_default() -> None:
    class Config(RunConfig):
        algorithm: AlgorithmConfig = AlgorithmConfig(preset="gspo", kl_loss_coef=0.3)

    plain = parse_overrides(Config, []).algorithm
    assert (plain.policy_loss, plain.kl_loss_coef) == ("gspo", 0.3)
    other = parse_overrides(Config, ["algorithm=drgrpo"]).algorithm
    assert (other.policy_loss, other.clip_ratio_low, other.kl_loss_coef) == ("vanilla", 0.2, 0.3)


def test_the_saved_configuration_names_the_values_of_a_preset_and_takes_another(tmp_path: Path) -> None:
    config = parse_overrides(RunConfig, ["algorithm=gspo", "algorithm.clip_ratio_low=0.1", "name=x"])
    assert yaml.safe_load(dump_yaml(config))["algorithm"]["clip_ratio_low"] == 0.1
    (tmp_path / "own.py").write_text("from dataflow.config.run import RunConfig as Config\ndef pipeline(config): ...\n")
    (tmp_path / "config.yaml").write_text(dump(config, tmp_path / "own.py"))
    saved = Saved(tmp_path / "config.yaml")
    assert saved.config([]).algorithm.clip_ratio_low == 0.1
    other = saved.config(["algorithm=drgrpo"]).algorithm
    assert (other.policy_loss, other.clip_ratio_high, other.loss_agg_mode) == (
        "vanilla",
        0.2,
        "seq-mean-token-sum-norm",
    )


def test_thresholds_are_taken_as_they_are_written() -> None:
    # YAML would read the first as 0.52.
    assert section("algorithm.rollout_is_threshold=0.5_2").rollout_is_threshold == "0.5_2"
    assert section("algorithm.rollout_is_threshold=3").rollout_is_threshold == "3"
    assert AlgorithmConfig(rollout_is_threshold=2.5).rollout_is_threshold == "2.5"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("algorithm=drgrp", "algorithm.preset=drgrp: give grpo, .*did you mean 'drgrpo'"),
        ("algorithm.policy_loss=dro", "dro_beta: policy_loss=dro needs it"),
        ("algorithm.gdpo_reward_keys=a algorithm.gdpo_reward_weights=[1,2]", "give one for each of gdpo_reward_keys"),
        ("algorithm.rollout_is_threshold=5_2", "lower_upper such as 0.5_2.0"),
        ("algorithm.rollout_rs=token_k4 algorithm.rollout_rs_threshold=1", "there is no 'token_k4'"),
        ("algorithm.rollout_rs=token_k1", "rollout_rs and algorithm.rollout_rs_threshold go together"),
        ("algorithm.rollout_rs=token_k2 algorithm.rollout_rs_threshold=1_2", "k2 and k3 have no lower bound"),
        ("algorithm.rollout_rs=token_k1 algorithm.rollout_rs_threshold=0.5", "give 1 or more"),
        ("algorithm.rollout_rs=token_k1 algorithm.rollout_rs_threshold=2,3", "one threshold for all kinds, or 1"),
        ("algorithm=gspo algorithm.bypass_mode=true", "policy_loss=gspo: bypass_mode has its own"),
        (
            "algorithm.adv_estimator=optimal_token_baseline algorithm.bypass_mode=true",
            "leaves out the pass that adv_estimator=optimal_token_baseline needs",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(args: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        section(*args.split())
    assert "\n" not in str(caught.value)
