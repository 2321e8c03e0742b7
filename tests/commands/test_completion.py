"""Words that a shell completes: commands, options and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.commands import completion

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_code_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "dataflow" in code
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=code, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [("ex", ["export"]), ("run mi", ["mine.py"])],
)
def test_bash_gets_the_words_and_no_engine_is_imported(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "mine.py").touch()
    program = tmp_path / "dataflow"
    program.write_text(
        f"#!{sys.executable} -P\nimport os, sys\nfrom dataflow.__main__ import main\n"
        "end = os._exit\n"
        "def say(code):\n"
        f"    open({str(tmp_path / 'loaded')!r}, 'w').write(' '.join(sys.modules)); end(code)\n"
        "os._exit = say\nmain()\n"
    )
    program.chmod(0o755)
    call = (
        'complete_it() { COMP_LINE="$1"; COMP_POINT=${#1}; COMP_TYPE=9; _python_argcomplete dataflow; }\n'
        f'complete_it "dataflow {line}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-c", f"{completion.script('bash')}\n{call}"],
        capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == expected, done.stderr
    loaded = set((tmp_path / "loaded").read_text().split())
    assert "argcomplete" in loaded
    assert not loaded & {"torch", "ray", "verl", "transformers", "vllm", "pydantic", "numpy"}
