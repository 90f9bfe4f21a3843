"""Logs of runs that never happened: a healthy one, to be spoiled."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np

from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.table import RunLog, Table
from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, load_spec
from tests.simulated_logs.simulate import CORR, healthy_rows

__all__ = ["CORR", "healthy_rows", "run_log", "spec_of", "write_run"]


def write_run(run_dir, rows, *overrides, has_spec=True):
    """A run directory with this log; overrides change the spec."""
    run_dir.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if has_spec:
        spec = load_spec(["rloo-seq-is"], [], list(overrides)).spec
        (run_dir / RUN_SPEC_FILE).write_text(dump_spec(spec), encoding="utf-8")
    return run_dir


@cache
def spec_of(*overrides):
    return load_spec(["rloo-seq-is"], [], list(overrides)).spec


def run_log(rows, *overrides, facts=None):
    """The same in memory; with `facts`, of a run whose spec is not known."""
    keys = {key for row in rows for key in row} - {"step", "timestamp"}
    columns = {key: np.array([float(row.get(key, np.nan)) for row in rows]) for key in keys}
    steps = np.array([row["step"] for row in rows])
    nonfinite = {
        key: np.array([row["step"] for row in rows if key in row and not math.isfinite(float(row[key]))])
        for key in columns
    }
    finite = {key: np.where(np.isfinite(values), values, np.nan) for key, values in columns.items()}
    table = Table(steps, finite, {k: at for k, at in nonfinite.items() if len(at)})
    if facts is not None:
        return RunLog(Path("log"), table, facts=facts)
    spec = spec_of(*overrides)
    return RunLog(Path("log"), table, spec, facts=facts_of(spec))
