"""README, CONTRIBUTING, SECURITY and CHANGELOG as pages of the documentation site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent
#: File at the root → its page.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
_LINK = re.compile(r"(?<=\]\()(?:docs/)?([^)#:\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages made from files at the root."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=as_page(text)))
    return files


def as_page(text: str) -> str:
    """The same text with links as seen from `docs/`."""
    return _LINK.sub(lambda link: PAGES.get(link[1], link[1]), text)
