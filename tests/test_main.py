"""The command's entry point: a signal during the imports ends the command with one line, however it was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[1]
PIPELINE = ROOT / "pipelines" / "gsm8k_grpo.py"
# As the console script that an install writes.
SCRIPT = "import sys; from dataflow.__main__ import main; sys.exit(main())"
STARTS = {"module": ["-m", "dataflow"], "script": ["-c", SCRIPT]}


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["argparse", "dataflow.cli"])
@pytest.mark.parametrize(("start", "number"), [("module", signal.SIGINT), ("script", signal.SIGTERM)])
def test_a_signal_during_the_imports_ends_the_command_with_one_line(
    start: str, number: signal.Signals, imported: str
) -> None:
    # Python prints a line for each module as soon as it is imported: the signal is sent at that of `imported`.
    command = [sys.executable, "-X", "importtime", *STARTS[start], "show", str(PIPELINE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == imported:
                process.send_signal(number)
                break
        said = [line for line in process.stderr if not line.startswith("import time:")]
        assert process.wait(30) == 128 + number, said
    # The first line is empty: a terminal shows ^C there.
    assert "".join(said) == "\ninterrupted\n"


@pytest.mark.slow
def test_the_exit_code_of_a_command_is_kept() -> None:
    for arguments, code in (["--version"], 0), (["show", "no_such_file.py"], 2), (["shoe"], 2):
        ended = subprocess.run([sys.executable, "-m", "dataflow", *arguments], capture_output=True, timeout=30)
        assert ended.returncode == code, ended.stderr


@pytest.mark.slow
def test_a_shell_gets_the_words_that_it_asks_for_and_no_engine_is_imported(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_ARGCOMPLETE": "1", "IFS": "\013", "COMP_TYPE": "9"}
    environment |= {"COMP_LINE": "dataflow ex", "COMP_POINT": "11", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "w")}
    command = [sys.executable, "-X", "importtime", *STARTS["script"]]
    asked = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    assert (tmp_path / "w").read_text().split() == ["export"], asked.stderr
    loaded = {line.rpartition("|")[2].strip() for line in asked.stderr.splitlines()}
    assert not loaded & {"torch", "ray", "verl", "transformers", "vllm", "pydantic", "numpy"}
