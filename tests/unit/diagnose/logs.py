"""Logs of runs that never happened: a healthy one, to be spoiled."""

import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np

from rlctl.diagnose.table import RunLog, Table, facts_of
from rlctl.spec.load import RUN_SPEC_FILE, dump_spec, load_spec

CORR = "rollout_corr/"


def healthy_rows(count=60, seed=0):
    """A learning run: reward rises, entropy falls with it, the policies are close."""
    noise = random.Random(seed)

    def near(value, spread):
        return value * math.exp(noise.gauss(0, spread))

    return [
        {
            "step": step,
            "timestamp": "2025-01-31T12:00:00.123+00:00",
            "critic/score/mean": 0.3 + 0.4 * step / count + noise.gauss(0, 0.02),
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "reward/zero_spread_groups": near(0.2, 0.2),
            "reward/error_fraction": 0.0,
            "response_length/mean": near(300, 0.05),
            "response_length/clip_ratio": near(0.01, 0.3),
            "timing_s/reward": near(1.0, 0.2),
            "timing_s/step": near(20.0, 0.1),
            "training/staleness_max": 0.0,
            "training/rollout_probs_diff_mean": near(1e-3, 0.2),
            f"{CORR}kl": noise.gauss(0, 1e-3),
            f"{CORR}k3_kl": near(3e-4, 0.3),
            f"{CORR}chi2_token": near(1e-3, 0.3),
            f"{CORR}chi2_seq": near(0.1, 0.3),
            f"{CORR}saturated_sequences": 0.0,
            f"{CORR}rollout_rs_masked_fraction": near(0.01, 0.3),
            f"{CORR}rollout_is_raw_mean": near(1.0, 0.02),
            f"{CORR}rollout_is_raw_eff_sample_size": 1 - near(0.05, 0.3),
            f"{CORR}rollout_is_mean": 1.0,
            f"{CORR}rollout_is_std": near(0.1, 0.3),
            f"{CORR}rollout_is_min": near(0.6, 0.1),
            f"{CORR}rollout_is_max": near(1.8, 0.05),
            f"{CORR}rollout_is_eff_sample_size": 1 - near(0.03, 0.3),
            f"{CORR}rollout_is_ratio_fraction_high": near(0.01, 0.3),
            "actor/pg_loss": noise.gauss(-0.05, 0.01),
            "actor/pg_clipfrac": near(0.005, 0.3),
            "actor/ppo_kl": noise.gauss(0, 1e-3),
            "actor/entropy": near(0.6 - 0.2 * step / count, 0.03),
            "actor/grad_norm": near(0.8, 0.15),
            "actor/lr": 1e-5,
            **({"val/addition/reward_mean": 0.3 + 0.4 * step / count} if step % 5 == 0 else {}),
        }
        for step in range(1, count + 1)
    ]


def write_run(run_dir, rows, *overrides, has_spec=True):
    """A run directory with this log; overrides change the spec."""
    run_dir.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if has_spec:
        spec = load_spec([], [], list(overrides)).spec
        (run_dir / RUN_SPEC_FILE).write_text(dump_spec(spec), encoding="utf-8")
    return run_dir


@cache
def spec_of(*overrides):
    return load_spec([], [], list(overrides)).spec


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
    table = Table(
        steps, finite, {k: at for k, at in nonfinite.items() if len(at)}, frozenset(columns) | {"step"}
    )
    if facts is not None:
        return RunLog(Path("log"), table, facts=facts)
    spec = spec_of(*overrides)
    return RunLog(Path("log"), table, spec, facts=facts_of(spec))
