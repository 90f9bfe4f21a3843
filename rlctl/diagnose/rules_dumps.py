"""Rules about what a run's dumped rollouts and kept weights show: who sampled, and from which tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose.finding import Evidence, Severity, Skipped
from rlctl.diagnose.rule import Detection, Rule
from rlctl.diagnose.signals import evidence_over
from rlctl.diagnose.table import RunLog

_Z, _MEAN = "rollout_corr/unit_mean_z", "rollout_corr/unit_mean"
#: z, and the share of the trained policy's probability that is never sampled, which show a cut vocabulary.
CUT_Z, CUT_MASS = -8.0, 0.01
_DUMP = "dumped rollouts"
_CAUSES = {
    "never delivered": "a weight sync is confirmed, but the engine goes on with its old weights",
    "late": "the engine samples while, or before, it receives the weights that it names",
    "base": "the engine samples without the adapter",
    "unknown": "the engine has weights that the run never had, or computes otherwise",
}


@Rule("who-sampled", thresholds="— / none of the kept weights / others than recorded")
def sampled_by_others(run: RunLog) -> Detection | Skipped | None:
    """The weights that a rollout names are those that sampled it."""
    if run.dumps is None or not run.dumps.who_sampled:
        return Skipped("no dumped rollouts were compared with two kept versions of the weights")
    fault = run.dumps.wrong_sampler
    if not fault:
        return None
    severity: Severity = "warning" if fault == "unknown" else "critical"
    seen = Evidence(_DUMP, f"{run.dumps.who_sampled} (`rlctl diagnose RUN --who-sampled`)")
    check = (fix.by_hand(run.dumps.fix), fix.PROVE_THE_SYNC)
    return Detection(
        severity, run.dumps.who_sampled, (seen,), _CAUSES.get(fault), check, is_first=severity == "critical"
    )


def _not_cut(run: RunLog) -> str:
    if run.spec is None:
        return "" if _Z in run.table.columns else "only rlctl logs it"
    rollout = run.spec.rollout
    is_truncated = rollout.top_p < 1.0 or rollout.top_k > 0 or rollout.min_p > 0.0
    return "sampling is truncated, as the spec says" if is_truncated else ""


@Rule(
    "vocabulary-cut", one_of=(_Z, _MEAN),
    thresholds=f"— / z < {CUT_Z:g}, over {CUT_MASS:.0%} of the probability / —",
    fixes=(
        fix.by_hand(
            "let the engine sample from the whole vocabulary (top_p 1, no top_k, no min_p, no generation "
            "config), or tell the trainer: `rollout.top_p`, `rollout.exact_sampling=true`"
        ),
        fix.by_hand("check that log-probs are not clamped from below"),
        fix.FIND_THE_CAUSE,
    ),
    not_applicable=_not_cut,
)  # fmt: skip
def vocabulary_cut(run: RunLog) -> Detection | None:
    """Tokens are drawn from the whole vocabulary.

    Over tokens drawn as reported, ρ = π_train/π_reported averages the trained policy's mass on the tokens
    that can be drawn. z of several batches of equal size is the sum of theirs over the square root of their
    number.
    """
    steps, (z, mean) = run.table.aligned(_Z, _MEAN)
    if not len(steps):
        return None
    total, outside = float(z.sum() / math.sqrt(len(z))), 1.0 - float(np.median(mean))
    if total > CUT_Z or outside < CUT_MASS:
        return None
    message = f"tokens are drawn without about {outside:.1%} of the trained policy's probability"
    seen = evidence_over(steps, _Z, f"{total:.3g} over all steps")
    found = Detection("warning", message, (seen,))
    if run.dumps is not None and run.dumps.sampler and run.dumps.z < CUT_Z:
        return replace(found, evidence=(seen, Evidence(_DUMP, f"z {run.dumps.z:.3g}: {run.dumps.sampler}")))
    return found
