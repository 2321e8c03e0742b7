"""verl's logged scalars: a CSV and TensorBoard's event files give the same; errors in either give one sentence."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dataflow.errors import DataError
from dataflow.planning.sources.logs.needed import GIVE
from dataflow.planning.sources.scalars import Scalars, looks_like, read_scalars

TRACES = Path(__file__).parents[3].parent / "shared" / "data" / "traces"
GEN, UPDATE = "timing_s/gen", "timing_s/update_actor"
HEAD = f"global_step,{GEN},{UPDATE},critic/score/mean,val/acc\n"
GOOD = HEAD + "0,,,,0.2115\n1,44.7915,146.8262,0.2537,\n2,44.6572,126.3988,-0.25,0.5\n"
COLUMNS = {
    GEN: {1: 44.7915, 2: 44.6572},
    UPDATE: {1: 146.8262, 2: 126.3988},
    "critic/score/mean": {1: 0.2537, 2: -0.25},
    "val/acc": {0: 0.2115, 2: 0.5},
}
TIMED = {GEN: {1: 2.0, 2: 3.0}, UPDATE: {1: 4.0, 2: 5.0}}


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "log.csv"
    path.write_text(text, encoding="utf-8")
    return path


def event_file(
    folder: Path, columns: Mapping[str, Mapping[int, float]], *, began: float = 100.0, name: str | None = None
) -> Path:
    """Writes an event file as torch's SummaryWriter does, without torch: a scalar an event."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    before = set(folder.glob("*"))
    writer = EventFileWriter(str(folder))
    for tag, series in columns.items():
        for step, value in series.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=began + step, step=step, summary=summary))
    writer.close()
    (path,) = set(folder.glob("*")) - before
    return path.rename(folder / name) if name else path


def trouble(path: Path, **options: tuple[str, ...]) -> str:
    """The error of reading a path: one sentence that starts with the path."""
    with pytest.raises(DataError) as caught:
        read_scalars(path, **options)
    text = str(caught.value)
    assert text.startswith(f"log {path}")
    assert text.endswith((".", "?"))
    assert "\n" not in text
    return text.removeprefix(f"log {path}")


# What is read.


def test_csv_by_name_and_step_with_empty_cells_left_out(tmp_path: Path) -> None:
    path = csv_file(tmp_path, GOOD)
    assert read_scalars(path) == Scalars(str(path), COLUMNS)


def test_series_is_a_copy_and_empty_for_what_was_never_logged(tmp_path: Path) -> None:
    scalars = read_scalars(csv_file(tmp_path, GOOD))
    scalars.series(GEN)[1] = 0.0
    assert scalars.series(GEN) == {1: 44.7915, 2: 44.6572}
    assert scalars.series("timing_s/ref") == {}


@pytest.mark.parametrize("policy", ["baseline", "mini-batch", "off-policy", "both"])
def test_published_traces(policy: str) -> None:
    path = TRACES / f"qwen2-7b_megatron_{policy}.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    scalars = read_scalars(path)
    assert list(scalars.series(UPDATE)) == list(range(1, 106))
    # A policy that is off by a step generates nothing in the last one.
    assert len(scalars.series(GEN)) == (104 if policy in ("off-policy", "both") else 105)
    assert scalars.series("val-core/openai/gsm8k/reward/mean@1")[0] == 0.2115
    assert 0 not in scalars.series("timing_s/step")


@pytest.mark.slow
def test_published_trace_as_event_files_is_the_same(tmp_path: Path) -> None:
    path = TRACES / "qwen2-7b_megatron_baseline.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    scalars = read_scalars(path)
    event_file(tmp_path, scalars.columns)
    assert read_scalars(tmp_path).columns == scalars.columns


@pytest.mark.parametrize("whole", [True, False], ids=["directory", "file"])
def test_event_files_hold_the_values_of_the_csv(tmp_path: Path, whole: bool) -> None:
    path = event_file(tmp_path, COLUMNS)
    assert read_scalars(tmp_path if whole else path).columns == COLUMNS


@pytest.mark.heavy
def test_event_files_of_the_writer_that_verl_uses(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for name, series in COLUMNS.items():
            for step, value in series.items():
                writer.add_scalar(name, value, step)
    assert read_scalars(tmp_path).columns == COLUMNS


@pytest.mark.heavy
def test_all_steps_of_a_long_run_are_kept(tmp_path: Path) -> None:
    # TensorBoard keeps a sample of 10 000 by default.
    long = {GEN: {step: step / 8 for step in range(1, 10_051)}, UPDATE: {1: 4.0}}
    event_file(tmp_path, long)
    assert read_scalars(tmp_path).columns == long


def test_large_whole_numbers_of_event_files_stay_as_they_are(tmp_path: Path) -> None:
    event_file(tmp_path, TIMED | {"perf/total_num_tokens": {1: 1234567936.0}})
    assert read_scalars(tmp_path).series("perf/total_num_tokens") == {1: 1234567936.0}


def test_of_a_resumed_run_the_later_value_counts(tmp_path: Path) -> None:
    # By the clock, not by the name of the file.
    event_file(tmp_path, {GEN: {2: 7.0, 3: 8.0}}, began=1000.0, name="events.out.tfevents.1")
    event_file(tmp_path, TIMED, began=100.0, name="events.out.tfevents.2")
    found = read_scalars(tmp_path)
    assert found.columns == {GEN: {1: 2.0, 2: 7.0, 3: 8.0}, UPDATE: {1: 4.0, 2: 5.0}}
    assert found.said == (
        "several event files have the steps from 2 to 2: the later values were taken, as of a run that was resumed (if "
        "they are of another run, leave the files of one).",
    )


def test_of_two_values_at_one_time_that_of_the_later_file_counts(tmp_path: Path) -> None:
    event_file(tmp_path, {GEN: {2: 7.0}}, name="events.out.tfevents.1700000000.host.7.10")
    event_file(tmp_path, TIMED, name="events.out.tfevents.1700000000.host.7.9")
    assert read_scalars(tmp_path).series(GEN) == {1: 2.0, 2: 7.0}


def test_event_files_in_folders_below_are_read(tmp_path: Path) -> None:
    event_file(tmp_path / "project" / "run", {GEN: TIMED[GEN]})
    event_file(tmp_path / "project" / "run" / "more", {UPDATE: TIMED[UPDATE]})
    event_file(tmp_path, {GEN: {9: 1.0}}, name="events.out.tfevents.1.profile-empty")
    assert looks_like(tmp_path)
    assert read_scalars(tmp_path).columns == TIMED


def test_directory_named_like_an_event_file(tmp_path: Path) -> None:
    folder = tmp_path / "events.out.tfevents.old"
    event_file(folder, TIMED)
    assert looks_like(folder)
    assert read_scalars(folder).columns == TIMED


def test_a_record_cut_off_at_the_end_leaves_those_before(tmp_path: Path) -> None:
    path = event_file(tmp_path, TIMED)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_scalars(tmp_path).columns == {GEN: TIMED[GEN], UPDATE: {1: 4.0}}


def test_names_without_prefix_stand_for_timings(tmp_path: Path) -> None:
    names = "gen,reward,old_log_prob,ref,values,adv,update_actor,update_critic,testing,save_checkpoint,step"
    path = csv_file(tmp_path, f"global_step,{names},wall_s\n1,{','.join('1' * 11)},12\n")
    found = read_scalars(path).columns
    assert found == {**{f"timing_s/{name}": {1: 1.0} for name in names.split(",")}, "wall_s": {1: 12.0}}


def test_step_column_may_be_named_step(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "step,gen,update_actor\n1,2,4\n2,3,5\n")
    assert read_scalars(path).columns == TIMED


def test_next_to_a_prefix_other_names_stay_as_they_are(tmp_path: Path) -> None:
    path = csv_file(tmp_path, f"global_step,{GEN},update_actor,reward,gen\n1,2,4,-0.5,9\n")
    assert read_scalars(path).columns == {GEN: {1: 2.0}, UPDATE: {1: 4.0}, "reward": {1: -0.5}, "gen": {1: 9.0}}


@pytest.mark.parametrize(
    "text",
    [
        f"global_step,{GEN},{UPDATE}\n2.0,3,5\n1.0,2,4\n",
        f"\ufeffglobal_step, {GEN}, {UPDATE}\r\n1, 2, 4\r\n\r\n2, 3, 5\r\n",
        f'"global_step","{GEN}","{UPDATE}"\n"1","2.0","4e0"\n,,\n"2","3","5"',
        f"global_step,{GEN},{UPDATE},loss\n1,2,4,nan\n2,3,5,NaN\n",
    ],
    ids=["unordered-float-steps", "bom-spaces-crlf-blank-line", "quoted", "nan-of-no-timing"],
)
def test_csv_as_others_write_it(tmp_path: Path, text: str) -> None:
    scalars = read_scalars(csv_file(tmp_path, text))
    assert scalars.columns == TIMED
    assert list(scalars.series(GEN)) == [1, 2]


def test_required_timings_are_the_callers(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "global_step,timing_s/ref\n1,2\n")
    assert read_scalars(path, timings=["timing_s/ref"]).series("timing_s/ref") == {1: 2.0}
    assert read_scalars(path, timings=()).series("timing_s/ref") == {1: 2.0}


def test_looks_like_goes_by_names(tmp_path: Path) -> None:
    (tmp_path / "a.CSV").write_text("no csv")
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "none").mkdir()
    (tmp_path / "run.csv").mkdir()
    (tmp_path / "some" / "deep").mkdir(parents=True)
    events = tmp_path / "some" / "deep" / "events.out.tfevents.17.host"
    events.write_bytes(b"")
    for path in (tmp_path / "a.CSV", tmp_path / "some", events, str(events)):
        assert looks_like(path), path
    for path in (tmp_path / "config.yaml", tmp_path / "none", tmp_path / "run.csv", tmp_path / "missing.csv"):
        assert not looks_like(path), path


def test_tensorboard_stays_unloaded_and_its_logger_as_it_was(tmp_path: Path) -> None:
    heavy = "'tensorboard' in sys.modules or 'numpy' in sys.modules"
    code = f"import sys, dataflow.planning.sources.scalars; sys.exit({heavy})"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=environment).returncode == 0
    logger = logging.getLogger("tensorboard")
    before = logger.level
    event_file(tmp_path, TIMED)
    read_scalars(tmp_path)
    assert logger.level == before


# What is wrong.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " is empty; give verl's console log, its jsonl file or tensorboard directory, or a CSV of its scalars."),
        ("\n \n", " is empty; "),
        ("gen,update_actor\n1,2\n", ": no column global_step; give a CSV, with commas, that has one"),
        ("global_stp,gen\n1,2\n", ": no column global_step; did you mean 'global_stp'?"),
        ("global_step;gen;update_actor\n1;2;3\n", ": no column global_step; "),
        ('{"traceEvents": []}', ": no column global_step; "),
        (f"global_step,{GEN}\n1,2\n", f": no column {UPDATE} (it has timing_s/gen); give verl's"),
        ("step,loss,timing_s/ref\n1,2,3\n", f": no column {GEN}, {UPDATE} (it has timing_s/ref); give verl's"),
        (
            "step,timing_s/gem,loss\n1,2,3\n",
            f": no column {GEN}, {UPDATE} (it has timing_s/gem); did you mean 'timing_s/gem'?",
        ),
        ("step,genn,loss\n1,2,3\n", f": no column {GEN}, {UPDATE}; did you mean 'genn'?"),
        ("step,timing/gen,loss\n1,2,3\n", f": no column {GEN}, {UPDATE}; did you mean 'timing/gen'?"),
        (HEAD, f": no step has a value of {GEN}, {UPDATE}; "),
        (HEAD + "0,,,,0.2\n", f": no step has a value of {GEN}, {UPDATE}; "),
        (HEAD + "1,2,,,\n2,3,,,\n", f": no step has a value of {UPDATE} (it has timing_s/gen); "),
        (HEAD + "1,2,x,,\n", f", line 2 (step 1), column {UPDATE}: 'x' is not a number; give a number, or nothing."),
        (HEAD + "1,2,3,,good\n", ", line 2 (step 1), column val/acc: 'good' is not a number; "),
        (HEAD + "1,2,3,,\n2,-0.5,3,,\n", f": {GEN} at step 2 is -0.5; give seconds, 0 to 1e+09."),
        (HEAD + "1,nan,3,,\n", f": {GEN} at step 1 is nan; "),
        (HEAD + "1,2,inf,,\n", f": {UPDATE} at step 1 is inf; "),
        (HEAD.replace("val/acc", "timing_s/x") + "1,2,3,,-1\n", ": timing_s/x at step 1 is -1; "),
        (HEAD + "1,2,3,,\n2,2,3,,\n1.0,2,3,,\n", ", line 4: step 1 was on line 2 already; leave one, of one run."),
        (
            HEAD + "1.5,2,3,,\n",
            ", line 2, column global_step: step 1.5 is not a whole number; give steps of 0, 1, 2 and so on.",
        ),
        (
            "_step,gen,update_actor,step\n1,2,3,98.7\n",
            ", line 2, column step: step 98.7 is not a whole number; give steps of 0, 1, 2 and so on; if these are "
            "seconds, name the column timing_s/step.",
        ),
        (HEAD + "-1,2,3,,\n", ", line 2, column global_step: step -1 is negative; "),
        (HEAD + "nan,2,3,,\n", ", line 2, column global_step: step nan is not a whole number; "),
        (HEAD + "inf,2,3,,\n", ", line 2, column global_step: step inf is not a whole number; "),
        (HEAD + "one,2,3,,\n", ", line 2, column global_step: 'one' is not a number; give the step's number."),
        (HEAD + ",2,3,,\n", ", line 2, column global_step: '' is not a number; "),
        (HEAD + "1,2,3,,\n2,3\n", ", line 3: 2 cells under 5 columns; give a cell a column."),
        (HEAD + "1,2,3,,,7\n", ", line 2: 6 cells under 5 columns; "),
        (f"global_step,{GEN},{UPDATE},{GEN}\n1,2,3,4\n", f": two columns are named '{GEN}'; leave one."),
        ("step,gen,update_actor,gen\n1,2,3,4\n", f": two columns are named '{GEN}'; leave one."),
        (HEAD + '1,"2,3,,\n', " is not CSV (unexpected end of data); "),
        (HEAD + "1,\0,3,,\n", " is not CSV (it holds null bytes); "),
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, text: str, expected: str) -> None:
    said = trouble(csv_file(tmp_path, text))
    assert said.startswith(expected)


def test_binary_file_is_no_csv(tmp_path: Path) -> None:
    path = tmp_path / "picture.csv"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert trouble(path).startswith(" is not CSV (it is not UTF-8 text")


def test_event_file_under_another_name_is_no_csv(tmp_path: Path) -> None:
    assert trouble(event_file(tmp_path, TIMED, name="log")).startswith(" is not CSV (")


def test_nothing_at_the_path(tmp_path: Path) -> None:
    for name in ("log.csv", "tensorboard_log", "events.out.tfevents.1"):
        assert trouble(tmp_path / name).startswith(": No such file or directory; give verl's console log")


def test_directory_without_event_files(tmp_path: Path) -> None:
    csv_file(tmp_path, GOOD)
    said = trouble(tmp_path)
    assert said == f": the directory holds no event files; {GIVE}."


def test_event_files_that_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    assert trouble(path).startswith(" is empty; ")
    assert trouble(tmp_path).startswith(" is empty; ")
    event_file(tmp_path, {})
    path.write_bytes(b"no event, " * 9)
    assert trouble(tmp_path).startswith(" holds no scalars; ")


def test_event_file_with_a_record_that_is_no_event(tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = tmp_path / "events.out.tfevents.1"
    with path.open("wb") as file:
        RecordWriter(file).write(b"\xff" * 20)
    assert trouble(path).startswith(" cannot be read as events (DecodeError: ")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"loss": {1: 0.5}}, f": no step has a value of {GEN}, {UPDATE}; give verl's"),
        (
            {"timing_s/genn": {1: 0.5}, UPDATE: {1: 0.5}},
            f": no step has a value of {GEN} (it has timing_s/genn, {UPDATE}); did you mean 'timing_s/genn'?",
        ),
        ({GEN: {1: 1.0}, UPDATE: {1: 1.0, 2: -2.5}}, f": {UPDATE} at step 2 is -2.5; "),
        ({GEN: {1: 1.0}, UPDATE: {1: float("nan")}}, f": {UPDATE} at step 1 is nan; "),
        ({GEN: {1: float("inf")}, UPDATE: {1: 1.0}}, f": {GEN} at step 1 is inf; "),
        ({"loss": {1: float("nan")}}, f": no step has a value of {GEN}, {UPDATE}; "),
    ],
)
def test_event_files_that_cannot_be_used(tmp_path: Path, columns: dict[str, dict[int, float]], expected: str) -> None:
    event_file(tmp_path, columns)
    assert trouble(tmp_path).startswith(expected)


def test_two_runs_below_one_directory_are_not_mixed(tmp_path: Path) -> None:
    first = event_file(tmp_path / "a", TIMED)
    second = event_file(tmp_path / "b", TIMED)
    said = trouble(tmp_path)
    assert said == f": {GEN} of step 1 is in {first} as well as in {second}; give the directory of one run."
    assert read_scalars(tmp_path / "b").columns == TIMED


@pytest.mark.parametrize(
    ("step", "value", "message"),
    [
        ("1", "9" * 400, "line 1: timing_s/gen is over 2e+308; leave it out"),
        ("1", "1e200", "timing_s/gen at step 1 is 1e+200; give seconds, 0 to 1e+09."),
        ("1e300", "1", "is over 1e+12; give steps as verl does."),
    ],
)
def test_what_is_too_large_to_be_measured_is_said(tmp_path: Path, step: str, value: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"step": {step}, "timing_s/gen": {value}, "timing_s/update_actor": 1}}\n')
    with pytest.raises(DataError) as error:
        read_scalars(path)
    assert message in str(error.value)


OWN = TIMED | {"overlap/exposed_wait_s": {1: 0.5, 2: 0.5}, "overlap/gpu_busy_frac": {1: 0.75, 2: 0.75}}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("form", ["jsonl", "tensorboard", "file", "runs"])
def test_the_metrics_of_a_dataflow_run_are_refused(tmp_path: Path, form: str, traced: bool) -> None:
    place = tmp_path / "runs" / "both"
    events = event_file(place / "tensorboard", OWN)
    jsonl = place / "metrics.jsonl"
    jsonl.write_text(
        "".join(json.dumps({"step": at, **{name: of[at] for name, of in OWN.items()}}) + "\n" for at in (1, 2))
    )
    if traced:
        (place / "trace.json").write_text("{}")
    path = {"jsonl": jsonl, "tensorboard": events.parent, "file": events, "runs": tmp_path / "runs"}[form]
    which = f"give its directory instead, {place}." if traced else "give its directory, which has its trace.json, inst"
    assert trouble(path).startswith(
        f" is of a run of dataflow, not of verl's own loop (overlap/exposed_wait_s); {which}"
    )


def test_one_of_the_names_of_a_dataflow_run_alone_is_no_sign_of_one(tmp_path: Path) -> None:
    event_file(tmp_path, {name: of for name, of in OWN.items() if name != "overlap/gpu_busy_frac"})
    assert read_scalars(tmp_path).series(GEN) == TIMED[GEN]
