"""Guardrails: what they see, what they do about it, and that they leave a run alone that is well."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.algos.correction import correct
from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import Units, to_host
from rlctl.diagnose.rule import all_rules
from rlctl.diagnose.rules_reward import ZERO_REWARD_STEPS
from rlctl.diagnose.thresholds import WINDOW
from rlctl.metric_names import describe
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.resolve import correction_rules
from rlctl.run_spec.run_spec import GuardrailsSpec
from rlctl.train import guardrails as module
from rlctl.train.guardrails import (
    DRIFT_LIMIT,
    ESS_FLOOR,
    FATAL,
    LEAST_SCALE,
    BatchDecision,
    BatchObservation,
    UpdateDecision,
    decide_batch,
    decide_update,
)
from rlctl.train.resume import refuse_unsafe
from rlctl.train.settings import UpdateSettings, tighter_criterion, tighter_weight
from tests.processes import on_ranks
from tests.unit.diagnose.logs import healthy_rows
from tests.unit.train.guardrail_jobs import FAR, deciding, guardrails_of, run_of, skipping
from tests.unit.train.updates import alone

RAW_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"
G = "trainer.guardrails."
RULES_OF = {level: CorrectionRules(WeightRule(level)) for level in (None, "token", "sequence", "geometric")}

# --- one update -------------------------------------------------------------------------------------


def sums(log_ratios, level="sequence"):
    """(sums, rules) of a mini-batch with these log-ratios, rows of tokens."""
    log_ratio = torch.tensor(log_ratios)
    rollout = torch.full_like(log_ratio, -1.0)
    units = Units.of_responses(torch.full((len(log_ratio),), log_ratio.shape[1]))
    found = correct((rollout + log_ratio).flatten(), rollout.flatten(), units, RULES_OF[level])
    return to_host(found.sums), RULES_OF[level]


def check_update(log_ratios, level="sequence", scale=1.0, **spec) -> UpdateDecision | None:
    return decide_update(*sums(log_ratios, level), scale, GuardrailsSpec(**{"mode": "act", **spec}))


def kish(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.parametrize("level", RULES_OF)
def test_it_sees_the_effective_sample_size_of_the_level_and_the_kl(level) -> None:
    rows = [[0.5, -0.2], [0.1, 0.9], [-1.0, 0.3], [2.0, -0.4]]
    weights = {
        "sequence": [math.exp(sum(row)) for row in rows],
        "geometric": [math.exp(sum(row) / 2) for row in rows],
    }.get(level, [math.exp(x) for row in rows for x in row])
    decision = check_update(rows, level)
    assert decision.ess == pytest.approx(kish(weights), rel=1e-5)
    assert decision.drift == pytest.approx(abs(sum(x for row in rows for x in row)) / 8, rel=1e-5)


#: One sequence has all the weight while the mean log-ratio stays at zero.
LOPSIDED = [[3.5], [-0.5], [-0.5], [-0.5], [-0.5], [-0.5], [-0.5], [-0.5]]
FAR_AWAY = [[0.4], [0.4], [0.4]]
WELL = [[0.05], [-0.05], [0.02]]


def test_low_ess_scales_the_rate_in_proportion() -> None:
    decision = check_update(LOPSIDED)
    assert decision.is_low
    assert not decision.has_drifted
    assert decision.ess == pytest.approx(kish([math.exp(row[0]) for row in LOPSIDED]), rel=1e-5)
    assert decision.lr_scale == pytest.approx(decision.ess / ESS_FLOOR)
    assert not decision.skip
    assert check_update(LOPSIDED, ess_floor=0.9).lr_scale == pytest.approx(decision.ess / 0.9)


def test_the_rate_follows_the_ess_of_weights_that_are_all_tiny() -> None:
    tiny = [[row[0] - 16.0] for row in LOPSIDED]
    decision = check_update(tiny, on_drift="warn")
    assert decision.ess == pytest.approx(kish([math.exp(row[0]) for row in tiny]), rel=1e-4)
    assert decision.lr_scale == pytest.approx(check_update(LOPSIDED).lr_scale, rel=1e-4)


def test_a_policy_far_from_its_samples_is_not_moved() -> None:
    assert check_update(FAR_AWAY) == UpdateDecision(
        pytest.approx(1.0), pytest.approx(0.4), has_drifted=True, skip=True, next_scale=0.5
    )
    assert not check_update([[0.9 * DRIFT_LIMIT]] * 3).skip
    assert check_update([[-1.1 * DRIFT_LIMIT]] * 3).skip


@pytest.mark.parametrize("log_ratios", [LOPSIDED, FAR_AWAY])
@pytest.mark.parametrize("spec", [{"mode": "warn"}, {"on_low_ess": "warn", "on_drift": "warn"}])
def test_warning_changes_nothing(log_ratios, spec) -> None:
    decision = check_update(log_ratios, **spec)
    assert decision.is_low or decision.has_drifted
    assert (decision.lr_scale, decision.skip, decision.next_scale) == (1.0, False, 1.0)


def test_a_mini_batch_without_finite_tokens_is_not_observed() -> None:
    assert check_update([[math.nan], [math.nan]]) is None
    assert check_update(LOPSIDED, on_low_ess="skip_step").skip


def test_the_rate_stays_halved_until_a_window_of_updates_was_well() -> None:
    scale, scales = check_update(FAR_AWAY).next_scale, []
    assert scale == 0.5
    for _ in range(WINDOW + 1):
        decision = check_update(WELL, scale=scale)
        scale = decision.next_scale
        scales.append(decision.lr_scale)
    assert scales[0] == 0.5
    assert scales == sorted(scales)
    assert scales[-2] < 1.0
    assert scales[-1] == pytest.approx(1.0)
    for _ in range(20):
        scale = check_update(FAR_AWAY, scale=scale).next_scale
    assert scale == LEAST_SCALE
    assert check_update(LOPSIDED, scale=scale).lr_scale < LEAST_SCALE


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_withheld_update_leaves_weights_and_optimizer_as_they_were(tmp_path, world_size) -> None:
    """Later updates, which read Adam's moments, are bit for bit those of a run without it."""
    found = on_ranks(world_size, skipping, 2, where=tmp_path)
    for result in found:
        assert [decision.skip for decision in result["decisions"]] == [n == FAR for n in range(4)]
        assert result["decisions"] == found[0]["decisions"]
        assert result["skipped_updates"] == 0.0  # those are the ones that could not be made
        for name, weight in result["guarded"].items():
            assert torch.equal(weight, result["spared"][name]), name


# --- tightening -------------------------------------------------------------------------------------

RHO = st.floats(0.05, 20.0)


@pytest.mark.parametrize(
    ("dialect", "name", "threshold"),
    [
        ("rlctl", "token_k1", "0.5_2.0"),
        ("rlctl", "seq_max_k2", "2.5"),
        ("rlctl", "sequence", "0.3_4.0"),
        ("rlctl", "geometric", "0.9_1.1"),
        ("rlctl", "token_veto", "1e-4"),
        ("rlctl", "off_policy", "0.3"),
        ("verl", "token_k1", "0.6_1.6"),
        ("verl", "token_k2", "0.4"),
        ("verl", "seq_mean_k3", "0.01"),
        ("verl", "seq_max_k2", "2.5"),
    ],
)
def test_one_notch_halves_the_band_in_log_rho(dialect, name, threshold) -> None:
    fields = [
        f"algorithm.rollout_correction.{key}"
        for key in (f"dialect={dialect}", f"rollout_rs={name}", f"rollout_rs_threshold={threshold}")
    ]
    [rule] = correction_rules(load_spec([], [], fields).spec.algorithm.rollout_correction).reject
    tight = tighter_criterion(rule)
    (low, high), (tight_low, tight_high) = rule.band(), tight.band()
    if high < math.inf:
        assert math.log(tight_high) == pytest.approx(math.log(high) / 2, rel=1e-6)
    assert low <= tight_low < 1.0 < tight_high <= high
    assert (tight.name, tight.scope, tight.reduction) == (rule.name, rule.scope, rule.reduction)


@given(lower=st.floats(0.05, 1.0), upper=st.floats(1.0, 20.0), rho=RHO)
@settings(max_examples=50, deadline=None)
def test_tight_bounds_lie_within_the_loose_ones(lower, upper, rho) -> None:
    weight = tighter_weight(WeightRule("token", "clip", lower, upper))
    assert lower <= weight.lower <= 1.0 <= weight.upper <= upper
    tight = tighter_criterion(RejectRule("x", "ratio", "none", lower, upper, "token"))
    if tight.lower <= rho <= tight.upper:
        assert lower <= rho <= upper


def test_what_decides_nothing_is_not_tightened() -> None:
    spec = load_spec(["grpo-token-is-multi-rs"], [], []).spec  # PPO's ratio is the correction there
    loose = UpdateSettings.of(spec, ())
    assert loose.tightened().rules.weight == loose.rules.weight
    assert loose.tightened().rules.reject != loose.rules.reject
    bare = UpdateSettings.of(load_spec(["rloo-uncorrected"], [], []).spec, ())
    assert bare.tightened() == bare


# --- batch by batch -----------------------------------------------------------------------------------


WELL_DECIDED = UpdateDecision()
#: Diagnosis of a healthy run.
NOTHING = SimpleNamespace(findings=())


def rows_with(count: int, seed: int = 0, **columns):
    """A healthy log in which these columns are as given: a value, or values by step."""
    rows = [{"rollout_corr/skipped_updates": 0.0, **row} for row in healthy_rows(count, seed)]
    for key, values in columns.items():
        for number, row in enumerate(rows):
            row[key] = values[number] if isinstance(values, list) else values
    return [{key: value for key, value in row.items() if key != "timestamp"} for row in rows]


def observed(guardrails, row, decisions):
    """The guardrails' metrics of a step that made these decisions, which is logged as in training."""
    own = guardrails.observe(row["step"], row, decisions, len(decisions))
    guardrails._run.history.append({**row, **own})
    return own


def followed(rows, *overrides, decisions=(WELL_DECIDED, WELL_DECIDED), history=()):
    """(guardrails, run, notes, metrics by step) after these steps, or until it stops."""
    notes: list[str] = []
    run = run_of(alone(), f"{G}mode=act", *overrides, history=history, notes=notes)
    guardrails, logged = guardrails_of(run), []
    for row in rows:
        logged.append(observed(guardrails, row, decisions))
        if run.stopped_because:
            break
    return guardrails, run, notes, logged


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["warn", "act"])
def test_a_healthy_run_hears_nothing(seed, mode) -> None:
    _, run, notes, logged = followed(rows_with(120, seed), f"{G}mode={mode}")
    assert notes == []
    assert run.stopped_because == ""
    quiet = {"alarms": 0.0, "interventions": 0.0, "skipped": 0.0, "tightened": 0.0}
    quiet |= {"updates": 2.0, "lr_scale": 1.0}
    assert all(metrics == {f"guardrails/{key}": value for key, value in quiet.items()} for metrics in logged)
    assert all(describe(key) is not None for key in logged[0])


def test_off_says_and_logs_nothing() -> None:
    _, run, notes, logged = followed(rows_with(40, **{"critic/score/mean": 0.0}), f"{G}mode=off")
    assert (notes, run.stopped_because) == ([], "")
    assert logged == [{}] * 40


def test_bounds_are_tightened_while_the_raw_ess_stays_low() -> None:
    half = WINDOW // 2 + 1  # of the window below the floor: the median is
    values = [0.9] * 20 + [0.1] * 20 + [0.9] * 20
    guardrails, _, notes, logged = followed(rows_with(60, **{RAW_ESS: values}))
    tight = [step for step, metrics in enumerate(logged, 1) if metrics["guardrails/tightened"]]
    assert tight == list(range(20 + half + 1, 40 + half + 1))
    assert sum("halved the bounds" in note for note in notes) == 1
    assert all(logged[step - 1]["guardrails/interventions"] == 1.0 for step in tight)
    assert guardrails.settings.rules.weight.upper == 2.0


def test_the_tight_settings_are_those_of_the_next_batch() -> None:
    guardrails, *_ = followed(rows_with(20, **{RAW_ESS: 0.1}))
    assert guardrails.is_tight
    assert guardrails.settings.rules.weight.upper == pytest.approx(math.sqrt(2.0))
    for overrides in ((f"{G}mode=warn",), (f"{G}on_heavy_tail=warn",)):
        guardrails, _, notes, logged = followed(rows_with(20, **{RAW_ESS: 0.1}), *overrides)
        assert not guardrails.is_tight
        assert logged[-1]["guardrails/alarms"] == 1.0
        assert any("median raw effective sample size" in note for note in notes)


@pytest.mark.parametrize("nothing", [0.0, math.nan])
def test_batches_without_a_finite_token_have_no_ess_to_act_on(nothing: float) -> None:
    guardrails, _, notes, logged = followed(rows_with(30, **{RAW_ESS: [0.9] * 10 + [nothing] * 20}))
    assert not guardrails.is_tight
    assert all(metrics["guardrails/tightened"] == 0.0 for metrics in logged)
    assert not any("median raw effective sample size" in note for note in notes)


ZEROS = {"critic/score/mean": [0.4] * 10 + [0.0] * 50, "critic/score/max": [1.0] * 10 + [0.0] * 50}


def test_a_run_without_rewards_is_ended() -> None:
    _, run, notes, logged = followed(rows_with(60, **ZEROS))
    assert "every reward is exactly 0" in run.stopped_because
    assert 10 + ZERO_REWARD_STEPS <= len(logged) <= 10 + ZERO_REWARD_STEPS + module.EVERY
    assert logged[-1]["guardrails/interventions"] == 1.0
    assert sum("saved and stopped" in note for note in notes) == 1


@pytest.mark.parametrize("override", [f"{G}mode=warn", f"{G}on_collapse=warn"])
def test_it_is_only_said_where_that_is_asked_for(override) -> None:
    _, run, notes, logged = followed(rows_with(60, **ZEROS), override)
    assert run.stopped_because == ""
    assert len(logged) == 60
    assert sum("every reward is exactly 0" in note for note in notes) == 1


def test_rewards_that_came_back_end_nothing() -> None:
    scores = [0.4] * 10 + [0.0] * 22 + [0.3] * 28
    best = [math.ceil(score) for score in scores]
    rows = rows_with(60, **{"critic/score/mean": scores, "critic/score/max": best})
    # as the rule would see it if it looked only once the rewards are back
    _, run, *_ = followed(rows[32:], history=rows[:32])
    assert run.stopped_because == ""


def test_a_run_without_updates_is_ended() -> None:
    skipping_all = (UpdateDecision(skip=True, has_drifted=True, drift=0.5),) * 2
    _, run, _, logged = followed(rows_with(60), decisions=skipping_all)
    assert "no update was made" in run.stopped_because
    assert len(logged) == WINDOW
    withheld = rows_with(60, **{"rollout_corr/skipped_updates": 2.0})
    assert "no update was made" in followed(withheld)[1].stopped_because
    one_of_two = rows_with(60, **{"rollout_corr/skipped_updates": 1.0})
    assert followed(one_of_two)[1].stopped_because == ""
    assert followed(rows_with(60), decisions=())[1].stopped_because == ""  # a critic warming up


def test_each_kind_is_said_once_with_figures() -> None:
    low = UpdateDecision(ess=0.05, is_low=True, lr_scale=0.17)
    _, _, notes, logged = followed(rows_with(30), decisions=(UpdateDecision(), low))
    [note] = notes
    assert "step 1: raw effective sample size 0.05 of an update, under 0.3" in note
    assert [metrics["guardrails/alarms"] for metrics in logged] == [1.0] * 30
    assert [metrics["guardrails/interventions"] for metrics in logged] == [1.0] * 30


def test_what_diagnosis_finds_is_told_with_its_remedy() -> None:
    flat = [0.4 + 0.02 * (-1) ** step for step in range(40)]
    rows = rows_with(40, **{"rollout_corr/kl": 0.3, "rollout_corr/k3_kl": 0.3, "critic/score/mean": flat})
    _, run, notes, _ = followed(rows)
    assert any("[large-updates]; try " in note for note in notes), notes
    assert run.stopped_because == ""


def test_validation_scores_are_seen_too() -> None:
    """First logged at step 10 and then now and then; a rule that needs them finds them."""
    rows = rows_with(120, **{"critic/score/mean": [0.2 + 0.006 * number for number in range(120)]})
    for row in rows[9::10]:
        row["val/sums/reward_mean"] = 0.2
    _, run, notes, _ = followed(rows)
    assert any("[reward-hacking]" in note for note in notes), notes
    assert run.stopped_because == ""
    assert not any("[reward-hacking]" in note for note in followed(rows_with(120))[2])


def test_a_long_run_is_looked_at_less_often(monkeypatch) -> None:
    monkeypatch.setattr(module, "EVERY_SHARE", 1 / 20)
    looks: list[int] = []
    monkeypatch.setattr(module, "examine", lambda run: looks.append(int(run.table.steps[-1])) or NOTHING)
    followed(rows_with(300))
    assert [step for step in looks if step < 120] == list(range(15, 120, module.EVERY))
    assert 6 <= sum(step > 200 for step in looks) <= 12


def test_a_fault_in_a_rule_does_not_end_the_run(monkeypatch) -> None:
    monkeypatch.setattr(module, "examine", lambda run: 1 / 0)
    _, run, notes, logged = followed(rows_with(60))
    assert len(logged) == 60
    assert [note for note in notes if "ZeroDivisionError" in note] == notes != []
    assert run.stopped_because == ""


def test_fatal_rules_exist() -> None:
    assert {rule.name for rule in all_rules()} >= FATAL


def wild_rows(seed: int, count: int = 45):
    noise = random.Random(seed)
    rows = rows_with(
        count,
        **{
            RAW_ESS: [noise.choice([0.05, 0.25, 0.6, 1.0]) for _ in range(count)],
            "rollout_corr/skipped_updates": [float(noise.random() < 0.1) for _ in range(count)],
            "critic/score/mean": [float(noise.random() < 0.9) for _ in range(count)],
            "actor/grad_norm": [noise.choice([1.0, math.nan, 50.0]) for _ in range(count)],
        },
    )
    for row in rows[4::5]:
        row["val/sums/reward_mean"] = noise.random()
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_run_decides_as_the_whole_one(seed) -> None:
    """Cut anywhere; what is between is the log, through JSON."""
    rows, noise = wild_rows(seed), random.Random(seed)
    judged = {row["step"]: noise.choice([LOPSIDED, FAR_AWAY, WELL, WELL]) for row in rows}

    def follow(guardrails, part):
        found = []
        for row in part:
            update = sums(judged[row["step"]])
            decision = decide_update(*update, guardrails.lr_scale, guardrails.spec)
            found.append({**row, **observed(guardrails, row, (decision,))})
        return found

    whole = follow(guardrails_of(run_of(alone(), f"{G}mode=act")), rows)
    for cut in (1, 7, WINDOW, 30):
        history = json.loads(json.dumps(whole[:cut]))
        rest = follow(guardrails_of(run_of(alone(), f"{G}mode=act", history=history)), rows[cut:])
        assert json.dumps(rest) == json.dumps(whole[cut:])


@pytest.mark.parametrize(
    ("mode", "logged", "carried"),
    [
        ("act", {"guardrails/lr_scale": 0.25}, 0.25),
        ("act", {"guardrails/lr_scale": 1.0}, 1.0),
        ("act", {}, 1.0),  # guardrails were off
        ("warn", {"guardrails/lr_scale": 0.25}, 1.0),
    ],
)
def test_the_factor_on_the_rate_is_carried_on_where_it_is_used(mode, logged, carried) -> None:
    history = [{**row, **logged} for row in rows_with(3)]
    guardrails, _, _, own = followed(rows_with(4)[3:], f"{G}mode={mode}", decisions=(), history=history)
    assert guardrails.lr_scale == own[0]["guardrails/lr_scale"] == carried
    assert guardrails_of(run_of(alone(), f"{G}mode={mode}")).lr_scale == 1.0


@pytest.mark.slow
def test_every_rank_does_what_the_main_one_decides(tmp_path) -> None:
    rows = rows_with(40, **{RAW_ESS: [0.9] * 5 + [0.1] * 35, **{k: v[5:45] for k, v in ZEROS.items()}})
    history = [{"step": 0.0}]
    main, other = on_ranks(2, deciding, rows, history, where=tmp_path)
    assert main == other
    assert any(tight for tight, _ in main[1:])
    assert any(reason for _, reason in main[1:])


@pytest.mark.parametrize("mode", ["warn", "act"])
def test_a_batch_is_decided_from_its_observation_alone(mode) -> None:
    """No log, no ranks: the observation is the only input; repeated decisions are equal."""
    spec = GuardrailsSpec(mode=mode)
    heavy = BatchObservation(7, tail_is_heavy=True)
    decision = decide_batch(heavy, spec, can_tighten=True)
    assert decision == decide_batch(heavy, spec, can_tighten=True)
    assert decision.tighten == (mode == "act")
    assert not decide_batch(heavy, spec, can_tighten=False).tighten
    assert [kind for kind, _ in decision.notices] == ["tail"]
    idle = decide_batch(BatchObservation(7, is_idle=True), spec, can_tighten=True)
    assert bool(idle.stop_reason) == (mode == "act")
    assert [kind for kind, _ in idle.notices] == ["collapse"]
    assert decide_batch(BatchObservation(7), spec, can_tighten=True) == BatchDecision()


def test_updates_are_counted_not_decisions() -> None:
    """Two updates that could not be checked are two updates all the same."""
    guardrails = guardrails_of(run_of(alone(), f"{G}mode=act"))
    logged = guardrails.observe(1, rows_with(1)[0], (), 2)
    assert logged["guardrails/updates"] == 2.0


# --- the spec ---------------------------------------------------------------------------------------


def test_one_key_turns_them_on_and_a_resumed_run_may_change_it() -> None:
    spec = load_spec([], [], []).spec
    assert spec.trainer.guardrails.mode == "warn"
    act = load_spec([], [], [f"{G}mode=act", f"{G}on_collapse=warn"]).spec
    assert [line.partition(":")[0] for line in refuse_unsafe(spec, act)] == [f"{G}mode", f"{G}on_collapse"]
