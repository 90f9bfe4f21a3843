"""`Run`: the parts of a run in one record that the training loop and its helpers share; and its result.

The result, `summary.json`, is also the source of the last lines on the terminal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.engine.checkpoint import CHECKPOINTS
from rlctl.files import write_text
from rlctl.metric_names import validation_rewards
from rlctl.reward.build import refuse_errors
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.run_dir import SUMMARY_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlctl.algos.kl import KLController
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.protocol import CriticEngine, ReferencePolicy, Teacher, TrainEngine
    from rlctl.engine.ranks import Ranks
    from rlctl.engine.sequence_parallel import SequenceParallel
    from rlctl.environment.build import EpisodeSource
    from rlctl.reward.build import Reward
    from rlctl.rollout.engine_lock import LockedRollout
    from rlctl.spec.run_spec import RunSpec
    from rlctl.track.rollouts import RolloutWriter
    from rlctl.track.tracker import Tracker
    from rlctl.train.stop import StopRequest
    from rlctl.train.stream import PromptDraws, RolloutStream


#: Steps averaged at the start and the end of the run, because the reward of one batch is noisy.
_WINDOW = 5
_AVERAGED = (
    "critic/score/mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_raw_eff_sample_size",
    "rollout_corr/rollout_rs_masked_fraction",
    "rollout_corr/kl",
    "response_length/mean",
    "perf/throughput",
)
_COUNTED = ("guardrails/alarms", "guardrails/interventions", "guardrails/skipped")


@dataclass
class Run:
    """All parts of a run, built by `rlctl.train.setup`."""

    spec: RunSpec
    run_dir: Path
    ranks: Ranks
    data_ranks: Ranks  # sums over these count each row once
    sequence: SequenceParallel | None  # this rank's sequence-parallel group
    tokenizer: Any  # Hugging Face tokenizer of the policy
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    rollout: LockedRollout
    episodes: EpisodeSource  # makes episodes with the engine
    reward: Reward
    actor: TrainEngine
    base: ReferencePolicy | None  # the policy without its adapters; None without LoRA
    ref: ReferencePolicy | None  # only if a KL penalty needs it
    teacher: Teacher | None  # only with distillation
    critic: CriticEngine | None  # only if the estimator needs values (`gae`)
    stream: RolloutStream
    tracker: Tracker
    rollout_writer: RolloutWriter | None  # rank 0 only
    stop: StopRequest
    kl: KLController  # controls the KL penalty in the reward, for the next batch
    total_steps: int
    start_step: int = 0
    draws: PromptDraws | None = None  # with `algorithm.filter_groups`
    policy_version: int = 0  # optimizer updates so far, withheld ones excluded
    stopped_because: str = ""  # the guardrails' reason to end the run early
    history: list[dict[str, float]] = field(default_factory=list)
    callbacks: list[Callable[[int, Mapping[str, float]], None]] = field(default_factory=list)


def refuse_ungraded(run: Run, num_failed: float, num_total: float, errors: list[str]) -> None:
    """Ends the run if too many responses could not be graded (a collective).

    Args:
        num_failed, num_total: responses over all ranks.
        errors: this rank's failures.

    Raises:
        RunFailure: see `refuse_errors`.
    """
    limit = run.spec.reward.max_error_fraction
    refuse_errors(num_failed, num_total, lambda: run.ranks.first("".join(errors[:1])), limit)


def write_summary(run: Run) -> None:
    """Writes `summary.json`; called on one rank after the loop."""
    trained = [metrics for metrics in run.history if metrics["step"] > 0]
    validated = [metrics for metrics in run.history if any(key.startswith("val/") for key in metrics)]
    step = int(trained[-1]["step"]) if trained else run.start_step
    best, here = best_validation(run.history), f"{CHECKPOINTS}/step_{step:06d}"
    summary: dict[str, Any] = {
        "step": step,
        "total_steps": run.total_steps,
        "interrupted": step < run.total_steps,
        "seconds": sum(metrics["timing_s/step"] for metrics in trained),
        "num_updates": run.policy_version,
        "guardrails": _guardrails(run, trained),
        "first": _mean(trained[:_WINDOW]),
        "last": _mean(trained[-_WINDOW:]),
        "validation_first": _validation(validated[0]) if validated else {},
        "validation_last": _validation(validated[-1]) if validated else {},
        "best": best and _saved_best(run.run_dir, *best),
        "checkpoint": here,
        "model": f"{here}/model",
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_text(run.run_dir / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """Mean reward of a validation, averaged over data sources; None without validation."""
    rewards = validation_rewards(metrics).values()
    return sum(rewards) / len(rewards) if rewards else None


def best_validation(history: Iterable[Mapping[str, float]]) -> tuple[int, float] | None:
    """Step and score of the best validation of trained weights; the earliest if several are equal.

    The one before training is not among them: its weights are in no checkpoint.
    """
    trained = (metrics for metrics in history if metrics["step"] > 0)
    scored = [(int(m["step"]), score) for m in trained if (score := validation_score(m)) is not None]
    return max(scored, key=lambda pair: pair[1], default=None)


def past_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Metrics that a resumed run logged earlier, so that its summary covers the whole run."""
    path = run_dir / METRICS_FILE
    rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return [{key: float(value) for key, value in row.items() if key != "timestamp"} for row in rows]


def _saved_best(run_dir: Path, step: int, score: float) -> dict[str, Any]:
    """The best validation, and its checkpoint if it was saved."""
    place = f"{CHECKPOINTS}/step_{step:06d}"
    return {"step": step, "reward_mean": score, "checkpoint": place if (run_dir / place).is_dir() else None}


def _mean(steps: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: sum(metrics[key] for metrics in steps) / len(steps)
        for key in _AVERAGED
        if steps and all(key in metrics for metrics in steps)
    }


def _guardrails(run: Run, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Counts of alarms and interventions, and why guardrails ended the run; empty if they are off."""
    counts = {
        key.removeprefix("guardrails/"): int(sum(metrics.get(key, 0.0) for metrics in steps))
        for key in _COUNTED
    }
    is_off = run.spec.trainer.guardrails.mode == "off"
    return {} if is_off else counts | {"stopped_because": run.stopped_because or None}


def _validation(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("val/")}
