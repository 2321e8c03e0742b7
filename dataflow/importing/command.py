"""`dataflow import-verl`: its options, which may stand before or behind a launch, and its output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dataflow.errors import ConfigError
from dataflow.files import replaced, written
from dataflow.importing.source import import_launch
from dataflow.importing.table import table


def run(words: Sequence[str], out: str | None = None, as_json: bool = False, keys: bool = False) -> str:
    """Returns what the command prints.

    Args:
        words: the launch (:func:`import_launch`); options may follow it: ``-o FILE``, ``--json``, ``--keys``.
        out: file to write the script to; None prints it.
        as_json: JSON in place of the script.
        keys: only the table of verl's keys.

    Raises:
        ConfigError: an option has no value, or the launch cannot be imported; then no file is written.
        RunError: the file cannot be written.
    """
    launch = []
    rest = iter(words)
    for word in rest:
        if word == "--keys":
            keys = True
        elif word == "--json":
            as_json = True
        elif word == "-o":
            out = next(rest, "")
        else:
            launch.append(word)
    if keys:
        return table()
    if out == "":
        raise ConfigError("import-verl: -o needs the name of the script to write, such as -o run.sh.")
    found = import_launch(launch)
    text = json.dumps(found.as_dict(), indent=1, default=str) + "\n" if as_json else found.script()
    if out is None:
        return text.rstrip("\n")
    path = Path(out).expanduser()
    if path.is_dir():
        raise ConfigError(f"import-verl: -o {out} is a directory; give the name of a file, such as {out}/run.sh.")
    with written("launch", path, "make room there"), replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        if not as_json:
            temporary.chmod(0o755)
    keys_ = "1 key has" if len(found.lost) == 1 else f"{len(found.lost)} keys have"
    lost = f"; {keys_} no counterpart, see its first lines" if found.lost else ""
    missing = "; what is missing is in its first lines" if found.missing or found.unknown else ""
    return f"{out}: {len(found.overrides)} overrides{missing}{lost}"
