"""OpenRLHF with Ray (PPO, REINFORCE++, RLOO, GRPO).

Sources: OpenRLHF 0.9 `trainer/ppo_trainer.py`, `trainer/ray/ppo_actor.py`, `models/loss.py`.
"""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Config, Dialect, Lookup, Named
from rlctl.diagnose.table import Facts

_KL = "KL to the reference, in the loss or in the reward as configured, by the configured estimator"

_NAMES = {
    "policy_loss": Named("actor/pg_loss"),
    "actor_grad_norm": Named("actor/grad_norm", "of the batch's last update"),
    "actor_lr": Named("actor/lr"),
    "entropy_loss": Named("actor/entropy", "mean entropy, before its coefficient"),
    "ppo_kl": Named("actor/ppo_kl"),
    "ppo_clip_ratio": Named(
        "actor/pg_clipfrac", "share of tokens where the clipped objective is the smaller"
    ),
    "clip_ratio": Named("actor/pg_clipfrac", "the older name"),
    "vllm_kl": Named("rollout_corr/kl"),
    "kl": Named("actor/kl_loss", _KL),
    "rollout/reward_mean": Named("critic/score/mean"),
    "reward": Named("critic/score/mean", "length penalties included"),
    "rollout/reward_std": Named("critic/score/std"),
    "rollout/response_length_mean": Named("response_length/mean"),
    "response_length": Named("response_length/mean"),
    "rollout/truncated_rate": Named("response_length/clip_ratio"),
    "truncated": Named("response_length/clip_ratio"),
    "response_clip_ratio": Named("response_length/clip_ratio"),
    "critic_loss": Named("critic/vf_loss", "(V − return)² clipped, without the factor ½"),
    "critic_lr": Named("critic/lr"),
    "values": Named("critic/vpred_mean"),
    "timing/generation": Named("timing_s/gen"),
    "timing/step_total": Named("timing_s/step"),
    "timing/broadcast": Named("timing_s/sync_weights"),
}

_PATTERNS = (
    (
        re.compile(r"(?:eval/)?eval_(.+)_pass1"),
        Named(r"val/\1/reward_mean", "mean score, one sample counted"),
    ),
)


def _facts(config: Config) -> Facts:
    """From either generation of its arguments: sections with dots, or flat with underscores."""
    get = Lookup(config)
    group = get.whole("rollout.n_samples_per_prompt") or get.whole("n_samples_per_prompt")
    prompts = get.whole("rollout.batch_size") or get.whole("rollout_batch_size")
    if group is None or prompts is None:
        return Facts()
    mini = get.whole("train.batch_size") or get.whole("train_batch_size")
    epochs = get.whole("train.max_epochs") or get.whole("max_epochs")
    estimator = get.text("algo.advantage.estimator") or get.text("advantage_estimator")
    corrects = get.flag("algo.advantage.is_correction_enable")
    coefficient = get.number("algo.kl.init_coef")
    return Facts(
        updates_per_batch=max(1, prompts * group // mini) * epochs if mini and epochs else None,
        ppo_epochs=epochs,
        rollout_is={True: "token", False: "off", None: None}[corrects],
        batch_size=prompts * group,
        group_size=group,
        has_critic=estimator == "gae" if estimator else None,
        kl_coef=get.number("init_kl_coef") if coefficient is None else coefficient,
        lr=get.number("actor.adam.lr") or get.number("actor_learning_rate"),
    )


DIALECT = Dialect(
    framework="openrlhf",
    marks=re.compile(
        r"vllm_kl|ppo_clip_ratio|actor_(?:lr|grad_norm)|response_clip_ratio|group_reward_std|logprobs_diff"
        r"|rollout/(?:reward_mean|reward_std|truncated_rate|response_length_mean)"
        r"|timing/(?:make_experience|ppo_train|broadcast)|eval/eval_"
    ),
    names=_NAMES,
    patterns=_PATTERNS,
    prefix="train/",
    always=Facts(bypass_mode=False),
    facts=_facts,
)
