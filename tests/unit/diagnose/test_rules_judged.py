"""What a rule may call in order, and what it says of logs with few metrics."""

import random

import numpy as np
import pytest

from rlctl.diagnose.rule import Detection, Rule, examine
from rlctl.diagnose.table import Facts
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log

UNKNOWN = Facts()
MISMATCH = Facts(bypass_mode=False)
BYPASS = Facts(bypass_mode=True, updates_per_batch=4)
GAP, K3 = "mismatch/log_prob_abs_diff_mean", f"{CORR}k3_kl"


def diagnosis_of(facts=UNKNOWN, first=0, **columns):
    """The diagnosis of a log with these columns; `__` stands for `/`."""
    count = max(len(values) for values in columns.values())
    rows = [{"step": first + index} for index in range(count)]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=False):
            row[key.replace("__", "/")] = value
    return examine(run_log(rows, facts=facts))


def found(diagnosis):
    return {finding.rule: finding for finding in diagnosis.findings}


def ok(diagnosis):
    return {rule.name for rule in diagnosis.checked} - found(diagnosis).keys()


def skipped(diagnosis):
    return {one.rule: one for one in diagnosis.skipped}


def noisy(values, sigma=0.25, seed=3):
    noise = random.Random(seed)
    return [value * np.exp(noise.gauss(0, sigma)) for value in values]


def rising(factor, start=0.002, count=18):
    return noisy([start * factor ** (step / (count - 1)) for step in range(count)])


@pytest.mark.parametrize("facts", [UNKNOWN, MISMATCH, BYPASS, Facts(is_async=True)])
@pytest.mark.parametrize("count", [14, 18, 80])
def test_a_gap_that_grows_tenfold_warns_whatever_its_mode(facts, count):
    warned = found(diagnosis_of(facts, **{K3: rising(16, count=count)}))["policy-gap"]
    assert warned.severity in {"warning", "critical"}
    assert any("synchroni" in fix.why or "engines" in fix.why for fix in warned.fixes)


def test_a_gap_that_jumps_tenfold_warns():
    values = noisy([0.002] * 30 + [0.03] * 30)
    assert found(diagnosis_of(**{K3: values}))["policy-gap"].since >= 30


@pytest.mark.parametrize(
    "values",
    [rising(2), noisy([0.03] * 18), rising(16, start=1e-5), rising(1 / 16, start=0.03), [0.001] * 18],
)
def test_a_gap_that_is_level_small_or_falls_is_quiet_where_it_includes_progress(values):
    assert "policy-gap" not in found(diagnosis_of(**{K3: values}))


def test_a_gap_that_grows_with_the_rate_of_a_warm_up_is_quiet():
    rates = [min(1.0, step / 30) * 1e-6 for step in range(60)]
    gap = noisy([0.02 * (rate / 1e-6) ** 2 + 1e-5 for rate in rates], 0.1)
    assert "policy-gap" not in found(diagnosis_of(BYPASS, **{K3: gap, "actor/lr": rates}))


def test_a_gap_of_unknown_meaning_is_not_ok():
    for columns in ({GAP: noisy([0.3] * 20)}, {K3: noisy([0.003] * 20)}):
        diagnosis = diagnosis_of(**columns)
        assert "policy-gap" not in ok(diagnosis)
        assert skipped(diagnosis)["policy-gap"].missing == ("spec.yaml",)


def test_log_probs_that_no_progress_explains_warn_in_any_mode():
    for facts in (UNKNOWN, BYPASS):
        assert (
            found(diagnosis_of(facts, **{GAP: noisy([0.8] * 20, 0.05)}))["policy-gap"].severity == "warning"
        )


def test_a_gap_that_was_judged_is_ok():
    assert "policy-gap" in ok(diagnosis_of(MISMATCH, **{K3: noisy([1e-4] * 20)}))
    assert "policy-gap" in ok(diagnosis_of(BYPASS, **{K3: noisy([3e-3] * 20)}))


def reference_finding(values, first=1, **facts):
    diagnosis = diagnosis_of(Facts(kl_coef=0.04, **facts), first=first, **{"actor/kl_loss": values})
    return found(diagnosis)["reference-drift"]


def advice(finding):
    return " ".join([*(fix.why for fix in finding.fixes), *(" ".join(fix.spec) for fix in finding.fixes)])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "values", [noisy([1.1] * 80), noisy(np.linspace(1.2, 0.7, 80), 0.05), [3.0, 3.1], [0.9] * 6]
)
def test_a_distance_at_the_first_step_is_a_reference_that_is_not_the_start(values, first):
    finding = reference_finding(values, first)
    assert "reference is not the policy that the run began with" in finding.cause
    assert "kl_loss_coef" not in advice(finding)
    assert "lr=" not in advice(finding)
    assert finding.fixes


def test_a_distance_that_falls_from_the_first_rows_on_is_one_too():
    finding = reference_finding(noisy(np.linspace(1.6, 0.6, 60), 0.05), first=10)
    assert "falls" in finding.what
    assert "kl_loss_coef" not in advice(finding)


@pytest.mark.parametrize(
    "values",
    [
        noisy(np.linspace(0.01, 1.5, 80), 0.05),
        noisy([0.001] * 20 + [1.2] * 60),
        noisy([0.1] * 5 + [2.5] * 60),
    ],
)
def test_a_distance_that_grows_is_drift_and_the_penalty_is_raised(values):
    finding = reference_finding(values)
    assert "kl_loss_coef" in advice(finding)
    assert "not the policy" not in finding.cause


def test_a_falling_distance_of_a_log_that_begins_late_says_nothing_of_the_start():
    assert "not the policy" not in reference_finding(noisy(np.linspace(1.6, 0.6, 60), 0.05), first=700).cause


DEAD, STD, SCORE = "reward/zero_spread_groups", "reward/group_std", "critic/score/mean"


@pytest.mark.parametrize("value", [-1.0, -2.0, -0.5, 0.5, 3.0])
@pytest.mark.parametrize("alike", [{DEAD: 1.0}, {STD: 0.0}, {DEAD: 1.0, STD: 0.0}])
@pytest.mark.parametrize("count", [2, 6, 30])
def test_one_reward_of_any_value_is_a_grader_that_gives_one_number(value, alike, count):
    columns = {key: [each] * count for key, each in ({SCORE: value} | alike).items()}
    diagnosis = diagnosis_of(**columns)
    if value > 0.0 and count < 20:  # a short log of solved prompts
        assert "constant-reward" not in found(diagnosis)
        return
    first = diagnosis.findings[0]
    assert (first.rule, first.severity) == ("constant-reward", "critical" if count >= 20 else "warning")
    assert "grader" in advice(first)
    assert "filter" not in advice(first)
    assert all(one.because_of for one in diagnosis.findings[1:])


def test_one_mean_of_rewards_that_differ_is_not_constant():
    assert "constant-reward" not in found(diagnosis_of(**{SCORE: [-1.0] * 30, STD: [0.4] * 30}))
    assert "constant-reward" not in ok(diagnosis_of(**{SCORE: [-1.0] * 30}))


def test_most_steps_with_one_negative_reward_are_not_told_to_filter():
    columns = {SCORE: [-0.5, *[-1.0] * 29], DEAD: [0.5, *[1.0] * 29]}
    finding = found(diagnosis_of(**columns))["zero-spread-groups"]
    assert "filter" not in advice(finding)


WARMING = ("actor.lr=1e-5", "actor.lr_warmup_steps=100000")


def rated(rates, *overrides, **columns):
    """The diagnosis of healthy rows with these learning rates and metrics."""
    rows = healthy_rows(len(rates))
    for row, rate in zip(rows, rates, strict=True):
        row.update(columns | {"actor/lr": rate})
    return examine(run_log(rows, *overrides))


def settings(diagnosis, rule):
    return {key: value for fix in found(diagnosis)[rule].fixes for key, value in fix.settings.items()}


@pytest.mark.parametrize("rate", [1e-5, 1e-3])
def test_tiny_updates_in_a_long_warm_up_are_told_to_shorten_it(rate):
    rates = [rate * step / 100_000 for step in range(1, 61)]
    columns = {K3: 3e-9, SCORE: 0.3}
    changed = settings(rated(rates, f"actor.lr={rate}", WARMING[1], **columns), "small-updates")
    assert "actor.lr" not in changed
    assert 0 <= int(changed["actor.lr_warmup_steps"]) < 1000


def test_no_rule_lowers_a_peak_that_the_warm_up_has_not_reached():
    rates = [1e-5 * step / 100_000 for step in range(1, 61)]
    diagnosis = rated(rates, *WARMING, **{"actor/entropy": 0.005, SCORE: 0.3})
    assert "entropy" in found(diagnosis)
    assert all("actor.lr" not in fix.settings for one in diagnosis.findings for fix in one.fixes)


def test_large_updates_late_in_a_decay_scale_the_peak():
    rates = [1e-5 * (1 - step / 70) for step in range(1, 61)]
    changed = settings(rated(rates, "actor.lr=1e-5", **{K3: 0.3, SCORE: 0.3}), "large-updates")
    assert float(changed["actor.lr"]) == pytest.approx(1e-6, rel=0.1)  # a tenth: the root of 0.3 / 0.003


@pytest.mark.parametrize("key", ["critic/vf_loss", "critic/vf_explained_var"])
def test_a_run_with_a_critic_is_not_told_about_groups(key):
    columns = {key: [0.02] * 20, "actor/pg_loss": [1e-4] * 20, "actor/grad_norm": [0.1] * 20}
    assert "healthy-loss" not in found(diagnosis_of(**columns))
    dead = columns | {"actor/grad_norm": [0.0] * 20, DEAD: [1.0] * 20, SCORE: [0.1] * 20}
    dead |= {"critic/advantages/max": [0.0] * 20, "critic/advantages/min": [0.0] * 20}
    diagnosis = diagnosis_of(Facts(group_size=1), **dead)
    assert {"no-gradient", "zero-advantages"} <= found(diagnosis).keys()
    for finding in diagnosis.findings:
        assert "group" not in advice(finding) + finding.cause
        assert "several responses" not in advice(finding)


def test_a_critical_finding_without_a_known_change_says_what_to_read():
    rule = Rule("own", detect=lambda run: Detection("critical", "broken", ()))
    [finding] = examine(run_log(healthy_rows(20)), [rule]).findings
    assert "read the responses" in advice(finding)


@pytest.mark.parametrize(("at", "most"), [(1, 2e-2), (4, 8e-2)])
def test_updates_that_are_too_large_in_a_warm_up_lower_the_peak_below_the_rate_of_their_step(at, most):
    rates = [1e-1 * min(1.0, (step + 1) / 10) for step in range(60)]
    sizes = [0.3 if step == at else 0.05 if step < at else 1e-9 for step in range(60)]
    rows = healthy_rows(60)
    for row, rate, size in zip(rows, rates, sizes, strict=True):
        row |= {"actor/lr": rate, K3: size, SCORE: 0.0}
    changed = settings(examine(run_log(rows, "actor.lr=1e-1", "actor.lr_warmup_steps=20")), "large-updates")
    assert float(changed["actor.lr"]) < most
    assert float(changed["actor.lr"]) < rates[at] * 0.2


def test_a_policy_that_a_first_update_destroyed_does_not_raise_the_rate_that_is_advised():
    """Sizes of a run at a hundred times the right rate, 8e-4: only the first update is of a whole policy."""
    rates = [1.6e-2, 3.2e-2, 4.8e-2, 6.4e-2, 8e-2] + [8e-2] * 35
    sizes = [1.12, 0.13, 0.16, 0.18, 0.12, 2.2, 0.01, 0.007] + [1e-4] * 32
    rows = healthy_rows(40)
    for row, rate, size in zip(rows, rates, sizes, strict=True):
        row |= {"actor/lr": rate, K3: size, SCORE: 0.0}
    changed = settings(examine(run_log(rows, "actor.lr=8e-2", "actor.lr_warmup_steps=10")), "large-updates")
    assert float(changed["actor.lr"]) == pytest.approx(8e-4, rel=0.2)
