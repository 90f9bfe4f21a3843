"""verl (0.6 to 0.9): its names are mostly rlctl's, its correction metrics are computed otherwise.

Sources: verl 0.9 `trainer/ppo/rollout_corr_helper.py`, `trainer/ppo/metric_utils.py`, `trainer/ppo/v1/`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

from rlctl.diagnose.readers.framework import Config, Dialect, Lookup, Named, dtype_name, product
from rlctl.diagnose.table import Facts, Level

_CORR = "rollout_corr/"
_IS = f"{_CORR}rollout_is_"
_BOUNDED = "of the bounded weights, before rejection and normalisation; sequence weights count once per token"
_EXTREME = "of the bounded weights at token level, of the raw ones at sequence level"
_OLDER = "as an older verl computes it"
_BYPASS = "mean over micro-batches, each against the policy as it is updated"

_WEIGHTS = {
    f"{_IS}mean": Named(f"{_IS}mean", f"mean {_BOUNDED}"),
    f"{_IS}std": Named(f"{_IS}std", f"standard deviation {_BOUNDED}"),
    f"{_IS}eff_sample_size": Named(f"{_IS}eff_sample_size", f"effective sample size {_BOUNDED}"),
    f"{_IS}max": Named(f"{_IS}max", f"maximum {_EXTREME}"),
    f"{_IS}min": Named(f"{_IS}min", f"minimum {_EXTREME}"),
    f"{_IS}oob_ratio": Named(f"{_IS}outside_fraction"),
    f"{_IS}batch_norm_factor": Named(
        f"{_IS}batch_norm_factor", "the mean bounded weight, rejected samples included"
    ),
}

_NAMES = {
    **_WEIGHTS,
    **{
        f"actor/{name}": replace(named, meaning="; ".join(filter(None, (named.meaning, _BYPASS))))
        for name, named in _WEIGHTS.items()
    },
    "actor/entropy_loss": Named("actor/entropy", "the older name"),
    "response/aborted_ratio": Named("rollout/empty_fraction"),
    "fully_async/trainer/idle_ratio": Named("perf/trainer_idle_fraction"),
    **{
        f"training/off_policy/trajectory_staleness/{which}": Named(f"training/staleness_{which}")
        for which in ("mean", "max")
    },
}

_PATTERNS = (
    (
        re.compile(r"val-core/(.+)/(?:acc|reward|score)/mean@\d+"),
        Named(r"val/\1/reward_mean", "mean accuracy or score over several samples of a prompt"),
    ),
    (re.compile(r"val/test_score/(.+)"), Named(r"val/\1/reward_mean")),
    (re.compile(r"(?:actor/)?mismatch/mismatch_(.+)"), Named(rf"{_CORR}\1", _OLDER)),
    (re.compile(r"(?:actor/)?mismatch/(rollout_.+)"), Named(rf"{_CORR}\1", _OLDER)),
    (re.compile(r"actor/(rollout_corr/.+)"), Named(r"\1", _BYPASS)),
)


def _facts(config: Config) -> Facts:
    get = Lookup(config)
    actor, correction = "actor_rollout_ref.actor", "algorithm.rollout_correction"
    if not get.has(actor):
        return Facts()
    prompts, mini = get.whole("data.train_batch_size"), get.whole(f"{actor}.ppo_mini_batch_size")
    epochs, group = get.whole(f"{actor}.ppo_epochs"), get.whole("actor_rollout_ref.rollout.n")
    level = get.text(f"{correction}.rollout_is") or "off"
    threshold = str(get.get(f"{correction}.rollout_is_threshold")).rpartition("_")[2]
    estimator = get.text("algorithm.adv_estimator")
    return Facts(
        bypass_mode=bool(get.flag(f"{correction}.bypass_mode")),
        updates_per_batch=product(prompts // mini if prompts and mini else None, epochs),
        ppo_epochs=epochs,
        rollout_is=cast(Level, level) if level in {"token", "sequence", "off"} else None,
        rollout_is_threshold=Lookup({"threshold": threshold}).number("threshold"),
        rollout_rs=get.text(f"{correction}.rollout_rs") or "off",
        batch_size=product(prompts, group),
        group_size=group,
        has_critic=estimator == "gae" if estimator else None,
        max_response_length=get.whole("data.max_response_length"),
        kl_coef=_kl_coef(get),
        dtype=dtype_name(get.text(f"{actor}.fsdp_config.dtype") or get.text(f"{actor}.megatron.dtype")),
        lr=get.number(f"{actor}.optim.lr"),
        ess_length_weighted=level == "sequence",
    )


def _kl_coef(get: Lookup) -> float | None:
    in_loss, in_reward = (
        get.flag("actor_rollout_ref.actor.use_kl_loss"),
        get.flag("algorithm.use_kl_in_reward"),
    )
    if in_loss is None and in_reward is None:
        return None
    return max(
        (get.number("actor_rollout_ref.actor.kl_loss_coef") or 0.0) if in_loss else 0.0,
        (get.number("algorithm.kl_ctrl.kl_coef") or 0.0) if in_reward else 0.0,
    )


DIALECT = Dialect(
    framework="verl",
    marks=re.compile(
        r"(?:actor/)?mismatch/(?:mismatch|rollout)_|val-(?:core|aux)/|timing_per_token_ms/|global_seqlen/"
        r"|response(?:_length_non_aborted)?/(?:aborted_ratio|mean|clip_ratio)|fully_async/|num_turns/"
        r"|perf/(?:mfu/|cpu_memory_used_gb|max_memory_reserved_gb)|training/(?:off_policy|rollout_probs_diff_valid)"
        r"|rollout_corr/rollout_is_oob_ratio"
    ),
    names=_NAMES,
    patterns=_PATTERNS,
    uses_ours=True,
    always=Facts(ess_after_truncation=True, weights_are="applied", dialect="verl"),
    told_by=(
        # Logged where π_old is computed; in bypass mode the loss logs the correction instead.
        (re.compile(r"training/rollout_probs_diff_valid|perf/mfu/actor_infer"), Facts(bypass_mode=False)),
        (re.compile(r"actor/rollout_corr/"), Facts(bypass_mode=True)),
    ),
    facts=_facts,
)
