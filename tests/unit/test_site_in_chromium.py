"""The documentation site in a real browser, at three widths: nothing is cut or broken; its search."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mkdocs_hooks import ROOT

PAGES = ("", "how-to/training/", "how-to/extend/", "reference/spec/", "tutorial/is-it-for-me/")
WIDTHS = (1440, 900, 390)

#: Lines of one piece of inline code that is not to be broken: more than one is a break within a word.
BROKEN_WORDS = """
[...document.querySelectorAll('.md-content :not(pre) > code')]
  .filter((code) => !/[\\s./=,]/.test(code.textContent) && code.getClientRects().length > 1)
  .map((code) => code.textContent)
"""
#: Elements that end outside the page and are in nothing that scrolls.
CUT = """
(width) => [...document.querySelectorAll('.md-content *')].filter((element) => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= width + 1) return false;
  for (let above = element; above; above = above.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(above).overflowX)) return false;
  return true;
}).map((element) => element.outerHTML.slice(0, 80))
"""
#: Copy buttons that stand on the text of their block.
OVER_THE_TEXT = """
[...document.querySelectorAll('.md-content pre')].filter((block) => {
  const button = block.querySelector('button');
  const code = block.querySelector('code').getBoundingClientRect();
  return button && button.getBoundingClientRect().left < code.right - 1;
}).length
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Nothing: a request is no news."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site, built anew and served on the loopback interface."""
    build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed")
    config = pytest.importorskip("mkdocs.config")
    directory = tmp_path_factory.mktemp("site")
    loaded = config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory))
    loaded.plugins.on_startup(command="build", dirty=False)
    build.build(loaded)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page()
    yield opened
    opened.close()


def test_nothing_is_cut_or_broken(site: str, page: Any) -> None:
    for address in PAGES:
        page.goto(site + address)
        page.wait_for_selector(".md-content pre button, .md-content table", state="attached")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(400)  # the navigation slides to its place
            where = f"{address} at {width}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, where
            assert page.evaluate(CUT, width) == [], where
            assert page.evaluate(BROKEN_WORDS) == [], where
            assert page.evaluate(OVER_THE_TEXT) == 0, where


def test_code_of_a_hundred_characters_fits_a_desktop(site: str, page: Any) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{site}how-to/extend/")
    fits = (
        "(code) => { code.textContent = 'm'.repeat(100); return code.scrollWidth <= code.clientWidth + 1; }"
    )
    assert page.locator("pre > code").first.evaluate(fits)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("max_completion_length", "data.max_response_length"),
        ("num_generations", "rollout.n"),
        ("clipped_ratio", "response_length/clip_ratio"),
    ],
)
def test_the_search_finds_what_others_call_it(site: str, page: Any, query: str, key: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(site)
    page.locator("input.md-search__input").click()
    page.keyboard.type(query)
    result = page.locator(f'.md-search-result__link[href$="#{key}"]').first
    result.wait_for(state="attached")
    page.goto(result.evaluate("(link) => link.href"))
    assert page.evaluate("(key) => document.getElementById(key).tagName", key) == "TR"


def test_the_version_is_shown(site: str, page: Any) -> None:
    from mkdocs_hooks import version

    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(site)
    assert page.locator(".site-version").inner_text() == version()
