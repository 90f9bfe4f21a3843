"""Every advantage estimator by its name in the spec: what it reads of the batch, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos import advantages as outcome
from rlctl.algos import token_advantages as tokenwise
from rlctl.batch import ScoredBatch
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.spec.algorithm import AdvEstimator, AlgorithmSpec


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages, and for a critic what it should have predicted; both (B, T) float32, 0.0 off-mask."""

    advantages: Tensor
    returns: Tensor | None = None


Estimator = Callable[[ScoredBatch, AlgorithmSpec, Ranks], Estimate]


def estimate(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    """Advantages by `algorithm.adv_estimator`; samples whose grader failed get 0.

    Raises:
        RunFailure: the batch lacks what the estimator reads.
    """
    return ESTIMATORS[algorithm.adv_estimator](scored, algorithm, ranks)


def _rloo(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    return _spread(scored, outcome.rloo(*_groups(scored)))


def _grpo(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    return _spread(scored, outcome.grpo(*_groups(scored), divide_by_std=algorithm.norm_adv_by_std_in_grpo))


def _dr_grpo(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    return _spread(scored, outcome.grpo(*_groups(scored), divide_by_std=False))


def _opo(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    rewards, group_ids, valid = _groups(scored)
    lengths = scored.rollouts.response_mask.sum(-1)
    return _spread(scored, outcome.opo(rewards, lengths, group_ids, valid))


def _remax(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    rewards, _, valid = _groups(scored)
    baseline = _given(scored.baseline_scores, "the greedy responses' scores")
    return _spread(scored, outcome.remax(rewards, baseline, valid))


def _reinforce_plus_plus(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    returns = tokenwise.reward_to_go(
        scored.token_level_rewards, scored.rollouts.response_mask, algorithm.gamma
    )
    return Estimate(_whitened(returns, scored.counted, ranks))


def _reinforce_plus_plus_baseline(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    centred = _dr_grpo(scored, algorithm, ranks).advantages
    return Estimate(_whitened(centred, scored.counted, ranks))


def _optimal_token_baseline(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    rollouts = scored.rollouts
    return Estimate(
        tokenwise.optimal_token_baseline(
            scored.token_level_rewards,
            rollouts.response_mask,
            rollouts.group_ids,
            scored.score_valid,
            _given(scored.score_norms, "the norms of the policy's score function"),
        )
    )


def _gae(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    advantages, returns = tokenwise.gae(
        scored.token_level_rewards,
        _given(scored.values, "the critic's values"),
        scored.rollouts.response_mask,
        algorithm.gamma,
        algorithm.lam,
    )
    return Estimate(_whitened(advantages, scored.counted, ranks), returns)


#: Estimator by name, one for every choice the spec offers.
ESTIMATORS: dict[AdvEstimator, Estimator] = {
    "gae": _gae,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
    "optimal_token_baseline": _optimal_token_baseline,
}


def _groups(scored: ScoredBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Reward of each response (B,), whose sibling it is, and whether it was graded."""
    return scored.token_level_rewards.sum(-1), scored.rollouts.group_ids, scored.score_valid


def _spread(scored: ScoredBatch, advantages: Tensor) -> Estimate:
    """One advantage per response (B,), the same for each of its tokens."""
    return Estimate(torch.where(scored.rollouts.response_mask, advantages[:, None], 0.0))


def _whitened(values: Tensor, mask: Tensor, ranks: Ranks) -> Tensor:
    """Zero mean and unit variance over the response tokens of the whole batch, on all ranks."""
    moments = ranks.to_host(tokenwise.whitening_tally(values, mask)).moments("whitened")
    return tokenwise.whiten(values, mask, moments.mean, moments.sample_std)


def _given(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise RunFailure(f"the advantage estimator needs {what}, and the batch has none")
    return tensor
