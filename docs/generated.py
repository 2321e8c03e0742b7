"""The pages of the site that are made when it is built: copies of files beside docs/, references, linked sources.

Nothing here needs mkdocs: tests/docs/test_site.py calls it, and docs/hooks.py hands its pages to mkdocs.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import dataflow
from dataflow.cli import make_parser
from dataflow.config.keys import yaml_values
from dataflow.config.keys.overrides import default_of, fields, section_of
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import RunConfig
from dataflow.importing.command import table
from dataflow.planning.config import PlanConfig

ROOT = Path(__file__).parents[1]
COPIES = {
    "README.md": "index.md",
    "recipes/README.md": "real_sizes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that lie outside docs/, and their names on the site."""
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "bash", ".css": "css"}


def pages() -> dict[str, str]:
    """Returns the markdown of every generated page, by its path on the site."""
    made = {
        "reference/commands.md": commands(),
        "reference/configuration.md": configuration(),
        "reference/plan_keys.md": plan_keys(),
        "reference/verl_keys.md": verl_keys(),
        "reference/api.md": api(),
        "decisions/index.md": decisions(),
    }
    written = [(f"docs/{path}", path) for path in handwritten()]
    for file, page in [*COPIES.items(), *written]:
        text = (ROOT / file).read_text(encoding="utf-8")
        if file in COPIES:
            made[page] = relinked(text, file, page)
        for target in linked(text, file):
            made.update(sources(target))
    return made


def handwritten() -> list[str]:
    """Returns the paths of the pages in docs/, below it."""
    docs = ROOT / "docs"
    return sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


def linked(text: str, file: str) -> list[str]:
    """Returns the files and directories of the repository that a file links to, as paths below its root."""
    found = (_target(match[1], file) for match in _LINK.finditer(text))
    return [target for target in found if target is not None]


def relinked(text: str, file: str, page: str) -> str:
    """Returns the text of a file with its links as they are on the site.

    Args:
        text: markdown whose links are those of the repository.
        file: where it lies, below the repository's root.
        page: its path on the site.
    """

    def replace(match: re.Match[str]) -> str:
        target = _target(match[1], file)
        if target is None:
            return match[0]
        return f"]({os.path.relpath(_page_of(target), Path(page).parent)}{match[2] or ''})"

    return _LINK.sub(replace, text)


def _target(link: str, file: str) -> str | None:
    """Returns what a link leads to, below the repository's root; None if there is no such file."""
    path = os.path.normpath(Path(file).parent / link)
    return path if "://" not in link and not path.startswith("..") and (ROOT / path).exists() else None


def _page_of(target: str) -> str:
    if target in COPIES:
        return COPIES[target]
    if target == "docs/decisions":
        return "decisions/index.md"
    path = ROOT / target
    if path.is_file() and target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md"


def sources(target: str) -> dict[str, str]:
    """Returns the page of a linked file that is no page itself, or those of a linked directory and its files."""
    page, path = _page_of(target), ROOT / target
    if not page.startswith("source/"):
        return {}
    if path.is_file():
        text = path.read_text(encoding="utf-8").rstrip("\n")
        return {page: f"# `{target}`\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"}
    made, lines = {}, [f"# `{target}/`", ""]
    for file in sorted(f"{target}/{each.name}" for each in path.iterdir() if each.is_file()):
        made.update(sources(file))
        lines.append(f"- [`{Path(file).name}`]({os.path.relpath(_page_of(file), Path(page).parent)})")
    return {**made, page: "\n".join(lines) + "\n"}


def decisions() -> str:
    """Returns the list of the decision records, by their titles."""
    lines = [
        "# Decisions",
        "",
        "The reasons for the design, one page each: what was tried, what came of it, what was chosen.",
        "",
    ]
    for file in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = file.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"- {file.stem[:4]}: [{re.sub(r'^# [0-9]+[.:] ', '', title)}]({file.name})")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Returns the help of every command, as the parser prints it."""
    parser = make_parser()
    parts = ["# Commands", _fenced(_help(parser))]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += [f"## dataflow {name}\n\n{_fenced(_help(each))}" for name, each in action.choices.items()]
    parts.append(
        "Exit codes: 0, 1 if the run failed, 2 for wrong input, and 128 plus the number of the signal that ended it."
    )
    return "\n\n".join(parts) + "\n"


def _help(parser: argparse.ArgumentParser) -> str:
    formatter = parser.formatter_class
    parser.formatter_class = lambda prog: formatter(prog, width=100)  # type: ignore[assignment,return-value]
    return parser.format_help().strip()


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def configuration() -> str:
    """Returns the tables of all keys of a run, and of what single pipelines add."""
    parts = [
        "# Configuration",
        "The keys of every run, as `dataflow run --keys` lists them, with the defaults of a pipeline that sets none. "
        "`dataflow run PIPELINE.py --keys` has those of one. A key is given as `key=value` or in a YAML file.",
        *_tables(RunConfig),
    ]
    for prefix, kind in named(RunConfig):
        parts += [
            f"## `{prefix}.NAME`",
            _sentence(kind),
            *_table((f"{prefix}.NAME.{'.'.join(path)}", info, kind, path) for path, info in fields(kind)),
        ]
    seen = set(RunConfig.model_fields)
    for file in sorted((ROOT / "pipelines").glob("*.py")):
        config = load_pipeline_file(file).Config
        own = [name for name in config.model_fields if name not in seen]
        seen.update(own)
        if own:
            name = f"pipelines/{file.name}"
            parts += [f"## Of [{name}](../{_page_of(name)})", *_tables(config, own, level=3)]
    return "\n\n".join(parts) + "\n"


def plan_keys() -> str:
    """Returns the tables of all keys of ``dataflow plan``."""
    said = "What a plan's source does not hold, given as `key=value` or in a `costs.yaml`: [Planning](../planning.md)."
    return "\n\n".join(["# Keys of a plan", said, *_tables(PlanConfig)]) + "\n"


def verl_keys() -> str:
    """Returns what becomes of each of verl's keys."""
    said = (
        "What becomes of verl's keys: [From verl](../from_verl.md). A `*` stands for anything. Any other key has no "
        "counterpart, and the new script names it unless it has verl's default."
    )
    return "\n\n".join(["# Keys of verl", said, table().replace("\n### ", "\n## ").replace("### ", "## ", 1)]) + "\n"


def named(cls: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields (path, class) of the sections that have names which the user gives, such as ``reward.models``."""
    for path, info in fields(cls):
        for kind in get_args(info.annotation):
            if section_of(info) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield ".".join(path), kind


def _tables(cls: type[BaseModel], only: list[str] | None = None, level: int = 2) -> Iterator[str]:
    """Yields the plain keys as a table, then a heading, a sentence and a table for each section."""
    chosen = [(path, info) for path, info in fields(cls) if only is None or path[0] in only]
    sections: dict[tuple[str, ...], Any] = {path: section_of(info) for path, info in chosen if section_of(info)}
    for section in [(), *sections]:
        keys = [(path, info) for path, info in chosen if path[:-1] == section and path not in sections]
        if section:
            yield f"{'#' * level} `{'.'.join(section)}`"
            yield _sentence(sections[section])
        yield from _table((".".join(path), info, cls, path) for path, info in keys)


def _sentence(cls: type[BaseModel]) -> str:
    return _plain(cls.__doc__ or "")


def _table(keys: Iterator[tuple[str, Any, type[BaseModel], tuple[str, ...]]]) -> Iterator[str]:
    rows = [f"| `{key}` | {_default(cls, path)} | {_plain(info.description or '')} |" for key, info, cls, path in keys]
    if rows:
        yield "\n".join(["| key | default | what |", "|---|---|---|", *rows])


def _default(cls: type[BaseModel], path: tuple[str, ...]) -> str:
    value = default_of(cls, path)
    if value is PydanticUndefined:
        return "(required)"
    plain = list(value) if isinstance(value, tuple) else value
    plain = plain.model_dump(exclude_defaults=True) if isinstance(plain, BaseModel) else plain
    return f"`{yaml_values.inline(plain)}`".replace("|", "\\|")


def _plain(text: str) -> str:
    """Returns a docstring as the text of a cell: one line, nothing of it markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def api() -> str:
    """Returns the directives from which mkdocstrings makes the reference of the public names."""
    names = [name for name in dataflow.__all__ if name not in ("Carried", "Latest")]
    head = [
        "# API",
        "All names are of `dataflow` itself: `from dataflow import Pipeline, expand, preset`. `Carried` and `Latest` "
        "annotate a stage's parameters: [Concepts](../concepts.md).",
    ]
    return "\n\n".join([*head, *(f"::: dataflow.{name}" for name in names)]) + "\n"
