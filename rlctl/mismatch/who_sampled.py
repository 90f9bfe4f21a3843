"""`rlctl diagnose RUN --who-sampled`: which of the kept weights sampled the dumped rollouts.

The responses of each step are scored under every kept version. The version that sampled them has the
log-probs that the engine recorded, up to precision: a gap at the floor, the smallest one found anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.errors import UsageError
from rlctl.mismatch.dumped import DumpedStep, Kept, Scorer, dumped_steps, kept_weights
from rlctl.mismatch.ratio_split import RatioSplit, split_of_run
from rlctl.track.open_run import RunRecord

#: A version fits if its gap is at most this many floors, or this many nats per token.
_FITS, _ROUNDING = 4.0, 1e-5
#: A record is refuted if this share of the steps that can tell contradict it; a cause is named if this share
#: of them agrees with it.
_REFUTED, _NAMED = 0.5, 0.9
#: Between two kept versions, the nearer one must fit if the recorded one is this close, as a share of the
#: distance between both.
_CLOSE = 0.1


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


def who_sampled(path: Path) -> WhoSampled:
    """Scores the dumped rollouts of a run under its kept weights.

    Raises:
        UsageError: it is not a run directory with rollouts, or it kept fewer than two versions.
    """
    record = RunRecord(path)
    spec, steps = record.spec, list(dumped_steps(record))
    weights, notes = kept_weights(record)
    if len(weights) < 2:
        raise UsageError(
            f"the run kept {len(weights)} versions of its weights, and telling them apart needs two",
            where=str(path),
            fix="keep checkpoints with trainer.save_freq and trainer.max_ckpt_to_keep",
        )
    scores = []
    for one in weights:
        scorer = Scorer(spec, one.path)
        scores.append([scorer.log_probs(dumped) for dumped in steps])
        del scorer
    groups = [
        Group.of(dumped, torch.stack([of_weights[place] for of_weights in scores]), version)
        for place, dumped in enumerate(steps)
        for version in dumped.versions.unique().tolist()
    ]
    split = split_of_run(spec, steps, weights, scores)
    return replace(judged(groups, weights), split=split, notes=tuple(notes))


@dataclass(frozen=True)
class Group:
    """Gaps of the tokens of one step that were recorded with one version, to the C kept weights."""

    step: int
    recorded: int
    num_sequences: int
    gaps: NDArray[np.float64]  # (C,) mean |log π − log π_rollout|, nats
    between: NDArray[np.float64]  # (C, C) mean |difference| of the log-probs of two weights

    @classmethod
    def of(cls, dumped: DumpedStep, scores: Tensor, version: int) -> Group:
        """The tokens of this version; `scores` (C, M) are their log-probs under each of the weights."""
        inside = (dumped.versions == version) & dumped.rollout.isfinite()
        found, engine = scores[:, inside].double(), dumped.rollout[inside].double()
        between = torch.stack([(found - one).abs().mean(1) for one in found])
        count = len(dumped.unit.index[inside].unique())
        gaps = (found - engine).abs().mean(1)
        return cls(dumped.step, version, count, gaps.numpy(), between.numpy())


def judged(groups: Sequence[Group], weights: Sequence[Kept]) -> WhoSampled:
    """Names the likeliest sampler of each group, and what the record of versions gets wrong, if anything."""
    steps = tuple(_step(group, weights) for group in groups)
    floor = max(_FITS * min(group.gaps.min() for group in groups), _ROUNDING)
    telling = [group for group in groups if group.gaps.max() > 2 * floor]
    places = {one.version: place for place, one in enumerate(weights) if one.version is not None}
    base = next((place for place, one in enumerate(weights) if one.version is None), None)

    def fits(group: Group, version: int | None) -> bool | None:
        """Whether the group has the log-probs of this version (None: of the base); None: it cannot tell."""
        place = base if version is None else places.get(version)
        if place is not None:
            return bool(group.gaps[place] <= floor)
        below = [v for v in places if v < version]
        above = [v for v in places if v > version]
        if not below or not above:
            return None
        low, high = max(below), min(above)
        share = (version - low) / (high - low)
        apart = group.between[places[low], places[high]]
        if _CLOSE < share < 1 - _CLOSE or apart <= 2 * floor:
            return None
        return bool(group.gaps[places[low if share <= _CLOSE else high]] <= max(floor, apart / 2))

    def verdicts(version: Callable[[Group], int | None]) -> list[bool | None]:
        return [fits(group, version(group)) for group in telling]

    def result(what: str, fault: str | None = None, fix: str | None = None) -> WhoSampled:
        return WhoSampled(what, fault, fix, steps, None, ())

    recorded = verdicts(lambda group: group.recorded)
    decided = [found for found in recorded if found is not None]
    if not any(group.recorded for group in groups) or not decided:
        return result("the kept weights are too similar, or too few, to tell which of them sampled")
    if decided.count(False) < _REFUTED * len(decided):
        return result(f"as recorded: {decided.count(True)} of {len(decided)} steps that can tell agree")
    lags = {group.recorded - version for group in telling for version in places if version < group.recorded}
    tried: list[tuple[str, int, Callable[[Group], int | None]]] = []
    if base is not None:
        tried.append(("base", 0, lambda group: None))
    tried += [("constant", version, lambda group, v=version: v) for version in sorted(places)]
    tried += [("late", lag, lambda group, k=lag: max(group.recorded - k, 0)) for lag in sorted(lags)]
    best, most = None, 0
    for kind, number, version in tried:
        found = verdicts(version)
        agree, differ = found.count(True), found.count(False)
        new = sum(a is True and b is not True for a, b in zip(found, recorded, strict=True))
        if new > most and agree >= _NAMED * (agree + differ):
            best, most = (kind, number), new
    count = f"{most} of {len(telling)} steps"
    if best is None:
        differ = f"{decided.count(False)} of {len(decided)} steps"
        what = f"{differ} were sampled neither as recorded nor by other kept weights"
        return result(what, "unknown", "`rlctl diagnose mismatch` compares the engine with the trainer")
    kind, number = best
    name = weights[places[number] if kind == "constant" else 0].name
    sync = "`rlctl train --prove-sync` with the run's spec shows what a sync does not reach"
    if kind == "base" or (kind == "constant" and "base" in name):
        what = f"{count} were sampled by the base model, without the adapter"
        return result(what, "base", f"set rollout.merge_lora=true; {sync}")
    if kind == "constant":
        return result(
            f"new weights were never delivered: {count} were sampled by {name}", "never delivered", sync
        )
    what = f"{count} were sampled {number} updates later than recorded: with weights {number} updates older"
    return result(what, "late", f"wait for the end of each sync before sampling; {sync}")


def _step(group: Group, weights: Sequence[Kept]) -> StepSampler:
    order = np.argsort(group.gaps, kind="stable")
    gaps = np.maximum(group.gaps[order], _ROUNDING / 10)
    odds = math.exp(min(group.num_sequences * math.log(gaps[1] / gaps[0]), 700.0))
    best = weights[order[0]]
    gap = float(group.gaps[order[0]])
    return StepSampler(group.step, group.recorded, group.num_sequences, best.name, best.version, odds, gap)
