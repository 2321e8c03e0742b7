"""Real file systems that are small or read-only: in a namespace of mounts of its own, which ends with the process."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOUNTED = "mount -t tmpfs -o size=256k tmpfs {place} && "
OWN_MOUNTS = ("unshare", "--map-root-user", "--mount", "sh", "-c")


@functools.cache
def refused() -> str:
    """Why this machine lets no test mount a file system; "" if it does."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "there is no 'unshare' or no 'mount' here"
    tried = subprocess.run([*OWN_MOUNTS, MOUNTED.format(place="/tmp") + "true"], capture_output=True, text=True)
    return tried.stderr.strip()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory to mount a file system on."""
    if why := refused():
        pytest.skip(f"no file system can be mounted: {why}")
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def within(place: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell command with 256 KB of memory mounted on a place; ``$PYTHON`` is this Python."""
    command = MOUNTED.format(place=place) + command.replace("$PYTHON", sys.executable)
    return subprocess.run([*OWN_MOUNTS, command], capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)


FULL = """
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
def test_a_disk_without_room_keeps_the_checkpoints_it_has(place: Path) -> None:
    (place.parent / "full.py").write_text(FULL)
    done = within(place, f"PYTHONPATH={ROOT} $PYTHON {place.parent / 'full.py'} {place}")
    assert done.returncode == 0, done.stderr
    _only, first, failed, third, fourth = done.stdout.splitlines()
    assert first == "2 2 ['step_000001', 'step_000002']"
    assert failed == "3 No space left on device"
    assert third == "3 2 ['step_000001', 'step_000002']"
    assert fourth == "4 4 ['step_000002', 'step_000004']"
