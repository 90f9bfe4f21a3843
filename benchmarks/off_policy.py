"""Does correction help? The embedded task, off-policy on purpose, with and without every correction.

    python benchmarks/off_policy.py [--seeds 1-5] [--workers 2] [--memory FILE] [--out DIR]

Every setting trains the same model on the same prompts with RLOO advantages; what differs is how old
the responses are (`rollout.staleness`), how precise the copy that sampled them is (`rollout.dtype`),
and what is done about it. Writes `off_policy.md` and `off_policy.png` (`pip install rlctl[bench]`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, run_all

_C = "algorithm.rollout_correction."
_NONE = (f"{_C}rollout_is=null", f"{_C}rollout_rs=null")
_SEQUENCE = (
    f"{_C}rollout_is=sequence",
    f"{_C}rollout_is_threshold=2.0",
    f"{_C}rollout_is_batch_normalize=true",
)

#: What is done about off-policyness.
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
}
#: How the responses come to be off-policy.
CONDITIONS: dict[str, tuple[str, ...]] = {
    "staleness 0": (),
    "staleness 1": ("rollout.staleness=1",),
    "staleness 4": ("rollout.staleness=4",),
    "staleness 16": ("rollout.staleness=16",),
    "bf16 rollouts": ("rollout.dtype=bf16",),
    "int8 rollouts": ("rollout.dtype=int8",),
}
#: A smaller embedded job, so that hundreds of runs take less than an hour on two cores.
COMMON = (
    "algorithm.adv_estimator=rloo",
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=32",
    "actor.lr_warmup_steps=20",
    "trainer.total_training_steps=100",
)


def jobs_of(seeds: list[int]) -> list[Job]:
    """Every condition × method × seed."""
    return [
        Job("off-policy", f"{condition} | {method}", seed, (), (*COMMON, *setting, *correction))
        for seed in seeds
        for condition, setting in CONDITIONS.items()
        for method, correction in METHODS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("off_policy.jsonl"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path(), help="where table and plot go")
    options = parser.parse_args()
    outcomes = run_all(jobs_of(options.seeds), options.memory, options.workers)

    from benchmarks.off_policy_report import write_report

    write_report(outcomes, options.out)


if __name__ == "__main__":
    main()
