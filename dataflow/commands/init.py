"""`dataflow init DIR`: writes a project of one's own, a pipeline with its reward, configuration and tests."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from shutil import which

from dataflow.errors import ConfigError
from dataflow.files import unmakable, written

_TEXT = ".txt"
"""Ends the names of Python files in the package, so that no tool takes them for its modules or tests."""


def init(directory: str) -> int:
    """Writes the project; prints what to do next, and returns the exit code.

    The directory is made if it does not exist; otherwise none of the project's files may be in it.
    """
    place = Path(directory).expanduser()
    project = sorted(path for path in Path(str(files(__package__)), "project").iterdir() if path.is_file())
    texts = {each.name.removesuffix(_TEXT): each.read_text(encoding="utf-8") for each in project}
    if os.path.lexists(place) and not place.is_dir():
        raise ConfigError(f"init: {directory} is a file; give the name of a directory.")
    if taken := next((name for name in texts if os.path.lexists(place / name)), None):
        raise ConfigError(f"init: {place / taken} exists; give another directory, or move it away.")
    if (why := unmakable(place)) is not None:
        raise ConfigError(f"init: {directory}: {why}")
    with written("project", place, "make room there, or give another directory"):
        place.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            text = text.replace("# NAME", f"# {place.absolute().name}", 1)
            (place / name).write_text(text, encoding="utf-8")
    print(f"{directory}: {', '.join(sorted(texts))}")
    # Of an environment that is not active, the shell does not find the command.
    program = "dataflow" if which("dataflow") else shlex.quote(str(Path(sys.executable).with_name("dataflow")))
    run = f"{program} run config.yaml"
    print(f"next: cd {shlex.quote(directory)} && {run} dry=true && {run} steps=3")
    return 0
