"""Overrides: ``key=value`` arguments over a file over a pipeline's defaults, and sentences about what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dataflow.config.keys import yaml_values
from dataflow.config.keys.nested import flat
from dataflow.errors import ConfigError, alike, nearest
from dataflow.system.secrets import keep_secrets, redact

T = TypeVar("T", bound=BaseModel)
_SHOWN = 120


def parse_overrides(cls: type[T], args: Sequence[str], base: Mapping[str, Any] | None = None) -> T:
    """Returns a configuration with the defaults of ``cls``, overridden by ``key=value`` arguments, the later by each.

    Args:
        cls: the pipeline's Config.
        args: such as ``policy=both``, ``trainer.lr=1e-4``, ``tracking.backends=[tensorboard,wandb]``; values are YAML,
            except that a key for text takes the value unchanged.
        base: values from a file, which override the defaults and are overridden by the arguments.

    Raises:
        ConfigError: one sentence that names key and value, and the nearest valid key.
        PolicyError: the policy does not exist or does not fit the batch.
    """
    given = _laid_over(cls, {}, base or {})
    for arg in args:
        key, equals, raw = (part.strip() for part in arg.partition("="))
        if not (key and equals):
            raise ConfigError(f"argument '{redact(arg)}' is not key=value; write it so, such as steps=5.")
        path = key.split(".")
        value: Any = _value(cls, key, raw)
        for name in reversed(path):
            value = {name: value}
        given = _laid_over(cls, given, value)
    keep_secrets(given)
    try:
        built = cls.model_validate(_laid_over(cls, _defaults(cls), given))
    except ValidationError as error:
        raise ConfigError(_sentence(cls, error)) from error
    vars(built)["given_keys"] = frozenset(key for key, _value in flat(given))
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
            default = default_of(cls, path)
            default = list(default) if isinstance(default, tuple) else default
            rows.append((f"{'.'.join(path)}={yaml_values.inline(default)}", doc))
    wide = max(len(left) for left, doc in rows if doc)
    return "\n".join(f"{left:<{wide}}  {doc}".rstrip() for left, doc in rows).strip("\n")


def fields(cls: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yields (path, field) of every key and section: plain keys first, then each section with its keys."""
    for name, info in sorted(cls.model_fields.items(), key=lambda item: section_of(item[1]) is not None):
        yield (*prefix, name), info
        if (section := section_of(info)) is not None:
            yield from fields(section, (*prefix, name))


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of a field that is a section; None of a plain key."""
    return _section(info.annotation)


def default_of(cls: type[BaseModel], path: tuple[str, ...]) -> Any:
    """Returns the default of a key by its path."""
    value: Any = cls.model_fields[path[0]].get_default(call_default_factory=True)
    for name in path[1:]:
        value = getattr(value, name, None)
    return value


def refusal(cls: type[BaseModel], key: str) -> str | None:
    """Returns a sentence that suggests another key if a configuration has no such key or section; else None."""
    return _unknown(cls, key) if _annotation(cls, key.split(".")) is None else None


def shortened(value: object) -> str:
    """Returns a value to show in a message: without secrets, and only its beginning if it is long."""
    text = redact(str(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def kinds_of(annotation: Any) -> Iterator[Any]:
    """Yields the types that a key takes: the members of a union, without what annotates them."""
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from kinds_of(each)
    elif get_origin(annotation) is Annotated:
        yield from kinds_of(get_args(annotation)[0])
    else:
        yield annotation


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = kinds_of(annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _annotation(at: Any, path: Sequence[str]) -> Any:
    """Returns the type of the key at a path below a section or a mapping; None if there is no such key."""
    if not path:
        return at
    name, *rest = path
    if (section := _section(at)) is not None:
        info = section.model_fields.get(name)
        return None if info is None else _annotation(info.annotation, rest)
    inner = next((get_args(kind)[1] for kind in kinds_of(at) if get_origin(kind) is dict), None)
    return _annotation(inner, rest) if _section(inner) is not None else inner  # other mappings may be of any depth


def _value(cls: type[BaseModel], key: str, raw: str) -> Any:
    """Returns the value of an argument: parsed as YAML, but unchanged for a key that takes a text."""
    annotation = _annotation(cls, key.split("."))
    if annotation is None:
        raise ConfigError(_unknown(cls, key))
    kinds = list(kinds_of(annotation))
    if NoneType in kinds and raw in ("", "~", "null", "None"):
        return None
    origins, section = {get_origin(kind) for kind in kinds}, _section(annotation)
    text = str in kinds or Literal in origins or (section is not None and _shorthand(section))
    if text and raw[:1] not in ("'", '"') and not (raw[:1] in ("[", "{") and (section is not None or list in origins)):
        return raw
    try:
        return yaml_values.load(raw)
    except ValueError as error:
        raise ConfigError(f"{key}={shortened(raw)}: it is not YAML ({error}); put quotes around a text.") from error


def _shorthand(section: type[BaseModel]) -> str | None:
    return getattr(section, "shorthand", None)


def _laid_over(at: Any, below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested values laid over others, key by key; a plain value of a section is that of its shorthand.

    Args:
        at: type of the section or mapping.
        below: values that are overridden.
        above: values that override them.
    """
    merged = dict(below) if isinstance(below, Mapping) else {}
    for name, value in above.items():
        annotation = _annotation(at, [str(name)])
        section = _section(annotation)
        if section is not None and isinstance(value, str) and (short := _shorthand(section)):
            value = {short: value}
        elif section is not None and value is None and NoneType not in kinds_of(annotation):
            value = {}  # a section that is named in a file and holds nothing
        merged[name] = _laid_over(annotation, merged.get(name), value) if isinstance(value, Mapping) else value
    return merged


def _defaults(cls: type[BaseModel]) -> dict[str, Any]:
    """Returns what a pipeline's Config sets in its sections, which given values override key by key."""
    made = {name: info.get_default(call_default_factory=True) for name, info in cls.model_fields.items()}
    return {name: found for name, value in made.items() if isinstance(value, BaseModel) and (found := _set_in(value))}


def _set_in(section: BaseModel) -> dict[str, Any]:
    values = section.model_dump(exclude_unset=True)
    for name in type(section).model_fields:
        if isinstance(inner := getattr(section, name), BaseModel):
            values[name] = _set_in(inner)
    return {name: value for name, value in values.items() if value != {}}


def _sentence(cls: type[BaseModel], error: ValidationError) -> str:
    """Returns one sentence about the first error: pydantic's, with the key and a hint."""
    first = error.errors(include_url=False)[0]
    path, unknown = list[str](), ("extra_forbidden", "invalid_key")
    for part in map(str, first["loc"]):  # it also has positions in lists and members of unions
        if _annotation(cls, [*path, part]) is not None or first["type"] in unknown:
            path.append(part)
    key, given, why = ".".join(path), first["input"], first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] in unknown:
        return _unknown(cls, key)
    if first["type"] == "model_type" and (section := _section(_annotation(cls, path))) is not None:
        names = ", ".join(f"{key}.{name}" for name in section.model_fields)
        return f"{key}={shortened(given)}: '{key}' is a section; set one of its keys: {names}."
    pair = next((kind for kind in kinds_of(_annotation(cls, path)) if get_origin(kind) is tuple), None)
    if pair is not None and first["type"] in ("missing", "tuple_type", "too_long"):
        default = yaml_values.inline(list(default_of(cls, tuple(path))))
        return f"{key}: give a list of {len(get_args(pair))} values, such as {default}."
    if first["type"] == "missing" or (first["type"] == "value_error" and isinstance(given, Mapping)):
        return f"{why if why.startswith(key) else f'{key}: {why}'}."
    why = re.sub("^Input should be (greater|less)", r"give a number \1", why).replace("Input should be", "give")
    hint = nearest(str(given), re.findall("'(.*?)'", why)) if first["type"] == "literal_error" else ""
    return f"{key}={shortened(given)}: {why}{hint or '.'}"


def _unknown(cls: type[BaseModel], key: str) -> str:
    """Returns a sentence about an unknown key: what another program's is called here, or which key was meant."""
    elsewhere = getattr(cls, "elsewhere", lambda key: None)
    head, keys = f"unknown key '{shortened(key)}'", [".".join(path) for path, _info in fields(cls)]
    if (message := elsewhere(key)) is not None:  # before it is taken for a misspelt key of another meaning
        return f"{head}; {message}"
    section, _, leaf = key.lstrip("+~-").lower().replace("-", "_").replace("/", ".").rpartition(".")
    inner = _section(_annotation(cls, section.split("."))) if section else None
    beside = list(inner.model_fields) if inner is not None else []
    found = leaf if leaf in beside or (not section and leaf in keys) else alike(leaf, beside)
    if found is not None:
        return f"{head}; did you mean '{f'{section}.{found}' if section else found}'?"
    if section in keys and inner is None:
        return f"{head}; did you mean '{section}'?"
    leaves: dict[str, list[str]] = {}
    for each in keys:
        leaves.setdefault(each.rpartition(".")[2], []).append(each)
    # A short name is like some key of any configuration; those beside it say more.
    close = leaf if leaf in leaves else alike(leaf, leaves) if len(leaf) > (3 if beside else 2) else None
    if close is not None:
        one, *more = leaves[close] if close == leaf else leaves[close][:1]
        return f"{head}; did you mean {f'one of {one}, ' + ', '.join(more) if more else repr(one)}?"
    what, names = (f"keys of '{section}'", beside) if beside else ("keys and sections", list(cls.model_fields))
    return f"{head}; {what}: {', '.join(names)}."
