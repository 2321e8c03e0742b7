"""The samples of a run: what is written is read again, selected, shown and written by the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.cli import main
from dataflow.errors import ConfigError
from dataflow.samples.command import select
from dataflow.samples.files import file_of, read, steps_in, write
from dataflow.samples.page import LARGEST, page, run_page

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

EVIL = "<script>alert(1)</script>\x1b[31m"


def columns(step: int, groups: int = 4, n: int = 2, **more: Any) -> dict[str, Any]:
    rows = [(group, sample) for group in range(groups) for sample in range(n)]
    return {
        "step": [step] * len(rows),
        "group": [group for group, _ in rows],
        "sample": [sample for _, sample in rows],
        "prompt": [f"What is {group} + {step}? " + "word " * 200 for group, _ in rows],
        "response": [f"{EVIL} {'long ' * 300}" for _ in rows],
        "score": [group / groups for group, _ in rows],
        "latency_s": [0.1 + group + sample / 10 for group, sample in rows],
        "tries": [1 + (group == 3) for group, _ in rows],
        "explanation": [f"judged {group}" for group, _ in rows],
        **{name: [value] * len(rows) for name, value in more.items()},
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    for step in (1, 2, 12):
        write(file_of(made / "samples", "step", step), columns(step))
    write(file_of(made / "samples", "val", 0), columns(0, groups=3, n=1, query="q"))
    return made


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["samples", *arguments]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_columns_of_any_values_come_back(tmp_path: Path) -> None:
    path = file_of(tmp_path / "samples", "step", 12)
    written: dict[str, Any] = {
        "step": [12, 12], "group": [3, 4], "sample": [0, 1],
        "score": [1, 0.5],
        "words": ["right", None],
        "mixed": [{"a": [1]}, "half a \ud800 pair"],
        "array": [np.arange(2), np.float32(1.5)],
        "flag": [np.bool_(True), None],
        "large": [2**70, 1],
        "empty": [None, None],
    }  # fmt: skip
    write(path, written)
    assert [p.name for p in path.parent.iterdir()] == ["step_000012.parquet"], "nothing else is left"
    first, second = read(path)
    assert first == {
        "step": 12, "group": 3, "sample": 0, "score": 1.0, "words": "right", "mixed": '{"a": [1]}',
        "array": "[0, 1]", "flag": True, "large": str(2**70), "empty": None,
    }  # fmt: skip
    assert (second["words"], second["mixed"], second["array"]) == (None, "half a ? pair", "1.5")
    assert read(path, [4]) == [second]
    assert (steps_in(path.parent, "step"), steps_in(path.parent, "val")) == ([12], [])


ROWS: list[dict[str, Any]] = [
    {"group": 0, "score": 0.0, "latency_s": 2.0, "explanation": "Off by one", "truncated": False, "uid": 2**53},
    {"group": 1, "score": 1.0, "latency_s": 9.5, "explanation": "right", "truncated": True, "uid": 2**53 + 1},
    {
        "group": 2,
        "score": math.nan,
        "latency_s": 0.5,
        "explanation": None,
        "truncated": False,
        "uid": 2**53 + 2,
        "q": 1,
    },
]


@pytest.mark.parametrize(
    ("where", "sort", "found"),
    [
        ("score < 0.5", None, [0]),
        ("score.isna()", None, [2]),
        ("explanation.str.contains('off BY', case=False)", None, [0]),
        (f"uid == {2**53 + 1}", None, [1]),
        (None, "score", [0, 1, 2]),
        (None, "-score", [1, 0, 2]),
        ("latency_s < 9", "-latency", [0, 2]),
    ],
)
def test_rows_are_selected_and_sorted_and_those_without_a_value_come_last(
    where: str | None, sort: str | None, found: list[int]
) -> None:
    assert [row["group"] for row in select(ROWS, where, sort)] == found


@pytest.mark.parametrize("where", ["score <", "scor < 1"])
def test_what_is_no_condition_is_one_sentence_with_the_columns(where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(ROWS, where, None)
    assert re.match(r"where: '.*' is no condition on samples \(.*the samples have group, score, ", str(caught.value))
    assert "\n" not in str(caught.value)


def test_the_terminal_shows_short_texts_and_counts_the_rest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, str(run), "sort=-latency", "where=score > 0.2 and tries < 2", "most=3")
    lines = out.splitlines()
    assert lines[0] == "step 12: 4 samples in 2 groups, mean score 0.375"
    assert max(map(len, lines)) <= 100
    heads = [line for line in lines if line.startswith("step 12 group")]
    assert [line.split()[2:6] for line in heads] == [
        ["group", group, "sample", sample] for group, sample in (("2", "1"), ("2", "0"), ("1", "1"))
    ]
    assert "judged 2" in out
    assert "\x1b" not in out
    assert lines[-1].startswith("... 1 more; most=4 shows all")
    assert printed(capsys, str(run), "where=score > 7").startswith("step 12: 0 samples in 0 groups")
    assert printed(capsys, str(run), "val=0").startswith("evaluation after step 0: 3 samples in 3 groups")
    assert printed(capsys, str(run), "step=all", "sort=-step").startswith("3 steps: 24 samples in 12 groups")


def test_parquet_and_page_hold_all_steps(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.parquet"
    assert printed(capsys, str(run), "where=group == 3", "-o", str(out)).strip() == str(out)
    assert [(row["step"], row["sample"]) for row in read(out)] == [(s, i) for s in (1, 2, 12) for i in (0, 1)]
    printed(capsys, str(run), "-o", str(tmp_path / "out.html"))
    text = (tmp_path / "out.html").read_text()
    assert len(shown(text)) == 24
    assert "<script>alert" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step=5"], "step=5: no samples were kept of that one, only of 1, 2, 12"),
        (["step=1", "val=0"], "step= and val= exclude each other"),
        (["sort=scor"], "no column 'scor'; did you mean 'score'?"),
        (["-o", "x.txt"], "-o x.txt: no such kind, '.txt'"),
    ],
)
def test_wrong_input_is_one_sentence(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = printed(capsys, str(run), *arguments, code=2)
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_runs_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no samples" in printed(capsys, str(tmp_path), code=2)
    assert "no run at" in printed(capsys, str(tmp_path / "gone"), code=2)
    (tmp_path / "samples").mkdir()
    assert "no samples were kept of that one, none at all" in printed(capsys, str(tmp_path), code=2)
    assert run_page(tmp_path, []) is None


def shown(text: str) -> list[tuple[int, int, int]]:
    """The step, group and sample of the rows of a page."""
    found = re.search(r'<script type="application/json" id="samples">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    at = [data["columns"].index(name) for name in ("step", "group", "sample")]
    return [(row[at[0]], row[at[1]], row[at[2]]) for row in data["rows"]]


def test_a_page_is_bounded(tmp_path: Path) -> None:
    rows = [{"step": 1, "group": group, "sample": 0, "response": "r" * 9000, "score": 1.0} for group in range(3000)]
    page(rows, tmp_path / "x.html", "run")
    text = (tmp_path / "x.html").read_text()
    assert len(text) < LARGEST + 20_000
    assert f"There is no room for {3000 - len(shown(text))} more" in text


def test_the_page_of_a_long_run_holds_its_end_and_the_linked_groups(tmp_path: Path) -> None:
    for step in range(1, 8):
        made = columns(step, groups=200)
        made["response"] = ["r" * 4000] * len(made["step"])
        write(file_of(tmp_path / "samples", "step", step), made)
    assert run_page(tmp_path, [(1, 17), (7, 3), (2, 999)]) == tmp_path / "samples.html"
    text = (tmp_path / "samples.html").read_text()
    found = shown(text)
    assert found[:4] == [(1, 17, 0), (1, 17, 1), (7, 3, 0), (7, 3, 1)], "which the timeline links to"
    assert len([key for key in found if key[0] == 7]) == 400
    assert "only the groups are here that the timeline links to" in text
