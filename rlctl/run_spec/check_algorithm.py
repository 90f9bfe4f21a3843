"""Checks for contradictions within the algorithm: estimator, critic, KL, loss and rollout correction."""

from __future__ import annotations

from rlctl.capabilities.sections import further_models, other_models, sections_on
from rlctl.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.algorithm import CORRECTION
from rlctl.run_spec.base import param_problems
from rlctl.run_spec.check import LEAVE_OUT, Problems, error, fitting_batch, spec_check, warning
from rlctl.run_spec.model import EMBEDDED
from rlctl.run_spec.resolve import IS_THRESHOLD_KEY, correction_problems, correction_rules
from rlctl.run_spec.run_spec import RunSpec

_FILTER = "algorithm.filter_groups"
_IS = f"{CORRECTION}rollout_is"
_CLIPS = ("actor.clip_ratio_low", "actor.clip_ratio_high")


def _has_ratio(spec: RunSpec) -> bool:
    return "old_log_probs" in POLICY_LOSSES.part(spec.algorithm.rollout_correction.loss_type).needs


def _is_corrected(spec: RunSpec) -> bool:
    correction = spec.algorithm.rollout_correction
    return any((correction.rollout_is, correction.rollout_rs)) or any(
        section.corrects for section in sections_on(spec).values()
    )


@spec_check
def rules_are_clear(spec: RunSpec) -> Problems:
    """Criteria must exist in the dialect; thresholds must fit the criteria and accept on-policy data."""
    yield from correction_problems(spec.algorithm.rollout_correction)


@spec_check
def groups_can_be_filtered(spec: RunSpec) -> Problems:
    """Dynamic sampling cannot sample in advance, because rewards decide what to sample; it needs n > 1."""
    options = spec.algorithm.filter_groups
    rollout = spec.rollout
    estimator = spec.algorithm.adv_estimator
    key = f"{_FILTER}.enable"
    if not options.enable:
        return
    for name in ("staleness", "max_staleness"):
        if getattr(rollout, name):
            message = f"rewards determine what is sampled next, but rollout.{name} samples batches in advance"
            yield error(key, message, f"set it to false, or rollout.{name}: 0")
    if not spec.algorithm.estimator_needs("group_ids"):
        message = f"{estimator} is not group-relative: it also learns from groups with equal rewards"
        yield error(key, message, "set it to false, or use an estimator that does, such as rloo")
    elif spec.algorithm.estimator_needs("baseline_scores"):
        message = (
            f"{estimator} needs a greedy response to every prompt, which dynamic sampling does not provide"
        )
        yield error(
            key, message, "set it to false, or use an estimator without baseline_scores, such as rloo"
        )
    elif rollout.n == 1:
        yield error(key, "the rewards of a group of one response never differ", "set rollout.n to 2 or more")
    if any(section.teaches_without_advantage(spec) for section in sections_on(spec).values()):
        message = "terms of the loss beside the policy gradient then cover only prompts of medium difficulty"
        yield warning(key, message, "use none of them, as DAPO does")


@spec_check
def weight_band_holds_one(spec: RunSpec) -> Problems:
    """On-policy weights are exactly 1; a band that does not contain 1 would change them."""
    correction = spec.algorithm.rollout_correction
    if correction.rollout_is is None or correction_problems(correction):
        return
    lower, upper = correction_rules(correction).weight.band()
    if not lower <= 1.0 <= upper:
        message = f"the band [{lower:g}, {upper:g}] does not contain 1, the weight of on-policy data"
        yield warning(IS_THRESHOLD_KEY, message, "choose bounds with 1 between them, for example 0.5_2.0")


@spec_check
def groups_have_siblings(spec: RunSpec) -> Problems:
    """Group estimators compare the responses of one prompt; they need two or more."""
    if spec.algorithm.estimator_needs("group_ids") and spec.rollout.n == 1:
        message = f"{spec.algorithm.adv_estimator} with one response per prompt: "
        message += "every advantage would be zero or undefined"
        fix = "set rollout.n to 2 or more (5 to 16 is usual), or use reinforce_plus_plus, remax or gae"
        yield error("rollout.n", message, fix)


@spec_check
def critic_has_a_use(spec: RunSpec) -> Problems:
    """An estimator that reads values (`gae`) needs a critic; with other estimators a critic has no use."""
    critic = spec.critic
    estimator = spec.algorithm.adv_estimator
    if spec.trains_critic:
        if critic.enable is False:
            message = "gae compares rewards with a critic's values, and there would be no critic"
            fix = "leave it out, or use rloo, grpo or reinforce_plus_plus, which need none"
            yield error("critic.enable", message, fix)
        return
    for key, is_set in {"enable": critic.enable is True, "path": critic.path is not None}.items():
        if is_set:
            message = f"the spec names a critic, but {estimator} reads no values"
            yield error(f"critic.{key}", message, f"{LEAVE_OUT}, or set algorithm.adv_estimator: gae")
    if spec.trainer.critic_warmup:
        yield error("trainer.critic_warmup", f"{estimator} has no critic to warm up", LEAVE_OUT)


@spec_check
def critic_batch_is_whole(spec: RunSpec) -> Problems:
    """Rows are assigned to ranks by the actor's mini-batches; the critic's must consist of whole ones."""
    mini = spec.critic_mini_batch_size
    batch, actor = fitting_batch(spec)
    if not spec.trains_critic or not spec.critic.ppo_mini_batch_size:
        return
    if mini % actor or batch % mini:
        message = (
            f"{mini} prompts must be a multiple of the actor's mini-batch ({actor}) that divides {batch}"
        )
        possible = [str(size) for size in range(actor, batch + 1, actor) if batch % size == 0]
        fix = f"use {' or '.join(possible)}, or leave it out" if possible else LEAVE_OUT
        yield error("critic.ppo_mini_batch_size", message, fix)


@spec_check
def kl_is_consistent(spec: RunSpec) -> Problems:
    """At most one KL penalty, with a non-zero coefficient; a reference policy only with a penalty."""
    in_loss = spec.actor.use_kl_loss
    in_reward = spec.algorithm.use_kl_in_reward
    control = spec.algorithm.kl_ctrl
    if in_reward and in_loss:
        message = "KL is in the loss and in the reward: it is penalised twice"
        yield warning("actor.use_kl_loss", message, "keep one of the two")
    zero = "at 0 the KL penalty costs a forward pass and has no effect"
    if in_reward and control.kl_coef == 0:
        yield error("algorithm.kl_ctrl.kl_coef", zero, "0.001 is usual")
    if in_loss and spec.actor.kl_loss_coef == 0:
        yield error("actor.kl_loss_coef", zero, "0.001 is usual")
    if spec.ref.path is not None and not spec.needs_reference:
        message = "a reference policy without a KL penalty is never read"
        fix = f"{LEAVE_OUT}, or set actor.use_kl_loss: true or algorithm.use_kl_in_reward: true"
        yield error("ref.path", message, fix)
    if control.type == "adaptive" and not in_reward:
        message = "an adaptive coefficient controls the KL in the reward, which is off"
        fix = f"{LEAVE_OUT}, or set algorithm.use_kl_in_reward: true"
        yield error("algorithm.kl_ctrl.type", message, fix)
    if "rollout_log_probs" in KL_ESTIMATORS.part(spec.algorithm.kl_penalty).needs:
        message = (
            f"{spec.algorithm.kl_penalty} is a loss: its gradient passes through the ratio, a reward has none"
        )
        yield error("algorithm.kl_penalty", message, "use k1")
    if in_reward and spec.algorithm.kl_penalty in {"k2", "k3"}:
        message = (
            f"in the reward, {spec.algorithm.kl_penalty} does not have the KL's gradient on average: "
            "near the reference it hardly holds the policy there, and not in the direction of the KL"
        )
        yield warning("algorithm.kl_penalty", message, "use k1")
    if in_loss and spec.actor.kl_loss_type == "k1":
        message = "as a loss, k1 has a gradient of zero on average: it adds noise and does not bound the KL"
        yield warning("actor.kl_loss_type", message, "use k2, k3, unbiased or sequence")


@spec_check
def embedded_is_the_policys(spec: RunSpec) -> Problems:
    """Critic and reference select the built-in model by null, not by its name."""
    for key, path in other_models(spec).items():
        if path == EMBEDDED:
            fix = "leave it out: null means the policy's own model"
            if key in {model.key for model in further_models(spec)}:
                fix = "name the `model` directory of a run's checkpoint"
            yield error(key, "the built-in model has no directory to name", fix)


@spec_check
def params_fit(spec: RunSpec) -> Problems:
    """A registered loss or estimator takes only the parameters that it declares."""
    algorithm = spec.algorithm
    correction = spec.algorithm.rollout_correction
    key = f"{CORRECTION}loss_params"
    yield from param_problems(POLICY_LOSSES, correction.loss_type, key, correction.loss_params)
    key = "algorithm.adv_params"
    yield from param_problems(ADVANTAGE_ESTIMATORS, algorithm.adv_estimator, key, algorithm.adv_params)


@spec_check
def gspo_clip_is_narrow(spec: RunSpec) -> Problems:
    """GSPO's ratio is a geometric mean over the response: a clip meant for token ratios never binds."""
    actor = spec.actor
    if spec.algorithm.rollout_correction.loss_type != "gspo":
        return
    both = actor.clip_ratio_low and actor.clip_ratio_high
    clips = (actor.clip_ratio_low, actor.clip_ratio_high, None if both else actor.clip_ratio)
    for key, clip in zip((*_CLIPS, "actor.clip_ratio"), clips, strict=True):
        if clip is not None and clip >= 0.05:
            message = (
                f"{clip:g} bounds a geometric mean over the whole response, which rarely changes that much"
            )
            yield warning(
                key,
                message,
                "set actor.clip_ratio_low: 3e-4 and actor.clip_ratio_high: 4e-4, as in the paper",
            )


@spec_check
def weights_are_only_measured(spec: RunSpec) -> Problems:
    """In bypass mode the loss's own ratio is π_θ/π_rollout; a weight on top would count it twice."""
    correction = spec.algorithm.rollout_correction
    if correction.bypass_mode and _has_ratio(spec) and correction.rollout_is:
        message = f"the ratio of {correction.loss_type} is the correction here, so IS weights (and their "
        message += "normalisation) are measured, not applied; rejection does apply"
        fix = (
            "set rollout_is: null to state this, or bypass_mode: false or loss_type: reinforce to apply them"
        )
        yield warning(_IS, message, fix)


@spec_check
def bypass_drifts(spec: RunSpec) -> Problems:
    """In bypass mode only IS and RS correct for the change of the policy within a batch."""
    if not spec.algorithm.rollout_correction.bypass_mode:
        return
    epochs = spec.actor.ppo_epochs
    steps = spec.data.train_batch_size // spec.ppo_mini_batch_size
    if epochs > 1:
        message = f"{epochs} passes in bypass mode: π_old stays the sampling policy while π_θ changes, "
        message += "so every pass is further off-policy than the one before"
        fix = "set algorithm.rollout_correction.bypass_mode: false, or ppo_epochs: 1"
        yield warning("actor.ppo_epochs", message, fix)
    elif steps > 1 and not _is_corrected(spec) and not _has_ratio(spec):
        message = f"{steps} steps per batch, and from the second on nothing corrects for the policy's change"
        fix = "set rollout_is: sequence, or ppo_mini_batch_size: null for one step per batch"
        yield warning("actor.ppo_mini_batch_size", message, fix)


@spec_check
def staleness_is_corrected(spec: RunSpec) -> Problems:
    """Stale data without correction optimise the wrong objective.

    In measurements on the built-in model, runs with sequence weights alone ended with lower rewards than runs
    with token weights or rejection; on SmolLM2-135M only rejection ended high on every seed
    (docs/evidence/off-policy.md).
    """
    rollout = spec.rollout
    correction = spec.algorithm.rollout_correction
    age, key = max((rollout.staleness, "rollout.staleness"), (rollout.max_staleness, "rollout.max_staleness"))
    if _has_ratio(spec) and correction.bypass_mode:  # its ratio is that to the sampling policy
        return
    is_product = correction.rollout_is == "sequence" and not correction.rollout_rs
    if rollout.max_staleness > 1 and is_product and not _has_ratio(spec):
        message = f"responses are up to {age} batches old; with such data, runs of the built-in model with "
        message += "sequence weights alone ended below those with token weights or rejection"
        yield warning(key, message, "set rollout_is: token, or reject responses with rollout_rs")
    elif age and not _is_corrected(spec):
        message = f"responses are up to {age} batches old and nothing corrects for it"
        fix = "set rollout_is: token or rollout_rs, unless you study uncorrected training"
        yield warning(key, message, fix)


@spec_check
def decoupled_reinforce_repeats(spec: RunSpec) -> Problems:
    """Decoupled weights are computed before the first update; REINFORCE has no ratio to later ones."""
    epochs = spec.actor.ppo_epochs
    if epochs > 1 and not spec.algorithm.rollout_correction.bypass_mode and not _has_ratio(spec):
        message = (
            f"{epochs} passes of decoupled reinforce: the loss has no ratio, so nothing corrects for the "
        )
        message += "updates of the earlier passes"
        yield warning("actor.ppo_epochs", message, "set loss_type: ppo_clip, or ppo_epochs: 1")
