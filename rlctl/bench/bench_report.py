"""What CorrectionBench found, as Markdown tables and one picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.bench.corrections import BATCHES
from rlctl.bench.exact import GradientMoments, ess_against_length
from rlctl.bench.learned import LENGTH_RULES, length_shares

Row = dict[str, Any]
#: Effective sample size of sequence weights → what tables call it.
REGIMES = ((0.9, 1.01, "> 0.9"), (0.5, 0.9, "0.5–0.9"), (0.1, 0.5, "0.1–0.5"), (0.0, 0.1, "< 0.1"))
#: Rules of the picture.
SHOWN = ("no correction", "exact", "token truncate 2.0", "sequence truncate 2.0", "loss ppo_clip", "loss p3o")
_COLOURS = ("#444444", "#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd")
LENGTHS = [1, 4, 16, 64, 256, 1024]


def error_of(row: Row, groups: float) -> float:
    """Relative error of a mini-batch of so many groups, see `GradientMoments.error`."""
    names = ("inner", "norm", "signal", "distance", "noise")
    return GradientMoments(**{name: row[name] for name in names}).error(groups)


def markdown(rows: list[Row]) -> str:
    """All tables."""
    parts = [
        ("What to use", decision_table(rows)),
        ("Every rule", rules_table(rows)),
        ("Defaults of other frameworks", regret_table(rows)),
        ("Worlds to tell two rules apart", separation_table(rows)),
        ("Effective sample size against length", length_table()),
        ("What stale data does to response length", stale_length_table()),
    ]
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in parts if table)


def decision_table(rows: list[Row], best: int = 3) -> str:
    """Per regime and mini-batch: the rules of smallest mean error, and the error without correction."""
    head = ["effective sample size", "groups", *[f"{place}. rule" for place in range(1, best + 1)]]
    lines = [*_head([*head, "no correction"])]
    for low, high, name in REGIMES:
        inside = [row for row in rows if low <= row["ess"] < high]
        for groups in BATCHES if inside else ():
            found = _errors(inside, groups)
            order = sorted(
                (rule for rule in found if not rule.startswith("default")), key=lambda r: np.mean(found[r])
            )
            cells = [f"`{rule}` {_interval(found[rule])}" for rule in order[:best]]
            lines.append(_line([name, str(groups), *cells, _interval(found.get("no correction", []))]))
    return "\n".join(lines)


def rules_table(rows: list[Row]) -> str:
    """Per rule, means over all places and seeds."""
    lines = _head(["rule", "bias²/|g|²", "noise/|g|²", "angle", *[f"error, {n} groups" for n in BATCHES]])
    by_rule = defaultdict(list)
    for row in rows:
        by_rule[row["rule"]].append(row)
    errors = {
        rule: [np.mean([error_of(x, n) for x in some]) for n in BATCHES] for rule, some in by_rule.items()
    }
    for rule in sorted(by_rule, key=lambda name: errors[name][1]):
        some = by_rule[rule]
        bias = np.mean([row["distance"] / row["signal"] for row in some])
        noise = np.mean([row["noise"] / row["signal"] for row in some])
        angle = np.mean([np.degrees(np.arccos(np.clip(row["cosine"], -1, 1))) for row in some])
        cells = [f"{bias:.2g}", f"{noise:.3g}", f"{angle:.0f}°", *[f"{error:.3f}" for error in errors[rule]]]
        lines.append(_line([f"`{rule}`", *cells]))
    return "\n".join(lines)


def regret_table(rows: list[Row]) -> str:
    """Per default: its error less that of the best measured rule in the same world, with 64 groups."""
    places: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in rows:
        places[row["place"], row["seed"]][row["rule"]] = error_of(row, 64)
    regrets: dict[str, list[float]] = defaultdict(list)
    for errors in places.values():
        least = min(errors.values())
        for rule, error in errors.items():
            if rule.startswith("default: "):
                regrets[rule.removeprefix("default: ")].append(error - least)
    if not regrets:
        return ""
    lines = _head(["default", "mean regret", "largest"])
    for rule in sorted(regrets, key=lambda name: np.mean(regrets[name])):
        lines.append(_line([rule, _interval(regrets[rule]), f"{max(regrets[rule]):.3f}"]))
    return "\n".join(lines)


def separation_table(rows: list[Row], best: int = 6) -> str:
    """Independent worlds that a paired comparison takes, see `worlds_to_separate`, with 64 groups."""
    by_rule: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for row in rows:
        if not row["rule"].startswith("default"):
            by_rule[row["rule"]][row["place"], row["seed"]] = error_of(row, 64)
    order = sorted(by_rule, key=lambda rule: np.mean(list(by_rule[rule].values())))
    shown = [rule for rule in order if rule in SHOWN or rule in order[: best // 2]][:best]
    if len(shown) < 2:
        return ""
    lines = _head(["", *[f"`{rule}`" for rule in shown[1:]]])
    for place, rule in enumerate(shown[:-1]):
        cells = [""] * place
        for other in shown[place + 1 :]:
            common = sorted(by_rule[rule].keys() & by_rule[other].keys())
            gaps = np.array([by_rule[rule][key] - by_rule[other][key] for key in common])
            cells.append(worlds_to_separate(gaps))
        lines.append(_line([f"`{rule}`", *cells]))
    return "\n".join(lines)


def worlds_to_separate(gaps: NDArray[np.float64]) -> str:
    """How many paired differences like these show their sign: a two-sided test at 5 % with a power of 80 %.

    n = (z₀.₉₇₅ + z₀.₈)² · var / mean² (normal approximation, Student's t ignored); `over 10,000` beyond that.
    """
    mean, spread = float(np.mean(gaps)), float(np.std(gaps, ddof=1)) if len(gaps) > 1 else np.nan
    if not np.isfinite(spread):
        return "—"
    if spread == 0.0:
        return "2" if mean else "over 10,000"
    count = (1.959964 + 0.841621) ** 2 * spread**2 / mean**2 if mean else np.inf
    return "over 10,000" if count > 10_000 else f"{max(2, int(np.ceil(count))):,}"


def stale_length_table() -> str:
    """Mean response length of what is trained on, as a share of that of the policy's own responses."""
    lines = _head(["updates behind", "tokens", *LENGTH_RULES])
    for updates in (1, 4, 16):
        for horizon in (16, 64):
            found = [length_shares("stale", updates, horizon, seed) for seed in range(3)]
            cells = [f"{np.mean([each[name] for each in found]):.3f}" for name in LENGTH_RULES]
            lines.append(_line([str(updates), str(horizon), *cells]))
    return "\n".join(lines)


def length_table() -> str:
    """Exact effective sample size of sequence weights and its prediction exp(−T·Var log ρ)."""
    lines = _head(["noise of the logits", *[f"{length} tokens" for length in LENGTHS]])
    for sigma in (0.01, 0.03, 0.1, 0.3):
        found = ess_against_length(sigma, LENGTHS)
        cells = [f"{exact:.3g} ({predicted:.3g})" for exact, predicted in found.values()]
        lines.append(_line([f"{sigma:g}", *cells]))
    return "\n".join(lines)


def picture(rows: list[Row], groups: int = 64) -> str:
    """SVG: error against the size of the mismatch, means over seeds."""
    series: dict[str, dict[float, list[float]]] = {name: defaultdict(list) for name in SHOWN}
    for row in rows:
        if row["axis"] == "KL" and row["rule"] in series:
            series[row["rule"]][float(row["place"].split()[1].rstrip(","))].append(error_of(row, groups))
    series = {name: line for name, line in series.items() if line}
    sizes = sorted({size for line in series.values() for size in line})
    if not sizes:
        return ""
    width, height, left, top = 640, 360, 60, 20
    inner_w, inner_h = width - left - 190, height - top - 50

    def at(place: int, error: float) -> str:
        return f"{left + inner_w * place / max(len(sizes) - 1, 1):.1f},{top + inner_h * (1 - error):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(0, tick).split(",")
        parts.append(
            f'<path d="M{x} {y}h{inner_w}" stroke="#ddd"/><text x="{left - 34}" y="{y}">{tick:g}</text>'
        )
    for place, size in enumerate(sizes):
        x = at(place, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{top + inner_h + 18}" text-anchor="middle">{size:g}</text>')
    label = f"size of the mismatch; relative error of the gradient of {groups} groups"
    parts.append(f'<text x="{left}" y="{height - 10}">{label}</text>')
    for (name, line), colour in zip(series.items(), _COLOURS, strict=False):
        points = " ".join(at(sizes.index(size), float(np.mean(line[size]))) for size in sorted(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        line_at = top + 16 * (1 + list(series).index(name))
        parts.append(f'<text x="{left + inner_w + 12}" y="{line_at}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _errors(rows: Iterable[Row], groups: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[row["rule"]].append(error_of(row, groups))
    return found


def _interval(values: list[float]) -> str:
    """Mean, and the 90 % interval of it by bootstrap over worlds."""
    if not values:
        return "—"
    draws = np.random.default_rng(0).choice(values, (1000, len(values))).mean(1)
    low, high = np.quantile(draws, [0.05, 0.95])
    return f"{np.mean(values):.3f} ({low:.3f}–{high:.3f})"


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
