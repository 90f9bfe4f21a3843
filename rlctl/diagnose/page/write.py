"""Diagnoses as one page that needs nothing else: findings beside plots they are marked on.

What logs say may be hostile. Texts are escaped by the template or inserted as text, names reach the plots
escaped, data lies in a JSON block in which no character can end the block, and a policy lets only this
page's own scripts run and nothing be loaded. Styles are free, because plotly makes its own while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rlctl.diagnose.charts import thinned
from rlctl.diagnose.compare import Comparison
from rlctl.diagnose.compare_report import sentences, shown, when
from rlctl.diagnose.finding import Diagnosis, Finding
from rlctl.diagnose.report import verdict
from rlctl.diagnose.table import RunLog
from rlctl.diagnose.wording import (
    how_to_apply,
    is_in_other_words,
    not_checked,
    run_name,
    seen,
    settings,
    visible,
)
from rlctl.errors import EnvironmentFailure
from rlctl.html_page import csp_hash, json_block, render
from rlctl.metric_names import METRICS, describe

_HERE = Path(__file__).parent
#: Plots at first, where no finding says which.
_FIRST_PLOTS = 6


def page(diagnoses: Sequence[Diagnosis], comparison: Comparison | None = None) -> str:
    """The page as text, for one run or several, which share each plot.

    Args:
        diagnoses: of the runs.
        comparison: of the two, where there are two to be compared.

    Raises:
        EnvironmentFailure: plotly is not installed.
    """
    keys = _keys(diagnoses)
    places = {key: place for place, key in enumerate(keys)}
    style, script = (_source(_HERE / name) for name in ("report.css", "report.js"))
    library = _plotly()
    return render(
        _HERE / "report.html.j2",
        title=" · ".join(run_name(diagnosis.run) for diagnosis in diagnoses),
        runs=[_run(diagnosis, places) for diagnosis in diagnoses],
        comparison=_comparison(comparison, places) if comparison else None,
        data=json_block(_data(diagnoses, keys, comparison)),
        style=Markup(style),
        scripts=[Markup(library), Markup(script)],
        script_hashes=[csp_hash(text) for text in (library, script)],
    )


def _keys(diagnoses: Iterable[Diagnosis]) -> list[str]:
    """Every metric there is to plot, in the order of the list of metrics."""
    order = {key: place for place, key in enumerate(METRICS)}
    found = {key for diagnosis in diagnoses for key in diagnosis.run.table.columns}
    return sorted(found, key=lambda key: (order.get(key, len(order)), key))


def _data(diagnoses: Sequence[Diagnosis], keys: Sequence[str], comparison: Comparison | None) -> Any:
    """What the script draws."""
    marked = {evidence.metric for d in diagnoses for f in d.findings for evidence in f.evidence}
    differing = {change.key for change in comparison.metrics} if comparison else set()
    first = [key for key in keys if key in marked | differing] or keys[:_FIRST_PLOTS]
    return {
        "metrics": [_metric(key, is_shown=key in first) for key in keys],
        "runs": [
            {
                "name": run_name(diagnosis.run),
                "series": [_points(diagnosis.run, key) for key in keys],
                "bands": [_bands(diagnosis, key) for key in keys],
            }
            for diagnosis in diagnoses
        ],
        "since": {change.key: change.first_step for change in comparison.metrics} if comparison else {},
    }


def _metric(key: str, *, is_shown: bool) -> dict[str, Any]:
    known = describe(key)
    unit = known.unit if known and known.unit != "1" else ""
    definition = known.definition if known else ""
    return {"key": key, "name": visible(key), "unit": unit, "definition": definition, "shown": is_shown}


def _points(run: RunLog, key: str) -> list[list[float]]:
    series = thinned(run.table.series(key))
    return [series.steps.tolist(), [float(f"{value:.6g}") for value in series.values.tolist()]]


def _bands(diagnosis: Diagnosis, key: str) -> list[dict[str, Any]]:
    """Steps that a finding is about."""
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity,
            "first": evidence.first_step,
            "last": evidence.last_step,
        }
        for finding in diagnosis.findings
        for evidence in finding.evidence
        if evidence.metric == key and evidence.first_step is not None
    ]


def _run(diagnosis: Diagnosis, places: Mapping[str, int]) -> dict[str, Any]:
    run = diagnosis.run
    steps = run.table.steps
    text, severity = verdict(diagnosis)
    hit = {finding.rule for finding in diagnosis.findings}
    rules = [("found" if r.name in hit else "ok", r.name, r.looks_for) for r in diagnosis.checked]
    rules += [("SKIPPED" if s.missing else "n/a", s.rule, not_checked(s, run)) for s in diagnosis.skipped]
    return {
        "name": run_name(run),
        "about": f"steps {steps[0]:,}–{steps[-1]:,}, logged by {run.framework}",
        "verdict": text,
        "severity": severity or "healthy",
        "notes": [visible(note) for note in run.notes],
        "findings": [_finding(finding, run, places) for finding in diagnosis.findings],
        "commands": how_to_apply(run),
        "rules": rules,
    }


def _finding(finding: Finding, run: RunLog, places: Mapping[str, int]) -> dict[str, Any]:
    plotted = [places[evidence.metric] for evidence in finding.evidence if evidence.metric in places]
    origins = {e.metric: run.origins[e.metric] for e in finding.evidence if e.metric in run.origins}
    return {
        "severity": finding.severity,
        "rule": finding.rule,
        "what": visible(finding.what),
        "seen": [(seen(evidence), places.get(evidence.metric)) for evidence in finding.evidence],
        "logged": [
            visible(f"{key} as {origin.name}{f': {origin.meaning}' if origin.meaning else ''}")
            for key, origin in origins.items()
            if origin.name != key or origin.meaning
        ],
        "cause": visible(finding.cause),
        "remedies": [
            (settings(remedy, run), visible(remedy.why), is_in_other_words(remedy, run))
            for remedy in finding.remedies
        ],
        "sure": visible(": ".join(filter(None, (finding.confidence, finding.why_so_sure)))),
        "open": [visible(text) for text in finding.could_not_check],
        "source": visible(finding.source),
        "plot": plotted[0] if plotted else None,
    }


def _comparison(found: Comparison, places: Mapping[str, int]) -> dict[str, Any]:
    return {
        "sentences": [visible(sentence) for sentence in sentences(found)],
        "spec": [(change.key, shown(change.a), shown(change.b)) for change in found.spec],
        "metrics": [
            {
                "name": visible(change.key),
                "figures": (f"{change.a:.3g}", f"{change.b:.3g}", f"{change.sigmas:.1f}"),
                "when": when(change),
                "plot": places.get(change.key),
            }
            for change in found.metrics
        ],
    }


def _plotly() -> str:
    """The plotting library's script.

    Raises:
        EnvironmentFailure: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        fix = "pip install plotly, or use --format markdown"
        raise EnvironmentFailure("a page with plots needs plotly, which is not installed", fix=fix) from None
    return str(get_plotlyjs())


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")
