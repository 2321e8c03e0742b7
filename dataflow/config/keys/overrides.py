"""Overrides: ``key=value`` arguments with dots, which replace a configuration's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dataflow.config.keys import suggestions, yaml_values
from dataflow.config.keys.nested import flat
from dataflow.errors import ConfigError, UserError, nearest
from dataflow.system.secrets import keep_secrets, redact
from dataflow.usercode.failures import is_interrupt, message_of

T = TypeVar("T", bound=BaseModel)

# The fix in the message for each of pydantic's types of error.
WANTED = {
    "bool": "give true or false",
    "dict": "give a mapping, {key: value}",
    "finite": "give a finite number",
    "float": "give a number",
    "int": "give a whole number",
    "list": "give a list, [a,b]",
    "string": "give a text",
    "tuple": "give a list, [a,b]",
}
_FIXES = {"twice": "; give it once", "aliases": "", "nests": "; give fewer"}
"""The fix for a part of what :mod:`yaml_values` says about a value."""
_SHOWN = 120
BOUNDS = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}


def parse_overrides(cls: type[T], args: Sequence[str], base: Mapping[str, Any] | None = None) -> T:
    """Returns a configuration with the defaults of ``cls``, overridden by ``key=value`` arguments, the later by each.

    Args:
        cls: the pipeline's Config.
        args: such as ``policy=both``, ``trainer.lr=1e-4``, ``tracking.backends=[tensorboard,wandb]``; values
            are YAML scalars and lists, except that a key for text takes the value unchanged.
        base: values from a file, which override the defaults and are overridden by the arguments.

    Raises:
        ConfigError: one sentence that names key and value, and the nearest valid key.
        PolicyError: the policy does not exist or does not fit the batch.
    """
    given: dict[str, str] = {}
    values: dict[str, Any] = {}
    replaced: dict[str, str] = {}
    for arg in args:
        key, equals, raw = arg.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"argument '{redact(arg)}' has no '='; write key=value, such as steps=5.")
        if not key:
            raise ConfigError(f"argument '{arg}' has no key before '='; write key=value.")
        for path, value in _settings(cls, key, raw.strip()):
            dotted = ".".join(path)
            for other in [each for each in given if f"{each}.".startswith(f"{dotted}.")]:
                replaced[given.pop(other)] = arg
            given[dotted] = arg
            at = values
            for name in path[:-1]:
                if not isinstance(at.get(name), dict):
                    at[name] = {}
                at = at[name]
            at[path[-1]] = value
    typed = {key: arg.partition("=")[2].strip() for key, arg in given.items()}
    built = build(cls, _laid_over(expanded(cls, base or {}), values), typed)
    vars(built)["replaced"] = tuple(f"{new} in place of {old}" for old, new in replaced.items() if old != new)
    return built


def _laid_over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in values.items():
        below = base.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _laid_over(below, value) if both else value  # type: ignore[arg-type]
    return merged


def expanded(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested values with plain ones of sections (``policy: both``) under the keys that they set.

    A section that is named and holds nothing (``reward:``) has its defaults.
    """
    found = dict(values)
    for name, info in cls.model_fields.items():
        value, section, short = values.get(name), section_of(info), _shorthand(info)
        if section is not None and isinstance(value, Mapping):
            found[name] = expanded(section, value)
        elif section is not None and value is None and not accepts(info.annotation, type(None)):
            found.pop(name, None)
        elif short is not None and isinstance(value, str):
            found[name] = {short: value}
    return found


def build(cls: type[T], values: Mapping[str, Any], typed: Mapping[str, str] | None = None) -> T:
    """Returns ``cls`` built from nested values.

    Args:
        cls: the pipeline's Config.
        values: sections as mappings, as in a run's ``config.yaml``.
        typed: values as the user wrote them, by dotted key, for the message.

    Raises:
        ConfigError: one sentence about the first invalid value.
    """
    keep_secrets(values)
    try:
        # The defaults of a pipeline's Config may be whole sections; given values override them key by key.
        built: object = cls.model_validate(_over_defaults(cls, values))
    except ValidationError as error:
        raise ConfigError(_sentence(cls, error, typed or {})) from error
    except UserError:
        raise
    # A validator of the pipeline's own Config may raise any exception.
    except BaseException as error:
        if is_interrupt(error):
            raise
        message = message_of(error).rstrip(".")
        raise ConfigError(
            f"the configuration {cls.__name__} cannot be built: {type(error).__name__}"
            f"{f': {message}' if message else ''}."
        ) from error
    if not isinstance(built, cls):
        raise ConfigError(
            f"the configuration {cls.__name__} cannot be built: a validator of the whole class returned "
            f"{type(built).__name__} in place of it; return self."
        )
    vars(built)["given_keys"] = frozenset(key for key, _value in flat(values))
    return built


def describe(cls: type[BaseModel]) -> str:
    """Returns a line for each key of a configuration: its name, default and meaning."""
    rows: list[tuple[str, str]] = []
    for path, info in fields(cls):
        doc = " ".join((info.description or "").split())
        if (section := section_of(info)) is not None:
            rows.append(("", ""))
            rows.append((f"# {'.'.join(path)}: {' '.join((section.__doc__ or '').split())}", ""))
        else:
            rows.append((f"{'.'.join(path)}={yaml_values.inline(_plain(default_of(cls, path)))}", doc))
    wide = max(len(left) for left, doc in rows if doc)
    return "\n".join(f"{left:<{wide}}  {doc}".rstrip() for left, doc in rows).strip("\n")


def fields(cls: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yields (path, field) of every key and section: plain keys first, then each section with its keys."""
    for name, info in sorted(cls.model_fields.items(), key=lambda item: section_of(item[1]) is not None):
        yield (*prefix, name), info
        if (section := section_of(info)) is not None:
            yield from fields(section, (*prefix, name))


def accepts(annotation: Any, *types: type) -> bool:
    """Whether a field of that type takes values of one of ``types`` (a Literal: of its members' type)."""
    if annotation in types or get_origin(annotation) in types or annotation is Any:
        return True
    return any(arg in types or type(arg) in types or accepts(arg, *types) for arg in get_args(annotation))


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of a field that is a section; None of a plain key."""
    if accepts(info.annotation, dict):
        return None  # sections with names chosen by the user, given as one mapping
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def named_section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of the sections in a field's mapping, whose names a user chooses; None of any other field."""
    if section_of(info) is not None:
        return None
    kinds = get_args(info.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _keys(cls: type[BaseModel]) -> list[str]:
    return [".".join(path) for path, info in fields(cls) if section_of(info) is None or _shorthand(info)]


def _keys_below(cls: type[BaseModel], key: str) -> list[str]:
    """Returns the keys of the section that a user has named (``reward.models.rm``), if ``key`` is in one."""
    info, rest = _find(cls, tuple(key.split(".")))
    kind = None if info is None or len(rest) < 2 else named_section_of(info)
    if kind is None:
        return []
    name = ".".join(key.split(".")[: -len(rest) + 1])
    return [f"{name}.{'.'.join(path)}" for path, _info in fields(kind)]


def _section_at(cls: type[BaseModel], key: str) -> type[BaseModel] | None:
    info, rest = _find(cls, tuple(key.split(".")))
    return None if info is None else named_section_of(info) if rest else section_of(info)


def _shorthand(info: FieldInfo) -> str | None:
    return getattr(section_of(info), "shorthand", None)


def _settings(cls: type[BaseModel], key: str, raw: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, value) of each key that an argument sets; a section may be given as a mapping."""
    path = tuple(key.split("."))
    info, rest = _find(cls, path)
    if info is None:
        raise ConfigError(_unknown(cls, key))
    section = section_of(info)
    if section is None:
        yield path, _value(key, raw, info if not rest else None, _is_text_in(info, rest) and not raw.startswith("{"))
        return
    value = _yaml(key, raw) if raw.startswith("{") else raw
    if isinstance(value, dict):
        for name, inner in value.items():
            text = inner if isinstance(inner, str) else yaml_values.inline(inner)
            yield from _settings(cls, f"{key}.{name}", text.strip())
    elif short := _shorthand(info):
        yield from _settings(cls, f"{key}.{short}", raw)
    else:
        raise ConfigError(_not_a_section(key, raw, section))


def _not_a_section(key: str, value: object, section: type[BaseModel]) -> str:
    names = ", ".join(f"{key}.{name}" for name in section.model_fields)
    return f"{key}={shortened(value)}: '{key}' is a section; set one of its keys: {names}."


def _find(cls: type[BaseModel], path: tuple[str, ...]) -> tuple[FieldInfo | None, tuple[str, ...]]:
    """Returns the field of a path, and the rest of the path, inside the field's mapping (``alpha`` of kwargs)."""
    info = cls.model_fields.get(path[0])
    if info is None or len(path) == 1:
        return info, ()
    section = section_of(info)
    if section is not None:
        return _find(section, path[1:])
    return (info, path[1:]) if accepts(info.annotation, dict) and all(path) else (None, ())


def refusal(cls: type[BaseModel], key: str) -> str | None:
    """Returns a sentence that suggests another key if a configuration has no such key or section; else None."""
    return _unknown(cls, key) if _find(cls, tuple(key.split(".")))[0] is None else None


def _unknown(cls: type[BaseModel], key: str) -> str:
    keys = [*_keys(cls), *_keys_below(cls, key)]
    elsewhere = getattr(cls, "elsewhere", lambda key, exactly=False: None)
    return suggestions.unknown(key, keys, list(cls.model_fields), elsewhere)


def shortened(value: object) -> str:
    """Returns a value to show in a message: without secrets, and only its beginning if it is long."""
    text = redact(str(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _yaml(key: str, raw: str) -> Any:
    try:
        return yaml_values.load(raw)
    except ValueError as error:
        message = str(error)
        fix = next((fix for part, fix in _FIXES.items() if part in message), None)
        why = "the value is not YAML; put quotes around a text" if fix is None else f"{message}{fix}"
        raise ConfigError(f"{key}={shortened(raw)}: {why}.") from error


def _is_text_in(info: FieldInfo | None, rest: tuple[str, ...]) -> bool:
    """Whether a key inside a field's mapping is an entry of a mapping of texts, such as a label."""
    if info is None or not rest:
        return False
    if (section := named_section_of(info)) is not None:
        return _is_text_in(section.model_fields.get(rest[1]), rest[2:]) if len(rest) > 1 else False
    return get_origin(info.annotation) is dict and get_args(get_args(info.annotation)[1])[:1] == (str,)


def _value(key: str, raw: str, info: FieldInfo | None, text: bool = False) -> Any:
    """Returns the value of an argument: parsed as YAML, except for keys that take ``text``."""
    text = text or (info is not None and accepts(info.annotation, str) and not accepts(info.annotation, list, dict))
    # A key that takes a text or several, as [a,b].
    text = text or (info is not None and _is_text_or_list(info.annotation) and not raw.startswith("["))
    if not text or raw[:1] in ("'", '"'):
        value = _yaml(key, raw)
    else:
        value = None if raw in ("", "~", "null", "Null", "NULL") else raw
    optional = info is not None and accepts(info.annotation, type(None))
    return None if value == "None" and optional else value


def _is_text_or_list(annotation: Any) -> bool:
    kinds = get_args(annotation) if isinstance(annotation, UnionType) or get_origin(annotation) is Union else ()
    texts = (kind is str or (get_origin(kind) is not list and get_args(kind)[:1] == (str,)) for kind in kinds)
    return any(texts) and accepts(annotation, list)


def _over_defaults(
    cls: type[BaseModel], values: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns nested values with the defaults of ``cls`` where none is given.

    Args:
        own: the defaults of this section where the one around it has others than ``cls``.
    """
    merged = {**(own or {}), **values}
    for name, value in values.items():
        info = cls.model_fields.get(name)
        section = section_of(info) if info is not None else None
        if info is None or section is None or not isinstance(value, Mapping):
            continue
        if own is None or name not in own:
            default = info.get_default(call_default_factory=True)
            below = default.model_dump(exclude_unset=True) if isinstance(default, BaseModel) else {}
        else:
            below = own[name] if isinstance(own[name], Mapping) else {}
        merged[name] = _over_defaults(section, value, below)
    return merged


def default_of(cls: type[BaseModel], path: tuple[str, ...]) -> Any:
    """Returns the default of a key by its path."""
    value: Any = cls.model_fields[path[0]].get_default(call_default_factory=True)
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_key(part: int | str) -> bool:
    """Whether a part of pydantic's place of an error is a key, not a position or a type of a union."""
    return isinstance(part, str) and part.isidentifier() and part not in ("int", "float", "str", "bool")


def _sentence(cls: type[BaseModel], error: ValidationError, typed: Mapping[str, str]) -> str:
    """Returns one sentence about the first error."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"] if _is_key(part))
    kind, context = first["type"], first.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):  # the key may be none that could be typed: 1, a-b
        *sections, name = first["loc"]
        return _unknown(cls, ".".join([*(str(part) for part in sections if _is_key(part)), str(name)]))
    if kind == "model_type" and (section := _section_at(cls, key)) is not None:
        return _not_a_section(key, first["input"], section)
    shown = shortened(typed.get(key, first["input"]))
    bound = next((name for name in BOUNDS if name in context), None)
    if kind == "missing" and key not in typed:
        return f"key '{key}' has no default; give {key}=..."
    if kind == "value_error":
        wanted = str(context["error"])
        if isinstance(first["input"], Mapping) and key not in typed:  # a rule of a section; the message names its keys
            return f"{wanted if wanted.startswith(key) else f'{key}: {wanted}'}."
    elif kind == "literal_error":
        expected = context["expected"].replace("'", "")
        guess = nearest(str(first["input"]), expected.replace(" or ", ", ").split(", "))
        wanted = f"give {expected}" + (f" ({guess.removeprefix('; ')})" if guess else "")
    elif bound:
        limit = context[bound]
        wanted = f"give a number {BOUNDS[bound]} {limit if isinstance(limit, int) else f'{limit:g}'}"
    elif first["loc"][-1] == "[key]":
        wanted = f"the name {first['input']!r} is no text; begin it with a letter"
    elif kind == "string_too_short":
        wanted = "give a text that is not empty"
    elif kind in ("too_long", "too_short", "missing"):
        wanted = "give a list of the right length"
    else:
        wanted = WANTED.get(kind.partition("_")[0], first["msg"][:1].lower() + first["msg"][1:])
        if kind == "string_type" and key not in typed:  # in a file, where 0123 is a number
            wanted += " in quotes"
    return f"{key}={shown}: {wanted}."
