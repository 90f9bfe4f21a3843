"""Turns graded episodes into a training batch: rewards, outputs of all models, KL penalty, advantages."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs, Estimate, estimate, score_norms
from rlctl.algos.kl import KLController, kl_estimate
from rlctl.algos.losses import clamped_exp
from rlctl.algos.segments import Moments, Segments, moments
from rlctl.batch import TokenBatch, TokenLists
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, known
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.spec.base import params_of
from rlctl.train.deal import deal, in_passes
from rlctl.train.step_metrics import StepTimer, ages_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlctl.batch import ModelInputs
    from rlctl.reward.protocol import Graded
    from rlctl.spec.run_spec import RunSpec
    from rlctl.train.run import Run


def train_batch(spec: RunSpec, ranks: Ranks, graded: Graded, policy_version: int) -> TokenBatch:
    """The episodes that this rank trains on, with rewards: those that were graded, dealt to ranks by tokens.

    Args:
        ranks: all ranks of the run.
        policy_version: number of optimizer updates in the trained policy.
    """
    rollout, limit = spec.rollout, spec.rollout.max_age_updates
    ages = ages_of(graded.episodes, policy_version)
    is_older = ages > (math.inf if limit is None else limit)
    drops, down_weights = (rollout.beyond_max_age == choice for choice in ("drop", "down_weight"))
    chosen = (graded.valid & ~(is_older & drops)).nonzero().squeeze(1).tolist()
    batch = TokenBatch.of([graded.episodes[place] for place in chosen], ranks.device)
    if limit is not None and down_weights:
        factors = torch.where(is_older, (1 + limit) / (1 + ages), 1.0)[chosen].to(batch.prompt_weights)
        batch = replace(batch, prompt_weights=batch.prompt_weights * factors)
    baseline = None if graded.baseline is None else graded.baseline.scores[chosen].to(ranks.device)
    scores = graded.rewards.scores[chosen].to(ranks.device)
    episodes = batch.units.episode
    batch = replace(
        batch,
        rewards=batch.rewards + _at_last_token(scores - episodes.sum(batch.rewards), episodes),
        baseline_scores=baseline,
        age=policy_version - batch.versions,
    )
    if spec.actor.routing_replay:
        # Ranks have the same columns, whatever the turns of each one report.
        own = None if batch.experts is None else tuple(batch.experts.shape[1:])
        shape = max(ranks.exchange([own or (0, 0)]))
        if own is None and any(shape):
            missing = batch.token_ids.new_full((len(batch.token_ids), *shape), -1, dtype=torch.int16)
            batch = replace(batch, experts=missing)
    if not chosen:  # with the columns of other ranks
        none = torch.zeros(0, dtype=torch.int32, device=ranks.device)
        lists = TokenLists(none, none, none.float())
        exact, centered = spec.rollout.exact_sampling, spec.algorithm.rollout_correction.score_centering
        batch = replace(batch, kept=replace(lists, log_probs=None) if exact else None)
        batch = replace(batch, most_likely=lists if centered else None)
    return deal(batch, ranks, spec.ppo_mini_batch_size, spec.engine.sequence_parallel)


def _at_last_token(values: Tensor, episodes: Segments) -> Tensor:
    """(M,) float32: each episode's value (E,) at the token that was sampled last, 0.0 elsewhere."""
    is_last = episodes.places + 1 == episodes.spread(episodes.lengths)
    return torch.where(is_last, episodes.spread(values), 0.0).float()


def score_batch(run: Run, batch: TokenBatch, timer: StepTimer) -> TokenBatch:
    """Adds the outputs of policy, reference, teacher and critic.

    π_old is the rollout log-probs in bypass mode, else one more forward pass of the policy.

    Args:
        run: provides the models; those that the spec does not need are None.
        timer: records the seconds of each model.

    Raises:
        RunFailure: log-probs of the reference or the teacher, or the critic's values are not finite.
    """
    spec = run.spec
    batch = _with_policy(run, batch, timer)
    unrouted = replace(batch, experts=None)  # other models choose their experts
    own = spec.actor.ppo_micro_batch_size_per_gpu, spec.pass_tokens
    of_critic = spec.critic_micro_batch_size, spec.critic_max_token_len

    def scored(
        phase: str, model: Callable[[ModelInputs], Tensor], sizes: tuple[int, int | None], failure: RunFailure
    ) -> Tensor:
        with timer(phase):
            found = in_passes(model, unrouted, *sizes, run.data_ranks)
        if not found.isfinite().all():
            raise failure
        return found

    if run.ref is not None:
        failure = RunFailure("the reference policy gives NaN or infinite log-probs", where="ref.path")
        batch = replace(batch, ref_log_probs=scored("ref", run.ref.log_probs, own, failure))
    if run.teacher is not None:
        failure = RunFailure("the teacher gives NaN or infinite log-probs", where="algorithm.teacher.path")
        score, count = run.teacher.log_probs, 0
        if spec.lists_teacher:
            vocabulary = len(run.tokenizer)
            count = min(spec.algorithm.teacher.top_k, vocabulary)
            score = partial(run.teacher.top_k, count=count, vocabulary=vocabulary)
        batch = _with_teacher(batch, scored("teacher", score, own, failure), count)
    if run.critic is not None:
        fix = "lower critic.lr, and resume from an earlier checkpoint"
        failure = RunFailure("the critic's values are NaN or infinite", fix=fix)
        batch = replace(batch, values=scored("values", run.critic.values, of_critic, failure))
    return batch


def _with_policy(run: Run, batch: TokenBatch, timer: StepTimer) -> TokenBatch:
    """Adds π_old and, if the estimator needs them, ‖∇ log π‖² and Π π/π_rollout."""
    spec, algorithm = run.spec, run.spec.algorithm
    needs_norms, needs_weights = map(algorithm.estimator_needs, ("score_norms", "sequence_weights"))
    bypass = algorithm.rollout_correction.bypass_mode
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
        batch = replace(batch, score_norms=score_norms(own, squares))
    if needs_weights:
        gaps = batch.units.episode.sum(own - batch.rollout_log_probs)
        batch = replace(batch, sequence_weights=clamped_exp(gaps).nan_to_num(nan=0.0))
    return replace(batch, old_log_probs=batch.rollout_log_probs if bypass else own)


def _with_teacher(batch: TokenBatch, found: Tensor, count: int) -> TokenBatch:
    """Adds the teacher's log-probs and, if there are any, its `count` most likely tokens, see `Teacher`."""
    if not count:
        return replace(batch, teacher_log_probs=found)
    own, listed, tail, ids = torch.split(found, [1, count, 1, count], 1)
    counts = torch.full_like(batch.versions, count, dtype=torch.int32)
    lists = TokenLists(counts, ids.int().flatten(), listed.flatten())
    return replace(batch, teacher_log_probs=own.squeeze(1), teacher_top_k=lists, teacher_tail=tail.squeeze(1))


def kl_controller(algorithm: AlgorithmSpec) -> KLController:
    """The controller of the KL coefficient at the start of a run."""
    control = algorithm.kl_ctrl
    target = control.target_kl if control.type == "adaptive" else None
    return KLController(control.kl_coef, target, control.horizon)


@torch.no_grad()
def with_penalties(
    batch: TokenBatch, algorithm: AlgorithmSpec, controller: KLController, ranks: Ranks
) -> tuple[TokenBatch, KLController, dict[str, float]]:
    """Subtracts β · KL(π_old, π_ref), and that to the teacher, from the reward of every token, if configured.

    Source: Ouyang et al. 2022, "InstructGPT". A token with a non-finite log-prob under π_old gets no
    penalty: its response is rejected later, and the baseline of its group stays finite. With
    `algorithm.teacher.alone` the rewards of the task are 0.

    Returns:
        The batch with the new rewards, the controller for the next batch, and the metrics
        `actor/reward_kl_*` and `distill/reverse_kl`.

    Raises:
        RunFailure: the estimator returns a wrong shape or NaN.
    """
    teacher, rewards = algorithm.teacher, batch.rewards
    metrics: dict[str, float] = {}
    if batch.teacher_log_probs is not None:
        kl, found = _kl_per_token(batch, algorithm, "k1", batch.teacher_log_probs, ranks)
        metrics["distill/reverse_kl"] = found.mean
        rewards = torch.zeros_like(rewards) if teacher.alone else rewards
        rewards = rewards - teacher.kl_coef * kl if teacher.kl_in == "reward" else rewards
    if algorithm.use_kl_in_reward:
        kl, found = _kl_per_token(batch, algorithm, algorithm.kl_penalty, known(batch.ref_log_probs), ranks)
        metrics["actor/reward_kl_penalty"] = found.mean
        metrics["actor/reward_kl_penalty_coeff"] = controller.kl_coef
        rewards = rewards - controller.kl_coef * kl
        controller = controller.updated(found.mean, int(found.count))
    return replace(batch, rewards=rewards), controller, metrics


def _kl_per_token(
    batch: TokenBatch, algorithm: AlgorithmSpec, kind: str, other: Tensor, ranks: Ranks
) -> tuple[Tensor, Moments]:
    """KL(π_old, other) of each token (M,), 0.0 where π_old is not finite, and the mean of each response."""
    old, unit = known(batch.old_log_probs), batch.units.of(algorithm.unit)
    kl = kl_estimate(kind, old, other)
    is_finite = ~unit.spread(unit.any(~old.isfinite()))
    kl = torch.where(is_finite | kl.isfinite(), kl, 0.0)
    found = Moments.read(ranks.all_reduce(moments("kl", unit.mean(kl), unit.lengths > 0)), "kl")
    if not math.isfinite(found.mean):
        raise RunFailure(f"KL estimator {kind} returned NaN or infinity")
    return kl, found


def with_advantages(batch: TokenBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> TokenBatch:
    """Adds advantages, and with a critic its targets, from the whole batch of all ranks.

    Raises:
        RunFailure: the estimator returns a wrong shape, no target values for the critic, or NaN or infinite
            advantages (on all ranks).
    """
    whole, mine = _whole_batch(batch, ranks)
    found = estimated(whole, algorithm)
    tokens = whole.units.episode.entries_of(mine)
    advantages = found.advantages[tokens] * batch.units.episode.spread(batch.prompt_weights)
    returns = None if found.returns is None else found.returns[tokens]
    return replace(batch, advantages=advantages, returns=returns)


def _whole_batch(batch: TokenBatch, ranks: Ranks) -> tuple[TokenBatch, Tensor]:
    """What estimators read, of all ranks' episodes by group and member; indices (E,) of this rank's episodes.

    Tokens that were not sampled are left out.
    """
    lengths = batch.units.sequence.lengths
    reduced = replace(
        batch,
        token_ids=batch.turns,
        sampled=torch.ones_like(batch.turns, dtype=torch.bool),
        lengths=lengths,
        kept=None,
        most_likely=None,
        teacher_top_k=None,
        experts=None,
    )
    counts = ranks.all_gather(reduced.sequences_of_episodes.lengths)
    gathered = reduced.mapped(lambda values, _: ranks.all_gather(values))
    reduced = replace(gathered, owners=Segments(counts).index)
    keys = list(zip(reduced.group_ids.tolist(), reduced.members.tolist(), strict=True))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    places = {keys[place]: index for index, place in enumerate(order)}
    own = zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)
    mine = torch.tensor([places[key] for key in own], dtype=torch.int64, device=batch.group_ids.device)
    return reduced.pick(order), mine


def estimated(batch: TokenBatch, algorithm: AlgorithmSpec) -> Estimate:
    """Advantages (M,) by `algorithm.adv_estimator`, from a whole batch; raises as `with_advantages`."""
    part = ADVANTAGE_ESTIMATORS.part(algorithm.adv_estimator)
    inputs = AdvantageInputs(
        token_rewards=batch.rewards,
        units=batch.units,
        group_ids=batch.group_ids,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        divide_by_std=algorithm.norm_adv_by_std_in_grpo,
        gamma_per=algorithm.gamma_per,
        values=batch.values,
        baseline_scores=batch.baseline_scores,
        score_norms=batch.score_norms,
        sequence_weights=batch.sequence_weights,
        params=params_of(part, algorithm.adv_params),
    )
    return estimate(part.name, inputs)
