"""The page of a run in a real browser: it fits a desktop, a tablet and a telephone, and follows a run."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.report import serve
from rlctl.report.run_page import run_page
from rlctl.report.serve import RunPages
from rlctl.track.run_dir import HOLDER_FILE
from tests.cli.test_report_command import a_run
from tests.dumps import dumped, write

WIDTHS = (1440, 900, 390)
#: Returns what is wrong with a layout: parts outside the window, cut texts, contrasts below WCAG's AA.
FAULTS = Path(__file__).with_name("page_layout.js").read_text(encoding="utf-8")
LIMIT_MS = 20_000


def a_wide_run(path: Path) -> Path:
    """A run with long words wherever a page shows words, and every shade of a token."""
    a_run(path, "trainer.experiment_name=" + "e" * 120, source="s" * 60)
    word = "w" * 300
    ratios = [-3.0, -0.6, -0.2, -0.03, 0.0, 0.03, 0.2, 0.6, 3.0]
    rows = [
        dumped(
            [1] * len(ratios), [-4.0] * len(ratios), [-4.0 + number * ratio for ratio in ratios],
            prompt_ids=[3], step=6, member=number, prompt=word, response=f"{word} {number}",
            ground_truth=word, reward=number / 4, keep_mask=[True] * 8 + [False],
        )
        for number in range(5)
    ]  # fmt: skip
    write(path / "rollouts/rollouts-000006-000006.parquet", rows)
    (path / "failure.json").write_text(json.dumps({"what": word, "fix": word}))
    return path


def a_run_of(path: Path, num_steps: int) -> Path:
    """A run that has logged so many steps, and saved no responses."""
    a_run(path)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:num_steps]))
    shutil.rmtree(path / "rollouts")
    return path


def faults(page: Any, width: int) -> list[str]:
    """What is wrong with the layout at a width, with everything unfolded."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details:not(#choose)').forEach((one) => { one.open = true; })")
    page.wait_for_timeout(100)  # the curves follow the width
    return list(page.evaluate(FAULTS))


@pytest.fixture
def shown(opened: Callable[[Path], Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of runs."""

    def go(*runs: Path) -> Any:
        file = tmp_path / "report.html"
        file.write_text(run_page(runs), encoding="utf-8")
        return opened(file)

    return go


@pytest.mark.parametrize("num_runs", [1, 2])
def test_nothing_is_wider_than_the_window(num_runs: int, shown: Callable[..., Any], tmp_path: Path) -> None:
    page = shown(*(a_wide_run(tmp_path / ("r" * 90 + str(number))) for number in range(num_runs)))
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert {width: faults(page, width) for width in WIDTHS} == {width: [] for width in WIDTHS}
    tops = [
        page.locator(name).first.bounding_box()["y"] for name in (".headline", ".sample", "#plots", ".words")
    ]
    assert tops == sorted(tops)
    assert page.locator(".difference").count() == num_runs - 1
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden()
    assert page.locator(".headline").first.is_visible()


def test_the_checks_see_faults(shown: Callable[..., Any], tmp_path: Path) -> None:
    page = shown(a_run(tmp_path / "a"))
    page.evaluate(
        """() => {
          const made = (style) => {
            const element = document.createElement("p");
            element.textContent = "planted".repeat(9);
            Object.assign(element.style, style);
            document.body.append(element);
          };
          made({ width: "500px" });
          made({ width: "90px", overflow: "hidden", whiteSpace: "nowrap", overflowWrap: "normal" });
          made({ color: "#888", background: "#999" });
        }"""
    )
    found = faults(page, 390)
    kinds = {fault.split()[0].rstrip(":") for fault in found}
    assert kinds == {"the", "outside", "cut", "contrast"}
    assert all("planted" in fault or fault.startswith("the page is") for fault in found)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_a_run_that_has_just_begun(num_steps: int, shown: Callable[..., Any], tmp_path: Path) -> None:
    page = shown(a_run_of(tmp_path / "a", num_steps))
    assert {width: faults(page, width) for width in WIDTHS} == {width: [] for width in WIDTHS}
    assert page.locator("#no-curves").is_visible() == (num_steps == 0)
    curves = page.locator("figure[data-metric='critic/score/mean'] .curve")
    assert curves.count() == (num_steps > 0)
    if num_steps > 1:
        assert "L" in curves.get_attribute("d")  # a line
    assert page.get_by_text("No responses were saved").is_visible()


def test_the_open_page_follows(
    serving: Callable[[RunPages], Any], browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Chromium: new steps appear, what was unfolded and chosen stays, and no error is reported."""
    monkeypatch.setattr(serve, "BETWEEN_S", 0.0)
    monkeypatch.setattr(serve, "BETWEEN_DURATIONS", 0.0)
    path = a_run(tmp_path / "a")
    (path / HOLDER_FILE).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
    server = serving(RunPages([path]))
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(server.address)
    page.get_by_text("More responses").wait_for(timeout=LIMIT_MS)
    page.locator("details.rules summary").click()
    page.locator("#log").click()
    page.evaluate("document.querySelector('#log').blur()")
    with (path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 7, "critic/score/mean": 0.9, "response_length/mean": 5.0}) + "\n")
    page.get_by_text("running after step 7").wait_for(timeout=LIMIT_MS)
    assert page.locator("figure[data-metric='response_length/mean']").count() == 1
    assert page.locator("details.rules").first.get_attribute("open") is not None
    assert page.locator("#log").get_attribute("aria-pressed") == "true"
    server.shutdown()
    server.server_close()
    page.get_by_text("has ended").wait_for(timeout=LIMIT_MS)
    assert [error for error in errors if "ERR_CONNECTION_REFUSED" not in error] == []
    page.close()
