"""A launch of verl as this project's overrides: what is mapped, what needs nothing, what has no counterpart."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from dataflow.algorithms.presets import PRESETS
from dataflow.config.keys import verl_keys, yaml_values
from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.config.keys.verl_keys import Meaning
from dataflow.config.run import RunConfig
from dataflow.config.training import critic as critic_keys
from dataflow.config.training.critic import CriticConfig
from dataflow.errors import ConfigError, UserError
from dataflow.importing.conversions import CONVERSIONS
from dataflow.importing.facts import NoCounterpart
from dataflow.importing.settings import Missing, Settings
from dataflow.importing.values import MARK, Unknown, mark
from dataflow.rewards.gsm8k import VERLS, VERLS_STRICT

GRPO, PPO = "pipelines/gsm8k_grpo.py", "pipelines/ppo_critic.py"
_SIMPLE = re.compile(r"[A-Za-z0-9_./+-]+")
_SHORT = {"policy.preset": "policy", "resume.mode": "resume"}
_POLICY = "policy=baseline is what verl does. Try policy=both, which hides slow rewards behind GPU work."
_AGAIN = "bash run.sh policy=both dry=true"

_FITTING = {"algorithm.adv_estimator": "remax", "data.prompts": 1, "engine.n": 2, "policy.preset": "baseline",
            "steps": 10**9, "trainer.mini_batches": 1, "trainer.world_size": 1}  # fmt: skip
"""What most values of others fit, of the keys that others must fit."""
_TOY = ("lr", "betas", "weight_decay", "warmup_steps")


class WithoutCritic(RunConfig):
    """The keys of a pipeline that trains the actor alone (pipelines/gsm8k_grpo.py)."""

    given: ClassVar[tuple[str, ...]] = tuple(f"trainer.{key}" for key in _TOY)
    """Keys whose defaults in the pipeline are not those of the class, so that they are always given."""


class WithCritic(RunConfig):
    """The keys of a pipeline that trains a critic (pipelines/ppo_critic.py)."""

    elsewhere = staticmethod(critic_keys.hint)
    given: ClassVar[tuple[str, ...]] = (
        *WithoutCritic.given,
        *(f"critic.{key}" for key in _TOY),
        "algorithm.whiten",
        *(f"algorithm.{key}" for key in PRESETS["ppo"]),
    )

    critic: CriticConfig = Field(default_factory=CriticConfig)

    @model_validator(mode="after")
    def _the_critic_fits(self) -> WithCritic:
        self.critic.check_mini_batches(self.policy.resolve(self.optimizer_steps), self.data.prompts)
        return self


class Mapped(NamedTuple):
    """A key of verl with a counterpart.

    Attributes:
        key: verl's.
        value: of the launch, or verl's default.
        ours: our keys and values.
        note: how they differ from verl's; "" if the name alone does.
        default: whether they are our defaults, so that no override is needed.
    """

    key: str
    value: Any
    ours: Mapping[str, Any]
    note: str
    default: bool

    @property
    def converted(self) -> bool:
        """Whether overrides give more than verl's value under another name."""
        return bool(self.note and self.ours and not self.default and list(self.ours.values()) != [self.value])


class Lost(NamedTuple):
    """A key of verl whose value has no counterpart, and what to do instead."""

    key: str
    value: Any
    instead: str


@dataclass
class Imported:
    """What a launch becomes.

    Attributes:
        source: its name.
        pipeline: the file that runs it.
        config: our configuration, built from the overrides and values that fit them in place of those that are missing.
        overrides: by key.
        mapped: keys with a counterpart, those that the launch sets.
        fine: keys that the launch sets and that need nothing here, with the reason.
        lost: keys whose values have no counterpart.
        missing: our keys whose values only the machine of the launch knows, with the reason; ``open`` has their values
            as far as they are known.
        unknown: variables of the launch with a reason that are not known here.
    """

    source: str
    pipeline: str
    config: RunConfig
    overrides: dict[str, Any] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    fine: list[Lost] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The overrides as ``key=value``."""
        return [f"{_SHORT.get(key, key)}={as_text(value)}" for key, value in self.overrides.items()]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything but the built configuration, JSON-able."""
        return {
            "source": self.source,
            "pipeline": self.pipeline,
            "overrides": self.arguments,
            "mapped": [each._asdict() for each in self.mapped],
            "nothing_to_do": [each._asdict() for each in self.fine],
            "no_counterpart": [each._asdict() for each in self.lost],
            "missing": [*map(_shell, self._lines()), *(f"{name}: {why}" for name, why in self._elsewhere())],
        }

    def _lines(self) -> list[str]:
        """Returns the words of the keys that are missing or hold variables, with marks for what is not known."""
        given = [f"{_SHORT.get(key, key)}={as_text(value)}" for key, value in self.open.items()]
        return [*given, *(f"{_SHORT.get(key, key)}={mark(_variable(key))}" for key in self.missing)]

    def _elsewhere(self) -> list[tuple[str, str]]:
        """Returns the variables that no line of the script has, with the reason."""
        named = {name for line in self._lines() for name in MARK.findall(line)}
        return [(name, why) for name, why in self.unknown.items() if name not in named]

    def script(self) -> str:
        """Returns a shell script that runs the same training here; its comments say what differs."""
        same = sum(each.default for each in self.mapped)
        counts = (
            f"Of the keys that it sets, {len(self.mapped) - same} are mapped, {same} have the default here, "
            f"{len(self.fine)} need nothing."
        )
        made = f"Made by 'dataflow import-verl' from {self.source} (verl 0.9)."
        lines = ["#!/usr/bin/env bash", f"# {_comment(made)}", f"# {counts}"]
        if self.missing or self.unknown:
            lines += ["#", "# Missing, as only the machine of the launch has it:"]
            lines += [f"#   {_comment(f'{key}={mark(_variable(key))}: {why}.')}" for key, why in self.missing.items()]
            lines += [f"#   {_comment(f'{mark(name)}: {why}.')}" for name, why in self.unknown.items()]
        if self.lost:
            lines += ["#", "# No counterpart, and what to do instead:"]
            lines += [f"#   {_comment(f'{each.key}={_shown(each.value)}: {each.instead}.')}" for each in self.lost]
        if converted := [each for each in self.mapped if each.converted]:
            lines += ["#", "# What differs by more than the name:"]
            for each in converted:
                ours = " ".join(f"{key}={_shown(value)}" for key, value in each.ours.items())
                lines.append(f"#   {_comment(f'{each.key}={_shown(each.value)}: {ours} ({each.note})')}")
        if self.overrides.get("custom_reward_function.path") == VERLS:
            lines += ["#", f"# Rewards: {VERLS_STRICT}."]
        lines += ["#", f"# {_POLICY}", f"# Keys behind the script's name win over those below: {_AGAIN}"]
        lines += map(_unless_given, self._lines())
        words = [f"dataflow run {shlex.quote(self.pipeline)}", *map(shlex.quote, self.arguments), '"$@"']
        return "\n".join(lines) + "\n" + " \\\n    ".join(words) + "\n"


def _comment(text: str) -> str:
    text = MARK.sub(r"$\1", text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _variable(key: str) -> str:
    return key.upper().replace(".", "_")


def _unless_given(line: str) -> str:
    """Returns the line of the script that asks for a key, unless one behind the script's name gives it."""
    key = line.partition("=")[0]
    keys = next(([key, long] for long, short in _SHORT.items() if short == key), [key])
    patterns = "|".join(f'*" {each}="*' for each in keys)
    return f"""case " $*" in {patterns}) ;; *) set -- {_shell(line)} "$@" ;; esac"""


def _shell(text: str) -> str:
    """Returns a text as a word of the shell, with a variable for each mark, without which the script ends."""
    quoted = shlex.quote(text)
    return MARK.sub(
        r"""'"${\1:?see the comments above}"'""" if quoted != text else r'"${\1:?see the comments above}"', quoted
    )


def import_settings(settings: Settings, source: str, unknown: Mapping[str, Unknown] | None = None) -> Imported:
    """Returns our overrides for the settings of a launch of verl.

    Args:
        settings: of verl, all of them.
        source: name of the launch, for messages.
        unknown: variables that are not known here, for which marks stand in the values.

    Raises:
        ConfigError: a value is wrong, or our configuration cannot be built from what it becomes.
    """
    estimator = settings.get("algorithm.adv_estimator", marked=True)
    critic = estimator == "gae" or bool(settings.get("critic.enable", marked=True))
    found = Imported(source, PPO if critic else GRPO, WithCritic() if critic else WithoutCritic())
    found.unknown = {name: f"line {each.line}: it {each.why}" for name, each in (unknown or {}).items()}
    wanted: dict[str, Any] = {}
    origin: dict[str, str] = {}
    mapped: dict[str, tuple[Meaning, Mapping[str, Any]]] = {}
    # What the launch sets comes last, and wins over a default of verl for the same key of ours.
    # Among those, the later row of the table wins: the engine's own key over that of section data.
    given = set(settings.given)
    order = {key: at for at, key in enumerate(verl_keys.keys())}
    rows = {key: verl_keys.find(key) for key in settings.values}
    ordered = sorted(rows, key=lambda key: (key in given, order[of[0]] if (of := rows[key]) else len(order)))
    for key in ordered:
        row = rows[key]
        if row is None:
            if key in given and not key.endswith("_target_"):
                found.lost.append(Lost(key, settings.values[key], "verl's own configuration has no such key"))
            continue
        meaning, value = row[1], settings.values[key]
        if meaning.moved is not None or (key.startswith("critic.") and not critic):
            continue
        if meaning.ours is None:
            _file(found, key, value, meaning, settings)
            continue
        if (meaning.ours or "").startswith("critic.") and not critic:
            continue
        try:
            ours = _converted(key, value, meaning, settings)
        except NoCounterpart as missing:
            found.lost.append(Lost(key, value, str(missing)))
            ours = missing.ours
        except Missing as missing:
            found.missing.setdefault(missing.key or meaning.ours, str(missing))
            wanted |= missing.ours
            continue
        mapped[key] = (meaning, ours)
        for name, of in ours.items():
            (found.open if MARK.search(as_text(of)) else wanted)[name] = of
            origin[name] = key
    for name in (*found.open, *found.missing):
        wanted.pop(name, None)
    fitting = _fitting(found.config, wanted, {*found.open, *found.missing})
    found.config, overrides = _fitted(type(found.config), wanted | fitting, origin)
    found.overrides = {key: value for key, value in overrides.items() if key not in fitting}
    lost = {each.key for each in found.lost}
    for key in ordered:
        if key in mapped and key in given and key not in lost:
            meaning, ours = mapped[key]
            default = not any(name in found.overrides or name in found.open for name in ours)
            note = meaning.note if meaning.how else ""
            found.mapped.append(Mapped(key, settings.values[key], dict(ours), note, default))
    return found


def _converted(key: str, value: Any, meaning: Meaning, settings: Settings) -> Mapping[str, Any]:
    assert meaning.ours is not None
    if meaning.how:
        ours = CONVERSIONS[meaning.how](key, value, settings)
        if key in settings.given and MARK.search(str(value)) and not MARK.search(str(ours)):
            raise Missing(f"it follows from {key}={as_text(value)}")
        return ours
    return {} if value is None else {meaning.ours: value}


def _file(found: Imported, key: str, value: Any, meaning: Meaning, settings: Settings) -> None:
    """Notes a key without a counterpart: its value changes nothing here, or it is lost."""
    allowed = [settings.defaults.get(key), None] if meaning.fine is None else meaning.fine
    if allowed == "any" or any(value == each and type(value) is type(each) for each in allowed) or value == {}:
        if key in settings.given:
            found.fine.append(Lost(key, value, meaning.note))
    else:
        found.lost.append(Lost(key, value, meaning.note))


def _fitting(base: RunConfig, wanted: Mapping[str, Any], unknown: Collection[str]) -> dict[str, Any]:
    """Returns values for keys that are not known, so that only what the launch itself gives is refused; the run checks
    those that it gets."""
    found = {key: value for key, value in _FITTING.items() if key in unknown}

    def size(key: str) -> int:
        value = found.get(key, wanted.get(key, _held(base, key)))
        return value if type(value) is int and value > 0 else 1

    world, n = size("trainer.world_size"), size("engine.n")
    if "data.prompts" in found:
        found["data.prompts"] = world // math.gcd(n, world)
    elif "engine.n" in found:
        rows = size("data.prompts") // size("trainer.mini_batches")
        found["engine.n"] = max(2, world // math.gcd(rows, world))
    return found


def _fitted(
    kind: type[RunConfig], wanted: Mapping[str, Any], origin: Mapping[str, str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the configuration with the wanted values, and the fewest overrides that give them.

    Raises:
        ConfigError: it cannot be built.
    """
    overrides = _fewest(kind(), wanted)
    while True:
        config = _built(kind, overrides, origin)
        # A key may set others: clip_ratio also sets clip_ratio_low.
        missing = [
            key for key, value in wanted.items() if key not in overrides and not _same(_held(config, key), value)
        ]
        if not missing:
            return config, {key: overrides[key] for key in _ordered(kind, overrides)}
        overrides |= {key: wanted[key] for key in missing}


def _fewest(base: RunConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that differ from those of a configuration, and those that are always given."""
    always = getattr(base, "given", ())
    return {
        key: wanted[key]
        for key in _ordered(type(base), wanted)
        if key in always or not _same(_held(base, key), wanted[key])
    }


def _built(kind: type[RunConfig], overrides: Mapping[str, Any], origin: Mapping[str, str]) -> RunConfig:
    try:
        return parse_overrides(kind, [f"{key}={as_text(value)}" for key, value in overrides.items()])
    except UserError as error:
        key = next((each for each in origin if str(error).startswith((f"{each}=", f"{each}:"))), None)
        from_ = f"{origin[key]} becomes " if key is not None else "what the launch becomes is refused: "
        raise ConfigError(f"{from_}{error}") from error


def _ordered(kind: type[RunConfig], overrides: Iterable[str]) -> list[str]:
    """Returns keys in the order of our configuration, so that an output is the same for every order of the launch."""
    order = {".".join(path): at for at, (path, _) in enumerate(fields(kind))}

    def place(key: str) -> int:
        while key not in order:  # inside a mapping
            key = key.rpartition(".")[0]
        return order[key]

    return sorted(overrides, key=place)


def _held(config: Any, key: str) -> Any:
    return functools.reduce(
        lambda at, name: at.get(name) if isinstance(at, Mapping) else getattr(at, name, None), key.split("."), config
    )


def _same(ours: Any, value: Any) -> bool:
    if isinstance(ours, tuple):
        ours = list(ours)
    if isinstance(ours, str) and type(value) in (int, float):
        return ours == str(value)
    return bool(ours == value) and isinstance(ours, bool) == isinstance(value, bool)


def as_text(value: Any) -> str:
    """Returns a value as it is written behind ``key=``.

    >>> as_text(1e-6), as_text(["console", "wandb"]), as_text(["1e5"]), as_text("a b"), as_text(True)
    ('1e-06', '[console,wandb]', "['1e5']", 'a b', 'true')
    """
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, str):
        return (
            json.dumps(value)
            if value[:1] in ("'", '"') or value in ("", "~", "null", "Null", "NULL", "None")
            else value
        )
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        texts = [yaml_values.inline(each) if isinstance(each, str) else as_text(each) for each in value]
        if all(map(_SIMPLE.fullmatch, texts)):
            return f"[{','.join(texts)}]"
    return yaml_values.inline(value)


def _shown(value: Any) -> str:
    text = as_text(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
