"""Grading stored samples again: no model, no sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlctl.data.write import check_vacant
from rlctl.evaluate.evaluate_report import Evaluation, default_out, read_evaluation, write_evaluation
from rlctl.evaluate.evaluation import Progress
from rlctl.evaluate.request import checked_ks, chosen_reward
from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import RIGHT, summarise
from rlctl.spec.reward import RewardSpec


@dataclass(frozen=True, slots=True)
class RegradeRequest:
    """What to grade again.

    Attributes:
        directory: of the evaluation.
        ks: of pass@k; None: those of 1, 4, 8 that n allows.
        reward: a grader's name or `file.py:function`; None: the evaluation's own.
        out: directory to write, new or empty; None: beside the evaluation, named after the time.
    """

    directory: Path
    ks: Sequence[int] | None = None
    reward: str | None = None
    out: Path | None = None


def regrade(request: RegradeRequest, progress: Progress) -> tuple[Path, Evaluation]:
    """Grade the samples of an evaluation and write one of its own.

    Raises:
        UsageError: no evaluation, k > n, no such reward, or `out` is taken.
        EnvironmentFailure: a reward model cannot be had, or a disk is full.
    """
    document, before = read_evaluation(request.directory)
    about = {name: document[name] for name in ("model", "data", "sampling")}
    n = int(about["sampling"]["n"])
    ks = checked_ks(request.ks, n)
    if request.out:
        check_vacant(request.out)
    reward_before = RewardSpec.model_validate(document["reward"])
    reward_spec = chosen_reward(reward_before, request.reward)
    from rlctl.evaluate.grading import grade, grading  # from here on torch is needed

    started = time.monotonic()
    with grading(reward_spec, int(about["sampling"]["max_response_length"])) as reward:
        grades = grade(reward(), before, partial(progress, "grading"))
    evaluation = Evaluation(
        about=about,
        reward=reward_spec,
        scores=summarise(grades.samples, ks, n, reward_spec.max_error_fraction),
        grader_errors=grades.errors,
        timeouts=grades.timeouts,
        seconds=time.monotonic() - started,
        num_stored=len(grades.samples),
        regraded={
            "directory": str(request.directory.resolve()),
            "reward": document["reward"],
            **changes(before, grades.samples),
        },
    )
    out = request.out or default_out(request.directory.resolve().parent)
    write_evaluation(out, evaluation, grades.samples)
    return out, evaluation


def changes(before: Sequence[EvalSample], after: Sequence[EvalSample]) -> dict[str, int]:
    """How many rewards differ, and how many of these became right, wrong, failures, or no failures."""
    counts = dict.fromkeys(("num_changed", "now_right", "now_wrong", "now_failed", "no_longer_failed"), 0)
    for old, new in zip(before, after, strict=True):
        if old.reward == new.reward:
            continue
        counts["num_changed"] += 1
        if new.reward is None:
            counts["now_failed"] += 1
        elif old.reward is None:
            counts["no_longer_failed"] += 1
        elif (old.reward >= RIGHT) != (new.reward >= RIGHT):
            counts["now_right" if new.reward >= RIGHT else "now_wrong"] += 1
    return counts
