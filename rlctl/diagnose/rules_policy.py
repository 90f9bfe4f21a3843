"""Rules about a policy that samples at random, a critic that predicts nothing, and a disk that is full."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.facts import is_rounded
from rlctl.diagnose.finding import Evidence, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, of_crossing
from rlctl.diagnose.rules_update import TINY_RATE
from rlctl.diagnose.signals import crossing, evidence_over, rises
from rlctl.diagnose.table import COUNTED, RunLog, Series
from rlctl.diagnose.thresholds import Levels

_VALIDATION = th.VALIDATION
#: Mean entropy of a token, in nats, that no policy which writes text has: its continuations are 20 at least.
RANDOM = Levels(th.ENTROPY.key, (("critical", 3.0),))
#: Position of the mean reward in its range from which the samples are evidently no garbage.
GOOD = 0.3

_EXPLAINED, _CRITIC_RATE = "critic/vf_explained_var", "critic/lr"
#: Largest explained variance of values that do not vary.
STATIC = 1e-6
_UNTRAINED = "the critic is not trained: advantages are those of rewards without a baseline"
#: Explained variance of values that are worse than a constant; few rows are judged by the second level.
WORSE = Levels(_EXPLAINED, (("warning", -0.1), ("critical", -0.5)), is_floor=True)


@Rule(
    "random-tokens",
    thresholds=RANDOM,
    needs=(RANDOM.key,),
    uses=(*th.REWARDS, _VALIDATION),
    fixes=(
        fix.by_hand(
            "read stored responses of the first and of the newest step: if those of the first are noise too, "
            "compare the engine's weights, chat template, temperature and stop tokens with the trainer's"
        ),
        fix.FIND_THE_CAUSE,
        partial(fix.slower, by=10.0),
    ),
)
def random_tokens(run: RunLog) -> Detection | None:
    """Sampled tokens are no noise."""
    crossed = crossing(run.table.series(RANDOM.key), RANDOM)
    score = run.table.series(th.SCORE)
    usual = float(np.median(score.values[-th.WINDOW :])) if len(score) else None
    position = run.reward_position(usual)
    if crossed is None or (position is not None and position >= GOOD):
        return None
    found = of_crossing(
        crossed, "the sampled policy is noise: its entropy is {worst:.3g} nats per token {where}"
    )
    evidence = [crossed.evidence]
    if usual is not None:
        evidence.append(evidence_over(score.steps[-th.WINDOW :], th.SCORE, f"{usual:.2g}"))
    validation = run.validation
    if len(validation):
        last = f"{validation.values[-1]:.2g}"
        evidence.append(evidence_over(validation.steps[-1:], run.table.matching(_VALIDATION)[0], last))
    doubt: Sure = ("low", "the rewards' range is not known, so the samples may be as wanted")
    return replace(found, evidence=tuple(evidence), sure=doubt if position is None else None)


@Rule(
    "critic",
    needs=(_EXPLAINED,),
    uses=(_CRITIC_RATE, *th.REWARDS),
    thresholds=(
        f"— / rate ≤ {TINY_RATE:g}, or within {STATIC:g} of 0, for {th.MOVE_STEPS} steps; "
        f"< {WORSE.tiers[0][1]:g} after {th.START_STEPS} steps, in fewer than {th.MIN_STEPS} rows "
        f"< {WORSE.tiers[1][1]:g}, and the reward does not gain / —"
    ),
    fixes=(
        fix.larger("critic.lr", "raise the critic's learning rate, or let it train alone first"),
        fix.by_hand(
            "check that values and returns are of the same tokens and on the same scale",
            verl="trainer.critic_warmup",
        ),
    ),
    not_applicable=lambda run: "no critic is trained" if run.facts.has_critic is False else "",
)
def critic(run: RunLog) -> Detection | Skipped | None:
    """The critic predicts returns better than a constant does."""
    untrained = _untrained_critic(run)
    if untrained is not None:
        return untrained
    series = run.table.series(_EXPLAINED)
    if COUNTED in run.notes:
        late = series
    else:  # an untrained critic explains nothing
        is_late = series.steps > th.START_STEPS
        late = Series(series.steps[is_late], series.values[is_late])
    if not len(late):
        return Skipped(f"the critic is judged after {th.START_STEPS} steps", needs_steps=th.START_STEPS)
    crossed = crossing(late, WORSE)
    if crossed is None or not crossed.lasts:
        return None
    if run.has_learned or run.has_gained or rises(run.table, th.SCORE):
        return None
    found = of_crossing(crossed, "the critic explains {worst:.2g} of the returns' variance {where}")
    return replace(found, severity="warning")


def _untrained_critic(run: RunLog) -> Detection | None:
    """A critic whose values stay what they were: of no learning rate, or the same for every token."""
    if is_rounded(run.table):
        return None
    rates = run.table.series(_CRITIC_RATE)
    if len(rates) >= th.MOVE_STEPS and (peak := float(rates.values.max())) <= TINY_RATE:
        seen = evidence_over(rates.steps, _CRITIC_RATE, f"at most {peak:.2g}")
        message = f"the critic's learning rate is {peak:.2g}: its values stay what they were"
        sure: Sure = ("high", "the log shows the rate")
        return Detection("warning", message, (seen,), _UNTRAINED, fix.usual_rate(run, "critic.lr"), sure)
    series = run.table.series(_EXPLAINED)
    score = run.table.series(th.SCORE).values
    most = float(np.abs(series.values).max())
    # Where all rewards are equal there is no variance to explain.
    if len(series) < th.MOVE_STEPS or most > STATIC or not len(score) or not np.ptp(score):
        return None
    seen = evidence_over(series.steps, _EXPLAINED, f"within {most:.2g} of 0 on every step")
    checks = (fix.by_hand("check that the critic's optimizer has its parameters, and is stepped"),)
    message = "the critic's values are the same for every token, from the first step to the last"
    return Detection("warning", message, (seen,), _UNTRAINED, checks)


@Rule(
    "disk-full",
    thresholds="— / the log says so / —",
    fixes=(fix.by_hand("free space on the disk of checkpoints, dumps and temporary files, or move them"),),
)
def disk_full(run: RunLog) -> Detection | Skipped:
    """The log does not warn of a full disk."""
    if not run.warnings:
        return Skipped("the log does not warn of a full disk")
    first = run.warnings[0]
    seen = Evidence("line of the log", f"{first.line}: {len(run.warnings):,} such line(s)")
    since = int(run.table.steps[-1]) if len(run.table.steps) else None  # it explains no figure before
    return Detection("warning", f"the log warns of a full disk: {first.text}", (seen,), since=since)
