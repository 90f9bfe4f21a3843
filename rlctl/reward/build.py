"""Builds the reward of a spec, and combines the scores of its terms.

Each term has one grader; the term `auto` selects the grader of each row by the name of its data source. This
module imports neither torch nor Pydantic, because it registers a grader.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from rlctl.errors import RunFailure
from rlctl.lazy import torch
from rlctl.metric_names import OVERLONG
from rlctl.registry import GRADERS
from rlctl.reward.pool import GradingPool, is_ours, is_scorer
from rlctl.reward.protocol import Failure, FailureKind, Grade, GradeAndAnswer, RewardResult, Sample, Scorer

if TYPE_CHECKING:
    from rlctl.batch import Episode
    from rlctl.spec.rollout import OverlongSpec, RewardSpec

MAX_ERRORS_KEPT = 5
#: In place of the grade of an episode that the environment excludes.
_NOT_GRADED: GradeAndAnswer = (Failure("the environment failed", "inapplicable"), None)


@lru_cache(maxsize=1024)
def _registered(data_source: str) -> str | None:
    for part in GRADERS.parts():
        bounded = rf"(?:^|[/_.\- ])(?:{part.data_sources})(?:$|[/_.\- ])"
        if part.data_sources and re.search(bounded, data_source, re.IGNORECASE):
            return part.name
    return None


def grader_for(data_source: str) -> str:
    """The grader that `auto` selects for rows of this source; `maths` for unknown sources."""
    return _registered(data_source) or "maths"


def knows_source(data_source: str) -> bool:
    """Whether a grader is known for this source; other sources are graded as mathematics."""
    return _registered(data_source) is not None


def _scorer_of(name: str, params: dict[str, Any], spec: RewardSpec, device: torch.device) -> Scorer:
    if is_scorer(name):
        scorer: Scorer = GRADERS[name](spec, device)
        return scorer
    if is_ours(name) and GRADERS.part(name).in_process:
        return LocalScorer(name)
    pool = GradingPool(name, params)
    if not is_ours(name):
        pool.check()
    return pool


class LocalScorer(Scorer):
    """Calls a grader in this process."""

    reads_answers = True

    def __init__(self, name: str) -> None:
        part = GRADERS.part(name)
        self._function, self._answer_of = part.function, part.answer_of

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers."""
        read = (self._answer_of if read_answers else None) or (lambda _: None)
        asked = [sample.without_thoughts() for sample in samples]
        return [(self._grade(sample), read(sample.response)) for sample in asked]

    def _grade(self, sample: Sample) -> Grade:
        try:
            return float(self._function(sample.response, sample.ground_truth))
        except Exception:
            return Failure(traceback.format_exc())


@GRADERS.register(
    "auto",
    label="by each row's source",
    formula="the score of the grader of the row's `data_source`; `maths` for sources without a grader",
)
class SourceScorer(Scorer):
    """Grades each row with the grader of its data source; a grader is started when first needed."""

    reads_answers = True

    def __init__(self, spec: RewardSpec, device: torch.device) -> None:
        self._start = partial(_scorer_of, params={}, spec=spec, device=device)
        self._scorers: dict[str, Scorer] = {}

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers, in the order of the samples."""
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(grader_for(sample.data_source), []).append(place)
        graded: dict[int, GradeAndAnswer] = {}
        for grader, rows in places.items():
            if grader not in self._scorers:
                self._scorers[grader] = self._start(grader)
            some = [samples[row] for row in rows]
            found = self._scorers[grader].grade_and_read(some, read_answers=read_answers)
            graded |= zip(rows, found, strict=True)
        return [graded[place] for place in range(len(samples))]

    def close(self) -> None:
        """Ends the grading processes."""
        for scorer in self._scorers.values():
            scorer.close()


def build_reward(
    spec: RewardSpec, *, max_response_length: int, device: torch.device, tokenizer: Any = None
) -> Reward:
    """Builds the reward that the spec describes; `tokenizer` is the policy's, None: unknown.

    Raises:
        UsageError: a function or reward model cannot be used.
        EnvironmentFailure: a model cannot be fetched or placed, or code cannot be confined here.
    """
    terms = build_terms(spec, device)
    for _, scorer in terms.values():
        scorer.set_policy(tokenizer)
    return Reward(terms, spec.overlong, max_response_length)


def build_terms(spec: RewardSpec, device: torch.device) -> dict[str, tuple[float, Scorer]]:
    """Returns label → (weight, scorer) for every term; raises the same errors as `build_reward`."""
    terms: dict[str, tuple[float, Scorer]] = {}
    try:
        for term in spec.all_terms:
            terms[term.label] = (term.weight, _scorer_of(term.name, term.params, spec, device))
    except BaseException:
        for _, scorer in terms.values():
            scorer.close()
        raise
    return terms


def refuse_errors(num_failed: float, num_total: float, first: Callable[[], str], limit: float) -> None:
    """Stops the run if too large a share of a batch could not be graded.

    Counts are sums over all ranks. `first` returns the text of the first failure on any rank. It is called
    only before the error is raised, and then on every rank.

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


def overlong_penalty(lengths: torch.Tensor, overlong: OverlongSpec, max_length: int) -> torch.Tensor:
    """Penalties (B,) float32, from 0 down to −`penalty_factor`, for response lengths (B,) in tokens.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476), times the factor, which is 1 in the
    paper. L_max is `max_length`, L_cache is `buffer_length` (at least 1), both in tokens.
    """
    excess = (lengths - (max_length - overlong.buffer_length)).float() / overlong.buffer_length
    return -overlong.penalty_factor * excess.clamp(0.0, 1.0)


class Reward:
    """Grades episodes: a weighted sum of terms, plus the environment's reward, if it gives one, and the
    penalty for overlong responses."""

    def __init__(
        self, terms: dict[str, tuple[float, Scorer]], overlong: OverlongSpec, max_response_length: int
    ) -> None:
        self._terms = terms
        self._overlong = overlong
        self._max_response_length = max_response_length

    def score(self, episodes: Sequence[Episode], *, read_answers: bool = False) -> RewardResult:
        """Returns one score per episode, in order. Failures are returned, not raised: see `refuse_errors`.

        An episode with an `error` is not graded and not valid. `read_answers` fills `RewardResult.answers`,
        from the first term that can extract them.
        """
        samples = [_sample(episode) for episode in episodes if not episode.error]
        # float64, because in float32 the weights 0.15, 0.65 and 0.2 sum to less than 1.
        total = torch.tensor([episode.reward or 0.0 for episode in episodes], dtype=torch.float64)
        valid = torch.tensor([not episode.error for episode in episodes], dtype=torch.bool)
        # at least one term grades it, or the environment
        applies = torch.tensor([episode.reward is not None for episode in episodes], dtype=torch.bool)
        parts: dict[str, torch.Tensor] = {}
        errors: list[str] = []
        errors_by_term: dict[str, int] = {}
        ended: dict[int, FailureKind] = {}  # row → kind of a failure that the response caused
        answers: list[str | None] = []
        for label, (weight, scorer) in self._terms.items():
            reads = read_answers and not answers and scorer.reads_answers
            found = iter(scorer.grade_and_read(samples, read_answers=reads) if samples else ())
            read = [_NOT_GRADED if episode.error else next(found) for episode in episodes]
            grades = [grade for grade, _ in read]
            if reads:
                answers = [answer for _, answer in read]
            is_skipped = [isinstance(grade, Failure) and grade.kind == "inapplicable" for grade in grades]
            skipped = torch.tensor(is_skipped, dtype=torch.bool)
            scored = [grade.score if isinstance(grade, Failure) else grade for grade in grades]
            failed = torch.tensor([score is None for score in scored], dtype=torch.bool) & ~skipped
            for row, grade in enumerate(grades):
                if isinstance(grade, Failure) and failed[row] and len(errors) < MAX_ERRORS_KEPT:
                    errors.append(grade.text)
                elif isinstance(grade, Failure) and grade.score is not None:
                    ended[row] = grade.kind
            term = torch.tensor([0.0 if score is None else score for score in scored])
            total += weight * term.double()
            valid &= ~failed
            applies |= ~skipped
            parts[label] = term.masked_fill(skipped, torch.nan)
            errors_by_term[label] = int(failed.sum())
        if (valid & ~applies).any():
            errors.append("no term of the reward grades this response: all functions returned None")
            valid &= applies
        graded = None
        if self._overlong.buffer_length:
            graded = total.float()
            lengths = torch.tensor([episode.num_sampled for episode in episodes])
            parts[OVERLONG] = overlong_penalty(lengths, self._overlong, self._max_response_length)
            total += parts[OVERLONG]
        scores = total.float()
        unbounded = valid & ~scores.isfinite()  # the sum or a score overflows float32
        if unbounded.any():
            errors.append(f"the weighted sum is {scores[unbounded][0]} in float32")
            valid &= ~unbounded
        if read_answers and not answers:  # no term extracts answers
            answers = [None] * len(episodes)
        timeouts = Counter(kind for row, kind in ended.items() if valid[row])
        return RewardResult(
            torch.where(valid, scores, 0.0),
            valid,
            parts,
            errors,
            errors_by_term,
            dict(timeouts),
            answers,
            None if graded is None else torch.where(valid, graded, 0.0),
        )

    def close(self) -> None:
        """Ends the grading processes; a later `score` starts new ones."""
        for _, scorer in self._terms.values():
            scorer.close()


def _sample(episode: Episode) -> Sample:
    task = episode.task
    return Sample(
        episode.response,
        task.ground_truth,
        task.text,
        task.data_source,
        task.extra_info,
        task.messages,
        [token for part in episode.sequences for token in part.token_ids[part.sampled].tolist()],
    )
