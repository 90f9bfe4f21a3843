"""`rlctl diagnose RUN --who-sampled`: which of the kept weights sampled the dumped rollouts.

The responses of each step are scored under every kept version. The version that sampled them has the
log-probs that the engine recorded, up to precision: a gap at the floor, the smallest one found anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.errors import UsageError
from rlctl.mismatch.dumped import BASE, DumpedStep, Kept, WeightsScorer, dumped_steps, kept_weights
from rlctl.mismatch.ratio_split import RatioSplit, split_of_run
from rlctl.track.open_run import RunRecord
from rlctl.track.trust import require_permission_of_run

#: A version fits if its gap is at most this many floors, or this many nats per token.
_FITS, _ROUNDING = 4.0, 1e-5
#: A cause is named if this share of the steps that can tell agrees with it, and this share of them
#: contradicts the record. Without a cause, more than the last share must contradict it.
_NAMED, _REFUTED, _UNKNOWN = 0.9, 0.25, 0.5
#: Between two kept versions, a version this close to one of them, as a share of their distance, must have
#: less than so many times the gap to the other one.
_CLOSE, _MATERIAL = 0.25, 1.5


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Which of the kept weights sampled the tokens of one step that were recorded with one version."""

    step: int
    recorded: int
    num_sequences: int
    likeliest: str
    version: int | None
    #: likelihood of the likeliest version over that of the next one, if log-ratios are Laplace-distributed
    #: with unknown scale and each sequence counts as one observation
    odds: float
    gap: float  # mean |log π − log π_rollout| under it, nats per token


@dataclass(frozen=True, slots=True)
class WhoSampled:
    """Result for a run."""

    conclusion: str
    fault: str | None  # `never delivered`, `late`, `base` or `unknown`; None: as recorded, or undecided
    fix: str | None
    steps: tuple[StepSampler, ...]
    split: RatioSplit | None  # None: no step was sampled and trained on by kept weights
    notes: tuple[str, ...]

    def as_document(self) -> dict[str, Any]:
        """The result as values for JSON."""
        return asdict(self)


def who_sampled(path: Path, *, trust: bool = False) -> WhoSampled:
    """Scores the dumped rollouts of a run under its kept weights.

    Args:
        trust: run code that comes with the model, also if no run of this user has used it.

    Raises:
        UsageError: it is not a run directory with rollouts, it kept fewer than two versions, or it would run
            code that this user has not allowed.
    """
    record = RunRecord(path)
    require_permission_of_run(path, sections={"model"}, trust=trust)
    spec = record.spec
    steps = list(dumped_steps(record))
    weights, notes = kept_weights(record)
    if len(weights) < 2:
        raise UsageError(
            f"the run kept {len(weights)} versions of its weights, and telling them apart needs two",
            where=str(path),
            fix="keep checkpoints with trainer.save_freq and trainer.max_ckpt_to_keep",
        )
    scores = []
    for weight in weights:
        scorer = WeightsScorer(spec, weight.path)
        scores.append([scorer.score(dumped) for dumped in steps])
        del scorer
    groups = [
        SampledTokens.of(dumped, torch.stack([of_weights[index].of_engine for of_weights in scores]), version)
        for index, dumped in enumerate(steps)
        for version in sorted(set(dumped.versions.tolist()))
    ]
    split = split_of_run(spec, steps, weights, scores)
    return replace(judged(groups, weights), split=split, notes=tuple(notes))


@dataclass(frozen=True)
class SampledTokens:
    """Gaps of the tokens of one step that were recorded with one version, to the C kept weights."""

    step: int
    recorded: int
    num_sequences: int
    gaps: NDArray[np.float64]  # (C,) mean |log π − log π_rollout|, nats

    @classmethod
    def of(cls, dumped: DumpedStep, scores: Tensor, version: int) -> SampledTokens:
        """The tokens of this version; `scores` (C, M) are their log-probs under each of the weights."""
        inside = (dumped.versions == version) & dumped.rollout.isfinite()
        found = scores[:, inside].double()
        engine = dumped.rollout[inside].double()
        count = len(set(dumped.unit.index[inside].tolist()))
        gaps = (found - engine).abs().mean(1)
        return cls(dumped.step, version, count, gaps.numpy())


def judged(groups: Sequence[SampledTokens], weights: Sequence[Kept]) -> WhoSampled:
    """Names the likeliest sampler of each group, and what the record of versions gets wrong, if anything."""
    steps = tuple(_step(group, weights) for group in groups)
    floor = max(_FITS * min(group.gaps.min() for group in groups), _ROUNDING)
    telling = [group for group in groups if group.gaps.max() > 2 * floor]
    places = {one.version: index for index, one in enumerate(weights) if one.version is not None}
    base = next((index for index, one in enumerate(weights) if one.version is None), None)

    def fits(group: SampledTokens, version: int | None) -> bool | None:
        """Whether the group has the log-probs of this version (None: of the base); None: it cannot tell."""
        place = base if version is None else places.get(version)
        if version is None or place is not None:
            return place is not None and bool(group.gaps[place] <= floor)
        below = [v for v in places if v < version]
        above = [v for v in places if v > version]
        if not below or not above:
            return None
        low = max(below)
        high = min(above)
        share = (version - low) / (high - low)
        if _CLOSE < share < 1 - _CLOSE:
            return None
        near, far = (low, high) if share <= _CLOSE else (high, low)
        return bool(group.gaps[places[near]] <= max(floor, _MATERIAL * group.gaps[places[far]]))

    recorded = [fits(group, group.recorded) for group in telling]
    decided = [found for found in recorded if found is not None]
    lags = {group.recorded - version for group in telling for version in places if version < group.recorded}
    tried: dict[tuple[str, int], list[int | None]] = {}  # fault and its number → version by group
    if base is not None:
        tried["base", 0] = [None] * len(telling)
    tried |= {("constant", version): [version] * len(telling) for version in sorted(places)}
    tried |= {("late", lag): [max(group.recorded - lag, 0) for group in telling] for lag in sorted(lags)}
    best: tuple[str, int] | None = None
    most = 0
    for cause, versions in tried.items():
        fitting = [fits(group, version) for group, version in zip(telling, versions, strict=True)]
        new = sum(a is True and b is not True for a, b in zip(fitting, recorded, strict=True))
        refuted = sum(b is False and a is not False for a, b in zip(fitting, recorded, strict=True))
        is_sure = fitting.count(True) >= _NAMED * (fitting.count(True) + fitting.count(False))
        if is_sure and refuted >= _REFUTED * len(decided) > 0 and new > most:
            best = cause
            most = new
    fault = None
    message = "the kept weights are too similar, or too few, to tell which of them sampled"
    fix = None
    if best is not None:
        fault, message, fix = _named(
            *best, f"{most} of {len(telling)} steps", weights[places.get(best[1], 0)].name
        )
    elif any(group.recorded for group in telling) and decided:
        message = f"as recorded: {decided.count(True)} of {len(decided)} steps that can tell agree"
        kept = [agrees for group, agrees in zip(telling, recorded, strict=True) if group.recorded in places]
        if kept.count(False) > _UNKNOWN * len(kept):
            message = f"{kept.count(False)} of {len(kept)} steps were sampled by none of the kept weights"
            fault = "unknown"
            fix = "`rlctl diagnose mismatch` compares the engine with the trainer"
    return WhoSampled(
        conclusion=message,
        fault=fault,
        fix=fix,
        steps=steps,
        split=None,
        notes=(),
    )


def _named(kind: str, number: int, count: str, name: str) -> tuple[str, str, str]:
    """Fault, conclusion and fix of what explains the gaps; `name`: of the weights of a constant version."""
    fix = "`rlctl train --prove-sync` with the run's spec shows what a sync does not reach"
    if kind == "base" or (kind == "constant" and BASE in name):
        message = f"{count} were sampled by {BASE}, without the adapter"
        return "base", message, f"set rollout.merge_lora=true; {fix}"
    if kind == "constant":
        return "never delivered", f"new weights were never delivered: {count} were sampled by {name}", fix
    message = (
        f"{count} were sampled {number} updates later than recorded: with weights {number} updates older"
    )
    return "late", message, f"wait for the end of each sync before sampling; {fix}"


def _step(group: SampledTokens, weights: Sequence[Kept]) -> StepSampler:
    order = np.argsort(group.gaps, kind="stable")
    gaps = np.maximum(group.gaps[order], _ROUNDING / 10)
    odds = math.exp(min(group.num_sequences * math.log(gaps[1] / gaps[0]), 700.0))
    best = weights[order[0]]
    gap = float(group.gaps[order[0]])
    return StepSampler(
        step=group.step,
        recorded=group.recorded,
        num_sequences=group.num_sequences,
        likeliest=best.name,
        version=best.version,
        odds=odds,
        gap=gap,
    )
