"""The files under examples/ train the embedded model as they stand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import rlctl
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tests import runs
from tests.packages import install_package
from tests.properties import test_parts

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = f"{EXAMPLES}/custom_loss.py:soft_ppo"
ESTIMATOR = f"{EXAMPLES}/custom_estimator.py:minus_best"
ENGINE = f"{EXAMPLES}/custom_engine.py:plain_sampling"
WEIGHT = f"{EXAMPLES}/custom_correction.py:tempered"
CRITERION = f"{EXAMPLES}/custom_correction.py:worst_tokens"
KL = f"{EXAMPLES}/custom_kl.py:half_square"
TERM = f"{EXAMPLES}/custom_term.py:remember"
TRACKER = f"{EXAMPLES}/custom_tracker.py:Lines"
REWARD = f"{EXAMPLES}/custom_reward.py:agreement"


@pytest.mark.usefixtures("embedded")
def test_a_run_with_parts_from_files(tmp_path: Path) -> None:
    run = runs.train(
        tmp_path / "run",
        f"algorithm.rollout_correction.loss_type={LOSS}",
        "algorithm.rollout_correction.loss_params.beta=4",
        "algorithm.rollout_correction.bypass_mode=false",
        f"algorithm.rollout_correction.rollout_is={WEIGHT}",
        "algorithm.rollout_correction.rollout_is_params.exponent=0.25",
        f"algorithm.rollout_correction.rollout_rs={CRITERION}",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5",
        f"algorithm.adv_estimator={ESTIMATOR}",
        f"reward.name={REWARD}",
        "actor.use_kl_loss=true",
        f"actor.kl_loss_type={KL}",
        f"actor.terms=[{TERM}]",
        f"trainer.logger=[{TRACKER}]",
        "trainer.total_training_steps=2",
    )
    first, last = runs.metrics(run)
    lines = [line.split() for line in (run / "lines.txt").read_text().splitlines()]
    assert [float(score) for _, score in lines] == [row["critic/score/mean"] for row in (first, last)]
    assert last["actor/kl_loss"] > 0
    assert 0 < last["actor/terms/remember/forgotten"] < 1
    assert last["actor/terms/remember"] > 0
    sequences = [row for row in runs.rollouts(run) if row["reward"] is not None]
    for row in sequences:
        for value, log_prob in zip(row["confidence"], row["rollout_log_probs"], strict=True):
            assert value == (None if log_prob is None else pytest.approx(math.exp(log_prob), rel=1e-5))
    assert last["training/global_step"] == 2
    assert first["actor/grad_norm"] > 0
    assert first["rollout_corr/rollout_rs_worst_tokens_max"] >= 0
    assert 0 < first["critic/score/mean"] < 1  # partial agreement: not the built-in task's 0 or 1
    # The best response of a group is no better than its best sibling by much, most are worse.
    assert first["critic/advantages/mean"] < 0


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_a_run_with_a_training_engine_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the same updates as DeepSpeed without ZeRO, and a run continues from its checkpoint."""
    code = (EXAMPLES / "custom_training_engine.py").read_text()
    entry_point = "[rlctl.training_engines]\nplain = plain_training:plain_adamw\n"
    install_package(tmp_path, "plain-training", code, entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    same = ("engine.dtype=fp32", "engine.zero_stage=0", "trainer.total_training_steps=2")
    theirs = runs.train(tmp_path / "theirs", *same)
    ours = runs.train(tmp_path / "ours", "engine.name=plain", *same)
    runs.assert_close(ours, theirs)
    runs.resume(ours, "trainer.total_training_steps=3").wait()
    assert [line["step"] for line in runs.metrics(ours)] == [1, 2, 3]


@pytest.mark.usefixtures("embedded")
def test_a_run_with_a_rollout_engine_from_a_file(tmp_path: Path) -> None:
    """Its log-probs are the trainer's after every sync: the run measures it."""
    run = runs.train(
        tmp_path / "run",
        f"rollout.name={ENGINE}",
        "rollout.engine_params.max_rows=16",
        "trainer.total_training_steps=2",
    )
    for line in runs.metrics(run):
        assert line["rollout/sync_gap"] < 1e-4
    assert (run / "spec.yaml").read_text().count("custom_engine.py:plain_sampling") == 1


def test_the_loss_passes_the_tests_of_every_loss() -> None:
    POLICY_LOSSES.part(LOSS)
    checks = test_parts.TestLosses()
    checks.test_order_and_division_change_nothing(LOSS)
    checks.test_a_response_without_tokens_changes_nothing(LOSS)
    checks.test_a_weight_multiplies_the_gradient(LOSS)
    test_parts.test_an_unbiased_loss_has_the_gradient_of_the_expected_reward(LOSS)


def test_the_estimator_passes_the_tests_of_every_estimator() -> None:
    ADVANTAGE_ESTIMATORS.part(ESTIMATOR)
    checks = test_parts.TestEstimators()
    checks.test_order_changes_nothing(ESTIMATOR)
    checks.test_numbers_of_groups_mean_nothing(ESTIMATOR)
    checks.test_members_may_be_missing(ESTIMATOR)


@pytest.mark.parametrize(("kind", "name"), [("weight", WEIGHT), ("criterion", CRITERION)])
def test_the_correction_passes_the_tests_of_every_one(kind: str, name: str) -> None:
    checks = test_parts.TestCorrectionParts()
    checks.test_order_and_division_change_nothing(kind, name)
    checks.test_a_response_with_bad_numbers_costs_only_itself(kind, name)
    checks.test_where_the_policies_agree_nothing_changes(kind, name)


def test_the_criterion_of_one_token_does_not_depend_on_the_padding() -> None:
    log_probs, mask = torch.full((1, 2), -1.0), torch.tensor([[True, False]])
    rejection = {"rollout_rs": CRITERION, "rollout_rs_threshold": "0.5"}
    for width in (1, 2):
        given = (log_probs[:, :width], log_probs[:, :width] - 0.6, mask[:, :width])
        found = rlctl.correct(*given, **rejection).metrics
        assert found["rollout_corr/rollout_rs_worst_tokens_max"] == pytest.approx(0.3)


@pytest.mark.usefixtures("embedded")
def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Every code cell in order, in one namespace; the last expression of a cell is evaluated too."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert len(names["rewards"]) == 4  # type: ignore[arg-type]
    assert names["rollouts"].num_rows == 16 * names["spec"].rollout.n  # type: ignore[attr-defined]
    assert names["corrected"].weights.shape == (2, 3)  # type: ignore[attr-defined]
    assert "actor.lr" in capsys.readouterr().out
