"""Samples with the engine, scores with the trainer, and finds the causes of the difference.

sample → search over scoring variants
       → gap left?  the same engine in the trainer's precision       (is the precision the cause?)

Engine and trainer have the same weights here: `rlctl train --prove-sync` tests syncs, and `rlctl diagnose
--who-sampled` the rollouts of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.batch import Task
from rlctl.data.prompts import Renderer
from rlctl.data.schema import Row
from rlctl.environment.single_turn import sample_episodes
from rlctl.mismatch.score import EngineSample, Gap, GapPart, VariantScorer
from rlctl.mismatch.search import Explanation, Search
from rlctl.mismatch.variants import (
    Cut,
    SamplingSettings,
    TokenIds,
    renderings,
    token_ids,
)
from rlctl.rollout.protocol import ResponseSampler, Sampling
from rlctl.rollout.seeds import step_seed

#: Another precision explains the gap if it leaves at most this fraction of it.
_CLOSED = 0.5


@dataclass(frozen=True, slots=True)
class Sides:
    """Trainer and engine, and the requested sampling."""

    #: model, tokenizer: the trainer's
    model: Any
    tokenizer: Any
    engine: ResponseSampler  # under test, with the trainer's weights
    rows: Sequence[Row]  # prompts
    sampling: Sampling  # requested of the engine; the trainer applies the temperature
    engine_tokenizer: Any = None  # the engine's, if it has a separate one
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of both chat templates
    exact_sampling: bool = False  # the trainer scores the truncated distribution, as requested
    n: int = 4  # responses per prompt
    seed: int = 1  # of sampling
    dtype: str = "fp32"  # the engine's precision
    #: stops the engine and returns one in the trainer's precision; None: the engine already has it, or no
    #: other engine is available
    same_precision: Callable[[], ResponseSampler] | None = None

    @property
    def asked(self) -> SamplingSettings:
        """The requested settings; only the first of several truncations."""
        sampling = self.sampling
        cut = Cut()
        if sampling.top_p < 1.0:
            cut = Cut("top_p", sampling.top_p)
        elif sampling.top_k > 0:
            cut = Cut("top_k", sampling.top_k)
        elif sampling.min_p > 0.0:
            cut = Cut("min_p", sampling.min_p)
        return SamplingSettings(sampling.temperature, cut)


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of all comparisons."""

    sides: Sides
    scorer: VariantScorer
    explanation: Explanation
    start: Gap  # unexplained
    parts: tuple[GapPart, ...]  # the same by position and probability
    #: the gap of the same engine in the trainer's precision, if that explains most of the gap; else None
    same_precision: Gap | None
    #: bounds of the distance of the whole distributions, unexplained; None: the engine lists no tokens
    total_variation: tuple[float, float] | None = None

    @property
    def left(self) -> Gap:
        """The gap that the scoring variant found by the search leaves."""
        return self.scorer.gap(self.explanation.variant)


def examine(sides: Sides) -> Examination:
    """Runs all comparisons.

    Raises:
        RunFailure: the engine failed.
        UsageError: a prompt cannot be rendered.
    """
    trial = _Sampler(sides)
    scorer = trial.sampled(sides.engine)
    explanation = Search(scorer, sides.asked, sides.exact_sampling).explain()
    variant = explanation.variant
    precise = None
    if not scorer.gap(variant).agrees and sides.same_precision is not None:
        other = trial.sampled(sides.same_precision()).gap(variant)
        precise = other if other.abs_mean <= _CLOSED * scorer.gap(variant).abs_mean else None
    start = scorer.gap(explanation.start)
    parts = scorer.parts(explanation.start)
    apart = scorer.total_variation(explanation.start)
    return Examination(
        sides=sides,
        scorer=scorer,
        explanation=explanation,
        start=start,
        parts=parts,
        same_precision=precise,
        total_variation=apart,
    )


class _Sampler:
    """Samples the same prompts repeatedly."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        renderer = Renderer(sides.tokenizer, sides.template_kwargs)
        own = theirs = token_ids(sides.rows, renderer)
        if sides.engine_tokenizer:
            theirs = token_ids(sides.rows, Renderer(sides.engine_tokenizer, sides.template_kwargs))
        found = renderings(sides.rows, own, theirs, renderer)
        self._prompts = {name: self._repeated(ids) for name, ids in found.items()}
        self._given = theirs

    def _repeated(self, prompts: TokenIds) -> list[Sequence[int]]:
        return [ids for ids in prompts for _ in range(self.sides.n)]

    def sampled(self, engine: ResponseSampler) -> VariantScorer:
        """Samples with the engine and returns a scorer of the sample."""
        sides = self.sides
        seed = step_seed(self.sides.seed, 0, "mismatch")
        tasks = [Task(ids, "", group) for group, ids in enumerate(self._given)]
        episodes = sample_episodes(engine, tasks, sides.n, sides.sampling, seed, sides.tokenizer)
        batch = episodes.tokens.to(next(sides.model.parameters()).device)
        prompts = [task.prompt_ids for task in episodes.tasks]
        columns = batch.inputs.tokens, batch.rollout_log_probs, batch.units.episode
        sample = EngineSample(prompts, *columns, batch.columns.get("most_likely"))
        return VariantScorer(sides.model, sample, self._prompts)
