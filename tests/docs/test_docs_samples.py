"""docs/samples.md names the keys, the columns and the sections that exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from dataflow.batch import Batch
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import SamplesConfig
from dataflow.samples.command import SamplesQuery, select
from dataflow.stages.samples import columns

TEXT = (Path(__file__).parents[2] / "docs" / "samples.md").read_text()


def table(head: str) -> set[str]:
    """Returns the names in the first column of the table whose head begins so."""
    rows = TEXT[TEXT.index(f"| {head} |") :].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_keys_are_those_of_the_command() -> None:
    assert table("key") == set(SamplesQuery.model_fields)
    assert set(re.findall(r"`samples\.(\w+)`", TEXT)) - {"html"} == set(SamplesConfig.model_fields)


def test_the_examples_are_read() -> None:
    lines = re.findall(r"^    dataflow samples runs/NAME (.*?)(?:   .*)?$", TEXT, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        where = re.search(r"where='([^']*)'", line)
        rows = [{"score": 0.25, "explanation": "off by one"}, {"score": 1.0, "explanation": None}]
        assert where is None or select(rows, where[1], None) == rows[:1]
        plain = re.sub(r"where='[^']*'|-o \S+", "", line).split()
        assert parse_overrides(SamplesQuery, plain)


def test_the_columns_are_those_of_the_files() -> None:
    ones = torch.ones(1, 1, dtype=torch.int64)
    responses = Batch(
        [0],
        {
            "raw_prompt": [[{"role": "user", "content": "?"}]],
            "response_text": ["!"],
            "data_source": ["a"],
            "ground_truth": ["b"],
            "response_mask": ones,
            "attention_mask": ones,
            "finish_reason": ["stop"],
        },
    )
    one = torch.ones(1)
    times = {f"request_{name}": one for name in ("begin", "end", "tries")}
    rewards = Batch(
        [0], {"score": one, "kept": one.bool(), **times, "request_how": [None], "request_failed_tries": [None]}
    )
    assert set(columns(1, responses, rewards, Batch([0], {"advantages": ones}))) == table("column")
