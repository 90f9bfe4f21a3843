"""Validation: samples, grades and summarises responses, as `rlctl evaluate` does."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import EnvironmentFailure
from rlctl.evaluate.evaluate_report import EVALUATIONS, write_evaluation
from rlctl.evaluate.evaluation import grade
from rlctl.evaluate.local_model import sample_responses, template_hash
from rlctl.evaluate.request import checked_ks, chosen_reward
from rlctl.evaluate.samples import Pair, Response, as_samples
from rlctl.evaluate.scores import Score
from rlctl.rollout.protocol import Sampling
from rlctl.run_files import create_directory, remove
from rlctl.train.step_metrics import refuse_ungraded

if TYPE_CHECKING:
    from rlctl.data.prompts import PromptDataset
    from rlctl.evaluate.samples import EvalSample
    from rlctl.train.run import Run


def validate(run: Run, step: int) -> dict[str, float]:
    """Validates the policy; returns `val/<data_source>/…` over all ranks, on the main rank only.

    Samples and results are written to the run directory. Each rank samples responses to its share of the
    prompts; the responses do not depend on the number of ranks. Rewards exclude the overlong penalty.
    Ungraded responses and those that the engine aborted are excluded.

    Raises:
        RunFailure: too large a fraction could not be graded.
        EnvironmentFailure: the disk is full.
    """
    questions = run.val_prompts
    if questions is None:
        return {}
    started = time.monotonic()
    grades = grade(run.reward, _sampled(run, questions), lambda done, total: None)
    n = run.spec.rollout.val_kwargs.n
    [num_failed] = run.ranks.sum([float(sum(sample.reward is None for sample in grades.samples))])
    refuse_ungraded(run, num_failed, len(questions) * n, grades.errors)
    samples = run.ranks.exchange(grades.samples)
    if not run.ranks.is_main:
        return {}
    samples.sort(key=lambda sample: (sample.question_index, sample.sample_index))
    evaluation = replace(grades, samples=samples).evaluation(
        _about(run, step, questions.num_dropped, len(questions) * n - len(samples)),
        chosen_reward(run.spec.reward, None),
        checked_ks(None, n),
        time.monotonic() - started,
    )
    write_evaluation(place_of_evaluation(run.run_dir, step), evaluation, samples, page=False)
    by_source = evaluation.scores[:-1] or evaluation.scores
    return {
        f"val/{score.data_source}/{name}": value
        for score in by_source
        for name, value in _metrics(score, n).items()
    }


def place_of_evaluation(run_dir: Path, step: int) -> Path:
    """The directory for the validation of a step, which is replaced; the one above it exists then.

    Raises:
        EnvironmentFailure: it cannot be created, or `evaluations` is a link, which can lead out of the run.
    """
    place = run_dir / EVALUATIONS / f"step_{step:06d}"
    try:
        create_directory(place.parent)
        if place.is_symlink():
            remove(place)
    except OSError as error:
        message = f"the validation cannot be written: {error.strerror or error}"
        fix = "free disk space, or restore access; then continue with --resume"
        raise EnvironmentFailure(message, where=str(error.filename or place), fix=fix) from error
    return place


def _sampled(run: Run, questions: PromptDataset) -> list[EvalSample]:
    """This rank's share of the responses, not yet graded."""
    spec = run.spec
    ranks = run.ranks
    mine = range(ranks.rank, len(questions), ranks.world_size)
    responses: dict[Pair, Response] = {}
    for batch in sample_responses(
        run.rollout,
        questions,
        [(question, sample) for question in mine for sample in range(spec.rollout.val_kwargs.n)],
        _sampling(run),
        run.episodes,
        seed=spec.trainer.seed,
        batch_size=max(1, spec.data.train_batch_size * spec.rollout.n // ranks.world_size),  # as in training
    ):
        responses |= batch
    run.rollout.finish()
    return as_samples(questions.rows, questions.texts, responses)


def _sampling(run: Run) -> Sampling:
    validation = run.spec.rollout.val_kwargs
    return Sampling(
        max_response_length=run.spec.data.max_response_length,
        temperature=validation.temperature or 1.0,
        top_p=validation.top_p,
        greedy=validation.temperature == 0.0,
    )


def _metrics(score: Score, n: int) -> dict[str, float]:
    figures = {"reward_mean": score.figures["avg"], "response_length_mean": score.mean_length}
    if n > 1:
        figures |= {name: figure for name, figure in score.figures.items() if name != "avg"}
        figures |= {"truncated_fraction": score.truncated_fraction}
    return {name: estimate.value for name, estimate in figures.items() if estimate is not None}


def _about(run: Run, step: int, num_overlong: int, num_aborted: int) -> dict[str, Any]:
    spec = run.spec
    return {
        "model": {
            "path": str(run.run_dir),
            "run_dir": str(run.run_dir),
            "step": step,
            "sha256": None,  # these weights are not on disk
            "template_sha256": template_hash(run.tokenizer),
        },
        "data": {
            "files": spec.data.val_files,
            "num_overlong_prompts": num_overlong,
            "num_aborted_responses": num_aborted,
        },
        "sampling": asdict(_sampling(run))
        | {
            "n": spec.rollout.val_kwargs.n,
            "seed": spec.trainer.seed,
            "engine": spec.rollout.name,
            "dtype": spec.rollout.dtype or spec.engine.dtype,
        },
    }
