"""docs/training.md names keys that exist, all of those that trained models share, and the optimizers as they are."""

from __future__ import annotations

import re
from pathlib import Path

from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.config.training.trained import OPTIMIZERS, LoraConfig, TrainedConfig
from pipelines.ppo_critic import Config

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
TEXT = PAGE.read_text(encoding="utf-8")
ELSEWHERE = {"lr", "betas", "weight_decay", "grad_clip", "micro_batch_size", "lora"}
"""Keys that the page takes for known, or shows in its commands."""


def test_keys_exist() -> None:
    ours = {".".join(path) for path, _ in fields(Config)}
    named = re.findall(r"`((?:trainer|critic)\.[\w.]+)(?:=[^`]*)?`", TEXT)
    assert len(named) > 15
    assert set(named) <= ours


def test_every_key_is_described() -> None:
    for key in {*TrainedConfig.model_fields} - ELSEWHERE:
        assert re.search(rf"`(?:trainer\.)?{key}[`=]", TEXT), key
    for key in LoraConfig.model_fields:
        assert f"lora.{key}" in TEXT, key


def test_the_optimizers_are_listed() -> None:
    assert f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}" in TEXT


def test_commands_are_accepted() -> None:
    lines = re.findall(r"^    dataflow run PIPELINE\.py (.*)$", TEXT, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        parse_overrides(Config, line.split())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target
    assert (PAGE.parents[1] / "tests/engines/verl/test_options.py").is_file()
