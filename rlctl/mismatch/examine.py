"""Samples with the engine, scores with the trainer, and finds the causes of the difference.

sample → search over scoring variants → fit of the settings that tokens were sampled with
       → gap left?  sync the trainer's weights, sample again         (did the engine have other weights?)
       → change the weights, sync them, sample again                 (does a sync reach all of them?)
       → gap left?  the same engine in the trainer's precision       (is the precision the cause?)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rlctl.batch import Task, TokenBatch
from rlctl.data.prompts import Renderer
from rlctl.data.schema import Row
from rlctl.environment.single_turn import sample_episodes
from rlctl.mismatch.score import EngineSample, Gap, GapPart, VariantScorer, Weights, all_and_head, moved
from rlctl.mismatch.search import Explanation, Search
from rlctl.mismatch.settings_fit import Drawn, fit_drawn
from rlctl.mismatch.variants import (
    AGREE,
    OWN,
    Cut,
    SamplingSettings,
    ScoringVariant,
    TokenIds,
    renderings,
    token_ids,
)
from rlctl.rollout.protocol import PlainWeights, ResponseSampler, RolloutEngine, Sampling, step_seed

#: An experiment with the engine explains the gap if it leaves at most this fraction of it.
_CLOSED = 0.5
#: Below this mean |log-ratio| the engine's sampled tokens are compared with the trainer's distribution.
_SAME_DISTRIBUTION = 0.05


@dataclass(frozen=True, slots=True)
class Sides:
    """Trainer and engine, and the requested sampling."""

    #: model, tokenizer: the trainer's
    model: Any
    tokenizer: Any
    #: the engine under test; its weights are changed and restored if it supports weight sync
    engine: ResponseSampler
    rows: Sequence[Row]  # prompts
    sampling: Sampling  # requested of the engine; the trainer applies the temperature
    engine_tokenizer: Any = None  # the engine's, if it has a separate one
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of both chat templates
    exact_sampling: bool = False  # the trainer scores the truncated distribution, as requested
    n: int = 4  # responses per prompt
    seed: int = 1  # of sampling
    weights: Mapping[str, Weights] = field(default_factory=dict)  # that the engine may have, by name
    #: stops the engine and returns one in the trainer's precision; None: the engine already has it, or no
    #: other engine is available
    same_precision: Callable[[], ResponseSampler] | None = None

    @property
    def asked(self) -> SamplingSettings:
        """The requested settings; only the first of several truncations."""
        sampling, cut = self.sampling, Cut()
        if sampling.top_p < 1.0:
            cut = Cut("top_p", sampling.top_p)
        elif sampling.top_k > 0:
            cut = Cut("top_k", sampling.top_k)
        elif sampling.min_p > 0.0:
            cut = Cut("min_p", sampling.min_p)
        return SamplingSettings(sampling.temperature, cut)

    @property
    def takes_weights(self) -> bool:
        """Whether the engine supports weight sync."""
        return hasattr(self.engine, "sync_weights")


@dataclass(frozen=True, slots=True)
class Experiment:
    """The gap before and after a change of the engine, scored under the variant found by the search."""

    before: Gap
    after: Gap

    @property
    def closes(self) -> bool:
        """Whether the change removed most of the gap."""
        return not self.before.agrees and self.after.abs_mean <= _CLOSED * self.before.abs_mean

    @property
    def opens(self) -> bool:
        """Whether the change caused a gap."""
        return self.after.abs_mean > 3.0 * self.before.abs_mean + AGREE


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of all comparisons."""

    sides: Sides
    #: scorer, explanation: of the sample from which the causes are derived
    scorer: VariantScorer
    explanation: Explanation
    start: Gap  # the gap of the first sample, unexplained
    parts: tuple[GapPart, ...]  # the same by position and probability
    drawn: Drawn | None  # settings the tokens were sampled with; None: the gap is too large to determine them
    synced: Experiment | None  # after a sync of the trainer's weights; None: not needed, or impossible
    moved: Experiment | None  # after a sync of changed weights; None: impossible, or other weights were found
    stale: str | None  # name of the weights that the engine still had after that; None: none of those tried
    #: with an engine in the trainer's precision; None: not needed, or not available
    same_precision: Experiment | None

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
    scorer = trial.sampled(sides.engine, sides.model)
    explanation = Search(scorer, sides.asked, sides.exact_sampling).explain()
    start, parts = scorer.gap(explanation.start), scorer.parts(explanation.start)

    synced: Experiment | None = None
    before = scorer.gap(explanation.variant)
    is_explained = before.agrees or before.abs_mean <= 0.1 * start.abs_mean
    if not is_explained and sides.takes_weights:
        trial.hand_over(sides.model)
        after = trial.sampled(sides.engine, sides.model)
        again = Search(after, sides.asked, sides.exact_sampling).explain()
        synced = Experiment(before, after.gap(again.variant))
        if synced.closes:
            scorer, explanation = after, again

    variant = explanation.variant
    drawn = None
    if scorer.gap(variant).abs_mean < _SAME_DISTRIBUTION:
        drawn = fit_drawn(scorer.ranked(variant, sides.asked.cut)[0], variant.sampling, sides.asked)
    movement, stale = _moved(trial, scorer, variant) if sides.takes_weights else (None, None)
    precise = None
    if not scorer.gap(variant).agrees and sides.same_precision is not None:
        other = trial.sampled(sides.same_precision(), sides.model)
        precise = Experiment(scorer.gap(variant), other.gap(replace(variant, dtype=OWN)))
    return Examination(sides, scorer, explanation, start, parts, drawn, synced, movement, stale, precise)


def _moved(
    trial: _Sampler, scorer: VariantScorer, variant: ScoringVariant
) -> tuple[Experiment | None, str | None]:
    """Whether a sync reaches every weight, and if not, which remained; restores the engine's weights."""
    usual = scorer.gap(variant)
    if variant.weights != OWN:
        return None, None
    model = trial.sides.model
    other = moved(model)
    trial.hand_over(other)
    after = trial.sampled(trial.sides.engine, other, all_and_head("before the sync", model.state_dict))
    trial.hand_over(model)
    found = Experiment(usual, after.gap(variant))
    if not found.opens:
        return found, None
    left = {name: after.gap(replace(variant, weights=name)).abs_mean for name in after.weights}
    closest = min(left, key=lambda name: left[name])
    return found, closest if left[closest] <= _CLOSED * found.after.abs_mean else None


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
        self._given, self._version = theirs, 0

    def _repeated(self, prompts: TokenIds) -> list[Sequence[int]]:
        return [ids for ids in prompts for _ in range(self.sides.n)]

    def sampled(
        self, engine: ResponseSampler, model: Any, weights: Mapping[str, Weights] | None = None
    ) -> VariantScorer:
        """Samples with the engine and returns a scorer of the sample with `model`."""
        sides, seed = self.sides, step_seed(self.sides.seed, 0, "mismatch")
        tasks = [Task(ids, "", group) for group, ids in enumerate(self._given)]
        episodes = sample_episodes(engine, tasks, sides.n, sides.sampling, seed, sides.tokenizer)
        batch = TokenBatch.of(episodes, next(model.parameters()).device)
        prompts = [episode.task.prompt_ids for episode in episodes]
        sample = EngineSample(prompts, batch.inputs.tokens, batch.rollout_log_probs, batch.units.episode)
        known = sides.weights if weights is None else weights
        return VariantScorer(model, sample, self._prompts, known)

    def hand_over(self, model: Any) -> None:
        """Syncs the model's weights to the engine."""
        self._version += 1
        engine = cast(RolloutEngine, self.sides.engine)
        engine.sync_weights(PlainWeights(model.state_dict().items()), self._version)
