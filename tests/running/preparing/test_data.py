"""What data a resumed run must have, and what a model that takes images supports."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError
from dataflow.running.preparing.preparation import check_fits, check_same
from pipelines import ppo_critic


@pytest.mark.parametrize(
    ("base", "sections", "what"),
    [
        (RunConfig, {"engine": {"replicas": 2}}, "engine.replicas=2"),
        (ppo_critic.Config, {}, "critic"),
        (RunConfig, {"engine": {"rollout": "hf"}}, None),
    ],
)
def test_what_cannot_take_images_is_named(
    base: type[RunConfig], sections: dict[str, Any], what: str | None, tmp_path: Path
) -> None:
    def check(kind: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        check_fits(base.model_validate({"model": {"path": str(tmp_path)}, **sections}))

    check("qwen2")
    with pytest.raises(ConfigError, match=f"^{what}: model .* takes images") if what else contextlib.nullcontext():
        check("qwen2_vl")


@pytest.mark.parametrize(
    ("changed", "allow", "message"),
    [
        ("model.path", (), "^model.path=m: its tokenizer, chat template and configuration are not those that the run"),
        ("data.train", ("data.val", "model"), "^data.train=a.jsonl: its rows .* allow it with resume.allow=.data.[.]$"),
        ("data.val token ids", (), "^data.val=null: its token ids are not those"),
        ("model.path", ("data",), None),
    ],
)
def test_a_run_is_resumed_with_the_data_that_it_was_begun_with(
    changed: str, allow: tuple[str, ...], message: str | None
) -> None:
    sections = {"data": {"train": "a.jsonl"}, "model": {"path": "m"}, "resume": {"allow": list(allow)}}
    config = RunConfig.model_validate(sections)
    names = ("model.path", "data.train", "data.train token ids", "data.val", "data.val token ids")
    before = dict.fromkeys(names, "1")
    check_same(before, before, config, Path("r"))
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_same(before, {**before, changed: "2"}, config, Path("r"))
