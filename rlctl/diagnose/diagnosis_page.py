"""Renders diagnoses as one self-contained page: findings, and plots in which they are marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.diagnose.diagnosis_report import run_report, visible
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.table import STDIN, Series, Table
from rlctl.diagnose.thresholds import RAW_ESS
from rlctl.html_page import render
from rlctl.metric_names import METRICS, describe, key_pattern
from rlctl.track.jsonl import METRICS_FILE

TEMPLATE = Path(__file__).parent / "page" / "report.html.j2"
#: Plots that every page shows first, where they were logged: reward, validation, length, KL to the sampling
#: policy, effective sample size (raw and applied), KL to the reference, entropy.
_ALWAYS = (
    "critic/score/mean",
    "val/<data_source>/reward_mean",
    "response_length/mean",
    "rollout_corr/kl",
    RAW_ESS.key,
    "rollout_corr/rollout_is_eff_sample_size",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "actor/entropy",
)
#: Number of plots shown initially where none of these was logged and no finding names a metric.
_FIRST_PLOTS = 6
#: Maximum number of points of one curve, and of all curves of a page together, at about 14 bytes each.
MAX_POINTS, ALL_POINTS = 1000, 20_000
#: Minimum number of points of one curve.
MIN_POINTS = 24
#: Metric → its title on a page; others are titled with their keys.
_TITLES = {
    "critic/score/mean": "reward",
    "val/<data_source>/reward_mean": "held-out score",
    "response_length/mean": "length",
    "response_length/clip_ratio": "responses cut off",
    RAW_ESS.key: "effective samples before correction",
    "rollout_corr/rollout_is_eff_sample_size": "effective samples after correction",
    "rollout_corr/rollout_rs_masked_fraction": "rejected",
    "rollout_corr/kl": "gap",
    "actor/kl_loss": "distance to the reference",
    "actor/reward_kl_penalty": "distance to the reference",
    "actor/entropy": "entropy",
    "actor/grad_norm": "gradient norm",
    "actor/lr": "learning rate",
    "perf/time_per_step": "seconds a step",
}


def diagnosis_page(diagnoses: Sequence[Diagnosis]) -> str:
    """The page as HTML text, for one or several runs; each plot shows all runs."""
    return render(TEMPLATE, **page_values(diagnoses))


def page_values(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Values of `TEMPLATE`, and of a template that extends it, for `render`; see `diagnosis_page`."""
    order = {key: index for index, key in enumerate(METRICS)}
    found = {key for diagnosis in diagnoses for key in diagnosis.run.table.columns}
    always = {key: index for index, key in enumerate(_always(diagnoses))}
    keys = sorted(found, key=lambda key: (always.get(key, len(always)), order.get(key, len(order)), key))
    places = {key: index for index, key in enumerate(keys)}
    names = titles([diagnosis.run.path for diagnosis in diagnoses])
    return {
        "title": " · ".join(names),
        "names": names,
        "runs": [run_report(diagnosis) for diagnosis in diagnoses],
        "places": places,  # metric → number of its plot
        "data": _data(diagnoses, names, keys),
        "style": _source("report.css"),
        "scripts": [_source("report.js")],
        "curves_first": False,
    }


def titles(paths: Sequence[Path]) -> list[str]:
    """Names of runs or logs without their directories; whole paths if two names are equal."""
    names = [path.parent.name if path.name == METRICS_FILE else path.name for path in paths]
    is_clear = len(set(names)) == len(names) and all(names) and STDIN not in paths
    return [visible(name) for name in (names if is_clear else map(str, paths))]


def _always(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The logged metrics of `_ALWAYS`, in its order."""
    matching = (key for pattern in _ALWAYS for d in diagnoses for key in d.run.table.matching(pattern))
    return list(dict.fromkeys(matching))


def _data(diagnoses: Sequence[Diagnosis], names: Sequence[str], keys: Sequence[str]) -> Any:
    """Data of the plots, for the page's script."""
    marked = {evidence.metric for d in diagnoses for f in d.findings for evidence in f.evidence}
    first = [key for key in keys if key in marked | {*_always(diagnoses)}] or keys[:_FIRST_PLOTS]
    num_curves = max(1, len(keys) * len(diagnoses))
    points = max(MIN_POINTS, min(MAX_POINTS, ALL_POINTS // num_curves))
    return {
        "metrics": [
            _metric(
                key, diagnoses, is_shown=key in first, is_flat=key not in marked and _flat(key, diagnoses)
            )
            for key in keys
        ],
        "runs": [
            {
                "name": name,
                "batch": diagnosis.run.facts.batch_size,
                "seconds": _points(thinned(_seconds(diagnosis.run.table), points)),
                "series": [_points(thinned(diagnosis.run.table.series(key), points)) for key in keys],
                "bands": [_bands(diagnosis, key) for key in keys],
            }
            for name, diagnosis in zip(names, diagnoses, strict=True)
        ],
    }


def _seconds(table: Table) -> Series:
    """Seconds of training up to each step; empty if the log has no times."""
    series = table.series(table.most_logged(("perf/time_per_step", "timing_s/step")))
    return Series(series.steps, np.cumsum(series.values))


def _flat(key: str, diagnoses: Iterable[Diagnosis]) -> bool:
    """Whether all runs logged the same value, and more than once."""
    values = np.concatenate([diagnosis.run.table.series(key).values for diagnosis in diagnoses])
    if len(values) < 2:
        return False
    return bool(np.ptp(values) <= 1e-9 * np.abs(values).max())


def title_of(key: str) -> str:
    """The title of a metric: plain words, with its data source where it has one, or else its key."""
    for pattern, title in _TITLES.items():
        match = key_pattern(pattern).fullmatch(key)
        if match:
            return visible(" ".join((title, *(f"({name})" for name in match.groupdict().values()))))
    return visible(key)


def _metric(key: str, diagnoses: Iterable[Diagnosis], *, is_shown: bool, is_flat: bool) -> dict[str, Any]:
    """Names and caption of a metric: the definition in the logs where it differs, otherwise rlctl's."""
    known = describe(key)
    unit = known.unit if known and known.unit not in {"1", "reward"} else ""
    definition = known.definition if known else ""
    logged = {d.run.origins[key]: None for d in diagnoses if key in d.run.origins}
    if any(origin.meaning for origin in logged):
        definition = "; ".join(f"{one.name}: {one.meaning or definition}" for one in logged)
    definition = visible(definition)
    names = {"key": key, "name": visible(key), "title": title_of(key)}
    return names | {"unit": unit, "definition": definition, "shown": is_shown, "flat": is_flat}


def _points(series: Series) -> list[list[float]]:
    return [series.steps.tolist(), [float(f"{value:.6g}") for value in series.values.tolist()]]


def thinned(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Reduces a series to at most `max_points` points: the lowest and the highest of each bucket.

    Spikes are therefore kept. So are the first and the last point.
    """
    if len(series) <= max_points:
        return series
    starts = series.bucket_starts(max(1, max_points // 2 - 1))
    kept = {0, len(series) - 1}
    for start, part in zip(starts.tolist(), np.split(series.values, starts[1:]), strict=True):
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


def _bands(diagnosis: Diagnosis, key: str) -> list[dict[str, Any]]:
    """Step ranges of findings, to be shaded in the plot of a metric; remarks are not shaded."""
    return [
        {"rule": finding.rule, "severity": finding.severity, "first": seen.first_step, "last": seen.last_step}
        for finding in diagnosis.findings
        for seen in finding.evidence
        if seen.metric == key and seen.first_step is not None and finding.severity != "info"
    ]


def _source(name: str) -> str:
    return TEMPLATE.with_name(name).read_text(encoding="utf-8")
