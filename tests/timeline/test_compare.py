"""`dataflow compare` and `dataflow timeline`: files, output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Span, Trace
from tests.rigs.made_up import made_up

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs' directories, the second with an accuracy."""
    for name, seed in (("baseline", 0), ("both", 1)):
        (tmp_path / name).mkdir()
        perfetto.write(made_up(3, seed=seed, policy=name), tmp_path / name / "trace.json")
    (tmp_path / "both" / "summary.json").write_text(json.dumps({"accuracy_before": 0.25, "accuracy_after": 0.5}))
    return [str(tmp_path / name) for name in ("baseline", "both")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1, said
    return said


@pytest.mark.parametrize(("mean", "scale"), [("accuracy", 1.0), ("score", 10.0)])
def test_several_runs_make_a_table_and_a_page(
    mean: str, scale: float, runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {f"{mean}_before": 0.25 * scale, f"{mean}_after": 0.5 * scale, f"{mean}_mean_last_3": 0.4 * scale}
    (tmp_path / "both" / "summary.json").write_text(json.dumps(known))
    page = tmp_path / "both.html"
    assert main(["compare", *runs, "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"page: {page}" in out
    assert out.splitlines()[0].endswith(mean)
    for shown, arrow in ((out, "->"), (page.read_text(), "-&gt;")):
        assert f"{0.25 * scale:.2f} {arrow} {0.5 * scale:.2f} (mean of the last 3: {0.4 * scale:.2f})" in shown
    assert main(["compare", *runs, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["baseline", "both"]
    assert rows[0]["change"] == 0.0
    assert rows[1]["change"] == pytest.approx(rows[1]["step_s"] / rows[0]["step_s"] - 1)


def test_runs_stand_in_the_order_of_the_policies_and_the_fastest_is_named(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("mini-batch", 3.0), ("own", 9.0)):
        trace = Trace([Span("rollout", 1, 0, 1, "gpu", 0.0, seconds)], meta={"policy": name, "resources": {"gpu": 1}})
        (tmp_path / name).mkdir()
        perfetto.write(trace, tmp_path / name / "trace.json")
    (tmp_path / "both" / "summary.json").write_text(json.dumps({"lower_bound_s": 99.0}))
    given = [str(tmp_path / "own"), *reversed(runs), str(tmp_path / "mini-batch")]
    assert main(["compare", *given]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["baseline", "mini-batch", "both", "own"]
    assert "accuracy" not in head
    assert any(line.startswith("fastest: ") for line in lines)


def test_two_runs_of_one_policy_go_by_their_directories(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "again").mkdir()
    perfetto.write(made_up(2, policy="both"), tmp_path / "again" / "trace.json")
    assert main(["compare", *runs, str(tmp_path / "again"), "--json"]) == 0
    assert [row["policy"] for row in json.loads(capsys.readouterr().out)] == [
        "baseline (baseline)",
        "both (both)",
        "both (again)",
    ]
    for other in (runs[1], f"{runs[1]}/", f"{tmp_path}/again/../both"):
        assert "given twice" in refused(capsys, "compare", runs[1], other)


@pytest.mark.slow
def test_one_run_as_each_kind_of_file(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.html", "run.png", "run.svg", "run.txt"):
        assert main(["timeline", runs[1], "-o", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 300
    assert "0.25 -&gt; 0.50" in (tmp_path / "run.html").read_text()


def test_what_cannot_be_written_is_said_before_anything_is_run(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    pdf, nowhere = str(tmp_path / "run.pdf"), str(tmp_path / "nowhere" / "run.html")
    assert "give a name in .html, .png, .svg, .txt." in refused(capsys, "timeline", runs[0], "-o", pdf)
    assert "there is no directory" in refused(capsys, "timeline", runs[0], "-o", nowhere)
    assert "give a name in .html, .png, .svg." in refused(capsys, "compare", *runs, "-o", pdf)
    assert "no such kind" in refused(capsys, "compare", PIPELINE, f"runs={tmp_path / 'new'}", "-o", pdf)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_run_is_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = made_up(1)
    trace.spans.clear()
    trace.marks.clear()
    perfetto.write(trace, tmp_path / "trace.json")
    assert "run 'both' has no task" in refused(capsys, "timeline", str(tmp_path), "-o", str(tmp_path / "run.html"))
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
