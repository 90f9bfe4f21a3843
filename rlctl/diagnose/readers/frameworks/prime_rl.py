"""prime-rl: asynchronous, corrected by the ratio to the sampler; trainer and orchestrator log apart.

Sources: prime-rl 0.8 `trainer/rl/train.py`, `trainer/rl/loss.py`, `orchestrator/metrics.py`,
`monitors/file.py`.
"""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Dialect, Named
from rlctl.diagnose.table import Facts

_LATEST = "π_train is the policy being updated: staleness and progress are part of it"
_MASK = "share of tokens whose probability moved too far in their advantage's direction"
_BINARY = "groups whose rewards are all 0 or all 1"

_NAMES = {
    "mismatch_kl/all/mean": Named("rollout_corr/k3_kl", _LATEST),
    "mismatch_kl/mean": Named("rollout_corr/k3_kl", _LATEST),
    "is_masked/mean": Named("rollout_corr/rollout_rs_masked_fraction", _MASK),
    "importance_ratio/mean": Named("rollout_corr/rollout_is_raw_mean", _LATEST),
    "entropy/all/mean": Named("actor/entropy"),
    "entropy/mean": Named("actor/entropy"),
    "loss/mean": Named("actor/pg_loss", "the whole loss, its KL term included"),
    "optim/grad_norm": Named("actor/grad_norm"),
    "optim/lr": Named("actor/lr"),
    "off_policy/mean": Named("training/staleness_mean", "policy versions between sampling and training"),
    "off_policy/max": Named("training/staleness_max", "policy versions between sampling and training"),
    "off_policy/dropped": Named("training/stale_dropped"),
    "train/agg/all/has_error/mean": Named("rollout/error_fraction"),
    "error/mean": Named("rollout/error_fraction"),
    "reward/mean": Named("critic/score/mean"),
    "time/step": Named("timing_s/step"),
    # what the console calls them
    "Mismatch KL": Named("rollout_corr/k3_kl", _LATEST),
    "Entropy": Named("actor/entropy"),
    "Loss": Named("actor/pg_loss", "the whole loss, its KL term included"),
    "Grad. Norm": Named("actor/grad_norm"),
    "LR": Named("actor/lr"),
    "Reward": Named("critic/score/mean"),
    "Max Off-Policy": Named("training/staleness_max", "policy versions between sampling and training"),
    "Max. Off-Policy Level": Named("training/staleness_max", "policy versions between sampling and training"),
    "Error": Named("rollout/error_fraction"),
    "Truncation": Named("response_length/clip_ratio"),
    "Seq. Length": Named("response_length/mean", "prompt and response"),
}

_AGENT = r"train/agg/effective/[^/]+/"
_TRAINED = "of what was trained on"
_EQUAL = Named("reward/zero_spread_groups", _BINARY, adds=True)

_PATTERNS = (
    (re.compile(rf"{_AGENT}reward/(mean|max|min)"), Named(r"critic/score/\1", _TRAINED)),
    (re.compile(rf"{_AGENT}num_output_tokens/(mean|max|min)"), Named(r"response_length/\1", _TRAINED)),
    (re.compile(rf"{_AGENT}is_truncated/mean"), Named("response_length/clip_ratio", _TRAINED)),
    (re.compile(r"train/agg/all/[^/]+/solved_(?:none|all)"), _EQUAL),
    (re.compile(r"(?:batch/)?solve_(?:none|all)"), _EQUAL),
    (
        re.compile(r"eval/([^/]+)/(?:effective/[^/]+/)?avg@\d+"),
        Named(r"val/\1/reward_mean", "mean over several samples of a prompt"),
    ),
)

DIALECT = Dialect(
    framework="prime-rl",
    marks=re.compile(
        r"mismatch_kl/|optim/|off_policy/|kl_ent_ratio/|entropy/all/|is_masked(?:_low|_high)?/|progress/(?:tokens|tasks)"
        r"|train/agg/|Mismatch KL|Max\.? Off-Policy|Grad\. Norm|eval/.+avg@"
    ),
    names=_NAMES,
    patterns=_PATTERNS,
    always=Facts(bypass_mode=True, has_critic=False, weights_are="raw"),
)
