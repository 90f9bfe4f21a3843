"""Contradictions within the algorithm: estimator, loss, KL, critic, and the two modes of correction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

from rlctl.errors import Problem
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, Part
from rlctl.spec.model import EMBEDDED
from rlctl.spec.parts import param_problems
from rlctl.spec.run_spec import RunSpec

Check = Callable[[RunSpec], list[Problem]]

_CORRECTION = "algorithm.rollout_correction."
_ESTIMATOR = "algorithm.adv_estimator"
_LOSS_OPTIONS = (
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.clip_ratio_c",
    "actor.tau_pos",
    "actor.tau_neg",
    "actor.dppo_divergence",
)


def groups_have_siblings(spec: RunSpec) -> list[Problem]:
    """Group estimators compare the responses of one prompt; a single one has nothing to be compared with."""
    estimator = spec.algorithm.adv_estimator
    if not spec.algorithm.estimator_needs("group_ids") or spec.rollout.n > 1:
        return []
    what = f"{estimator} with one response per prompt: every advantage would be zero or undefined"
    fix = "set rollout.n to 2 or more (5 to 16 is usual), or use reinforce_plus_plus, remax or gae"
    return [Problem("error", "rollout.n", what, fix)]


def discount_is_used(spec: RunSpec) -> list[Problem]:
    """`gamma` and `lam` belong to estimators with a time axis; the others score whole responses."""
    estimator = spec.algorithm.adv_estimator
    return _unread(spec, ADVANTAGE_ESTIMATORS.part(estimator), ("algorithm.gamma", "algorithm.lam"))


def critic_has_a_use(spec: RunSpec) -> list[Problem]:
    """Only `gae` reads values, and it cannot do without them."""
    critic, estimator = spec.critic, spec.algorithm.adv_estimator
    if spec.trains_critic:
        if critic.enable is False:
            what = "gae compares rewards with a critic's values, and there would be no critic"
            fix = "leave it out, or use rloo, grpo or reinforce_plus_plus, which need none"
            return [Problem("error", "critic.enable", what, fix)]
        return []
    asked = {"critic.enable": critic.enable is True, "critic.path": critic.path is not None}
    what = f"a critic is asked for, but {estimator} reads no values"
    fix = "set algorithm.adv_estimator: gae, or leave it out"
    problems = [Problem("error", key, what, fix) for key, is_asked in asked.items() if is_asked]
    if spec.trainer.critic_warmup:
        what = f"{estimator} has no critic to warm up"
        problems.append(Problem("error", "trainer.critic_warmup", what, "leave it out"))
    return problems


def critic_batch_is_whole(spec: RunSpec) -> list[Problem]:
    """The actor's mini-batches say which rank has which rows; the critic's must be made of whole ones."""
    mini, actor, batch = spec.critic_mini_batch_size, spec.ppo_mini_batch_size, spec.data.train_batch_size
    if not spec.trains_critic or not spec.critic.ppo_mini_batch_size:
        return []
    if mini % actor == 0 and batch % mini == 0:
        return []
    what = f"{mini} prompts are no whole number of the actor's mini-batches ({actor}) that divides {batch}"
    possible = [size for size in range(actor, batch + 1, actor) if batch % size == 0]
    fix = f"use {' or '.join(map(str, possible))}, or leave it out" if possible else "leave it out"
    return [Problem("error", "critic.ppo_mini_batch_size", what, fix)]


def warmup_leaves_training(spec: RunSpec) -> list[Problem]:
    """A run that only ever warms up its critic never changes the policy."""
    total, warmup = spec.trainer.total_training_steps, spec.trainer.critic_warmup
    if not spec.trains_critic or total is None or warmup < total:
        return []
    what = f"all {total} batches train the critic alone, the policy never changes"
    return [Problem("error", "trainer.critic_warmup", what, f"use less than {total}")]


def kl_is_meant(spec: RunSpec) -> list[Problem]:
    """A KL penalty needs a coefficient, a reference a penalty, and one penalty is enough."""
    algorithm, actor = spec.algorithm, spec.actor
    problems = []
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        what = "KL is in the loss and in the reward: it is penalised twice"
        problems.append(Problem("warning", "actor.use_kl_loss", what, "keep one of the two"))
    coefficients = {
        "algorithm.kl_ctrl.kl_coef": algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0,
        "actor.kl_loss_coef": actor.use_kl_loss and actor.kl_loss_coef == 0,
    }
    problems += [
        Problem("error", key, "at 0 the KL penalty does nothing but cost a forward pass", "0.001 is usual")
        for key, is_zero in coefficients.items()
        if is_zero
    ]
    if spec.ref.path is not None and not spec.needs_reference:
        what = "a reference policy without a KL penalty is never read"
        fix = "set actor.use_kl_loss: true or algorithm.use_kl_in_reward: true, or leave it out"
        problems.append(Problem("error", "ref.path", what, fix))
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        what = "an adaptive coefficient steers the KL in the reward, which is off"
        fix = "set algorithm.use_kl_in_reward: true, or leave it out"
        problems.append(Problem("error", "algorithm.kl_ctrl.type", what, fix))
    unused = {
        "actor.kl_loss_coef": (actor.use_kl_loss, "actor.use_kl_loss"),
        "actor.kl_loss_type": (actor.use_kl_loss, "actor.use_kl_loss"),
        "algorithm.kl_penalty": (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward"),
        "algorithm.kl_ctrl.kl_coef": (algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward"),
    }
    problems += [
        Problem("warning", key, f"has no effect: {switch} is false", f"set {switch}: true, or leave it out")
        for key, (is_on, switch) in unused.items()
        if not is_on and _value(spec, key) != _value(RunSpec(), key)
    ]
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        what = "as a loss, k1's gradient is zero on average: it adds noise and no pull to the reference"
        problems.append(Problem("warning", "actor.kl_loss_type", what, "use k2, k3, unbiased or sequence"))
    return problems


def _value(spec: RunSpec, key: str) -> object:
    return reduce(getattr, key.split("."), spec)


def embedded_is_the_policys(spec: RunSpec) -> list[Problem]:
    """Critic and reference start from the built-in model by themselves where the policy does."""
    what = "the built-in model is no directory to name"
    fix = "leave it out: null means the policy's own model"
    paths = {"critic.path": spec.critic.path, "ref.path": spec.ref.path}
    return [Problem("error", key, what, fix) for key, path in paths.items() if path == EMBEDDED]


def clips_are_used(spec: RunSpec) -> list[Problem]:
    """Numbers of a loss that is not chosen change nothing."""
    loss = POLICY_LOSSES.part(spec.algorithm.rollout_correction.loss_type)
    return _unread(spec, loss, _LOSS_OPTIONS)


def _unread(spec: RunSpec, part: Part, keys: Iterable[str]) -> list[Problem]:
    """A warning for each key that was changed and that this part does not read."""
    return [
        Problem("warning", key, f"has no effect with {part.name}", "leave it out")
        for key in keys
        if key not in part.options and _value(spec, key) != _value(RunSpec(), key)
    ]


def _has_ratio(spec: RunSpec) -> bool:
    return "old_log_probs" in POLICY_LOSSES.part(spec.algorithm.rollout_correction.loss_type).needs


def params_fit(spec: RunSpec) -> list[Problem]:
    """Parameters of a registered loss or estimator are those that it declares."""
    algorithm, correction = spec.algorithm, spec.algorithm.rollout_correction
    return [
        *param_problems(
            POLICY_LOSSES, correction.loss_type, f"{_CORRECTION}loss_params", correction.loss_params
        ),
        *param_problems(
            ADVANTAGE_ESTIMATORS, algorithm.adv_estimator, "algorithm.adv_params", algorithm.adv_params
        ),
    ]


def gspo_clip_is_narrow(spec: RunSpec) -> list[Problem]:
    """GSPO's ratio is a geometric mean over the response: a token ratio's clip never binds on it."""
    actor = spec.actor
    if spec.algorithm.rollout_correction.loss_type != "gspo":
        return []
    clips = {
        "actor.clip_ratio_low": actor.clip_ratio_low,
        "actor.clip_ratio_high": actor.clip_ratio_high,
        "actor.clip_ratio": None if actor.clip_ratio_low and actor.clip_ratio_high else actor.clip_ratio,
    }
    what = "bounds a geometric mean over the whole response, which hardly ever moves that far"
    return [
        Problem("warning", key, f"{clip:g} {what}", "the paper's are 3e-4 below and 4e-4 above")
        for key, clip in clips.items()
        if clip is not None and clip >= 0.05
    ]


def bypass_drifts(spec: RunSpec) -> list[Problem]:
    """In bypass mode nothing but IS or RS stands between old samples and a policy that moved on."""
    correction, actor = spec.algorithm.rollout_correction, spec.actor
    if not correction.bypass_mode:
        return []
    if actor.ppo_epochs > 1:
        what = (
            f"{actor.ppo_epochs} passes in bypass mode: π_old stays the sampling policy while π_θ moves on, "
            "so every pass is further off-policy than the one before"
        )
        fix = "set algorithm.rollout_correction.bypass_mode: false, or ppo_epochs: 1"
        return [Problem("warning", "actor.ppo_epochs", what, fix)]
    steps = spec.data.train_batch_size // spec.ppo_mini_batch_size
    uncorrected = correction.rollout_is is None and not correction.rollout_rs
    if steps > 1 and uncorrected and not _has_ratio(spec):
        what = f"{steps} steps per batch, and from the second on nothing corrects for the policy's change"
        fix = "set rollout_is: sequence, or ppo_mini_batch_size: null for one step per batch"
        return [Problem("warning", "actor.ppo_mini_batch_size", what, fix)]
    return []


def staleness_is_corrected(spec: RunSpec) -> list[Problem]:
    """Stale data without any correction trains towards the wrong objective; sequence weights alone, which
    are small for most of it, learn slowly (docs/explanation/off-policy.md)."""
    correction = spec.algorithm.rollout_correction
    uncorrected = correction.rollout_is is None and not correction.rollout_rs
    rollout = spec.rollout
    age, key = max((rollout.staleness, "staleness"), (rollout.max_staleness, "max_staleness"))
    if _has_ratio(spec):
        return []
    if rollout.max_staleness > 1 and correction.rollout_is == "sequence" and not correction.rollout_rs:
        what = f"sequence weights alone learn slowly from responses that are up to {age} batches old"
        fix = "set bypass_mode: false and loss_type: ppo_clip in algorithm.rollout_correction"
        return [Problem("warning", f"rollout.{key}", what, fix)]
    if not age or not uncorrected:
        return []
    what = f"responses are up to {age} batches old and nothing corrects for it"
    fix = "set rollout_is: sequence, unless this is the point"
    return [Problem("warning", f"rollout.{key}", what, fix)]


def decoupled_reinforce_repeats(spec: RunSpec) -> list[Problem]:
    """Decoupled weights are fixed once per batch; REINFORCE has no ratio to notice later passes."""
    correction = spec.algorithm.rollout_correction
    if correction.bypass_mode or _has_ratio(spec) or spec.actor.ppo_epochs == 1:
        return []
    what = (
        f"{spec.actor.ppo_epochs} passes of decoupled reinforce: the weights are those of before the first "
        "update, so later passes follow an uncorrected gradient"
    )
    fix = "set loss_type: ppo_clip, or ppo_epochs: 1"
    return [Problem("warning", "actor.ppo_epochs", what, fix)]


def weights_measured_only(spec: RunSpec) -> list[Problem]:
    """In bypass mode the loss's own ratio already is π_θ/π_rollout; a weight on top would count it twice."""
    correction = spec.algorithm.rollout_correction
    if not correction.bypass_mode or not _has_ratio(spec) or not correction.rollout_is:
        return []
    what = (
        f"the ratio of {correction.loss_type} is the correction here, so IS weights (and their "
        "normalisation) are measured, not applied; rejection does apply"
    )
    fix = "set rollout_is: null to say so, or bypass_mode: false or loss_type: reinforce to apply them"
    return [Problem("warning", f"{_CORRECTION}rollout_is", what, fix)]


_BATCH = ("data.train_batch_size", "actor.ppo_mini_batch_size")
_MODE = (f"{_CORRECTION}bypass_mode", f"{_CORRECTION}loss_type")
_APPLIED = (f"{_CORRECTION}rollout_is", f"{_CORRECTION}rollout_rs")

#: Every contradiction of the algorithm and the keys it reads.
ALGORITHM_CHECKS: dict[Check, tuple[str, ...]] = {
    groups_have_siblings: (_ESTIMATOR, "rollout.n"),
    discount_is_used: (_ESTIMATOR, "algorithm.gamma", "algorithm.lam"),
    critic_has_a_use: (_ESTIMATOR, "critic.enable", "critic.path", "trainer.critic_warmup"),
    critic_batch_is_whole: (_ESTIMATOR, "critic.ppo_mini_batch_size", *_BATCH),
    warmup_leaves_training: (_ESTIMATOR, "trainer.critic_warmup", "trainer.total_training_steps"),
    kl_is_meant: (
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_ctrl.type",
        "actor.use_kl_loss",
        "actor.kl_loss_coef",
        "actor.kl_loss_type",
        "algorithm.kl_penalty",
        "ref.path",
    ),
    embedded_is_the_policys: ("critic.path", "ref.path"),
    clips_are_used: (f"{_CORRECTION}loss_type", *_LOSS_OPTIONS),
    params_fit: (_ESTIMATOR, f"{_CORRECTION}loss_type", "algorithm.adv_params", f"{_CORRECTION}loss_params"),
    gspo_clip_is_narrow: (
        f"{_CORRECTION}loss_type",
        "actor.clip_ratio",
        "actor.clip_ratio_low",
        "actor.clip_ratio_high",
    ),
    weights_measured_only: (*_MODE, f"{_CORRECTION}rollout_is"),
    bypass_drifts: (*_MODE, *_BATCH, *_APPLIED, "actor.ppo_epochs"),
    staleness_is_corrected: (*_MODE, *_APPLIED, "rollout.staleness", "rollout.max_staleness"),
    decoupled_reinforce_repeats: (*_MODE, "actor.ppo_epochs"),
}
