"""`results.json`: the figures, and everything needed to say what they are figures of."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.evaluate.intervals import LEVEL
from rlctl.evaluate.scores import Score

if TYPE_CHECKING:
    from rlctl.evaluate.target import Target
    from rlctl.rollout.protocol import Sampling

RESULTS_FILE = "results.json"
_PACKAGES = ("rlctl", "torch", "transformers", "math-verify", "scipy")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        target: what was evaluated, on what.
        out: where results and samples lie.
        n: responses per question.
        sampling, seed: how they were sampled.
        scores: one per data source; with several, the last is of all together.
        num_overlong: questions left out because their prompt is too long.
        grader_errors: the first few failures, as text.
        seconds: of sampling and grading.
        chat_template: the tokenizer's, if it has one.
    """

    target: Target
    out: Path
    n: int
    sampling: Sampling
    seed: int
    scores: list[Score]
    num_overlong: int
    grader_errors: list[str]
    seconds: float
    chat_template: str | None


def results_text(evaluation: Evaluation) -> str:
    """The content of `results.json`; standard JSON, null where there is no figure."""
    target, template = evaluation.target, evaluation.chat_template
    document: dict[str, Any] = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "path": target.model_path,
            "run_dir": str(target.run_dir) if target.run_dir else None,
            "step": target.step,
            "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        },
        "data": {"files": target.data_files, "num_overlong_prompts": evaluation.num_overlong},
        "sampling": asdict(evaluation.sampling) | {"n": evaluation.n, "seed": evaluation.seed},
        "interval_level": LEVEL,
        "scores": [_score(score) for score in evaluation.scores],
        "grader_errors": evaluation.grader_errors,
        "seconds": round(evaluation.seconds, 3),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _score(score: Score) -> dict[str, Any]:
    """One source's figures, `pass@k` under their own names."""
    values = asdict(score)
    passed = values.pop("pass_at")
    return values | {f"pass@{k}": value for k, value in passed.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
