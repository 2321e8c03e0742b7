"""`dataflow import-verl`: finds the launch, prints what becomes of it, and the table of verl's keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dataflow.config.keys import verl_keys
from dataflow.errors import ConfigError, counted
from dataflow.files import decoded, no_file, replaced, written
from dataflow.importing import settings
from dataflow.importing.imported import Imported, import_settings
from dataflow.importing.script import MARK, launch_of, main_of


def run(words: Sequence[str], out: str | None = None, keys: bool = False) -> str:
    """Returns what the command prints: the script, or what was written to ``out``.

    With ``keys`` that is the table of verl's keys. In ``words``, the options ``-o FILE`` and ``--keys`` may follow the
    launch (:func:`import_launch`). Nothing is written if the launch cannot be imported.
    """
    launch = []
    rest = iter(words)
    for word in rest:
        if word == "-o":
            out = next(rest, "")
        elif word != "--keys":
            launch.append(word)
    if keys or "--keys" in words:
        return table()
    if out == "" or (out is not None and Path(out).is_dir()):
        raise ConfigError("import-verl: -o needs the name of the script to write, such as -o run.sh.")
    found = import_launch(launch)
    if out is None:
        return found.script().rstrip("\n")
    path = Path(out).expanduser()
    with written("launch", path, "make room there"), replaced(path) as temporary:
        temporary.write_text(found.script(), encoding="utf-8")
        temporary.chmod(0o755)
    numbers = [counted(len(found.overrides), "override"), f"{counted(len(found.lost), 'key')} without a counterpart"]
    missing = len(found.missing) + len(found.open)
    return f"{out}: {', '.join([*numbers, *([f'{missing} missing'] if missing else [])])}; its first lines say which"


def import_launch(words: Sequence[str]) -> Imported:
    """Returns our overrides for a launch of verl.

    The words are a shell script or a resolved configuration (.yaml), and further overrides of verl; or the launch
    itself, ``python -m verl.trainer.main_ppo key=value ...``.
    """
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(
            "import-verl: give a launch script of verl, its resolved configuration (.yaml), or the launch itself, "
            "python -m verl.trainer.main_ppo ..."
        )
    name, *more = words
    if (at := main_of(words)) is not None:
        return import_settings(settings.of_launch(words[at + 1 :], "the launch"), "the launch", {})
    path = Path(name).expanduser()
    if (why := no_file(path)) is not None:
        raise ConfigError(f"import-verl: {path}: {why}; give a launch script of verl, or its resolved configuration.")
    try:
        text = decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"import-verl: {path}: {error}; give a text that can be read.") from error
    if path.suffix not in (".yaml", ".yml"):
        launch = launch_of(text, path.absolute(), more, os.environ)
        # A word without a key, such as $EXTRA_ARGS, may hold any.
        known = [each for each in launch.arguments if not MARK.search(each.partition("=")[0])]
        return import_settings(settings.of_launch(known, path.name), path.name, launch.unknown)
    if more:
        raise ConfigError(f"{path.name} is a whole configuration; change it there, and leave '{more[0]}' out.")
    return import_settings(settings.of_file(text, path.name), path.name, {})


def table() -> str:
    """Returns verl's keys in Markdown, a heading and a table for each section of verl's configuration."""
    parts: dict[str, list[str]] = {}
    for key, ours, note in verl_keys.rows():
        section = ".".join(key.split(".")[: 2 if key.startswith("actor_rollout_ref.") else 1])
        line = f"| `{key}` | {f'`{ours}`' if ours else ''} | {note.replace('|', '/')} |"
        parts.setdefault("In any section" if section.startswith("*") else f"`{section}`", []).append(line)
    head = ["| verl | here | |", "|---|---|---|"]
    return "\n\n".join("\n".join([f"### {title}", "", *head, *lines]) for title, lines in parts.items())
