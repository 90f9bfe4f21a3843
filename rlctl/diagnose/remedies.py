"""What can be tried: changes of the spec, with the same in other frameworks' keys, and things to do by hand.

A change is offered unless the run is known to be like that already.
"""

from __future__ import annotations

from rlctl.diagnose.finding import Remedy
from rlctl.diagnose.table import RunLog

RC = "algorithm.rollout_correction."
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."

#: rlctl's key → the same setting of others. The keys of rollout correction are verl's own.
_ELSEWHERE: dict[str, dict[str, str]] = {
    "actor.lr": {"verl": f"{_ACTOR}optim.lr", "trl": "learning_rate", "openrlhf": "--actor.adam.lr"},
    "actor.ppo_epochs": {
        "verl": f"{_ACTOR}ppo_epochs",
        "trl": "num_iterations",
        "openrlhf": "--train.max_epochs",
    },
    "actor.grad_clip": {"verl": f"{_ACTOR}grad_clip", "trl": "max_grad_norm"},
    "actor.clip_ratio_high": {"verl": f"{_ACTOR}clip_ratio_high", "trl": "epsilon_high"},
    "actor.kl_loss_coef": {
        "verl": f"{_ACTOR}kl_loss_coef",
        "trl": "beta",
        "openrlhf": "--algo.kl.init_coef",
    },
    "algorithm.kl_ctrl.kl_coef": {
        "verl": "algorithm.kl_ctrl.kl_coef",
        "trl": "beta",
        "openrlhf": "--algo.kl.init_coef",
    },
    "actor.loss_agg_mode": {"verl": f"{_ACTOR}loss_agg_mode"},
    "rollout.n": {
        "verl": f"{_ROLLOUT}n",
        "trl": "num_generations",
        "openrlhf": "--rollout.n_samples_per_prompt",
    },
    "rollout.temperature": {
        "verl": f"{_ROLLOUT}temperature",
        "trl": "temperature",
        "openrlhf": "--rollout.temperature",
    },
    "data.max_response_length": {
        "verl": "data.max_response_length",
        "trl": "max_completion_length",
        "openrlhf": "--rollout.max_new_tokens",
    },
    "critic.ppo_epochs": {"verl": "critic.ppo_epochs"},
    "trainer.critic_warmup": {"verl": "trainer.critic_warmup"},
}
_TRL_IS = "vllm_importance_sampling_"
OPENRLHF_IS = "--algo.advantage.is_correction_"


def change(*settings: str, why: str = "", **others: str) -> Remedy:
    """Settings `key=value` that belong together; other frameworks' words for them, where they are no mere
    renaming.
    """
    return Remedy(settings, why, {**_renamed(settings), **others})


def by_hand(why: str, **others: str) -> Remedy:
    """What no setting does."""
    return Remedy((), why, others)


def _renamed(settings: tuple[str, ...]) -> dict[str, str]:
    """The frameworks that have a key for every setting, and what to write there."""
    pairs = [setting.partition("=")[::2] for setting in settings]
    found = {}
    for framework in ("verl", "trl", "openrlhf"):
        keys = [_key_in(framework, key) for key, _ in pairs]
        equals = " " if framework == "openrlhf" else "="
        if all(keys):
            found[framework] = " ".join(
                f"{key}{equals}{value}" for key, (_, value) in zip(keys, pairs, strict=True)
            )
    return found


def _key_in(framework: str, key: str) -> str | None:
    if framework == "verl" and key.startswith(RC):
        return key
    return _ELSEWHERE.get(key, {}).get(framework)


# --- what more than one rule proposes -------------------------------------------------------------


def gentler(run: RunLog) -> tuple[Remedy, ...]:
    """Let the policy move less between sampling and the last update on a batch."""
    facts = run.facts
    remedies: tuple[Remedy, ...] = ()
    if facts.ppo_epochs is not None and facts.ppo_epochs > 1:
        remedies += (change("actor.ppo_epochs=1", why="regenerate more often"),)
    if facts.updates_per_batch is not None and facts.updates_per_batch > (facts.ppo_epochs or 1):
        one = change(
            "actor.ppo_mini_batch_size=null",
            why="one update per pass over the batch",
            verl=f"{_ACTOR}ppo_mini_batch_size=<data.train_batch_size>",
            trl="steps_per_generation=<gradient_accumulation_steps>",
            openrlhf="--train.batch_size <rollout.batch_size × rollout.n_samples_per_prompt>",
        )
        remedies += (one,)
    return (*remedies, slower(run))


def slower(run: RunLog) -> Remedy:
    """Half the peak learning rate, as configured or else as logged."""
    logged = run.table.series("actor/lr").values
    peak = run.facts.lr or (float(logged.max()) if len(logged) else None)
    return change(f"actor.lr={peak / 2:g}") if peak else by_hand("halve the learning rate")


def calmer(run: RunLog) -> tuple[Remedy, ...]:
    """Smaller steps."""
    clip = (change("actor.grad_clip=1.0"),) if run.spec and run.spec.actor.grad_clip == 0.0 else ()
    return (*clip, slower(run))


#: What lets samples be old, and its value for fresh ones.
_FRESH = {"max_staleness": 0, "staleness": 0, "sync_every": 1}


def fresher(run: RunLog, *, fully: bool) -> tuple[Remedy, ...]:
    """Samples of the newest weights, or half as old; nothing where nothing lets them be old, or tells."""
    if run.spec is None:
        return ()
    ages = {name: getattr(run.spec.rollout, name) for name in _FRESH}
    return tuple(
        change(f"rollout.{name}={_FRESH[name] if fully else max(_FRESH[name], age // 2)}")
        for name, age in ages.items()
        if age > _FRESH[name]
    )


def reject_outliers(run: RunLog) -> tuple[Remedy, ...]:
    """Leave responses with extreme tokens out, unless something is rejected already."""
    if run.facts.rollout_rs not in {None, "off"}:
        return ()
    return (
        change(
            f"{RC}rollout_rs=token_k1",
            f"{RC}rollout_rs_threshold=0.6_1.6",
            why="leave out responses with extreme tokens",
            trl=f"{_TRL_IS}mode=token_mask {_TRL_IS}clip_min=0.6 {_TRL_IS}clip_max=1.6",
            openrlhf=f"{OPENRLHF_IS}enable {OPENRLHF_IS}type icepop {OPENRLHF_IS}threshold 0.6 1.6",
        ),
    )


def wider_bound(run: RunLog) -> tuple[Remedy, ...]:
    """Cut fewer weights, where they are cut early."""
    threshold = run.facts.rollout_is_threshold
    if run.facts.rollout_is == "off" or (threshold is not None and threshold >= 5.0):
        return ()
    return (change(f"{RC}rollout_is_threshold=5", trl=f"{_TRL_IS}clip_max=5.0"),)


def correct_tokens(run: RunLog) -> tuple[Remedy, ...]:
    """Importance weights, where there are none. In bypass mode only REINFORCE multiplies by them."""
    if run.facts.rollout_is not in {None, "off"}:
        return ()
    correction = run.spec.algorithm.rollout_correction if run.spec else None
    only_measured = correction is not None and correction.bypass_mode and correction.loss_type != "reinforce"
    decoupled = (f"{RC}bypass_mode=false",) if only_measured else ()
    return (
        change(
            *decoupled,
            f"{RC}rollout_is=token",
            why="correct for the gap",
            trl=f"{_TRL_IS}correction=True {_TRL_IS}mode=token_truncate",
            openrlhf=f"{OPENRLHF_IS}enable {OPENRLHF_IS}type tis",
        ),
    )


def same_precision(run: RunLog) -> tuple[Remedy, ...]:
    """Engine and trainer in the same arithmetic, the more exact one."""
    remedies: tuple[Remedy, ...] = ()
    if run.spec and run.spec.rollout.dtype not in {None, run.spec.engine.dtype}:
        remedies += (change("rollout.dtype=null", why="sample in the trainer's precision"),)
    if run.facts.dtype in {None, "bf16"}:
        remedies += (
            change(
                "engine.dtype=fp32",
                why="more exact arithmetic (FP16 on both sides is cheaper, where there is the choice)",
                verl=f"{_ROLLOUT}dtype=float16 {_ACTOR}fsdp_config.dtype=float16",
                trl="bf16=False fp16=True",
            ),
        )
    return remedies


def guarded(run: RunLog) -> tuple[Remedy, ...]:
    """Let training itself act on these rules, unless it does."""
    if run.spec is None or run.spec.trainer.guardrails.mode == "act":
        return ()
    return (change("trainer.guardrails.mode=act", why="let training hold back updates like these"),)


def find_the_cause() -> Remedy:
    """Of a gap between two implementations."""
    return by_hand("compare the two engines: `rlctl diagnose mismatch --model PATH`")


def before(step: int) -> Remedy:
    """Back to where it was well."""
    return by_hand(f"go on from a checkpoint of before step {step}")
