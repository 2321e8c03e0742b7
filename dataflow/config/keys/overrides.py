"""Overrides: ``key=value`` arguments over a file over a pipeline's defaults, and sentences about what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dataflow.config.keys import yaml_values
from dataflow.config.keys.nested import flat
from dataflow.errors import ConfigError, alike
from dataflow.system.secrets import keep_secrets, redact

T = TypeVar("T", bound=BaseModel)
_SHOWN = 120


def parse_overrides(cls: type[T], args: Sequence[str], base: Mapping[str, Any] | None = None) -> T:
    """Returns a configuration with the defaults of ``cls``, overridden by ``key=value`` arguments, the later by each.

    Args:
        cls: the pipeline's Config.
        args: such as ``policy=both``, ``trainer.lr=1e-4``, ``tracking.backends=[tensorboard,wandb]``; values are YAML,
            except that a key for text takes the value unchanged. A section's value changes the keys that it names; a
            mapping replaces the one before.
        base: values from a file, which override the defaults and are overridden by the arguments.

    Raises:
        ConfigError: one sentence that names key and value, and the nearest valid key.
        PolicyError: the policy does not exist or does not fit the batch.
    """
    # What a pipeline's Config sets in its sections is overridden key by key.
    made = {name: info.get_default(call_default_factory=True) for name, info in cls.model_fields.items()}
    whole = {name: of.model_dump(exclude_unset=True) for name, of in made.items() if isinstance(of, BaseModel)}
    given: dict[str, Any] = {}
    for below in (whole, given):
        _lay_over(cls, below, base or {})
    for arg in args:
        key, equals, raw = (part.strip() for part in arg.partition("="))
        if not (key and equals):
            raise ConfigError(f"argument '{redact(arg)}' is not key=value; write it so, such as steps=5.")
        *path, name = key.split(".")
        value = _value(cls, key, raw)
        for below in (whole, given):
            at, inside = cls, below
            for each in path:
                held = inside.get(each)
                inside[each] = dict(held) if isinstance(held, Mapping) else {}
                at, inside = _annotation(at, [each]), inside[each]
            _lay_over(at, inside, {name: value})
    keep_secrets(given)
    try:
        built = cls.model_validate(whole)
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


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yields the types that a key takes: the members of a union, without what annotates them."""
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def _section(annotation: Any) -> type[BaseModel] | None:
    return next((kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _annotation(at: Any, path: Sequence[str]) -> Any:
    """Returns the type of the key at a path below a section or a mapping; None if there is no such key."""
    if not path:
        return at
    name, *rest = path
    if (section := _section(at)) is not None:
        info = section.model_fields.get(name)
        return None if info is None else _annotation(info.annotation, rest)
    inner = next((get_args(kind)[1] for kind in _kinds(at) if get_origin(kind) is dict), None)
    return _annotation(inner, rest) if _section(inner) is not None else inner  # other mappings may be of any depth


def _value(cls: type[BaseModel], key: str, raw: str) -> Any:
    """Returns the value of an argument: parsed as YAML, but unchanged for a key that takes a text."""
    annotation = _annotation(cls, key.split("."))
    if annotation is None:
        raise ConfigError(_unknown(cls, key))
    kinds = list(_kinds(annotation))
    if NoneType in kinds and raw in ("", "~", "null", "None"):
        return None
    origins, section = {get_origin(kind) for kind in kinds}, _section(annotation)
    text = str in kinds or Literal in origins or getattr(section, "shorthand", None)
    if text and raw[:1] not in ("'", '"') and not (raw[:1] in ("[", "{") and (section is not None or list in origins)):
        return raw
    try:
        return yaml_values.load(raw)
    except ValueError as error:
        raise ConfigError(f"{key}={shortened(raw)}: it is not YAML ({error}); put quotes around a text.") from error


def _lay_over(at: Any, below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Lays nested values over ``below``, in place, section by section; a plain text sets a section's shorthand key.

    ``at`` is the type of the section or mapping.
    """
    for name, value in above.items():
        annotation = _annotation(at, [str(name)])
        section = _section(annotation)
        if section is not None and isinstance(value, str) and (short := getattr(section, "shorthand", None)):
            value = {short: value}
        elif section is not None and value is None and NoneType not in _kinds(annotation):
            value = {}  # a section that is named in a file and holds nothing
        named = any(_section(kind) is not None for each in _kinds(annotation) for kind in get_args(each))
        if isinstance(value, Mapping) and (section is not None or named):
            held = below.get(name)
            below[name] = dict(held) if isinstance(held, Mapping) else {}
            _lay_over(annotation, below[name], value)
        else:
            below[name] = value


def _sentence(cls: type[BaseModel], error: ValidationError) -> str:
    """Returns one sentence about the first error: pydantic's, with the key."""
    first = error.errors(include_url=False)[0]
    path, unknown = list[str](), first["type"] == "extra_forbidden"
    for part in map(str, first["loc"]):  # it also has positions in lists and members of unions
        if unknown or _annotation(cls, [*path, part]) is not None:
            path.append(part)
    key, given, why = ".".join(path), first["input"], first["msg"].removeprefix("Value error, ").rstrip(".")
    if unknown:
        return _unknown(cls, key)
    if isinstance(first["loc"][-1], int):
        why = f"item {first['loc'][-1] + 1}: {why}"
    if isinstance(given, Mapping):  # the error is of several keys together, or of one that is missing
        return f"{key}: {why}."
    return f"{key}={shortened(given)}: {why}."


def _unknown(cls: type[BaseModel], key: str) -> str:
    """Returns a sentence about an unknown key: what another program's is called here, or which key was meant."""
    head, keys = f"unknown key '{shortened(key)}'", [".".join(path) for path, _info in fields(cls)]
    elsewhere = getattr(cls, "elsewhere", lambda key: None)
    if (message := elsewhere(key)) is not None:  # before it is taken for a misspelt key of another meaning
        return f"{head}; {message}"
    meant = key.lstrip("+~-").lower().replace("-", "_")
    section, _, leaf = meant.rpartition(".")
    inner = _section(_annotation(cls, section.split("."))) if section else cls
    beside = list(inner.model_fields) if inner is not None else []
    leaves = {each.rpartition(".")[2]: each for each in reversed(keys)}
    if _annotation(cls, meant.split(".")) is not None:
        found: str | None = meant
    elif (name := alike(leaf, beside)) is not None:
        found = f"{section}.{name}" if section else name
    else:  # a short name is like some key of any configuration
        found = leaves.get(leaf) or leaves.get(alike(leaf, leaves) or "" if len(leaf) > 3 else "")
    if found is not None:
        return f"{head}; did you mean '{found}'?"
    what, names = (f"keys of '{section}'", beside) if beside and section else ("keys and sections", cls.model_fields)
    return f"{head}; {what}: {', '.join(names)}."
