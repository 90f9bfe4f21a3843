"""Losses and metrics of three updates per case, in full precision: refactoring without fear.

    python -m tests.golden.first_updates      # writes first_updates.json anew, when a change is meant

The model is random and fixed by its seed, not the embedded one: that is trained where it is built, and
the last bits of 200 optimizer steps are the processor's own. What is left to differ between machines is
rounding, see `tolerance.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rlctl.train.update import update
from tests.models import tiny_model
from tests.unit.train.updates import CASES, PlainEngine, alone, settings_of

FILE = Path(__file__).with_suffix(".json")
KEYS = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/kl_loss",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_seq",
    "rollout_corr/rollout_is_raw_eff_sample_size",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_batch_norm_factor",
    "rollout_corr/rollout_rs_masked_fraction",
    "training/rollout_actor_probs_pearson_corr",
)


def figures() -> dict[str, list[dict[str, float]]]:
    """Case → metrics of three updates, each on a batch of its own."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, case in CASES.items():
        model = tiny_model()
        engine = PlainEngine(model)
        found[name] = []
        for step in range(3):
            batch = case.batch(tiny_model(), seed=step)  # sampled by the first policy: ever more off-policy
            if case.correction["bypass_mode"]:
                batch = replace(batch, old_log_probs=batch.rollout_log_probs)
            settings = settings_of(
                case.correction,
                epochs=case.epochs,
                mini_rows=case.mini_rows,
                micro_sequences=4,
                **case.options,
            )
            metrics = update(batch, engine, alone(), settings, lambda _: 0.05, 0).metrics
            found[name].append({key: metrics[key] for key in KEYS if key in metrics})
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(figures(), indent=1) + "\n")
    print(f"wrote {FILE}")
