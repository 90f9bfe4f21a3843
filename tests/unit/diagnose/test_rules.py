"""Every rule on a log that must trigger it, on near misses, and without what it needs."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.convert.table import table, tables
from rlctl.diagnose.fixes import change
from rlctl.diagnose.rule import Detection, Rule, all_rules, examine, metrics_read
from rlctl.diagnose.table import Facts
from rlctl.errors import UsageError
from rlctl.metric_names import describe
from rlctl.run_spec.load import load_spec
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, spec_of

RC = "algorithm.rollout_correction."
GAP, ERROR = "mismatch__log_prob_abs_diff_mean", "mismatch__token_mult_prob_error"
#: One update per batch: the logged gap is pure mismatch.
ONE_UPDATE = "actor.ppo_mini_batch_size=null"
DECOUPLED = f"{RC}bypass_mode=false"
PPO = f"{RC}loss_type=ppo_clip"
REJECTING = (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.6_1.6")
GAE = "algorithm.adv_estimator=gae"
STEPS = 60
DOCS = Path(__file__).parents[3] / "docs/reference/diagnose-rules.md"


def always(**values):
    """Set metrics on every step; `__` stands for `/`, and a function gets the step (None: not logged)."""
    changes = {key.replace("__", "/"): value for key, value in values.items()}

    def spoil(rows):
        for row in rows:
            row |= {k: v(row["step"]) if callable(v) else v for k, v in changes.items()}
            for key in [key for key, value in row.items() if value is None]:
                del row[key]

    return spoil


def corr(**values):
    return always(**{f"{CORR}{key}": value for key, value in values.items()})


def without(*keys):
    return always(**{key.replace("/", "__"): lambda step: None for key in keys})


def both(*spoils):
    def spoil(rows):
        for one in spoils:
            one(rows)

    return spoil


def later(before, after, at=31):
    """One value, with some noise, up to a step, and another from there."""
    noise = random.Random(7)
    return lambda step: (after if step >= at else before) * (1 + noise.gauss(0, 0.05))


def ramp(start, end):
    return lambda step: start + (end - start) * step / STEPS


def diagnose(spoil, *overrides, count=STEPS, facts=None):
    rows = healthy_rows(count)
    spoil(rows)
    return examine(run_log(rows, *overrides, facts=facts))


def found(diagnosis):
    return {finding.rule: finding.severity for finding in diagnosis.findings}


def spikes(*steps):
    return always(actor__grad_norm=lambda step: 30.0 if step in steps else 0.8 + 0.01 * (step % 7))


idle_correction = corr(
    rollout_is_min=1.0, rollout_is_max=1.0, rollout_is_std=0.0, rollout_rs_masked_fraction=0.0
)
no_score_range = without("critic/score/max", "critic/score/min")
no_kl = without(f"{CORR}kl", f"{CORR}k3_kl")
hacking = always(
    critic__score__mean=ramp(0.3, 0.8), val__addition__reward_mean=lambda s: None if s % 5 else 0.3
)
exploited = always(
    critic__score__mean=lambda s: 0.3 if s < 4 else 1.0,
    val__addition__reward_mean=lambda s: None if s % 5 else 0.4 if s < 10 else 0.0,
)
fallen = always(val__addition__reward_mean=lambda s: None if s % 5 else 1 - s / 80)
#: The learning rate is 1e-5.
unrewarded = always(critic__score__mean=0.3)
large_updates = both(corr(k3_kl=lambda s: 0.3 if s > 30 else 1e-3), unrewarded)
small_updates = both(corr(k3_kl=lambda s: 3e-9), always(critic__score__mean=0.3))


def mean_log_ratios(nats, responses=1024, length=100.0):
    """`actor/ppo_kl` of updates of this size in nats: the mean of that many independent log-ratios."""
    draw = random.Random(3)
    spread = (2.0 * nats / (responses * length)) ** 0.5
    kl = {step: draw.gauss(0.0, spread) for step in range(1, 500)}
    return always(actor__ppo_kl=lambda s: kl[s], critic__score__mean=0.3, response_length__mean=length, **{})


FELL = {"critic__score__mean": lambda s: 0.5 if s <= 30 else 0.1}
at_reference = always(actor__kl_loss=1e-3, critic__score__mean=0.3)
terms = "reward.terms=[{name: exact}, {name: multiple_choice, weight: 3}]"


def of_terms(exact, other):
    return always(reward__exact__mean=exact, reward__multiple_choice__mean=other)


no_advantages = always(critic__advantages__max=0.0, critic__advantages__min=0.0)


def group_std(values):
    return both(without("reward/zero_spread_groups"), always(reward__group_std=values))


#: 60 rows that cover 1200 steps.
def sparse(rows):
    for row in rows:
        row["step"] *= 20


#: 60 rows whose steps are tokens.
def in_tokens(rows):
    for row in rows:
        row["step"] *= 1 << 19


slow = always(timing_s__reward=lambda s: 30.0 if s % 10 == 0 else 1.0, timing_s__step=lambda s: 50.0)


def episode(**values):
    """Metrics of episodes."""
    return always(**{f"episode__{key}": value for key, value in values.items()})


flat = always(critic__score__mean=0.3)
#: A tenth of the tokens has a log-prob of 0 of the engine's, and −4 of the trainer's.
in_loss = both(episode(num_messages__mean=4.0), corr(kl=0.4, k3_kl=0.4 - 0.1 * 0.98))
#: The same in a log with weights instead.
in_weights = both(episode(num_tool_calls=2.0), corr(kl=None, k3_kl=None, rollout_is_mean=0.9),
                  always(**{GAP: 0.4}))  # fmt: skip

#: rule → (severity, spoil, overrides of the spec)
TRIGGERS = {
    "length-collapse": [
        ("critical", both(flat, always(response_length__mean=later(300.0, 4.0))), []),
        ("warning", always(response_length__mean=later(300.0, 4.0)), []),  # while the reward rises
    ],
    "length-growth": [("warning", both(flat, always(response_length__mean=later(300.0, 900.0))), [])],
    "probability-gap": [
        ("warning", always(training__rollout_probs_diff_mean=later(1e-3, 0.007)), [ONE_UPDATE]),
        ("info", always(training__rollout_probs_diff_mean=0.007), [ONE_UPDATE]),  # as from the start
        ("critical", always(training__rollout_probs_diff_mean=0.02), [DECOUPLED]),
    ],
    "policy-gap": [
        ("critical", corr(kl=0.2), []),
        ("critical", corr(kl=-0.2), []),
        ("warning", corr(k3_kl=later(3e-4, 0.004)), [ONE_UPDATE, "engine.dtype=bf16"]),
        ("info", corr(k3_kl=0.004), [ONE_UPDATE]),
        ("critical", corr(k3_kl=0.3), [ONE_UPDATE, "rollout.dtype=int8"]),
        ("critical", both(no_kl, always(**{GAP: 0.3})), [ONE_UPDATE]),
        ("warning", both(no_kl, always(**{GAP: later(0.01, 0.06)})), [ONE_UPDATE]),
    ],
    "ratio-parts": [
        ("info", corr(split__staleness=0.3, split__engine=0.01), ["rollout.staleness=2"]),
        ("info", corr(split__kept_set=0.02, split__engine=1e-4), ["rollout.top_p=0.9"]),
        ("info", corr(split__engine=0.02), ["rollout.dtype=int8"]),
        ("info", corr(split__engine=0.01, split__cache=0.02), []),
    ],
    "cut-vocabulary": [
        ("warning", corr(unit_mean_cut=1.0, unit_mean=0.97), []),
        ("warning", corr(unit_mean_cut=later(0.0, 1.0), unit_mean=later(1.0, 0.97)), []),
    ],
    "token-error": [
        ("warning", always(**{ERROR: later(1.01, 1.3)}), []),
        ("critical", always(**{ERROR: 3.0}), []),
        ("info", always(**{ERROR: 1.08}), []),
    ],
    "sampled-otherwise": [
        ("critical", corr(training_log_ppl=1.3, rollout_log_ppl=1.31), []),  # of an entropy of 0.5
        ("warning", corr(training_log_ppl=0.72, rollout_log_ppl=0.72), []),
        ("critical", corr(training_log_ppl=0.2, rollout_log_ppl=0.2), []),  # colder
    ],
    "stale-weights": [
        ("critical", always(**{GAP: 1.7}), []),
        ("critical", corr(rollout_is_mean=0.03), ["rollout.staleness=2", f"{RC}rollout_is=token"]),
        ("critical", corr(rollout_is_mean=0.03), ["rollout.sync_every=3", f"{RC}rollout_is=token"]),
    ],
    "weight-mean": [
        ("critical", corr(rollout_is_raw_mean=2.5), []),
        ("critical", corr(rollout_is_raw_mean=0.3), []),
        ("info", corr(rollout_is_raw_mean=1.4), []),
        ("warning", both(without(f"{CORR}rollout_is_raw_mean"), corr(rollout_is_mean=0.4)), []),
    ],
    "effective-samples": [
        ("critical", corr(rollout_is_eff_sample_size=0.2), []),
        ("info", corr(rollout_is_eff_sample_size=0.45), []),
        ("warning", corr(rollout_is_eff_sample_size=0.45, rollout_is_std=1.1), []),
        ("critical", corr(rollout_is_eff_sample_size=0.1, rollout_rs_masked_fraction=0.4), [*REJECTING]),
        ("warning", both(without(f"{CORR}rollout_is_eff_sample_size"), corr(rollout_is_std=1.4)), []),
    ],
    "hidden-tail": [
        ("warning", corr(rollout_is_raw_eff_sample_size=0.05), []),
        ("warning", both(without(f"{CORR}rollout_is_raw_eff_sample_size"), corr(chi2_seq=9.0)), []),
        ("warning", both(without(f"{CORR}rollout_is_raw_eff_sample_size"), corr(chi2_token=9.0)),
         [f"{RC}rollout_is=token"]),
    ],
    "usable-length": [  # ln 2 / ln 1.01 = 69.7 tokens
        ("info", both(corr(chi2_token=0.01), always(response_length__mean=500.0)), []),
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
    "bypass-repeats": [("warning", always(), ["actor.ppo_epochs=3"])],
    "not-finite": [
        ("info", always(actor__grad_norm=lambda s: "NaN" if s == 30 else 0.8), []),
        ("warning", always(actor__grad_norm=lambda s: "Infinity" if s in {30, 40} else 0.8), []),
        ("critical", always(actor__pg_loss=lambda s: "NaN" if s > 40 else 0.1), []),
    ],
    "gradient-norm": [
        ("warning", always(actor__grad_norm=later(0.8, 25.0)), []),
        ("info", always(actor__grad_norm=25.0), []),  # as from the start
        ("warning", spikes(33, 41, 52), ["actor.grad_clip=0"]),
        ("info", spikes(41), []),
        ("warning", always(actor__grad_norm=lambda s: 3e9 if s == 41 else 0.8), []),
        ("critical", always(actor__grad_norm=3e9), []),
    ],
    "large-updates": [
        ("critical", large_updates, []),
        # one step that destroys the policy
        ("critical", both(corr(k3_kl=lambda s: 0.7 if s == 5 else 1e-3), unrewarded), []),
        ("warning", both(corr(k3_kl=lambda s: 0.07 if s > 30 else 1e-3), unrewarded), []),
        ("info", corr(k3_kl=lambda s: 0.07 if s > 30 else 1e-3), []),  # while the reward rises
        ("critical", both(always(actor__ppo_kl=-0.2), unrewarded), [DECOUPLED, PPO]),
    ],
    "small-updates": [
        ("warning", small_updates, []),
        ("warning", mean_log_ratios(1e-8), [DECOUPLED, PPO]),
        ("warning", both(small_updates, always(training__staleness_max=2.0)), []),  # even over more updates
        ("warning", both(small_updates, corr(k3_kl=lambda s: 2e-6 if s == 9 else 3e-9)), []),
        ("warning", always(), ["actor.lr=0"]),
        ("warning", always(actor__lr=lambda s: 1e-12 * s), []),
    ],
    "frozen": [
        ("warning", always(actor__grad_norm=lambda s: 0.1234567 + max(0, 30 - s)), []),
        ("warning", always(actor__entropy=0.4567891), []),
    ],
    "strong-penalty": [("warning", at_reference, ["actor.use_kl_loss=true", "actor.kl_loss_coef=2"])],
    "no-gradient": [("critical", always(actor__grad_norm=lambda s: 0.0 if s % 2 else 0.5), [])],
    "zero-advantages": [
        ("critical", no_advantages, []),
        ("critical", both(no_advantages, no_score_range), []),
    ],
    "sampler-log-probs": [
        ("warning", corr(log_wealth=later(0.1, 6.0), log_wealth_guaranteed=1.0), []),
        ("critical", corr(log_wealth=later(0.1, 20.0), log_wealth_guaranteed=1.0), []),
        ("warning", corr(log_wealth=later(0.1, 20.0), log_wealth_guaranteed=0.0), []),
    ],
    "random-tokens": [("critical", always(actor__entropy=5.0, critic__score__mean=0.01), [])],
    "no-format": [("critical", always(reward__format__mean=0.0, critic__score__mean=-0.1), [])],
    "critic": [("warning", both(flat, always(critic__vf_explained_var=-0.4)), [GAE])],
    "missing-log-probs": [("critical", corr(rollout_log_ppl=0.0, training_log_ppl=0.6), [])],
    "entropy-rise": [
        ("warning", always(actor__entropy=later(0.6, 2.5), critic__score__mean=0.3), []),
        ("warning", both(always(actor__entropy=later(0.6, 2.5)), without("critic/score/mean")), []),
    ],
    "flat-reward": [
        ("warning", both(sparse, always(critic__score__mean=0.31)), []),
        ("warning", both(sparse, always(critic__score__mean=0.13), no_score_range), []),
        ("info", both(sparse, always(critic__score__mean=0.8)), []),
        ("info", both(sparse, always(critic__score__mean=13.0), no_score_range), []),
    ],
    "reference-drift": [
        ("warning", always(actor__kl_loss=0.8), ["actor.use_kl_loss=true"]),
        ("critical", always(actor__reward_kl_penalty=3.0), ["algorithm.use_kl_in_reward=true"]),
    ],
    "healthy-loss": [("info", always(actor__pg_loss=lambda s: 1e-3 * (-1) ** s), [PPO])],
    "zero-spread-groups": [
        ("critical", both(group_std(lambda s: 0.3 * (s % 5 == 0)), always(critic__score__mean=0.1)), []),
        ("warning", both(group_std(lambda s: 0.3 * (s % 2)), no_score_range), []),
        ("warning", always(reward__zero_spread_groups=0.6), []),
        ("critical", always(reward__zero_spread_groups=0.8, critic__score__mean=0.05), []),
        ("critical", always(reward__zero_spread_groups=0.8, critic__score__mean=0.8), []),
        ("info", always(reward__zero_spread_groups=0.95, critic__score__mean=0.98), []),
        ("info", always(reward__zero_spread_groups=ramp(0.1, 0.99), critic__score__mean=ramp(0.2, 0.98)), []),
        ("info", both(no_score_range, always(reward__zero_spread_groups=0.95, critic__score__mean=0.98)), []),
        ("warning", both(always(reward__zero_spread_groups=0.8), no_score_range), []),
    ],
    "reward-fell": [
        ("critical", always(**FELL), []),
        ("warning", always(critic__score__mean=lambda s: 0.5 if s <= 30 else 0.3), []),
        ("critical", always(critic__score__mean=lambda s: 0.27 if s == 1 else 0.0), []),  # at once
        ("critical", always(critic__score__mean=lambda s: max(0.0, 0.4 - 0.05 * s)), []),  # within a window
        ("warning", both(no_score_range, always(critic__score__mean=lambda s: 9.0 - 0.1 * s)), []),
        # at the level of earlier short stays, for longer; below the lower of two levels
        ("critical", always(critic__score__mean=lambda s: 0.1 if s in (8, 15, 21) or s >= 30 else 0.6), []),
        ("critical", always(critic__score__mean=lambda s: 0.0 if s >= 45 else 0.6 - 0.2 * (s // 5 % 2)), []),
        # learned within few steps, and lost
        ("critical", always(critic__score__mean=lambda s: 0.1 if s <= 3 or s >= 40 else 0.6), []),
        ("critical", both(without("critic/score/mean"),
                          always(val__addition__reward_mean=lambda s: 0.9 - s / 100)), []),
    ],
    "constant-reward": [
        ("critical", always(critic__score__mean=1.0, critic__score__min=1.0), ["reward.name=exact"]),
    ],
    "reward-terms": [
        ("warning", of_terms(ramp(0.5, 0.05), ramp(0.1, 0.9)), [terms]),
        ("info", of_terms(ramp(0.1, 0.5), 0.0), [terms]),
        ("warning", of_terms(lambda s: 0.4 if s < 4 else 0.0, lambda s: 0.1 if s < 4 else 0.9), [terms]),
    ],
    "temperature": [
        ("warning", always(critic__score__mean=0.05), ["rollout.temperature=2"]),
        ("warning", always(reward__zero_spread_groups=0.7), ["rollout.temperature=0.2"]),
    ],
    "zero-reward": [
        ("critical", always(critic__score__mean=0.0, critic__score__max=0.0), ["reward.name=exact"]),
        ("critical", both(always(critic__score__mean=0.0), no_score_range), []),
    ],
    "entropy": [
        ("warning", always(actor__entropy=0.001), [PPO, "rollout.temperature=0.7"]),
        ("warning", always(actor__entropy=lambda s: 0.8 - s / 100, critic__score__mean=0.3), []),
        # without their range, mean rewards from 0 to 1 are taken for shares
        ("warning", both(no_score_range, always(actor__entropy=0.001,
                                                critic__score__mean=ramp(0.1, 0.5))), []),
        ("warning", both(no_score_range, always(actor__entropy=lambda s: 0.8 - s / 100,
                                                critic__score__mean=0.3)), []),
    ],
    "reward-hacking": [
        ("critical", hacking, []),
        # validation was near the top, and fell
        ("critical", both(hacking, fallen), []),
        ("warning", both(hacking, always(critic__score__mean=ramp(0.3, 0.55))), []),
        # exploited within the first steps: no gain between the ends, a top that validation contradicts
        ("critical", exploited, []),
    ],
    "truncated": [
        ("warning", both(without("response_length/clip_ratio"),
                         always(response_length__mean=lambda s: 300.0 if s % 10 else 512.0)),
         ["data.max_response_length=512"]),
        ("info", always(response_length__clip_ratio=0.07), []),
        ("warning", always(response_length__clip_ratio=0.2), ["data.max_response_length=64"]),
        ("critical", always(response_length__clip_ratio=0.5), []),
    ],
    "staleness": [
        ("critical", both(always(training__staleness_max=4.0), corr(kl=0.3)),
         ["rollout.staleness=2", f"{RC}rollout_is=null"]),
        ("warning", always(training__staleness_max=20.0), ["rollout.staleness=10"]),  # 2 updates per batch
        ("warning", always(training__staleness_max=20.0), ["rollout.max_staleness=10"]),
        ("warning", always(training__staleness_mean=20.0, training__staleness_max=None), []),
    ],
    "nondeterminism": [
        ("warning", always(actor__ppo_kl=0.004), [ONE_UPDATE, DECOUPLED]),
        ("warning", always(actor__ppo_ratio_mean=0.98), [ONE_UPDATE, DECOUPLED]),
    ],
    "slow-grader": [("warning", slow, []), ("warning", slow, ["reward.name=code"])],
    "failed-rollouts": [
        ("warning", always(rollout__error_fraction=0.1), []),
        ("critical", always(rollout__empty_fraction=0.4), []),
        ("warning", always(reward__error_fraction=0.08), []),
    ],
    "tool-errors": [
        ("warning", episode(tool_error_fraction=later(0.05, 0.3)), []),
        ("critical", episode(tool_errors=later(0.1, 1.5), num_tool_calls=2.0), []),
        ("warning", episode(tool_errors=1.5, num_tool_calls=2.0), []),  # from the start on
        ("warning", episode(tool_errors=2.0, num_tool_calls=0.0), []),  # no call can be read
    ],
    "turns-collapsed": [
        ("warning", both(flat, episode(num_turns__mean=later(3.0, 1.0))), []),
        ("warning", both(flat, episode(num_messages__mean=later(6.0, 2.0))), []),
        ("warning", both(flat, episode(num_tool_calls=later(2.0, 0.0))), []),
        ("info", episode(num_turns__mean=later(3.0, 1.0)), []),  # the reward rises
    ],
    "episodes-at-limit": [
        ("warning", both(flat, episode(stop__max_turns=1.0)), []),
        ("warning", both(flat, episode(stop__max_turns=0.5, stop__timeout=0.45)), []),
        ("info", episode(stop__max_turns=1.0), []),  # and learn
    ],
    "slow-environment": [
        ("warning", episode(seconds__policy=1.0, seconds__waiting=0.5, seconds__environment=2.0), []),
        ("warning", episode(seconds__policy=1.0, seconds__environment=2.0), []),
    ],
    "observation-tokens": [
        ("critical", in_loss, []),  # as the gap that it explains
        ("warning", in_weights, [f"{RC}rollout_is=token"]),
    ],
}  # fmt: skip
CASES = [(rule, *case) for rule, cases in TRIGGERS.items() for case in cases]


@pytest.mark.parametrize(("rule", "severity", "spoil", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_rule_finds_what_it_is_for(rule, severity, spoil, overrides):
    diagnosis = diagnose(spoil, *overrides)
    assert found(diagnosis).get(rule) == severity
    [finding] = [finding for finding in diagnosis.findings if finding.rule == rule]
    assert finding.evidence
    assert finding.cause
    assert finding.source
    assert finding.confidence_reason
    last = STEPS * (20 if rule == "flat-reward" else 1)
    for evidence in finding.evidence:
        if evidence.first_step is not None:
            assert describe(evidence.metric) or "<" in evidence.metric
            assert 1 <= evidence.first_step <= evidence.last_step <= last
    for fix in finding.fixes:  # what is proposed can be trained with, and changes something
        assert fix.spec or fix.why
        if fix.spec:
            assert load_spec(["rloo-seq-is"], [], [*overrides, *fix.spec]).spec != spec_of(*overrides)


def test_every_rule_is_tried():
    not_of_metrics = {"exception", "disk-full", "who-sampled", "unsteady-reward", "optimizer-state"}
    assert set(TRIGGERS) | not_of_metrics == {rule.name for rule in all_rules()}
    assert all(describe(key) or "<" in key for key in metrics_read())


@pytest.mark.parametrize("key", sorted({key for one in tables().values() for key in one.fixes if "." in key}))
def test_a_fix_names_the_keys_that_other_frameworks_read(key):
    for framework, setting in change(f"{key}=1").others.items():
        if framework in {"verl", "trl", "openrlhf", "slime"}:  # others have keys of TRL, or no table
            rule = table(framework).rule(setting.removeprefix("--").replace("=", " ").partition(" ")[0])
            assert rule is not None
            assert (rule.unsupported, rule.to or key) == ("", key)


def test_a_fix_for_the_learning_rate_is_in_every_framework():
    frameworks = {name for name, one in tables().items() if one.is_framework}
    assert change("actor.lr=1e-06").others.keys() == frameworks | {"llama-factory"}


#: Options that fixes name, of frameworks that `rlctl import` does not read: of ms-swift 4 (`args_mixin.py`,
#: `rlhf_args.py`, Hugging Face's arguments), SkyRL (`train/config/config.py`) and AReaL (`cli_args.py`).
OTHERS = {
    "ms-swift": {
        "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold", "overlong_filter",
        "use_vllm", "dynamic_sample", "epsilon_high", "num_iterations", "steps_per_generation",
        "num_generations", "beta", "temperature", "max_completion_length", "loss_type", "learning_rate",
        "max_grad_norm", "bf16", "fp16", "top_p", "top_k",
    },
    "skyrl": {
        *(f"trainer.algorithm.{key}" for key in ("eps_clip_high", "kl_loss_coef",
                                                 "off_policy_correction.tis_ratio_type")),
        *(f"trainer.policy.optimizer_config.{key}" for key in ("lr", "max_grad_norm")),
        "trainer.update_epochs_per_batch", "generator.n_samples_per_prompt",
        *(f"generator.sampling_params.{key}" for key in ("temperature", "max_generate_length")),
    },
    "areal": {
        "actor.optimizer.lr", "actor.optimizer.gradient_clipping", "actor.eps_clip_higher", "actor.kl_ctl",
        "gconfig.n_samples", "gconfig.temperature", "gconfig.max_new_tokens",
    },
}  # fmt: skip


def settings_of(text):
    """The keys in `key=value …` or `--key value …`; a placeholder `<…>` is a value."""
    words = [word.partition("=")[0] for word in re.sub(r"<[^<>]*>", "X", text).split()]
    flags = [word.removeprefix("--") for word in words if word.startswith("--")]
    return flags or words


@pytest.mark.parametrize("facts", [{}, {"bypass_mode": True}, {"rollout_is": "sequence"}])
def test_every_setting_that_a_fix_names_exists_in_its_framework(facts):
    """In the version that `rlctl import` reads; options that OpenRLHF no longer has are `outside` there."""
    named = {}
    for rule in all_rules():
        for _, spoil, _ in TRIGGERS.get(rule.name, ()):
            rows = healthy_rows(STEPS)
            spoil(rows)
            run = examine(run_log(rows, facts=Facts(**facts)), []).run
            finding = rule.apply(run)
            fixes = [*rule._fixes(run), *getattr(finding, "fixes", ())]
            named |= {(name, text): rule.name for fix in fixes for name, text in fix.others.items()}
    read, without_table = {"verl", "trl", "openrlhf", "slime"}, {"nemo-rl", "prime-rl"}
    assert {name for name, _ in named} >= read | OTHERS.keys() or facts
    for framework, text in named:
        if framework in without_table | {"llama-factory"}:  # the last has TRL's
            continue
        for key in set(settings_of(text)) - {"max_staleness"}:  # of TRL's AsyncGRPOConfig
            if framework in OTHERS:
                assert key in OTHERS[framework], text
            elif "engine_kwargs" not in key:
                rule = table(framework).rule(key.removeprefix("+"))
                assert rule is not None, (framework, text)
                assert not (rule.outside and framework == "openrlhf"), text


def test_no_option_corrects_in_a_loss_with_its_ratio_to_the_sampler():
    """TRL's asynchronous GRPO has no such option, and slime's changes nothing there."""
    rows = healthy_rows(STEPS)
    always(**{f"{CORR}kl": None, f"{CORR}k3_kl": 0.3})(rows)
    run = run_log(rows, facts=Facts(bypass_mode=True, rollout_is="off"))
    [finding] = [one for one in examine(run).findings if one.rule == "policy-gap"]
    weights = [fix for fix in finding.fixes if f"{RC}rollout_is=token" in fix.spec]
    assert [fix.others.keys() for fix in weights] == [{"verl"}]
    assert any(f"{RC}bypass_mode=false" in fix.spec for fix in finding.fixes)


def test_the_page_of_rules_lists_every_rule():
    page = DOCS.read_text(encoding="utf-8")
    rows = {rule.name: f"| `{rule.name}` | {rule.signal} |" for rule in all_rules()}
    assert [name for name, row in rows.items() if page.replace("\\|", "|").count(row) != 1] == []


@pytest.mark.parametrize(
    ("rule", "spoil", "overrides"),
    [
        # in bypass mode with two updates per batch the gap holds the policy's own progress
        ("probability-gap", always(training__rollout_probs_diff_mean=0.02), []),
        ("policy-gap", corr(k3_kl=0.004), []),
        ("ratio-parts", corr(split__staleness=0.004, split__engine=0.004), []),
        # stale samples are older policies, not another implementation
        ("probability-gap", always(training__rollout_probs_diff_mean=0.02, training__staleness_max=4.0),
         [ONE_UPDATE]),
        # such log-probs are of another model, as `stale-weights` says
        ("policy-gap", both(no_kl, always(**{GAP: 1.7})), [ONE_UPDATE]),
        # one bad step is not a trend
        ("policy-gap", corr(kl=lambda s: 0.5 if s == 30 else 0.0), []),
        ("effective-samples", corr(rollout_is_eff_sample_size=lambda s: 0.1 if s % 5 == 0 else 0.9), []),
        # both log-probs differ as well: another finding's matter
        ("sampled-otherwise", corr(training_log_ppl=1.3, rollout_log_ppl=0.5), []),
        # ×2, but of next to nothing
        ("sampled-otherwise", both(corr(training_log_ppl=0.04, rollout_log_ppl=0.04),
                                   always(actor__entropy=0.02)), []),
        # failed samples are in one of the means only
        ("sampled-otherwise", both(corr(training_log_ppl=1.3, rollout_log_ppl=1.3),
                                   always(reward__error_fraction=0.2)), []),
        ("stale-weights", always(**{GAP: 0.5}), []),
        ("stale-weights", corr(rollout_is_mean=0.03), []),  # products over 300 tokens
        # rejection, not unequal weights; where everything is rejected there is no weight
        ("stale-weights", corr(rollout_is_mean=0.0, rollout_rs_masked_fraction=1.0),
         [*REJECTING, f"{RC}rollout_is=token"]),
        ("stale-weights", corr(rollout_is_mean=0.08, rollout_rs_masked_fraction=0.9),
         [*REJECTING, f"{RC}rollout_is=token"]),
        ("effective-samples", corr(rollout_is_eff_sample_size=0.25, rollout_rs_masked_fraction=0.7),
         [*REJECTING]),
        # ... if the applied metric is already at a critical level
        ("hidden-tail", corr(rollout_is_raw_eff_sample_size=0.05, rollout_is_eff_sample_size=0.1), []),
        ("hidden-tail", corr(rollout_is_raw_eff_sample_size=0.05), [f"{RC}rollout_is=null"]),
        # χ² of products does not apply to token weights
        ("hidden-tail", both(without(f"{CORR}rollout_is_raw_eff_sample_size"), corr(chi2_seq=9.0)),
         [f"{RC}rollout_is=token"]),
        ("usable-length", both(corr(chi2_token=0.01), always(response_length__mean=60.0)), []),
        ("cut-vocabulary", corr(unit_mean_cut=lambda s: 1.0 if s % 5 == 0 else 0.0, unit_mean=0.99), []),
        ("silently-off", both(idle_correction, corr(k3_kl=0.0)), []),  # on-policy
        ("silently-off", idle_correction, [f"{RC}rollout_is=null"]),
        ("bypass-repeats", always(), ["actor.ppo_epochs=3", DECOUPLED, PPO]),
        # a slow drift, up or down, is no spike
        ("gradient-norm", always(actor__grad_norm=lambda s: 0.1 * 1.05**s), []),
        ("gradient-norm", always(actor__grad_norm=lambda s: 5 * 0.95**s), []),
        # a jump that is large in deviations only
        ("gradient-norm", always(actor__grad_norm=lambda s: 1.0 if s == 40 else 0.8 + 1e-4 * (s % 3)), []),
        ("large-updates", corr(k3_kl=0.03), []),
        # as large while the rate is small: it is not of the updates
        ("large-updates", both(corr(k3_kl=later(0.2, 0.2)), always(actor__lr=lambda s: 1e-6 * s)), []),
        ("large-updates", corr(k3_kl=lambda s: 0.2 if s == 30 else 1e-3), []),
        ("large-updates", corr(k3_kl=0.3), [DECOUPLED, PPO]),  # of the engines
        ("large-updates", both(large_updates, always(training__staleness_max=2.0)), []),
        ("small-updates", small_updates, [DECOUPLED]),
        ("small-updates", mean_log_ratios(3e-5), [DECOUPLED, PPO]),
        ("small-updates", mean_log_ratios(1e-8), [DECOUPLED, PPO, "actor.ppo_mini_batch_size=null"]),
        ("small-updates", corr(k3_kl=3e-9), []),  # it learns
        ("small-updates", always(actor__lr=lambda s: 1e-10 * s), []),
        ("frozen", always(actor__grad_norm=1.0), []),  # the norm after clipping
        ("frozen", always(actor__entropy=lambda s: 0.4567891 + s // 19), []),
        ("strong-penalty", at_reference, ["actor.use_kl_loss=true"]),
        ("strong-penalty", always(actor__kl_loss=0.5), ["actor.use_kl_loss=true", "actor.kl_loss_coef=2"]),
        ("no-gradient", always(actor__grad_norm=lambda s: 0.0 if s % 4 == 0 else 0.5), []),
        ("reference-drift", always(actor__kl_loss=3.0), []),  # not penalised
        ("reference-drift", always(actor__kl_loss=lambda s: min(0.03 * s, 0.3)), ["actor.use_kl_loss=true"]),
        ("reward-fell", always(critic__score__mean=lambda s: 0.5 if 20 <= s < 40 else 0.45), []),
        ("reward-fell", always(critic__score__mean=lambda s: 0.1 if s % 20 == 10 else 0.5), []),
        ("reward-fell", always(critic__score__mean=lambda s: 0.2 + 0.3 * (s * 0.618 % 1)), []),  # noise
        ("reward-fell", always(critic__score__mean=lambda s: 0.1 if 20 <= s < 40 else 0.5), []),  # it is back
        ("constant-reward", always(critic__score__mean=1.0, critic__score__min=lambda s: float(s > 5)), []),
        ("reward-terms", of_terms(ramp(0.1, 0.5), ramp(0.1, 0.9)), [terms]),
        ("reward-terms", of_terms(ramp(0.5, 0.4), ramp(0.1, 0.9)), [terms]),
        ("reward-terms", of_terms(ramp(-0.1, -0.5), ramp(0.1, 0.9)), [terms]),  # a penalty that grows
        ("temperature", always(critic__score__mean=0.05), []),
        ("temperature", always(), ["rollout.temperature=2"]),
        ("temperature", always(), ["rollout.temperature=0.2"]),
        ("zero-reward", always(critic__score__mean=lambda s: 0.1 * (s % 15 == 0),
                               critic__score__max=lambda s: 1.0 * (s % 15 == 0)), []),
        ("zero-reward", always(critic__score__mean=0.0), []),  # rewards that average 0
        # sure of itself because it is right
        ("entropy", always(actor__entropy=0.001, critic__score__mean=0.97), []),
        ("entropy", both(no_score_range, always(actor__entropy=0.001, critic__score__mean=0.97)), []),
        ("entropy", both(no_score_range, always(actor__entropy=0.001,
                                                critic__score__mean=ramp(0.2, 1.8))), []),
        # ... or on its way
        ("entropy", always(actor__entropy=lambda s: 0.8 - s / 100), []),
        ("healthy-loss", always(actor__pg_loss=0.0, actor__grad_norm=0.0), [PPO]),
        # every response has the best reward of the run
        ("zero-advantages", both(no_advantages, always(critic__score__mean=1.0, critic__score__min=1.0)), []),
        ("zero-advantages", always(critic__advantages__max=lambda s: 1.0 * (s % 5 != 0),
                                   critic__advantages__min=lambda s: -1.0 * (s % 5 != 0)), []),
        # a policy may be certain; and one that is certain on both sides agrees
        ("missing-log-probs", corr(rollout_log_ppl=0.0, training_log_ppl=0.0), []),
        ("sampler-log-probs", corr(log_wealth=4.0, log_wealth_guaranteed=1.0), []),
        ("sampler-log-probs", corr(log_wealth=6.0, log_wealth_guaranteed=0.0), []),
        ("entropy-rise", always(actor__entropy=later(0.6, 2.5)), []),  # and the reward rises
        ("entropy-rise", always(actor__entropy=later(0.2, 0.6), critic__score__mean=0.3), []),
        ("entropy-rise", always(actor__entropy=lambda s: 2.5 if 21 <= s <= 40 else 0.6,
                                critic__score__mean=0.3), []),  # it came back
        ("flat-reward", always(critic__score__mean=0.31), []),  # 60 steps
        ("flat-reward", both(in_tokens, always(critic__score__mean=0.31)), []),  # 60 rows, 31 million tokens
        ("flat-reward", both(sparse, always(critic__score__mean=ramp(0.02, 0.06))), []),  # it triples
        ("flat-reward", both(sparse, always(critic__score__mean=0.97)), []),  # learned
        ("zero-spread-groups", group_std(lambda s: 0.3 * (s % 3 > 0)), []),
        # one length may be the longest by chance
        ("truncated", both(without("response_length/clip_ratio"),
                           always(response_length__mean=lambda s: 300.0 + s)),
         ["data.max_response_length=512"]),
        ("reward-hacking", always(), []),
        # validation falls, but so does the training reward
        ("reward-hacking", always(critic__score__mean=0.3,
                                  val__addition__reward_mean=lambda s: None if s % 5 else 0.8 - s / 100), []),
        # at the top of both, validation varies a little
        ("reward-hacking", both(exploited, always(val__addition__reward_mean=lambda s: None if s % 5 else
                                                  0.99 if s < 10 else 0.9)), []),
        # validation was near the top from the start
        ("reward-hacking", both(hacking, always(val__addition__reward_mean=0.95)), []),
        ("staleness", always(training__staleness_max=12.0), []),  # updates: 6 batches
        ("staleness", both(always(training__staleness_max=4.0), corr(kl=0.3)), []),  # corrected
        ("staleness", always(training__staleness_max=4.0), [f"{RC}rollout_is=null"]),
        ("nondeterminism", always(actor__ppo_kl=0.004), [DECOUPLED]),
        ("slow-grader", always(timing_s__reward=lambda s: 4.0 if s % 10 == 0 else 1.0), []),
        ("failed-rollouts", always(reward__error_fraction=lambda s: 0.5 if s == 30 else 0.0), []),
        ("tool-errors", episode(tool_errors=lambda s: 0.4 if s % 9 == 0 else 0.0, num_tool_calls=2.0), []),
        ("tool-errors", episode(tool_error_fraction=ramp(1.0, 0.5)), []),  # it learns the format
        ("turns-collapsed", both(flat, episode(num_turns__mean=later(3.0, 2.0))), []),
        ("turns-collapsed", both(flat, episode(num_turns__mean=1.0)), []),
        # it knows the answer
        ("turns-collapsed", episode(num_turns__mean=ramp(2.0, 1.0), critic__score__mean=ramp(0.5, 1.0)), []),
        ("episodes-at-limit", both(flat, episode(stop__max_turns=0.6, stop__max_tokens=0.4)), []),
        ("slow-environment", episode(seconds__policy=0.2, seconds__waiting=2, seconds__environment=2), []),
        # samples that are old, but drawn
        ("observation-tokens", both(episode(num_messages__mean=4.0), corr(kl=0.4, k3_kl=0.4)), []),
        ("observation-tokens", both(in_loss, episode(num_messages__mean=2.0)), []),  # nothing was observed
        ("observation-tokens", both(in_loss, episode(observation_fraction=0.5)), []),  # rlctl's log
        ("observation-tokens", in_weights, []),  # weights of responses are products
        # a start that the run has outgrown is a remark at most
        ("truncated", always(response_length__clip_ratio=lambda s: 0.2 if s <= 10 else 0.01), []),
    ],
)  # fmt: skip
def test_rule_lets_pass_what_it_should(rule, spoil, overrides):
    assert found(diagnose(spoil, *overrides)).get(rule) in {None, "info"}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_without_its_metrics_a_rule_says_what_it_misses(rule):
    """... and never raises, whatever else is missing."""
    for keys in (rule.needs, rule.one_of):
        logged = [key.replace("<data_source>", "addition") for key in keys]
        diagnosis = diagnose(without(*logged), GAE, "actor.use_kl_loss=true")
        skipped = {one.rule: one for one in diagnosis.skipped}
        if keys and not rule.not_applicable(diagnosis.run):
            assert set(skipped[rule.name].missing) >= set(keys)
    bare = examine(run_log([{"step": step, "actor/lr": 1e-5} for step in range(1, 41)], facts=Facts()))
    assert found(bare) == {}
    assert rule.name in {one.rule for one in bare.skipped}


def test_facts_that_nobody_tells_are_named():
    diagnosis = diagnose(corr(kl=0.2), facts=Facts())
    missing = {skipped.rule: skipped.missing for skipped in diagnosis.skipped}
    for rule in ("silently-off", "bypass-repeats", "probability-gap", "nondeterminism"):
        assert missing[rule] == ("spec.yaml",)
    assert found(diagnosis) == {"policy-gap": "critical"}


def test_the_usable_length_is_that_of_weights_of_sequences():
    spoil = both(corr(chi2_token=0.01), always(response_length__mean=500.0))
    [finding] = [one for one in diagnose(spoil).findings if one.rule == "usable-length"]
    assert "up to about 70 tokens; responses have 500" in finding.what
    assert "usable-length" not in found(diagnose(spoil, f"{RC}rollout_is=token"))


@pytest.mark.parametrize("count", [1, 3])
def test_critical_levels_count_from_one_step_and_milder_ones_do_not(count):
    [finding] = [one for one in diagnose(corr(kl=0.2), count=count).findings if one.rule == "policy-gap"]
    assert finding.severity == "critical"
    assert f"{'one step' if count == 1 else '3 steps'} only" in finding.confidence_reason
    mild = diagnose(corr(k3_kl=0.004), ONE_UPDATE, count=count)
    assert found(mild) == {}
    skipped = {one.rule: one.why for one in mild.skipped}
    assert f"was logged at {count} of the 5 steps" in skipped["policy-gap"]


def test_steps_and_the_end_of_a_phase_are_told():
    diagnosis = diagnose(corr(kl=lambda s: 0.3 if 20 <= s <= 39 else 0.0))
    [finding] = diagnosis.findings
    assert (finding.evidence[0].first_step, finding.evidence[0].last_step) == (20, 39)
    assert "not since" in finding.what
    assert "0.3" in finding.what


def test_rewards_that_were_there_before_mean_collapse_and_not_a_broken_grader():
    rewarded = {f"critic__score__{which}": lambda s: 0.5 * (s < 10) for which in ("mean", "max")}
    findings = diagnose(always(**rewarded)).findings
    [finding] = [finding for finding in findings if finding.rule == "zero-reward"]
    assert "collapsed" in finding.cause
    assert finding.evidence[0].first_step == 10


def test_dead_groups_say_whether_all_right_or_all_wrong():
    for score, word in ((0.05, "all wrong"), (0.8, "all right")):
        dead = always(reward__zero_spread_groups=0.8, critic__score__mean=score)
        [finding] = [one for one in diagnose(dead).findings if one.rule == "zero-spread-groups"]
        assert word in finding.what
        assert finding.confidence == "high"


def test_dead_groups_under_a_rising_reward_are_solved_ones_where_the_range_is_unknown():
    spoil = both(
        always(reward__zero_spread_groups=ramp(0.1, 0.99), critic__score__mean=ramp(0.2, 0.98)),
        no_score_range,
    )
    [finding] = [one for one in diagnose(spoil).findings if one.rule == "zero-spread-groups"]
    assert (finding.severity, finding.confidence) == ("info", "low")


@pytest.mark.parametrize(
    ("override", "proposed"),
    [
        ("rollout.staleness=8", "rollout.staleness=4"),
        ("rollout.max_staleness=1", "rollout.max_staleness=0"),
        ("rollout.sync_every=4", "rollout.sync_every=2"),
    ],
)
def test_where_the_spec_makes_samples_stale_fresher_ones_close_the_gap_first(override, proposed):
    [finding] = [one for one in diagnose(corr(kl=0.2), override).findings if one.rule == "policy-gap"]
    assert finding.fixes[0].spec == (proposed,)
    assert "stale" in finding.cause


def test_worst_findings_come_first():
    spoil = both(always(response_length__clip_ratio=0.07, reward__zero_spread_groups=0.6), corr(kl=0.2))
    severities = [finding.severity for finding in diagnose(spoil).findings]
    assert severities == ["critical", "warning", "info"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rule(len), "with a name"),
        (lambda: Rule("mine", needs="critic/score/mean"), "give a tuple of texts"),
        (lambda: Rule("mine")(lambda: None), "called with the run: too many positional arguments"),
    ],
)
def test_wrong_arguments_of_a_rule_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("severity", "what"), [("fatal", "too low"), ("warning", None)])
def test_a_detection_has_a_severity_and_a_sentence(severity: str, what: str | None) -> None:
    with pytest.raises(UsageError, match="no such severity, or no text"):
        Detection(severity, what, ())


@pytest.mark.parametrize("cache", ["keep", "clear", "recompute"])
def test_a_stale_cache_is_recomputed_by_a_setting(cache):
    server = ("rollout.name=vllm", "rollout.mode=server", "rollout.max_staleness=1", "rollout.in_flight=true")
    rows = healthy_rows()
    corr(split__engine=0.01, split__cache=0.02, stale_cache_fraction=0.25)(rows)
    found = examine(run_log(rows, *server, f"rollout.stale_cache={cache}"), all_rules())
    [finding] = [one for one in found.findings if one.rule == "ratio-parts"]
    assert [seen.metric for seen in finding.evidence] == [f"{CORR}split/cache", f"{CORR}stale_cache_fraction"]
    assert "25%" in finding.evidence[1].figure
    settings = [setting for fix in finding.fixes for setting in fix.spec]
    assert settings == ([] if cache == "recompute" else ["rollout.stale_cache=recompute"])


@pytest.mark.parametrize(
    "logged",
    [
        {"actor/kl_loss": lambda step: 0.001, "actor/pg_loss": lambda step: 0.006},
        {
            "actor/kl_loss": lambda step: 1e-5 * step,
            "actor/pg_loss": lambda step: 6e-5 * step,
            "actor/kl_coef": lambda step: 1e-3,
        },
    ],
    ids=["repeated", "logged"],
)
def test_a_coefficient_is_inferred_only_where_it_is_unknown_and_figures_vary(logged):
    rows = [row | {key: value(row["step"]) for key, value in logged.items()} for row in healthy_rows()]
    diagnosis = examine(run_log(rows, facts=Facts()), all_rules())
    assert diagnosis.run.facts.kl_coef is None
    assert "strong-penalty" not in found(diagnosis)
