"""Plots error, bias, noise and angle of selected rules along every axis of a benchmark, as one SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from html import escape

import numpy as np

from rlctl.bench.bench_report import GROUPS, SHOWN, Row, angle, error_of

_COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#ff7f0e", "#9467bd")
#: Title, whether the worlds are learned, field of `BenchPlace` on the axis, values of other fields.
_AXES: tuple[tuple[str, bool, str, Row], ...] = (
    ("noise of the logits", False, "size", {"axis": "KL"}),
    ("tokens", False, "horizon", {"mismatch": "noise", "size": 0.3, "sharpness": 1.0, "n": 8}),
    ("sharpness of the policy", False, "sharpness", {"mismatch": "noise", "size": 0.3, "horizon": 5, "n": 8}),
    ("updates behind", False, "size", {"mismatch": "stale"}),
    ("group size", False, "n", {"mismatch": "noise", "size": 0.3, "horizon": 5, "sharpness": 1.0}),
    ("64 tokens: noise", True, "size", {"mismatch": "noise", "horizon": 64}),
    ("64 tokens: updates behind", True, "size", {"mismatch": "stale", "horizon": 64}),
)
#: Title, function of a row, lowest and highest plotted value, whether the scale is logarithmic.
_Measure = tuple[str, Callable[[Row], float], float, float, bool]
_MEASURES: tuple[_Measure, ...] = (
    (f"error, {GROUPS} groups", error_of, 0.0, 1.0, False),
    ("bias²/|g|²", lambda row: row["distance"] / row["signal"], 1e-3, 10.0, True),
    ("noise/|g|²", lambda row: row["noise"] / row["signal"], 1.0, 1e3, True),
    ("angle, degrees", angle, 0.0, 90.0, False),
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 150, 90, 70, 48  # size of a panel; margins of the plot


def picture(rows: list[Row]) -> str:
    """Plots medians over seeds, clamped to the scale. Empty if no axis has two places."""
    shown = []
    for title, is_learned, field, fixed in _AXES:
        here = [r for r in rows if r["is_learned"] is is_learned and all(r[k] == v for k, v in fixed.items())]
        values = sorted({row[field] for row in here})
        if len(values) > 1:
            shown.append((title, field, values, here))
    if not shown:
        return ""
    width, height = _LEFT + len(_MEASURES) * (_WIDTH + 46), _TOP + len(shown) * (_HEIGHT + 46) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="10"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, (name, colour) in enumerate(zip(SHOWN, _COLOURS, strict=True)):
        at = f'x="{_LEFT + place * 130}" y="16"'
        parts.append(f'<text {at} fill="{colour}" font-weight="bold">{escape(name)}</text>')
    for down, (title, field, values, here) in enumerate(shown):
        for across, measure in enumerate(_MEASURES):
            x, y = _LEFT + across * (_WIDTH + 46), _TOP + down * (_HEIGHT + 46)
            parts += [f'<g transform="translate({x},{y})">', *_panel(here, field, values, measure)]
            parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 28}" text-anchor="middle">{title}</text></g>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(rows: list[Row], field: str, values: list[float], measure: _Measure) -> list[str]:
    title, figure, low, high, is_log = measure

    def height_of(value: float) -> float:
        value = float(np.clip(value, low, high))
        share = np.log(value / low) / np.log(high / low) if is_log else (value - low) / (high - low)
        return _HEIGHT * (1 - float(share))

    def at(value: float) -> float:
        return _WIDTH * values.index(value) / (len(values) - 1)

    parts = [f'<text x="0" y="-6">{escape(title)}</text>']
    for tick in np.geomspace(low, high, 4) if is_log else np.linspace(low, high, 4):
        y = f"{height_of(tick):.1f}"
        parts.append(f'<path d="M0 {y}h{_WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="-4" y="{y}" text-anchor="end" dy="3">{tick:.2g}</text>')
    for value in values:
        parts.append(f'<text x="{at(value):.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{value:g}</text>')
    for name, colour in zip(SHOWN, _COLOURS, strict=True):
        line: dict[float, list[float]] = defaultdict(list)
        for row in rows:
            if row["rule"] == name:
                line[row[field]].append(figure(row))
        points = " ".join(f"{at(x):.1f},{height_of(float(np.median(line[x]))):.1f}" for x in sorted(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts
