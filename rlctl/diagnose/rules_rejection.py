"""Rules about rejection and clipping, and about whether the correction that was asked for takes effect."""

from __future__ import annotations

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Remedy, Skipped, rule
from rlctl.diagnose.remedies import RC
from rlctl.diagnose.rules_gap import most_logged
from rlctl.diagnose.signals import crossing
from rlctl.diagnose.table import RunLog

_MASKED = th.MASKED.key
_MEAN, _LEAST, _MOST = (f"rollout_corr/rollout_is_{which}" for which in ("mean", "min", "max"))


@rule("rejected", "share of tokens rejected", needs=(_MASKED,))
def rejected(run: RunLog) -> Finding | Skipped | None:
    """Rejection throws away much of what was sampled."""
    crossed = crossing(run.table.series(_MASKED), th.MASKED)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"rejection drops {crossed.worst:.0%} of the response tokens {crossed.where}",
        (crossed.evidence,),
        "bounds too tight for how far apart the policies are; mend the gap first, if a rule above names it",
        th.MASKED.source,
        _less_rejection(run),
        "high",
        "the share is counted, not estimated",
    )


def _less_rejection(run: RunLog) -> tuple[Remedy, ...]:
    """Wider bounds, one criterion, or weights instead; what the run has already is left out."""
    if run.facts.rollout_rs in {None, "off"}:
        return ()
    rs, threshold = f"{RC}rollout_rs", f"{RC}rollout_rs_threshold"
    largest = "2.5" if run.facts.dialect != "verl" else "0.42"  # ½ ln² 2.5
    written = run.spec.algorithm.rollout_correction.rollout_rs_threshold if run.spec else None
    remedies = (
        remedy.change(f"{rs}=token_k1", f"{threshold}=0.5_2.0", why="wider bounds"),
        remedy.change(
            f"{rs}=seq_max_k2",
            f"{threshold}={largest}",
            why="only the largest ratio of a response",
            verl=f"{rs}=seq_max_k2 {threshold}=0.42",
        ),
        remedy.change(f"{rs}=null", f"{threshold}=null", f"{RC}rollout_is=sequence", why="weights instead"),
    )
    has = (f"{rs}={run.facts.rollout_rs}", f"{threshold}={written}")
    return tuple(one for one in remedies if one.spec[:2] != has)


@rule(
    "clipped-on-policy",
    "no clipping before the policy moves",
    needs=(th.CLIPPED_ON_POLICY.key,),
    uses=("training/staleness_max",),
    facts=("updates_per_batch",),
)
def clipped_on_policy(run: RunLog) -> Finding | Skipped | None:
    """PPO clips although the policy has not moved."""
    if run.facts.updates_per_batch != 1:
        return Skipped("several updates per batch: clipping is what PPO is for")
    if run.facts.bypass_mode and not run.gap_is_mismatch:
        return Skipped("stale samples are clipped against the policy that made them")
    crossed = crossing(run.table.series(th.CLIPPED_ON_POLICY.key), th.CLIPPED_ON_POLICY)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"PPO clips {crossed.worst:.1%} of the tokens although the policy has not moved yet {crossed.where}",
        (crossed.evidence,),
        "rollout engine and trainer disagree, in precision for instance, so the ratio starts away from 1",
        th.CLIPPED_ON_POLICY.source,
        (*remedy.same_precision(run), remedy.find_the_cause()),
        "high",
        "with one update per batch the ratio is 1 but for the implementations",
    )


@rule(
    "silently-off",
    "configured correction takes effect",
    uses=(_MEAN, _LEAST, _MOST, _MASKED, th.K3.key, th.LOG_PROB_GAP.key),
    facts=("rollout_is", "rollout_rs"),
)
def silently_off(run: RunLog) -> Finding | Skipped | None:
    """Correction is configured but does nothing."""
    facts = run.facts
    if facts.rollout_is == "off" and facts.rollout_rs == "off":
        return Skipped("no correction is configured")
    if len(run.table.steps) < th.MIN_STEPS:
        return Skipped("too few steps")
    first, last = int(run.table.steps[0]), int(run.table.steps[-1])
    # Whether a framework logs what its correction does is known from these two.
    tells_weights, tells_rejection = facts.weights_are is not None, facts.dialect is not None
    absent = None
    if facts.rollout_is != "off" and tells_weights and _MEAN not in run.table.columns:
        absent = (f"{RC}rollout_is", _MEAN)
    elif facts.rollout_rs != "off" and tells_rejection and _MASKED not in run.table.columns:
        absent = (f"{RC}rollout_rs", _MASKED)
    if absent:
        key, metric = absent
        evidence = Evidence(metric, "never logged", first, last)
        what = f"{key} is set, but its metrics are nowhere in the log"
    elif facts.rollout_is != "off" and (steps := _untouched(run)) is not None:
        evidence = Evidence(_LEAST, "exactly 1, like the maximum", *steps)
        what = "every weight is exactly 1 and nothing is rejected, although the policies differ"
    else:
        return None
    by_hand = remedy.by_hand(
        "make sure that the engine's log-probs reach the loss",
        verl="actor_rollout_ref.rollout.calculate_log_probs=True",
        trl="use_vllm=True vllm_importance_sampling_correction=True",
    )
    return Finding(
        "critical",
        what,
        (evidence,),
        "the correction is computed from the wrong log-probs, or its result is not used",
        th.LOGIC,
        (by_hand,),
        "high",
        "two policies that differ cannot have equal probabilities" if not absent else "it is always logged",
    )


def _untouched(run: RunLog) -> tuple[int, int] | None:
    """First and last step, if weights never differed from 1 while the policies did."""
    gap = most_logged(run, (th.K3.key, th.LOG_PROB_GAP.key))
    steps, (low, high, differ) = run.table.aligned(_LEAST, _MOST, gap)
    idle = (np.abs(low - 1.0) < th.EXACT) & (np.abs(high - 1.0) < th.EXACT)
    apart = differ > th.EXACT
    masked = run.table.series(_MASKED).values
    if apart.sum() < th.MIN_STEPS or not idle[apart].all() or (masked > 0.0).any():
        return None
    return int(steps[apart][0]), int(steps[apart][-1])


@rule(
    "bypass-repeats",
    "bypass mode passes over a batch once",
    facts=("bypass_mode", "ppo_epochs"),
)
def bypass_repeats(run: RunLog) -> Finding | Skipped | None:
    """Several passes in bypass mode."""
    epochs = run.facts.ppo_epochs or 1
    if not run.facts.bypass_mode or epochs == 1:
        return None
    return Finding(
        "warning",
        f"bypass mode with {epochs} passes over each batch",
        (Evidence("actor.ppo_epochs", str(epochs)),),
        "π_old stays the sampling policy while π_θ moves on: every pass is further off-policy than the last",
        th.LOGIC,
        (remedy.change(f"{RC}bypass_mode=false"), remedy.change("actor.ppo_epochs=1")),
        "high",
        "the settings say so",
    )


RULES = (
    rejected,
    clipped_on_policy,
    silently_off,
    bypass_repeats,
)
