"""`evaluate`: questions → n responses each → grades → metrics with intervals; `regrade`: grades only.

    request ─▶ Plan ─▶ model ─▶ responses ─────────▶ EvalSample ─▶ Score
    options    checked            stored, or sampled   graded        metrics
               no torch           and stored

Prompt rendering, sampling and graders are the same as in training. Each response is stored on arrival, so no
response is sampled twice, and the model is loaded only if responses are missing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.batch import Episode, Task
from rlctl.errors import RunFailure
from rlctl.evaluate.evaluate_report import (
    EVALUATIONS,
    Evaluation,
    default_out,
    read_evaluation,
    write_evaluation,
)
from rlctl.evaluate.request import (
    EvaluateRequest,
    Plan,
    check_request,
    checked_ks,
    chosen_reward,
    values_beside,
)
from rlctl.evaluate.samples import EvalSample, Pair, Response, as_samples, by_question
from rlctl.evaluate.scores import RIGHT, score_range, summarise
from rlctl.evaluate.store import ResponseStore, prompt_hash
from rlctl.files import cache_root, check_vacant
from rlctl.run_spec.keys import flat
from rlctl.run_spec.rollout import RewardSpec
from rlctl.track.trust import require_permission

if TYPE_CHECKING:
    from rlctl.evaluate.api_model import ApiModel
    from rlctl.evaluate.local_model import LocalModel
    from rlctl.reward.build import Reward

#: Samples graded between two progress reports, at least: a grader may compare the responses to a question.
_AT_ONCE = 256
#: Called with the phase (`sampling`, `grading`), the number of responses done, and their total.
Progress = Callable[[str, int, int], None]


def evaluate(request: EvaluateRequest, progress: Progress) -> tuple[Path, Evaluation]:
    """Samples the responses that are not stored, grades all, and writes the directory of the evaluation.

    Raises:
        UsageError: k > n, the model or run does not exist, there is no data, or `out` is not empty.
        RunFailure: another process uses the same response store, or a stored response is damaged.
        EnvironmentFailure: the model or a benchmark is not available, or a disk is full.
    """
    plan = check_request(request)
    model = _model(plan)
    started = time.monotonic()
    with grading(plan.reward, model.sampling.max_response_length, model.tokenizer) as reward:
        responses, num_stored = _responses(request, model, partial(progress, "sampling"))
        grades = grade(
            reward(), as_samples(model.rows, model.prompts, responses), partial(progress, "grading")
        )
    data = {
        "files": plan.questions.files,
        "benchmarks": plan.questions.benchmarks,
        "prompts_sha256": prompt_hash(json.dumps(model.prompts)),
        "num_overlong_prompts": model.num_overlong,
        "num_aborted_responses": len(model.rows) * request.n - len(responses),
    }
    settings = {"n": request.n, "seed": request.seed} | model.about_sampling
    about = {"model": model.model, "data": data, "sampling": asdict(model.sampling) | settings}
    notes = [*plan.target.notes, *plan.questions.notes]
    evaluation = grades.evaluation(
        about, plan.reward, plan.ks, time.monotonic() - started, num_stored=num_stored, notes=notes
    )
    out = request.out or default_out((plan.target.run_dir or Path()) / EVALUATIONS)
    write_evaluation(out, evaluation, grades.samples)
    return out, evaluation


def _model(plan: Plan) -> LocalModel | ApiModel:
    if plan.is_behind_api:
        from rlctl.evaluate.api_model import ApiModel

        return ApiModel(plan)
    from rlctl.evaluate.local_model import LocalModel  # imports torch

    return LocalModel(plan)


def _responses(
    request: EvaluateRequest, model: LocalModel | ApiModel, progress: Callable[[int, int], None]
) -> tuple[dict[Pair, Response], int]:
    """Returns the responses in order, without those that the engine ended, and how many were stored."""
    keys = {
        (prompt_hash(identity), question, sample, request.seed): (question, sample)
        for question, identity in enumerate(model.identities)
        for sample in range(request.n)
    }
    with ResponseStore(cache_root(), model.settings | {"sampling": asdict(model.sampling)}) as store:
        if request.fresh:
            store.forget(keys)
        stored = store.find(keys)
        num_stored = len(stored)
        progress(num_stored, len(keys))
        missing = {pair: key for key, pair in keys.items() if pair not in stored}
        if missing:
            for batch in model.sample(list(missing)):
                store.add({missing[pair]: response for pair, response in batch.items()})
                stored |= batch
                progress(len(stored), len(keys))
    responses = {pair: stored[pair] for pair in keys.values() if pair in stored}
    if not responses:
        message = f"the engine ended all {len(keys)} responses before the policy or the length limit did"
        raise RunFailure(message, where=model.about_sampling["engine"], fix="see its log, or use --engine hf")
    return responses, num_stored


def regrade(
    directory: Path,
    progress: Progress,
    *,
    ks: Sequence[int] | None = None,
    reward: str | None = None,
    out: Path | None = None,
    trust: bool = False,
) -> tuple[Path, Evaluation]:
    """Grades the samples of the evaluation in `directory` again and writes a new evaluation.

    `ks` and `reward` are as in `EvaluateRequest`; the default reward is that of the evaluation. `out` is a
    new or empty directory; None: next to `directory`, named after the current time. `trust`: run the code of
    the evaluation's reward, also if this user has not run it before.

    Raises:
        UsageError: `directory` is not an evaluation, k > n, the reward does not exist, `out` is not empty, or
            the reward would execute code that this user has not allowed.
        EnvironmentFailure: a reward model is not available, or a disk is full.
    """
    document, before = read_evaluation(directory)
    about = {name: document[name] for name in ("model", "data", "sampling")}
    ks = checked_ks(ks, int(about["sampling"]["n"]))
    if out:
        check_vacant(out)
    values = values_beside(flat({"reward": document["reward"]}), reward)
    require_permission(directory, values, trust=trust)
    reward_spec = chosen_reward(RewardSpec.model_validate(document["reward"]), reward)
    started = time.monotonic()
    with grading(reward_spec, int(about["sampling"]["max_response_length"])) as built:
        grades = grade(built(), before, partial(progress, "grading"))
    regraded = {"directory": str(directory.resolve()), "reward": document["reward"]}
    regraded |= changes(before, grades.samples)
    evaluation = grades.evaluation(
        about,
        reward_spec,
        ks,
        time.monotonic() - started,
        num_stored=len(grades.samples),
        regraded=regraded,
    )
    out = out or default_out(directory.resolve().parent)
    write_evaluation(out, evaluation, grades.samples)
    return out, evaluation


def changes(before: Sequence[EvalSample], after: Sequence[EvalSample]) -> dict[str, int]:
    """Counts changed rewards, and those now right, now wrong, now failed, or no longer failed."""
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


@dataclass(frozen=True, slots=True)
class Grades:
    """Result of `grade`."""

    samples: list[EvalSample]  # with rewards and answers
    errors: list[str]  # messages of the first few grader failures
    timeouts: dict[str, int]  # kind → responses that made their grading fail; they are scored as wrong

    def evaluation(
        self, about: Mapping[str, Any], reward: RewardSpec, ks: Sequence[int], seconds: float, **others: Any
    ) -> Evaluation:
        """The evaluation with these results: arguments are fields of `Evaluation`, and the k of pass@k."""
        bounds = score_range(reward, self.samples)
        scores = summarise(self.samples, ks, about["sampling"]["n"], reward.max_error_fraction, bounds)
        others |= {"timeouts": self.timeouts, "score_range": bounds}
        return Evaluation(
            about=about,
            reward=reward,
            scores=scores,
            grader_errors=self.errors,
            seconds=seconds,
            **others,
        )


def grade(reward: Reward, samples: Sequence[EvalSample], progress: Callable[[int, int], None]) -> Grades:
    """Grades samples.

    Rewards do not include the overlong penalty, which applies only in training.
    """
    from rlctl.reward.build import MAX_ERRORS_KEPT

    graded: list[EvalSample] = []
    errors: list[str] = []
    timeouts: Counter[str] = Counter()
    progress(0, len(samples))
    for chunk in _whole_questions(samples):
        result = reward.score([_as_episode(sample) for sample in chunk], read_answers=True)
        answers = result.answers or [None] * len(chunk)
        graded_chunk = zip(chunk, result.graded.tolist(), result.valid.tolist(), answers, strict=True)
        graded += [
            replace(sample, reward=score if is_valid else None, answer=answer)
            for sample, score, is_valid, answer in graded_chunk
        ]
        errors += result.errors[: MAX_ERRORS_KEPT - len(errors)]
        timeouts.update(result.timeouts)
        progress(len(graded), len(samples))
    return Grades(graded, errors, dict(timeouts))


def _whole_questions(samples: Sequence[EvalSample]) -> Iterator[list[EvalSample]]:
    """Splits samples into chunks of about `_AT_ONCE`, never within a question."""
    chunk: list[EvalSample] = []
    for question in by_question(samples):
        chunk += question
        if len(chunk) >= _AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@contextmanager
def grading(
    spec: RewardSpec, max_response_length: int, tokenizer: Any = None
) -> Iterator[Callable[[], Reward]]:
    """Yields a function that returns the reward; on exit, closes the reward and its processes.

    The reward is built immediately, so that no response is sampled for an unusable reward. A reward with a
    reward model is built on the first call, so that it does not share the device with the evaluated model.
    `tokenizer` is the policy's; None: unknown.
    """
    from rlctl.reward.build import build_reward

    with ExitStack() as stack:

        @cache
        def reward() -> Reward:
            given = {"max_response_length": max_response_length, "tokenizer": tokenizer}
            return stack.enter_context(closing(build_reward(spec, **given)))

        if all(term.name != "model" for term in spec.all_terms):
            reward()
        yield reward


def _as_episode(sample: EvalSample) -> Episode:
    """What graders read of an episode: texts only, no tokens."""
    task = Task(
        prompt_ids=(),
        text=sample.prompt,
        group_id=sample.question_index,
        data_source=sample.data_source,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
        messages=tuple(sample.messages),
    )
    return Episode(task, sample.sample_index, (), sample.response, reward=sample.environment_reward)
