"""Rules about rejection and clipping, and whether the configured correction takes effect."""

from __future__ import annotations

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Fix, Skipped, Sure
from rlctl.diagnose.fixes import RC
from rlctl.diagnose.rule import Detection, Rule, detect_crossing
from rlctl.diagnose.signals import evidence_over
from rlctl.diagnose.table import RunLog

_MASKED = th.MASKED.key
_MEAN, _LEAST, _MOST = (f"rollout_corr/rollout_is_{which}" for which in ("mean", "min", "max"))
_RS, _RS_THRESHOLD = f"{RC}rollout_rs", f"{RC}rollout_rs_threshold"


def _less_rejection(run: RunLog) -> tuple[Fix, ...]:
    """Wider bounds, only the largest ratio, or weights instead; omits what the run has already."""
    if run.facts.rollout_rs == "off":
        return ()
    largest = "2.5" if run.facts.naming != "verl" else "0.42"  # ½ ln² 2.5
    written = run.spec.algorithm.rollout_correction.rollout_rs_threshold if run.spec else None
    fixes = (
        fix.change(f"{_RS}=token_k1", f"{_RS_THRESHOLD}=0.5_2.0", why="wider bounds"),
        fix.change(
            f"{_RS}=seq_max_k2",
            f"{_RS_THRESHOLD}={largest}",
            why="only the largest ratio of a response",
            verl=f"{_RS}=seq_max_k2 {_RS_THRESHOLD}=0.42",
        ),
        fix.change(f"{_RS}=null", f"{_RS_THRESHOLD}=null", f"{RC}rollout_is=sequence", why="weights instead"),
    )
    has = (f"{_RS}={run.facts.rollout_rs}", f"{_RS_THRESHOLD}={written}")
    return tuple(one for one in fixes if one.spec[:2] != has)


@Rule("rejected", thresholds=th.MASKED, fixes=_less_rejection, needs=(_MASKED,))
def rejected(run: RunLog) -> Detection | None:
    """Rejection keeps most tokens."""
    return detect_crossing(run, th.MASKED, "rejection drops {worst:.0%} of the training data {where}")


@Rule(
    "silently-off",
    facts=("rollout_is", "rollout_rs"),
    fixes=(
        fix.by_hand(
            "check that the engine's log-probs reach the loss",
            verl="actor_rollout_ref.rollout.calculate_log_probs=True",
            trl="use_vllm=True vllm_importance_sampling_correction=True",
            **{"ms-swift": "--use_vllm true --rollout_importance_sampling_mode token_truncate"},
        ),
    ),
    uses=(_MEAN, _LEAST, _MOST, _MASKED, th.K3.key, th.LOG_PROB_GAP.key),
)
def silently_off(run: RunLog) -> Detection | Skipped | None:
    """The configured correction takes effect."""
    facts = run.facts
    logged = run.table.columns
    if facts.rollout_is == "off" and facts.rollout_rs == "off":
        return Skipped("neither weights nor rejection are configured")
    if len(run.table.steps) < th.MIN_STEPS:
        return Skipped("too few steps")
    each = (("rollout_is", facts.rollout_is, _MEAN), ("rollout_rs", facts.rollout_rs, _MASKED))
    for name, setting, key in each if facts.logs_correction else ():
        if setting != "off" and key not in logged:
            seen = evidence_over(run.table.steps, key, "never logged")
            return Detection("critical", f"{RC}{name} is set, but its metrics are not in the log", (seen,))
    gap = run.table.most_logged((th.K3.key, th.LOG_PROB_GAP.key))
    steps, (low, high, differ) = run.table.aligned(_LEAST, _MOST, gap)
    idle = (np.abs(low - 1.0) < th.EXACT) & (np.abs(high - 1.0) < th.EXACT)
    apart = differ > th.EXACT
    is_rejecting = (run.table.series(_MASKED).values > 0.0).any()
    if facts.rollout_is == "off" or apart.sum() < th.MIN_STEPS or not idle[apart].all() or is_rejecting:
        return None
    message = "every weight is exactly 1 and nothing is rejected, although the policies differ"
    seen = evidence_over(steps[apart], _LEAST, "exactly 1, as is the maximum")
    sure: Sure = ("high", "ratios of two different policies are not all 1")
    return Detection("critical", message, (seen,), sure=sure)


@Rule(
    "bypass-repeats",
    facts=("bypass_mode", "ppo_epochs"),
    fixes=(fix.change(f"{RC}bypass_mode=false"), fix.change("actor.ppo_epochs=1")),
)
def bypass_repeats(run: RunLog) -> Detection | None:
    """Bypass mode passes over a batch once."""
    epochs = run.facts.ppo_epochs or 1
    if not run.facts.bypass_mode or epochs == 1:
        return None
    seen = Evidence("actor.ppo_epochs", str(epochs))
    return Detection("warning", f"bypass mode with {epochs} passes over each batch", (seen,))
