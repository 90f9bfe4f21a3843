"""Fixes: changes of the spec, with the same change in other frameworks' keys, and manual actions.

A change is offered unless the run is known to have it already. Functions of the run yield nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.diagnose.finding import Fix
from rlctl.diagnose.table import RunLog

RC = "algorithm.rollout_correction."
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_TRL_IS, _OPENRLHF_IS = "vllm_importance_sampling_", "--algo.advantage.is_correction_"
_NEMO_IS, _SWIFT_IS = "loss_fn.truncated_importance_sampling_", "--rollout_importance_sampling_"
_NEMO_MASK, _NEMO_TRUNCATE = (
    f"loss_fn.use_importance_sampling_correction=true {_NEMO_IS}type={kind}" for kind in ("icepop", "tis")
)

#: rlctl's key → the same setting in each of `_FRAMEWORKS`, `–` where there is none. The keys of rollout
#: correction are the same in verl. LLaMA-Factory and ms-swift use TRL's keys.
_FRAMEWORKS = ("verl", "trl", "openrlhf", "slime", "nemo-rl", "prime-rl", "skyrl", "areal")
KEYS = {
    "actor.lr":
        f"{_ACTOR}optim.lr learning_rate --actor.adam.lr --lr policy.optimizer.kwargs.lr "
        "trainer.optim.lr trainer.policy.optimizer_config.lr actor.optimizer.lr",
    "actor.ppo_epochs":
        f"{_ACTOR}ppo_epochs num_iterations --train.max_epochs – – – trainer.update_epochs_per_batch",
    "actor.grad_clip":
        f"{_ACTOR}optim.clip_grad max_grad_norm --actor.max_norm --clip-grad policy.max_grad_norm "
        "trainer.optim.max_norm trainer.policy.optimizer_config.max_grad_norm "
        "actor.optimizer.gradient_clipping",
    "actor.clip_ratio_high":
        f"{_ACTOR}clip_ratio_high epsilon_high – --eps-clip-high loss_fn.ratio_clip_max – "
        "trainer.algorithm.eps_clip_high actor.eps_clip_higher",
    "actor.kl_loss_coef":
        f"{_ACTOR}kl_loss_coef beta --algo.kl.init_coef --kl-loss-coef "
        "loss_fn.reference_policy_kl_penalty – trainer.algorithm.kl_loss_coef actor.kl_ctl",
    "algorithm.kl_ctrl.kl_coef":
        "algorithm.kl_ctrl.kl_coef beta --algo.kl.init_coef --kl-coef – – "
        "trainer.algorithm.kl_loss_coef actor.kl_ctl",
    "actor.loss_agg_mode": f"{_ACTOR}loss_agg_mode",
    "rollout.n":
        f"{_ROLLOUT}n num_generations --rollout.n_samples_per_prompt --n-samples-per-prompt "
        "grpo.num_generations_per_prompt orchestrator.group_size generator.n_samples_per_prompt "
        "gconfig.n_samples",
    "rollout.temperature":
        f"{_ROLLOUT}temperature temperature --rollout.temperature --rollout-temperature "
        "policy.generation.temperature orchestrator.train.sampling.temperature "
        "generator.sampling_params.temperature gconfig.temperature",
    "data.max_response_length":
        "data.max_response_length max_completion_length --rollout.max_new_tokens "
        "--rollout-max-response-len policy.generation.max_new_tokens "
        "orchestrator.train.sampling.max_completion_tokens "
        "generator.sampling_params.max_generate_length gconfig.max_new_tokens",
    "critic.ppo_epochs": "critic.ppo_epochs",
    "trainer.critic_warmup": "trainer.critic_warmup – --critic.freezing_steps --num-critic-only-steps",
}  # fmt: skip


def _with_trls_users(others: dict[str, str]) -> dict[str, str]:
    """Adds LLaMA-Factory's keys and ms-swift's options, which are TRL's keys."""
    if "trl" not in others:
        return others
    options = ("--" + setting.replace("=", " ") for setting in others["trl"].split())
    return {"llama-factory": others["trl"], "ms-swift": " ".join(options)} | others


def _keys_elsewhere(key: str) -> dict[str, str]:
    """Framework → its key of the same setting."""
    if key.startswith(RC):
        return {"verl": key}
    keys = zip(_FRAMEWORKS, KEYS.get(key, "").split(), strict=False)
    return {framework: other for framework, other in keys if other != "–"}


def change(*settings: str, why: str = "", **others: str) -> Fix:
    """A fix of `key=value` settings that are applied together.

    `others`: framework → its settings, where renaming the keys is not enough.
    """
    pairs = [setting.partition("=")[::2] for setting in settings]
    renamed = {}
    for framework in _FRAMEWORKS:
        named = [(_keys_elsewhere(key).get(framework, ""), value) for key, value in pairs]
        if all(key for key, _ in named):
            renamed[framework] = " ".join(f"{key}{' ' if key[0] == '-' else '='}{v}" for key, v in named)
    return Fix(settings, why, _with_trls_users({**renamed, **others}))


def _correction(run: RunLog, *settings: str, why: str = "", swift: str, **others: str) -> Fix:
    """A change of rlctl's and verl's rollout correction; `swift`, `others`: the same in other frameworks.

    These correct the gap to π_old, so they do nothing where the loss has its ratio to the sampler.
    """
    elsewhere = {} if run.facts.bypass_mode else {**others, "ms-swift": swift}
    return change(*settings, why=why, **elsewhere)


def by_hand(why: str, **others: str) -> Fix:
    """An action that no setting of rlctl performs."""
    return Fix((), why, _with_trls_users(others))


def larger(key: str, why: str) -> Fix:
    """Advice to raise the value of a key, without a concrete value."""
    return Fix((), f"{why} (`{key}`)", _with_trls_users(_keys_elsewhere(key)))


def gentler(run: RunLog) -> Iterator[Fix]:
    """Fixes that reduce how far the policy moves between sampling and the last update on a batch."""
    yield from fresher(run, fully=False)
    epochs = run.facts.ppo_epochs or 1
    if epochs > 1:
        yield change("actor.ppo_epochs=1", why="sample more often")
    if (run.facts.updates_per_batch or 1) > epochs:
        yield change(
            "actor.ppo_mini_batch_size=null",
            why="one update per pass over the batch",
            verl=f"{_ACTOR}ppo_mini_batch_size=<data.train_batch_size>",
            trl="steps_per_generation=<gradient_accumulation_steps>",
            openrlhf="--train.batch_size <rollout.batch_size × rollout.n_samples_per_prompt>",
        )
    yield from slower(run)


def peak_rate(run: RunLog) -> float | None:
    """The peak learning rate, as configured or otherwise as logged; None where unknown, or 0."""
    logged = run.table.series("actor/lr").values
    return run.facts.lr or (float(logged.max()) if len(logged) else None) or None


def slower(run: RunLog, by: float = 2.0) -> Iterator[Fix]:
    """Fix that divides the peak learning rate."""
    peak = peak_rate(run)
    fix = change(f"actor.lr={peak / by:.2g}") if peak else by_hand("lower the learning rate")
    yield replace(fix, of_updates=True)


def usual_rate(run: RunLog) -> Iterator[Fix]:
    """Fix that sets the model's default learning rate; without a spec, advice."""
    if run.spec is None:
        yield larger("actor.lr", "raise the learning rate")
        return
    from rlctl.spec.load import load_spec

    default = load_spec(overrides=[f"model.path={run.spec.model.path}"]).spec.actor.lr
    yield change(f"actor.lr={default:g}", why="the default")


def calmer(run: RunLog) -> Iterator[Fix]:
    """Fixes that make updates smaller: gradient clipping where it is off, and a lower learning rate."""
    if run.spec and run.spec.actor.grad_clip == 0.0:
        yield replace(change("actor.grad_clip=1.0"), of_updates=True)
    yield from slower(run)


def fresher(run: RunLog, *, fully: bool) -> Iterator[Fix]:
    """Fixes that allow no stale samples (`fully`), or half the staleness; none without a spec."""
    for name, fresh in (("max_staleness", 0), ("staleness", 0), ("sync_every", 1)):
        age = getattr(run.spec.rollout, name) if run.spec else fresh
        if age > fresh:
            yield change(f"rollout.{name}={fresh if fully else max(fresh, age // 2)}")


def reject_outliers(run: RunLog) -> Iterator[Fix]:
    """Fix that rejects responses with extreme tokens, unless a rejection criterion is configured."""
    if run.facts.rollout_rs in {None, "off"}:
        yield _correction(
            run,
            f"{RC}rollout_rs=token_k1",
            f"{RC}rollout_rs_threshold=0.6_1.6",
            why="reject responses with extreme tokens",
            trl=f"{_TRL_IS}mode=token_mask {_TRL_IS}clip_min=0.6 {_TRL_IS}clip_max=1.6",
            swift=f"{_SWIFT_IS}mode token_mask {_SWIFT_IS}threshold 1.6",
            openrlhf=f"{_OPENRLHF_IS}level token {_OPENRLHF_IS}mode mask {_OPENRLHF_IS}threshold 0.6 1.6",
            **{"nemo-rl": f"{_NEMO_MASK} {_NEMO_IS}ratio_min=0.6 {_NEMO_IS}ratio=1.6"},
        )


def wider_bound(run: RunLog) -> Iterator[Fix]:
    """Fix that raises the bound of the weights to 5 where it is lower or unknown, to truncate fewer."""
    if run.facts.rollout_is != "off" and (run.facts.rollout_is_threshold or 0.0) < 5.0:
        yield _correction(
            run,
            f"{RC}rollout_is_threshold=5",
            trl=f"{_TRL_IS}clip_max=5.0",
            swift=f"{_SWIFT_IS}threshold 5",
            openrlhf=f"{_OPENRLHF_IS}threshold 0.5 5",
            slime="--tis-clip 5",
            **{"nemo-rl": f"{_NEMO_IS}ratio=5"},
        )


def correct_tokens(run: RunLog) -> Iterator[Fix]:
    """Fix that enables importance weights per token where none are configured.

    In bypass mode only REINFORCE multiplies by the weights; for other losses the fix also turns bypass mode
    off.
    """
    if run.facts.rollout_is not in {None, "off"}:
        return
    loss = run.spec.algorithm.rollout_correction.loss_type if run.spec else ""
    only_measured = run.facts.bypass_mode and loss != "reinforce"
    yield _correction(
        run,
        *((f"{RC}bypass_mode=false",) if only_measured else ()),
        f"{RC}rollout_is=token",
        why="correct for the gap",
        trl=f"{_TRL_IS}correction=True {_TRL_IS}mode=token_truncate",
        swift=f"{_SWIFT_IS}mode token_truncate",
        openrlhf=f"{_OPENRLHF_IS}level token {_OPENRLHF_IS}mode clip",
        slime="--use-tis",
        skyrl="trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        **{"nemo-rl": f"{_NEMO_TRUNCATE} {_NEMO_IS}ratio=2"},
    )


def geometric(run: RunLog) -> Iterator[Fix]:
    """Fix with weights near 1 that do not grow with the response length (verl and TRL have none)."""
    if run.facts.rollout_is == "geometric":
        return
    settings = ("rollout_is=geometric", "rollout_is_bound=mask", "rollout_is_threshold=0.99_1.01")
    masked = f"{_OPENRLHF_IS}level seq {_OPENRLHF_IS}mode mask {_OPENRLHF_IS}threshold 0.99 1.01"
    keys = tuple(RC + setting for setting in settings)
    yield Fix(keys, "a weight that does not grow with the length", {"openrlhf": masked})


def same_precision(run: RunLog) -> Iterator[Fix]:
    """Fixes that run engine and trainer in the same precision, or in a higher one."""
    if run.spec and run.spec.rollout.dtype not in {None, run.spec.engine.dtype}:
        yield change("rollout.dtype=null", why="sample in the trainer's precision")
    if run.facts.dtype in {None, "bf16"}:
        yield change(
            "engine.dtype=fp32",
            why="higher precision (FP16 on both sides costs less, where available)",
            verl=f"{_ROLLOUT}dtype=float16 {_ACTOR}fsdp_config.dtype=float16",
            trl="bf16=False fp16=True",
        )


def larger_groups(run: RunLog) -> Iterator[Fix]:
    """Fix that doubles the responses per prompt, where their number is known."""
    if size := run.facts.group_size:
        yield change(f"rollout.n={2 * size}", why="larger groups")


def other_grader(run: RunLog) -> Iterator[Fix]:
    """The grader that the data names, where the run has another; otherwise advice."""
    if run.spec is not None and run.spec.reward.terms is None and run.spec.reward.name != "auto":
        yield change("reward.name=auto", why="the grader that the data names")
    yield by_hand("run the grader on stored rollouts")


#: For a gap between the two implementations.
FIND_THE_CAUSE = by_hand("compare the two engines: `rlctl diagnose mismatch --model PATH`")


def resume_before(step: int) -> Fix:
    """Advice to resume with weights from before the fault."""
    return replace(by_hand(f"resume from a checkpoint before step {step}"), of_updates=True)
