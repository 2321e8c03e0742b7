"""Reads a launch script of verl: bash itself runs it, restricted and without any program.

In restricted mode bash refuses commands with a slash, ``cd`` and files to write to, and the only programs on the path
are a few that compute a text. Any other command ends in ``command_not_found_handle``, which notes the arguments of the
launch. Variables, arrays, functions and conditions are bash's own work.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dataflow.errors import ConfigError

MARK = re.compile(r"%%([A-Za-z_]\w*)%%")
"""Stands in a value for what only the machine of the launch knows, by the name of a variable."""
PRINTED = "import what the launch prints with '--cfg job --resolve' behind it"

_TIMEOUT_S = 20.0
_PROGRAMS = ("basename", "cut", "date", "dirname", "expr", "seq", "tr")

# $_launches is a file descriptor, $_unset names the variables that a script takes from elsewhere. Names of the form
# VALUE_line_process mark the output of commands. Any command succeeds, but Python without an output asks whether a
# package is installed, such as that of another accelerator.
_PRELUDE = r"""
for _name in $_unset; do [ -n "${!_name+x}" ] || export "$_name=%%$_name%%"; done
enable -n . source exec kill
command_not_found_handle() {
  case $* in
    *main_ppo*) printf '%s\0' $# "${BASH_LINENO[0]}" "$@" >&$_launches ;;
    python*' -c '*) [[ $* == *print* ]] && echo "%%VALUE_${BASH_LINENO[0]}_$BASHPID%%" ;;
    *) echo "%%VALUE_${BASH_LINENO[0]}_$BASHPID%%" ;;
  esac
}
pwd() { echo "$PWD"; }
cd() {
  local to=${1:-$HOME} part IFS=/
  [[ $to == /* ]] && PWD=
  for part in $to; do
    case $part in '' | .) ;; ..) PWD=${PWD%/*} ;; *) PWD=$PWD/$part ;; esac
  done
  PWD=${PWD:-/}
}
"""

_QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'|(?<![^\s;])\#[^\n]*|\(\([^\n]*?\)\)|\[\[[^\n]*?\]\]"""
_TARGET = r"""(?:>\([^)\n]*\)|(?:"[^"]*"|'[^']*'|\$\{[^}]*\}|[^\s;&|()<>"'])+)"""
_NULL = re.compile(r"(?:\d|&)?>{1,2}\s*/dev/null")
_WRITES = re.compile(rf"({_QUOTED})|(?:\d|&)?>{{1,2}}\|?\s*(?!&){_TARGET}")
_OPTIONS = re.compile(r"(?m)(^\s*|[;&|({]\s*)set(?=\s+[-+][a-zA-Z])")
_SELF = re.compile(r"BASH_SOURCE(?:\[0\])?")
_PATH_OF_PROGRAM = re.compile(r"(?:[\w.~$][\w.~${}-]*)?(?:/[\w.${}-]+)*/(?=(?:python[\d.]*|torchrun|ray|uv)[\s\"')}])")
_LOOKS_FOR_FILE = re.compile(r"((?:\[|\btest|!|&&|\|\|)\s+)-[defrsx](?=\s)")
_USED = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)(?!\w|:?[-=+])")
_HAS_A_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?[-=+]|\b([A-Za-z_]\w*)\+=")
_CONDITION = re.compile(r"(?m)^.*(?:\[\s|\btest\s|\bcase\s).*$")


class Launch(NamedTuple):
    """A launch that was found: the arguments of ``main_ppo``, and its line in the script.

    :data:`MARK` stands for what is not known; ``unknown`` says why, by the name of each mark.
    """

    arguments: list[str]
    line: int
    unknown: Mapping[str, str]


def mark(name: str) -> str:
    """Returns what stands in a value for a variable, see :data:`MARK`."""
    return f"%%{name}%%"


def main_of(words: Sequence[str]) -> int | None:
    """Returns which word of a command names verl's trainer; None if it launches something else."""
    for at, word in enumerate(words):
        if re.search(r"(^|/)verl/trainer/main_ppo\.py$", word):
            return at
        if word == "verl.trainer.main_ppo" and at and words[at - 1].endswith("-m"):
            return at
    return None


def launch_of(text: str, path: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Returns the only launch of verl in a script that is started with these arguments and this environment.

    ``path`` is the script's as it sees it itself. Arguments that it does not pass on are put behind the launch.
    """
    found, said = _launches(_neutral(text), path, arguments, environment)
    if not found:  # the files that it looks for may be on the machine of the launch
        found, said = _launches(_LOOKS_FOR_FILE.sub(r"\1-n", _neutral(text)), path, arguments, environment)
    if not found:
        why = f" (bash: {said})" if said else ""
        raise ConfigError(
            f"{path.name}: no command that it reaches launches verl.trainer.main_ppo{why}; give the script that does, "
            f"or {PRINTED}."
        )
    if len(found) > 1:
        lines = ", ".join(str(line) for line, _ in found)
        raise ConfigError(
            f"{path.name} launches verl {len(found)} times (lines {lines}); give a script with one launch."
        )
    line, words = found[0]
    behind = (word for word in arguments if "=" in word and word not in words)
    return _explained([*words, *behind], line, text)


def _neutral(text: str) -> str:
    """Returns a script without what would end it in restricted mode, or before its launch."""
    text = _NULL.sub("", text.replace("\r\n", "\n"))
    text = _WRITES.sub(lambda found: found[1] or "", text)
    text = _OPTIONS.sub(r"\1:", text)
    text = _SELF.sub("_script", text).replace("${0", "${_script")
    text = re.sub(r"\$0\b", "$_script", text)
    return _PATH_OF_PROGRAM.sub("", text)


def _unset(text: str) -> str:
    """Returns the variables that would be used although nothing sets them: a condition on one, or a default, sees that
    it is not set, and so does bash here."""
    known = {a or b for a, b in _HAS_A_DEFAULT.findall(text)}
    known |= {a or b for line in _CONDITION.findall(text) for a, b in _USED.findall(line)}
    return " ".join({a or b: None for a, b in _USED.findall(text) if (a or b) not in known})


def _launches(
    text: str, path: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[tuple[int, list[str]]], str]:
    """Returns the arguments of each launch with its line, and the last error of bash."""
    own = ("BASH_", "ENV", "SHELLOPTS", "BASHOPTS", "PATH")
    kept = {key: value for key, value in environment.items() if not key.startswith(own)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as noted:
        script, prelude, programs = Path(folder, path.name), Path(folder, "prelude"), Path(folder, "bin")
        script.write_text(text, encoding="utf-8")
        prelude.write_text(_PRELUDE)
        programs.mkdir()
        for name in _PROGRAMS:
            if (program := shutil.which(name)) is not None:
                (programs / name).symlink_to(program)
        kept |= {"PATH": str(programs), "BASH_ENV": str(prelude), "_unset": _unset(text), "_script": str(path)}
        process = subprocess.Popen(
            [shutil.which("bash") or "/bin/bash", "-r", str(script), *arguments],
            env=kept | {"_launches": str(noted.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # one pipe for both, which every process of the script holds until its end
            stderr=subprocess.STDOUT,
            pass_fds=[noted.fileno()],
            process_group=0,
        )
        with process:
            try:
                output, _ = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                raise ConfigError(
                    f"{path.name} does not end within {_TIMEOUT_S:g} s, without the programs that it waits for; write "
                    f"the launch out, or {PRINTED}."
                ) from error
        noted.seek(0)
        words = noted.read().decode(errors="replace").split("\0")
        said = [line for line in output.decode(errors="replace").splitlines() if line.startswith(f"{script}: line ")]
        last = MARK.sub(r"\1", said[-1].removeprefix(f"{script}: ")) if said else ""
    found = []
    while len(words) > 2:
        count, line = int(words[0]), int(words[1])
        command, words = words[2 : 2 + count], words[2 + count :]
        if (at := main_of(command)) is not None:
            found.append((line, command[at + 1 :]))
    return found, last


def _explained(arguments: list[str], line: int, text: str) -> Launch:
    """Returns a launch whose unknown values have short names and a reason."""
    unknown: dict[str, str] = {}
    outputs: dict[str, str] = {}
    for name in (name for argument in arguments for name in MARK.findall(argument)):
        if output := re.fullmatch(r"VALUE_(\d+)_\d+", name):
            if name not in outputs:
                outputs[name] = f"VALUE_{len(outputs) + 1}"
                unknown[outputs[name]] = f"line {output[1]}: it takes the output of a command"
        else:
            at = re.search(rf"\$\{{?{name}\b", text)
            where = f"line {text.count(chr(10), 0, at.start()) + 1}: " if at else ""
            unknown[name] = f"{where}it has no value here"
    arguments = [MARK.sub(lambda m: mark(outputs.get(m[1], m[1])), each) for each in arguments]
    return Launch(arguments, line, unknown)
