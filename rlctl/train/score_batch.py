"""Turns graded episodes into a training batch: rewards, outputs of all models, KL penalty, advantages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs, estimate, score_norms
from rlctl.algos.kl import KLController, kl_estimate
from rlctl.algos.losses import clamped_exp
from rlctl.algos.segments import Moments, Segments, Units, moments
from rlctl.batch import COLUMN_KINDS, TokenBatch, column_form
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, known
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.batch_scorer import BatchScorer
from rlctl.train.deal import deal, in_order, in_passes
from rlctl.train.step_metrics import StepTimer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlctl.algos.rules import ResponseUnit
    from rlctl.batch import ModelInputs
    from rlctl.reward.protocol import Graded
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.capability import Capability
    from rlctl.train.run import Run
    from rlctl.train.settings import EstimatorSettings


def train_batch(spec: RunSpec, ranks: Ranks, graded: Graded, policy_version: int) -> TokenBatch:
    """The episodes that this rank trains on, with rewards: those that were graded, dealt to ranks by tokens.

    Args:
        ranks: all ranks of the run.
        policy_version: number of optimizer updates in the trained policy.
    """
    rollout = spec.rollout
    limit = spec.rollout.max_age_updates
    ages = graded.episodes.ages(policy_version)
    is_older = ages > (math.inf if limit is None else limit)
    drops, down_weights = (rollout.beyond_max_age == choice for choice in ("drop", "down_weight"))
    chosen = (graded.valid & ~(is_older & drops)).nonzero().squeeze(1)
    batch = graded.episodes.tokens.pick(chosen).to(ranks.device)
    if limit is not None and down_weights:
        factors = torch.where(is_older, (1 + limit) / (1 + ages), 1.0)[chosen].to(batch.prompt_weights)
        batch = replace(batch, prompt_weights=batch.prompt_weights * factors)
    baseline = None if graded.baseline is None else graded.baseline.scores[chosen].to(ranks.device)
    scores = graded.rewards.scores[chosen].double().to(ranks.device)
    episodes = batch.units.episode
    rewards = batch.rewards + _at_last_token(scores - episodes.sum(batch.rewards), episodes)
    batch = replace(batch, rewards=rewards)
    age = policy_version - batch.versions
    batch = batch.with_columns(scores=scores, baseline_scores=baseline, age=age)
    batch = _with_columns_of_all(batch, ranks)
    return deal(batch, ranks, spec.ppo_mini_batch_size, spec.engine.sequence_parallel)


def _with_columns_of_all(batch: TokenBatch, ranks: Ranks) -> TokenBatch:
    """The batch with the columns that any rank has (all ranks call this).

    A rank without episodes, or whose engine reported nothing, has unknown entries.
    """
    if ranks.world_size == 1:
        return batch
    forms: dict[str, tuple[Any, Any]] = {}
    for of_rank in ranks.exchange([{name: column_form(column) for name, column in batch.columns.items()}]):
        forms |= of_rank
    return batch.with_unknown(forms)


def _at_last_token(values: Tensor, episodes: Segments) -> Tensor:
    """(M,): each episode's value (E,) at the token that was sampled last, 0.0 elsewhere."""
    is_last = episodes.places + 1 == episodes.spread(episodes.lengths)
    return torch.where(is_last, episodes.spread(values), 0.0)


def score_batch(run: Run, batch: TokenBatch, timer: StepTimer) -> TokenBatch:
    """Adds the outputs of policy, reference, critic, and of the capabilities' models.

    π_old is the rollout log-probs in bypass mode, else one more forward pass of the policy.

    Args:
        run: provides the models; those that the spec does not need are None.
        timer: records the seconds of each model.

    Raises:
        RunFailure: log-probs of a model, or the critic's values, are not finite.
    """
    scorer = BatchScorer(run.spec, run.data_ranks, timer)
    batch = _with_policy(run, batch, timer)
    unrouted = batch.with_columns(experts=None)  # other models choose their experts
    if run.ref is not None:
        failure = RunFailure("the reference policy gives NaN or infinite log-probs", where="ref.path")
        batch = batch.with_columns(ref_log_probs=scorer.score("ref", run.ref.log_probs, unrouted, failure))
    for capability in run.capabilities:
        batch = capability.scored(scorer, batch, unrouted)
    if run.critic is not None:
        fix = "lower critic.lr, and resume from an earlier checkpoint"
        failure = RunFailure("the critic's values are NaN or infinite", fix=fix)
        batch = batch.with_columns(values=scorer.score("values", run.critic.values, unrouted, failure))
    return batch


def _with_policy(run: Run, batch: TokenBatch, timer: StepTimer) -> TokenBatch:
    """Adds π_old and, if the estimator needs them, ‖∇ log π‖² and Π π/π_rollout."""
    spec = run.spec
    needs = run.estimator.needs
    needs_norms = "score_norms" in needs
    needs_weights = "sequence_weights" in needs
    bypass = spec.algorithm.rollout_correction.bypass_mode
    if bypass and not needs_norms and not needs_weights:
        return replace(batch, old_log_probs=batch.rollout_log_probs)

    def figures(inputs: ModelInputs) -> Tensor:
        output = run.actor.policy(inputs, sum_pi_squared=needs_norms)
        squares = output.log_probs if output.sum_pi_squared is None else output.sum_pi_squared
        return torch.stack([output.log_probs, squares], 1)

    with timer("old_log_prob"):
        sizes = spec.actor.ppo_micro_batch_size_per_gpu, spec.pass_tokens, run.data_ranks
        own, squares = in_passes(figures, batch, *sizes).unbind(1)
    if needs_norms:
        batch = batch.with_columns(score_norms=score_norms(own, squares))
    if needs_weights:
        gaps = batch.units.episode.sum(own - batch.rollout_log_probs)
        batch = batch.with_columns(sequence_weights=clamped_exp(gaps).nan_to_num(nan=0.0))
    return replace(batch, old_log_probs=batch.rollout_log_probs if bypass else own)


def kl_controller(algorithm: AlgorithmSpec) -> KLController:
    """The controller of the KL coefficient at the start of a run."""
    control = algorithm.kl_ctrl
    target = control.target_kl if control.type == "adaptive" else None
    return KLController(control.kl_coef, target, control.horizon)


@torch.no_grad()
def with_penalties(
    batch: TokenBatch,
    algorithm: AlgorithmSpec,
    controller: KLController,
    ranks: Ranks,
    capabilities: Iterable[Capability] = (),
) -> tuple[TokenBatch, KLController, dict[str, float]]:
    """Subtracts from the reward of every token what the spec puts there: the KL to the reference,
    β · KL(π_old, π_ref), and what capabilities add.

    Source: Ouyang et al. 2022, "InstructGPT". A token with a non-finite log-prob under π_old gets no
    penalty: its response is rejected later, and the baseline of its group stays finite.

    Returns:
        The batch with the new rewards, the controller for the next batch, and the metrics
        `actor/reward_kl_*` and those of the capabilities.

    Raises:
        RunFailure: the estimator returns a wrong shape or NaN.
    """
    metrics: dict[str, float] = {}
    for capability in capabilities:
        batch, measured = capability.rewarded(batch, ranks)
        metrics |= measured
    if algorithm.use_kl_in_reward:
        kl, moments_of_kl = kl_per_token(
            batch, algorithm.unit, algorithm.kl_penalty, batch.column("ref_log_probs"), ranks
        )
        metrics["actor/reward_kl_penalty"] = moments_of_kl.mean
        metrics["actor/reward_kl_penalty_coeff"] = controller.kl_coef
        batch = batch.penalised(controller.kl_coef * kl)
        controller = controller.updated(moments_of_kl.mean, int(moments_of_kl.count))
    return batch, controller, metrics


def kl_per_token(
    batch: TokenBatch, unit: ResponseUnit, estimator: str, other: Tensor, ranks: Ranks
) -> tuple[Tensor, Moments]:
    """KL of π_old to another policy at each token (M,), 0.0 where π_old is not finite, and the mean of each
    response.

    Args:
        other: (M,) log-probs of the other policy, nats.

    Raises:
        RunFailure: the estimator returns a wrong shape or NaN.
    """
    old = known(batch.old_log_probs)
    responses = batch.units.of(unit)
    kl = kl_estimate(estimator, old, other)
    is_finite = ~responses.spread(responses.any(~old.isfinite()))
    kl = torch.where(is_finite | kl.isfinite(), kl, 0.0)
    sums = moments("kl", responses.mean(kl), responses.lengths > 0)
    moments_of_kl = Moments.read(ranks.all_reduce(sums), "kl")
    if not math.isfinite(moments_of_kl.mean):
        raise RunFailure(f"KL estimator {estimator} returned NaN or infinity")
    return kl, moments_of_kl


def with_advantages(batch: TokenBatch, estimator: EstimatorSettings, ranks: Ranks) -> TokenBatch:
    """Adds advantages, and with a critic its targets, from the whole batch of all ranks.

    Raises:
        RunFailure: the estimator returns a wrong shape, no target values for the critic, or NaN or infinite
            advantages (on all ranks).
    """
    inputs, mine = _inputs_of_all(batch, estimator, ranks)
    estimate_of_all = estimate(estimator.name, inputs)
    tokens = inputs.units.episode.entries_of(mine)
    advantages = estimate_of_all.advantages[tokens] * batch.units.episode.spread(batch.prompt_weights)
    returns = None if estimate_of_all.returns is None else estimate_of_all.returns[tokens]
    return replace(batch, advantages=advantages).with_columns(returns=returns)


#: Columns that an advantage estimator may read.
READ_BY_ESTIMATORS = ("baseline_scores", "score_norms", "sequence_weights", "values")


def _inputs_of_all(
    batch: TokenBatch, estimator: EstimatorSettings, ranks: Ranks
) -> tuple[AdvantageInputs, Tensor]:
    """What estimators read, of all ranks' episodes by group and member; indices (E,) of this rank's ones.

    Tokens do not travel: of the sampled ones only how many there are, where turns begin, and rewards.
    """
    sequences = Segments(ranks.all_gather(batch.units.sequence.lengths))
    of_episodes = Segments(ranks.all_gather(batch.sequences_of_episodes.lengths))
    tokens = Segments(of_episodes.sum(sequences.lengths).long())  # of each episode
    groups, members = ranks.all_gather(torch.stack([batch.group_ids, batch.members], 1)).unbind(1)
    order = in_order(groups, members)
    places = {
        "episode": order,
        "sequence": of_episodes.entries_of(order),
        "sampled": tokens.entries_of(order),
    }
    turns = _runs_of_all(batch.turns, ranks)[places["sampled"]]
    columns: dict[str, Any] = {}
    for name in READ_BY_ESTIMATORS:
        if name in batch.columns:
            columns[name] = ranks.all_gather(batch.columns[name])[places[COLUMN_KINDS[name].level]]
    inputs = AdvantageInputs(
        token_rewards=_runs_of_all(batch.rewards, ranks)[places["sampled"]],
        rewards=ranks.all_gather(batch.episode_rewards)[order],
        units=Units.nested(
            Segments(sequences.lengths[places["sequence"]]), Segments(tokens.lengths[order]), turns
        ),
        group_ids=groups[order],
        **estimator.inputs,
        **columns,
    )
    first = ranks.all_gather(torch.tensor([batch.num_episodes], device=order.device))[: ranks.rank].sum()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    return inputs, position[first : first + batch.num_episodes]


def _runs_of_all(column: Tensor, ranks: Ranks) -> Tensor:
    """The columns of all ranks; equal neighbours travel as one value and their number."""
    if ranks.world_size == 1:
        return column
    values, counts = torch.unique_consecutive(column, return_counts=True)
    return ranks.all_gather(values).repeat_interleave(ranks.all_gather(counts))
