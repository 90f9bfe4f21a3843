"""Measures whether `rlctl diagnose` finds planted faults in rlctl's, verl's and TRL's logs.

    python benchmarks/studies/pathologies.py [--seeds 1] [--directory DIR]

Every fault of `benchmarks/studies/planted.py` is a real run of the embedded model. rlctl's log is diagnosed
unchanged; verl's and TRL's logs are written from it with those frameworks' names, and only with metrics that
they log. Metrics that TRL logs and rlctl does not (mean |log-prob difference|, standard deviation of the
rewards) are computed from the run's dumped responses. No log is written for a framework that does not support
the run (bypass mode in TRL) or would compute different values (rejection in rlctl's dialect, normalised
weights).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import pyarrow.parquet as pq

from benchmarks.learning import seeds_of
from benchmarks.studies.planted import FAULTS, HEALTHY, Planted, train_all
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import Diagnosis, examine, metrics_read
from rlctl.run_spec.load import RUN_SPEC_FILE, load_spec
from rlctl.run_spec.run_spec import RunSpec
from tests.simulated_logs.writers import Format, write_log

FORMATS: tuple[Format, ...] = ("rlctl", "verl", "trl")


@dataclass(frozen=True, slots=True)
class Log:
    """One run's log in one format.

    Attributes:
        run: the planted fault.
        seed: seed of the run.
        form: format of the log.
        path: path to diagnose.
    """

    run: Planted
    seed: int
    form: Format
    path: Path


def logs(directory: Path, seeds: list[int], *, healthy: bool) -> list[Log]:
    """Trains the missing runs and writes every run's log in every format that supports it."""
    found = []
    for planted in (FAULTS, HEALTHY) if healthy else (FAULTS,):
        run_dirs = train_all(planted, seeds, directory)
        for one in planted:
            for seed in seeds:
                run_dir = run_dirs[one.name, seed]
                found += [Log(one, seed, form, path) for form, path in in_formats(run_dir)]
    return found


def in_formats(run_dir: Path) -> Iterator[tuple[Format, Path]]:
    """Yields the run's own log, and the same run in the formats of the other frameworks."""
    yield "rlctl", run_dir / "metrics.jsonl"
    spec = load_spec([], [run_dir / RUN_SPEC_FILE], []).spec
    rows = logged(run_dir)
    for form in FORMATS[1:]:
        if can_log(form, spec):
            other = run_dir / form
            other.mkdir(exist_ok=True)
            yield form, write_log(form, rows, spec, other)


def can_log(form: Format, spec: RunSpec) -> bool:
    """Whether the framework supports this run and computes the same values."""
    correction = spec.algorithm.rollout_correction
    ours = correction.dialect == "rlctl" and (
        bool(correction.rollout_rs) or (bool(correction.rollout_is) and correction.rollout_is_batch_normalize)
    )
    return not ours and (form == "verl" or not (correction.bypass_mode or correction.rollout_rs))


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The run's rows, with the metrics computed from its dumped responses."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    added = from_responses(run_dir)
    numbers = ({key: float(v) for key, v in row.items() if key not in {"step", "timestamp"}} for row in rows)
    return [
        {"step": row["step"], **values, **added.get(row["step"], {})}
        for row, values in zip(rows, numbers, strict=True)
    ]


def from_responses(run_dir: Path) -> dict[int, dict[str, float]]:
    """Per step: mean and maximum |log-prob difference| per token, and standard deviation of the rewards."""
    found = {}
    columns = ["step", "reward", "rollout_log_probs", "training_log_probs"]
    for part in sorted((run_dir / "rollouts").glob("*.parquet")):
        table = pq.read_table(part).select(columns)
        steps = table["step"].to_numpy()
        for step in np.unique(steps):
            rows = table.filter(steps == step)
            ours, theirs = (
                rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in columns[2:]
            )
            gap = np.abs(ours - theirs)
            gap = gap[~np.isnan(gap)]  # null: not sampled
            rewards = rows["reward"].drop_null().to_numpy()
            found[int(step)] = {
                "mismatch/log_prob_abs_diff_mean": float(gap.mean()),
                "mismatch/log_prob_abs_diff_max": float(gap.max()),
                "critic/score/std": float(rewards.std()) if len(rewards) else 0.0,
            }
    return found


def diagnose(log: Log) -> Diagnosis:
    """Runs the diagnosis of a log."""
    return examine(read_run(log.path, metrics_read()))


def outcome(run: Planted, diagnosis: Diagnosis) -> str:
    """Rules that found the fault, metrics that they lack, or `missed`; for a healthy run, the alarms."""
    alarms = {one.rule: one.severity for one in diagnosis.findings if one.severity != "info"}
    if not run.rules:
        return ", ".join(f"**{name}**" for name in alarms) or "quiet"
    found = [f"{name}{'!' if alarms[name] == 'critical' else ''}" for name in alarms if name in run.rules]
    if found:
        return ", ".join(found)
    remarks = [one.rule for one in diagnosis.findings if one.rule in run.rules]
    if remarks:
        return f"remark: {', '.join(remarks)}"
    skipped = {one.rule: one.missing for one in diagnosis.skipped if one.rule in run.rules}
    if skipped.keys() == run.rules:
        lacks = sorted({key for keys in skipped.values() for key in keys})
        return f"skipped: {', '.join(lacks)}" if lacks else "n/a"
    return "**missed**"


def table(logs: list[Log]) -> str:
    """One line per run, one column per format; differing results of seeds are separated by `/`."""
    lines = ["| run | what is wrong | rlctl | verl | TRL |", "|---|---|---|---|---|"]
    cells: dict[tuple[str, Format], list[str]] = {}
    runs = {log.run.name: log.run for log in logs}
    for log in logs:
        cells.setdefault((log.run.name, log.form), []).append(outcome(log.run, diagnose(log)))
    for name, run in runs.items():
        row = (" / ".join(dict.fromkeys(cells.get((name, form), ["—"]))) for form in FORMATS)
        lines.append(f"| {name} | {run.hint} | {' | '.join(row)} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select the runs."""
    parser.add_argument("--seeds", type=seeds_of, default=[1], help="1-5 or 1,4,9")
    parser.add_argument("--directory", type=Path, default=Path("pathologies"), help="of the runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args()
    print(table(logs(options.directory, options.seeds, healthy=True)))


if __name__ == "__main__":
    main()
