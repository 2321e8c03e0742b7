"""YAML as all of the package reads and writes it: 1.1, but ``1e-5`` is a number, and a key given twice an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # with libyaml ten times as fast


class _Loader(_Base):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:  # only one value would count
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key '{key.value}' is given twice; give it once", key.start_mark
                    )
                seen.add(key.value)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


class _Dumper(yaml.SafeDumper):
    """Quotes each text that this reader or another one of YAML 1.1 takes for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def load(text: str) -> Any:
    """Returns the value of a YAML text; a key may not be given twice. A ValueError's message is part of a sentence."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" (line {mark.line + 1})" if mark and "\n" in text.strip() else ""
        raise ValueError(f"{problem or 'it holds a character that YAML does not take'}{where}") from error


def dump(values: Any) -> str:
    """Returns values as YAML of a file: lines of ``key: value``, in the order of the values."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def inline(value: Any) -> str:
    """Returns a value as YAML in one line, as it is written behind ``key=``.

    >>> inline(1e-6), inline(["a", "1e5"]), inline({"b": None})
    ('1.0e-06', "[a, '1e5']", '{b: null}')
    """
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")
