"""Plots bias² over variance as one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

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
#: Limits of both axes. Smaller values are negligible, larger ones mean an error near 1.
_FLOOR, _CEILING = 1e-3, 1e2


class _Axis:
    """A logarithmic axis between two pixels; its limits are powers of ten that enclose all values."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        exponents = [math.log10(min(max(value, _FLOOR), _CEILING)) for value in values]
        self._low, self._high = math.floor(min(exponents)), math.ceil(max(exponents))
        self._high = max(self._high, self._low + 1)
        self._start, self._size = start, end - start

    def pixel(self, value: float) -> float:
        """Pixel of the value, clamped to the axis."""
        held = min(max(value, 10.0**self._low), 10.0**self._high)
        return self._start + (math.log10(held) - self._low) / (self._high - self._low) * self._size

    def ticks(self) -> list[float]:
        """Ticks at 1, 2 and 5 times every power of ten; on more than two decades only at powers of ten."""
        decades = range(self._low, self._high + 1)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        return [tick for d in decades for s in steps if (tick := s * 10.0**d) <= 10.0**self._high * 1.001]


def svg(tradeoff: Tradeoff) -> Markup:
    """Plots every setting at (variance, bias²), both on a logarithmic scale, with names as tooltips.

    Marks the settings that no other setting beats in both (dashed line), the run's own setting (text colour)
    and the recommended one (ring). Names are escaped; the SVG loads no external resources. Empty if the
    replay could not estimate errors.
    """
    drawn = tradeoff.points()
    if not drawn:
        return Markup()
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    x = _Axis((variance for variance, _, _ in drawn), _LEFT, right)
    y = _Axis((bias for _, bias, _ in drawn), bottom, _TOP)
    at = {one.setting.name: (x.pixel(variance), y.pixel(bias)) for variance, bias, one in drawn}
    points = " ".join("{:.1f},{:.1f}".format(*at[one.setting.name]) for one in tradeoff.frontier())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">',
        "<title>Bias and variance of the gradient by correction setting</title>",
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        "variance: noise over signal</text>",
        f'<text x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + bottom) / 2})">bias²: tangent² of the angle</text>',
    ]
    for tick in x.ticks():
        left = x.pixel(tick)
        parts.append(f'<path d="M{left:.1f} {bottom}v4" stroke="currentColor"/>')
        parts.append(f'<text x="{left:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        top = y.pixel(tick)
        parts.append(f'<path d="M{_LEFT} {top:.1f}h-4" stroke="currentColor"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#999999" stroke-dasharray="3 3"/>')
    parts += [_dot(*at[one.setting.name], one) for _, _, one in reversed(drawn)]  # best on top
    if tradeoff.recommended:
        left, top = at[tradeoff.recommended.name]
        ring = f'<circle cx="{left:.1f}" cy="{top:.1f}" r="9" fill="none" stroke="#e41a1c" stroke-width="2"/>'
        parts.append(ring)
    families = {one.setting.family for _, _, one in drawn}
    for row, name in enumerate(name for name in _COLOURS if name in families):
        left, top, label = right + 24, _TOP + 18 * row, "this run" if name == "run" else name
        parts.append(f'<circle cx="{left}" cy="{top}" r="4.5" fill="{_COLOURS[name]}"/>')
        parts.append(f'<text x="{left + 12}" y="{top + 4}">{label}</text>')
    return Markup("".join([*parts, "</svg>"]))


def _dot(left: float, top: float, outcome: SettingOutcome) -> str:
    error = outcome.error.value if outcome.error else 1.0
    names = ", ".join((outcome.setting.name, *outcome.same_as))
    title = escape(f"{names}: error {error:.3f}, applied ESS {outcome.applied_ess.value:.2f}")
    colour = _COLOURS[outcome.setting.family]
    return f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4.5" fill="{colour}"><title>{title}</title></circle>'
