"""Scripts: bash reads them, what it would need elsewhere is marked, and nothing of them is run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dataflow.errors import ConfigError
from dataflow.importing import script
from dataflow.importing.script import Launch, launch_of

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
LAUNCH = "python3 -m verl.trainer.main_ppo"


def launched(text: str, *given: str, **environment: str) -> Launch:
    return launch_of(text.replace("LAUNCH", LAUNCH), Path("/here/run.sh"), given, {"HOME": "/h", **environment})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("LAUNCH a=1 \\\r\n  b=2 # the rest\r\n# LAUNCH c=3", ["a=1", "b=2"]),
        ("python /opt/verl/trainer/main_ppo.py a=1", ["a=1"]),
        ("/opt/conda/envs/$E/bin/python3 -m verl.trainer.main_ppo a=1", ["a=1"]),
        ("P=${P:-/usr/bin/python3}\n\"$P\" -m verl.trainer.main_ppo a=1", ["a=1"]),
        ("CUDA_VISIBLE_DEVICES=0,1 nohup LAUNCH a=1 > \"$LOG/out.log\" 2>&1 &", ["a=1"]),
        ("exec > >(tee -a \"x/y.log\") 2>&1\n{\nLAUNCH a=1\n} >> log 2>&1", ["a=1"]),
        ("ray job submit --address=$RAY -- LAUNCH a=1 2>&1 | tee log", ["a=1"]),
        ("set -euo pipefail\ncd /x || exit\nsource /opt/env.sh && conda activate x\nLAUNCH a=$(pwd)", ["a=/x"]),
        ('cd "$(dirname "${BASH_SOURCE[0]}")/.."\nLAUNCH a=$PWD b=$0', ["a=/", "b=/here/run.sh"]),
        ("f() { LAUNCH a=1 \"$@\"; }\nf b=2", ["a=1", "b=2"]),
        ("CMD=\"LAUNCH a=1\"\neval $CMD", ["a=1"]),
        ("A=(x 'y z')\nA+=(w)\nLAUNCH \"${A[@]}\" n=${#A[@]} $((X * 2))", ["x", "y z", "w", "n=3", "14"]),
        ("M=org/Qwen-7B\nif [[ $M == */Qwen* ]]; then T=2; fi\nLAUNCH ${M##*/} t=$T ${U:-8} \"a=['x', \\\"y\\\"]\"",
         ["Qwen-7B", "t=2", "8", "a=['x', \"y\"]"]),
        ("[ -z \"$NONE\" ] && B=1\nE=()\n[ -n \"$MORE\" ] && E+=($MORE)\nLAUNCH b=$B \"${E[@]}\"", ["b=1"]),
        ("if [ ! -f /models/config.json ]; then echo none; exit 1; fi\nLAUNCH a=1", ["a=1"]),
        ("D=${D:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\nLAUNCH a=$D", ["a=gpu"]),
        ("if ! nvidia-smi > /dev/null; then exit 9; fi\nwhile ! curl x; do sleep 5; done\nLAUNCH a=1", ["a=1"]),
        ("(( 3 > 2 )) && export PATH=/x/bin:$PATH\nLAUNCH a=~/data b=$(basename /x/y)", ["a=/h/data", "b=y"]),
    ],
)  # fmt: skip
def test_a_script_is_read_as_bash_reads_it(text: str, found: list[str]) -> None:
    launch = launched(text, X="7")
    assert launch.arguments == found
    assert launch.unknown == {}


def test_arguments_are_those_of_the_script_or_go_behind_the_launch() -> None:
    assert launched('LAUNCH a=1 "$@"', "b=2", "c=3 4").arguments == ["a=1", "b=2", "c=3 4"]
    assert launched("model=$1; shift\nLAUNCH a=$model $@", "m", "b=2").arguments == ["a=m", "b=2"]
    assert launched("LAUNCH a=1", "b=2").arguments == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("text", "found", "unknown"),
    [
        ("X=1\nLAUNCH a=$X b=/x/$Y/${Z}", ["a=1", "b=/x/%%Y%%/%%Z%%"],
         {"Y": "line 2: it has no value here", "Z": "line 2: it has no value here"}),
        ("LAUNCH a=${X:?} $MORE", ["a=%%X%%", "%%MORE%%"],
         {"X": "line 1: it has no value here", "MORE": "line 1: it has no value here"}),
        ("\nX=$(nvidia-smi -L | wc -l)\nLAUNCH a=$X b=`hostname`", ["a=%%VALUE_1%%", "b=%%VALUE_2%%"],
         {"VALUE_1": "line 2: it takes the output of a command",
          "VALUE_2": "line 3: it takes the output of a command"}),
        ("B=$((N * 2))\nLAUNCH a=$B", ["a=%%B%%"], {"B": "line 2: it has no value here"}),
    ],
)  # fmt: skip
def test_what_only_the_machine_of_the_launch_knows_is_marked(
    text: str, found: list[str], unknown: dict[str, str]
) -> None:
    text = text.replace("$((N * 2))", "$(( $N * 2 ))")
    assert launched(text)[::2] == (found, unknown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "no command that it reaches launches verl.trainer.main_ppo; give the script that does"),
        ("exit 1\nLAUNCH a=1", "no command that it reaches"),
        ("pkill -f verl.trainer.main_ppo", "no command that it reaches"),
        ("LAUNCH 'a", "(bash: line 1: unexpected EOF while looking for matching"),
        (': "${M:-}" "${M:?set the model}"\nLAUNCH', "(bash: line 1: M: set the model)"),
        ("LAUNCH a=1\nLAUNCH a=2", "launches verl 2 times (lines 1, 2)"),
        ("while true; do sleep 1; done\nLAUNCH a=1", "does not end within 0.5 s"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "while" in text:
        monkeypatch.setattr(script, "_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError) as caught:
        launched(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.sh")
    assert "\n" not in str(caught.value)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n: > {mark}\n")
    tool.chmod(0o755)
    text = f"touch {mark}\n{tool}\nX=$({tool})\necho a > {mark}\nbash -c {tool}\ncat <<E >{mark}\nE\n. {tool}\n"
    text += f"env {tool}\ncommand touch {mark}\nexec 3>{mark}\nPATH=$OLD:$PATH\ntouch {mark}\nLAUNCH a=1"
    assert launched(text, OLD=os.environ["PATH"]).arguments == ["a=1"]
    assert not mark.exists()
