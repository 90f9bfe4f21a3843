"""Compares two runs: differences of specs, metrics and findings, and the steps at which metrics differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Finding
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.signals import deviation, longest_true, smoothed
from rlctl.diagnose.table import RunLog, Table
from rlctl.spec.keys import changes

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

#: Runs differ where their window medians are further apart than this many robust deviations of the values of
#: both runs. (The noise of a window median is about 0.4 of such a deviation.)
APART_SIGMAS = 2.0
#: Minimum number of windows to estimate the noise from; in short logs they are smaller. (A jump affects two
#: of their five or more changes.)
_MIN_WINDOWS = 6
#: Length, in windows, of the running median that the noise is measured around.
_SMOOTHED = 5
#: Maximum number of points a metric is compared at; in longer logs, a point is the median of several steps.
_MAX_POINTS = 5000
#: Share of each run's values that must be on the same side of zero for the ratio B / A to be meaningful.
_ONE_SIDED = 0.9
#: Differences named in sentences, besides the first.
_NAMED = 3
#: Metrics of the machine, not of the training.
_MACHINE = ("perf/", "timing_s/", "timing/")


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A metric that differs between the runs for at least a window."""

    key: str  # the metric
    #: first_step, last_step: the longest stretch of steps in which it differs
    first_step: int
    last_step: int
    lasts: bool  # whether it still differs at the last shared step
    #: a, b: medians over that stretch
    a: float
    b: float
    sigmas: float  # distance of A and B in robust standard deviations of both runs' noise
    ratio: float | None  # B / A; None where the values of a run scatter around zero

    @property
    def when(self) -> str:
        """`since 40`, or `12–38`."""
        return f"since {self.first_step}" if self.lasts else f"{self.first_step}–{self.last_step}"

    def __str__(self) -> str:
        """`rollout_corr/k3_kl of B is 3.2 × A's (0.0032 and 0.001)`."""
        figures = f"({self.b:.3g} and {self.a:.3g})"
        if self.ratio is not None and not 0.8 <= self.ratio <= 1.25:
            return f"{self.key} of B is {self.ratio:.2g} × A's {figures}"
        side = "above" if self.b > self.a else "below"
        return f"{self.key} of B is {abs(self.b - self.a):.3g} {side} A's {figures}"


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Differences between two runs."""

    #: a, b: the diagnoses of both runs
    a: Diagnosis
    b: Diagnosis
    #: first and last step that both runs logged, and the number of such steps; None where there is none
    shared: tuple[int, int, int] | None
    #: the last step up to which all training metrics are equal; None where the first step differs or no
    #: metric is shared
    identical_until: int | None
    #: spec key (or known fact, where a run has no spec) → different values of A and B; None where unknown
    spec: Mapping[str, tuple[Any, Any]]
    metrics: tuple[MetricChange, ...]  # metrics that differ, the largest difference first
    same: tuple[str, ...]  # metrics with enough shared values to compare, and no such difference
    #: only_a, only_b: metrics that only one run logged
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    #: findings_a, findings_b: findings of rules that found nothing in the other run
    findings_a: tuple[Finding, ...]
    findings_b: tuple[Finding, ...]


def compare(a: Diagnosis, b: Diagnosis) -> RunComparison:
    """Compares two runs step by step."""
    columns_a, columns_b = (set(each.run.table.columns) for each in (a, b))
    shared = sorted(columns_a & columns_b)
    tables = _on_shared_steps(a.run.table, b.run.table)
    steps = tables[0].steps
    changes = [change for key in shared if (change := metric_change(key, *tables)) is not None]
    changes.sort(key=lambda change: -change.sigmas)
    differing = {change.key for change in changes}
    compared = [key for key in shared if len(_shared_values(key, *tables)[0]) >= th.WINDOW]
    return RunComparison(
        a=a,
        b=b,
        shared=(int(steps[0]), int(steps[-1]), len(steps)) if len(steps) else None,
        identical_until=_identical_until(*tables, shared),
        spec=_spec_changes(a.run, b.run),
        metrics=tuple(changes),
        same=tuple(key for key in compared if key not in differing),
        only_a=tuple(sorted(columns_a - columns_b)),
        only_b=tuple(sorted(columns_b - columns_a)),
        findings_a=_only_in(a, b),
        findings_b=_only_in(b, a),
    )


def _on_shared_steps(a: Table, b: Table) -> tuple[Table, Table]:
    """Restricts both tables to the steps that both have."""
    if np.array_equal(a.steps, b.steps):
        return a, b
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    return (
        Table(steps, {key: values[in_a] for key, values in a.columns.items()}, a.nonfinite),
        Table(steps, {key: values[in_b] for key, values in b.columns.items()}, b.nonfinite),
    )


def metric_change(key: str, a: Table, b: Table) -> MetricChange | None:
    """Finds the longest stretch of steps in which window medians differ by more than both runs' noise.

    The noise of a run is the robust deviation from a running median of five windows; the noise of both runs
    is added in quadrature. It is raised where the difference drifts from window to window more than
    independent values would, and to a small share of the level, so that a difference must also be material.

    The tables have the same steps. None if the stretch is shorter than a window.
    """
    steps, values_a, values_b = _shared_values(key, a, b)
    if len(steps) < th.WINDOW:
        return None
    # Values are reflected at the ends, because a repeated last value would dominate the median.
    medians_a, medians_b = map(smoothed, (values_a, values_b))
    noise = max(float(np.hypot(_noise(values_a), _noise(values_b))), _drift(values_b - values_a))
    floor = th.SIGMA_FLOOR * np.maximum(np.abs(medians_a), np.abs(medians_b))
    distance = (medians_b - medians_a) / np.maximum(np.maximum(noise, floor), np.finfo(float).tiny)
    apart = (side * distance > APART_SIGMAS for side in (1.0, -1.0))
    # Smoothed, so that single windows neither begin nor interrupt a stretch.
    streaks = [longest_true(smoothed(flags.astype(np.uint8)).astype(bool)) for flags in apart]
    start, length = max(streaks, key=lambda streak: streak[1])
    if length < th.WINDOW:
        return None
    inside = slice(start, start + length)
    left, right = float(np.median(values_a[inside])), float(np.median(values_b[inside]))
    sides = (values_a[inside] * left > 0.0, values_b[inside] * right > 0.0)
    has_ratio = left * right > 0.0 and min(map(np.mean, sides)) > _ONE_SIDED
    # Medians of a window, or of consecutive steps, may differ before the values themselves do.
    parted = a.steps[(a.columns[key] != b.columns[key]) & np.isfinite(a.columns[key] + b.columns[key])]
    first_step = int(parted[np.searchsorted(parted, steps[start])])
    return MetricChange(
        key=key,
        first_step=first_step,
        last_step=int(steps[start + length - 1]),
        lasts=start + length == len(steps),
        a=left,
        b=right,
        sigmas=float(np.abs(np.median(distance[inside]))),
        ratio=right / left if has_ratio else None,
    )


def _noise(values: Floats) -> float:
    """Robust standard deviation of the values around their running median."""
    size = min(_SMOOTHED * th.WINDOW, len(values) // 2 * 2 - 1)
    return float(deviation(values - smoothed(values, size, "nearest")))


def _drift(difference: Floats) -> float:
    """Noise of a value, estimated from the changes between medians of neighbouring windows.

    A single jump affects at most two of these changes, and a steady rise all alike: their median absolute
    deviation ignores both.
    """
    width = min(th.WINDOW, len(difference) // _MIN_WINDOWS)
    count = len(difference) // width
    moves = np.diff(np.median(difference[: count * width].reshape(count, width), axis=1))
    # The noise of a median of independent values is √(π / 2 width) of theirs; of a change, √2 times that.
    return float(deviation(moves)) * math.sqrt(width / math.pi)


def _shared_values(key: str, a: Table, b: Table) -> tuple[Steps, Floats, Floats]:
    """Steps at which both runs logged the metric, and the values; for many steps, medians of several."""
    values_a, values_b = a.columns[key], b.columns[key]
    logged = np.isfinite(values_a) & np.isfinite(values_b)
    steps, values_a, values_b = a.steps[logged], values_a[logged], values_b[logged]
    bucket = -(-len(steps) // _MAX_POINTS)
    if bucket > 1:
        count = len(steps) // bucket
        steps = steps[: count * bucket : bucket]
        values_a, values_b = (
            np.median(values[: count * bucket].reshape(count, bucket), axis=1)
            for values in (values_a, values_b)
        )
    return steps, values_a, values_b


def _identical_until(a: Table, b: Table, keys: Sequence[str]) -> int | None:
    """The last of the tables' steps up to which all training metrics are equal; None if there is none."""
    compared = [key for key in keys if not key.startswith(_MACHINE)]
    if not len(a.steps) or not compared:
        return None
    differs = np.zeros(len(a.steps), dtype=bool)
    for key in compared:
        left, right = a.columns[key], b.columns[key]
        differs |= (left != right) & np.isfinite(left) & np.isfinite(right)
        bad_a, bad_b = (each.nonfinite.get(key, each.steps[:0]) for each in (a, b))
        differs |= np.isin(a.steps, np.setxor1d(bad_a, bad_b))
    count = int(np.argmax(differs)) if differs.any() else len(differs)
    return int(a.steps[count - 1]) if count else None


def _spec_changes(a: RunLog, b: RunLog) -> dict[str, tuple[Any, Any]]:
    if a.spec is not None and b.spec is not None:
        return changes(a.spec, b.spec)
    left, right = asdict(a.facts), asdict(b.facts)
    return {fact: (left[fact], right[fact]) for fact in left if left[fact] != right[fact]}


def _only_in(one: Diagnosis, other: Diagnosis) -> tuple[Finding, ...]:
    found = {finding.rule for finding in other.findings}
    return tuple(finding for finding in one.findings if finding.rule not in found)


METRIC_COLUMNS = ("metric", "A", "B", "sigmas", "steps")


def metric_rows(found: RunComparison) -> list[tuple[str, ...]]:
    """One row per differing metric, under `METRIC_COLUMNS`."""
    return [(one.key, f"{one.a:.3g}", f"{one.b:.3g}", f"{one.sigmas:.1f}", one.when) for one in found.metrics]


def shown(value: Any) -> str:
    """A spec value in YAML notation; `—` for unknown and null."""
    if value is None:
        return "—"
    return str(value).lower() if isinstance(value, bool) else str(value)


def sentences(found: RunComparison) -> Iterator[str]:
    """The most important differences as sentences."""
    if found.shared is None:
        yield "The runs have no step in common: nothing can be compared."
        return
    last, until = found.shared[1], found.identical_until
    if until is not None:
        yield f"Every training metric is identical up to step {until} (except times and memory)."
    if until == last:
        return
    lasting = [change for change in found.metrics if change.lasts]
    if not found.metrics and not found.same:
        yield f"No metric can be compared: that needs {th.WINDOW} values at shared steps."
    elif not found.metrics:
        yield f"No metric differs by more than the runs' own noise, up to step {last}."
    elif not lasting:
        yield f"No difference lasts until step {last}; some were temporary."
    if lasting:
        since = min(change.first_step for change in lasting)
        first = max((c for c in lasting if c.first_step == since), key=lambda change: change.sigmas)
        start = f"Since step {since}" if since > found.shared[0] else "From the start"
        yield f"{start} {first}."
        for change in [c for c in lasting if c is not first][:_NAMED]:
            yield f"Since step {change.first_step} {change}."
    for name, findings in (("A", found.findings_a), ("B", found.findings_b)):
        for finding in findings:
            if finding.severity != "info":
                yield f"Only in {name}: {finding.what} ({finding.severity}, {finding.rule})."


def comparison_document(found: RunComparison) -> dict[str, Any]:
    """The comparison as plain values for JSON."""
    steps = dict(zip(("first", "last", "count"), found.shared, strict=True)) if found.shared else None
    return {
        "a": str(found.a.run.path),
        "b": str(found.b.run.path),
        "sentences": list(sentences(found)),
        "shared_steps": steps,
        "identical_until": found.identical_until,
        "spec": [{"key": key, "a": a, "b": b} for key, (a, b) in found.spec.items()],
        "metrics": [asdict(change) | {"sentence": str(change)} for change in found.metrics],
        "same": list(found.same),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "findings_only_a": [asdict(finding) for finding in found.findings_a],
        "findings_only_b": [asdict(finding) for finding in found.findings_b],
    }
