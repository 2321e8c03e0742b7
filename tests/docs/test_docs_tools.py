"""docs/tools.md is correct. ``python tests/docs/test_docs_tools.py`` updates the file in it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import parse_overrides
from dataflow.config.tools import ToolsConfig
from dataflow.tools import Toolbox
from dataflow.tools.reader import Hermes

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "tools.md"
TEXT = DOC.read_text(encoding="utf-8") if DOC.exists() else ""
SHOWN = re.compile(r"(\(\.\./examples/tools/(\S+\.py)\)[^`]*?\n```python\n)(.*?)(\n```)", re.DOTALL)
BLOCK = re.compile(r"^```python\n((?:(?!```).)*?)\n```\n\n```text\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line) for line in re.findall(r"^    (dataflow run .*)$", TEXT.replace("\\\n", ""), re.MULTILINE)
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_file_it_shows_is_the_file() -> None:
    shown = {match[2]: match[3] for match in SHOWN.finditer(TEXT)}
    assert shown == {"prices.py": (ROOT / "examples" / "tools" / "prices.py").read_text(encoding="utf-8").strip()}


def test_links_lead_somewhere_and_each_example_is_named() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (DOC.parent / target).exists(), target
    for file in (ROOT / "examples" / "tools").glob("*.py"):
        assert f"examples/tools/{file.name}" in TEXT


@pytest.mark.parametrize("number", range(len(BLOCK.findall(TEXT))))
def test_python_blocks_print_what_is_said(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, said = BLOCK.findall(TEXT)[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{DOC.name}, block {number}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip() == said


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[3:]))
def test_commands_build_a_pipeline(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = load_pipeline_file(words[2])
    config = parse_overrides(module.Config, words[3:])
    stages = module.pipeline(config).by_name
    how = stages["rollout"].services["talk"].tools.how
    assert how == "auto" or how.parse("nothing") == []


def test_names_it_uses_are_there() -> None:
    keys = set(re.findall(r"`tools\.(\w+)", TEXT))
    assert keys <= set(ToolsConfig.model_fields)
    assert keys >= {"timeout", "max_turns", "max_response_tokens", "format"}


def test_what_the_model_is_told_of_errors() -> None:
    box = Toolbox(path=str(ROOT / "examples" / "tools" / "prices.py"))
    own = {name: {"prices": {"apple": 2}} for name in ("price", "basket")}

    async def told(text: str) -> str:
        async with asyncio.timeout(20), box.open() as caller:
            (found,) = Hermes().parse(text)
            return (await caller.state({"tools_kwargs": own}).answer(found)).text

    answers = [
        asyncio.run(told(text))
        for text in (call("pric"), call("price"), "<tool_call>{'</tool_call>", call("price", item="apple"))
    ]
    rows = re.findall(r"^\| .*? \| `(error: .*?)` \|$", TEXT, re.MULTILINE)
    assert answers[0] in rows
    assert answers[1] in rows
    assert answers[2].startswith(next(row for row in rows if "JSON" in row).removesuffix("(...)"))
    assert answers[3] == "2"


def write() -> None:
    """Writes what the document takes from elsewhere into it."""
    folder: Any = ROOT / "examples" / "tools"
    text = SHOWN.sub(lambda m: m[1] + (folder / m[2]).read_text(encoding="utf-8").strip() + m[4], TEXT)
    DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
