"""docs/tools.md is correct. ``python tests/docs/test_docs_tools.py`` updates the file in it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dataflow.tools import Toolbox
from dataflow.tools.reader import Hermes

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "tools.md"
TEXT = DOC.read_text(encoding="utf-8") if DOC.exists() else ""
SHOWN = re.compile(r"(\(\.\./examples/tools/(\S+\.py)\)[^`]*?\n```python\n)(.*?)(\n```)", re.DOTALL)
BLOCK = re.compile(r"^```python\n((?:(?!```).)*?)\n```\n\n```text\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_file_it_shows_is_the_file() -> None:
    shown = {match[2]: match[3] for match in SHOWN.finditer(TEXT)}
    assert shown == {"prices.py": (ROOT / "examples" / "tools" / "prices.py").read_text(encoding="utf-8").strip()}


@pytest.mark.parametrize("number", range(len(BLOCK.findall(TEXT))))
def test_python_blocks_print_what_is_said(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, said = BLOCK.findall(TEXT)[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"{DOC.name}, block {number}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip() == said


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
