"""Writes the simulated logs of `rlctl diagnose --selftest`: `python -m tests.simulated_logs.export`."""

import gzip
import json
import math

from rlctl.diagnose.selftest import DATA
from tests.simulated_logs import matrix, writers
from tests.simulated_logs.faults import FAULTS, Fault
from tests.simulated_logs.healthy import KINDS

_VALIDATION = "val/addition/reward_mean"
NAMES = {
    framework: {"step": "step", **names, _VALIDATION: validation}
    for framework, names, validation in (
        ("verl", writers.VERL, "val-core/addition/reward/mean@1"),
        ("trl", writers.TRL, "eval_reward"),
        ("nemo-rl", writers.NEMO_RL, "validation/accuracy"),
    )
}


def document():
    """What the file holds."""
    planned = [(one, columns(one)) for one in (*FAULTS, *KINDS)]
    base = next(values for one, values in planned if one is KINDS[0])
    overrides = {one.overrides for one, _ in planned}
    logged = {key for _, values in planned for key in values}
    return {
        "base": base,
        "names": {
            framework: {key: name for key, name in names.items() if key in logged}
            for framework, names in NAMES.items()
        },
        "verl_configs": {
            " ".join(one): writers.verl_config(matrix.spec_of(one)) for one in sorted(overrides)
        },
        "cases": [case(one, values, base) for one, values in planned],
    }


def case(planned, values, base):
    is_fault = isinstance(planned, Fault)
    if is_fault:
        others = matrix.HEALTHY_FORMATS if planned.degree == "severe" else ()
        expected = dict.fromkeys(others, "skipped") | {
            form: planned.expected(form) for form in planned.formats
        }
    else:
        expected = dict.fromkeys(matrix.HEALTHY_FORMATS, "quiet")
    return {
        "rule": planned.rule if is_fault else "",
        "kind": planned.degree if is_fault else planned.name,
        "overrides": list(planned.overrides),
        "expected": expected,
        "changes": {key: new for key, new in values.items() if repr(new) != repr(base.get(key))},
    }


def columns(planned):
    """Metric → value per step with five digits; None where it was not logged."""
    rows = matrix.simulated(planned, seed=0)
    keys = {
        key: None for row in (*rows, *matrix.simulated(KINDS[0], seed=0)) for key in row if key != "timestamp"
    }
    return {key: [rounded(row.get(key)) for row in rows] for key in keys}


def rounded(value):
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return float(f"{value:.5g}")


if __name__ == "__main__":
    text = json.dumps(document(), separators=(",", ":")).encode()
    DATA.write_bytes(gzip.compress(text, mtime=0))
