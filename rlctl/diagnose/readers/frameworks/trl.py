"""TRL (GRPO, RLOO, asynchronous GRPO) on Hugging Face's trainer.

Sources: TRL 1.16 `trainer/grpo_trainer.py`, `trainer/rloo_trainer.py`, `experimental/async_grpo/`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from rlctl.diagnose.readers.framework import Config, Dialect, Lookup, Named, product
from rlctl.diagnose.table import Facts, Level

_WEIGHTS = (
    "of the truncated or masked weights (masked ones zero); sequence-level ones are products of tokens'"
)
_WHOLE_LOSS = "the whole loss, KL and entropy terms included"

_NAMES = {
    "policy_loss": Named("actor/pg_loss", "the loss before the entropy bonus, KL term included"),
    "loss": Named("actor/pg_loss", _WHOLE_LOSS),
    "grad_norm": Named("actor/grad_norm", "of the logged step's last update"),
    "learning_rate": Named("actor/lr"),
    "entropy": Named("actor/entropy"),
    "kl": Named("actor/kl_loss", "to the reference, in the loss or (RLOO) in the reward"),
    "clip_ratio/region_mean": Named(
        "actor/pg_clipfrac", "share of tokens, or of sequences with sequence ratios"
    ),
    "clip_ratio": Named("actor/pg_clipfrac", "the older name"),
    "reward": Named("critic/score/mean", "mean of the weighted sum of all rewards"),
    "reward_std": Named("critic/score/std"),
    "frac_reward_zero_std": Named(
        "reward/zero_spread_groups", "share of samples whose group has equal rewards"
    ),
    "completions/mean_length": Named("response_length/mean"),
    "completion_length": Named("response_length/mean", "the older name"),
    "completions/max_length": Named("response_length/max"),
    "completions/min_length": Named("response_length/min"),
    "completions/clipped_ratio": Named(
        "response_length/clip_ratio", "share of completions without an end-of-sequence token"
    ),
    "sampling/sampling_logp_difference/mean": Named("mismatch/log_prob_abs_diff_mean"),
    "sampling/sampling_logp_difference/max": Named("mismatch/log_prob_abs_diff_max"),
    **{
        f"sampling/importance_sampling_ratio/{which}": Named(
            f"rollout_corr/rollout_is_{which}", f"{which} {_WEIGHTS}"
        )
        for which in ("mean", "max", "min")
    },
    "step_time": Named("timing_s/step"),
}

#: Asynchronous GRPO has no reference and no π_old: its ratio and its KL are to the sampler.
_LATEST = "π_train is the policy being updated: staleness and progress are part of it"
_ASYNC_NAMES = {
    **_NAMES,
    "kl": Named("rollout_corr/k3_kl", _LATEST),
    "ratio": Named("rollout_corr/rollout_is_raw_mean", _LATEST),
    "sample/staleness_mean": Named("training/staleness_mean"),
    "sample/staleness_max": Named("training/staleness_max"),
    "sample/dropped_stale_total": Named("training/stale_dropped"),
    "perf/step_s": Named("timing_s/step"),
}

_PATTERNS = (
    (re.compile(r"eval[_/]reward"), Named("val/eval/reward_mean", "mean reward on the evaluation data")),
    (
        re.compile(r"eval[_/](\w+)_reward"),
        Named(r"val/\1/reward_mean", "mean reward on this evaluation data"),
    ),
    (re.compile(r"rewards/(.+)/mean"), Named(r"reward/\1/mean")),
)

_LEVELS: dict[str, Level] = {"token": "token", "sequence": "sequence"}


def _facts(config: Config) -> Facts:
    get = Lookup(config)
    if not get.has("num_generations"):
        return Facts()
    accumulation, per_batch = get.whole("gradient_accumulation_steps"), get.whole("steps_per_generation")
    epochs, group = get.whole("num_iterations"), get.whole("num_generations")
    corrects = get.flag("use_vllm") and get.flag("vllm_importance_sampling_correction")
    mode = (get.text("vllm_importance_sampling_mode") or "").partition("_")[0]
    bound = get.number("vllm_importance_sampling_clip_max") or get.number("vllm_importance_sampling_cap")
    dtype = next((name for name in ("bf16", "fp16") if get.flag(name)), None)
    return Facts(
        updates_per_batch=product(
            max(1, per_batch // accumulation) if per_batch and accumulation else None, epochs
        ),
        ppo_epochs=epochs,
        rollout_is=_LEVELS.get(mode) if corrects else ("off" if corrects is False else None),
        rollout_is_threshold=bound,
        batch_size=get.whole("generation_batch_size"),
        group_size=group,
        max_response_length=get.whole("max_completion_length"),
        kl_coef=get.number("beta"),
        dtype=dtype or ("fp32" if get.flag("bf16") is False else None),
        lr=get.number("learning_rate"),
    )


_MARKS = (
    r"completions/|frac_reward_zero_std|sampling/|clip_ratio/|rewards/.+/(?:mean|std)|eval_\w+|reward_std"
    r"|completion_length|num_tokens|step_time"
)

DIALECT = Dialect(
    framework="trl",
    marks=re.compile(_MARKS),
    names=_NAMES,
    patterns=_PATTERNS,
    prefix="train/",
    always=Facts(
        bypass_mode=False,
        has_critic=False,
        rollout_rs="off",
        ess_after_truncation=True,
        weights_are="applied",
    ),
    facts=_facts,
)

ASYNC = replace(
    DIALECT,
    marks=re.compile(_MARKS + r"|sample/|batch/|rollout/\w+_s$"),
    names=_ASYNC_NAMES,
    always=replace(DIALECT.always, bypass_mode=True, ppo_epochs=1, rollout_is="off", kl_coef=0.0),
)
