"""The trade-off between bias and variance as one self-contained SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 440, 64, 48, 28, 130
_COLOURS = {
    "run": "currentColor",
    "rlctl": "#8da0cb",
    "verl": "#1b9e77",
    "TRL": "#d95f02",
    "OpenRLHF": "#7570b3",
    "slime": "#e7298a",
    "SkyRL": "#66a61e",
}
#: Smaller parts of the error than the first look like nothing, larger ones than the second like everything.
_FLOOR, _CEILING = 1e-3, 1e2


@dataclass(frozen=True, slots=True)
class _Scale:
    """A logarithmic axis over the powers of ten that hold all values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> _Scale:
        held = [min(max(value, _FLOOR), _CEILING) for value in values]
        low, high = math.floor(math.log10(min(held))), math.ceil(math.log10(max(held)))
        return cls(10.0**low, 10.0 ** max(high, low + 1))

    def share(self, value: float) -> float:
        """0 … 1 along the axis."""
        held = min(max(value, self.low), self.high)
        return math.log(held / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every decade while there are few decades."""
        decades = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        return [tick for d in decades for s in steps if (tick := s * 10.0**d) <= self.high * 1.001]


@dataclass(frozen=True, slots=True)
class _Plane:
    x: _Scale
    y: _Scale

    def place(self, outcome: SettingOutcome) -> tuple[float, float]:
        variance = outcome.variance.value if outcome.variance else _CEILING
        bias = outcome.bias.value if outcome.bias else _CEILING
        x = _LEFT + self.x.share(variance) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - self.y.share(bias) * (_HEIGHT - _BOTTOM - _TOP)


def svg(tradeoff: Tradeoff) -> str:
    """Every setting at (variance, bias²), both on a logarithmic scale, names as tooltips.

    Marked: the settings no other one beats in both (a line), the run's own (in the colour of text) and the
    recommended one (a ring). Names are escaped; nothing is loaded from anywhere. Empty where the
    replay could not tell errors.
    """
    judged = [outcome for outcome in tradeoff.outcomes if outcome.bias and outcome.variance]
    if not judged:
        return ""
    plane = _Plane(
        _Scale.of([outcome.variance.value for outcome in judged if outcome.variance]),
        _Scale.of([outcome.bias.value for outcome in judged if outcome.bias]),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">',
        "<title>Bias and variance of the gradient by correction setting</title>",
        *_axes(plane),
        _line(plane, tradeoff.frontier()),
        *(_dot(plane, outcome) for outcome in reversed(judged)),  # the best on top
    ]
    if tradeoff.recommended:
        x, y = plane.place(tradeoff.outcome(tradeoff.recommended.name))
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="#e41a1c" stroke-width="2"/>'
        parts.append(ring)
    return "".join([*parts, *_legend(judged), "</svg>"])


def _axes(plane: _Plane) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        "variance: noise over signal</text>",
        f'<text x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + bottom) / 2})">bias²: tangent² of the angle</text>',
    ]
    for tick in plane.x.ticks():
        x = _LEFT + plane.x.share(tick) * (right - _LEFT)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="currentColor"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in plane.y.ticks():
        y = bottom - plane.y.share(tick) * (bottom - _TOP)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h-4" stroke="currentColor"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _line(plane: _Plane, frontier: tuple[SettingOutcome, ...]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(plane.place, frontier))
    return f'<polyline points="{points}" fill="none" stroke="#999999" stroke-dasharray="3 3"/>'


def _dot(plane: _Plane, outcome: SettingOutcome) -> str:
    x, y = plane.place(outcome)
    error = outcome.error.value if outcome.error else 1.0
    names = ", ".join((outcome.setting.name, *outcome.same_as))
    said = escape(f"{names}: error {error:.3f}, applied ESS {outcome.applied_ess.value:.2f}")
    colour = _COLOURS[outcome.setting.family]
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"><title>{said}</title></circle>'


def _legend(judged: list[SettingOutcome]) -> list[str]:
    present = dict.fromkeys(outcome.setting.family for outcome in judged)
    rows = [(_COLOURS[name], "this run" if name == "run" else name) for name in _COLOURS if name in present]
    x, parts = _WIDTH - _RIGHT + 24, []
    for row, (colour, name) in enumerate(rows):
        y = _TOP + 18 * row
        parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{escape(name)}</text>')
    return parts
