"""Logs of unknown origin: rlctl's own names, and the few plain ones that mean the same everywhere."""

from __future__ import annotations

import re

from rlctl.diagnose.readers.framework import Dialect, Named

_UNKNOWN = "by its name; how it is computed is not known"

#: Left out on purpose: `kl`, `ratio`, `clip_ratio` and others that mean five things.
_NAMES = {
    name: Named(key, _UNKNOWN)
    for key, names in {
        "actor/pg_loss": ("loss", "policy_loss", "pg_loss"),
        "actor/grad_norm": ("grad_norm", "gradient_norm"),
        "actor/entropy": ("entropy",),
        "actor/lr": ("lr", "learning_rate"),
        "critic/score/mean": ("reward", "reward_mean", "mean_reward", "reward/mean", "score"),
        "response_length/mean": ("response_length", "completion_length", "mean_response_length"),
    }.items()
    for name in names
}

DIALECT = Dialect(
    framework="unknown", marks=re.compile(r"(?!)"), names=_NAMES, prefix="train/", uses_ours=True
)
