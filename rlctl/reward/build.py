"""From the spec's `reward` section to something that scores rollouts."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlctl.errors import RunFailure
from rlctl.metric_names import OVERLONG
from rlctl.reward.code import CodeScorer
from rlctl.reward.graders import GRADERS, GraderName, SourceGrader, answer_of, grader_for
from rlctl.reward.model import ModelScorer
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, FailureKind, Grade, Reward, RewardResult, Sample, Scorer
from rlctl.reward.sandbox.run import Limits
from rlctl.spec.reward import RewardSpec, RewardTerm

if TYPE_CHECKING:
    from rlctl.batch import Rollouts

#: Graders that run other people's arithmetic on model output: in child processes, with a deadline.
NEEDS_DEADLINE = frozenset[GraderName]({"maths"})
#: Seconds for one call of a user's function: it may ask a server, or import a library when first called.
FUNCTION_DEADLINE_S = 30.0
MAX_ERRORS_KEPT = 5

_Graded = tuple[Grade, str | None]


def build_reward(spec: RewardSpec, *, max_response_length: int, device: torch.device) -> Reward:
    """The reward the spec describes, ready to score.

    Args:
        spec: the section `reward`.
        max_response_length: tokens a response may have, for the overlong penalty.
        device: where a reward model runs, unless the spec names another.

    Raises:
        UsageError: a function or reward model cannot be used.
        EnvironmentFailure: a model cannot be fetched or placed, or code cannot be confined here.
    """
    penalty = None
    if spec.overlong.buffer_length:
        penalty = OverlongPenalty(
            max_response_length, spec.overlong.buffer_length, spec.overlong.penalty_factor
        )
    return CombinedReward(build_terms(spec, device), penalty)


def build_terms(spec: RewardSpec, device: torch.device) -> dict[str, tuple[float, Scorer]]:
    """Label → (weight, who scores) of every term; raises as `build_reward` does."""
    terms: dict[str, tuple[float, Scorer]] = {}
    try:
        for term in spec.all_terms:
            terms[term.label] = (term.weight, _scorer(term, spec, device))
    except BaseException:
        for _, scorer in terms.values():
            scorer.close()
        raise
    return terms


def refuse_errors(num_failed: float, num_total: float, first: Callable[[], str], limit: float) -> None:
    """Stop when too large a share of a batch could not be graded.

    Args:
        num_failed, num_total: samples, over all ranks.
        first: gives the text of the first failure on any rank; asked, on all of them, only to stop.
        limit: `reward.max_error_fraction`.

    Raises:
        RunFailure: more than `limit` of the samples failed.
    """
    if num_failed > limit * num_total:
        text = first().rstrip()
        known = f"; the first failure:\n{text}" if text else ""
        raise RunFailure(
            f"the grader failed on {num_failed:g} of {num_total:g} responses{known}",
            where="reward",
            fix=f"fix the ground truths or the grader, or raise reward.max_error_fraction (now {limit:g})",
        )


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), times a factor.

    Attributes:
        max_length: L_max, tokens.
        buffer_length: L_cache, tokens before L_max over which the penalty grows; at least 1.
        factor: penalty at L_max and beyond, where the paper has 1.
    """

    max_length: int
    buffer_length: int
    factor: float

    def of(self, lengths: torch.Tensor) -> torch.Tensor:
        """Penalties (B,) float32, from 0 down to −factor, for response lengths (B,) in tokens."""
        excess = (lengths - (self.max_length - self.buffer_length)).float() / self.buffer_length
        return -self.factor * excess.clamp(0.0, 1.0)


class CombinedReward:
    """A weighted sum of terms, plus the penalty for overlong responses.

    Args:
        terms: label → (weight, who scores).
        penalty: None: no penalty.
    """

    def __init__(self, terms: dict[str, tuple[float, Scorer]], penalty: OverlongPenalty | None) -> None:
        self._terms = terms
        self._penalty = penalty

    def score(self, rollouts: Rollouts, *, read_answers: bool = False) -> RewardResult:
        """Scores (B,); see `Reward.score`. Answers are those of the first term that can read them."""
        samples = _samples(rollouts)
        # In float32 terms of weights 0.15, 0.65 and 0.2 that are all 1 sum up to less than 1.
        total = torch.zeros(len(samples), dtype=torch.float64)
        valid = torch.ones(len(samples), dtype=torch.bool)
        parts: dict[str, torch.Tensor] = {}
        errors: list[str] = []
        errors_by_term: dict[str, int] = {}
        ended: dict[int, FailureKind] = {}  # row → why its grading ended without a score of the grader
        answers: list[str | None] = []
        for label, (weight, scorer) in self._terms.items():
            if read_answers and not answers and isinstance(scorer, GradedScorer):
                grades, answers = scorer.grade_and_read(samples)
            else:
                grades = scorer.grade(samples)
            scored = [grade.score if isinstance(grade, Failure) else grade for grade in grades]
            failures = [v.text for v in grades if isinstance(v, Failure) and v.score is None]
            for row, grade in enumerate(grades):
                if isinstance(grade, Failure) and grade.score is not None:
                    ended[row] = grade.kind
            parts[label] = torch.tensor([0.0 if score is None else score for score in scored])
            valid &= torch.tensor([score is not None for score in scored], dtype=torch.bool)
            total += weight * parts[label].double()
            errors += failures[: MAX_ERRORS_KEPT - len(errors)]
            errors_by_term[label] = len(failures)
        if self._penalty:
            parts[OVERLONG] = self._penalty.of(rollouts.response_mask.sum(-1).cpu())
            total += parts[OVERLONG]
        scores = total.float()
        unbounded = valid & ~scores.isfinite()  # a sum, or a score, beyond float32
        if unbounded.any():
            errors.append(f"the weighted sum is {scores[unbounded][0]} in float32")
            valid &= ~unbounded
        if read_answers and not answers:  # no term can
            answers = [None] * len(samples)
        timeouts = Counter(kind for row, kind in ended.items() if valid[row])
        return RewardResult(
            torch.where(valid, scores, 0.0), valid, parts, errors, errors_by_term, dict(timeouts), answers
        )

    def close(self) -> None:
        """End the grading processes."""
        for _, scorer in self._terms.values():
            scorer.close()


class GradedScorer:
    """Scores are what a grader of `rlctl.reward.graders` says.

    Args:
        grader: who grades; None: by `data_source`.
        limits: of programs, where a source is graded by running them.
    """

    def __init__(self, grader: GraderName | None, limits: Limits) -> None:
        self._grader = grader
        self._limits = limits
        self._code: CodeScorer | None = None
        self._pools: dict[GraderName, GradingPool] = {}

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """One grade per sample, in order."""
        return [grade for grade, _ in self._map(samples, read_answers=False)]

    def grade_and_read(self, samples: Sequence[Sample]) -> tuple[list[Grade], list[str | None]]:
        """Grades, and what the responses answer; see `rlctl.reward.graders.answer_of`."""
        graded = self._map(samples, read_answers=True)
        return [grade for grade, _ in graded], [answer for _, answer in graded]

    def close(self) -> None:
        """End the grading processes."""
        for pool in self._pools.values():
            pool.close()

    def _map(self, samples: Sequence[Sample], *, read_answers: bool) -> list[_Graded]:
        graded: list[_Graded] = [(0.0, None)] * len(samples)
        for grader, positions in self._positions_by_grader(samples).items():
            found = self._grade(grader, [samples[i] for i in positions], read_answers)
            for position, value in zip(positions, found, strict=True):
                graded[position] = value
        return graded

    def _positions_by_grader(self, samples: Sequence[Sample]) -> dict[SourceGrader, list[int]]:
        positions: dict[SourceGrader, list[int]] = {}
        for position, sample in enumerate(samples):
            positions.setdefault(self._grader or grader_for(sample.data_source), []).append(position)
        return positions

    def _grade(self, grader: SourceGrader, samples: Sequence[Sample], read_answers: bool) -> list[_Graded]:
        if grader == "code":
            self._code = self._code or CodeScorer(self._limits)
            return [(grade, None) for grade in self._code.grade(samples)]
        if grader in NEEDS_DEADLINE:
            pool = self._pools.setdefault(grader, GradingPool(grader))
            if read_answers:
                return pool.grade_and_read(samples)
            return [(grade, None) for grade in pool.grade(samples)]
        grades = [_grade_here(grader, sample) for sample in samples]
        answers = [answer_of(grader, sample.response) if read_answers else None for sample in samples]
        return list(zip(grades, answers, strict=True))


def _scorer(term: RewardTerm, spec: RewardSpec, device: torch.device) -> Scorer:
    limits = Limits(timeout_s=spec.code.timeout_s, memory_mb=spec.code.memory_mb)
    if term.name == "code":
        return CodeScorer(limits)
    if term.name == "model":
        return ModelScorer(spec.model, device)
    for grader in GRADERS:
        if term.name == grader:
            return GradedScorer(grader, limits)
    if term.name == "auto":
        return GradedScorer(None, limits)
    pool = GradingPool(term.name, deadline_s=FUNCTION_DEADLINE_S)
    pool.check()
    return pool


def _samples(rollouts: Rollouts) -> list[Sample]:
    count = len(rollouts.response_texts)
    fields = (
        rollouts.response_texts,
        rollouts.ground_truths,
        rollouts.prompt_texts,
        rollouts.data_sources,
        rollouts.extra_infos or ({},) * count,
        rollouts.messages or ((),) * count,
    )
    return [Sample(*values) for values in zip(*fields, strict=True)]


def _grade_here(grader: GraderName, sample: Sample) -> Grade:
    try:
        score = GRADERS[grader](sample.response, sample.ground_truth)
    except Exception:
        return Failure(traceback.format_exc())
    return score if math.isfinite(score) else Failure(f"the grader returned {score}")
