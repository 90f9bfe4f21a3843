"""Every rule on a log that must trigger it and on ones that must not."""

import pytest

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rules import METRICS_READ, RULES, examine
from rlctl.metric_names import describe
from rlctl.spec.load import load_spec
from tests.unit.diagnose.logs import CORR, healthy_rows, write_run

RC = "algorithm.rollout_correction."
#: One update per batch: the logged gap is pure mismatch.
ONE_UPDATE = "actor.ppo_mini_batch_size=null"
PPO = f"{RC}loss_type=ppo_clip"
REJECTING = (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.6_1.6")
STEPS = 60


def always(**values):
    """Set metrics on every step; `__` stands for `/`, and a function gets the step."""
    changes = {key.replace("__", "/"): value for key, value in values.items()}

    def spoil(rows):
        for row in rows:
            row |= {k: v(row["step"]) if callable(v) else v for k, v in changes.items()}

    return spoil


def corr(**values):
    return always(**{f"{CORR}{key}": value for key, value in values.items()})


def without(*keys):
    def spoil(rows):
        for row in rows:
            for key in keys:
                row.pop(key, None)

    return spoil


def diagnose(tmp_path, spoil, *overrides, count=STEPS, has_spec=True):
    rows = healthy_rows(count)
    spoil(rows)
    return examine(read_run(write_run(tmp_path / "run", rows, *overrides, has_spec=has_spec), METRICS_READ))


def found(diagnosis):
    return {finding.rule: finding.severity for finding in diagnosis.findings}


def idle_correction(rows):
    corr(rollout_is_min=1.0, rollout_is_max=1.0, rollout_is_std=0.0, rollout_rs_masked_fraction=0.0)(rows)


def spikes(*steps):
    return always(actor__grad_norm=lambda step: 30.0 if step in steps else 0.8 + 0.01 * (step % 7))


TRIGGERS = {
    "probability-gap": [
        ("warning", always(training__rollout_probs_diff_mean=0.007), [ONE_UPDATE]),
        ("critical", always(training__rollout_probs_diff_mean=0.02), [f"{RC}bypass_mode=false"]),
    ],
    "policy-gap": [
        ("critical", corr(kl=0.2), []),
        ("critical", corr(kl=-0.2), []),
        ("warning", corr(k3_kl=0.004), [ONE_UPDATE, "engine.dtype=bf16"]),
    ],
    "weight-mean": [
        ("critical", corr(rollout_is_raw_mean=2.5), []),
        ("critical", corr(rollout_is_raw_mean=0.3), []),
        ("info", corr(rollout_is_raw_mean=1.4), []),
    ],
    "effective-samples": [
        ("critical", corr(rollout_is_eff_sample_size=0.2), []),
        ("info", corr(rollout_is_eff_sample_size=0.45), []),
        ("warning", corr(rollout_is_eff_sample_size=0.45, rollout_is_std=1.1), []),
        ("critical", corr(rollout_is_eff_sample_size=0.1, rollout_rs_masked_fraction=0.4), [*REJECTING]),
    ],
    "hidden-tail": [("warning", corr(rollout_is_raw_eff_sample_size=0.05), [])],
    "chi2": [("warning", corr(chi2_token=1.5), [])],
    "long-products": [
        ("warning", corr(rollout_is_ratio_fraction_high=0.3), []),
        ("warning", corr(saturated_sequences=100.0), []),  # of 1,024
    ],
    "rejected": [
        ("critical", corr(rollout_rs_masked_fraction=0.7), [*REJECTING]),
        ("info", corr(rollout_rs_masked_fraction=0.4), [*REJECTING]),
    ],
    "silently-off": [
        ("critical", without(f"{CORR}rollout_is_mean"), []),
        ("critical", without(f"{CORR}rollout_rs_masked_fraction"), [*REJECTING]),
        ("critical", idle_correction, []),
    ],
    "clipped-on-policy": [("warning", always(actor__pg_clipfrac=0.2), [ONE_UPDATE, PPO])],
    "bypass-repeats": [("warning", always(), ["actor.ppo_epochs=3"])],
    "not-finite": [
        ("info", always(actor__grad_norm=lambda s: "NaN" if s == 30 else 0.8), []),
        ("warning", always(actor__grad_norm=lambda s: "Infinity" if s in {30, 40} else 0.8), []),
        ("critical", always(actor__pg_loss=lambda s: "NaN" if s > 40 else 0.1), []),
    ],
    "gradient-norm": [
        ("warning", always(actor__grad_norm=25.0), []),
        ("warning", spikes(33, 41, 52), ["actor.grad_clip=0"]),
        ("info", spikes(41), []),
    ],
    "no-gradient": [("critical", always(actor__grad_norm=lambda s: 0.0 if s % 2 else 0.5), [])],
    "dead-groups": [
        ("warning", always(reward__zero_spread_groups=0.6), []),
        ("critical", always(reward__zero_spread_groups=0.8, critic__score__mean=0.05), []),
        ("critical", always(reward__zero_spread_groups=0.8, critic__score__mean=0.8), []),
        ("info", always(reward__zero_spread_groups=0.95, critic__score__mean=0.98), []),
    ],
    "zero-reward": [
        ("critical", always(critic__score__mean=0.0, critic__score__max=0.0), ["reward.name=exact"])
    ],
    "truncated": [
        ("info", always(response_length__clip_ratio=0.07), []),
        ("warning", always(response_length__clip_ratio=0.2), []),
        ("critical", always(response_length__clip_ratio=0.5), []),
    ],
    "entropy": [
        ("warning", always(actor__entropy=0.001), [PPO, "rollout.temperature=0.7"]),
        ("warning", always(actor__entropy=lambda s: 0.8 - s / 100, critic__score__mean=0.3), []),
    ],
    "healthy-loss": [("info", always(actor__pg_loss=lambda s: 1e-3 * (-1) ** s), [PPO])],
}
CASES = [(rule, *case) for rule, cases in TRIGGERS.items() for case in cases]


@pytest.mark.parametrize(("rule", "severity", "spoil", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_rule_finds_what_it_is_for(tmp_path, rule, severity, spoil, overrides):
    diagnosis = diagnose(tmp_path, spoil, *overrides)
    assert found(diagnosis).get(rule) == severity
    [finding] = [finding for finding in diagnosis.findings if finding.rule == rule]
    assert finding.evidence
    assert finding.cause
    assert finding.source
    for evidence in finding.evidence:
        if evidence.first_step is not None:
            assert describe(evidence.metric)
            assert 1 <= evidence.first_step <= evidence.last_step <= STEPS
    for remedy in finding.remedies:  # what is proposed can be trained with
        loaded = load_spec([], [tmp_path / "run" / "spec.yaml"], list(remedy.spec))
        assert loaded.spec != diagnosis.run.spec


def test_every_rule_is_tried():
    assert set(TRIGGERS) == {rule.name for rule in RULES}
    assert all(describe(key) for key in METRICS_READ)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("overrides", [[], [ONE_UPDATE, PPO], [f"{RC}bypass_mode=false", *REJECTING]])
def test_a_healthy_run_raises_no_alarm(tmp_path, seed, overrides):
    run = write_run(tmp_path / "run", healthy_rows(300, seed), *overrides)
    diagnosis = examine(read_run(run, METRICS_READ))
    assert found(diagnosis) == {}
    assert not any(skipped.missing for skipped in diagnosis.skipped)


@pytest.mark.parametrize(
    ("rule", "spoil", "overrides"),
    [
        # in bypass mode with two updates per batch the gap holds the policy's own progress
        ("probability-gap", always(training__rollout_probs_diff_mean=0.02), []),
        ("policy-gap", corr(k3_kl=0.004), []),
        # stale samples are older policies, not another implementation
        ("probability-gap", always(training__rollout_probs_diff_mean=0.02, training__staleness_max=4.0),
         [ONE_UPDATE]),
        # one bad step is not a trend
        ("policy-gap", corr(kl=lambda s: 0.5 if s == 30 else 0.0), []),
        ("effective-samples", corr(rollout_is_eff_sample_size=lambda s: 0.1 if s % 5 == 0 else 0.9), []),
        # rejection, not unequal weights
        ("effective-samples", corr(rollout_is_eff_sample_size=0.25, rollout_rs_masked_fraction=0.7),
         [*REJECTING]),
        # ... is all bad already where the applied figure says so
        ("hidden-tail", corr(rollout_is_raw_eff_sample_size=0.05, rollout_is_eff_sample_size=0.1), []),
        ("long-products", corr(rollout_is_ratio_fraction_high=0.3, saturated_sequences=100.0),
         [f"{RC}rollout_is=token"]),
        ("long-products", corr(saturated_sequences=5.0), []),
        ("silently-off", lambda rows: (idle_correction(rows), corr(k3_kl=0.0)(rows)), []),  # on-policy
        ("silently-off", idle_correction, [f"{RC}rollout_is=null"]),
        ("clipped-on-policy", always(actor__pg_clipfrac=0.2), [PPO]),
        ("bypass-repeats", always(), ["actor.ppo_epochs=3", f"{RC}bypass_mode=false", PPO]),
        # a slow drift, up or down, is no spike
        ("gradient-norm", always(actor__grad_norm=lambda s: 0.1 * 1.05**s), []),
        ("gradient-norm", always(actor__grad_norm=lambda s: 5 * 0.95**s), []),
        # a jump that is large in deviations only
        ("gradient-norm", always(actor__grad_norm=lambda s: 1.0 if s == 40 else 0.8 + 1e-4 * (s % 3)), []),
        ("zero-reward", always(critic__score__mean=lambda s: 0.1 * (s % 15 == 0),
                               critic__score__max=lambda s: 1.0 * (s % 15 == 0)), []),
        # sure of itself because it is right
        ("entropy", always(actor__entropy=0.001, critic__score__mean=0.97), []),
        # ... or on its way
        ("entropy", always(actor__entropy=lambda s: 0.8 - s / 100), []),
        ("healthy-loss", always(actor__pg_loss=0.0, actor__grad_norm=0.0), [PPO]),
    ],
)  # fmt: skip
def test_rule_lets_pass_what_it_should(tmp_path, rule, spoil, overrides):
    assert rule not in found(diagnose(tmp_path, spoil, *overrides))


def test_missing_metrics_skip_the_rule_and_name_the_key(tmp_path):
    diagnosis = diagnose(tmp_path, without(f"{CORR}chi2_token", "actor/grad_norm"))
    missing = {skipped.rule: skipped.missing for skipped in diagnosis.skipped}
    assert missing["chi2"] == (f"{CORR}chi2_token",)
    assert missing["no-gradient"] == ("actor/grad_norm",)
    assert found(diagnosis) == {}


def test_a_bare_log_skips_what_needs_the_spec(tmp_path):
    diagnosis = diagnose(tmp_path, corr(kl=0.2), has_spec=False)
    missing = {skipped.rule: skipped.missing for skipped in diagnosis.skipped}
    assert (
        missing["silently-off"] == missing["bypass-repeats"] == missing["probability-gap"] == ("spec.yaml",)
    )
    assert found(diagnosis) == {"policy-gap": "critical"}


def test_a_run_of_three_steps_is_not_judged(tmp_path):
    diagnosis = diagnose(tmp_path, corr(kl=0.2), count=3)
    assert found(diagnosis) == {}
    assert any("only 3 steps" in skipped.why for skipped in diagnosis.skipped)


def test_steps_and_the_end_of_a_phase_are_told(tmp_path):
    diagnosis = diagnose(tmp_path, corr(kl=lambda s: 0.3 if 20 <= s <= 39 else 0.0))
    [finding] = diagnosis.findings
    # The first window that is mostly beyond begins up to half a window early, the last ends as late.
    assert 15 <= finding.evidence[0].first_step <= 20
    assert 39 <= finding.evidence[0].last_step <= 44
    assert "not since" in finding.what
    assert "0.3" in finding.what


def test_rewards_that_were_there_before_mean_collapse_and_not_a_broken_grader(tmp_path):
    rewarded = {f"critic__score__{which}": lambda s: 0.5 * (s < 10) for which in ("mean", "max")}
    findings = diagnose(tmp_path, always(**rewarded)).findings
    [finding] = [finding for finding in findings if finding.rule == "zero-reward"]
    assert "collapsed" in finding.cause
    assert finding.evidence[0].first_step == 10


def test_worst_findings_come_first(tmp_path):
    def spoil(rows):
        always(response_length__clip_ratio=0.07, reward__zero_spread_groups=0.6)(rows)
        corr(kl=0.2)(rows)

    severities = [finding.severity for finding in diagnose(tmp_path, spoil).findings]
    assert severities == ["critical", "warning", "info"]
