"""Replays as one page that needs nothing else and runs no script: advice, picture, and every setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rlctl.html_page import render
from rlctl.what_if.draw import svg
from rlctl.what_if.tradeoff import Tradeoff
from rlctl.what_if.what_if_report import COLUMNS, about, advice, cells, is_recommended, name_of

FOLDER = Path(__file__).parent


def page(replays: Sequence[tuple[str, Tradeoff]]) -> str:
    """The page as text.

    Args:
        replays: title and result of each.
    """
    title = f"What if: {' · '.join(title for title, _ in replays)}"
    return render(FOLDER / "page.html.j2", title=title, style=section_style(), **section_values(replays))


def section_style() -> str:
    """The style of `section.html.j2`."""
    return (FOLDER / "page.css").read_text(encoding="utf-8")


def section_values(replays: Sequence[tuple[str, Tradeoff]]) -> dict[str, Any]:
    """What `section.html.j2` needs, once for each of `replays`."""
    return {
        "columns": COLUMNS,
        "replays": [
            {
                "title": title,
                "about": about(tradeoff),
                "advice": advice(tradeoff),
                "picture": Markup(svg(tradeoff)),  # escapes the names it holds
                "notes": tradeoff.notes,
                "rows": [
                    {
                        "name": name_of(outcome),
                        "cells": cells(outcome),
                        "is_own": outcome.setting.family == "run",
                        "is_best": is_recommended(tradeoff, outcome),
                    }
                    for outcome in tradeoff.outcomes
                ],
            }
            for title, tradeoff in replays
        ],
    }
