"""The documentation site: pages made from files at the root, marks of generated text, words of the search."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
#: File at the root → its page.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
}
#: Pages whose tables have one row per key; each row has an address.
PAGES_OF_KEYS = {"reference/spec.md", "reference/metrics.md", "evidence/import-keys.md"}
_LINK = re.compile(r"(?<=\]\()(?:docs/)?([^)#:\s]+)")
_GENERATED = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end of generated text -->", re.DOTALL)
_INLINE_CODE = re.compile(r"(?<!<span></span>)(?<!<pre>)<code>([^<\n]+)</code>")
_LONG = 40  # characters of code that fit on any screen without a break
_WORD = re.compile(r"[^\s]+")
_PIECE = re.compile(r"(?:&\w+;|[^./=,])*[./=,]*")
_COMPARED = re.compile(r"<td>(better|equal|worse|impossible)\b")
_NAME = re.compile(r'(<span class="md-ellipsis">\s*rlctl\b)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """With SITE_VERSIONS=DIRECTORY, build into a directory of this version there, with a menu of versions."""
    if versions := os.environ.get("SITE_VERSIONS"):
        config.site_dir = str(Path(versions).absolute() / version())
        config.extra["version"] = {"provider": "mike"}
    return config


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


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Mark generated text; give rows of keys an address."""
    from docs.search_words import with_anchors

    if page.file.src_uri in PAGES_OF_KEYS:
        html = with_anchors(html)
    return marked(_COMPARED.sub(r'<td><span class="compared compared--\1">\1</span>', html))


def marked(html: str) -> str:
    """Generated text in an element of its own that says where it comes from."""
    return _GENERATED.sub(
        lambda text: (
            '<div class="generated"><p class="generated__note" data-search-exclude>'
            f"from the code: {text[1]}</p>\n{text[2]}</div>"
        ),
        html,
    )


def on_post_page(output: str, config: MkDocsConfig, **_: Any) -> str:
    """Let long names break behind a dot or slash, and show the version where no menu does."""
    shown = with_breaks(output)
    if "version" in config.extra:
        return shown
    return _NAME.sub(rf'\1 <span class="site-version">{version()}</span>', shown, count=1)


def version() -> str:
    """Of the package that these pages describe."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def with_breaks(html: str) -> str:
    """Inline code breaks between words; long words behind a dot, slash, equals sign or comma."""
    return _INLINE_CODE.sub(lambda code: f"<code>{_WORD.sub(_word_with_breaks, code[1])}</code>", html)


def _word_with_breaks(word: re.Match[str]) -> str:
    pieces = _PIECE.findall(word[0]) if len(word[0]) > _LONG else [word[0]]
    return "<wbr>".join(
        f'<span class="unbroken">{piece}</span>' if "-" in piece else piece for piece in pieces if piece
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Add keys, metrics and other frameworks' names of them to the search."""
    from docs.search_words import entries, merged

    if "version" in config.extra:
        write_versions(Path(config.site_dir).parent)
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(merged(index, entries()), ensure_ascii=False), encoding="utf-8")


def write_versions(directory: Path) -> None:
    """List the versions in a directory, newest first, as the theme's menu of versions reads it."""
    names = [page.parent.name for page in directory.glob("*/index.html")]
    names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)], reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in names]
    (directory / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
