"""Advantage estimators, registered by their name in the spec with the batch fields that each one reads.

Every estimator is `estimator(inputs: AdvantageInputs) -> Tensor | Estimate`. A returned tensor holds the
advantages: (B,) one per response, or (B, T) one per token. Formulas per token are in
`rlctl.algos.token_advantages`.

A response whose grader failed (`valid` False) is excluded and gets 0. Group estimators compare the responses
to one prompt; there a response without a valid sibling gets 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.lazy import torch
from rlctl.registry import ADVANTAGE_ESTIMATORS

if TYPE_CHECKING:
    from torch import Tensor

_GAMMA, _LAM = "algorithm.gamma", "algorithm.lam"


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Inputs of an advantage estimator.

    Attributes:
        token_level_rewards: (B, T) float32, the score at the last token, minus any KL penalty.
        response_mask: (B, T) bool.
        group_ids: (B,) int64, equal for the responses to one prompt.
        valid: (B,) bool, False where the grader failed: such a response is excluded and gets 0.
        gamma, lam: discount per token, and GAE's λ.
        divide_by_std: `algorithm.norm_adv_by_std_in_grpo`.
        whiten: (values (B, T), mask (B, T)) → (B, T) with zero mean and unit variance over the masked
            tokens of the whole batch, on all ranks.
        total: numbers of this rank → their sums over all ranks.
        values: (B, T) the critic's values before the updates; set if the estimator needs `values`.
        baseline_scores: (B,) score of the prompt's greedy response; set if `baseline_scores` is needed.
        score_norms: (B, T) squared norm of ∇ log π with respect to the logits; set if `score_norms` is
            needed.
        sequence_weights: (B,) W = Π ρ of each response; set if `sequence_weights` is needed.
        params: parameters of the estimator; None: it has none.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    group_ids: Tensor
    valid: Tensor
    gamma: float
    lam: float
    divide_by_std: bool
    whiten: Callable[[Tensor, Tensor], Tensor]
    total: Callable[[list[float]], list[float]] = list
    values: Tensor | None = None
    baseline_scores: Tensor | None = None
    score_norms: Tensor | None = None
    sequence_weights: Tensor | None = None
    params: Any = None

    @property
    def rewards(self) -> Tensor:
        """(B,) reward of each response."""
        return self.token_level_rewards.sum(-1)

    @property
    def valid_mask(self) -> Tensor:
        """(B, T) bool: response tokens of responses that were graded."""
        return self.response_mask & self.valid[:, None]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and, with a critic, its target values; both (B, T) float32, 0.0 off-mask."""

    advantages: Tensor
    returns: Tensor | None = None


def _group_sums(values: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """For each response: sum of `values` and number of responses over the valid responses of its group."""
    _, index = torch.unique(group_ids, return_inverse=True)
    valid_values = torch.where(valid, values, 0.0)
    size = int(index.max()) + 1 if len(index) else 0
    sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, index, valid_values)
    counts = torch.zeros_like(sums).index_add_(0, index, valid.to(values.dtype))
    return sums[index], counts[index]


def _compared(scores: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three (B,) float64: reward minus the mean of its group, that mean, number of valid rewards."""
    rewards = scores.double()
    sums, counts = _group_sums(rewards, group_ids, valid)
    mean = sums / counts.clamp(min=1)
    return without_rounding(rewards - mean, rewards), mean, counts


def without_rounding(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Sets float64 differences of float32 rewards and their baseline to 0.0 if they are rounding error.

    The mean of equal rewards differs from them by about 1e-16 of their size, which must not become a signal.
    """
    return torch.where(advantages.abs() > 1e-9 * rewards.abs(), advantages, 0.0)


@ADVANTAGE_ESTIMATORS.register(
    label="REINFORCE leave-one-out",
    formula="A_i = r_i − mean reward of the group's other responses",
    source="Ahmadian et al. 2024, Back to Basics",
    needs={"group_ids"},
    unbiased=True,
)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response."""
    centred, _, counts = _compared(inputs.rewards, inputs.group_ids, inputs.valid)
    advantage = centred * counts / (counts - 1).clamp(min=1)
    return torch.where(inputs.valid & (counts > 1), advantage, 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    label="Group-relative advantage",
    formula="A_i = (r_i − mean) / (std + 1e-6) over the group",
    source="Shao et al. 2024, DeepSeekMath, section 4.1.2",
    needs={"group_ids"},
    options={"algorithm.norm_adv_by_std_in_grpo"},
)
def grpo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response; std with n − 1. A group of equal rewards gets exactly 0."""
    centred, _, counts = _compared(inputs.rewards, inputs.group_ids, inputs.valid)
    squares, _ = _group_sums(centred.square(), inputs.group_ids, inputs.valid)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    if inputs.divide_by_std:
        centred = centred / (std + 1e-6)
    return torch.where(inputs.valid & (counts > 1), centred, 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    label="Dr. GRPO: GRPO without the standard deviation",
    formula="A_i = r_i − mean over the group",
    source="Liu et al. 2025, Understanding R1-Zero-Like Training",
    needs={"group_ids"},
)
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response."""
    return grpo(replace(inputs, divide_by_std=False))


@ADVANTAGE_ESTIMATORS.register(
    label="MaxRL: the mean in place of the standard deviation",
    formula="A_i = (r_i − mean) / mean over the group; 0 where the mean is not positive",
    source="arXiv 2602.02710; from prime-rl's code",
    needs={"group_ids"},
    experimental=True,
)
def maxrl(inputs: AdvantageInputs) -> Tensor:
    """For rewards ≥ 0: rarer successes get larger advantages, as under maximum likelihood."""
    centred, mean, counts = _compared(inputs.rewards, inputs.group_ids, inputs.valid)
    usable = inputs.valid & (counts > 1) & (mean > 0)
    return torch.where(usable, centred / torch.where(usable, mean, 1.0), 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    label="GPG: Dr. GRPO, scaled up as rewards become rare",
    formula="A_i = N / (number of r_j ≠ 0) · (r_i − mean over the group), N and r_j of the whole batch",
    source="Chu et al. 2025, arXiv 2504.02546; from verl's code",
    needs={"group_ids"},
    experimental=True,
)
def gpg(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response; GPG is this estimator with the loss `reinforce`."""
    graded, paid = inputs.total(
        [float(inputs.valid.sum()), float((inputs.valid & (inputs.rewards != 0)).sum())]
    )
    return dr_grpo(inputs) * (graded / max(paid, 1.0))


@ADVANTAGE_ESTIMATORS.register(
    label="Optimal reward baseline",
    formula="A_i = r_i − Σ_j l_j r_j / Σ_j l_j over the group, l in response tokens",
    source="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline",
    needs={"group_ids"},
)
def opo(inputs: AdvantageInputs) -> Tensor:
    """The baseline of least variance if the gradients of tokens have equal norms and are uncorrelated."""
    return weighted_baseline(inputs, inputs.response_mask.sum(-1))


@ADVANTAGE_ESTIMATORS.register(
    label="Off-policy optimal baseline (VCPO)",
    formula="A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group, c = W² · Σ_t ‖∇ log π_t‖², W = Π ρ",
    source="Huang et al. 2026, arXiv 2602.17616 (logit-gradient proxy)",
    needs={"group_ids", "score_norms", "sequence_weights"},
    experimental=True,
)
def off_policy_optimal_baseline(inputs: AdvantageInputs) -> Tensor:
    """The baseline of least variance for sequence weights W.

    The source uses the norm of the gradient of the parameters; here it is that of the logits, summed over
    tokens, as in `optimal_token_baseline`.
    """
    assert inputs.score_norms is not None
    assert inputs.sequence_weights is not None
    norms = torch.where(inputs.response_mask, inputs.score_norms.double().clamp(min=0.0), 0.0).sum(-1)
    return weighted_baseline(inputs, inputs.sequence_weights.double().square() * norms)


def weighted_baseline(inputs: AdvantageInputs, weights: Tensor) -> Tensor:
    """(B,) A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group; with c_j ∝ E|g_j|² its gradient varies least.

    g_j is the gradient of response j for reward 1. In a group with Σ c = 0, or of equal rewards, A is 0.

    Args:
        weights: (B,) c ≥ 0.
    """
    rewards, weights = inputs.rewards.double(), weights.double()
    weighted, _ = _group_sums(rewards * weights, inputs.group_ids, inputs.valid)
    total, _ = _group_sums(weights, inputs.group_ids, inputs.valid)
    advantage = without_rounding(rewards - weighted / total.where(total > 0, 1.0), rewards)
    return torch.where(inputs.valid & (total > 0), advantage, 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    label="ReMax",
    formula="A_i = r_i − score of the greedy response to the same prompt",
    source="Li et al. 2023, ReMax",
    needs={"baseline_scores"},
    unbiased=True,
)
def remax(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response; `valid`: both responses were graded."""
    assert inputs.baseline_scores is not None
    return torch.where(inputs.valid, inputs.rewards.double() - inputs.baseline_scores.double(), 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    label="REINFORCE++",
    formula="G_t = r_t + γ·G_{t+1}, whitened over the batch",
    source="Hu et al. 2025, REINFORCE++",
    options={_GAMMA},
)
def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    """One advantage per token, see `token_advantages.reward_to_go`."""
    from rlctl.algos import token_advantages

    returns = token_advantages.reward_to_go(inputs.token_level_rewards, inputs.response_mask, inputs.gamma)
    return inputs.whiten(returns, inputs.valid_mask)


@ADVANTAGE_ESTIMATORS.register(
    label="REINFORCE++ with a group baseline",
    formula="r_i − mean over the group, whitened over the batch",
    source="Hu et al. 2025, REINFORCE++",
    needs={"group_ids"},
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """One advantage per token, equal within a response."""
    return inputs.whiten(spread(dr_grpo(inputs), inputs.response_mask), inputs.valid_mask)


@ADVANTAGE_ESTIMATORS.register(
    label="Optimal token baseline",
    formula="A_t = G_t − Σ G_t·W_t / Σ W_t over the group, W_t = Σ_{j≤t} ‖∇ log π_j‖²",
    source="Li et al. 2026, The Optimal Token Baseline (logit-gradient proxy)",
    needs={"group_ids", "score_norms"},
)
def optimal_token_baseline(inputs: AdvantageInputs) -> Tensor:
    """One advantage per token, see `token_advantages.optimal_token_baseline`."""
    from rlctl.algos import token_advantages

    assert inputs.score_norms is not None
    return token_advantages.optimal_token_baseline(
        inputs.token_level_rewards, inputs.response_mask, inputs.group_ids, inputs.valid, inputs.score_norms
    )


@ADVANTAGE_ESTIMATORS.register(
    label="Generalised advantage estimation, with a critic",
    formula="A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t, whitened over the batch",
    source="Schulman et al. 2016, High-Dimensional Continuous Control Using GAE",
    needs={"values"},
    options={_GAMMA, _LAM},
)
def gae(inputs: AdvantageInputs) -> Estimate:
    """One advantage per token and the critic's targets, see `token_advantages.gae`."""
    from rlctl.algos import token_advantages

    assert inputs.values is not None
    plain, returns = token_advantages.gae(
        inputs.token_level_rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam
    )
    return Estimate(inputs.whiten(plain, inputs.valid_mask), returns)


def spread(per_response: Tensor, response_mask: Tensor) -> Tensor:
    """Expands one advantage per response (B,) to (B, T): the same for each of its tokens, 0.0 off-mask."""
    return torch.where(response_mask, per_response[:, None], 0.0)


# --- whether a group gives a signal ------------------------------------------------------------------


def has_spread(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """(B,) bool: the valid rewards of the row's group differ, so that the group gives a learning signal."""
    centred, _, _ = _compared(scores, group_ids, valid)
    squares, _ = _group_sums(centred.square(), group_ids, valid)
    return squares > 0


def spread_probability(rate: float, n: int) -> float:
    """Probability that the rewards of n responses differ, if each is 1 with probability `rate`, else 0."""
    return 1.0 - rate**n - (1.0 - rate) ** n


def zero_spread_fraction(scores: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Number of groups whose valid rewards are equal (no signal), and number of groups; two () float64."""
    _, all_counts = _group_sums(torch.ones_like(scores.double()), group_ids, torch.ones_like(valid))
    share = 1.0 / all_counts  # the shares of a group's members add up to 1
    return torch.where(has_spread(scores, group_ids, valid), 0.0, share).sum(), share.sum()
