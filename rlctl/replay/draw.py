"""The trade-off between bias and variance as one self-contained SVG."""

from __future__ import annotations

import math
from html import escape

from rlctl.replay.tradeoff import Outcome, Tradeoff

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 440, 64, 48, 28, 130
_COLOURS = {
    "run": "#000000",
    "rlctl": "#8da0cb",
    "verl": "#1b9e77",
    "TRL": "#d95f02",
    "OpenRLHF": "#7570b3",
    "slime": "#e7298a",
    "SkyRL": "#66a61e",
}
#: Smaller parts of the error than this look the same: nothing.
_FLOOR = 1e-4


def svg(tradeoff: Tradeoff) -> str:
    """Every setting at (variance, bias²), both on a logarithmic scale, names as tooltips.

    Marked: the settings no other one beats in both (a line), the run's own (black) and the
    recommended one (a ring). Names are escaped; nothing is loaded from anywhere. Empty where the
    replay could not tell errors.
    """
    judged = [outcome for outcome in tradeoff.outcomes if outcome.bias and outcome.variance]
    if not judged:
        return ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">',
        "<title>Bias and variance of the gradient by correction setting</title>",
        *_axes(),
        _line(tradeoff.frontier()),
        *(_dot(outcome) for outcome in judged),
    ]
    if tradeoff.recommended:
        x, y = _place(tradeoff.outcome(tradeoff.recommended.name))
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="#e41a1c" stroke-width="2"/>'
        parts.append(ring)
    return "".join([*parts, *_legend(judged), "</svg>"])


def _scaled(value: float) -> float:
    """0 … 1 over the decades from `_FLOOR` to 1."""
    return 1.0 - math.log10(min(max(value, _FLOOR), 1.0)) / math.log10(_FLOOR)


def _place(outcome: Outcome) -> tuple[float, float]:
    variance = outcome.variance.value if outcome.variance else 1.0
    bias = outcome.bias.value if outcome.bias else 1.0
    x = _LEFT + _scaled(variance) * (_WIDTH - _LEFT - _RIGHT)
    return x, _HEIGHT - _BOTTOM - _scaled(bias) * (_HEIGHT - _BOTTOM - _TOP)


def _axes() -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">variance, relative</text>',
        f'<text x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + bottom) / 2})">bias², relative</text>',
    ]
    for power in range(-4, 1):
        share = _scaled(10.0**power)
        x, y = _LEFT + share * (right - _LEFT), bottom - share * (bottom - _TOP)
        label = f"{10.0**power:g}"
        parts.append(f'<path d="M{x:.1f} {bottom}v4M{_LEFT} {y:.1f}h-4" stroke="currentColor"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return parts


def _line(frontier: tuple[Outcome, ...]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(_place, frontier))
    return f'<polyline points="{points}" fill="none" stroke="#999999" stroke-dasharray="3 3"/>'


def _dot(outcome: Outcome) -> str:
    x, y = _place(outcome)
    error = outcome.error.value if outcome.error else 1.0
    names = ", ".join((outcome.setting.name, *outcome.same_as))
    said = escape(f"{names}: error {error:.3f}, applied ESS {outcome.applied_ess.value:.2f}")
    colour = _COLOURS[outcome.setting.family]
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"><title>{said}</title></circle>'


def _legend(judged: list[Outcome]) -> list[str]:
    present = dict.fromkeys(outcome.setting.family for outcome in judged)
    rows = [(_COLOURS[name], "this run" if name == "run" else name) for name in _COLOURS if name in present]
    x, parts = _WIDTH - _RIGHT + 24, []
    for row, (colour, name) in enumerate(rows):
        y = _TOP + 18 * row
        parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{escape(name)}</text>')
    return parts
