"""Renders replays as one self-contained HTML page without scripts: advice, plot, and all settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.html_page import render
from rlctl.what_if import what_if_report
from rlctl.what_if.draw import svg
from rlctl.what_if.tradeoff import Tradeoff

FOLDER = Path(__file__).parent


def page(replays: Sequence[tuple[str, Tradeoff]]) -> str:
    """Returns the page as HTML.

    Args:
        replays: title and result of each replay.
    """
    title = f"What if: {' · '.join(title for title, _ in replays)}"
    return render(FOLDER / "page.html.j2", title=title, style=section_style(), **section_values(replays))


def section_style() -> str:
    """CSS of `section.html.j2`."""
    return (FOLDER / "page.css").read_text(encoding="utf-8")


def section_values(replays: Sequence[tuple[str, Tradeoff]]) -> dict[str, Any]:
    """Template variables of `section.html.j2`."""
    return {"replays": replays, "report": what_if_report, "svg": svg}
