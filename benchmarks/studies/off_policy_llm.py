"""Measures the effect of corrections on SmolLM2-135M, trained on sums with intentionally off-policy data.

    python benchmarks/studies/off_policy_llm.py [--seeds 1-3] [--lr 4e-5] [--workers 2] [--out DIR]

A smaller version of the study `off_policy.py` on a pretrained model: the same corrections, fewer conditions,
seeds and steps, one learning rate for all. A run takes a few minutes on one core with bf16 instructions. Its
result is the reward of its final policy on held-out sums (37 prompts × 4 responses at temperature 1). Prints
tables, and the rank correlation of the methods' order with that of the built-in model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all
from benchmarks.studies.off_policy import METHODS, final_reward
from benchmarks.studies.off_policy_report import differences, interval, mean, pair_table
from examples import sums
from rlctl.data.schema import write_rows
from rlctl.run_spec.machine import native_dtype

CONDITIONS: dict[str, tuple[str, ...]] = {
    "staleness 8": ("rollout.staleness=8",),
    "staleness 0": (),
    "int8 rollouts": ("rollout.dtype=int8",),
    "staleness 2": ("rollout.staleness=2",),
    "vLLM rollouts": ("rollout.name=vllm", "rollout.dtype=bf16"),
}
_FIVE = ("none", "token TIS", "sequence IS", "geometric RS", "decoupled PPO")
#: Methods compared within each condition; the other combinations are not worth their machine time.
COMPARED: dict[str, tuple[str, ...]] = {
    "staleness 8": tuple(METHODS),
} | dict.fromkeys(("staleness 0", "int8 rollouts", "staleness 2", "vLLM rollouts"), _FIVE)


def common(train_file: Path, val_file: Path, steps: int, lr: str) -> tuple[str, ...]:
    """Spec overrides of every run."""
    return (
        "algorithm.adv_estimator=rloo",
        f"data.train_files={train_file}",
        f"data.val_files={val_file}",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "data.max_response_length=6",
        f"actor.lr={lr}",
        f"engine.dtype={native_dtype()[0]}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        "trainer.save_freq=-1",
        "rollout.val_kwargs.n=4",
        "rollout.val_kwargs.temperature=1.0",
    )


def table_of(table: dict[tuple[str, str], list[Outcome]]) -> str:
    """One row per condition and method; brackets contain 95 % intervals over the seeds (Student's t)."""
    lines = [
        "| condition | method | seeds | held-out reward at the end | minus `none` | raw ESS | masked |",
        "|---|---|---|---|---|---|---|",
    ]
    for (condition, method), runs in table.items():
        gain = (
            ""
            if method == "none"
            else interval(differences(table, (condition, method), (condition, "none")), "+")
        )
        cells = (condition, method, f"{len(runs)}", interval([final_reward(run) for run in runs]), gain)
        lines.append(f"| {' | '.join(cells)} | {mean(runs, 'raw_ess'):.3f} | {mean(runs, 'masked'):.3f} |")
    return "\n".join(lines) + "\n"


def rank_correlation(one: dict[str, float], other: dict[str, float]) -> float:
    """Spearman's rank correlation over the methods in both."""
    from scipy.stats import spearmanr

    both = [method for method in one if method in other]
    return float(spearmanr([one[m] for m in both], [other[m] for m in both]).statistic)


#: Final rewards of the built-in model at 16 batches of staleness, docs/evidence/off-policy.md.
TOY = {
    "none": 0.396,
    "token TIS": 0.881,
    "sequence IS": 0.723,
    "sequence IS + RS": 0.867,
    "geometric RS": 0.874,
    "decoupled PPO": 0.779,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", default="4e-5", help="learning rate of every run")
    parser.add_argument("--conditions", nargs="+", choices=list(COMPARED), default=list(COMPARED))
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("off_policy_llm.jsonl"), help="finished runs")
    parser.add_argument("--out", type=Path, default=Path(), help="where prompts and table go")
    options = parser.parse_args()
    for name, pairs in zip(("train", "held_out"), sums.split(), strict=True):
        write_rows(options.out / f"{name}.parquet", name, sums.rows(pairs))
    shared = common(
        options.out / "train.parquet", options.out / "held_out.parquet", options.steps, options.lr
    )
    compared = {condition: COMPARED[condition] for condition in options.conditions}
    jobs = {
        (condition, method, seed): Job(
            "off-policy, SmolLM2",
            f"{condition} | {method}",
            seed,
            ("smollm2-135m-sums",),
            (*shared, *CONDITIONS[condition], *METHODS[method]),
        )
        for condition, methods in compared.items()
        for seed in options.seeds
        for method in methods
    }
    outcomes = run_all(jobs.values(), options.memory, options.workers)
    table = {
        (condition, method): [outcomes[jobs[condition, method, seed]] for seed in options.seeds]
        for condition, methods in compared.items()
        for method in methods
    }
    text = [table_of(table)]
    for condition in list(compared)[:1]:
        text.append(f"{condition}: row minus column\n\n{pair_table(table, condition)}")
        ends = {m: statistics.fmean(map(final_reward, table[condition, m])) for m in compared[condition]}
        text.append(
            f"Rank correlation with the built-in model (Spearman): {rank_correlation(ends, TOY):+.2f}\n"
        )
    (options.out / "off_policy_llm.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
