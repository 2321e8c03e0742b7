"""The settings that verl would run with: its own default configuration, and what a launch changes in it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dataflow.config.keys import verl_keys, yaml_values
from dataflow.config.keys.nested import flat
from dataflow.config.keys.overrides import shortened
from dataflow.errors import ConfigError, alike, nearest
from dataflow.importing.values import MARK

BASES = {
    "ppo_trainer": "_generated_ppo_trainer.yaml",
    "dp": "_generated_ppo_trainer.yaml",
    "ppo_megatron_trainer": "_generated_ppo_megatron_trainer.yaml",
    "megatron": "_generated_ppo_megatron_trainer.yaml",
    "torchtitan": "_generated_ppo_torchtitan_trainer.yaml",
    "veomni": "_generated_ppo_veomni_trainer.yaml",
}
"""verl's default configurations in one file each, by the name of the configuration and of the engine."""

_PRINTED = "add '--cfg job --resolve' to the launch, and import what it prints"
_MISSING = "???"


class Missing(Exception):
    """A value that only the machine of the launch knows; the message says which, as part of a sentence.

    Args:
        reason: part of a sentence.
        key: of ours that it leaves open; None for that of the table.
        ours: what is known nevertheless.
    """

    def __init__(self, reason: str, key: str | None = None, ours: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.key = key
        self.ours = ours or {}


class Settings(NamedTuple):
    """Settings of verl by dotted key.

    Attributes:
        values: of all keys.
        given: the keys that the launch sets, or that differ from verl's defaults in a file.
        defaults: verl's own values.
        added: keys that verl's configuration does not have; the launch adds them (``+key=value``).
    """

    values: dict[str, Any]
    given: tuple[str, ...]
    defaults: dict[str, Any]
    added: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None, marked: bool = False) -> Any:
        """Returns the value of a key; ``default`` for null and for a key that is not set.

        Args:
            key: of verl.
            default: its value otherwise.
            marked: whether a text may hold marks of what is not known here.

        Raises:
            Missing: it holds one.
        """
        value = self.values.get(key)
        if not marked and isinstance(value, str) and MARK.search(value):
            raise Missing(f"it follows from {key}={value}")
        return default if value in (None, _MISSING) else value


def config_directory() -> Path:
    """Returns the directory of verl's own configuration; imports nothing of it.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None or importlib.util.find_spec("hydra") is None:
        raise ConfigError(
            "import-verl reads verl's own defaults, and verl is not installed; run pip install 'dataflow-rl[train]'."
        )
    return Path(spec.origin).parent / "trainer" / "config"


def defaults(base: str = "ppo_trainer") -> Any:
    """Returns one of verl's default configurations, unresolved, as OmegaConf holds it.

    Args:
        base: a key of :data:`BASES`.
    """
    from omegaconf import OmegaConf

    return OmegaConf.create(_read(BASES[base]))


@functools.cache
def _read(file: str) -> dict[str, Any]:
    # The C loader takes a hundredth of the time of OmegaConf's own.
    text = (config_directory() / file).read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return read


@functools.cache
def _default_values(file: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return _resolved(OmegaConf.create(_read(file)), file)


def of_launch(arguments: Sequence[str], name: str) -> Settings:
    """Returns the settings of a launch.

    Args:
        arguments: of ``verl.trainer.main_ppo``, as Hydra takes them.
        name: of the launch, for messages.

    Raises:
        ConfigError: an argument is none of Hydra's, or names a key that verl does not have.
    """
    base, overrides = _base(arguments, name)
    return _laid_over(base, overrides, name)


def of_file(text: str, name: str) -> Settings:
    """Returns the settings of a resolved configuration.

    Args:
        text: YAML, as the launch prints it with ``--cfg job --resolve`` or Hydra keeps it in ``.hydra/config.yaml``.
        name: of the file, for messages.

    Raises:
        ConfigError: it is no such configuration, or has a key that verl does not have.
    """
    try:
        given = yaml_values.load_hydra(text)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read as YAML: {error}; {_PRINTED}.") from error
    if not isinstance(given, dict) or "actor_rollout_ref" not in given:
        raise ConfigError(f"{name}: it is no configuration of verl, without section actor_rollout_ref; {_PRINTED}.")
    engine = given.pop("model_engine", "dp")
    base = engine if engine in BASES else "dp"
    overrides = [(key, value, False) for key, value in flat(given)]
    settings = _laid_over(base, overrides, name)
    changed = tuple(key for key in settings.given if settings.values[key] != settings.defaults.get(key))
    return settings._replace(given=changed)


def _base(arguments: Sequence[str], name: str) -> tuple[str, list[tuple[str, Any, bool]]]:
    """Returns which default configuration a launch begins with, and its overrides: key, value, whether added."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    base, texts = "ppo_trainer", []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            texts.append(argument)
            continue
        option, _, value = argument.partition("=")
        if option in ("--config-name", "-cn"):
            base = (value or next(rest, "")).removesuffix(".yaml")
            if base not in BASES:
                raise ConfigError(
                    f"{name}: {option}={base} is a configuration of its own, which is not read; {_PRINTED}."
                )
        elif option in ("--config-path", "-cp") and (value or next(rest, "")).strip("./") == "config":
            continue  # verl's own directory
        else:
            raise ConfigError(f"{name}: the option {option} is not read; {_PRINTED}.")
    parser, found = OverridesParser.create(), []
    for text in texts:
        try:
            override = parser.parse_override(text)
            given: Any = override.value()
        except (HydraException, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{name}: '{shortened(text)}' is not key=value as Hydra reads it ({shortened(reason)}); correct it."
            ) from error
        if override.is_sweep_override():
            raise ConfigError(f"{name}: '{text}' is a sweep over several values; give one of them.")
        key = override.key_or_group
        if key == "model_engine":
            if given not in BASES:
                raise ConfigError(f"{name}: model_engine={given} is none of verl's{nearest(str(given), BASES)}.")
            base = str(given)
            continue
        if key.startswith("hydra."):
            continue
        deleted = override.type == OverrideType.DEL
        added = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
        inner = list(flat(_plain(given), key)) if isinstance(given, dict) and given else [(key, _plain(given))]
        found += [(each, None if deleted else of, added) for each, of in inner]
    return base, found


def _plain(value: Any) -> Any:
    """Returns a value without Hydra's marks of quotes."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.text if hasattr(value, "text") and hasattr(value, "quote") else value


def _laid_over(base: str, overrides: Sequence[tuple[str, Any, bool]], name: str) -> Settings:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole, before = defaults(base), _default_values(BASES[base])
    sections = {key.rpartition(".")[0] for key in before}
    sections |= {section.rpartition(".")[0] for section in sections}
    given: dict[str, None] = {}
    added: list[str] = []
    for key, value, adds in overrides:
        free = any(key.startswith(f"{open_}.") for open_, held in before.items() if held == {})
        if key not in before and key not in sections and not free:
            older = (found := verl_keys.find(key)) is not None and found[0] == key  # of a version before 0.9
            if not adds and not older and not key.endswith("._target_"):
                raise ConfigError(unknown(key, before, name))
            added.append(key)
        try:
            OmegaConf.update(whole, key, value, force_add=True)
        except (OmegaConfBaseException, RecursionError) as error:
            shown = f"{key}={shortened(value)}"
            raise ConfigError(f"{name}: '{shown}' does not fit verl's configuration; correct it.") from error
        given[key] = None
    values = _resolved(whole, name)
    values, moved = _moved(values, [key for key in given if key in values])
    return Settings(values, tuple(moved), before, tuple(added))


def unknown(key: str, known: Mapping[str, Any], name: str) -> str:
    """Returns the sentence about a key that verl does not have."""
    section, _, leaf = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    close = alike(leaf, siblings) if leaf else None
    guess = (
        f"; did you mean '{siblings[close]}'?" if close else "; correct it, or add it with + if a fork of verl has it."
    )
    return f"{name}: verl 0.9 has no key '{key}'{guess}"


def _resolved(whole: Any, name: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain: Any = OmegaConf.to_container(whole, resolve=True, throw_on_missing=False)
        return dict(flat(plain))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}: a value refers to another that does not exist ({reason}); correct it.") from error


def _moved(values: dict[str, Any], given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Moves values of keys that verl 0.9 keeps for launches of earlier versions to their present keys, as verl does."""
    values, names = dict(values), list(given)
    for key in given:
        target = verl_keys.moved(key)
        if target is None:
            continue
        if values.get(key) is not None:
            values[target] = values[key]
            names.append(target)
        names.remove(key)
    return values, names
