"""Output of a replay: text for a terminal, and a self-contained HTML page with a plot, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.html_page import render
from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff

#: Directory of the templates.
FOLDER = Path(__file__).parent
#: Rows of the terminal table, in addition to the run's own setting.
_SHOWN = 12
#: Name of a table column, in at most two lines → its meaning.
COLUMNS = {
    "error": (
        "mean squared error of the gradient at its best scale; 0 is the target gradient, 1 a useless one"
    ),
    "sampling\ninterval": (
        "contains the error of 90 % of resamples; it excludes the error of the estimate's own model"
    ),
    "bias²": "squared tangent of the angle between the expected and the target gradient",
    "vari-\nance": "noise of a mini-batch's gradient over its useful signal, squared",
    "ESS\nraw": "effective sample size over number, before bound and rejection",
    "ESS\nused": "effective sample size over number, of the weights that reach the loss",
    "kept": "tokens that are not rejected",
    "max\nw": "largest weight that reaches the loss",
    "at\nbound": "weights the bound changes",
}


def cells(outcome: SettingOutcome) -> tuple[str, ...]:
    """Values of one setting, in the order of `COLUMNS`."""
    error = outcome.error
    return (
        "–" if error is None else f"{error.value:.3f}",
        "–" if error is None else f"{error.low:.3f}–{error.high:.3f}",
        "–" if outcome.bias is None else _short(outcome.bias.value),
        "–" if outcome.variance is None else _short(outcome.variance.value),
        f"{outcome.raw_ess.value:.2f}",
        f"{outcome.applied_ess.value:.2f}",
        f"{outcome.kept_tokens:.0%}",
        f"{outcome.max_weight:.3g}",
        f"{outcome.at_bound:.1%}",
    )


def name_of(outcome: SettingOutcome) -> str:
    """Name of the setting, names of two others with identical results, and the number of further ones."""
    named, more = outcome.same_as[:2], len(outcome.same_as) - 2
    others = ", ".join((*named, f"{more} more") if more > 0 else named)
    return outcome.setting.name + (f" (= {others})" if others else "")


def about(tradeoff: Tradeoff) -> str:
    """Describes the replayed data in one sentence."""
    counts = f"{tradeoff.num_sequences} responses, {tradeoff.num_tokens} tokens, {tradeoff.num_groups} groups"
    batch = f"errors are those of a mini-batch of {tradeoff.groups_per_batch:.0f} groups"
    return f"{counts} of {tradeoff.num_steps} steps; {batch}"


def advice(tradeoff: Tradeoff) -> tuple[tuple[str, str], ...]:
    """Returns (`try`, the change) and (`why`, its reason); empty if nothing can be recommended."""
    chosen = tradeoff.recommended
    if chosen is None:
        return ()
    return ("try", " ".join(chosen.overrides) or "nothing else"), ("why", chosen.why)


def is_recommended(tradeoff: Tradeoff, outcome: SettingOutcome) -> bool:
    """Whether this setting is the recommended one."""
    return tradeoff.recommended is not None and tradeoff.recommended.name == outcome.setting.name


def caption(tradeoff: Tradeoff) -> str:
    """Explains what `svg` draws."""
    sentences = {
        "Each dot is a setting; point at it to see its name.": True,
        "Lower dots have less bias, dots further left less noise.": True,
        "Ring: recommended.": tradeoff.recommended is not None,
        "Black or white: this run.": any(one.setting.family == "run" for _, _, one in tradeoff.points()),
        "Dashed line: settings that no other one beats in both.": len(tradeoff.frontier()) > 1,
    }
    return " ".join(sentence for sentence, is_drawn in sentences.items() if is_drawn)


def print_tradeoff(console: Console, title: str, tradeoff: Tradeoff) -> None:
    """Prints the recommendation, the assumptions, the best settings and the run's own."""
    head = Table.grid(padding=(0, 2))
    for label, text in advice(tradeoff):
        head.add_row(label, Text(text, style="bold green" if label == "try" else ""))
    for note in tradeoff.notes:
        head.add_row("note", Text(note, style="dim"))
    console.print(Text(f"What if — {title}", style="bold"))
    console.print(Text(about(tradeoff)))
    console.print(head)
    table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
    table.add_column("setting", overflow="fold", ratio=1, min_width=20)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for place, outcome in enumerate(tradeoff.outcomes):
        best, own = is_recommended(tradeoff, outcome), outcome.setting.family == "run"
        if place < _SHOWN or own:
            style = "bold green" if best else "bold" if own else ""
            table.add_row(*(Text(cell, style=style) for cell in (name_of(outcome), *cells(outcome))))
    console.print(table)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10.0 else f"{value:.3g}"


# --- page -----------------------------------------------------------------------------------------


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
    functions = (about, advice, caption, cells, is_recommended, name_of)
    report = {"COLUMNS": COLUMNS} | {function.__name__: function for function in functions}
    return {"replays": replays, "report": report, "svg": svg}


# --- plot -----------------------------------------------------------------------------------------

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
