"""Results of the rules on healthy runs, and the effect of the run's first values."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from rlctl.diagnose.rule import all_rules, examine
from rlctl.diagnose.table import Facts, RunLog, Table
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log
from tests.unit.diagnose.test_rules import (
    DECOUPLED,
    ONE_UPDATE,
    PPO,
    REJECTING,
    always,
    both,
    corr,
    diagnose,
    found,
    later,
    ramp,
    without,
)

HARMLESS = {"info"}
EPISODES = {rule.name for rule in all_rules() if rule.detect.__module__.endswith("rules_episodes")}
KINDS = {
    "bypass": [],
    "on-policy": [ONE_UPDATE, PPO],
    "decoupled": [DECOUPLED, *REJECTING],
    "critic": ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_no_alarm(seed, kind):
    rows = healthy_rows(150, seed)
    noise = random.Random(seed)
    for row in rows:
        row["critic/vf_explained_var"] = min(0.6, row["step"] / 60) + noise.gauss(0, 0.05)
        row |= {"actor/kl_loss": 0.001 * row["step"]}
        row |= {f"critic/advantages/{end}": sign * 1.5 for end, sign in (("max", 1), ("min", -1))}
    diagnosis = examine(run_log(rows, *KINDS[kind]))
    assert set(found(diagnosis).values()) <= HARMLESS
    missing = {skipped.rule for skipped in diagnosis.skipped if skipped.missing}
    assert missing == EPISODES | {"sampler-log-probs", "cut-vocabulary"}, (
        "only these metrics are not in a plain run's log"
    )


@pytest.mark.parametrize("seed", range(20))
def test_autocorrelated_noise_and_heavy_tails_raise_no_alarm(seed):
    """Logs whose noise drifts (AR(1)) and now and then jumps, as real ones do."""
    rows, noise = healthy_rows(400, seed), np.random.default_rng(seed)
    entropy = ("actor/entropy", f"{CORR}training_log_ppl", f"{CORR}rollout_log_ppl")  # one quantity
    for keys in (("actor/grad_norm",), entropy, ("response_length/mean",), (f"{CORR}k3_kl",)):
        drift = 0.0
        for row in rows:
            drift = 0.95 * drift + noise.normal(0, 0.05)
            factor = float(np.exp(drift + 0.1 * noise.standard_t(5)))
            row |= {key: row[key] * factor for key in keys}
    assert set(found(examine(run_log(rows, ONE_UPDATE))).values()) <= HARMLESS


@pytest.mark.parametrize("seed", range(10))
def test_a_long_reasoning_run_raises_no_alarm(seed):
    """Responses become several times longer and the reward rises; entropy falls; the KL is that of bf16
    engines."""
    rows, noise = healthy_rows(300, seed), random.Random(seed)
    for row in rows:
        share = row["step"] / 300
        row["response_length/mean"] = (500 + 2500 * share) * (1 + noise.gauss(0, 0.05))
        row[f"{CORR}k3_kl"] = 2e-3 * (1 + noise.gauss(0, 0.1))
        row["training/rollout_probs_diff_mean"] = 7e-3 * (1 + noise.gauss(0, 0.05))
        row["actor/grad_norm"] *= 0.2
    diagnosis = examine(run_log(rows, "algorithm.rollout_correction.rollout_is=token", DECOUPLED))
    assert set(found(diagnosis).values()) <= HARMLESS
    assert found(diagnosis)["policy-gap"] == "info"  # reported as info, not as a warning


def test_the_size_a_run_began_with_is_a_remark_and_says_so():
    steady = diagnose(corr(k3_kl=0.004), ONE_UPDATE).findings
    [finding] = [one for one in steady if one.rule == "policy-gap"]
    assert finding.severity == "info"
    assert "as from the run's start" in finding.what


@pytest.mark.parametrize(
    ("spoil", "severity"),
    [
        (corr(k3_kl=later(0.002, 0.0021)), "info"),  # within the start's noise
        (corr(k3_kl=later(0.002, 0.008)), "warning"),  # far from it
        (corr(k3_kl=later(1e-5, 9e-4)), None),  # far from the start, but small
        (corr(k3_kl=lambda s: 0.0005 * s), "warning"),  # a start with a trend is no measure
        (corr(k3_kl=0.2), "critical"),  # critical whatever the start
    ],
)
def test_both_material_and_far_from_the_start_or_critical(spoil, severity):
    assert found(diagnose(spoil, ONE_UPDATE)).get("policy-gap") == severity


def test_a_short_run_is_judged_by_absolutes():
    assert found(diagnose(corr(k3_kl=0.004), ONE_UPDATE, count=15))["policy-gap"] == "warning"


# --- logs of others: rules go by what is known, not by who wrote them ---------------------------------

TRL = Facts(
    bypass_mode=False,
    updates_per_batch=1,
    ppo_epochs=1,
    rollout_is="sequence",
    rollout_is_threshold=3.0,
    rollout_rs="off",
    has_critic=False,
    lr=1e-6,
    kl_coef=0.0,
    logs_correction=True,
)


def test_another_frameworks_user_gets_its_own_keys():
    rows = healthy_rows()
    corr(rollout_is_eff_sample_size=later(0.97, 0.2))(rows)
    [finding] = [one for one in examine(run_log(rows, facts=TRL)).findings if one.severity == "critical"]
    assert finding.rule == "effective-samples"
    others = [fix.others for fix in finding.fixes]
    assert any("vllm_importance_sampling_clip_min=0.6" in one.get("trl", "") for one in others)
    assert any(one.get("trl") == "learning_rate=5e-07" for one in others)
    assert any("actor_rollout_ref.actor.optim.lr=5e-07" in one.get("verl", "") for one in others)


@pytest.mark.parametrize(
    ("spoil", "rule", "words"),
    [
        (always(response_length__clip_ratio=0.4), "truncated", "max_completion_length"),
        (always(actor__grad_norm=later(0.8, 20.0)), "gradient-norm", "learning_rate=5e-06"),  # as logged
    ],
)
def test_what_the_log_does_not_tell_still_has_a_fix(spoil, rule, words):
    rows = healthy_rows()
    spoil(rows)
    unknown = Facts(bypass_mode=False, rollout_rs="off", has_critic=False)
    [finding] = [one for one in examine(run_log(rows, facts=unknown)).findings if one.rule == rule]
    assert words in [fix.others.get("trl") for fix in finding.fixes]


def test_proposed_numbers_have_two_digits():
    spoil = always(actor__grad_norm=later(0.8, 20.0), actor__lr=4.9986e-06)
    [finding] = [one for one in diagnose(spoil, facts=Facts()).findings if one.rule == "gradient-norm"]
    assert [fix.spec for fix in finding.fixes] == [("actor.lr=2.5e-06",)]


def test_a_tail_behind_truncation_is_seen_through_chi2():
    """verl logs the effective sample size of truncated weights only: at a bound of 2 it stays above 0.5."""
    rows = healthy_rows()
    both(
        without(f"{CORR}rollout_is_raw_eff_sample_size"), corr(rollout_is_eff_sample_size=0.7, chi2_seq=30.0)
    )(rows)
    facts = Facts(rollout_is="sequence", rollout_rs="off", naming="verl")
    [finding] = [one for one in examine(run_log(rows, facts=facts)).findings if one.rule == "hidden-tail"]
    assert "1 / (1 + χ²) = 0.0323" in finding.evidence[0].figure
    assert finding.confidence == "medium"
    assert finding.could_not_check


def test_a_figure_that_counts_long_responses_twice_is_believed_less():
    rows = healthy_rows()
    corr(rollout_is_eff_sample_size=0.2)(rows)
    facts = Facts(rollout_is="sequence", ess_length_weighted=True, naming="verl")
    [finding] = [one for one in examine(run_log(rows, facts=facts)).findings if one.severity == "critical"]
    assert finding.confidence == "medium"


@pytest.mark.parametrize(("gap", "severity"), [(0.06, None), (1.3, "critical"), (None, "critical")])
def test_weights_near_zero_are_products_where_their_level_is_unknown_and_log_probs_agree(gap, severity):
    """As TRL's default, the mask of products over a response."""
    spoil = both(corr(rollout_is_mean=0.05), always(mismatch__log_prob_abs_diff_mean=lambda step: gap))
    assert found(diagnose(spoil, facts=replace(TRL, rollout_is=None))).get("stale-weights") == severity


def test_weights_that_are_averaged_before_rejection_are_told_as_logged():
    spoil = corr(rollout_is_mean=0.06, rollout_rs_masked_fraction=0.4)
    verl = Facts(rollout_is="token", rollout_rs="token_k1", logs_correction=True, naming="verl")
    [finding] = [one for one in diagnose(spoil, facts=verl).findings if one.rule == "stale-weights"]
    assert finding.what.startswith("importance weights are 0.06 on average")
    spoil = corr(rollout_is_eff_sample_size=0.2, rollout_rs_masked_fraction=0.4)
    [finding] = [one for one in diagnose(spoil, facts=verl).findings if one.rule == "effective-samples"]
    assert "rejected" not in finding.evidence[0].figure


def test_silence_means_nothing_where_a_framework_never_logs_weights():
    rows = healthy_rows()
    without(f"{CORR}rollout_is_mean", f"{CORR}rollout_is_min", f"{CORR}rollout_is_max")(rows)
    quiet = Facts(rollout_is="token", rollout_rs="off")  # as OpenRLHF, which logs no weights
    assert "silently-off" not in found(examine(run_log(rows, facts=quiet)))
    assert found(examine(run_log(rows, facts=TRL)))["silently-off"] == "critical"


def test_a_loss_near_zero_is_explained_without_a_spec_too():
    rows = healthy_rows()
    still = always(actor__ppo_kl=0.0, actor__pg_clipfrac=0.0, actor__pg_loss=lambda s: 1e-4 * (-1) ** s)
    still(rows)
    findings = examine(run_log(rows, facts=TRL)).findings
    assert [(one.rule, one.severity) for one in findings] == [("healthy-loss", "info")]


def test_a_long_log_takes_seconds(request):
    count = 100_000
    noise = np.random.default_rng(0)
    healthy = healthy_rows(50)
    columns = {
        key: np.array([row.get(key, np.nan) for row in healthy] * (count // 50))
        * noise.lognormal(0, 0.1, count)
        for key in healthy[0]
        if key not in {"step", "timestamp"}
    }
    run = RunLog(request.path, Table(np.arange(1, count + 1), columns), facts=TRL)
    examine(run)  # imports scipy
    start = time.process_time()
    examine(run)
    assert time.process_time() - start < 2.0  # a million take ten times as long


def test_data_sources_that_are_never_validated_together_are_no_error():
    rows = healthy_rows()
    for row in rows:
        row.pop("val/addition/reward_mean", None)
        row[f"val/source{row['step'] % 2}/reward_mean"] = 0.5
    skipped = {one.rule: one.missing for one in examine(run_log(rows)).skipped}
    assert skipped["reward-hacking"] == ("val/<data_source>/reward_mean",)


def test_a_rising_reward_that_validation_follows_is_no_hacking():
    spoil = always(
        critic__score__mean=ramp(0.2, 0.9),
        val__addition__reward_mean=lambda s: None if s % 5 else 0.2 + s / 100,
    )
    assert "reward-hacking" not in found(diagnose(spoil))
