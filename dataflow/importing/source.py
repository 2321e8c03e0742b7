"""Finds the launch of verl in what the command is given: a file, or the launch itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dataflow.errors import ConfigError
from dataflow.files import decoded, no_file
from dataflow.importing import settings as verl
from dataflow.importing.imported import Imported, import_settings
from dataflow.importing.script import MAIN, launch_of
from dataflow.importing.settings import Settings
from dataflow.importing.values import MARK, Unknown

LARGEST = 2**20
"""Bytes of a script or a configuration; verl's whole configuration has a thirtieth."""


def import_launch(words: Sequence[str]) -> Imported:
    """Returns our overrides for a launch of verl.

    Args:
        words: a shell script or a resolved configuration (.yaml), and further overrides of verl; or the launch itself,
            ``python -m verl.trainer.main_ppo key=value ...``.

    Raises:
        ConfigError: there is no launch, or it cannot be read, or not be run here.
    """
    given, name, unknown = _settings(list(words))
    return import_settings(given, name, unknown)


def _settings(words: list[str]) -> tuple[Settings, str, Mapping[str, Unknown]]:
    if not words:
        raise ConfigError(
            "import-verl: give a launch script of verl, its resolved configuration (.yaml), or the launch itself, "
            "python -m verl.trainer.main_ppo ..."
        )
    at = next((i for i, word in enumerate(words) if MAIN.search(f" {word} ")), None)
    if at is not None and words[at].strip().count(" "):
        return _of_script(words[at], "the launch", words[at + 1 :])
    if at is not None:
        return verl.of_launch(words[at + 1 :], "the launch"), "the launch", {}
    path, *more = words
    if "=" in path or path.startswith("-"):
        raise ConfigError(
            f"import-verl: '{path}' is no file and no launch; give a script, or "
            f"python -m verl.trainer.main_ppo {path} ..."
        )
    text = _read(Path(path).expanduser())
    name = Path(path).name
    if Path(path).suffix in (".yaml", ".yml"):
        if more:
            raise ConfigError(f"{name} is a whole configuration; change it there, and leave '{more[0]}' out.")
        return verl.of_file(text, name), name, {}
    return _of_script(text, name, more)


def _of_script(text: str, name: str, more: list[str]) -> tuple[Settings, str, Mapping[str, Unknown]]:
    launch = launch_of(text, name, more, os.environ)
    arguments = launch.arguments if launch.passes_on else [*launch.arguments, *more]
    # A word without a key, such as $EXTRA_ARGS, may hold any.
    known = [each for each in arguments if not MARK.search(each.partition("=")[0])]
    return verl.of_launch(known, name), name, launch.unknown


def _read(path: Path) -> str:
    if (why := no_file(path)) is not None:
        raise ConfigError(f"import-verl: {path}: {why}; give a launch script of verl, or its resolved configuration.")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ConfigError(f"import-verl: {path} is larger than any launch; give the script alone.")
        return decoded(content)
    except OSError as error:
        raise ConfigError(f"import-verl: {path} cannot be read: {error.strerror}; correct its permissions.") from error
    except ValueError as error:
        raise ConfigError(f"import-verl: {path}: {error}.") from error
