"""`dataflow import-verl`: finds the launch, prints what becomes of it, and the table of verl's keys."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from dataflow.config.keys import verl_keys
from dataflow.config.keys.verl_keys import Meaning
from dataflow.errors import ConfigError
from dataflow.files import decoded, no_file, replaced, written
from dataflow.importing import settings
from dataflow.importing.imported import Imported, import_settings
from dataflow.importing.script import MARK, launch_of, main_of

_GROUPS = {
    "Data": ("data.",),
    "The model": ("actor_rollout_ref.hybrid", "actor_rollout_ref.nccl", "actor_rollout_ref.model."),
    "Training and the loss": ("actor_rollout_ref.actor.", "actor_rollout_ref.ref."),
    "Rollout": ("actor_rollout_ref.rollout.",),
    "Algorithm": ("algorithm.",),
    "Rewards": ("reward.", "custom_reward_function.", "reward_model.", "sandbox_fusion."),
    "The critic": ("critic.",),
    "The run": ("",),
}


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
        if word == "-o":
            out = next(rest, "")
        elif word not in ("--keys", "--json"):
            launch.append(word)
    if keys or "--keys" in words:
        return table()
    if out == "" or (out is not None and Path(out).is_dir()):
        raise ConfigError("import-verl: -o needs the name of the script to write, such as -o run.sh.")
    found = import_launch(launch)
    as_json = as_json or "--json" in words
    text = json.dumps(found.as_dict(), indent=1, default=str) + "\n" if as_json else found.script()
    if out is None:
        return text.rstrip("\n")
    path = Path(out).expanduser()
    with written("launch", path, "make room there"), replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        if not as_json:
            temporary.chmod(0o755)
    keys_ = "1 key has" if len(found.lost) == 1 else f"{len(found.lost)} keys have"
    lost = f"; {keys_} no counterpart, see its first lines" if found.lost else ""
    missing = "; what is missing is in its first lines" if found.missing or found.unknown else ""
    return f"{out}: {len(found.overrides)} overrides{missing}{lost}"


def import_launch(words: Sequence[str]) -> Imported:
    """Returns our overrides for a launch of verl.

    Args:
        words: a shell script or a resolved configuration (.yaml), and further overrides of verl; or the launch itself,
            ``python -m verl.trainer.main_ppo key=value ...``.

    Raises:
        ConfigError: there is no launch, or it cannot be read, or not be run here.
    """
    if not words:
        raise ConfigError(
            "import-verl: give a launch script of verl, its resolved configuration (.yaml), or the launch itself, "
            "python -m verl.trainer.main_ppo ..."
        )
    name, *more = words
    if (at := main_of(words)) is not None:
        return import_settings(settings.of_launch(words[at + 1 :], "the launch"), "the launch", {})
    path = Path(name).expanduser()
    if "=" in name or name.startswith("-"):
        raise ConfigError(
            f"import-verl: '{name}' is no file and no launch; give a script, or "
            f"python -m verl.trainer.main_ppo {name} ..."
        )
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
    """Returns verl's keys in Markdown, a heading and a table for each part of its configuration."""
    rows = dict(verl_keys.keys())
    parts = []
    for title, prefixes in _GROUPS.items():
        own = [key for key in rows if key.startswith(prefixes)]
        lines = [_line(key, rows.pop(key)) for key in own]
        parts.append("\n".join([f"### {title}", "", "| verl | here | |", "|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _line(key: str, meaning: Meaning) -> str:
    if meaning.moved is not None:
        return f"| `{key}` | | moved to `{meaning.moved}` |"
    said = [meaning.note] if meaning.note else []
    if meaning.ours is None and meaning.fine is None:
        said.append("listed unless it is verl's default")
    elif isinstance(meaning.fine, list):
        values = (f"`{'null' if each is None else each}`" for each in meaning.fine)
        said.append(f"listed unless it is {' or '.join(values)}")
    return f"| `{key}` | {f'`{meaning.ours}`' if meaning.ours else ''} | {'; '.join(said).replace('|', '/')} |"
