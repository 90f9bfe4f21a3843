"""Measures lead time, false alarms and calibration of forecasts, rules and rldoctor on runs that collapse.

    pip install rldoctor        # into a separate environment
    python benchmarks/forecast.py [--runs 500] [--minutes M] [--rldoctor PATH/TO/python] [--directory DIR]

Trains the missing runs (benchmarks/forecast_runs.py), evaluates each run as guardrails do (every five steps,
on the log up to that step; called an evaluation step below), and writes `benchmarks/forecast_results.md`,
which the documentation includes. Runs and rldoctor's results are stored; after an interruption, the same
command continues.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.forecast_runs import (
    RUNS,
    STEPS,
    Planned,
    finished,
    guarded,
    planned,
    run_dir,
    slow,
    train_missing,
)
from rlctl.diagnose import forecast as forecast_module
from rlctl.diagnose.forecast import forecasts
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import RunLog, Series, Table

RESULTS = Path(__file__).parent / "forecast_results.md"
LOOKS = range(10, STEPS + 1, 5)
#: A run has collapsed if its validation score is below this share of its best previous score.
COLLAPSED = 0.5
#: Number of values whose median must be beyond a level for the level to count as reached.
REACHED = 5
#: Minimum distance of a slope from 0, in standard errors, for an alarm; points of the ROC.
STRICTNESS = (1.0, 2.0, 3.0, 6.0, 9.0)
SEVERITIES = ("info", "warning", "critical")
#: Program for rldoctor in its own environment: reads rows, prints detectors and severities per evaluation
#: step.
_THEIRS = """
import json, sys
from rl_doctor import diagnose, run_from_records
for line in sys.stdin:
    looks, rows = json.loads(line)
    answer = []
    for look in looks:
        found = diagnose(run_from_records([row for row in rows if row["step"] <= look])).findings
        answer.append([[one.detector, one.severity.name.lower()] for one in found])
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run, and the alarms of each tool at every evaluation step.

    Attributes:
        planned: plan of the run.
        log: log as read by `diagnose`.
        collapse: step of the collapse; None: the run did not collapse.
        said: tool → per evaluation step (name, severity) of every finding.
        ahead: forecasts of every evaluation step, with the shipped thresholds.
    """

    planned: Planned
    log: RunLog
    collapse: int | None
    said: dict[str, list[list[tuple[str, Any]]]]
    ahead: list[tuple[forecast_module.Forecast, ...]]

    @property
    def is_healthy(self) -> bool:
        """Whether the run was planned as healthy and did not collapse."""
        return self.planned.cause == "healthy" and self.collapse is None


# --- evaluation of the runs -----------------------------------------------------------------------


def upto(run: RunLog, step: int) -> RunLog:
    """The log up to `step`."""
    from dataclasses import replace

    count = int(np.searchsorted(run.table.steps, step, "right"))
    columns = {key: column[:count] for key, column in run.table.columns.items()}
    nonfinite = {key: steps[steps <= step] for key, steps in run.table.nonfinite.items() if steps[0] <= step}
    return replace(run, table=Table(run.table.steps[:count], columns, nonfinite))


def collapse_of(log: RunLog) -> int | None:
    """Step at which the validation score fell below `COLLAPSED` of its best score and stayed below.

    Validation is greedy and graded by the task's grader, so neither the engine's temperature nor a wrong
    training grader changes it.
    """
    validation = log.validation
    return _fallen(validation.steps, validation.values, 2)


def _fallen(steps: Any, values: Any, least: int) -> int | None:
    """First step from which on all values, at least `least`, are below `COLLAPSED` of the best so far."""
    below = values < COLLAPSED * np.maximum.accumulate(values)
    if len(below) < least or not below[-least:].all():
        return None
    first = len(below) - int(np.argmin(below[::-1])) if not below.all() else 0
    return int(steps[first])


def look(one: Planned, directory: Path, rldoctor: Path | None) -> Run:
    """Evaluates one run at every evaluation step; rldoctor's results are stored, all others are computed each
    time."""
    where = run_dir(directory, one.number)
    log = read_run(where / "metrics.jsonl", metrics_read())
    then = [upto(log, step) for step in LOOKS]
    every = [forecasts(run, min(STRICTNESS)) for run in then]
    ahead = [_sure(found, forecast_module.SLOPE_ERRORS) for found in every]
    said: dict[str, list[list[tuple[str, Any]]]] = {
        "forecast": [_before_the_end(found) for found in ahead],
        "rules": [[(f.rule, f.severity) for f in examine(run).findings] for run in then],
    }
    for strict in STRICTNESS:
        said[f"forecast {strict:g}"] = [_before_the_end(_sure(found, strict)) for found in every]
    if rldoctor is not None:
        said["rldoctor"] = _remembered(where / "rldoctor.json", lambda: _theirs(where, rldoctor))
    collapse = collapse_of(log)
    return Run(one, log, collapse, said, ahead)


def _sure(found: Iterable[forecast_module.Forecast], errors: float) -> tuple[forecast_module.Forecast, ...]:
    """Forecasts whose slope is at least `errors` standard errors from 0."""
    return tuple(one for one in found if one.slope_errors >= errors)


def _before_the_end(found: Iterable[forecast_module.Forecast]) -> list[tuple[str, Any]]:
    """Alarms for levels that are forecast to be reached before the end of the run."""
    return [(one.level.key, "warning") for one in found if one.step <= STEPS]


def _theirs(where: Path, python: Path) -> Any:
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    question = json.dumps([list(LOOKS), [{k: v for k, v in row.items() if k != "timestamp"} for row in rows]])
    done = subprocess.run([python, "-c", _THEIRS], input=question, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _remembered(path: Path, compute: Callable[[], Any]) -> Any:
    if not path.exists():
        path.write_text(json.dumps(compute()))
    return json.loads(path.read_text())


# --- statistics -----------------------------------------------------------------------------------


def alarmed(run: Run, tool: str, least: str = "warning") -> list[int]:
    """Evaluation steps with an alarm of at least this severity."""
    enough = SEVERITIES[SEVERITIES.index(least) :]
    return [
        step
        for step, found in zip(LOOKS, run.said[tool], strict=True)
        if any(severity in enough for _, severity in found)
    ]


def new_alarms(run: Run, tool: str) -> int:
    """Number of alarms that the previous evaluation step did not have."""
    before: set[str] = set()
    count = 0
    for found in run.said[tool]:
        now = {name for name, severity in found if severity != "info"}
        count, before = count + len(now - before), now
    return count


def leads(runs: Iterable[Run], tool: str) -> list[int | None]:
    """Steps from the first alarm to the collapse, per collapsed run; None: no alarm."""
    return [
        run.collapse - first[0] if (first := alarmed(run, tool)) else None
        for run in runs
        if run.collapse is not None
    ]


def rates(runs: Sequence[Run], tool: str, least: str = "warning") -> tuple[str, str]:
    """Number of collapses with an alarm at least one step before, and of healthy runs with an alarm."""
    sick = [run for run in runs if run.collapse is not None]
    well = [run for run in runs if run.is_healthy]
    hits = sum(any(step < run.collapse for step in alarmed(run, tool, least)) for run in sick if run.collapse)
    wrong = sum(bool(alarmed(run, tool, least)) for run in well)
    return f"{hits} of {len(sick)}", f"{wrong} of {len(well)}"


def reached_at(series: Series, level: forecast_module.Level, after: int) -> int | None:
    """First step after `after` at which the median of `REACHED` surrounding values is beyond the level."""
    from rlctl.diagnose.signals import smoothed

    medians = smoothed(series.values, REACHED)
    beyond = (medians <= level.value if level.is_floor else medians >= level.value) & (series.steps > after)
    return int(series.steps[int(np.argmax(beyond))]) if beyond.any() else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one forecast.

    `inside`, `early` or `late`: the level was reached in, before or after the interval. `never`: the interval
    passed. `open`: the run ended before the end of the interval.
    """

    run: int
    key: str
    what: str


def outcomes(runs: Iterable[Run]) -> Iterator[Outcome]:
    """Yields the result of every forecast at every evaluation step, also if its interval ends after the
    run."""
    for run in runs:
        for step, found in zip(LOOKS, run.ahead, strict=True):
            for one in found:
                at = reached_at(run.log.table.series(one.level.key), one.level, step)
                if at is None:
                    what = "never" if one.high <= STEPS else "open"
                else:
                    what = "early" if at < one.low else "late" if at > one.high else "inside"
                yield Outcome(run.planned.number, one.level.key, what)


def coverage(found: Sequence[Outcome]) -> str:
    """Share of `inside` among forecasts that are not `open`, with a 95 % interval by bootstrap over runs."""
    decided = [one for one in found if one.what != "open"]
    if not decided:
        return "—"
    by_run: dict[int, list[bool]] = {}
    for one in decided:
        by_run.setdefault(one.run, []).append(one.what == "inside")
    rng, groups = np.random.default_rng(0), list(by_run.values())
    shares = [
        np.mean([hit for i in rng.integers(0, len(groups), len(groups)) for hit in groups[i]])
        for _ in range(2000)
    ]
    low, high = np.quantile(shares, [0.025, 0.975])
    share = np.mean([one.what == "inside" for one in decided])
    return f"{share:.0%} ({low:.0%}–{high:.0%})"


# --- tables ---------------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> str:
    """Returns all tables as Markdown."""
    parts = {
        "development": [run for run in runs if not run.planned.held_out],
        "held out": [run for run in runs if run.planned.held_out],
    }
    tools = [tool for tool in ("forecast", "rules", "rldoctor") if tool in runs[0].said]
    blocks = [_runs_table(runs), _lead_table(parts, tools), _roc_table(parts, tools), _coverage_table(parts)]
    return "\n\n".join(blocks) + "\n"


def _runs_table(runs: Sequence[Run]) -> str:
    lines = [f"{len(runs)} of {RUNS} planned runs of {STEPS} steps.", ""]
    lines += ["| cause | part | runs | collapsed | step of the collapse, median |", "|---|---|---|---|---|"]
    for part in (False, True):
        for cause in dict.fromkeys(run.planned.cause for run in runs):
            here = [run for run in runs if run.planned.cause == cause and run.planned.held_out == part]
            steps = [run.collapse for run in here if run.collapse is not None]
            if here:
                name, middle = "held out" if part else "development", f"{median(steps):g}" if steps else "—"
                lines.append(f"| {cause} | {name} | {len(here)} | {len(steps)} | {middle} |")
    return "\n".join(lines)


def _lead_table(parts: dict[str, list[Run]], tools: Sequence[str]) -> str:
    lines = [
        "| part | tool | collapses with an alarm before | steps from the first alarm to the collapse, median "
        "(quartiles) | healthy runs alarmed | false alarms per 1,000 healthy steps |",
        "|---|---|---|---|---|---|",
    ]
    for part, runs in parts.items():
        well = [run for run in runs if run.is_healthy]
        for tool in tools:
            known = [lead for lead in leads(runs, tool) if lead is not None]
            hits, wrong = rates(runs, tool)
            lead = "—"
            if known:
                low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
                lead = f"{middle:g} ({low:g} … {high:g})"
            count = sum(new_alarms(run, tool) for run in well)
            per = f"{1000 * count / (len(well) * STEPS):.1f}" if well else "—"
            lines.append(f"| {part} | {tool} | {hits} | {lead} | {wrong} | {per} |")
    return "\n".join(lines)


def _roc_table(parts: dict[str, list[Run]], tools: Sequence[str]) -> str:
    points = [
        ("forecast", f"forecast {strict:g}", "warning", f"slope {strict:g} errors") for strict in STRICTNESS
    ]
    shipped = f"slope {forecast_module.SLOPE_ERRORS:g} errors, as shipped"
    points.append(("forecast", "forecast", "warning", shipped))
    points.sort(key=lambda point: float(point[3].split()[1]))
    points += [(tool, tool, least, f"{least} or worse") for tool in tools[1:] for least in SEVERITIES]
    head = " | ".join(f"{part}: collapses announced | healthy alarmed" for part in parts)
    lines = [f"| tool | alarm at | {head} |", "|---|---|" + "---|---|" * len(parts)]
    for name, tool, least, what in points:
        cells = " | ".join(" | ".join(rates(runs, tool, least)) for runs in parts.values())
        lines.append(f"| {name} | {what} | {cells} |")
    return "\n".join(lines)


def _coverage_table(parts: dict[str, list[Run]]) -> str:
    lines = [
        "| part | forecasts (runs) | inside, of those decided (95 % interval) | inside, of levels that were "
        "reached | early | late | never | open |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, runs in parts.items():
        found = list(outcomes(runs))
        counts = {what: sum(one.what == what for one in found) for what in ("early", "late", "never", "open")}
        met = [one for one in found if one.what in {"inside", "early", "late"}]
        lines.append(
            f"| {part} | {len(found)} ({len({one.run for one in found})}) | {coverage(found)} "
            f"| {coverage(met)} | {' | '.join(map(str, counts.values()))} |"
        )
    return "\n".join(lines)


#: Values of `on_forecast` (`warn`: rules only), and seeds of the slow runs, in the repetitions.
ARMS, SLOW_SEEDS = ("warn", "scale_lr", "checkpoint_and_stop"), (1, 2)
#: Maximum number of planned runs that are repeated (the first ones).
REPEATED = 3


def repetitions(runs: Iterable[Run], directory: Path) -> list[tuple[Planned, Path]]:
    """Repetitions, with acting guardrails, of slow collapses and of runs that collapsed after a forecast."""
    forecast_in_time = [
        run.planned
        for run in runs
        if run.collapse is not None and any(step < run.collapse for step in alarmed(run, "forecast"))
    ]
    again = [slow(seed) for seed in SLOW_SEEDS] + forecast_in_time[:REPEATED]
    return [
        (guarded(one, arm), directory / "guarded" / f"{one.number:03d}-{arm}")
        for one in again
        for arm in ARMS
    ]


def guarded_table(repeated: Sequence[tuple[Planned, Path]]) -> str:
    """One line per run: its last validation score with rules only and with forecasts."""
    lines = [
        "| run | cause | validation at first | rules alone | `scale_lr` | `checkpoint_and_stop` |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[int, list[str]] = {}
    for one, where in repeated:
        log = read_run(where / "metrics.jsonl", metrics_read())
        score, last = log.validation.values, int(log.table.steps[-1])
        row = rows.setdefault(one.number, [str(one.number), f"{one.cause}, {one.detail}", f"{score[0]:.2f}"])
        row.append(f"{score[-1]:.2f}" + (f", ended at step {last}" if last < STEPS else ""))
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows.values())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="the first so many")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="train no longer than this; 0: report"
    )
    parser.add_argument("--directory", type=Path, default=Path("forecast-runs"), help="of the runs")
    parser.add_argument("--rldoctor", type=Path, help="a Python that has rldoctor; left out without")
    options = parser.parse_args()
    until = time.time() + 60 * options.minutes
    train_missing(((planned(i), run_dir(options.directory, i)) for i in range(options.runs)), until)
    runs = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for run in pool.map(
            partial(look, directory=options.directory, rldoctor=options.rldoctor),
            finished(options.directory),
        ):
            runs.append(run)
            one = run.planned
            print(one.number, one.cause, one.detail, "collapse:", run.collapse, file=sys.stderr, flush=True)
    wanted = repetitions(runs, options.directory)
    train_missing(wanted, until)
    missing = {one.number for one, where in wanted if not (where / "done").exists()}
    repeated = [(one, where) for one, where in wanted if one.number not in missing]
    RESULTS.write_text(f"{report(runs)}\n{guarded_table(repeated)}\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
