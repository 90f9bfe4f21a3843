"""Self-contained HTML page about one or more runs: curves, findings, spec, validation, samples, what-if."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.diagnose.diagnosis_page import TEMPLATE, page_values
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.errors import UsageError, visible
from rlctl.html_page import render
from rlctl.metric_names import ELSEWHERE, METRICS
from rlctl.report.run_sections import SHADES, sample_note, sample_steps, spec_rows, validation_rows
from rlctl.track.open_run import open_run, read_state
from rlctl.what_if import what_if_report
from rlctl.what_if.what_if_run import what_if

_HERE = Path(__file__).parent


def run_page(runs: Sequence[Path], *, with_what_if: bool = True) -> str:
    """Renders the page as HTML text; each plot shows all runs.

    `with_what_if` evaluates the saved rollouts under other corrections, which takes seconds per run.

    Raises:
        UsageError: a path is not a run directory, or the run has logged nothing.
        EnvironmentFailure: plotly is not installed.
    """
    records = [open_run(path) for path in runs]
    wanted = frozenset({*METRICS, *ELSEWHERE, *metrics_read()})
    values = page_values([examine(read_run(path, wanted)) for path in runs])
    replays = []
    for path in runs if with_what_if else ():
        try:
            replays.append((visible(str(path)), what_if(path)))
        except UsageError:  # the run saved no responses
            continue
    values["style"] += what_if_report.section_style() + (_HERE / "run_page.css").read_text(encoding="utf-8")
    details: list[dict[str, Any]] = []
    for record in records:
        state = read_state(record.path)
        than, rows = spec_rows(record)
        steps = sample_steps(record)
        details.append(
            {
                "name": visible(str(record.path)),
                "state": f"{state.state} after step {state.step} of {state.total_steps or '?'}",
                "model": visible(state.model),
                "reason": visible(state.reason or ""),
                "than": visible(than),
                "spec": rows,
                "validation": validation_rows(record.rows()),
                "steps": steps,
                "note": sample_note(steps),
            }
        )
    return render(
        _HERE / "run_page.html.j2",
        folders=[TEMPLATE.parent, what_if_report.FOLDER],
        details=details,
        shades=SHADES,
        **values,
        **what_if_report.section_values(replays),
    )
