"""Splits log π_train − log π_rollout of a dump into what the kept weights can tell apart.

Per token, and exactly: log π_train − log π_rollout = staleness + cache + kept set + engine, where

    staleness   log π_train − log π_v          v: the weights that sampled the token, in the trainer's code
    cache       log π_v − log π_v'             π_v': earlier tokens' keys and values are of older weights
    kept set    log of the mass that top-p, top-k and min-p keep, over which the engine normalises
    engine      the rest: kernels, precision
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.mismatch.dumped import DumpedStep, Kept, Scores, WeightsScorer
from rlctl.run_spec.run_spec import RunSpec

#: Part → what makes it smaller.
FIXES = {
    "engine": "use one precision (rollout.dtype, engine.dtype); `rlctl diagnose mismatch` names the cause",
    "staleness": "train on fresher samples: lower rollout.max_staleness or rollout.staleness, or actor.lr",
    "cache": "let new weights read open responses again: rollout.stale_cache=recompute",
    "kept set": "rollout.exact_sampling=true, or sample without truncation: rollout.top_p=1 rollout.top_k=-1",
}
#: Width of a 95 % interval in standard errors.
_INTERVAL = 1.96


@dataclass(frozen=True, slots=True)
class RatioPart:
    """One part of the log-ratio, over all tokens of the split."""

    name: str  # a key of `FIXES`
    mean: float  # nats per token, with its sign
    size: float  # mean absolute value
    share: float  # Σ part · log-ratio / Σ log-ratio²: the shares add up to 1
    low: float  # 95 % interval of the share, over sequences
    high: float


@dataclass(frozen=True, slots=True)
class RatioSplit:
    """The split, largest share first."""

    num_tokens: int
    num_sequences: int
    size: float  # mean |log π_train − log π_rollout|
    parts: tuple[RatioPart, ...]

    @property
    def fix(self) -> str:
        """What makes the largest part smaller."""
        return FIXES[self.parts[0].name]


def split(columns: Mapping[str, Tensor], log_ratio: Tensor, sequence: Tensor) -> RatioSplit | None:
    """Sizes and shares of the parts (M,) of the log-ratio (M,); None without a token or a difference.

    `sequence` (M,) is the number of each token's sequence: tokens of one are not independent.
    """
    inside = log_ratio.isfinite()
    ratio = log_ratio[inside].double()
    sequence = torch.from_numpy(np.unique(sequence[inside].numpy(), return_inverse=True)[1])
    total = float(ratio.square().sum())
    if not total:
        return None
    count = int(sequence.max()) + 1

    def by_sequence(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64).index_add_(0, sequence, values)

    parts = []
    squares = by_sequence(ratio.square())
    for name, column in columns.items():
        values = column[inside].double()
        share = float((values * ratio).sum()) / total
        left = by_sequence(values * ratio) - share * squares  # linearised ratio of sums
        error = math.sqrt(float(left.square().sum()) * count / max(count - 1, 1)) / total
        bounds = share - _INTERVAL * error, share + _INTERVAL * error
        parts.append(RatioPart(name, float(values.mean()), float(values.abs().mean()), share, *bounds))
    parts.sort(key=lambda part: -part.share)
    return RatioSplit(len(ratio), count, float(ratio.abs().mean()), tuple(parts))


def split_of_run(
    spec: RunSpec, steps: Sequence[DumpedStep], weights: Sequence[Kept], scores: Sequence[Sequence[Scores]]
) -> RatioSplit | None:
    """The split over tokens that kept weights sampled; `scores` are by weights and step."""
    places = {one.version: index for index, one in enumerate(weights) if one.version is not None}
    splits: list[dict[str, Tensor]] = []
    for number, dumped in enumerate(steps):
        own, mass, cache = (torch.full_like(dumped.rollout, value) for value in (math.nan, 0.0, 0.0))
        for version in set(dumped.versions.tolist()) & places.keys():
            inside = dumped.versions == version
            of_version = scores[places[version]][number]
            own[inside] = of_version.log_probs[inside]
            mass[inside] = of_version.log_mass[inside]
        splits.append({"own": own, "mass": mass, "cache": cache})
    mixed = [number for number, dumped in enumerate(steps) if len(set(dumped.versions.tolist())) > 1]
    scorers = {}
    for version in {version for n in mixed for version in steps[n].versions.tolist()} & places.keys():
        scorers[version] = WeightsScorer(spec, weights[places[version]].path)
    for number in mixed:
        stale = stale_cache_log_probs(steps[number], scorers)
        fresh = splits[number]["own"]
        engine = steps[number].rollout + splits[number]["mass"]
        if (stale - engine).abs().nansum() < (fresh - engine).abs().nansum():  # else it was recomputed
            splits[number]["cache"] = fresh - stale
    joined = {name: torch.cat([one[name] for one in splits]) for name in ("own", "mass", "cache")}
    trained, rollout = (torch.cat([getattr(step, name) for step in steps]) for name in ("trained", "rollout"))
    sequence = torch.cat([dumped.unit.index + n * 10_000 for n, dumped in enumerate(steps)])
    columns = {"staleness": trained - joined["own"], "cache": joined["cache"], "kept set": joined["mass"]}
    log_ratio = trained - rollout
    columns["engine"] = log_ratio - sum(columns.values(), torch.zeros(()))
    known = torch.where(columns["engine"].isfinite(), log_ratio, math.nan)
    present = {name: x for name, x in columns.items() if name in {"engine", "staleness"} or x.any()}
    return split(present, known, sequence)


@torch.no_grad()
def stale_cache_log_probs(dumped: DumpedStep, scorers: Mapping[int, WeightsScorer]) -> Tensor:
    """(M,) log-probs of the trainer's code if keys and values stay those of the weights that computed them.

    A token's keys and values are computed with the weights that sample the next sampled token. NaN where one
    of these weights was not kept.
    """
    inputs = dumped.inputs
    lengths = dumped.inputs.lengths.tolist()
    tokens, scored = (torch.split(x, lengths) for x in (inputs.token_ids, inputs.scored))
    versions = torch.split(dumped.versions, dumped.unit.lengths.tolist())
    rows = zip(tokens, scored, versions, strict=True)
    return torch.cat([_of_sequence(*row, scorers) for row in rows])


def _of_sequence(
    ids: Tensor, scored: Tensor, versions: Tensor, scorers: Mapping[int, WeightsScorer]
) -> Tensor:
    if not set(versions.tolist()) <= scorers.keys():
        return torch.full((len(versions),), math.nan)
    following = scored.long().cumsum(0)[:-1]  # number of the next sampled token
    of_position = versions[following.clamp(max=len(versions) - 1)]
    cache: Any = None
    rows = []
    start = 0
    for version, same in groupby(of_position.tolist()):
        length = len(list(same))
        scorer = scorers[version]
        part = ids[start : start + length].to(scorer.model.device)[None]
        output = scorer.model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        start += length
        rows.append(scorer.scaled(output.logits[0]).log_softmax(-1).cpu())
    log_probs = torch.cat(rows).gather(1, ids[1:, None]).squeeze(1)
    return log_probs[scored[1:]]
