"""Advantage estimators, registered by their name in the spec with the batch fields that each one reads.

Every estimator is `estimator(inputs: AdvantageInputs) -> Tensor | Estimate`. A returned tensor holds the
advantages: (B,) one per response, or (B, T) one per token. The formulas are implemented in
`rlctl.algos.advantages` and `rlctl.algos.token_advantages`; this module passes them their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.algos import advantages
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


@ADVANTAGE_ESTIMATORS.register(
    label="REINFORCE leave-one-out",
    formula="A_i = r_i − mean reward of the group's other responses",
    source="Ahmadian et al. 2024",
    needs={"group_ids"},
    unbiased=True,
)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.rloo`."""
    return advantages.rloo(inputs.rewards, inputs.group_ids, inputs.valid)


@ADVANTAGE_ESTIMATORS.register(
    label="Group-relative advantage",
    formula="A_i = (r_i − mean) / (std + 1e-6) over the group",
    source="Shao et al. 2024, section 4.1.2",
    needs={"group_ids"},
    options={"algorithm.norm_adv_by_std_in_grpo"},
)
def grpo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.grpo`."""
    return advantages.grpo(inputs.rewards, inputs.group_ids, inputs.valid, divide_by_std=inputs.divide_by_std)


@ADVANTAGE_ESTIMATORS.register(
    label="Dr. GRPO: GRPO without the standard deviation",
    formula="A_i = r_i − mean over the group",
    source="Liu et al. 2025",
    needs={"group_ids"},
)
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.grpo`."""
    return advantages.grpo(inputs.rewards, inputs.group_ids, inputs.valid, divide_by_std=False)


@ADVANTAGE_ESTIMATORS.register(
    label="MaxRL: the mean in place of the standard deviation",
    formula="A_i = (r_i − mean) / mean over the group; 0 where the mean is not positive",
    source="arXiv 2602.02710; from prime-rl's code",
    needs={"group_ids"},
    experimental=True,
)
def maxrl(inputs: AdvantageInputs) -> Tensor:
    """For rewards ≥ 0: rarer successes get larger advantages, as under maximum likelihood."""
    return advantages.maxrl(inputs.rewards, inputs.group_ids, inputs.valid)


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
    source="Hao et al. 2025",
    needs={"group_ids"},
)
def opo(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.weighted_baseline`."""
    lengths = inputs.response_mask.sum(-1)
    return advantages.weighted_baseline(inputs.rewards, lengths, inputs.group_ids, inputs.valid)


@ADVANTAGE_ESTIMATORS.register(
    label="Off-policy optimal baseline (VCPO)",
    formula="A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group, c = W² · Σ_t ‖∇ log π_t‖², W = Π ρ",
    source="Huang et al. 2026, arXiv 2602.17616 (logit-gradient proxy)",
    needs={"group_ids", "score_norms", "sequence_weights"},
    experimental=True,
)
def off_policy_optimal_baseline(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.weighted_baseline`; for sequence weights.

    The source uses the norm of the gradient of the parameters; here it is that of the logits, summed over
    tokens, as in `optimal_token_baseline`.
    """
    assert inputs.score_norms is not None
    assert inputs.sequence_weights is not None
    norms = torch.where(inputs.response_mask, inputs.score_norms.double().clamp(min=0.0), 0.0).sum(-1)
    weights = inputs.sequence_weights.double().square() * norms
    return advantages.weighted_baseline(inputs.rewards, weights, inputs.group_ids, inputs.valid)


@ADVANTAGE_ESTIMATORS.register(
    label="ReMax",
    formula="A_i = r_i − score of the greedy response to the same prompt",
    source="Li et al. 2023",
    needs={"baseline_scores"},
    unbiased=True,
)
def remax(inputs: AdvantageInputs) -> Tensor:
    """One advantage per response, see `advantages.remax`."""
    assert inputs.baseline_scores is not None
    return advantages.remax(inputs.rewards, inputs.baseline_scores, inputs.valid)


@ADVANTAGE_ESTIMATORS.register(
    label="REINFORCE++",
    formula="G_t = r_t + γ·G_{t+1}, whitened over the batch",
    source="Hu et al. 2025",
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
    source="Hu et al. 2025",
    needs={"group_ids"},
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """One advantage per token, equal within a response."""
    return inputs.whiten(spread(dr_grpo(inputs), inputs.response_mask), inputs.valid_mask)


@ADVANTAGE_ESTIMATORS.register(
    label="Optimal token baseline",
    formula="A_t = G_t − Σ G_t·W_t / Σ W_t over the group, W_t = Σ_{j≤t} ‖∇ log π_j‖²",
    source="Li et al. 2026 (logit-gradient proxy)",
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
    source="Schulman et al. 2016",
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
