"""dataflow samples: what it prints and writes, and what it says to wrong input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read, write
from dataflow.samples.page import LARGEST, anchor, page, run_page

pytest.importorskip("pyarrow")

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
        "advantage": [float(sample) for _, sample in rows],
        "weights_version": [step - 1] * len(rows),
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


def test_the_terminal_shows_short_texts_and_counts_the_rest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, str(run), "sort=-latency", "where=score>0.2 and tries<2", "most=3")
    lines = out.splitlines()
    assert lines[0].startswith("step 12: 4 samples in 2 groups, mean score 0.375")
    assert max(map(len, lines)) <= 100
    heads = [line for line in lines if line.startswith("group")]
    assert [line.split()[:4] for line in heads] == [
        ["group", group, "sample", sample] for group, sample in (("2", "1"), ("2", "0"), ("1", "1"))
    ]
    assert "judged 2" in out
    assert "… (+" in out, "a long text says how much of it is left out"
    assert "\x1b" not in out
    assert "... 1 more; most=4 shows all" in lines[-1]
    assert printed(capsys, str(run), "where=score>7").startswith("step 12: 0 samples in 0 groups")


def test_steps_evaluations_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, str(run), "--json", "step=2", "most=5"))
    assert (found["steps"], len(found["samples"]), found["left_out"]) == ([2], 5, 3)
    assert found["samples"][0]["response"].startswith(EVIL)
    assert printed(capsys, str(run), "val=0").startswith("evaluation after step 0: 3 samples in 3 groups")
    assert printed(capsys, str(run), "step=all", "sort=-step").startswith("3 steps: 24 samples in 12 groups")


def test_parquet_and_page_hold_all_steps(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.parquet"
    assert printed(capsys, str(run), "where=group=3", "-o", str(out)).strip() == str(out)
    assert [(row["step"], row["sample"]) for row in read(out)] == [(s, i) for s in (1, 2, 12) for i in (0, 1)]
    printed(capsys, str(run), "-o", str(tmp_path / "out.html"))
    text = (tmp_path / "out.html").read_text()
    assert [text.count(f'id="{anchor(step, group)}"') for step in (1, 2, 12) for group in range(4)] == [1] * 12
    assert "<script>alert" not in text
    assert "judged 3" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step=5"], "step=5: no samples were kept of that one, only of 1, 2, 12"),
        (["val=7"], "val=7: no samples were kept of that one, only of 0"),
        (["step=1", "val=0"], "step= and val= exclude each other"),
        (["step=first"], "step"),
        (["sort=scor"], "no column 'scor'; did you mean 'score'?"),
        (["where=score<"], "'score<' is no condition"),
        (["stpe=1"], "did you mean 'step'?"),
        (["most=0"], "most"),
        (["step=-1"], "step=-1"),
        (["-o", "x.txt"], "-o x.txt: no such kind, '.txt'"),
        (["-o", "/nowhere/at/all/x.html"], "there is no directory"),
    ],
)
def test_wrong_input_is_one_sentence(
    run: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = printed(capsys, str(run), *arguments, code=2)
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_json_is_json_and_cannot_change_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"note": "\x9b31m \x7f \u202e \u2028 \u00e9\u6f22", "most": math.inf}
    write(file_of(tmp_path / "samples", "step", 1), columns(1, groups=1, n=1, score=math.nan, **texts))
    out = printed(capsys, str(tmp_path), "--json")
    assert all(c.isprintable() or c == "\n" for c in out)
    (sample,) = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["samples"]
    assert (sample["score"], sample["most"], sample["note"]) == (None, None, texts["note"])
    assert "\u00e9\u6f22" in out


def test_a_runs_own_samples_are_not_written_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = file_of(run / "samples", "step", 1)
    before = own.read_bytes()
    assert "the run keeps its samples there" in printed(capsys, str(run), "-o", str(own), code=2)
    assert own.read_bytes() == before


def test_runs_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no samples" in printed(capsys, str(tmp_path), code=2)
    assert "no run at" in printed(capsys, str(tmp_path / "gone"), code=2)
    (tmp_path / "trace.json").write_text("[]")
    said = printed(capsys, str(tmp_path / "trace.json"), code=2)
    assert "trace.json': it is a file; give the directory of a run" in said
    assert "did you mean" not in said
    (tmp_path / "samples").mkdir()
    assert "the run kept no such samples" in printed(capsys, str(tmp_path), code=2)
    assert run_page(tmp_path, []) is None


def test_a_page_is_bounded_and_keeps_what_is_linked(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "group": group, "sample": 0, "prompt": "p", "response": "r" * 4000, "score": 1.0}
        for group in range(3000)
    ]
    page(rows, tmp_path / "x.html", "run", first=[(1, 2999)])
    text = (tmp_path / "x.html").read_text()
    assert len(text) < LARGEST + 20_000
    shown = text.count('<section class="group"')
    assert f"There is no room for {3000 - shown} more" in text
    assert 'id="step-1-group-2999"' in text
    assert 'id="step-1-group-2998"' not in text


def test_the_page_of_a_long_run_holds_its_end_and_the_linked_groups(tmp_path: Path) -> None:
    for step in range(1, 8):
        made = columns(step, groups=200)
        made["response"] = ["r" * 4000] * len(made["step"])
        write(file_of(tmp_path / "samples", "step", step), made)
    assert run_page(tmp_path, [(1, 17), (7, 3), (2, 999)]) == tmp_path / "samples.html"
    text = (tmp_path / "samples.html").read_text()
    assert 'id="step-1-group-17"' in text
    assert 'id="step-1-group-16"' not in text
    assert text.count('id="step-7-group-') == 200
    assert "only the groups are here that the timeline links to" in text
