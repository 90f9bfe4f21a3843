"""The figures of the tutorial on stale data: paired by seed, with their interval; the plot's series."""

import json
from pathlib import Path

from benchmarks.plot_runs import series, smooth
from benchmarks.runs import Outcome
from benchmarks.stale import CORRECTIONS, job_of, table


def outcomes(*rewards: float | None) -> list[Outcome]:
    return [Outcome([], {"raw_ess": 0.5}, validation=reward) for reward in rewards]


def test_differences_are_paired_by_seed_and_a_stopped_run_scores_zero() -> None:
    found = {("token IS", 8e-4): outcomes(0.9, 0.8, 0.7), ("none", 8e-4): outcomes(0.7, 0.6, None)}
    corrected, without = table(found).splitlines()[2:]
    # 0.2, 0.2 and 0.7: 4.3027 · 0.2887 / √3 by Student's t with 2 degrees of freedom, as far as rewards reach
    cells = "0.90, 0.80, 0.70 | 0.80 [0.55, 1.00] | +0.37 [-0.35, +1.00] | 0.50"
    assert corrected == f"| 0.0008 | token IS | {cells} |"
    assert "| none | 0.70, 0.60, 0.00 |" in without


def test_the_runs_of_a_pair_differ_in_one_key() -> None:
    corrected, without = (job_of(name, 8e-4, 3) for name in CORRECTIONS)
    assert set(without.overrides) - set(corrected.overrides) == {
        "algorithm.rollout_correction.rollout_is=null"
    }
    assert (corrected.presets, corrected.seed) == (without.presets, without.seed)


def test_the_plot_leaves_out_validation_before_training_and_steps_without_the_metric(tmp_path: Path) -> None:
    rows = [{"step": 0, "x": 9}, {"step": 1, "x": 0.5}, {"step": 2}, {"step": 3, "x": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert series(tmp_path, "x") == ([1, 3], [0.5, 0.25])
    assert smooth([1.0, 0.0, *[0.0] * 8])[::9] == [1.0, 0.0]
