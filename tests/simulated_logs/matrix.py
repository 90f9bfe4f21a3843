"""Every rule on every simulated fault, in every framework's format; and healthy runs, which must have no
finding.

As for a user, a log is written to disk, read and examined; no object is passed in memory.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose.finding import SEVERITIES, Finding, Severity
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import Diagnosis, Rule, all_rules, examine, metrics_read
from rlctl.diagnose.table import RunLog, Table
from rlctl.run_spec.load import load_spec
from tests.simulated_logs.faults import FAULTS, STEPS, Fault
from tests.simulated_logs.healthy import KINDS, Kind
from tests.simulated_logs.simulate import Row, healthy_rows, interrupted, roughen, settle
from tests.simulated_logs.writers import FORMATS, Format, write_log

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from rlctl.run_spec.run_spec import RunSpec

#: Called with the logs done and the logs in all.
Progress = Callable[[int, int], None]

HEALTHY_FORMATS: tuple[Format, ...] = ("rlctl", "verl", "trl")


@dataclass(frozen=True, slots=True)
class Trial:
    """One log and what came of it.

    Attributes:
        rule: whose fault was planted; empty in a healthy run.
        kind: degree of the fault, or kind of healthy run.
        form: whose format the log is in.
        seed: of the noise.
        wanted: expected result: a severity, `skipped`, or `quiet`.
        problem: error in the actual result; empty if there is none.
        delay: steps from the fault's first step to the first finding of the expected severity; None: not
            measured.
    """

    rule: str
    kind: str
    form: Format
    seed: int
    wanted: Severity | str
    problem: str = ""
    delay: int | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """All trials."""

    trials: tuple[Trial, ...]

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Faults that were missed, and alarms about healthy runs."""
        return tuple(trial for trial in self.trials if trial.problem)

    def table(self) -> RichTable:
        """Detected of planted per rule and format, alarms of healthy logs per kind.

        `n/a` where a format cannot show the fault; the delay in steps is the median and the longest.
        """
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("rule", no_wrap=True)
        for form in FORMATS:
            table.add_column(form, justify="right")
        table.add_column("delay", justify="right")
        for rule in all_rules():
            own = [trial for trial in self.trials if trial.rule == rule.name]
            delays = [trial.delay for trial in own if trial.delay is not None]
            late = f"{statistics.median(delays):.0f} … {max(delays)}" if delays else ""
            table.add_row(rule.name, *(_detected(own, form) for form in FORMATS), late)
        table.add_section()
        table.add_row(
            "[bold]healthy run[/]", *("[bold]alarms[/]" if f in HEALTHY_FORMATS else "" for f in FORMATS)
        )
        for kind in KINDS:
            own = [trial for trial in self.trials if not trial.rule and trial.kind == kind.name]
            table.add_row(kind.name, *(_alarms(own, form) for form in FORMATS))
        return table

    def summary(self) -> str:
        """Counts, in a line."""
        counts, failed = (Counter(map(_sort, trials)) for trials in (self.trials, self.failures))
        return (
            f"{counts['fault'] - failed['fault']} of {counts['fault']} faults detected, "
            f"{counts['blind'] - failed['blind']} of {counts['blind']} skipped where the log lacks "
            "the metric, "
            f"{failed['healthy']} alarms in {counts['healthy']} healthy logs"
        )


def _sort(trial: Trial) -> str:
    if not trial.rule:
        return "healthy"
    return "blind" if trial.wanted == "skipped" else "fault"


def _detected(trials: list[Trial], form: Format) -> str:
    here = [trial for trial in trials if trial.form == form]
    if not here:
        return ""
    good = sum(not trial.problem for trial in here)
    if all(trial.wanted == "skipped" for trial in here):
        return "[dim]n/a[/]" if good == len(here) else "[bold red]not skipped[/]"
    return f"{good}/{len(here)}" if good == len(here) else f"[bold red]{good}/{len(here)}[/]"


def _alarms(trials: list[Trial], form: Format) -> str:
    here = [trial for trial in trials if trial.form == form]
    if not here:
        return ""
    bad = sum(bool(trial.problem) for trial in here)
    return f"{bad}/{len(here)}" if not bad else f"[bold red]{bad}/{len(here)}[/]"


def run(seeds: int, progress: Progress, *, sample: bool = False) -> Matrix:
    """Simulate, write, read and examine every log.

    Args:
        seeds: of every fault and kind of healthy run.
        progress: told after every log.
        sample: every fault and every kind of healthy run in one format only; they take turns with formats.
    """
    jobs = list(_sampled(_jobs(seeds)) if sample else _jobs(seeds))
    trials = []
    with tempfile.TemporaryDirectory(prefix="rlctl-matrix-") as where:
        for form in FORMATS:  # one's spec would be taken for another's
            (Path(where) / form).mkdir()
        for done, (planned, form, seed) in enumerate(jobs):
            trials.append(_try(planned, form, seed, Path(where) / form))
            progress(done + 1, len(jobs))
    return Matrix(tuple(trials))


def _jobs(seeds: int) -> Iterator[tuple[Fault | Kind, Format, int]]:
    """A fault's own formats with every seed; the others once, where the fault is worst."""
    for fault in FAULTS:
        yield from ((fault, form, seed) for form in fault.formats for seed in range(seeds))
        if fault.degree == "severe":
            yield from ((fault, form, 0) for form in HEALTHY_FORMATS if form not in fault.formats)
    for kind in KINDS:
        yield from ((kind, form, seed) for form in HEALTHY_FORMATS for seed in range(seeds))


def _sampled(
    jobs: Iterator[tuple[Fault | Kind, Format, int]],
) -> Iterator[tuple[Fault | Kind, Format, int]]:
    """Of the jobs of each planned fault or kind one in which it can be seen, and every fifth other one."""
    for place, (planned, own) in enumerate(itertools.groupby(jobs, key=lambda job: job[0])):
        every = list(own)
        seen = [job for job in every if not isinstance(planned, Fault) or job[1] in planned.formats]
        yield seen[place % len(seen)]
        yield from [job for job in every if job not in seen][: place % 5 == 0]


def _try(planned: Fault | Kind, form: Format, seed: int, directory: Path) -> Trial:
    log = write_log(form, simulated(planned, seed), spec_of(planned.overrides), directory)
    diagnosis = examine(read_run(log, metrics_read()))
    if isinstance(planned, Kind):
        return _healthy(planned, diagnosis, form, seed)
    if form not in planned.formats:
        skipped = any(one.rule == planned.rule for one in diagnosis.skipped)
        problem = "" if skipped else "judged without what it takes"
        return Trial(planned.rule, planned.degree, form, seed, "skipped", problem)
    [rule] = [one for one in all_rules() if one.name == planned.rule]
    wanted = planned.expected(form)
    found = next((finding for finding in diagnosis.findings if finding.rule == rule.name), None)
    if not _reaches(found, wanted):
        said = f"only {found.severity}: {found.what}" if found else "nothing found"
        return Trial(rule.name, planned.degree, form, seed, wanted, said)
    delay = _delay(rule, diagnosis.run, planned.onset, wanted) if form == planned.formats[0] else None
    return Trial(rule.name, planned.degree, form, seed, wanted, "", delay)


def _healthy(kind: Kind, diagnosis: Diagnosis, form: Format, seed: int) -> Trial:
    alarms = [f"[{one.rule}] {one.what}" for one in diagnosis.findings if one.severity != "info"]
    return Trial("", kind.name, form, seed, "quiet", "; ".join(alarms))


def simulated(planned: Fault | Kind, seed: int) -> list[Row]:
    """The rows of one run; every other seed's is interrupted once, and rows are lost."""
    steps, roughness = (planned.steps, planned.roughness) if isinstance(planned, Kind) else (STEPS, 1.0)
    rows = healthy_rows(steps, seed)
    if isinstance(planned, Kind):
        planned.apply(rows, seed)
    else:
        planned.plant(rows, seed)
    roughen(rows, seed, drift=0.02 * roughness, jumps=0.04 * roughness)
    settle(rows)
    return interrupted(rows, seed) if seed % 2 else rows


@cache
def spec_of(overrides: tuple[str, ...]) -> RunSpec:
    """The default spec with these changes."""
    return load_spec(["rloo-seq-is"], [], list(overrides)).spec


def until(run: RunLog, count: int) -> RunLog:
    """The run as it was after its first `count` logged steps."""
    table, last = run.table, run.table.steps[count - 1]
    columns = {key: values[:count] for key, values in table.columns.items()}
    nonfinite = {key: at[at <= last] for key, at in table.nonfinite.items()}
    seen = {key: at for key, at in nonfinite.items() if len(at)}
    logged = {key: values for key, values in columns.items() if np.isfinite(values).any() or key in seen}
    return replace(run, table=Table(table.steps[:count], logged, seen))


def _reaches(found: Finding | object, severity: Severity) -> bool:
    return isinstance(found, Finding) and SEVERITIES.index(found.severity) <= SEVERITIES.index(severity)


def _delay(rule: Rule, run: RunLog, onset: int, wanted: Severity) -> int:
    """Steps from the onset to the first finding of the expected severity, with the rule applied after every
    step.

    Bisection: after the first such finding, the rule keeps reporting it.
    """
    places = range(int((run.table.steps < onset).sum()) + 1, len(run.table.steps) + 1)
    first = bisect_left(places, True, key=lambda place: _reaches(rule.apply(until(run, place)), wanted))
    return int(run.table.steps[places[first] - 1]) - onset


if __name__ == "__main__":  # the table of docs/evidence/diagnose-validation.md
    from rich.console import Console

    found = run(2, lambda done, total: None)
    Console().print(found.table(), f"\n{found.summary()}")
