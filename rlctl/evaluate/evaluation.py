"""`evaluate`: questions → n responses each → grades → figures with intervals.

    request ─▶ Plan ─▶ model ─▶ responses ─────────▶ EvalSample ─▶ Score
    options    checked  local or  stored, or sampled   graded        figures
               no torch served    and stored

Rendering, sampling and graders are those of training. A response is stored when it arrives, so what
was sampled once is never sampled again, and a model is loaded only if something is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlctl.data.schema import Row
from rlctl.errors import UsageError
from rlctl.evaluate.evaluate_report import Evaluation, default_out, write_evaluation
from rlctl.evaluate.request import EvaluateRequest, Plan, check_request
from rlctl.evaluate.samples import Pair, Response, as_samples
from rlctl.evaluate.scores import summarise
from rlctl.evaluate.store import ResponseStore, prompt_hash
from rlctl.files import cache_root
from rlctl.rollout.protocol import Sampling

#: Called with what is going on (`sampling`, `grading`), and the number of responses done and of all.
Progress = Callable[[str, int, int], None]


class Model(Protocol):
    """What `LocalModel` and `ServedModel` have in common; see there."""

    rows: list[Row]
    prompts: list[str]
    identities: list[str]
    num_overlong: int
    settings: dict[str, Any]
    model: dict[str, Any]
    sampling: Sampling

    @property
    def engine(self) -> str:
        """Who samples."""
        ...

    @property
    def dtype(self) -> str | None:
        """Arithmetic of the model; None: not known."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the user should know of the sampling."""
        ...

    def sample(self, pairs: Sequence[Pair]) -> Iterator[Mapping[Pair, Response]]:
        """Responses as they arrive; a question too long for the model may have none."""
        ...


def evaluate(request: EvaluateRequest, progress: Progress) -> tuple[Path, Evaluation]:
    """Sample what is not stored, grade, and write the evaluation's directory.

    Raises:
        UsageError: k > n, no such model or run, no data, or `out` is taken.
        RunFailure: another process samples the same, a stored response is damaged, or a server fails.
        EnvironmentFailure: the model or a benchmark cannot be had, or a disk is full.
    """
    plan = check_request(request)
    model = _open(plan)  # a server is asked before torch is imported
    from rlctl.evaluate.grading import grade, grading

    started = time.monotonic()
    with grading(plan.reward, model.sampling.max_response_length) as reward:
        responses, num_stored = _responses(request, model, partial(progress, "sampling"))
        grades = grade(
            reward(), as_samples(model.rows, model.prompts, responses), partial(progress, "grading")
        )
    asked = {question for question, _ in responses}
    evaluation = Evaluation(
        about=_about(plan, model, model.num_overlong + len(model.rows) - len(asked)),
        reward=plan.reward,
        scores=summarise(grades.samples, plan.ks, request.n, plan.reward.max_error_fraction),
        grader_errors=grades.errors,
        timeouts=grades.timeouts,
        seconds=time.monotonic() - started,
        num_stored=num_stored,
        notes=[*plan.target.notes, *plan.questions.notes, *model.notes],
    )
    out = request.out or default_out((plan.target.run_dir or Path()) / "evaluations")
    write_evaluation(out, evaluation, grades.samples)
    return out, evaluation


def _open(plan: Plan) -> Model:
    if plan.request.engine == "openai":
        from rlctl.evaluate.served_model import ServedModel

        return ServedModel(plan.request, plan.questions.rows)
    from rlctl.evaluate.local_model import LocalModel

    return LocalModel(plan)


def _responses(
    request: EvaluateRequest, model: Model, progress: Callable[[int, int], None]
) -> tuple[dict[Pair, Response], int]:
    """The responses in order, and how many of them were stored before; without questions that lack any.

    Raises:
        UsageError: no question is left.
    """
    keys = {
        (prompt_hash(identity), question, sample, request.seed): (question, sample)
        for question, identity in enumerate(model.identities)
        for sample in range(request.n)
    }
    with ResponseStore(cache_root(), model.settings | {"sampling": asdict(model.sampling)}) as store:
        if request.fresh:
            store.forget(keys)
        found = store.find(keys)
        num_stored = len(found)
        progress(num_stored, len(keys))
        missing = {pair: key for key, pair in keys.items() if pair not in found}
        if missing:
            for batch in model.sample(list(missing)):
                store.add({missing[pair]: response for pair, response in batch.items()})
                found |= batch
                progress(len(found), len(keys))
    overlong = {
        question for question, _ in keys.values() if any((question, i) not in found for i in range(request.n))
    }
    if len(overlong) == len(model.rows):
        raise UsageError(
            f"no question is left: all {len(overlong)} and their responses exceed the model's context",
            where="--max-response-length",
            fix="make it smaller, or serve the model with a longer context",
        )
    return {pair: found[pair] for pair in keys.values() if pair[0] not in overlong}, num_stored


def _about(plan: Plan, model: Model, num_overlong: int) -> dict[str, object]:
    request, questions = plan.request, plan.questions
    return {
        "model": model.model,
        "data": {
            "files": questions.files,
            "benchmarks": questions.benchmarks,
            "num_overlong_prompts": num_overlong,
        },
        "sampling": asdict(model.sampling)
        | {"n": request.n, "seed": request.seed, "engine": model.engine, "dtype": model.dtype},
    }
