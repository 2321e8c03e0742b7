"""If a module of an extra is missing, the error names the extra, however deep it was raised."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import dataflow
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError
from dataflow.running.preparing.preparation import check_packages
from dataflow.system import extras
from dataflow.system.extras import EXTRAS, missing_extra, required


def raised(name: str) -> Exception:
    try:
        try:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        except ModuleNotFoundError as error:
            raise ConfigError("pipeline file 'x.py' cannot be loaded") from error
    except ConfigError as error:
        return error


def test_only_what_is_missing_and_of_an_extra_counts(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    assert missing_extra(raised("torch.nn")) == (
        "this needs torch, which is not installed; pip install 'dataflow-rl[cpu]', or with GPUs 'dataflow-rl[gpu]'."
    )
    assert "pip install 'dataflow-rl[http]'." in (missing_extra(raised("aiohttp")) or "")
    assert missing_extra(raised("my_helpers")) is None
    assert missing_extra(ConfigError("something else")) is None
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: object())
    assert missing_extra(raised("torch")) is None


def imported() -> set[str]:
    """Returns the modules of other packages that ours imports anywhere, without those of its helpers for tests."""
    found: set[str] = set()
    root = Path(dataflow.__file__).parent
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] == "testing":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found |= {name.partition(".")[0] for name in names}
    return found - sys.stdlib_module_names - {"dataflow"}


@pytest.mark.slow
def test_each_module_that_the_base_lacks_belongs_to_an_extra() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name, maxsplit=1)[0]).lower()

    base, more = set[str](), {plain(each.name) for each in required("") or pytest.skip("runs from its sources")}
    while more:
        base |= more
        asked = [line for name in more for line in importlib.metadata.requires(name) or ()]
        more = {plain(line) for line in asked if ";" not in line} - base
    packages = importlib.metadata.packages_distributions()
    lacking = {name for name in imported() if not base & {plain(each) for each in packages.get(name, ())}}
    assert lacking <= set(EXTRAS)


def test_another_version_than_is_required_is_named_with_what_installs_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        "numpy>=2",
        "verl==0.9.1; extra == 'train'",
        "ray>=2; extra == 'train'",
        "dataflow-rl[train]; extra == 'cpu'",
    ]
    monkeypatch.setattr(extras.importlib.metadata, "requires", lambda package: lines)
    monkeypatch.setattr(extras, "version_of", {"numpy": "1.26", "verl": "0.5.0", "ray": "2.60.0"}.get)
    assert extras.mismatched("train") == (
        "verl 0.5.0 (needs ==0.9.1): another version than was tested; pip install 'dataflow-rl[cpu]', or with GPUs "
        "'dataflow-rl[gpu]'."
    )
    assert extras.mismatched("") == "numpy 1.26 (needs >=2): another version than was tested; pip install dataflow-rl."
    with pytest.raises(ConfigError, match=r"^verl 0\.5\.0 "):
        check_packages(RunConfig())
    monkeypatch.setattr(extras, "version_of", {"ray": "2.60.0"}.get)
    assert extras.mismatched("train") is None, "what is missing has an error of its own"
