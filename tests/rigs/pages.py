"""All blocks of all pages of the documentation, fenced or indented, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "recipes/*.md", "dataflow/commands/project/*.md")
    for page in ROOT.glob(pattern)
)
PROGRAMS = ("dataflow", "make", "python", "python3")
_FENCED = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?P<text>(?: {4}.*\n(?:\n(?= {4}))*)+)")
_START = re.compile(rf"^(?=(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)}|eval|pip) )", re.MULTILINE)
_INLINE = re.compile(r"`(dataflow [^`]*)`")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        language: as the page names it; "" without.
        text: without its indent.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line, which identifies the block in tables of tests: line numbers change."""
        return self.text.partition("\n")[0].strip()

    def commands(self) -> list[list[str]]:
        """Returns the words of each command in it, from the program's name on; none of a block of output or code."""
        if self.language not in ("", "bash", "console") or not _START.match(self.text):
            return []
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        return [words for start in _START.split(joined) if start.strip() and (words := words_of(start.strip()))]


def words_of(line: str) -> list[str]:
    """Returns the words of a command, without a description beside it, a pipe, and the shell's ``eval "$(...)"``."""
    if (inner := re.match(r'eval "\$\((.*?)\)"', line)) is not None:
        line = inner[1]
    if "\n" not in line:
        line = re.split(r"\s{2,}(?=\S)", line)[0]
    words = shlex.split(line, comments=True)
    words = words[: words.index("|")] if "|" in words else words
    return [words[0].removeprefix(".venv/bin/"), *(word for word in words[1:] if word not in ("...", "key=value"))]


def blocks() -> Iterator[Block]:
    """Yields every block of every page."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for found in _FENCED.finditer(text):
            yield _block(page, text, found.start(), found["language"], found["text"])
        # Of the same length, so that a position in it is one in the page.
        prose = _FENCED.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), text)
        for found in _INDENTED.finditer(prose):
            yield _block(page, text, found.start(), "", found["text"])


def inline_commands() -> Iterator[tuple[str, list[str]]]:
    """Yields the page and the words of each command in backticks."""
    for page in PAGES:
        prose = _FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for found in _INLINE.findall(prose):
            yield page, words_of(" ".join(found.split()))


def _block(page: str, text: str, at: int, language: str, inner: str) -> Block:
    indent = min(len(line) - len(line.lstrip(" ")) for line in inner.splitlines() if line.strip())
    plain = "\n".join(line[indent:] for line in inner.splitlines())
    return Block(page, text.count("\n", 0, at) + 1, language, plain)
