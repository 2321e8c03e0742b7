"""What mkdocs calls while it builds the site: adds the generated pages, turns links of the repository into its own."""

from __future__ import annotations

import re
from typing import Any

import generated
from mkdocs.structure.files import File, Files

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):<code>~?([^<]*)</code>")


def on_files(files: Files, config: Any) -> Files:
    for page, text in generated.pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    # Generated pages have their links already.
    path = page.file.src_uri
    return markdown if page.file.generated_by else generated.relinked(markdown, f"docs/{path}", path)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    # Docstrings name classes as Sphinx does, which markdown prints as it stands.
    return _ROLE.sub(lambda found: f"<code>{found[1].removeprefix('dataflow.')}</code>", html)
