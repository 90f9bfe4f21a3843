"""The page of a what-if replay, in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.replay.page import page as page_text
from rlctl.replay.replay import Question, replay
from rlctl.replay.settings import grid
from rlctl.replay.tradeoff import Tradeoff
from rlctl.spec.algorithm import RolloutCorrectionSpec
from tests.unit.replay.steps import make_step

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EVIL = "</title></svg><script>document.title=1</script><img src='https://evil.test/x' onerror=alert()>{{7*7}}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def found() -> Tradeoff:
    settings = grid(RolloutCorrectionSpec(rollout_is="token"))[:40]
    return replay([make_step(groups=40, scale=0.6)], settings, Question(groups_per_batch=16))


def opened(browser: Any, path: Path, text: str, **options: Any) -> tuple[Any, list[str]]:
    """The page, and whatever a harmless one does not do: dialogs, messages, errors, requests."""
    complaints: list[str] = []
    page = browser.new_page(**options)
    page.on("dialog", lambda dialog: (complaints.append("dialog"), dialog.dismiss()))
    page.on("console", lambda message: complaints.append(f"console {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error {error}"))
    page.on("request", lambda request: complaints.append(f"request {request.url}"))
    path.write_text(text, encoding="utf-8")
    page.goto(path.as_uri())
    complaints.remove(f"request {path.as_uri()}")
    return page, [each for each in complaints if not each.startswith("request data:")]


def test_every_setting_is_a_dot_that_can_be_pointed_at_and_a_row(
    browser: Any, tmp_path: Path, found: Tradeoff
) -> None:
    page, complaints = opened(browser, tmp_path / "page.html", page_text([("some/run", found)]))
    assert complaints == []
    assert page.title() == "What if: some/run"
    dots = page.locator("svg circle > title")
    assert dots.count() == len(found.outcomes) == page.locator("tbody tr").count()
    assert found.recommended is not None
    best = found.recommended.name
    assert page.locator("tr.best td").first.inner_text().startswith(best)
    ring = page.locator("svg circle[fill=none]").bounding_box()
    centre = [ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2]
    under = "([x, y]) => document.elementsFromPoint(x, y).map((e) => e.querySelector?.('title')?.textContent)"
    assert any(text and text.startswith(best) for text in page.evaluate(under, centre))
    frame = page.locator("svg").bounding_box()
    for place in range(dots.count()):
        box = page.locator("svg circle:has(> title)").nth(place).bounding_box()
        assert frame["x"] < box["x"] < frame["x"] + frame["width"]
        assert frame["y"] < box["y"] < frame["y"] + frame["height"]
    page.close()


def test_it_fits_a_telephone_and_the_dark(browser: Any, tmp_path: Path, found: Tradeoff) -> None:
    text = page_text([("one", found), ("two", found)])
    page, complaints = opened(
        browser, tmp_path / "page.html", text, viewport={"width": 400, "height": 800}, color_scheme="dark"
    )
    assert complaints == []
    assert page.locator("h1").all_inner_texts() == ["What if: one", "What if: two"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    own = page.locator("svg circle[fill=currentColor]").first
    assert own.evaluate("(dot) => getComputedStyle(dot).fill") == "rgb(255, 255, 255)"
    page.close()


def test_hostile_text_is_only_text(browser: Any, tmp_path: Path, found: Tradeoff) -> None:
    first = found.outcomes[0]
    assert found.recommended is not None
    evil = replace(
        found,
        outcomes=(replace(first, setting=replace(first.setting, name=EVIL)), *found.outcomes[1:]),
        recommended=replace(found.recommended, name=EVIL, overrides=(EVIL,), why=EVIL),
        notes=(EVIL,),
    )
    page, complaints = opened(browser, tmp_path / "page.html", page_text([(EVIL, evil)]))
    assert complaints == []
    assert page.title().endswith(EVIL)
    assert page.locator("img, script").count() == 0
    assert page.locator("body").inner_text().count(EVIL) == 5  # head, try, why, note, row
    page.close()


def test_nothing_is_drawn_where_errors_cannot_be_told(found: Tradeoff) -> None:
    step = make_step()
    dull = replay([replace(step, rewards=step.rewards * 0.0)], grid()[:3], Question())
    text = page_text([("run", dull)])
    assert "<svg" not in text
    assert "no advantage differs from zero" in text
