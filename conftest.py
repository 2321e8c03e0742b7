"""Which files pytest need not read: importing them takes longer than the tests that are asked for."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

# A file of which every test is heavy.
HEAVY = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.heavy", re.MULTILINE)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for no examples in the docstrings of tests: ``--doctest-modules`` would read each file twice."""
    found = yield
    return [each for each in found if not (file_path.name.startswith("test_") and isinstance(each, DoctestModule))]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules without examples, and where no heavy test is to run, files that have only such."""
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    if not collection_path.name.startswith("test_"):
        return True if ">>>" not in text else None
    return True if config.option.markexpr.startswith("not heavy") and HEAVY.search(text) else None
