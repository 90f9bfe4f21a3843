"""The dry run of a resumed run: up to which length its weights are useful, from its own log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli.dry_run_summary import so_far
from rlctl.run_spec.load import dump_spec, load_spec

RC = "algorithm.rollout_correction."


def resumed(where: Path, chi2: float, length: float, level: str = "sequence"):
    spec = load_spec([], [], [f"{RC}rollout_is={level}"]).spec
    (where / "spec.yaml").write_text(dump_spec(spec))
    first = {"step": 1, "rollout_corr/chi2_token": "NaN", "response_length/mean": 3.0}
    later = {"rollout_corr/chi2_token": chi2, "response_length/mean": length}
    rows = [first, *({"step": step, **later} for step in range(2, 9))]
    (where / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return spec


def test_long_responses_are_said_to_be_too_long_for_weights_of_sequences(tmp_path: Path) -> None:
    [line] = so_far(resumed(tmp_path, 0.01, 500.0), tmp_path)[1]
    assert "up to about 70 tokens (ln 2 / ln(1 + χ²)); responses have 500: token weights" in line.plain


def test_short_ones_are_not(tmp_path: Path) -> None:
    [line] = so_far(resumed(tmp_path, 0.01, 50.0), tmp_path)[1]
    assert line.plain.endswith("responses have 50")


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_other_weights_and_new_runs_have_no_line(tmp_path: Path, level: str) -> None:
    assert so_far(resumed(tmp_path, 0.01, 500.0, level), tmp_path)[1] == []
    spec = resumed(tmp_path, 0.01, 500.0)
    assert so_far(spec, None)[1] == []
    (tmp_path / "metrics.jsonl").unlink()
    assert so_far(spec, tmp_path)[1] == []
