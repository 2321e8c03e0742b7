"""The settings that verl would run with: its own default configuration, and what a launch changes in it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataflow.config.keys import verl_keys, yaml_values
from dataflow.config.keys.nested import flat
from dataflow.config.keys.overrides import shortened
from dataflow.errors import ConfigError
from dataflow.importing.script import MARK, PRINTED

BASES = {
    "ppo_trainer": "dp",
    "dp": "_generated_ppo_trainer.yaml",
    "ppo_megatron_trainer": "megatron",
    "megatron": "_generated_ppo_megatron_trainer.yaml",
    "torchtitan": "_generated_ppo_torchtitan_trainer.yaml",
    "veomni": "_generated_ppo_veomni_trainer.yaml",
}
"""verl's default configurations in one file each, by ``model_engine``, and the engine of each ``--config-name``."""


class Missing(Exception):
    """A value that only the machine of the launch knows; the message says which, as part of a sentence.

    ``key`` is the one of ours that it leaves open, None for that of the table; ``ours`` is what is known nevertheless.
    """

    def __init__(self, reason: str, key: str | None = None, ours: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.key = key
        self.ours = ours or {}


class Settings(NamedTuple):
    """Settings of verl by dotted key, and verl's own defaults.

    ``given`` has the keys that the launch sets, or that differ from verl's defaults in a file.
    """

    values: dict[str, Any]
    given: tuple[str, ...]
    defaults: dict[str, Any]

    def get(self, key: str, default: Any = None, marked: bool = False) -> Any:
        """Returns the value of a key; ``default`` for null and for a key that is not set.

        A text that holds marks of what is not known here raises :class:`Missing`, unless it may be ``marked``.
        """
        value = self.values.get(key)
        if not marked and isinstance(value, str) and MARK.search(value):
            raise Missing(f"it follows from {key}={value}")
        return default if value in (None, "???") else value

    def number(self, key: str) -> int:
        """Returns a whole number of at least 1; any other value is a ConfigError."""
        value = self.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key}={value}: give a whole number of at least 1 in the launch.")
        return value


@functools.cache
def defaults(engine: str) -> dict[str, Any]:
    """Returns verl's default configuration of an engine, unresolved. Needs verl installed, but does not import it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None or importlib.util.find_spec("hydra") is None:
        raise ConfigError(
            "import-verl reads verl's own defaults, and verl is not installed; run pip install 'dataflow-rl[train]'."
        )
    file = Path(spec.origin).parent / "trainer" / "config" / BASES[engine]
    read: dict[str, Any] = yaml_values.load(file.read_text(encoding="utf-8"))  # OmegaConf's own reader takes seconds
    return read


def of_launch(arguments: Sequence[str], name: str) -> Settings:
    """Returns the settings of a launch with these arguments for Hydra."""
    engine, texts = "dp", []
    rest = iter(arguments)
    for argument in rest:
        option, _, value = argument.partition("=")
        if option == "model_engine":
            engine = value
        elif not argument.startswith("-"):
            texts.append(argument)
        elif option in ("--config-name", "-cn"):
            base = (value or next(rest, "")).removesuffix(".yaml")
            engine = BASES.get(base, base)
        elif option not in ("--config-path", "-cp") or (value or next(rest, "")).strip("./") != "config":
            raise ConfigError(f"{name}: the option {option} is not read; {PRINTED}.")
    if engine not in BASES:
        raise ConfigError(f"{name}: '{engine}' is no engine or configuration of verl itself; {PRINTED}.")
    defaults(engine)  # before Hydra is imported, which comes with verl
    return _laid_over(engine, _overrides(texts, name), name)


def of_file(text: str, name: str) -> Settings:
    """Returns the settings of a resolved configuration; messages name its file by ``name``.

    It is YAML, as the launch prints it with ``--cfg job --resolve`` or Hydra keeps it in ``.hydra/config.yaml``.
    """
    try:
        given = yaml_values.load(text)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read as YAML: {error}; {PRINTED}.") from error
    if not isinstance(given, dict) or "actor_rollout_ref" not in given:
        raise ConfigError(f"{name}: it is no configuration of verl, without section actor_rollout_ref; {PRINTED}.")
    engine = given.pop("model_engine", "dp")
    settings = _laid_over(engine if engine in BASES else "dp", flat(given), name)
    changed = tuple(key for key in settings.given if settings.values[key] != settings.defaults.get(key))
    return settings._replace(given=changed)


def _overrides(texts: Sequence[str], name: str) -> Iterable[tuple[str, Any]]:
    """Yields the key and the value of each argument."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
            value = _plain(override.value())
        except HydraException as error:
            reason = shortened(str(error).splitlines()[0])
            raise ConfigError(
                f"{name}: '{shortened(text)}' is not key=value as Hydra reads it ({reason}); correct it."
            ) from error
        if override.is_sweep_override():
            raise ConfigError(f"{name}: '{text}' is a sweep over several values; give one of them.")
        key = override.key_or_group
        if not key.startswith("hydra."):
            yield from flat(value, key) if isinstance(value, dict) and value else [(key, value)]


def _plain(value: Any) -> Any:
    """Returns a value without Hydra's marks of quotes."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value.text if hasattr(value, "text") and hasattr(value, "quote") else value


def _laid_over(engine: str, overrides: Iterable[tuple[str, Any]], name: str) -> Settings:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    whole, given = OmegaConf.create(defaults(engine)), dict[str, None]()
    for key, value in overrides:
        try:
            OmegaConf.update(whole, key, value, force_add=True)
        except OmegaConfBaseException as error:
            shown = f"{key}={shortened(value)}"
            raise ConfigError(f"{name}: '{shown}' does not fit verl's configuration; correct it.") from error
        given[key] = None
    values = _resolved(whole, name)
    for key in [key for key in given if verl_keys.moved(key) is not None]:
        del given[key]
        if (value := values.pop(key)) is not None:  # verl takes the keys of its earlier versions for their present ones
            target = str(verl_keys.moved(key))
            values[target] = value
            given[target] = None
    # What another engine's file changes in FSDP's is a choice, too.
    verls = _default_values(engine) | _default_values("dp")
    return Settings(values, tuple(key for key in given if key in values), verls)


@functools.cache
def _default_values(engine: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return _resolved(OmegaConf.create(defaults(engine)), engine)


def _resolved(whole: Any, name: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain: Any = OmegaConf.to_container(whole, resolve=True, throw_on_missing=False)
        return dict(flat(plain))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}: a value refers to another that does not exist ({reason}); correct it.") from error
