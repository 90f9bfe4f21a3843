"""Which fault is named first, and that remedies which harm or do not help are not given."""

from dataclasses import replace

import pytest

from rlctl.diagnose.rule import examine, in_chains
from rlctl.diagnose.rules_update import largest_update
from rlctl.diagnose.spec_patch import propose_patch
from rlctl.diagnose.table import DumpEvidence, Facts
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log
from tests.unit.diagnose.test_chains import finding
from tests.unit.diagnose.test_rules_judged import advice, diagnosis_of, found, noisy

K3, PPO_KL, SCORE, KL_LOSS = f"{CORR}k3_kl", "actor/ppo_kl", "critic/score/mean", "actor/kl_loss"
BEST, WORST, RATE = "critic/score/max", "critic/score/min", "actor/lr"
BYPASS = Facts(bypass_mode=True, updates_per_batch=2, lr=1e-3)
DECOUPLED = Facts(bypass_mode=False, updates_per_batch=2, lr=1e-3)
EXPLAINED, CRITIC_RATE = "critic/vf_explained_var", "critic/lr"


def spoiled(columns, *overrides, count=40):
    """The diagnosis of a healthy run with other columns; a value is constant."""
    rows = healthy_rows(count)
    for key, values in columns.items():
        for row, value in zip(rows, values if isinstance(values, list) else [values] * count, strict=True):
            row[key] = value
    return examine(run_log(rows, *overrides))


def rewards(values, count=40):
    """Mean rewards that begin like this and end with the last one, in the range 0 to 1."""
    each = [*values, *[values[-1]] * (count - len(values))]
    return {SCORE: noisy(each, 0.02), BEST: [1.0] * count, WORST: [0.0] * count}


# --- an entropy bonus -----------------------------------------------------------------------------


@pytest.mark.parametrize(("coefficient", "is_first"), [(0.3, True), (0.01, True), (1e-4, False)])
def test_a_strong_entropy_bonus_explains_a_reward_that_falls_before_entropy_has_risen(coefficient, is_first):
    entropy = noisy([1.2, 1.2, 1.2, 1.2, 1.25, 1.5, 2.0] + [2.6] * 33, 0.01)
    likelihoods = {f"{CORR}{whose}_log_ppl": entropy for whose in ("training", "rollout")}
    columns = rewards([0.4, 0.4, 0.3, 0.1, 0.0]) | {"actor/entropy": entropy} | likelihoods
    diagnosis = spoiled(columns, f"actor.entropy_coeff={coefficient}")
    first = diagnosis.findings[0]
    assert (first.rule == "entropy-rise") is is_first
    if is_first:
        assert first.severity == "critical"
        assert propose_patch(diagnosis).changes == {"actor.entropy_coeff": "0"}
        assert found(diagnosis)["reward-fell"].because_of == "entropy-rise"


# --- large updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.07, 0.3])
def test_large_updates_of_a_run_that_gains_are_a_remark_without_another_rate(size):
    columns = {K3: noisy([size] * 40, 0.1)} | rewards([0.2 + 0.015 * step for step in range(40)])
    finding = found(spoiled(columns))["large-updates"]
    assert finding.severity == "info"
    assert not any(fix.spec for fix in finding.fixes)


@pytest.mark.parametrize(
    "scores", [[0.3], [0.2 + 0.02 * step for step in range(25)] + [0.1]], ids=["flat", "gained and lost"]
)
def test_large_updates_of_a_run_that_does_not_keep_its_gain_ask_for_a_lower_rate(scores):
    finding = found(spoiled({K3: noisy([0.3] * 40, 0.1)} | rewards(scores)))["large-updates"]
    assert finding.severity == "critical"
    assert "actor.lr" in finding.fixes[0].settings


# --- a reward that falls with the first updates ---------------------------------------------------


FALLING = [0.35, 0.36, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0]


@pytest.mark.parametrize(("facts", "key"), [(BYPASS, K3), (DECOUPLED, PPO_KL)])
def test_first_updates_of_usual_size_that_lower_the_reward_have_the_wrong_direction(facts, key):
    columns = rewards(FALLING) | {key: noisy([3e-3] * 40)}
    finding = found(diagnosis_of(facts, 1, **columns))["reward-fell"]
    assert "sign" in finding.cause
    assert not any(fix.spec for fix in finding.fixes)


@pytest.mark.parametrize(
    ("facts", "changes", "first"),
    [
        (BYPASS, {K3: [0.2] * 40}, 1),  # large
        (BYPASS, {K3: [3e-3] * 40}, 200),  # a part of a log
        (BYPASS, {K3: [3e-3] * 40, "training/staleness_max": [4.0] * 40}, 1),  # of stale samples
        (BYPASS, {}, 1),  # of unknown size
        (replace(BYPASS, updates_per_batch=1), {K3: [3e-3] * 40}, 1),
        (BYPASS, {K3: [3e-3] * 40} | rewards([0.3] * 20 + FALLING), 1),  # later
    ],
)
def test_other_falls_are_told_to_lower_the_rate(facts, changes, first):
    columns = rewards(FALLING) | changes
    assert "actor.lr=0.0001" in advice(found(diagnosis_of(facts, first, **columns))["reward-fell"])


# --- a penalty that pays ----------------------------------------------------------------------------


def drifting(end=3.5):
    return [5e-4, 4e-3, 0.03, 0.15, 1.2, *noisy([end] * 35, 0.1)]


def test_a_negative_coefficient_of_the_penalty_is_the_first_cause():
    columns = rewards(FALLING) | {KL_LOSS: drifting(), "actor/kl_coef": [-1.0] * 40, K3: noisy([3e-3] * 40)}
    diagnosis = diagnosis_of(BYPASS, 1, **columns)
    first = diagnosis.findings[0]
    assert first.rule == "reference-drift"
    assert "sign" in first.cause
    assert not any(fix.spec for fix in first.fixes)
    assert found(diagnosis)["reward-fell"].because_of == "reference-drift"


def test_a_penalty_that_costs_more_than_any_reward_does_not_hold_the_policy():
    columns = rewards(FALLING) | {KL_LOSS: drifting(), K3: noisy([3e-3] * 40)}
    first = diagnosis_of(replace(BYPASS, kl_coef=1.0), 1, **columns).findings[0]
    assert (first.rule, first.fixes[0].spec) == ("reference-drift", ())
    assert "sign" in first.cause


@pytest.mark.parametrize(
    ("coefficient", "changes"),
    [
        (0.01, {}),  # cheap
        (1.0, {K3: [0.004] * 3 + [0.5] * 37}),  # large updates do not ask what it costs
        (1.0, rewards([0.2 + 0.02 * step for step in range(40)])),  # it is worth its cost
    ],
)
def test_other_drifts_are_of_a_weak_penalty(coefficient, changes):
    columns = rewards(FALLING) | {KL_LOSS: drifting(), K3: noisy([3e-3] * 40)} | changes
    drift = found(diagnosis_of(replace(BYPASS, kl_coef=coefficient), 1, **columns))["reference-drift"]
    assert "actor.kl_loss_coef" in advice(drift)


@pytest.mark.parametrize("end", [0.35, 0.8])
@pytest.mark.parametrize(("facts", "key"), [(BYPASS, K3), (DECOUPLED, PPO_KL)])
def test_a_distance_that_the_first_updates_do_not_make_is_of_another_reference(end, facts, key):
    distance = [0.3 + (end - 0.3) * step / 39 for step in range(40)]
    columns = rewards([0.3 + 0.01 * step for step in range(40)]) | {KL_LOSS: distance, key: [1e-3] * 40}
    finding = found(diagnosis_of(facts, 1, **columns))["reference-drift"]
    assert finding.severity == "warning"
    assert "not the policy that the run began with" in finding.cause
    assert not any(fix.spec for fix in finding.fixes)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({K3: [0.2] * 40}, 1),  # the updates on the first batch move it that far
        ({}, 1),  # of updates of unknown size
        ({K3: [1e-3] * 40}, 40),  # the log begins later
        ({K3: [1e-3] * 40, KL_LOSS: [0.01] * 40}, 1),  # another precision
    ],
)
def test_a_small_distance_at_the_start_is_quiet_where_something_explains_it(changes, first):
    columns = rewards([0.3 + 0.01 * step for step in range(40)]) | {KL_LOSS: [0.3] * 40} | changes
    assert "reference-drift" not in found(diagnosis_of(BYPASS, first, **columns))


@pytest.mark.parametrize(
    ("updates", "first", "is_found"),
    [(1, 1, True), (None, 1, False), (1, 2, False)],
)
def test_a_distance_before_the_only_update_on_the_first_batch_is_of_another_reference(
    updates, first, is_found
):
    columns = rewards([0.3 + 0.01 * step for step in range(40)]) | {KL_LOSS: [0.3] * 40}
    findings = found(diagnosis_of(Facts(updates_per_batch=updates, lr=1e-3), first, **columns))
    assert ("reference-drift" in findings) is is_found
    if is_found:
        assert "not the policy that the run began with" in findings["reference-drift"].cause


def test_the_largest_update_does_not_depend_on_the_sign_of_the_log_ratio():
    values, rates = [0.002] * 4 + [0.003] + [-0.03] * 5, [1e-6] * 4 + [1e-5] * 6

    def largest(kl):
        rows = [
            row | {PPO_KL: x, RATE: rate} for row, x, rate in zip(healthy_rows(10), kl, rates, strict=True)
        ]
        return largest_update(replace(run_log(rows), facts=DECOUPLED), 10)

    assert largest(values) == largest([abs(value) for value in values]) == 0.03


# --- a critic that is not trained -----------------------------------------------------------------


GAE = "algorithm.adv_estimator=gae"


@pytest.mark.parametrize(
    "columns",
    [
        {CRITIC_RATE: 1e-12, EXPLAINED: 1e-11},
        {CRITIC_RATE: 0.0, EXPLAINED: -0.02},
        {CRITIC_RATE: 1e-3, EXPLAINED: 0.0},
        {EXPLAINED: 1e-9},
    ],
)
def test_an_untrained_critic_is_named_even_if_the_reward_gains(columns):
    finding = found(spoiled(columns, GAE))["critic"]
    assert finding.severity == "warning"
    assert "not trained" in finding.cause
    is_rate = columns.get(CRITIC_RATE, 1.0) < 1e-9
    assert any("critic.lr" in fix.settings for fix in finding.fixes) is is_rate


@pytest.mark.parametrize(
    ("columns", "count"),
    [
        ({CRITIC_RATE: 1e-3, EXPLAINED: [0.01 * (-1) ** step for step in range(40)]}, 40),  # of easy returns
        ({CRITIC_RATE: 1e-12, EXPLAINED: 0.0}, 10),  # it may be in its warm-up
        ({CRITIC_RATE: 1e-3, EXPLAINED: 0.0, SCORE: 0.0}, 40),  # nothing varies
        ({CRITIC_RATE: [1e-11 * 10 ** (step / 4) for step in range(40)], EXPLAINED: 0.1}, 40),
    ],
)
def test_a_critic_that_learns_slowly_or_late_is_not_called_untrained(columns, count):
    finding = found(spoiled(columns, GAE, count=count)).get("critic")
    assert finding is None


# --- the engine's weights, where samples are stale as wanted ---------------------------------------


@pytest.mark.parametrize("fault", ["", "unknown"])
def test_dumps_that_contradict_the_recorded_weights_decide_what_a_gap_is(fault):
    dumps = DumpEvidence(who_sampled="none of the kept weights", wrong_sampler=fault, fix="compare")
    rows = [row | {f"{CORR}kl": 0.4, K3: 0.4, "training/staleness_max": 2.0} for row in healthy_rows()]
    run = replace(run_log(rows, "rollout.max_staleness=1"), dumps=dumps)
    gap = found(examine(run))["policy-gap"]
    assert any("actor.lr" in fix.settings for fix in gap.fixes) is not fault
    assert ("other weights" in gap.cause) is bool(fault)


# --- severities of chains ---------------------------------------------------------------------------


def test_a_first_event_is_as_severe_as_what_it_explains():
    mild = finding("a", 3, "b", severity="warning")
    chain = in_chains((mild, finding("b", 5), finding("c", 1, severity="warning")))
    assert [(one.rule, one.severity) for one in chain] == [
        ("a", "critical"), ("b", "critical"), ("c", "warning"),
    ]  # fmt: skip


# --- what sets the rate now -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "first", "advised"),
    [
        ([1e-6] * 20, 300, "actor.lr=5e-07"),  # constant
        ([1e-6 * (1 - step / 40) for step in range(20)], 1, "actor.lr=5e-07"),  # it decays from the start
        ([1e-6 * (1 - step / 40) for step in range(20)], 300, ""),  # from an unknown peak
        ([1e-8 * step for step in range(20)], 1, ""),  # it is still rising
        ([4.6e-7], 300, ""),
    ],
)
def test_a_rate_is_advised_only_where_the_log_shows_the_peak(rates, first, advised):
    kl = [0.01] * (len(rates) - 1) + [float("nan")]
    columns = {RATE: rates, KL_LOSS: kl, "actor/grad_norm": [0.5] * len(rates)}
    text = advice(found(diagnosis_of(Facts(), first, **columns))["not-finite"])
    assert ("lr=" in text) is bool(advised)
    assert advised in text
    assert "learning rate" in text or advised


# --- responses that no longer end ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "scores", "is_raised"),
    [
        pytest.param(
            [0.02, 0.02, 0.1, 0.4, 0.8, 0.95], [0.35, 0.3, 0.2, 0.1, 0.02], False, id="no longer end"
        ),
        pytest.param([0.8], [0.05], True, id="cut from the first step on"),
        pytest.param(
            [0.02, 0.02, 0.1, 0.3, 0.5, 0.6], [0.2 + 0.015 * step for step in range(40)], True, id="gains"
        ),
    ],
)
def test_a_higher_limit_is_no_remedy_for_responses_that_ended_before(cut, scores, is_raised):
    shares = noisy([*cut, *[cut[-1]] * (40 - len(cut))], 0.01)
    finding = found(spoiled({"response_length/clip_ratio": shares} | rewards(scores)))["truncated"]
    changes = [setting for fix in finding.fixes for setting in fix.settings]
    assert any("max_response_length" in setting for setting in changes) is is_raised
    assert finding.fixes
