"""The directory of an evaluation: `results.json`, `samples.parquet`, `samples.html`."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.evaluate.intervals import LEVEL, Range
from rlctl.evaluate.page import PAGE_FILE, write_page
from rlctl.evaluate.samples import SAMPLES_FILE, EvalSample, read_samples, write_samples
from rlctl.evaluate.scores import Score
from rlctl.files import check_vacant, clear_leftovers, encodable, read_text, sha256_of, staged_directory
from rlctl.run_spec.keys import flat
from rlctl.run_spec.rollout import RewardSpec
from rlctl.track.run_dir import package_versions
from rlctl.track.trust import sign
from rlctl.user_code import files_of

RESULTS_FILE = "results.json"
#: Subdirectory of a run directory with its evaluations; those of validations are named `step_000100`.
EVALUATIONS = "evaluations"
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Settings and results of an evaluation."""

    #: model, data and sampling settings: `model`, `data` and `sampling` as in `results.json`
    about: Mapping[str, Any]
    reward: RewardSpec  # the reward that graded the responses
    scores: list[Score]  # one per data source; if there are several, the last is over all questions
    grader_errors: list[str]  # messages of the first few grader failures
    seconds: float  # duration of sampling and grading
    score_range: Range | None = None  # least and greatest possible reward; None: not known
    num_stored: int = 0  # responses taken from the store
    #: kind (time-out, memory, crash) → responses that made their grading fail; they are scored as wrong
    timeouts: Mapping[str, int] = field(default_factory=dict)
    #: for `regrade`: the source evaluation and the changed grades; None: responses were sampled
    regraded: Mapping[str, Any] | None = None
    notes: Sequence[str] = field(default_factory=tuple)  # messages for the user


def write_evaluation(
    out: Path, evaluation: Evaluation, samples: Sequence[EvalSample], *, page: bool = True
) -> None:
    """Writes the directory of an evaluation atomically.

    `page`: also write `samples.html`.

    Raises:
        UsageError: a parent of `out` is a file.
        EnvironmentFailure: the disk is full, or `out` cannot be written.
    """
    clear_leftovers(out)
    document = results_document(evaluation)
    with staged_directory(out) as stage:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        (stage / RESULTS_FILE).write_text(f"{encodable(text)}\n", encoding="utf-8")
        write_samples(stage / SAMPLES_FILE, samples)
        sign(stage, flat({"reward": document["reward"]}))
        if page:
            write_page(stage / PAGE_FILE, document, samples)


def read_evaluation(directory: Path) -> tuple[dict[str, Any], list[EvalSample]]:
    """Reads `results.json` and the samples of an evaluation.

    Raises:
        UsageError: the directory is not an evaluation or is damaged.
    """
    path = directory / RESULTS_FILE
    if not path.is_file():
        message = f"holds no {RESULTS_FILE}" if directory.is_dir() else "no such directory"
        fix = "name an evaluation's directory, such as RUN/evaluations/20260101-120000"
        raise UsageError(f"not an evaluation: {message}", where=str(directory), fix=fix)
    try:
        document = json.loads(read_text(path))
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']}, not {_FORMAT}")
        _ = int(document["sampling"]["n"]), document["model"]["path"], document["reward"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"not the results of an evaluation: {message}", where=str(path), fix="evaluate again"
        ) from error
    return document, read_samples(directory / SAMPLES_FILE)


def default_out(parent: Path) -> Path:
    """Path of a new directory in `parent`, named after the current time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    candidates = (parent / name, *(parent / f"{name}-{number}" for number in range(2, 1000)))
    out = next(path for path in candidates if not path.exists())
    check_vacant(out)
    return out


def results_document(evaluation: Evaluation) -> dict[str, Any]:
    """The JSON content of `results.json`; metrics without a value are null."""
    scores = []
    for score in map(asdict, evaluation.scores):
        figures = score.pop("figures")
        scores.append(score | figures)
    names = [term.name for term in evaluation.reward.all_terms]
    document = {
        "format": _FORMAT,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **evaluation.about,
        "reward": evaluation.reward.model_dump(mode="json"),
        "reward_files": {str(file): sha256_of(file) for file in files_of(*names)},
        "score_range": evaluation.score_range,
        "interval_level": LEVEL,
        "scores": scores,
        "grader_errors": evaluation.grader_errors,
        "timeouts": evaluation.timeouts,
        "num_stored": evaluation.num_stored,
        "seconds": round(evaluation.seconds, 3),
        "versions": {"python": platform.python_version()} | package_versions(),
    }
    return document | ({"regraded": evaluation.regraded} if evaluation.regraded else {})
