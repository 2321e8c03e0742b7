"""Pickles services and stages for their actors, functions of pipeline files included."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from dataflow.graph import Hosted, Stage
from dataflow.usercode.pickling import dumps


def pickled(spec: Hosted, stages: Mapping[str, Stage]) -> bytes:
    """Pickles a service and its stages.

    Functions of modules that only this process can import, such as a pipeline file loaded from its path, are pickled
    by value.
    """
    import cloudpickle  # type: ignore[import-untyped]

    names = {getattr(f, "__module__", None) for f in (spec.factory, *(s.fn for s in stages.values()))}
    mine = [sys.modules[name] for name in sorted(filter(None, names)) if name in sys.modules]
    registered = cloudpickle.list_registry_pickle_by_value()
    loose = [m for m in mine if not _importable(m) and m.__name__ not in registered]
    for module in loose:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps((spec, stages))
    finally:
        for module in loose:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether an import of the module's name finds its file; cloudpickle pickles ``__main__`` by value anyway."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return True
    where: Sequence[str] | None = None
    found = None
    parts = module.__name__.split(".")
    for n in range(1, len(parts) + 1):
        found = _found(".".join(parts[:n]), where)
        if found is None:
            return False
        where = list(found.submodule_search_locations or ())
    return found is not None and found.origin == file


def _found(name: str, where: Sequence[str] | None) -> ModuleSpec | None:
    """Returns what an import of a name finds, by all finders: that of an editable install is none of the path's."""
    specs = (finder.find_spec(name, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)
