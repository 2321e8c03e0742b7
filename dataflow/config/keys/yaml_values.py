"""YAML for configurations: numbers are decimal, and a duplicate key is an error.

YAML 1.1 reads 010 as 8, 0x10 as 16, 1:40 as 100 and 2024-01-01 as a date; a configuration means none of these.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_OTHERS = (_INT, _FLOAT, "tag:yaml.org,2002:timestamp")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - as yaml declares it
        first: [(tag, pattern) for tag, pattern in of if tag not in _OTHERS]
        for first, of in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

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
        if self.check_event(yaml.AliasEvent):
            # A few lines of nested aliases can expand to more values than fit in memory.
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not read; write the value out", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_number(self, node: yaml.ScalarNode) -> int:
        return int(str(self.construct_scalar(node)).replace("_", ""))


_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_Loader.add_constructor(_INT, _Loader.construct_number)


def load(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises:
        ValueError: it is not YAML, has a duplicate key or nests too deeply; the message is part of a sentence.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it holds a character that YAML does not take"
        raise ValueError(problem + (f" (line {mark.line + 1})" if mark and "\n" in text.strip() else "")) from error
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
