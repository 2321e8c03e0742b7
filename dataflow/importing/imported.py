"""A launch of verl as this project's overrides: what is mapped, what needs nothing, what has no counterpart."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from dataflow.algorithms import PRESETS
from dataflow.config.keys import verl_keys, yaml_values
from dataflow.config.keys.overrides import fields, parse_overrides
from dataflow.config.keys.verl_keys import Meaning
from dataflow.config.run import RunConfig
from dataflow.config.training import critic as critic_keys
from dataflow.config.training.critic import CriticConfig
from dataflow.errors import ConfigError, UserError, alike
from dataflow.importing.conversions import CONVERSIONS, NoCounterpart
from dataflow.importing.script import MARK, mark
from dataflow.importing.settings import Missing, Settings
from dataflow.rewards.gsm8k import VERLS, VERLS_STRICT

GRPO, PPO = "pipelines/gsm8k_grpo.py", "pipelines/ppo_critic.py"
_SIMPLE = re.compile(r"[A-Za-z0-9_./+-]+")
_SHORT = {"policy.preset": "policy", "resume.mode": "resume"}
_POLICY = "policy=baseline is what verl does. Try policy=both, which hides slow rewards behind GPU work."
_AGAIN = "bash run.sh policy=both dry=true"
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
    unknown: Mapping[str, str]
    overrides: dict[str, Any] = field(default_factory=dict)
    mapped: list[Mapped] = field(default_factory=list)
    fine: list[Lost] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The overrides as ``key=value``."""
        return [f"{_SHORT.get(key, key)}={as_text(value)}" for key, value in self.overrides.items()]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything but the built configuration, JSON-able."""
        lines = self._lines()
        named = {name for line in lines for name in MARK.findall(line)}
        elsewhere = (f"{name}: {why}" for name, why in self.unknown.items() if name not in named)
        return {
            "source": self.source,
            "pipeline": self.pipeline,
            "overrides": self.arguments,
            "mapped": [each._asdict() for each in self.mapped],
            "nothing_to_do": [each._asdict() for each in self.fine],
            "no_counterpart": [each._asdict() for each in self.lost],
            "missing": [*map(_shell, lines), *elsewhere],
        }

    def _lines(self) -> list[str]:
        """Returns the words of the keys that are missing or hold variables, with marks for what is not known."""
        given = [f"{_SHORT.get(key, key)}={as_text(value)}" for key, value in self.open.items()]
        return [*given, *(f"{_SHORT.get(key, key)}={mark(_variable(key))}" for key in self.missing)]

    def script(self) -> str:
        """Returns a shell script that runs the same training here; its comments say what differs."""
        same = sum(each.default for each in self.mapped)
        counts = (
            f"Of the keys that it sets, {len(self.mapped) - same} are mapped, {same} have the default here, "
            f"{len(self.fine)} need nothing."
        )
        made = f"Made by 'dataflow import-verl' from {self.source} (verl 0.9)."
        lines = ["#!/usr/bin/env bash", f"# {_comment(made)}", f"# {counts}"]
        missing = [f"{key}={mark(_variable(key))}: {why}." for key, why in self.missing.items()]
        missing += [f"{mark(name)}: {why}." for name, why in self.unknown.items()]
        differs = [
            f"{each.key}={_shown(each.value)}: "
            + " ".join(f"{key}={_shown(value)}" for key, value in each.ours.items())
            + f" ({each.note})"
            for each in self.mapped
            if each.note and each.ours and not each.default and list(each.ours.values()) != [each.value]
        ]
        for title, texts in (
            ("Missing, as only the machine of the launch has it", missing),
            ("No counterpart, and what to do instead", [f"{k}={_shown(v)}: {why}." for k, v, why in self.lost]),
            ("What differs by more than the name", differs),
        ):
            if texts:
                lines += ["#", f"# {title}:", *(f"#   {_comment(text)}" for text in texts)]
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
    variable = r'"${\1:?see the comments above}"'
    return MARK.sub(f"'{variable}'" if quoted != text else variable, quoted)


def import_settings(settings: Settings, source: str, unknown: Mapping[str, str]) -> Imported:
    """Returns our overrides for the settings of a launch of verl.

    Args:
        settings: of verl, all of them.
        source: name of the launch, for messages.
        unknown: variables that are not known here, for which marks stand in the values, with the reason.

    Raises:
        ConfigError: a value is wrong, or our configuration cannot be built from what it becomes.
    """
    critic = settings.get("algorithm.adv_estimator", marked=True) == "gae" or settings.get("critic.enable", marked=True)
    kind = WithCritic if critic else WithoutCritic
    found = Imported(source, PPO if critic else GRPO, kind(), unknown)
    wanted: dict[str, Any] = {}
    origin: dict[str, str] = {}
    mapped: dict[str, tuple[Meaning, Mapping[str, Any]]] = {}
    given = set(settings.given)
    for key, row in _ordered_rows(settings):
        value = settings.values[key]
        if row is None:
            if key in given and not key.endswith("_target_"):
                found.lost.append(Lost(key, value, _unknown(key, settings)))
            continue
        critics = key.startswith("critic.") or (row.ours or "").startswith("critic.")
        if row.moved is not None or (critics and not critic):
            continue
        if row.ours is None:
            _note(found, key, value, row, settings)
            continue
        try:
            ours = _converted(key, value, row, settings)
        except NoCounterpart as missing:
            found.lost.append(Lost(key, value, str(missing)))
            ours = missing.ours
        except Missing as missing:
            found.missing.setdefault(missing.key or row.ours, str(missing))
            wanted |= missing.ours
            continue
        mapped[key] = (row, ours)
        for name, of in ours.items():
            (found.open if MARK.search(as_text(of)) else wanted)[name] = of
            origin[name] = key
    for name in (*found.open, *found.missing):
        wanted.pop(name, None)
    fitting = _fitting({*found.open, *found.missing}, wanted)
    found.config, overrides = _fitted(kind, wanted | fitting, origin)
    found.overrides = {key: value for key, value in overrides.items() if key not in fitting}
    lost = {each.key for each in found.lost}
    for key, (row, ours) in mapped.items():
        if key in given and key not in lost:
            default = not any(name in found.overrides or name in found.open for name in ours)
            found.mapped.append(Mapped(key, settings.values[key], ours, row.note if row.how else "", default))
    return found


def _unknown(key: str, settings: Settings) -> str:
    section, _, leaf = key.rpartition(".")
    close = alike(leaf, [each[len(section) + 1 :] for each in settings.defaults if each.rpartition(".")[0] == section])
    return f"verl 0.9 has no such key; it has '{section}.{close}'" if close else "verl 0.9 has no such key"


def _ordered_rows(settings: Settings) -> list[tuple[str, Meaning | None]]:
    """Returns all keys with their rows of the table; for the same key of ours, a later one wins.

    What the launch sets comes behind verl's defaults, and in the order of the table: the engine's own key wins over
    that of section data.
    """
    order = {key: at for at, key in enumerate(verl_keys.keys())}
    given = set(settings.given)
    rows = {key: verl_keys.find(key) for key in settings.values}
    keys = sorted(rows, key=lambda key: (key in given, order[row[0]] if (row := rows[key]) else len(order)))
    return [(key, row[1] if (row := rows[key]) else None) for key in keys]


def _converted(key: str, value: Any, meaning: Meaning, settings: Settings) -> Mapping[str, Any]:
    assert meaning.ours is not None
    if not meaning.how:
        return {} if value is None else {meaning.ours: value}
    ours = CONVERSIONS[meaning.how](key, value, settings)
    if key in settings.given and MARK.search(str(value)) and not MARK.search(str(ours)):
        raise Missing(f"it follows from {key}={as_text(value)}")
    return ours


def _note(found: Imported, key: str, value: Any, meaning: Meaning, settings: Settings) -> None:
    """Notes a key without a counterpart: its value changes nothing here, or it is lost."""
    allowed = [settings.defaults.get(key), None] if meaning.fine is None else meaning.fine
    if allowed == "any" or any(value == each and type(value) is type(each) for each in allowed) or value == {}:
        if key in settings.given:
            found.fine.append(Lost(key, value, meaning.note))
    else:
        found.lost.append(Lost(key, value, meaning.note))


def _fitting(unknown: Collection[str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values that fit the wanted ones, for unknown keys: so that the wanted ones can be checked."""
    world = wanted.get("trainer.world_size", 1)
    fitting = {
        "algorithm.adv_estimator": "remax", "data.prompts": world, "engine.n": 2 * world, "policy.preset": "baseline",
        "steps": 10**9, "trainer.mini_batches": 1, "trainer.world_size": 1,
    }  # fmt: skip
    return {key: value for key, value in fitting.items() if key in unknown}


def _fitted(
    kind: type[WithCritic] | type[WithoutCritic], wanted: Mapping[str, Any], origin: Mapping[str, str]
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns the configuration with the wanted values, and the fewest overrides that give them.

    Raises:
        ConfigError: it cannot be built.
    """
    base = kind()
    overrides = {key: of for key, of in wanted.items() if key in kind.given or not _same(_held(base, key), of)}
    while True:
        overrides = {key: overrides[key] for key in _ordered(kind, overrides)}
        try:
            config = parse_overrides(kind, [f"{key}={as_text(value)}" for key, value in overrides.items()])
        except UserError as error:
            key = next((each for each in origin if str(error).startswith((f"{each}=", f"{each}:"))), None)
            from_ = f"{origin[key]} becomes " if key is not None else "what the launch becomes is refused: "
            raise ConfigError(f"{from_}{error}") from error
        # A key may set others: clip_ratio also sets clip_ratio_low.
        missing = [key for key, of in wanted.items() if key not in overrides and not _same(_held(config, key), of)]
        if not missing:
            return config, overrides
        overrides |= {key: wanted[key] for key in missing}


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
        is_null = value in ("", "~", "null", "Null", "NULL", "None")
        return json.dumps(value) if is_null or value[:1] in ("'", '"') else value
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
