"""Advantages of a scored batch, by the estimator that the spec names."""

from __future__ import annotations

from functools import partial

import torch

from rlctl.algos.estimators import AdvantageInputs, Estimate, spread
from rlctl.algos.token_advantages import whiten
from rlctl.batch import ScoredBatch
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.spec.base import params_of

#: Optional field of a batch → its name in messages.
_SOMETIMES = {
    "values": "the critic's values",
    "baseline_scores": "the greedy responses' scores",
    "score_norms": "the norms of the policy's score function",
    "sequence_weights": "the sequence weights",
}


def estimate(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    """Advantages by `algorithm.adv_estimator`; samples whose grader failed get 0.

    Raises:
        RunFailure: the batch lacks a field that the estimator needs, or the estimator returns a wrong
            shape, or NaN or infinite advantages (on all ranks).
    """
    part = ADVANTAGE_ESTIMATORS.part(algorithm.adv_estimator)
    missing = [
        words for name, words in _SOMETIMES.items() if name in part.needs and getattr(scored, name) is None
    ]
    if missing:
        raise RunFailure(f"the advantage estimator needs {missing[0]}, and the batch has none")
    mask = scored.rollouts.response_mask
    found = part.function(
        AdvantageInputs(
            token_level_rewards=scored.token_level_rewards,
            response_mask=mask,
            group_ids=scored.rollouts.group_ids,
            valid=scored.score_valid,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            divide_by_std=algorithm.norm_adv_by_std_in_grpo,
            whiten=partial(whiten, to_host=ranks.to_host),
            total=ranks.sum,
            values=scored.values,
            baseline_scores=scored.baseline_scores,
            score_norms=scored.score_norms,
            sequence_weights=scored.sequence_weights,
            params=params_of(part, algorithm.adv_params),
        )
    )
    result = found if isinstance(found, Estimate) else Estimate(found)
    advantages = result.advantages
    ADVANTAGE_ESTIMATORS.check_returned(part.name, advantages, tuple(mask.shape[:1]), tuple(mask.shape))
    if advantages.ndim == 1:
        advantages = spread(advantages, mask)
    advantages = torch.where(scored.valid_mask, advantages.float(), 0.0)
    num_bad = int(ranks.sum([float((~advantages.isfinite()).any(1).sum())])[0])
    if num_bad:
        what = f"advantage estimator {part.name} gives NaN or infinite advantages to {num_bad} responses"
        raise RunFailure(what, fix="for example, do not divide by a deviation of 0")
    return Estimate(advantages, result.returns)
