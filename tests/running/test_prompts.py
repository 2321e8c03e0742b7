"""What a run with a model that takes images supports, and which data its reward manager scores."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import RunConfig
from dataflow.data.prompts import Problems
from dataflow.errors import ConfigError, DataError
from dataflow.running.preparing.prompts import check_images, check_same, check_truths
from pipelines import distill, ppo_critic


def configured(path: Path, kind: str, base: type[RunConfig] = RunConfig, **sections: Any) -> RunConfig:
    (path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    return base.model_validate({"model": {"path": str(path)}, **sections})


@pytest.mark.parametrize(
    ("base", "sections", "message"),
    [
        (RunConfig, {"engine": {"replicas": 2}}, "engine.replicas=2: model .* one engine samples"),
        (RunConfig, {"engine": {"tensor_parallel": 2}}, "engine.tensor_parallel=2: model .* on a CPU; use 1"),
        (RunConfig, {"tools": {"names": ["calculator"]}}, "tools: model .* leave out the tools"),
        (ppo_critic.Config, {}, "critic: model .* a critic cannot read them yet"),
        (distill.Config, {}, "teacher: model .* a teacher cannot read them yet"),
    ],
)
def test_what_cannot_take_images_is_named(
    base: type[RunConfig], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_images(configured(tmp_path, "qwen2_5_vl", base, **sections))
    check_images(configured(tmp_path, "qwen2", base, **sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": {"rollout": "hf"}},
        {"engine": {"rollout": "vllm"}},
        {"engine": {"rollout": "vllm", "tensor_parallel": 2}, "ray": {"gpus_per_worker": 1}},
    ],
)
def test_both_engines_take_them(sections: dict[str, Any], tmp_path: Path) -> None:
    check_images(configured(tmp_path, "qwen2_vl", **sections))


def problems(rows: list[dict[str, Any]], name: str) -> Problems:
    return Problems(rows, [f"{name}, row {at}" for at in range(1, len(rows) + 1)], name)


def test_data_that_the_reward_manager_cannot_score_is_refused_before_the_run() -> None:
    def checked(*truths: Any, manager: str = "sandbox") -> list[str]:
        rows = [{"reward_model": {"ground_truth": truth}} for truth in truths]
        data = {"train": "sums.jsonl", "val": "held_out.jsonl"}
        config = RunConfig.model_validate({"reward": {"manager": manager}, "data": data})
        return check_truths(config, problems(rows, "sums.jsonl"), problems([], "held_out.jsonl"))

    good = {"inputs": ["1"], "outputs": ["1"]}
    with pytest.raises(DataError, match=r"sums\.jsonl, row 1: reward\.manager=sandbox: .* is an int; give"):
        checked("5", 7)
    (warning,) = checked(good, "5")  # single bad rows are left to the failure rule
    assert "sums.jsonl, row 2: " in warning
    assert "Of the first 2 rows, 1 cannot" in warning
    assert checked("5", manager="naive") == []


TRUTH = {"inputs": ["1"], "outputs": ["1"]}


@pytest.mark.parametrize(
    ("data", "truths", "every", "message"),
    [
        (
            {"train": "a.jsonl"},
            (TRUTH, 7),
            1,
            r"val, row 1: .* an int; .* generated one: give data\.val=FILE, or val\.ev",
        ),
        ({"train": "a.jsonl"}, (TRUTH, 7), 0, None),
        ({"val": "b.jsonl"}, (7, TRUTH), 1, r"train, row 1: .* an int; .* generated one: give data\.train=FILE\.$"),
        ({"train": "a.jsonl", "val": "b.jsonl"}, (TRUTH, 7), 1, r"val, row 1: .* an int; give a ground truth of test"),
        ({"train": "a.jsonl", "val": "b.jsonl"}, (TRUTH, TRUTH), 1, None),
    ],
)
def test_held_out_problems_that_the_manager_cannot_score_are_refused_if_the_run_evaluates(
    data: dict[str, Any], truths: tuple[Any, Any], every: int, message: str | None
) -> None:
    config = RunConfig.model_validate({"reward": {"manager": "sandbox"}, "data": data, "val": {"every": every}})
    train, val = (
        problems([{"reward_model": {"ground_truth": truth}}], name)
        for truth, name in zip(truths, ("train", "val"), strict=True)
    )
    if message is None:
        check_truths(config, train, val)
    else:
        with pytest.raises(DataError, match=message):
            check_truths(config, train, val)


@pytest.mark.parametrize(
    ("changed", "allow", "message"),
    [
        (
            "model.path",
            (),
            "^model.path=m: its tokenizer, chat template and configuration are not those that the run 'r'",
        ),
        ("data.train", (), "^data.train=a.jsonl: its rows are not those"),
        ("data.train", ("data.val", "model"), "^data.train=a.jsonl: its rows .* allow it with resume.allow=.data.[.]$"),
        ("data.val token ids", (), "^data.val=null: its token ids are not those"),
        ("data.val token ids", ("data.val",), None),
        ("model.path", ("model",), None),
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


def test_held_out_rows_that_are_not_evaluated_are_not_checked() -> None:
    data = {"train": "a.jsonl", "val": "b.jsonl", "val_size": 1}
    config = RunConfig.model_validate({"reward": {"manager": "sandbox", "on_failure": "drop_sample"}, "data": data})
    good, bad = ({"reward_model": {"ground_truth": truth}} for truth in (TRUTH, {"input": ["1"], "outputs": ["1"]}))
    assert check_truths(config, problems([good], "train"), problems([good, bad], "val")) == []
    (warning,) = check_truths(config, problems([good, bad], "train"), problems([good], "val"))
    assert "no list 'inputs' with an entry for each test case, but input, outputs. Of the first 2 rows, 1" in warning
