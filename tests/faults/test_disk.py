"""The disk is full: writing each file of a run fails with one sentence, and the first error counts."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import RunError
from dataflow.files import written
from dataflow.running.record import Record
from dataflow.running.reporting.tracking import Tracker
from dataflow.running.session import Session
from dataflow.timeline.perfetto import TraceWriter
from dataflow.timeline.spans import Span, Trace
from tests.rigs.logs import logged

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


def metrics(directory: Path) -> None:
    (directory / "metrics.jsonl").symlink_to(FULL)
    tracker = Tracker(directory)
    try:
        tracker.log(1, {"loss": 0.5})
    finally:
        with pytest.raises(RunError):  # what it still holds
            tracker.close()
        tracker.close()


def trace(directory: Path) -> None:
    (directory / "trace.json").symlink_to(FULL)
    TraceWriter(directory / "trace.json", {})


def page(directory: Path) -> None:
    with written("timeline", directory / "timeline.html"), FULL.open("w") as file:
        file.write("x" * 100_000)


@pytest.mark.parametrize("write", [metrics, trace, page], ids=lambda write: write.__name__)
def test_each_failed_write_is_one_sentence(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(RunError) as error:
        write(tmp_path)
    said = str(error.value)
    assert str(tmp_path) in said
    assert "No space left on device; make room there" in said
    assert len(said.splitlines()) == 1


class Fails:
    """A trace's writer, and its file, on a disk that is full."""

    path, left_out = Path("trace.json"), 0

    def __init__(self, path: Path, _meta: object) -> None:
        path.touch()

    def add(self, *_items: object) -> None: ...

    def leave(self) -> None: ...

    def close(self, _trace: Trace) -> None:
        with written("trace", self.path):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr("dataflow.running.record.TraceWriter", Fails)
    record = Record(tmp_path)
    record.open({"status": "running"})
    record.trace.add(Span("s", 1, 0, 1, "gpu", 0.0, 1.0))
    return record


def test_a_run_that_went_well_fails_if_its_files_cannot_be_closed(record: Record) -> None:
    with pytest.raises(RunError, match=r"trace.json cannot be written"):
        record.end("finished", 1.0)
    assert record.summary["status"] == "failed"


def test_the_error_that_ended_the_run_counts(record: Record) -> None:
    session: Any = Session.__new__(Session)
    session.record, session.progress = record, SimpleNamespace(elapsed_s=1.0)
    with logged() as warnings:
        session._end(KeyError("a bug"))
    assert "trace.json cannot be written" in warnings[0]
    assert record.summary["status"] == "failed"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from dataflow.cli import main
sys.exit(main())
"""
REWARD = "async def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) / 100"


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_run_says_what_cannot_be_written_and_ends(tmp_path: Path, tiny_qwen: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    keys = ["engine.rollout=hf", "executor=inline", "steps=500", "data.prompts=8", "engine.n=2", "engine.max_tokens=8"]
    keys += [f"custom_reward_function.path={tmp_path / 'reward.py'}", f"model.path={tiny_qwen}", "val.every=0"]
    keys += ["data.max_prompt_length=200", f"runs={tmp_path / 'runs'}", "name=full"]
    command = [sys.executable, "-c", LIMITED, "150000", "run", str(ROOT / "pipelines" / "gsm8k_grpo.py"), *keys]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    # An indented line is the history of the task that failed; the last line says how to see what there is of the run.
    *lines, last = ended.stderr.splitlines()
    said = [line for line in lines if not line.startswith(("step ", "starting workers", " "))]
    assert ended.returncode == 1, ended.stderr
    *saves, why = said
    # Before the run ends it tries to save the last step.
    assert all(re.match(r"checkpoint of step \d+ failed: ", line) for line in saves), ended.stderr
    assert re.fullmatch(r"stopped after \d+ of 500 steps; 'dataflow run' .*, 'dataflow timeline .*' draws .*", last), (
        last
    )
    assert "cannot be written" in why
    assert '"status": "failed"' in (tmp_path / "runs" / "full" / "summary.json").read_text()


MOUNT = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"')
"""Runs a command in a namespace of mounts of its own, with 256 KB of memory mounted on a place."""
SMALL = """
import sys
from pathlib import Path
from dataflow.running.saving.checkpoints import CheckpointStore

store = CheckpointStore(Path(sys.argv[1], "checkpoints"), keep_last=2)
for step, size in ((1, 1_000), (2, 100_000), (3, 200_000), (4, 1_000)):
    try:
        (store.begin(step) / "weights").write_bytes(bytes(size))
        store.commit(step)
    except OSError as error:
        print(step, error.strerror)
        store.discard(step)
    print(step, store.newest().step, sorted(path.name for path in store.directory.iterdir()))
"""


@pytest.mark.timeout(120)
def test_a_disk_without_room_keeps_the_checkpoints_it_has(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    small = (str(tmp_path / "place"), sys.executable, "-c", SMALL, str(tmp_path / "place"))
    if shutil.which("unshare") is None or subprocess.run([*MOUNT, str(tmp_path / "place"), "true"]).returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run([*MOUNT, *small], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    _only, first, failed, third, fourth = done.stdout.splitlines()
    assert first == "2 2 ['step_000001', 'step_000002']"
    assert failed == "3 No space left on device"
    assert third == "3 2 ['step_000001', 'step_000002']"
    assert fourth == "4 4 ['step_000002', 'step_000004']"
