"""From what was found out to causes in order, and what could not be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.mismatch.cause import DESCRIBED, DTYPE_NAMES, SYNC_FIX, Cause
from rlctl.mismatch.cause_sampling import drawn_otherwise, sampling_causes
from rlctl.mismatch.examine import Examination
from rlctl.mismatch.scoring_variant import OWN, SamplingSettings
from rlctl.mismatch.search import ARITHMETIC, Taken


def causes(found: Examination) -> list[Cause]:
    """Every cause found: each explains most of what those before it leave; last what shows in no gap."""
    everything = [
        *_weights_were_others(found),
        *(cause for taken in found.explanation.taken for cause in _cause(found, taken)),
        *drawn_otherwise(found),
        *_sync_misses(found),
        *_other_precision(found),
    ]
    scale = found.start.abs_mean or 1.0
    shared = [
        replace(cause, share=max(cause.before.abs_mean - cause.after.abs_mean, 0.0) / scale)
        if cause.before and cause.after
        else cause
        for cause in everything
    ]
    return sorted(shared, key=lambda cause: cause.before is None)


def _cause(found: Examination, taken: Taken) -> Iterator[Cause]:
    if taken.factor == "sampling":
        yield from sampling_causes(found, taken)
        return
    cause = DESCRIBED[taken.factor](found, str(getattr(taken.after, taken.factor)))
    yield replace(cause, before=found.scorer.gap(taken.before), after=found.scorer.gap(taken.after))


def _weights_were_others(found: Examination) -> Iterator[Cause]:
    if found.synced is not None and found.synced.closes:
        yield Cause(
            "stale weights",
            "the engine's weights are not the trainer's: handing them over closes the gap",
            SYNC_FIX,
            (),
            found.start,
            found.scorer.gap(found.explanation.start),
        )


def _sync_misses(found: Examination) -> Iterator[Cause]:
    if found.moved is None or not found.moved.opens:
        return
    left = f": the engine then has the weights of {found.stale}" if found.stale else ""
    yield Cause(
        "weight sync",
        f"a sync of changed weights leaves a mean |log-ratio| of {found.moved.after.abs_mean:.2g}{left}",
        "where embeddings and output head are tied, some engines keep a packed copy of the head: untie them, "
        "or have the engine load the weights anew",
    )


def _other_precision(found: Examination) -> Iterator[Cause]:
    if found.same_precision is None or not found.same_precision.closes:
        return
    own = DTYPE_NAMES[str(found.scorer.model.dtype)]
    yield Cause(
        "dtype",
        f"the engine's precision: in {own}, as the trainer, the same engine leaves a smaller gap",
        "use one precision on both sides",
        (f"rollout.dtype={own}",),
        found.same_precision.before,
        found.same_precision.after,
    )


def not_told(found: Examination) -> list[str]:
    """What these comparisons cannot say, and what would let them."""
    sides = found.sides
    tried = found.explanation.tried
    notes = [f"{change.factor} {change.value}: {change.why_not}" for change in tried if change.why_not]
    if sides.asked == SamplingSettings(1.0):
        notes.append(
            "whether log-probs are raw or processed: at temperature 1 without truncation they are the same; "
            "add --temperature 0.7"
        )
    if len({len(ids) for ids in found.scorer.prompts[OWN]}) == 1:
        notes.append("whether padding is treated alike: all prompts are of one length")
    if not sides.takes_weights:
        notes.append("whether a weight sync reaches every weight: this engine takes none here")
        if not sides.weights:
            notes.append("whether the engine holds older weights: name a run that has older checkpoints")
    if found.drawn is None:
        notes.append("what the tokens were drawn from: the two distributions are too far apart")
    if found.start.num_nonfinite:
        notes.append(f"{found.start.num_nonfinite} sequences with a NaN or infinite log-prob are left out")
    return notes


def remainder(found: Examination) -> str | None:
    """What may hide in the part of the gap that no cause explains; None: there is no such part."""
    left = found.left
    if found.same_precision is not None and found.same_precision.closes:
        left = found.same_precision.after
    if left.agrees or left.abs_mean <= 0.1 * found.start.abs_mean:
        return None
    efforts = (change.effect for change in found.explanation.tried if change.factor in ARITHMETIC)
    rounding = max(efforts, default=0.0)
    size = f"a mean |log-ratio| of {left.abs_mean:.2g} is not explained"
    if left.abs_mean <= 2.0 * rounding:
        return f"{size}, of the size that rounding has ({rounding:.2g}): the two kernels round differently"
    return f"{size}, more than rounding makes ({rounding:.2g}): other weights, or other code of the model"
