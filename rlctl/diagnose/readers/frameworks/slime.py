"""slime and miles: `train/…` counts updates, `rollout/…`, `perf/…` and `eval/…` count rollouts.

Sources: slime 0.3 `backends/megatron_utils/loss.py`, `backends/megatron_utils/model.py`, `observability/`,
`examples/train_infer_mismatch_helper/mis.py`.
"""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Config, Dialect, Lookup, Named, product
from rlctl.diagnose.table import Facts

_PER_RESPONSE = "mean over responses of each one's mean over its tokens"
_CORR = "rollout_corr/"

#: What `mis.py` adds, with the prefix it is logged under.
_MISMATCH = {
    name: Named(f"{_CORR}{name}", _PER_RESPONSE)
    for name in (
        *("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl", "kl", "k3_kl"),
        *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"),
    )
}

_NAMES = {
    "train/pg_loss": Named("actor/pg_loss", _PER_RESPONSE),
    "train/entropy_loss": Named("actor/entropy", f"entropy before its coefficient, {_PER_RESPONSE}"),
    "train/pg_clipfrac": Named("actor/pg_clipfrac", _PER_RESPONSE),
    "train/ppo_kl": Named("actor/ppo_kl", _PER_RESPONSE),
    "train/kl_loss": Named("actor/kl_loss", _PER_RESPONSE),
    "train/grad_norm": Named("actor/grad_norm"),
    "train/lr-pg_0": Named("actor/lr"),
    "train/train_rollout_logprob_abs_diff": Named("mismatch/log_prob_abs_diff_mean", _PER_RESPONSE),
    "train/ois": Named("actor/ppo_ratio_mean", _PER_RESPONSE),
    "train/tis": Named(f"{_CORR}rollout_is_raw_mean", f"token ratios before their bound, {_PER_RESPONSE}"),
    "train/tis_clipfrac": Named(f"{_CORR}rollout_is_outside_fraction", _PER_RESPONSE),
    "train/mis_tis_weight_before_bound": Named(f"{_CORR}rollout_is_raw_mean", _PER_RESPONSE),
    "train/mis_is_ratio_mean_final": Named(f"{_CORR}rollout_is_mean", _PER_RESPONSE),
    **{
        f"train/mis_is_ratio_{end}_final": Named(
            f"{_CORR}rollout_is_{end}", f"mean over responses of each one's {end}"
        )
        for end in ("min", "max")
    },
    "train/mis_batch_norm_factor": Named(f"{_CORR}rollout_is_batch_norm_factor"),
    **{
        f"train/mis_rs_mask_fraction_{side}": Named(
            f"{_CORR}rollout_rs_masked_fraction", f"below and above the bounds, {_PER_RESPONSE}", adds=True
        )
        for side in ("low", "high")
    },
    **{f"train/mis_{name}": named for name, named in _MISMATCH.items()},
    **{f"train/mismatch_{name}": named for name, named in _MISMATCH.items()},
    "rollout/raw_reward": Named("critic/score/mean"),
    "rollout/rewards": Named("critic/rewards/mean", "after normalisation within the group"),
    "rollout/advantages": Named("critic/advantages/mean", _PER_RESPONSE),
    "rollout/response_len/mean": Named("response_length/mean"),
    "rollout/response_len/max": Named("response_length/max"),
    "rollout/response_len/min": Named("response_length/min"),
    "rollout/response_lengths": Named("response_length/mean"),
    "rollout/truncated_ratio": Named("response_length/clip_ratio"),
    "rollout/truncated": Named("response_length/clip_ratio"),
    "train/critic-grad_norm": Named("critic/grad_norm"),
    "train/critic-value_loss": Named("critic/vf_loss", "without the factor ½"),
    "train/critic-lr-pg_0": Named("critic/lr"),
    "perf/rollout_time": Named("timing_s/gen"),
    "perf/actor_train_time": Named("timing_s/update_actor"),
    "perf/update_weights_time": Named("timing_s/sync_weights"),
    "perf/step_time": Named("timing_s/step"),
    "perf/wait_time_ratio": Named("perf/trainer_idle_fraction"),
}

_PATTERNS = ((re.compile(r"eval/([^/]+?)(?<!-truncated_ratio)"), Named(r"val/\1/reward_mean")),)


def _facts(config: Config) -> Facts:
    get = Lookup(config)
    prompts, group = get.whole("rollout_batch_size"), get.whole("n_samples_per_prompt")
    if prompts is None or group is None:
        return Facts()
    corrects, estimator = get.flag("use_tis"), get.text("advantage_estimator")
    uses_kl = get.flag("use_kl_loss")
    dtype = next((name for name in ("bf16", "fp16") if get.flag(name)), None)
    return Facts(
        bypass_mode=get.flag("use_rollout_logprobs"),
        updates_per_batch=get.whole("num_steps_per_rollout"),
        rollout_is={True: None, False: "off", None: None}[corrects],
        rollout_is_threshold=get.number("tis_clip"),
        batch_size=product(prompts, group),
        group_size=group,
        has_critic=estimator == "ppo" if estimator else None,
        max_response_length=get.whole("rollout_max_response_len"),
        kl_coef=(get.number("kl_loss_coef") if uses_kl else get.number("kl_coef")),
        dtype=dtype,
        lr=get.number("lr"),
    )


DIALECT = Dialect(
    framework="slime",
    marks=re.compile(
        r"train/(?:train_rollout_logprob_abs_diff|tis|tis_\w+|ois|mis_.+|lr-pg_\d+|critic-.+|global_batch_size)"
        r"|rollout/(?:raw_reward|response_len/.+|response_lengths|truncated_ratio|zero_std/.+|repetition_frac)"
        r"|eval/.+-truncated_ratio"
    ),
    names=_NAMES,
    patterns=_PATTERNS,
    facts=_facts,
)
