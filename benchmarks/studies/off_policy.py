"""Measures the effect of each correction on the embedded task with intentionally off-policy data.

    python benchmarks/studies/off_policy.py [--seeds 6-10] [--staleness 0,4,16] [--workers 2] [--memory FILE]

Every setting trains the same model on the same prompts with RLOO advantages. Settings differ in the age of
the responses (`rollout.staleness`), the precision of the sampling copy (`rollout.dtype`), and the correction.
Each method uses the best learning rate of `RATES` on `TUNING_SEEDS`; only runs with other seeds are reported.
The result of a run is the validation reward of its final policy, because the training reward at staleness k
is that of the policy k batches before. Writes `off_policy.md` and `off_policy.png`
(`pip install -e ".[bench]"`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all

_C = "algorithm.rollout_correction."
_NONE = (f"{_C}rollout_is=null", f"{_C}rollout_rs=null")
_SEQUENCE = (
    f"{_C}rollout_is=sequence",
    f"{_C}rollout_is_threshold=2.0",
    f"{_C}rollout_is_batch_normalize=true",
)

#: The compared corrections.
METHODS: dict[str, tuple[str, ...]] = {
    "none": _NONE,
    "token TIS": (
        f"{_C}rollout_is=token",
        f"{_C}rollout_is_threshold=2.0",
        f"{_C}rollout_is_bound=truncate",
        f"{_C}rollout_is_batch_normalize=false",
    ),
    "sequence IS": _SEQUENCE,
    "sequence IS + RS": (*_SEQUENCE, f"{_C}rollout_rs=token_k1", f"{_C}rollout_rs_threshold=0.5_2.0"),
    "geometric RS": (
        *_NONE[:1],
        f"{_C}dialect=verl",
        f"{_C}rollout_rs=seq_mean_k1",
        f"{_C}rollout_rs_threshold=0.8_1.25",
    ),
    "decoupled PPO": (*_SEQUENCE, f"{_C}bypass_mode=false", f"{_C}loss_type=ppo_clip"),
    "score centering": (*_NONE, f"{_C}score_centering=128"),
}
#: Age of the responses; every method is tuned for each staleness and compared within it.
STALENESS: dict[str, tuple[str, ...]] = {
    "staleness 0": (),
    "staleness 4": ("rollout.staleness=4",),
    "staleness 16": ("rollout.staleness=16",),
}
FRESH = next(iter(STALENESS))
#: Precision of the sampling copy, for `PRECISION_METHODS` only; fresh responses, rates tuned for `FRESH`.
PRECISION: dict[str, tuple[str, ...]] = {
    "bf16 rollouts": ("rollout.dtype=bf16",),
    "int8 rollouts": ("rollout.dtype=int8",),
}
PRECISION_METHODS = ("none", "sequence IS")
CONDITIONS = STALENESS | PRECISION
RATES = (4e-4, 8e-4, 1.6e-3)
TUNING_SEEDS = (101,)
#: Two settings count as equivalent if a test shows that their difference in final reward is within ± this.
MARGIN = 0.02
#: A smaller embedded job: a run takes about twenty seconds on one core. Validation: 512 problems, 8 responses
#: each, sampled at temperature 1.
COMMON = (
    "algorithm.adv_estimator=rloo",
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=32",
    "actor.lr_warmup_steps=20",
    "trainer.total_training_steps=100",
    "trainer.test_freq=100",
    "rollout.val_kwargs.n=8",
    "rollout.val_kwargs.temperature=1.0",
)

Rates = dict[tuple[str, str], float]  # (condition, method) → learning rate


def job_of(condition: str, method: str, rate: float, seed: int) -> Job:
    """Job of one run."""
    overrides = (*COMMON, *CONDITIONS[condition], *METHODS[method], f"actor.lr={rate:g}")
    return Job("off-policy", f"{condition} | {method} | {rate:g}", seed, (), overrides)


def final_reward(outcome: Outcome) -> float:
    """Validation reward of the final policy; 0 for a run that the trainer stopped."""
    return 0.0 if outcome.validation is None else outcome.validation


def tune(
    staleness: list[str], memory: Path, workers: int
) -> tuple[Rates, dict[tuple[str, str], list[float]]]:
    """Best rate of every method at every staleness, and the mean final rewards in the order of `RATES`."""
    cells = [(condition, method) for condition in staleness for method in METHODS]
    jobs = {
        (*cell, rate, seed): job_of(*cell, rate, seed)
        for seed in TUNING_SEEDS
        for cell in cells
        for rate in RATES
    }
    outcomes = run_all(jobs.values(), memory, workers)
    means = {
        cell: [
            statistics.fmean(final_reward(outcomes[jobs[*cell, rate, seed]]) for seed in TUNING_SEEDS)
            for rate in RATES
        ]
        for cell in cells
    }
    rates = {cell: RATES[found.index(max(found))] for cell, found in means.items()}
    if FRESH in staleness:
        for condition in PRECISION:
            rates |= {(condition, method): rates[FRESH, method] for method in PRECISION_METHODS}
    return rates, means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("6-10"), help="6-10 or 6,9; reported")
    ages = [name.split()[1] for name in STALENESS]
    parser.add_argument("--staleness", default=",".join(ages), help=f"some of {', '.join(ages)}, in batches")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("off_policy.jsonl"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path(), help="where table and plot go")
    options = parser.parse_args()
    if not set(options.seeds).isdisjoint(TUNING_SEEDS):
        parser.error(f"the rates were tuned on seeds {TUNING_SEEDS}: report others")
    staleness = [f"staleness {age}" for age in options.staleness.split(",")]
    if not set(staleness) <= set(STALENESS):
        parser.error(f"--staleness takes some of {', '.join(ages)}")
    rates, means = tune(staleness, options.memory, options.workers)
    jobs = {
        (*cell, seed): job_of(*cell, rate, seed)
        for conditions in (STALENESS, PRECISION)
        for seed in options.seeds
        for cell, rate in rates.items()
        if cell[0] in conditions
    }
    outcomes = run_all(jobs.values(), options.memory, options.workers)

    from benchmarks.studies.off_policy_report import write_report

    table = {cell: [outcomes[jobs[*cell, seed]] for seed in options.seeds] for cell in rates}
    write_report(table, rates, means, options.out)


if __name__ == "__main__":
    main()
