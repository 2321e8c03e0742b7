"""Scripts: what of them is followed, and that nothing of them is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.errors import ConfigError
from dataflow.importing.script import launch_of

LAUNCH = "python3 -m verl.trainer.main_ppo"


def arguments(text: str, *given: str, **environment: str) -> list[str]:
    return launch_of(text, "run.sh", given, environment).arguments


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"{LAUNCH} a=1 b=2", ["a=1", "b=2"]),
        (f"{LAUNCH} a=1 \\\n  b=2 \\\n\n", ["a=1", "b=2"]),
        (f"{LAUNCH} a=1 \\\n  b=2 # the rest\n# {LAUNCH} c=3", ["a=1", "b=2"]),
        (f"{LAUNCH} a=1 \\\r\n  b=2\r\n", ["a=1", "b=2"]),
        ("python /opt/verl/trainer/main_ppo.py a=1", ["a=1"]),
        (f"CUDA_VISIBLE_DEVICES=0,1 nohup {LAUNCH} a=1 > out.log 2>&1 &", ["a=1"]),
        (f"ray job submit --address=$RAY -- {LAUNCH} a=1", ["a=1"]),
        (f"cd /x && {LAUNCH} a=1 | tee log", ["a=1"]),
        (f"(cd /x; {LAUNCH} a=1)", ["a=1"]),
        (f"X=5\n{LAUNCH} a=$X b=${{X}}0 c=\"$X\" d='$X' e=\\$X", ["a=5", "b=50", "c=5", "d=$X", "e=$X"]),
        (f"X='1 2'\n{LAUNCH} $X \"$X\"", ["1", "2", "1 2"]),
        (f"X=\n{LAUNCH} $X \"$X\" a=${{X:-7}} b=${{X-8}} c=${{Y:-${{Z:-9}}}}", ["", "a=7", "b=", "c=9"]),
        (f": ${{X:=4}}\n{LAUNCH} a=$X b=${{Y:=6}} c=$Y d=${{X:+set}}", ["a=4", "b=6", "c=6", "d=set"]),
        (f"M=org/Model-7B.bin\n{LAUNCH} ${{M##*/}} ${{M%.bin}} ${{M%/*}} ${{M#org/}} ${{M//o/0}} ${{#M}}",
         ["Model-7B.bin", "org/Model-7B", "org", "Model-7B.bin", "0rg/M0del-7B.bin", "16"]),
        (f"A=(x 'y z')\nA+=(w)\n{LAUNCH} \"${{A[@]}}\" ${{A[0]}} ${{#A[@]}}", ["x", "y z", "w", "x", "3"]),
        (f"A=(\n  # nothing yet\n)\n{LAUNCH} \"${{A[@]}}\" a=1", ["a=1"]),
        ("A+=(b=1)\n" * 900 + f"{LAUNCH} ${{A[899]}} ${{A[²]}}", ["b=1", "b=1"]),
        (f"N=4\n{LAUNCH} $((N * 1024)) $(( (N + 2) / 4 )) $((${{N}}%3)) $((-N))", ["4096", "1", "1", "-4"]),
        (f"export X=1 Y=2\nreadonly Z=3\n{LAUNCH} $X$Y$Z", ["123"]),
        (f"X=1\nunset X\n{LAUNCH} a=${{X:-none}}", ["a=none"]),
        (f"if [ -z \"$X\" ]; then X=1; else X=2; fi\n{LAUNCH} a=$X", ["a=1"]),
        (f"if [[ $X == a* && 3 -gt 2 ]]; then Y=1; elif true; then Y=2; fi\n{LAUNCH} a=$Y", ["a=2"]),
        (f"X=abc\n[[ $X == a* ]] && Y=1 || Y=2\n[ ! -n \"$X\" ] || Z=3\n{LAUNCH} a=$Y b=$Z", ["a=1", "b=3"]),
        (f"case x.y in *.z) A=1 ;; a|*.y) A=2 ;; *) A=3 ;; esac\n{LAUNCH} a=$A", ["a=2"]),
        (f"cat <<END\n{LAUNCH} z=1\n'\nEND\n{LAUNCH} a=1", ["a=1"]),
        (f"help() {{ echo usage; }}\nfor i in 1 2; do echo $i; done\n{LAUNCH} a=1", ["a=1"]),
        (f"{LAUNCH} a=\"['x', 'y']\" b=['x','y'] c='[\"x\",\"y\"]'", ["a=['x', 'y']", "b=[x,y]", 'c=["x","y"]']),
        (f"{LAUNCH} a=<(echo b)".replace("<(echo b)", "b"), ["a=b"]),
    ],
)  # fmt: skip
def test_a_script_is_followed(script: str, found: list[str]) -> None:
    assert arguments(script, RAY="r", HOME="/h/a") == found


def test_arguments_take_the_place_of_the_scripts() -> None:
    assert arguments(f'{LAUNCH} a=1 "$@"', "b=2", "c=3 4") == ["a=1", "b=2", "c=3 4"]
    assert arguments(f"model=$1\nshift\n{LAUNCH} a=$model $@", "m", "b=2") == ["a=m", "b=2"]
    assert launch_of(f"{LAUNCH} a=1", "run.sh", ["b=2"], {}).passes_on is False
    assert launch_of(f"{LAUNCH} $@", "run.sh", ["b=2"], {}).passes_on is True


def test_the_environment_is_the_scripts() -> None:
    assert arguments(f"X=${{X:-1}}\n{LAUNCH} a=$X", X="2") == ["a=2"]
    assert arguments(f"X=~/data\n{LAUNCH} a=$X", HOME="/h/a") == ["a=/h/a/data"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "no command that would be reached in it launches verl.trainer.main_ppo"),
        (f"exit 1\n{LAUNCH} a=1", "no command that would be reached in it"),
        (f"f() {{ {LAUNCH} a=1; }}\nf", "no command that would be reached in it"),
        (f"if false; then {LAUNCH} a=1; fi", "no command that would be reached in it"),
        (f"# {LAUNCH} a=1", "no command that would be reached in it"),
        (f"{LAUNCH} a=1\n{LAUNCH} a=2", "launches verl 2 times (lines 1, 2)"),
        (f"for i in 1 2; do {LAUNCH} a=$i; done", "is set under a condition that is not known"),
        (f"{LAUNCH} 'a", "line 1: the quote ' is not closed"),
        (f"{LAUNCH} \"a", 'line 1: the quote " is not closed'),
        (f"A=(x\n{LAUNCH}", "line 1: the bracket of an array is not closed"),
        (f"{LAUNCH} ${{a", "line 1: the bracket { is not closed"),
        (f"{LAUNCH} ${{!a}}", "${!a} is not read; write its value out"),
        (f"bash -c '{LAUNCH} a=1'", "the launch is a text within a command; write it out"),
        ("(" * 3000, "run.sh nests too deep to be followed; write the launch out, or import what the launch prints"),
        ("if true; then " * 3000, "nests too deep"),
        ("[[ " + "a || " * 3000 + " a ]]", "nests too deep"),
        ("A=(" * 3000, "nests too deep"),
        ("A=" + "${a:-" * 500 + "}" * 500, "nests too deep"),
        ("A=0123456789abcdef\n" + "A=$A$A\n" * 40 + LAUNCH, "line 19: its values are too long to be followed; write"),
        ("A=" + "a" * 9999 + "\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40 + LAUNCH, "values are too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_one_sentence(script: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(script)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.sh")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "found", "unknown"),
    [
        ("X=1\nLAUNCH a=$X b=/x/$Y/$Z", ["a=1", "b=/x/%%Y%%/%%Z%%"], {"Y": "is not set", "Z": "is not set"}),
        ("LAUNCH a=${X:?}", ["a=%%X%%"], {"X": "is not set"}),
        ("X=$(hostname)\nLAUNCH a=$X", ["a=%%X%%"], {"X": "takes the output of a command, $(hostname)"}),
        ("X=`hostname`\nLAUNCH a=$X", ["a=%%X%%"], {"X": "takes the output of a command, $(hostname)"}),
        ("LAUNCH a=$(hostname)", ["a=%%VALUE_1%%"], {"VALUE_1": "takes the output of a command, $(hostname)"}),
        ("D=$(f || echo b)\ncase $D in a) N=1 ;; b) N=2 ;; esac\nLAUNCH a=$N", ["a=%%D%%"],
         {"D": "takes the output of a command, $(f || echo b)"}),
        ("for i in 1 2; do N=$i; done\nLAUNCH a=$N", ["a=%%N%%"], {"N": "is set under a condition that is not known"}),
        ("if grep x y; then N=1; fi\nLAUNCH a=$N", ["a=%%N%%"], {"N": "is set under a condition that is not known"}),
        ("LAUNCH a=$((1 / 0))", ["a=%%VALUE_1%%"], {"VALUE_1": "takes the sum $((1 / 0))"}),
        ("LAUNCH a=$((N + 1))", ["a=%%N%%"], {"N": "is not set"}),
        ("N=4\nLAUNCH a=$((N ? 1 : 2))", ["a=%%VALUE_1%%"], {"VALUE_1": "takes the sum $((N ? 1 : 2))"}),
        ("A=(x y)\nLAUNCH a=${A[@]%x}", ["a=%%VALUE_1%%"], {"VALUE_1": "uses ${A%...}"}),
        ("LAUNCH $MORE", ["%%MORE%%"], {"MORE": "is not set"}),
    ],
)  # fmt: skip
def test_what_only_the_machine_of_the_launch_knows_is_marked(
    script: str, found: list[str], unknown: dict[str, str]
) -> None:
    launch = launch_of(script.replace("LAUNCH", LAUNCH), "run.sh", [], {})
    assert launch.arguments == found
    assert {name: each.why for name, each in launch.unknown.items()} == unknown


def test_only_what_the_launch_needs_must_be_known() -> None:
    text = f'STAMP=$(date +%s)\nHOSTS=$(hostname)\nif [ "$HOSTS" = a ]; then X=1; fi\n{LAUNCH} a=1 stamp=$STAMP'
    found = arguments(text)
    assert found[0] == "a=1"
    assert found[1].removeprefix("stamp=").isdigit()  # only names of runs need the date, which is no secret


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f'touch {mark}\nX=$(touch {mark})\necho a > {mark}\n[ -n "`touch {mark}`" ]\n{LAUNCH} a=1'
    assert arguments(text) == ["a=1"]
    assert not mark.exists()


@pytest.mark.parametrize(
    "text", ["fi", "done )", "))", "esac", "}", "if", "case", "[[", "for", "case x", "! !", "&& ||", "((", ";;"]
)
def test_broken_scripts_end(text: str) -> None:
    with pytest.raises(ConfigError):
        arguments(text)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (r'a=5$ "b=$" "c=\"x\" \$y \\"', ["a=5$", "b=$", 'c="x" $y \\']),
        ('"a=1\\\n2"', ["a=12"]),
        ("a=$# b=$0", ["a=2", "b=run.sh"]),
        ("a=$((N > 3)) b=$((N == 3))", ["a=1", "b=0"]),
        ("a=$M", ["a=12"]),
        ('"a=$L" b=${L[1]} "${#L[@]}"', ["a=x z", "b=y", "2"]),
        ('"${O[@]}" "${Q[@]}"', ["xz", "y", "z"]),
        ("a=$W/data", [f"a={Path.cwd()}/data"]),
    ],
)
def test_what_a_word_holds(words: str, found: list[str]) -> None:
    """Behind commands whose brackets and quotes hide brackets, and which are not followed."""
    before = (
        "diff <(echo ')') <(sort \\) x)\n"
        'T=$(echo ")" \'(\' "a\\")")\n'
        "S=$((cat a) | wc)\n"
        "N=4 M=1 L=x W=$(pwd)\n"
        "M+=2\nL+=(y)\nL+=' z'\nO=(x y)\nO+=z\nQ=()\nQ+=z\n"  # bash adds a text to the first item
    )
    assert arguments(f"{before}{LAUNCH} {words}", "y=1", "z=2") == found


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"{LAUNCH} a=${{X@Q}}", "${X@Q} is not read; write its value out"),
        (f"cat <<END\n{LAUNCH} a=1", "no command that would be reached in it"),
    ],
)
def test_a_word_that_cannot_be_known(script: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(script)
    assert message in str(caught.value)
