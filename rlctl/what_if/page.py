"""Replays as one page that needs nothing else and runs no script: advice, picture, and every setting.

Texts are escaped by the template, and a policy lets nothing be loaded or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from rlctl.html_page import render
from rlctl.what_if.draw import svg
from rlctl.what_if.tradeoff import Tradeoff
from rlctl.what_if.what_if_report import COLUMNS, about, advice, cells, is_recommended, name_of

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def page(replays: Sequence[tuple[str, Tradeoff]]) -> str:
    """The page as text.

    Args:
        replays: title and result of each.
    """
    return render(
        _TEMPLATE,
        columns=COLUMNS,
        runs=[
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
    )
