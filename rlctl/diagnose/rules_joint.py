"""Rules about several metrics that move together, far from the run's own start."""

from __future__ import annotations

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Skipped, rule
from rlctl.diagnose.remedies import RC
from rlctl.diagnose.rules_gap import GAPS, most_logged
from rlctl.diagnose.rules_reward import BEST, SCORE, WORST, has_gained
from rlctl.diagnose.rules_weights import CHI2, raw_ess
from rlctl.diagnose.signals import change_evidence, longest_true, moved, spikes, start_of, together
from rlctl.diagnose.table import RunLog, Series

_MASKED, _NORM = th.MASKED.key, th.GRAD_NORM.key
#: What a gap must exceed to count as widening.
_MATERIAL = {th.K3.key: th.K3, th.PROBS_GAP.key: th.PROBS_GAP}


@rule(
    "variance-collapse",
    "effective samples do not vanish while gradients grow",
    needs=(_NORM,),
    one_of=(th.RAW_ESS.key, *CHI2.values()),
    min_steps=th.MOVE_STEPS,
)
def variance_collapse(run: RunLog) -> Finding | Skipped | None:
    """Effective samples fall far below their start, and the gradient norm grows or spikes meanwhile."""
    found = raw_ess(run)
    if found is None:
        return Skipped("not logged for this level of weights", (th.RAW_ESS.key,))
    key, ess = found
    fall = moved(ess, th.Move(key, *th.ESS_FALL))
    if fall is None:
        return Skipped("too few steps to tell a start from a fall", (key,))
    start, has_fallen, medians = fall
    first, length = longest_true(has_fallen)
    if length < th.WINDOW:
        return None
    steps, least = ess.steps[first : first + length], float(medians[first : first + length].min())
    norm = _norm_meanwhile(run.table.series(_NORM), int(steps[0]), int(steps[-1]))
    if norm is None:
        return None
    seen = change_evidence(key, start.median, least, steps)
    if key != th.RAW_ESS.key:
        seen = change_evidence(key, 1.0 / start.median - 1.0, 1.0 / least - 1.0, steps)
    return Finding(
        "critical",
        f"effective samples vanish while gradients grow in steps {steps[0]}–{steps[-1]}",
        (seen, norm),
        "the variance of the weighted gradient explodes: a collapse under way",
        th.OWN,
        (
            remedy.before(int(steps[0])),
            *remedy.gentler(run),
            *remedy.guarded(run),
            *remedy.reject_outliers(run),
        ),
        "high",
        "two figures that are computed apart tell the same",
    )


def _norm_meanwhile(norm: Series, first: int, last: int) -> Evidence | None:
    """The gradient norm within these steps, if it grew or spiked there."""
    inside = (norm.steps >= first) & (norm.steps <= last)
    growth, jumps = moved(norm, th.Move(_NORM, th.COLLAPSE_NORM)), spikes(norm).steps
    has_grown = growth is not None and int((growth[1] & inside).sum()) >= th.WINDOW
    has_jumped = int(((jumps >= first) & (jumps <= last)).sum()) >= th.COLLAPSE_SPIKES
    if not has_grown and not has_jumped:
        return None
    usual = float(np.median(norm.values))
    return Evidence(_NORM, f"up to {norm.values[inside].max():.3g}, {usual:.3g} in the median", first, last)


@rule(
    "blind-rejection",
    "rejection keeps up with the gap",
    needs=(_MASKED,),
    one_of=GAPS,
    min_steps=th.MOVE_STEPS,
)
def blind_rejection(run: RunLog) -> Finding | Skipped | None:
    """Less is rejected while the policies drift apart."""
    start = start_of(run.table.series(_MASKED))
    if start is None or start.median < th.BLIND_START:
        return None
    gap = most_logged(run, GAPS)
    beyond = _MATERIAL[gap].tiers[0][1] if gap in _MATERIAL else th.FIRST_LOG_PROB_GAP
    seen = together(run.table, (th.Move(_MASKED, th.BLIND_FALL), th.Move(gap, th.BLIND_GROWTH, beyond)))
    if seen is None:
        return None
    verls = run.facts.dialect == "verl"
    name, bounds = ("seq_mean_k3", "0.01") if verls else ("geometric", "0.99_1.01")
    settings = (f"{RC}rollout_rs={name}", f"{RC}rollout_rs_threshold={bounds}")
    verl = f"{RC}rollout_rs=seq_mean_k3 {RC}rollout_rs_threshold=0.01"
    return Finding(
        "warning",
        "less and less is rejected although the policies drift apart",
        seen,
        "a fixed band of single ratios does not see many small differences that add up",
        th.OWN,
        (remedy.change(*settings, why="bound the mean over a response, a KL", verl=verl),),
        "medium",
        "the two figures move against each other; why, they do not say",
    )


@rule(
    "gibberish",
    "entropy, length and gradients do not rise together",
    needs=tuple(move.key for move in th.GIBBERISH),
    uses=(SCORE, BEST, WORST),
    min_steps=th.MOVE_STEPS,
)
def gibberish(run: RunLog) -> Finding | Skipped | None:
    """Entropy, length and gradient norm rise together, and the reward does not."""
    seen = together(run.table, th.GIBBERISH)
    if seen is None:
        return None
    if has_gained(run.table, since=int(run.table.steps[0])):
        return None  # it learns
    first = seen[0].first_step or 0
    return Finding(
        "critical",
        f"entropy, length and gradient norm rise together in steps {first}–{seen[0].last_step}",
        seen,
        "the policy drifts into text that means nothing, often from a gap between the engines",
        th.FIELD,
        (remedy.before(first), *remedy.gentler(run), *remedy.correct_tokens(run)),
        "high",
        "three figures that are computed apart tell the same, and the reward does not rise",
    )


RULES = (
    variance_collapse,
    blind_rejection,
    gibberish,
)
