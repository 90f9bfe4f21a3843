"""Results as Markdown tables, and one SVG plot.

Intervals are 90 % intervals of the mean over seeds by Student's t: the worlds of one seed count as one
figure, because most of them share policies and rewards. With 5 and with 8 seeds they contain the mean in 90 %
of studies with normal figures and in 87 % with skewed ones (log-normal, σ = 0.5; `tests/unit/bench`).
Enumerated and learned worlds have separate tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.studies.gradients.exact import GradientMoments, ess_against_length
from benchmarks.studies.gradients.learned import length_shares
from benchmarks.studies.gradients.measure import BATCHES
from rlctl.evaluate.intervals import questions_needed
from rlctl.markup import table

Row = dict[str, Any]
#: (place, seed) → value.
Figures = dict[tuple[str, int], float]
#: Ranges of the effective sample size of sequence weights: lower bound, upper bound, label in tables.
REGIMES = ((0.9, 1.01, "> 0.9"), (0.5, 0.9, "0.5–0.9"), (0.1, 0.5, "0.1–0.5"), (0.0, 0.1, "< 0.1"))
#: Rules shown in the tables per place and in the plot.
SHOWN = ("no correction", "token truncate 2.0", "sequence truncate 2.0", "exact", "loss ppo_clip", "loss p3o")
LENGTHS = [1, 4, 16, 64, 256, 1024]
#: Mini-batch size, in groups, of tables that show only one.
GROUPS = 64


def error_of(row: Row, groups: float = GROUPS) -> float:
    """Relative error of a mini-batch of `groups` groups, see `GradientMoments.error`."""
    names = ("inner", "norm", "signal", "distance", "noise")
    return GradientMoments(**{name: row[name] for name in names}).error(groups)


def markdown(rows: list[Row]) -> str:
    """Returns all tables."""
    parts = []
    for kind, is_learned in (("Enumerated worlds", False), ("Learned worlds", True)):
        found = [row for row in rows if row["is_learned"] is is_learned]
        if found:
            parts += [
                (f"{kind}: what to use", decision_table(found)),
                (f"{kind}: by place", place_table(found)),
                (f"{kind}: every rule", rules_table(found)),
                (f"{kind}: defaults of other frameworks", regret_table(found)),
                (f"{kind}: number of seeds needed to distinguish two rules", separation_table(found)),
            ]
    parts += [
        ("Effective sample size against length", length_table()),
        ("Effect of stale data on response length", stale_length_table()),
    ]
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts if text)


def decision_table(rows: list[Row], best: int = 3) -> str:
    """Per ESS range and mini-batch size: the rules with the smallest mean error, the number of others that
    are as good as the first (the interval of the paired difference includes 0), and the error without
    correction."""
    head = ["effective sample size", "groups", *[f"{place}. rule" for place in range(1, best + 1)]]
    lines = []
    for low, high, name in REGIMES:
        inside = [row for row in rows if low <= row["ess"] < high]
        for groups in BATCHES if inside else ():
            found = _errors(inside, groups)
            order = _order(found)
            first = found[order[0]]
            as_good = sum(_bounds(_minus(found[rule], first))[0] <= 0.0 for rule in order[1:])
            is_single = len({seed for _, seed in first}) == 1  # a single seed has no interval
            num_distinct = "—" if is_single else f"{as_good} of {len(order) - 1}"
            cells = [f"`{rule}` {_interval(found[rule])}" for rule in order[:best]]
            lines.append([name, str(groups), *cells, num_distinct, _interval(found.get("no correction", {}))])
    return _table([*head, "as good as the 1.", "no correction"], lines)


def place_table(rows: list[Row]) -> str:
    """Per place: the rule with the smallest mean error, and the errors of selected rules."""
    lines = []
    for place in dict.fromkeys(row["place"] for row in rows):
        here = [row for row in rows if row["place"] == place]
        found = _errors(here, GROUPS)
        ess = np.mean(list({row["seed"]: row["ess"] for row in here}.values()))
        best = _order(found)[0]
        cells = [f"`{best}` {_interval(found[best])}", *[_interval(found.get(rule, {})) for rule in SHOWN]]
        lines.append([place, f"{ess:.2f}", *cells])
    head = ["place", "effective sample size", "smallest error", *[f"`{rule}`" for rule in SHOWN]]
    return _table(head, lines)


def rules_table(rows: list[Row]) -> str:
    """Per rule, over all places and seeds: medians of bias and noise, means of angle and errors."""
    by_rule = defaultdict(list)
    for row in rows:
        by_rule[row["rule"]].append(row)
    errors = {
        rule: [np.mean([error_of(x, n) for x in some]) for n in BATCHES] for rule, some in by_rule.items()
    }
    lines = []
    for rule in sorted(by_rule, key=lambda name: errors[name][BATCHES.index(GROUPS)]):
        some = by_rule[rule]
        bias = np.median([row["distance"] / row["signal"] for row in some])
        noise = np.median([row["noise"] / row["signal"] for row in some])
        cells = [f"{bias:.2g}", f"{noise:.3g}", f"{np.mean([angle(row) for row in some]):.0f}°"]
        lines.append([f"`{rule}`", *cells, *[f"{error:.3f}" for error in errors[rule]]])
    head = ["rule", r"bias²/\|g\|²", r"noise/\|g\|²", "angle", *[f"error, {n} groups" for n in BATCHES]]
    return _table(head, lines)


def angle(row: Row) -> float:
    """Angle between the rule's expected gradient and the true gradient, in degrees."""
    return float(np.degrees(np.arccos(np.clip(row["cosine"], -1, 1))))


def regret_table(rows: list[Row]) -> str:
    """Per framework default: its error minus the error of the best measured rule in the same world."""
    found = _errors(rows, GROUPS)
    keys = set[tuple[str, int]]().union(*found.values())
    least = {key: min(figures[key] for figures in found.values() if key in figures) for key in keys}
    regrets = {
        rule.removeprefix("default: "): _minus(figures, least)
        for rule, figures in found.items()
        if rule.startswith("default: ")
    }
    if not regrets:
        return ""
    lines = [
        [rule, _interval(regrets[rule]), f"{max(regrets[rule].values()):.3f}"]
        for rule in sorted(regrets, key=lambda name: _mean(regrets[name]))
    ]
    return _table(["default", "mean regret", "largest"], lines)


def separation_table(rows: list[Row]) -> str:
    """Number of seeds that a paired comparison needs, each with all places; see `worlds_to_separate`."""
    found = _errors(rows, GROUPS)
    order = _order(found)
    shown = [rule for rule in order if rule in SHOWN or rule in order[:3]][:6]
    if len(shown) < 2:
        return ""
    lines = []
    for place, rule in enumerate(shown[:-1]):
        cells = [""] * place
        for other in shown[place + 1 :]:
            sums, counts = _by_seed(_minus(found[rule], found[other]))
            cells.append(worlds_to_separate(sums / counts))
        lines.append([f"`{rule}`", *cells])
    return _table(["", *[f"`{rule}`" for rule in shown[1:]]], lines)


def worlds_to_separate(gaps: NDArray[np.float64]) -> str:
    """`questions_needed` to detect the mean of these paired differences, at least 2, or `over 10,000`."""
    if len(gaps) < 2 or not np.isfinite(gaps).all():
        return "—"
    mean = float(np.mean(gaps))
    count = questions_needed(float(np.std(gaps, ddof=1)), mean) if mean else 10_001
    return "over 10,000" if count > 10_000 else f"{max(2, count):,}"


@cache
def stale_length_table() -> str:
    """Mean response length of the training data, divided by that of the policy's own responses."""
    lines = []
    for updates in (1, 4, 16):
        for horizon in (16, 64):
            found = [length_shares("stale", updates, horizon, seed) for seed in range(3)]
            cells = [f"{np.mean([each[name] for each in found]):.3f}" for name in found[0]]
            lines.append([str(updates), str(horizon), *cells])
    return _table(["updates behind", "tokens", *found[0]], lines)


def length_table() -> str:
    """Exact effective sample size of sequence weights and its prediction exp(−T·Var log ρ)."""
    lines = []
    for sigma in (0.01, 0.03, 0.1, 0.3):
        found = ess_against_length(sigma, LENGTHS)
        cells = [f"{exact:.3g} ({predicted:.3g})" for exact, predicted in found.values()]
        lines.append([f"{sigma:g}", *cells])
    return _table(["noise of the logits", *[f"{length} tokens" for length in LENGTHS]], lines)


def _errors(rows: Iterable[Row], groups: float) -> dict[str, Figures]:
    """Errors per rule."""
    found: dict[str, Figures] = defaultdict(dict)
    for row in rows:
        found[row["rule"]][row["place"], row["seed"]] = error_of(row, groups)
    return found


def _order(found: dict[str, Figures]) -> list[str]:
    """Rules except framework defaults, sorted by mean."""
    return sorted((rule for rule in found if not rule.startswith("default")), key=lambda r: _mean(found[r]))


def _minus(one: Figures, other: Figures) -> Figures:
    """Paired differences."""
    return {key: one[key] - other[key] for key in one.keys() & other.keys()}


def _mean(figures: Figures) -> float:
    return float(np.mean([figures[key] for key in sorted(figures)]))


def _by_seed(figures: Figures) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums (seeds,) and counts (seeds,) of the values per seed."""
    seeds = {seed: place for place, seed in enumerate(sorted({seed for _, seed in figures}))}
    which = [seeds[seed] for _, seed in sorted(figures)]
    values = [figures[key] for key in sorted(figures)]
    sums, counts = np.bincount(which, values), np.bincount(which)
    return sums.astype(np.float64), counts.astype(np.float64)


def _bounds(figures: Figures) -> tuple[float, float]:
    """90 % interval of the mean by Student's t, with one degree of freedom less than there are seeds."""
    sums, counts = _by_seed(figures)
    mean = sums.sum() / counts.sum()
    deviations = (sums - mean * counts) / counts.mean()  # a seed with more worlds has more weight
    half = stats.t.ppf(0.95, len(sums) - 1) * deviations.std(ddof=1) / len(sums) ** 0.5
    return float(mean - half), float(mean + half)


def _interval(figures: Figures) -> str:
    """Mean and interval; for a single seed only the mean."""
    if not figures:
        return "—"
    if len({seed for _, seed in figures}) == 1:
        return f"{_mean(figures):.3f}"
    low, high = _bounds(figures)
    return f"{_mean(figures):.3f} ({low:.3f}–{high:.3f})"


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(table(head, lines))


# --- plot -----------------------------------------------------------------------------------------

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
    """Plots error, bias, noise and angle of the rules in `SHOWN` along every axis, as medians over seeds.

    Values are clamped to the scale. Empty if no axis has two places."""
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
