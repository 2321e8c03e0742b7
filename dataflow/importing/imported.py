"""A launch of verl as this project's overrides: what is mapped, what needs nothing, what has no counterpart."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from dataflow.algorithms import PRESETS
from dataflow.config.keys import verl_keys, yaml_values
from dataflow.config.keys.nested import at, flat
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.config.training import CriticConfig
from dataflow.errors import ConfigError, UserError, alike
from dataflow.importing.conversions import NoCounterpart, conversion_of
from dataflow.importing.script import MARK, mark
from dataflow.importing.settings import Missing, Settings
from dataflow.rewards.gsm8k import VERLS, VERLS_STRICT

GRPO, PPO = "pipelines/gsm8k_grpo.py", "pipelines/ppo_critic.py"
_SHORT = {"policy.preset": "policy", "resume.mode": "resume"}
_TOY = ("lr", "betas", "weight_decay", "warmup_steps")
_ALWAYS = {f"trainer.{key}" for key in _TOY}
"""Keys whose defaults in the pipeline are not those of the classes here, so that they are always given."""
_ALWAYS_WITH_CRITIC = {*(f"critic.{key}" for key in _TOY), *(f"algorithm.{key}" for key in ("whiten", *PRESETS["ppo"]))}


class WithCritic(RunConfig):
    """The keys of a pipeline that trains a critic (pipelines/ppo_critic.py)."""

    critic: CriticConfig = Field(default_factory=CriticConfig)

    @model_validator(mode="after")
    def _the_critic_fits(self) -> WithCritic:
        self.critic.check_mini_batches(self.policy.resolve(self.optimizer_steps), self.data.prompts)
        return self


class Mapped(NamedTuple):
    """A key of verl with a counterpart: its value, our keys and values."""

    key: str
    value: Any
    ours: Mapping[str, Any]


class Lost(NamedTuple):
    """A key of verl whose value has no counterpart, and what to do instead."""

    key: str
    value: Any
    instead: str


@dataclass
class Imported:
    """What a launch becomes.

    Attributes:
        pipeline: the file that runs it.
        unknown: variables of the launch that are not known here, with the reason.
        mapped: keys with a counterpart, those that the launch sets.
        lost: keys whose values have no counterpart.
        missing: our keys whose values only the machine of the launch knows, with the reason.
        open: their values as far as they are known.
    """

    source: str
    pipeline: str
    unknown: Mapping[str, str]
    overrides: dict[str, Any] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The overrides as ``key=value``."""
        return [_argument(key, value) for key, value in self.overrides.items()]

    def _asked(self) -> list[str]:
        """Returns the arguments that are missing or hold variables, with marks for what is not known."""
        unknown = {key: mark(key.upper().replace(".", "_")) for key in self.missing}
        return [_argument(key, value) for key, value in {**self.open, **unknown}.items()]

    def script(self) -> str:
        """Returns a shell script that runs the same training here; its comments say what differs."""
        reasons = [*zip(self._asked()[len(self.open) :], self.missing.values(), strict=True)]
        reasons += [(mark(name), why) for name, why in self.unknown.items()]
        differs = [
            f"{_argument(each.key, each.value)}: " + " ".join(_argument(*pair) for pair in each.ours.items())
            for each in self.mapped
            if each.ours and [*each.ours.values()] != [each.value] and self.overrides.keys() & each.ours.keys()
        ]
        parts = {
            "Missing, as only the machine of the launch has it": [f"{what}: {why}" for what, why in reasons],
            "No counterpart, and what to do instead": [f"{_argument(k, v)}: {why}" for k, v, why in self.lost],
            "What differs by more than the name": differs,
            "Rewards": [VERLS_STRICT] if self.overrides.get("custom_reward_function.path") == VERLS else [],
        }
        lines = [
            f"Made by 'dataflow import-verl' from {self.source} (verl 0.9); it runs where {self.pipeline} is.",
            "policy=baseline is what verl does. Try policy=both, which hides slow rewards behind GPU work.",
            "Keys behind the script's name win over those below: bash run.sh policy=both dry=true",
        ]
        for title, texts in parts.items():
            lines += ["", f"{title}:", *(f"  {text}." for text in texts)] if texts else []
        head = ["#!/usr/bin/env bash", *(f"# {_printable(line)}".rstrip() for line in lines)]
        words = [*map(shlex.quote, self.arguments), *map(_shell, self._asked()), '"$@"']
        return "\n".join([*head, " \\\n    ".join([f"dataflow run {shlex.quote(self.pipeline)}", *words])]) + "\n"


def _argument(key: str, value: Any) -> str:
    return f"{_SHORT.get(key, key)}={as_text(value)}"


def _printable(text: str) -> str:
    text = MARK.sub(r"$\1", text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shell(text: str) -> str:
    """Returns a text as a word of the shell, with a variable for each mark, without which the script ends."""
    quoted = shlex.quote(text)
    variable = r'"${\1:?see the comments above}"'
    return MARK.sub(f"'{variable}'" if quoted != text else variable, quoted)


def import_settings(settings: Settings, source: str, unknown: Mapping[str, str]) -> Imported:
    """Returns our overrides for all settings of a launch of verl; messages name it by ``source``.

    ``unknown`` has variables that are not known here, for which marks stand in the values, with the reason.
    """
    critic = settings.get("algorithm.adv_estimator", marked=True) == "gae" or settings.get("critic.enable", marked=True)
    found = Imported(source, PPO if critic else GRPO, unknown)
    order = {key: at for at, key in enumerate(verl_keys.keys())}
    given = set(settings.given)
    wanted: dict[str, Any] = {}
    origin: dict[str, str] = {}
    # For the same key of ours a later one wins: what the launch sets, and the engine's own over that of section data.
    for key in sorted(settings.values, key=lambda key: (key in given, order.get(key, len(order)))):
        value = settings.values[key]
        meaning = verl_keys.find(key, value)
        if (not critic and key.startswith("critic.")) or key.endswith("_target_"):
            continue
        if meaning is None or meaning.ours is None:
            fine = value in (settings.defaults.get(key, settings), None, {}) or (meaning is not None and meaning.fine)
            if not fine and (meaning is not None or key in given):
                found.lost.append(Lost(key, value, meaning.note if meaning is not None else _unknown(key, settings)))
            continue
        if not critic and meaning.ours.startswith("critic."):
            continue
        try:
            ours = _converted(key, value, meaning.ours, settings)
        except NoCounterpart as missing:
            found.lost.append(Lost(key, value, str(missing)))
            ours = missing.ours
        except Missing as missing:
            found.missing.setdefault(missing.key or meaning.ours, str(missing))
            wanted |= missing.ours
            continue
        else:
            if key in given:
                found.mapped.append(Mapped(key, value, ours))
        for name, of in ours.items():
            (found.open if MARK.search(as_text(of)) else wanted)[name] = of
            origin[name] = key
    for name in (*found.open, *found.missing):
        wanted.pop(name, None)
    found.overrides = _fewest(wanted, bool(critic))
    if not found.open and not found.missing:
        try:
            parse_overrides(WithCritic if critic else RunConfig, found.arguments)
        except UserError as error:
            theirs = [of for name, of in origin.items() if str(error).startswith((f"{name}=", f"{name}:"))]
            from_ = f"{theirs[0]} becomes " if theirs else "what the launch becomes is refused: "
            raise ConfigError(f"{from_}{error}") from error
    return found


def _unknown(key: str, settings: Settings) -> str:
    if key in settings.defaults:
        return "there is nothing like it here"
    section, _, leaf = key.rpartition(".")
    close = alike(leaf, [each[len(section) + 1 :] for each in settings.defaults if each.rpartition(".")[0] == section])
    return f"verl 0.9 has no such key; it has '{section}.{close}'" if close else "verl 0.9 has no such key"


def _converted(key: str, value: Any, name: str, settings: Settings) -> Mapping[str, Any]:
    convert = conversion_of(key)
    if convert is None:
        return {} if value is None else {name: value}
    ours = convert(key, value, settings)
    if key in settings.given and MARK.search(str(value)) and not MARK.search(str(ours)):
        raise Missing(f"it follows from {key}={as_text(value)}")
    return ours


def _fewest(wanted: Mapping[str, Any], critic: bool) -> dict[str, Any]:
    """Returns the wanted values that are not the defaults of the pipeline, in the order of its configuration."""
    base = WithCritic() if critic else RunConfig()
    always = _ALWAYS | _ALWAYS_WITH_CRITIC if critic else _ALWAYS
    if wanted.get("algorithm.clip_ratio", 0.2) != 0.2:  # which would set those of the other two that are not given
        always = always | {"algorithm.clip_ratio_low", "algorithm.clip_ratio_high"}
    names = [name for name, _ in flat(base.model_dump())]

    def place(key: str) -> int:
        return next((at for at, name in enumerate(names) if f"{key}.".startswith(f"{name}.")), len(names))

    chosen = {key: of for key, of in wanted.items() if key in always or not _same(at(base, key), of)}
    return dict(sorted(chosen.items(), key=lambda item: place(item[0])))


def _same(ours: Any, value: Any) -> bool:
    if isinstance(ours, tuple):
        ours = list(ours)
    if isinstance(ours, str) and type(value) in (int, float):
        return ours == str(value)
    return bool(ours == value) and isinstance(ours, bool) == isinstance(value, bool)


def as_text(value: Any) -> str:
    """Returns a value as it is written behind ``key=``.

    >>> as_text(1e-6), as_text(["console", "wandb"]), as_text("1e5"), as_text(["1e5"]), as_text(True)
    ('1e-06', '[console,wandb]', '1e5', "['1e5']", 'true')
    """
    if isinstance(value, str):
        is_null = value in ("", "~", "null", "Null", "NULL", "None")
        return json.dumps(value) if is_null or value[:1] in ("'", '"') else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    text = yaml_values.inline(list(value) if isinstance(value, tuple) else value)
    return text.replace(", ", ",") if re.fullmatch(r"\[[\w., /+'-]*\]", text) else text
