"""YAML for configurations: numbers are decimal, and a duplicate key is an error.

YAML 1.1 reads 010 as 8, 0x10 as 16, 1:40 as 100 and 2024-01-01 as a date; a configuration means none of these. All
files that a user writes and all ``key=value`` arguments are read here; what is written here reads back as it was, by
this reader and by others of YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

DEEPEST = 50
"""Levels of nested lists and mappings; a configuration has less than ten."""
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_DATE = "tag:yaml.org,2002:timestamp"
_INTS = re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789")
_FLOATS = (
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def _without(*tags: str) -> dict[str, Any]:
    """Returns the rules of YAML 1.1 on what a plain scalar is, without those for some types."""
    return {
        first: [(tag, pattern) for tag, pattern in of if tag not in tags]
        for first, of in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Guarded(yaml.SafeLoader):
    """YAML that reads in a time and a depth that its length bounds, and loses nothing."""

    _depth = 0

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            # A few lines of nested aliases can expand to more values than fit in memory.
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not read; write the value out", mark)
        if self._depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"it nests too deep, over {DEEPEST} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Loader(_Guarded):
    """Decimal numbers, and no dates."""

    yaml_implicit_resolvers = _without(_INT, _FLOAT, _DATE)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        return int(str(self.construct_scalar(node)).replace("_", ""))


class _HydraLoader(_Guarded):
    """The types that Hydra and OmegaConf read: those of YAML 1.1, and 1e5 is a number, and no dates."""

    yaml_implicit_resolvers = _without(_DATE)


class _Dumper(yaml.SafeDumper):
    """Quotes each text that this reader or one of YAML 1.1 would take for something else."""

    yaml_implicit_resolvers = _without()

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(_INT, *_INTS)
for _each in (_Loader, _HydraLoader, _Dumper):
    _each.add_implicit_resolver(_FLOAT, *_FLOATS)
_Loader.add_constructor(_INT, _Loader.construct_number)


def load(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises:
        ValueError: it is not YAML, has a duplicate key or an alias, or nests too deeply; the message is part of a
            sentence.
    """
    return _read(text, _Loader)


def load_hydra(text: str) -> Any:
    """Returns the value of a text with the types that Hydra reads; raises as :func:`load` does."""
    return _read(text, _HydraLoader)


def _read(text: str, loader: type[_Guarded]) -> Any:
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it holds a character that YAML does not take"
        if problem.startswith("but "):
            problem = f"{getattr(error, 'context', None)}, {problem}"
        raise ValueError(problem + (f" (line {mark.line + 1})" if mark and "\n" in text.strip() else "")) from error


def dump(values: Any) -> str:
    """Returns values as YAML of a file: lines of ``key: value``, in the order of the values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def inline(value: Any) -> str:
    """Returns a value as YAML in one line, as it is written behind ``key=``.

    >>> inline(1e-6), inline(["a", "1e5"]), inline({"b": None})
    ('1.0e-06', "[a, '1e5']", '{b: null}')
    """
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")
