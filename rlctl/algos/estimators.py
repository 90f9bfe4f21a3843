"""Advantage estimators, registered by their name in the spec with the batch fields that each one reads.

Every estimator is `estimator(inputs: AdvantageInputs) -> Tensor | Estimate`: a tensor (E,) of one advantage
per episode, or an `Estimate` of one per sampled token. Recurrences over tokens are at
the end.

The batch holds the episodes that were graded, of all ranks. Group estimators compare the episodes of one
prompt. A group may have any number of members; the only member of its group gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlctl.algos.segments import Segments
from rlctl.errors import RunFailure, known
from rlctl.lazy import torch
from rlctl.registry import ADVANTAGE_ESTIMATORS, PartInputs

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.segments import Units

_DISCOUNT = {"algorithm.gamma", "algorithm.gamma_per"}


@dataclass(frozen=True, slots=True)
class AdvantageInputs(PartInputs):
    """Inputs of an advantage estimator: the E episodes of the whole batch, of which M tokens were sampled.

    An episode's tokens are in the order of sampling as `units.episode` reads them (`padded`, `cumsum`,
    `places`); the columns have another one where its turns alternate between sequences.

    Attributes:
        token_rewards: (M,) float64, rewards of turns at their last tokens and the rest of the score at an
            episode's last token, minus any KL penalty.
        rewards: (E,) float64 reward of each episode: its score minus any KL penalty. Compare these: a sum of
            `token_rewards` is rounded.
        units: the tokens of each turn, sequence and episode.
        group_ids: (E,) int64, equal for the episodes of one prompt.
        gamma, lam: discount, and GAE's λ.
        divide_by_std: `algorithm.norm_adv_by_std_in_grpo`.
        gamma_per: whether γ and λ apply at every token, or only at the first token of a turn that follows
            another.
        values: (M,) the critic's values before the updates; set if the estimator needs `values`.
        baseline_scores: (E,) score of the prompt's greedy response; set if `baseline_scores` is needed.
        score_norms: (M,) squared norm of ∇ log π with respect to the logits; set if `score_norms` is
            needed.
        sequence_weights: (E,) W = Π ρ of each episode; set if `sequence_weights` is needed.
        params: parameters of the estimator; None: it has none.
    """

    token_rewards: Tensor
    rewards: Tensor
    units: Units
    group_ids: Tensor
    gamma: float
    lam: float
    divide_by_std: bool
    gamma_per: Literal["token", "turn"] = "token"
    values: Tensor | None = None
    baseline_scores: Tensor | None = None
    score_norms: Tensor | None = None
    sequence_weights: Tensor | None = None
    params: Any = None

    removed: ClassVar = {
        "token_level_rewards": "read token_rewards, a column (M,) of the sampled tokens",
        "response_mask": "each entry of a column is a sampled token; `unit` has the tokens of each episode",
        "valid": "all episodes of the batch were graded",
        "valid_mask": "each entry of a column is a sampled token of a graded episode",
        "whiten": "call rlctl.algos.estimators.whiten, because the batch is that of all ranks",
        "total": "the batch is that of all ranks",
    }

    @property
    def unit(self) -> Segments:
        """The sampled tokens (M,) of each episode."""
        return self.units.episode

    @property
    def discounts(self) -> tuple[Tensor, Tensor]:
        """γ and λ, each (M,) float64, between the token before and this one; per turn, 1 within a turn."""
        places = self.units.turn.places
        applies = (torch.ones_like(places) if self.gamma_per == "token" else places == 0).double()
        return 1.0 - applies * (1.0 - self.gamma), 1.0 - applies * (1.0 - self.lam)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages and, with a critic, its target values; both (M,) float32."""

    advantages: Tensor
    returns: Tensor | None = None


def estimate(name: str, inputs: AdvantageInputs) -> Estimate:
    """What the registered estimator of that name returns, with one advantage per sampled token.

    A plain tensor is (E,), one advantage per episode; one per token is an `Estimate`.

    Raises:
        RunFailure: the estimator returns a wrong shape, no target values for the critic, or NaN or infinite
            advantages.
    """
    registered = ADVANTAGE_ESTIMATORS.part(name)
    estimated = registered.function(inputs)
    per_episode = inputs.group_ids.shape
    per_token = inputs.token_rewards.shape
    if not isinstance(estimated, Estimate):
        ADVANTAGE_ESTIMATORS.check_returned(name, estimated, per_episode)
        estimated = Estimate(inputs.unit.spread(estimated))
    ADVANTAGE_ESTIMATORS.check_returned(name, estimated.advantages, per_token)
    if estimated.returns is not None:
        ADVANTAGE_ESTIMATORS.check_returned(f"{name} (returns)", estimated.returns, per_token)
    elif "values" in registered.needs:
        message = f"advantage estimator {name} returned no target values for the critic"
        fix = "return Estimate(advantages, returns)"
        raise RunFailure(message, where=ADVANTAGE_ESTIMATORS.key, fix=fix)
    num_bad = int(inputs.unit.any(~estimated.advantages.isfinite()).sum())
    if num_bad:
        message = f"advantage estimator {name} gives NaN or infinite advantages to {num_bad} episodes"
        raise RunFailure(message, fix="for example, do not divide by a deviation of 0")
    return replace(estimated, advantages=estimated.advantages.float())


def group_sums(values: Tensor, group_ids: Tensor) -> Tensor:
    """Float64, for each episode: sum of `values` (E,) or (E, …) over its group."""
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    members = index.argsort(stable=True)  # each group's, in order: sums do not depend on the device
    return Segments(sizes).sum(values[members])[index]


def _compared(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three (E,) float64: reward minus the mean of its group, that mean, number of members."""
    rewards = rewards.double()
    sizes = group_sums(torch.ones_like(rewards), group_ids)
    mean = group_sums(rewards, group_ids) / sizes
    return without_rounding(rewards - mean, rewards), mean, sizes


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = r_i − mean reward of the group's other responses",
    source="Ahmadian et al. 2024, Back to Basics",
    needs={"group_ids"},
    unbiased=True,
)
def rloo(inputs: AdvantageInputs) -> Tensor:
    """REINFORCE leave-one-out.

    One advantage per episode.
    """
    centred, _, sizes = _compared(inputs.rewards, inputs.group_ids)
    return (centred * sizes / (sizes - 1).clamp(min=1)).float()


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = (r_i − mean) / (std + 1e-6) over the group",
    source="Shao et al. 2024, DeepSeekMath, section 4.1.2",
    needs={"group_ids"},
    options={"algorithm.norm_adv_by_std_in_grpo"},
)
def grpo(inputs: AdvantageInputs) -> Tensor:
    """Group-relative advantage.

    One advantage per episode; std with n − 1. A group of equal rewards gets exactly 0.
    """
    centred, _, sizes = _compared(inputs.rewards, inputs.group_ids)
    if inputs.divide_by_std:
        squares = group_sums(centred.square(), inputs.group_ids)
        centred = centred / ((squares / (sizes - 1).clamp(min=1)).sqrt() + 1e-6)
    return centred.float()


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = r_i − mean over the group",
    source="Liu et al. 2025, Understanding R1-Zero-Like Training",
    needs={"group_ids"},
)
def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """Dr. GRPO: GRPO without the standard deviation.

    One advantage per episode.
    """
    return grpo(replace(inputs, divide_by_std=False))


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = (r_i − mean) / mean over the group; 0 where the mean is not positive",
    source="arXiv 2602.02710; from prime-rl's code",
    needs={"group_ids"},
    experimental=True,
)
def maxrl(inputs: AdvantageInputs) -> Tensor:
    """MaxRL: the mean in place of the standard deviation.

    For rewards ≥ 0: rarer successes get larger advantages, as under maximum likelihood.
    """
    centred, mean, _ = _compared(inputs.rewards, inputs.group_ids)
    return torch.where(mean > 0, centred / mean.where(mean > 0, 1.0), 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = N / (number of r_j ≠ 0) · (r_i − mean over the group), N and r_j of the whole batch",
    source="Chu et al. 2025, arXiv 2504.02546; from verl's code",
    needs={"group_ids"},
    experimental=True,
)
def gpg(inputs: AdvantageInputs) -> Tensor:
    """GPG: Dr. GRPO, scaled up as rewards become rare.

    One advantage per episode; GPG is this estimator with the loss `reinforce`.
    """
    paid = (inputs.rewards != 0).sum().clamp(min=1)
    return dr_grpo(inputs) * (len(inputs.group_ids) / paid)


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = r_i − Σ_j l_j r_j / Σ_j l_j over the group, l in response tokens",
    source="Hao et al. 2025, On-Policy RL with Optimal Reward Baseline",
    needs={"group_ids"},
)
def opo(inputs: AdvantageInputs) -> Tensor:
    """Optimal reward baseline.

    The baseline of least variance if the gradients of tokens have equal norms and are uncorrelated.
    """
    return weighted_baseline(inputs, inputs.unit.lengths)


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group, c = W² · Σ_t ‖∇ log π_t‖², W = Π ρ",
    source="Huang et al. 2026, arXiv 2602.17616 (logit-gradient proxy)",
    needs={"group_ids", "score_norms", "sequence_weights"},
    experimental=True,
)
def off_policy_optimal_baseline(inputs: AdvantageInputs) -> Tensor:
    """Off-policy optimal baseline (VCPO).

    The baseline of least variance for sequence weights W.

    The source uses the norm of the gradient of the parameters; here it is that of the logits, summed over
    tokens, as in `optimal_token_baseline`.
    """
    norms = inputs.unit.sum(known(inputs.score_norms).double().clamp(min=0.0))
    return weighted_baseline(inputs, known(inputs.sequence_weights).double().square() * norms)


def weighted_baseline(inputs: AdvantageInputs, weights: Tensor) -> Tensor:
    """(E,) A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group; with c_j ∝ E|g_j|² its gradient varies least.

    g_j is the gradient of episode j for reward 1. In a group with Σ c = 0, or of equal rewards, A is 0.

    Args:
        weights: (E,) c ≥ 0.
    """
    rewards = inputs.rewards.double()
    weights = weights.double()
    weighted, total = (group_sums(x, inputs.group_ids) for x in (rewards * weights, weights))
    advantages = without_rounding(rewards - weighted / total.where(total > 0, 1.0), rewards)
    return torch.where(total > 0, advantages, 0.0).float()


@ADVANTAGE_ESTIMATORS.register(
    formula="A_i = r_i − score of the greedy response to the same prompt",
    source="Li et al. 2023, ReMax",
    needs={"baseline_scores"},
    unbiased=True,
)
def remax(inputs: AdvantageInputs) -> Tensor:
    """ReMax.

    One advantage per episode.
    """
    return (inputs.rewards - known(inputs.baseline_scores).double()).float()


@ADVANTAGE_ESTIMATORS.register(
    formula="G_t = r_t + γ·G_{t+1}, whitened over the batch",
    source="Hu et al. 2025, REINFORCE++",
    options=_DISCOUNT,
)
def reinforce_plus_plus(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++.

    One advantage per token, see `reward_to_go`.
    """
    return Estimate(whiten(reward_to_go(inputs.token_rewards, inputs.unit, inputs.discounts[0])))


@ADVANTAGE_ESTIMATORS.register(
    formula="r_i − mean over the group, whitened over the batch",
    source="Hu et al. 2025, REINFORCE++",
    needs={"group_ids"},
)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Estimate:
    """REINFORCE++ with a group baseline.

    One advantage per token, equal within an episode.
    """
    return Estimate(whiten(inputs.unit.spread(dr_grpo(inputs))))


@ADVANTAGE_ESTIMATORS.register(
    formula="A_t = G_t − Σ G_t·W_t / Σ W_t over the group, W_t = Σ_{j≤t} ‖∇ log π_j‖²",
    source="Li et al. 2026, The Optimal Token Baseline (logit-gradient proxy)",
    needs={"group_ids", "score_norms"},
)
def optimal_token_baseline(inputs: AdvantageInputs) -> Estimate:
    """Optimal token baseline.

    One advantage per token, and one baseline per prompt and timestep.

    W_t is the squared norm of the gradient of log π with respect to the logits, summed over the episode so
    far: a baseline close to an episode's return reduces the variance most where its gradient is large. An
    episode contributes at t if it has a token t. Where only one does, the baseline is 0, as in the authors'
    code: the tail of the longest episode keeps its plain return.
    """
    unit = inputs.unit
    group_ids = inputs.group_ids
    norms = known(inputs.score_norms).double().clamp(min=0.0)  # ≥ 0 except for rounding
    plain = reward_to_go(inputs.token_rewards, unit, 1.0)
    returns, energy, present = (unit.padded(x) for x in (plain, unit.cumsum(norms), torch.ones_like(norms)))
    weighted, total, alive = (group_sums(x, group_ids) for x in (energy * returns, energy, present))
    compared = (alive > 1) & (total > 0)
    baseline = torch.where(compared, weighted / total.where(compared, 1.0), 0.0)
    members = group_sums(torch.ones_like(group_ids), group_ids)[:, None]
    advantages = torch.where(members > 1, without_rounding(returns - baseline, returns), 0.0)
    return Estimate(unit.flat(advantages).float())


@ADVANTAGE_ESTIMATORS.register(
    formula="A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t, whitened over the batch",
    source="Schulman et al. 2016, High-Dimensional Continuous Control Using GAE",
    needs={"values"},
    options=_DISCOUNT | {"algorithm.lam"},
)
def gae(inputs: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation, with a critic.

    One advantage per token and the critic's targets, see `gae_recursion`.
    """
    values = known(inputs.values)
    plain, returns = gae_recursion(inputs.token_rewards, values, inputs.unit, *inputs.discounts)
    return Estimate(whiten(plain), returns.float())


# --- recurrences, and statistics of whole columns (M,) ------------------------------------------------


def gae_recursion(
    rewards: Tensor, values: Tensor, unit: Segments, gamma: Tensor | float, lam: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t.

    After a response's last token both V and A are 0.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE".

    Args:
        rewards: (M,) after KL penalty and shaping.
        values: (M,) V(s_t), the critic's prediction before token t.
        unit: the tokens of each response.
        gamma: discount of what follows a token, seen from that token. A column (M,) has at token t + 1 the
            discount between t and t + 1.
        lam: λ; 1 uses all later rewards and no later value, 0 uses the next value only. A column as `gamma`.

    Returns:
        advantages (M,), not whitened; and returns (M,) A_t + V_t, the critic's target values; float64.
    """
    rewards = rewards.double()
    values = values.double()
    discounts, traces = (torch.zeros_like(values) + rate for rate in (gamma, lam))
    # a column of rows is (K,), and what follows the last one is 0
    columns = [unit.padded(x).unbind(1) for x in (rewards, values, discounts, discounts * traces)]
    advantages: list[Tensor] = []
    later_value = later_advantage = later_discount = later_trace = rewards.new_zeros(len(unit))
    for reward, value, discount, trace in reversed(list(zip(*columns, strict=True))):
        delta = reward + later_discount * later_value - value
        later_advantage = delta + later_trace * later_advantage
        later_value = value
        later_discount = discount
        later_trace = trace
        advantages.append(later_advantage)
    flat_advantages = unit.flat(torch.stack(advantages[::-1], 1)) if advantages else torch.zeros_like(values)
    return flat_advantages, flat_advantages + values


def reward_to_go(rewards: Tensor, unit: Segments, gamma: Tensor | float) -> Tensor:
    """(M,) float64 discounted sum of this and all later rewards, G_t = r_t + γ·G_{t+1}; see `gae_recursion`.

    Source: Hu et al. 2025, "REINFORCE++" (whitened over the batch, it is that estimator's advantage).
    """
    return gae_recursion(rewards, torch.zeros_like(rewards), unit, gamma, 1.0)[0]


def score_norms(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """‖∇ log π‖² of each sampled token with respect to the logits, (M,): 1 − 2π + Σ_v π(v)².

    Args:
        log_probs: log-probs of the sampled tokens.
        sum_pi_squared: Σ_v π(v)² over the vocabulary, at each token.
    """
    return 1.0 - 2.0 * log_probs.exp() + sum_pi_squared


def without_rounding(differences: Tensor, values: Tensor) -> Tensor:
    """Sets float64 differences of float32 values and their mean to 0.0 if they are rounding error.

    The mean of equal values differs from them by about 1e-16 of their size, which must not become a signal.
    """
    return torch.where(differences.abs() > 1e-9 * values.abs(), differences, 0.0)


def whiten(values: Tensor) -> Tensor:
    """(x − mean) / √(std² + 1e-8) of the whole column, float32; std with n − 1."""
    values = values.double()
    centred = without_rounding(values - values.mean(), values)
    variance = centred.square().sum() / max(len(values) - 1, 1)
    return (centred / (variance + 1e-8).sqrt()).float()


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """1 − Var(returns − values)/Var(returns): 1 for a perfect critic, 0 for a constant prediction.

    0.0 if the returns do not vary. Both arguments are the whole column, over all ranks.
    """
    returns, residuals = returns.double(), returns.double() - values.double()
    spread = (returns - returns.mean()).square().sum()
    unexplained = (residuals - residuals.mean()).square().sum()
    varies = bool(spread > 1e-12 * returns.square().sum())  # by more than rounding
    return 1.0 - float(unexplained / spread) if varies else 0.0


# --- whether a group gives a signal ------------------------------------------------------------------


def has_spread(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(E,) bool: the rewards of the episode's group differ, so that the group gives a learning signal.

    Args:
        scores: (E,) of graded episodes.
        group_ids: (E,) equal for the episodes of one prompt.
    """
    centred, _, _ = _compared(scores, group_ids)
    return group_sums(centred.square(), group_ids) > 0


def spread_probability(rate: float, n: int) -> float:
    """Probability that the rewards of n responses differ, if each is 1 with probability `rate`, else 0."""
    return 1.0 - rate**n - (1.0 - rate) ** n
