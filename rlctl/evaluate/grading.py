"""Grades existing responses, without the policy model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from rlctl.batch import Rollouts, torch_device
from rlctl.evaluate.samples import EvalSample
from rlctl.reward.build import MAX_ERRORS_KEPT, Reward, build_reward
from rlctl.spec.rollout import RewardSpec

#: Samples graded between two progress reports.
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Grades:
    """Result of `grade`."""

    samples: list[EvalSample]  # with rewards and answers
    errors: list[str]  # messages of the first few grader failures
    timeouts: dict[str, int]  # kind → responses that made their grading fail; they are scored as wrong


def grade(reward: Reward, samples: Sequence[EvalSample], progress: Callable[[int, int], None]) -> Grades:
    """Grades samples.

    Rewards do not include the overlong penalty, which applies only in training.
    """
    graded: list[EvalSample] = []
    errors: list[str] = []
    timeouts: Counter[str] = Counter()
    progress(0, len(samples))
    for start in range(0, len(samples), _AT_ONCE):
        chunk = samples[start : start + _AT_ONCE]
        result = reward.score(_as_rollouts(chunk), read_answers=True)
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


@contextmanager
def grading(spec: RewardSpec, max_response_length: int) -> Iterator[Callable[[], Reward]]:
    """Yields a function that returns the reward; on exit, closes the reward and its processes.

    The reward is built immediately, so that no response is sampled for an unusable reward. A reward with a
    reward model is built on the first call, so that it does not share the device with the evaluated model.
    """
    build = partial(build_reward, spec, max_response_length=max_response_length, device=torch_device())
    built = [] if any(term.name == "model" for term in spec.all_terms) else [build()]

    def reward() -> Reward:
        if not built:
            built.append(build())
        return built[0]

    try:
        yield reward
    finally:
        for each in built:
            each.close()


def _as_rollouts(samples: Sequence[EvalSample]) -> Rollouts:
    """Rollouts as input for graders: texts only, no tokens."""
    ids = torch.zeros((len(samples), 0), dtype=torch.int64)
    mask = ids.bool()
    return Rollouts(
        input_ids=ids,
        attention_mask=mask,
        position_ids=ids,
        responses=ids,
        response_mask=mask,
        rollout_log_probs=ids.float(),
        finish_reason=torch.tensor([int(sample.truncated) for sample in samples], dtype=torch.int8),
        group_ids=torch.tensor([sample.question_index for sample in samples]),
        policy_version=torch.zeros(len(samples), dtype=torch.int64),
        data_sources=tuple(sample.data_source for sample in samples),
        ground_truths=tuple(sample.ground_truth for sample in samples),
        prompt_texts=tuple(sample.prompt for sample in samples),
        response_texts=tuple(sample.response for sample in samples),
        extra_infos=tuple(sample.extra_info for sample in samples),
        messages=tuple(tuple(sample.messages) for sample in samples),
    )
