"""The documentation site has every page in its nav, and its generators name every section, key and command."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import dataflow
from dataflow.config.keys.overrides import fields
from dataflow.config.run import RunConfig
from dataflow.planning.config import PlanConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generated() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generated"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["generated"]


@pytest.fixture(scope="module")
def pages(generated: ModuleType) -> dict[str, str]:
    return generated.pages()


def nav() -> list[str]:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, tag, node: None)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from walk(each)

    return list(walk(settings["nav"]))


def test_each_page_stands_in_the_nav_and_each_entry_exists(generated: ModuleType, pages: dict[str, str]) -> None:
    entries = nav()
    assert len(entries) == len(set(entries))
    entries += [f"decisions/{name}" for name in re.findall(r"\]\((.*?)\)", pages["decisions/index.md"])]
    made = {page for page in pages if not page.startswith("source/")}
    assert set(entries) == made | set(generated.handwritten())


def test_links_of_all_pages_lead_to_pages_or_files(generated: ModuleType, pages: dict[str, str]) -> None:
    texts = dict(pages)
    for path in generated.handwritten():
        texts[path] = generated.relinked((ROOT / "docs" / path).read_text(encoding="utf-8"), f"docs/{path}", path)
    for page, text in texts.items():
        prose = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#\s]+)", prose):
            if "://" not in link:
                inside = os.path.normpath(Path(page).parent / link)
                assert inside in texts or (ROOT / "docs" / inside).is_file(), (page, link)


def test_the_configuration_has_every_key(pages: dict[str, str]) -> None:
    for cls, page in ((RunConfig, "configuration"), (PlanConfig, "plan_keys")):
        text = pages[f"reference/{page}.md"]
        for path, info in fields(cls):
            assert f"`{'.'.join(path)}`" in text, path
            assert info.description or "##" in text
    text = pages["reference/configuration.md"]
    assert "`reward.models.NAME.path` | " in text
    assert "Of [pipelines/ppo_critic.py](../source/pipelines/ppo_critic.py.md)" in text


def test_the_commands_and_the_public_names_are_all_there(pages: dict[str, str]) -> None:
    for name in ("run", "resume", "export", "init", "doctor", "show", "plan", "timeline", "samples", "compare"):
        assert f"\n## dataflow {name}\n" in pages["reference/commands.md"]
        assert f"example: dataflow {name} " in pages["reference/commands.md"]
    for name in dataflow.__all__:
        assert f"dataflow.{name}\n" in pages["reference/api.md"] or f"`{name}`" in pages["reference/api.md"]


def test_the_snippets_of_the_concepts_run_and_print_what_they_say() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(snippet, names)
        for expression, value in re.findall(r"^(\S.*?)  # -> (.*)$", snippet, re.MULTILINE):
            assert str(eval(expression, names)) == value
    assert f"```text\n{names['pipeline'].explain().rstrip()}\n```" in text
