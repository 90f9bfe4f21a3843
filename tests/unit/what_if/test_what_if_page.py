"""The page of a what-if replay, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.what_if.replay import replay
from rlctl.what_if.settings import grid
from rlctl.what_if.tradeoff import Tradeoff
from rlctl.what_if.what_if_report import page as page_text
from tests.unit.what_if.steps import make_step

EVIL = "</title></svg><script>document.title=1</script><img src='https://evil.test/x' onerror=alert()>{{7*7}}"


@pytest.fixture(scope="module")
def found() -> Tradeoff:
    settings = grid(RolloutCorrectionSpec(rollout_is="token"))[:40]
    return replay([make_step(groups=40, scale=0.6)], settings, groups_per_batch=16)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_setting_is_a_row_and_the_recommended_one_is_marked(
    opened: Callable[[Path], Any], tmp_path: Path, found: Tradeoff
) -> None:
    page = opened(written(tmp_path / "page.html", page_text([("some/run", found)])))
    assert page.title() == "What if: some/run"
    assert page.locator("tbody tr").count() == len(found.outcomes)
    assert found.recommended is not None
    assert page.locator("tr.best td").first.inner_text().startswith(found.recommended.name)


def test_it_fits_a_telephone_and_the_dark(
    opened: Callable[[Path], Any], tmp_path: Path, found: Tradeoff
) -> None:
    page = opened(written(tmp_path / "page.html", page_text([("one", found), ("two", found)])))
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme="dark")
    assert page.locator("h1").all_inner_texts() == ["What if: one", "What if: two"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for column in (0, 1, 2):  # the setting, its error and the interval can be seen without scrolling
        cell = page.locator(f".what-if tbody tr:first-child td >> nth={column}").first.bounding_box()
        assert cell["x"] + cell["width"] <= 400


def test_hostile_text_is_only_text(opened: Callable[[Path], Any], tmp_path: Path, found: Tradeoff) -> None:
    first = found.outcomes[0]
    assert found.recommended is not None
    evil = replace(
        found,
        outcomes=(replace(first, setting=replace(first.setting, name=EVIL)), *found.outcomes[1:]),
        recommended=replace(found.recommended, name=EVIL, overrides=(EVIL,), why=EVIL),
        notes=(EVIL,),
    )
    page = opened(written(tmp_path / "page.html", page_text([(EVIL, evil)])))
    assert page.title().endswith(EVIL)
    assert page.locator("img, script").count() == 0
    assert page.locator("body").inner_text().count(EVIL) == 5  # head, try, why, note, row


def test_errors_that_cannot_be_told_are_said(found: Tradeoff) -> None:
    step = make_step()
    dull = replay([replace(step, rewards=step.rewards * 0.0)], grid()[:3])
    text = page_text([("run", dull)])
    assert "no advantage differs from zero" in text
