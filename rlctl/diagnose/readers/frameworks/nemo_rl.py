"""NeMo-RL (GRPO): TensorBoard, W&B, or the JSON its log dump writes, metric → step → value.

Sources: NeMo-RL 0.6 `algorithms/loss/loss_functions.py`, `algorithms/grpo.py`, `experience/rollouts.py`.
"""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Config, Dialect, Lookup, Named, dtype_name, product
from rlctl.diagnose.table import Facts

_SUMMED = "mean per update; where the number of updates per batch is not known, their sum"

_NAMES = {
    "gen_kl_error": Named("rollout_corr/k3_kl", _SUMMED, over_updates=True),
    "token_mult_prob_error": Named("mismatch/token_mult_prob_error", _SUMMED, over_updates=True),
    "js_divergence_error": Named("mismatch/js_divergence", _SUMMED, over_updates=True),
    "sampling_importance_ratio": Named(
        "rollout_corr/rollout_is_mean", f"of the bounded weights; {_SUMMED}", over_updates=True
    ),
    "is_oob_ratio": Named("rollout_corr/rollout_is_outside_fraction", _SUMMED, over_updates=True),
    "probs_ratio": Named("actor/ppo_ratio_mean", _SUMMED, over_updates=True),
    "loss": Named("actor/pg_loss", f"the whole loss, KL term included; {_SUMMED}", over_updates=True),
    "kl_penalty": Named("actor/kl_loss", _SUMMED, over_updates=True),
    "approx_entropy": Named(
        "actor/entropy", f"estimated from the sampled tokens' log-probs; {_SUMMED}", over_updates=True
    ),
    "grad_norm": Named("actor/grad_norm", _SUMMED, over_updates=True),
    "lr": Named("actor/lr"),
    "reward": Named("critic/score/mean"),
    "mean_total_reward": Named("critic/score/mean"),
    "max_total_reward": Named("critic/score/max"),
    "min_total_reward": Named("critic/score/min"),
    **{f"advantages/{which}": Named(f"critic/advantages/{which}") for which in ("mean", "max", "min")},
    **{
        f"baseline_reward/pct_{which}": Named(
            "reward/zero_spread_groups", "groups whose mean reward is 0 or 1", scale=0.01, adds=True
        )
        for which in (0, 1)
    },
    "mean_gen_tokens_per_sample": Named("response_length/mean"),
    "max_gen_tokens_per_sample": Named("response_length/max"),
    "truncation_rate": Named("response_length/clip_ratio"),
    "mean_prompt_length": Named("prompt_length/mean"),
    "avg_trajectory_age": Named("training/staleness_mean"),
    "validation/accuracy": Named("val/validation/reward_mean"),
    "timing/train/generation": Named("timing_s/gen"),
    "timing/train/policy_training": Named("timing_s/update_actor"),
    "timing/train/total_step_time": Named("timing_s/step"),
    # what the console calls them
    "Loss": Named("actor/pg_loss", f"the whole loss, KL term included; {_SUMMED}", over_updates=True),
    "Generation KL Error": Named("rollout_corr/k3_kl", _SUMMED, over_updates=True),
    "Avg Reward": Named("critic/score/mean"),
    "Mean Generation Length": Named("response_length/mean"),
}


def _facts(config: Config) -> Facts:
    get = Lookup(config)
    prompts, group = get.whole("grpo.num_prompts_per_step"), get.whole("grpo.num_generations_per_prompt")
    if prompts is None or group is None:
        return Facts()
    mini, corrects = (
        get.whole("policy.train_global_batch_size"),
        get.flag("loss_fn.use_importance_sampling_correction"),
    )
    level = "sequence" if get.flag("loss_fn.sequence_level_importance_ratios") else "token"
    return Facts(
        updates_per_batch=max(1, prompts * group // mini) if mini else None,
        ppo_epochs=1,
        rollout_is=None if corrects is None else (level if corrects else "off"),  # type: ignore[arg-type]
        rollout_is_threshold=get.number("loss_fn.truncated_importance_sampling_ratio"),
        batch_size=product(prompts, group),
        group_size=group,
        max_response_length=get.whole("policy.generation.max_new_tokens"),
        kl_coef=get.number("loss_fn.reference_policy_kl_penalty"),
        dtype=dtype_name(get.text("policy.precision")),
        lr=get.number("policy.optimizer.kwargs.lr") or get.number("policy.megatron_cfg.optimizer.lr"),
    )


DIALECT = Dialect(
    framework="nemo-rl",
    marks=re.compile(
        r"gen_kl_error|policy_kl_error|js_divergence_error|token_mult_prob_error|sampling_importance_ratio"
        r"|probs_ratio\w*|approx_entropy|global_valid_\w+|is_oob_ratio|baseline_reward/|\w+_mult_prob_error\w*"
        r"|performance/|timing/train/|Generation KL Error|Mean Generation Length|mean_gen_tokens_per_sample"
    ),
    names=_NAMES,
    prefix="train/",
    always=Facts(bypass_mode=False, weights_are="applied"),
    facts=_facts,
)
