"""Builds the reward of a spec, and combines the scores of its terms.

Each term has one grader; the term `auto` selects the grader of each row by the name of its data source. This
module imports neither torch nor Pydantic, because it registers a grader.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from rlctl.episodes import Episodes
from rlctl.errors import RunFailure
from rlctl.extras import missing_package
from rlctl.lazy import torch
from rlctl.metric_names import OVERLONG
from rlctl.registry import GRADERS
from rlctl.reward.pool import GradingPool, is_ours, is_scorer
from rlctl.reward.protocol import (
    Failure,
    FailureKind,
    Grade,
    GradeAndAnswer,
    RewardResult,
    Sample,
    Scorer,
    exact_sum,
)
from rlctl.reward.thoughts import without_thoughts

if TYPE_CHECKING:
    from rlctl.batch import Episode
    from rlctl.run_spec.rollout import OverlongSpec, RewardSpec

MAX_ERRORS_KEPT = 5
_NO_ANSWER: GradeAndAnswer = (Failure("the row has no answer", "inapplicable"), None)
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


def named_grader(by_source: Mapping[str, str], data_source: str) -> str | None:
    """The grader that `reward.by_source` names for rows of this source; None: it names none.

    A source is named as the rows name it, or by its file: without `data_source`, rows have the file's name.
    """
    named = {key.rstrip("/").rpartition("/")[2].split(".")[0]: grader for key, grader in by_source.items()}
    return by_source.get(data_source, named.get(data_source))


def knows_source(data_source: str) -> bool:
    """Whether a grader is known for this source; other sources are graded as mathematics."""
    return _registered(data_source) is not None


def scorer_of(name: str, params: dict[str, Any], spec: RewardSpec, device: torch.device | None) -> Scorer:
    """The scorer of one term; a user's function is imported in a process of its own.

    `device` is that of a reward model; None: `rlctl.batch.torch_device()`.

    Raises:
        UsageError, EnvironmentFailure: as `build_reward`.
    """
    if is_scorer(name):
        scorer: Scorer = GRADERS[name](spec, device)
        return scorer
    if is_ours(name) and GRADERS.part(name).in_process:
        return LocalScorer(name)
    pool = GradingPool(name, params, threads=spec.threads)
    if not is_ours(name):
        pool.check()
    return pool


class LocalScorer(Scorer):
    """Calls a built-in grader in this process, once for equal texts: its grade depends on nothing else."""

    reads_answers = True

    def __init__(self, name: str) -> None:
        part = GRADERS.part(name)
        self._function = part.function
        self._answer_of = part.answer_of

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers."""
        answer_of = self._answer_of if read_answers else None
        texts = [(sample.prompt, sample.response, sample.ground_truth) for sample in samples]
        known: dict[tuple[str, str, str], GradeAndAnswer] = {}
        for prompt, response, ground_truth in dict.fromkeys(texts):  # responses repeat
            text = without_thoughts(response, prompt)
            grade: Grade
            try:
                grade = float(self._function(text, ground_truth))
            except Exception as error:
                missing = missing_package(error)
                if missing:
                    raise missing from error
                grade = Failure(traceback.format_exc())
            known[prompt, response, ground_truth] = grade, answer_of(text) if answer_of else None
        return [known[key] for key in texts]


@GRADERS.register(
    "auto",
    label="by each row's source",
    formula="the score of the grader of the row's `data_source`; `maths` for sources without a grader",
)
class SourceScorer(Scorer):
    """Grades each row with the grader of its data source; a grader is started when first needed.

    `reward.by_source` comes before the graders' own names. Rows without an answer are not graded, unless
    `by_source` names what grades them.
    """

    reads_answers = True

    def __init__(self, spec: RewardSpec, device: torch.device | None) -> None:
        self._by_source = spec.by_source
        self._start = partial(scorer_of, params={}, spec=spec, device=device)
        self._scorers: dict[str, Scorer] = {}
        self._remarks: list[str] = []

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers, in the order of the samples."""
        sources = {sample.data_source for sample in samples}
        named = {source: named_grader(self._by_source, source) for source in sources}
        graders = {source: grader or grader_for(source) for source, grader in named.items()}
        chosen = [
            graders[sample.data_source] if named[sample.data_source] or sample.ground_truth else ""
            for sample in samples
        ]
        graded = [_NO_ANSWER] * len(samples)
        remarks = [""] * len(samples)
        for grader in dict.fromkeys(filter(None, chosen)):
            rows = [row for row, own in enumerate(chosen) if own == grader]
            if grader not in self._scorers:
                self._scorers[grader] = self._start(grader)
            some = [samples[row] for row in rows]
            found = self._scorers[grader].grade_and_read(some, read_answers=read_answers)
            for row, grade in zip(rows, found, strict=True):
                graded[row] = grade
            for row, remark in zip(rows, self._scorers[grader].take_remarks(), strict=False):
                remarks[row] = remark
        self._remarks = remarks
        return graded

    def take_remarks(self) -> list[str]:
        """What the graders said of each sample of the last grading."""
        return self._remarks

    def same_answers(self, samples: Sequence[Sample], answers: Sequence[str | None]) -> list[str | None]:
        """The answers, with one text for all that their grader holds equal."""
        joined = list(answers)
        for grader, scorer in self._scorers.items():
            places = [n for n, sample in enumerate(samples) if grader_for(sample.data_source) == grader]
            own = scorer.same_answers([samples[n] for n in places], [answers[n] for n in places])
            for n, answer in zip(places, own, strict=True):
                joined[n] = answer
        return joined

    def close(self) -> None:
        """Ends the grading processes."""
        for scorer in self._scorers.values():
            scorer.close()


def build_reward(
    spec: RewardSpec, *, max_response_length: int, device: torch.device | None = None, tokenizer: Any = None
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


def build_terms(spec: RewardSpec, device: torch.device | None = None) -> dict[str, tuple[float, Scorer]]:
    """Returns label → (weight, scorer) for every term; raises the same errors as `build_reward`."""
    terms: dict[str, tuple[float, Scorer]] = {}
    try:
        for term in spec.all_terms:
            terms[term.label] = (term.weight, scorer_of(term.name, term.params, spec, device))
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
    """Penalties (B,) float64, from 0 down to −`penalty_factor`, for response lengths (B,) in tokens.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476), times the factor, which is 1 in the
    paper. L_max is `max_length`, L_cache is `buffer_length` (at least 1), both in tokens.
    """
    excess = (lengths - (max_length - overlong.buffer_length)).double() / overlong.buffer_length
    return -overlong.penalty_factor * excess.clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _TermScores:
    """The grades of one term of the reward, as columns."""

    scores: list[float]  # (E,) 0.0 where there is none
    skipped: torch.Tensor  # (E,) bool: the term does not apply
    failed: torch.Tensor  # (E,) bool: it applies, and gave no score
    errors: list[str]  # the first few failures, as text
    ended: dict[int, FailureKind]  # row → kind of a failure that the response caused

    @classmethod
    def of(cls, grades: Sequence[Grade]) -> _TermScores:
        """The columns of these grades."""
        scores = [0.0] * len(grades)
        skipped, failed = (torch.zeros(len(grades), dtype=torch.bool) for _ in range(2))
        errors: list[str] = []
        ended: dict[int, FailureKind] = {}
        for row, grade in enumerate(grades):
            if not isinstance(grade, Failure):
                scores[row] = grade
                continue
            skipped[row] = grade.kind == "inapplicable"
            if grade.score is not None:
                scores[row] = grade.score
                ended[row] = grade.kind
            elif grade.kind != "inapplicable":
                failed[row] = True
                errors.append(grade.text)
        return cls(
            scores=scores,
            skipped=skipped,
            failed=failed,
            errors=errors[:MAX_ERRORS_KEPT],
            ended=ended,
        )


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
        columns = Episodes.of(episodes)
        asked = [place for place, error in enumerate(columns.errors) if not error]
        samples = _samples(columns, asked)
        # columns whose sum is the score
        addends: list[list[float]] = [[reward or 0.0 for reward in columns.rewards]]
        valid = ~columns.failed
        # at least one term grades it, or the environment
        applies = torch.tensor([reward is not None for reward in columns.rewards], dtype=torch.bool)
        parts: dict[str, torch.Tensor] = {}
        errors: list[str] = []
        errors_by_term: dict[str, int] = {}
        ended: dict[int, FailureKind] = {}  # row → kind of a failure that the response caused
        answers: list[str | None] = []
        remarks: list[dict[str, str]] = [{} for _ in columns.tasks]
        for label, (weight, scorer) in self._terms.items():
            reads = read_answers and not answers and scorer.reads_answers
            read = [_NOT_GRADED] * len(columns)
            if samples:
                grades = scorer.grade_and_read(samples, read_answers=reads)
                for place, graded_sample in zip(asked, grades, strict=True):
                    read[place] = graded_sample
                for place, remark in zip(asked, scorer.take_remarks(), strict=False):
                    if remark:
                        remarks[place][label] = remark
            if reads:
                answers = _same_answers(scorer, columns, [answer for _, answer in read])
            term = _TermScores.of([grade for grade, _ in read])
            errors += term.errors
            ended |= term.ended
            addends.append([weight * score for score in term.scores])
            valid &= ~term.failed
            applies |= ~term.skipped
            parts[label] = torch.tensor(term.scores, dtype=torch.float32).masked_fill(term.skipped, torch.nan)
            errors_by_term[label] = int(term.failed.sum())
        errors = errors[:MAX_ERRORS_KEPT]
        if (valid & ~applies).any():
            errors.append("no term of the reward grades this response: all functions returned None")
            valid &= applies
        graded = None
        if self._overlong.buffer_length:
            graded = _summed(addends)
            penalties = overlong_penalty(columns.num_sampled, self._overlong, self._max_response_length)
            parts[OVERLONG] = penalties.float()
            addends.append(penalties.tolist())
        scores = _summed(addends)
        unbounded = valid & ~scores.isfinite()  # the sum or a score overflows float32
        if unbounded.any():
            errors.append(f"the weighted sum is {scores[unbounded][0]} in float32")
            valid &= ~unbounded
        if read_answers and not answers:  # no term extracts answers
            answers = [None] * len(columns)
        timeouts = Counter(kind for row, kind in ended.items() if valid[row])
        return RewardResult(
            scores=torch.where(valid, scores, 0.0),
            valid=valid,
            parts=parts,
            errors=errors,
            errors_by_term=errors_by_term,
            timeouts=dict(timeouts),
            answers=answers,
            remarks=remarks if any(remarks) else [],
            before_penalty=None if graded is None else torch.where(valid, graded, 0.0),
        )

    def close(self) -> None:
        """Ends the grading processes; a later `score` starts new ones."""
        for _, scorer in self._terms.values():
            scorer.close()


def _same_answers(scorer: Scorer, episodes: Episodes, answers: Sequence[str | None]) -> list[str | None]:
    """The answers of episodes, with one text for all that the grader holds equal."""
    places = [place for place, answer in enumerate(answers) if answer is not None]
    own = [answers[place] for place in places]
    same = dict(zip(places, scorer.same_answers(_samples(episodes, places), own), strict=True))
    return [same.get(place) for place in range(len(answers))]


def _summed(columns: Sequence[Sequence[float]]) -> torch.Tensor:
    """(E,) float32: the sum of each episode's numbers, one of each column."""
    rows = list(zip(*columns, strict=True))
    sums = {row: exact_sum(row) for row in set(rows)}  # scores repeat: few of them differ
    return torch.tensor([sums[row] for row in rows], dtype=torch.float64).float()


def _samples(episodes: Episodes, places: Sequence[int]) -> list[Sample]:
    """What graders read of the episodes at these places."""
    tokens = episodes.tokens
    ids = tokens.token_ids[tokens.sampled].tolist()
    ends = episodes.num_sampled.cumsum(0).tolist()
    starts = [0, *ends]
    tasks = [episodes.tasks[place] for place in places]
    return [
        Sample(  # by position: half the time
            episodes.responses[place],
            task.ground_truth,
            task.text,
            task.data_source,
            task.extra_info,
            task.messages,
            ids[starts[place] : ends[place]],
            episodes.messages[place],
        )
        for place, task in zip(places, tasks, strict=True)
    ]
