"""`rlctl diagnose --selftest`: checks readers and rules on simulated logs of faulty and healthy runs.

`selftest.json.gz` contains one healthy run and, per case, the columns that differ from it, the overrides of
the spec, and the expected result for each framework's log. `tests/simulated_logs` generates it.
"""

from __future__ import annotations

import gzip
import json
import pprint
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlctl.diagnose.finding import SEVERITIES
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.spec.load import RUN_SPEC_FILE, dump_spec, load_spec
from rlctl.track.jsonl import METRICS_FILE

DATA = Path(__file__).parent / "selftest.json.gz"
FRAMEWORKS = ("rlctl", "verl", "trl", "nemo-rl")
#: Other frameworks log it only in asynchronous runs.
_STALENESS = "training/staleness_max"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SelftestResult:
    """Result for one simulated log."""

    rule: str  # the rule that must detect the simulated fault; empty for a healthy run
    kind: str  # `mild` or `severe`; for a healthy run its description
    framework: str  # the framework whose format and names the log uses
    expected: str  # minimum severity of the rule's finding, or `skipped`; for a healthy run `quiet`
    found: str  # actual severity, `skipped` or `nothing`; for a healthy run its alarms, or `quiet`
    passed: bool  # whether `found` meets `expected`


def run_selftest(progress: Callable[[int, int], None]) -> list[SelftestResult]:
    """Writes, reads and examines every simulated log; after each calls `progress` with (done, all)."""
    data = json.loads(gzip.decompress(DATA.read_bytes()))
    results = []
    with tempfile.TemporaryDirectory(prefix="rlctl-selftest-") as directory:
        logs = [(case, name) for case in data["cases"] for name in FRAMEWORKS if name in case["expected"]]
        for done, (case, framework) in enumerate(logs):
            folder = Path(directory) / framework
            folder.mkdir(exist_ok=True)
            log = _write(framework, _rows(data["base"] | case["changes"]), case, data, folder)
            results.append(_check(case, framework, log))
            progress(done + 1, len(logs))
    return results


def _rows(columns: Mapping[str, list[Any]]) -> list[Row]:
    """Converts columns to one row per step; None means not logged."""
    steps = range(len(columns["step"]))
    return [{key: column[at] for key, column in columns.items() if column[at] is not None} for at in steps]


def _write(
    framework: str, rows: list[Row], case: Mapping[str, Any], data: Mapping[str, Any], folder: Path
) -> Path:
    """Writes the rows as the framework logs them; returns the log's path."""
    log = folder / METRICS_FILE
    if framework == "rlctl":
        (folder / RUN_SPEC_FILE).write_text(_spec_text(tuple(case["overrides"])), encoding="utf-8")
        own = ({k: v for k, v in row.items() if not k.startswith(("mismatch/", "rollout/"))} for row in rows)
        log.write_text(_json_lines(own), encoding="utf-8")
        return log
    names = data["names"][framework]
    if not any(row.get(_STALENESS) for row in rows):
        names = {key: name for key, name in names.items() if key != _STALENESS}
    rows = [{names[key]: value for key, value in row.items() if key in names} for row in rows]
    if framework != "verl":
        log.write_text(_json_lines(rows), encoding="utf-8")
        return log
    lines = pprint.pformat(data["verl_configs"][" ".join(case["overrides"])]).splitlines()
    lines += [" - ".join(f"{name}:{value}" for name, value in row.items()) for row in rows]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return log


def _json_lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@lru_cache(maxsize=64)
def _spec_text(overrides: tuple[str, ...]) -> str:
    return dump_spec(load_spec(["rloo-seq-is"], overrides=overrides).spec)


def _check(case: Mapping[str, Any], framework: str, log: Path) -> SelftestResult:
    diagnosis = examine(read_run(log, metrics_read()))
    rule, expected = case["rule"], case["expected"][framework]
    if not rule:
        alarms = [f"{one.severity} {one.rule}" for one in diagnosis.findings if one.severity != "info"]
        return SelftestResult("", case["kind"], framework, expected, ", ".join(alarms) or "quiet", not alarms)
    outcomes = {one.rule: one.severity for one in diagnosis.findings}
    found = outcomes.get(rule, "skipped" if rule in {one.rule for one in diagnosis.skipped} else "nothing")
    wanted = SEVERITIES[: SEVERITIES.index(expected) + 1] if expected in SEVERITIES else (expected,)
    return SelftestResult(rule, case["kind"], framework, expected, found, found in wanted)


def selftest_document(results: list[SelftestResult]) -> dict[str, Any]:
    """The results as plain values for JSON."""
    return {"results": [asdict(one) for one in results], "failures": sum(not one.passed for one in results)}


def selftest_summary(results: list[SelftestResult]) -> str:
    """Counts, in one line."""
    healthy = [one for one in results if not one.rule]
    unable = [one for one in results if one.expected == "skipped"]
    faults = [one for one in results if one.rule and one.expected != "skipped"]
    passed, able = sum(one.passed for one in faults), sum(one.passed for one in unable)
    return (
        f"{passed} of {len(faults)} faults found; {able} of {len(unable)} rules skipped where the log lacks "
        f"the metric; {sum(not one.passed for one in healthy)} false alarms in {len(healthy)} healthy logs"
    )
