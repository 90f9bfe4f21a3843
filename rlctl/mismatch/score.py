"""Scores the engine's tokens with the trainer's model under a `ScoringVariant`, and measures the gap."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rlctl.algos.correction import correct, correction_metrics
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, WeightRule
from rlctl.algos.segments import Segments, Units, to_host
from rlctl.algos.total_variation import total_variation_bounds
from rlctl.batch import ModelInputs, TokenLists
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import known
from rlctl.mismatch.settings_fit import RankedLogits, fit_reported
from rlctl.mismatch.variants import AGREE, Cut, SamplingSettings, ScoringVariant, TokenIds
from rlctl.rollout.hf import into_precision
from rlctl.run_spec.memory import MAX_LOGITS

#: Maximum number of tokens to which settings are fitted.
_FITTED_TOKENS = 512
_TOKENS, _SEQUENCES = (CorrectionRules(WeightRule(level)) for level in ("token", "sequence"))
_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"


@dataclass(frozen=True, slots=True)
class Gap:
    """Statistics of r = log π_trainer − log π_engine, in nats, over sampled tokens."""

    #: mean, abs_mean, std, abs_max: of r
    mean: float
    abs_mean: float
    std: float
    abs_max: float
    k3: float  # mean of ρ − 1 − log ρ, an estimate of KL(engine ‖ trainer)
    ess_token: float  # effective sample size of ρ_t over tokens, as a fraction
    ess_sequence: float  # the same of Π ρ_t over sequences
    num_tokens: int  # tokens compared
    num_nonfinite: int  # sequences excluded because of a NaN or infinite log-prob

    @property
    def agrees(self) -> bool:
        """Whether the log-probs agree, so that there is nothing to explain."""
        return self.abs_mean <= AGREE


def measure(trainer: Tensor, engine: Tensor, unit: Segments) -> Gap:
    """The gap between two float32 log-probs (M,) of the same tokens; `unit` are the responses."""
    both = (trainer, engine)
    units = Units.of_responses(unit.lengths)
    of_tokens = correct(*both, units, _TOKENS)
    of_sequences = correct(*both, units, _SEQUENCES)
    by_token = correction_metrics(to_host(of_tokens.sums), _TOKENS)
    by_sequence = correction_metrics(to_host(of_sequences.sums), _SEQUENCES)
    log_ratio = (trainer - engine)[of_tokens.keep].double()
    num_tokens = len(log_ratio)
    if not num_tokens:
        log_ratio = torch.zeros(1, dtype=torch.float64)
    return Gap(
        mean=float(log_ratio.mean()),
        # Clamped like every log-ratio, so that one token of probability 0 does not dominate the mean.
        abs_mean=float(log_ratio.abs().clamp(max=LOG_RATIO_CLAMP).mean()),
        std=float(log_ratio.std(unbiased=False)),
        abs_max=float(log_ratio.abs().max()),
        k3=by_token.get("rollout_corr/k3_kl", 0.0),
        ess_token=by_token.get(_ESS, 0.0),
        ess_sequence=by_sequence.get(_ESS, 0.0),
        num_tokens=num_tokens,
        num_nonfinite=int(of_tokens.nonfinite.sum()),
    )


@dataclass(frozen=True, slots=True)
class GapPart:
    """The gap of the tokens at some positions of the responses, or with some probabilities."""

    by: Literal["position", "probability"]  # counted from 1; the engine's probability of the token
    low: float  # lowest value
    high: float | None  # values are below this; None for the last part
    num_tokens: int
    abs_mean: float  # mean |r|, nats
    share: float  # of Σ r² over all tokens


def parts_of(trainer: Tensor, engine: Tensor, unit: Segments) -> tuple[GapPart, ...]:
    """The gap by position and by probability, without empty parts; arguments as of `measure`."""
    counted = (trainer - engine).isfinite()
    gap_parts = []
    log_ratio = (trainer - engine)[counted].double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    position = 1.0 + unit.places[counted]
    probability = engine[counted].double().exp()
    total = float(log_ratio.square().sum()) or 1.0
    for by, values, limits in (
        ("position", position, (1.0, 5.0, 9.0, 17.0, math.inf)),
        ("probability", probability, (0.0, 0.1, 0.5, 0.9, math.inf)),
    ):
        for low, high in pairwise(limits):
            inside = log_ratio[(values >= low) & (values < high)]
            if len(inside):
                sizes = float(inside.abs().mean()), float(inside.square().sum()) / total
                end = None if high == math.inf else high
                gap_parts.append(GapPart(cast(Any, by), low, end, len(inside), *sizes))
    return tuple(gap_parts)


@dataclass(frozen=True)
class EngineSample:
    """The engine's R responses of M tokens and the log-probs it reports."""

    prompts: TokenIds  # (R) token ids that the engine was given
    tokens: Tensor  # (M,) int64
    reported: Tensor  # (M,) float32, the engine's log-probs
    unit: Segments  # the responses
    listed: TokenLists | None = None  # (M) the engine's most likely tokens; None: it was not asked

    def shifted(self, shift: int) -> tuple[Tensor, Tensor]:
        """(M,) log-probs if reported value t belongs to token t + shift; (M,) bool: where there is one."""
        places = self.unit.places - shift
        return self.reported.roll(shift), (places >= 0) & (places < self.unit.spread(self.unit.lengths))


@dataclass(eq=False)
class VariantScorer:
    """Scores one sample under many variants and caches the results."""

    model: Any  # the trainer's; never changed
    sample: EngineSample  # on the model's device
    prompts: Mapping[str, TokenIds]  # renderings by name, each (R) token ids

    def __post_init__(self) -> None:
        self._policy = PolicyModule(self.model, 1.0)
        self._scores: dict[ScoringVariant, Tensor] = {}
        self._fits: dict[ScoringVariant, SamplingSettings] = {}

    def gap(self, variant: ScoringVariant) -> Gap:
        """The gap between engine and trainer if the trainer scores under this variant."""
        return measure(*self._compared(variant))

    def parts(self, variant: ScoringVariant) -> tuple[GapPart, ...]:
        """The same gap by position and probability."""
        return parts_of(*self._compared(variant))

    def _compared(self, variant: ScoringVariant) -> tuple[Tensor, Tensor, Segments]:
        reported, has_one = self.sample.shifted(variant.shift)
        return self.log_probs(variant)[has_one], reported[has_one], self.sample.unit.kept(has_one)

    def rounding(self, variant: ScoringVariant) -> float:
        """Mean |difference| of the trainer's log-probs in float32 to those in bfloat16, nats per token."""
        other = copy.deepcopy(self.model)
        into_precision(other, "fp32" if other.dtype == torch.bfloat16 else "bf16")
        rounded = VariantScorer(other, self.sample, self.prompts).log_probs(variant)
        return float((self.log_probs(variant) - rounded).abs().mean())

    @torch.no_grad()
    def log_probs(self, variant: ScoringVariant) -> Tensor:
        """(M,) float32 of the engine's tokens."""
        variant = replace(variant, shift=0)  # affects the reported values, not the model
        if variant not in self._scores:
            found = torch.zeros_like(self.sample.reported)
            for wanted in self._pieces(variant):
                found[wanted] = self._scored(variant, wanted)
            self._scores[variant] = found
        return self._scores[variant]

    @torch.no_grad()
    def total_variation(self, variant: ScoringVariant) -> tuple[float, float] | None:
        """Bounds of the total variation of engine and trainer under this variant, the mean over tokens.

        None where the engine lists no most likely tokens, or others than the trainer's vocabulary has, and
        for a truncated distribution, whose trainer's side is not computed here.
        """
        listed = self.sample.listed
        if listed is None or variant.sampling.cut.kind != "none" or int(listed.ids.max()) >= self._vocabulary:
            return None
        everything = torch.ones_like(self.sample.reported, dtype=torch.bool)
        inputs = replace(self._inputs(variant, everything), most_likely=listed)
        self._policy.head.temperature = variant.sampling.temperature
        own = known(self._policy(inputs).most_likely)
        lower, upper = total_variation_bounds(own, listed.padded()[1])
        return float(lower.mean()), float(upper.mean())

    def fitted(self, variant: ScoringVariant, asked: SamplingSettings) -> SamplingSettings:
        """The settings that best explain the reported log-probs, all other factors as in `variant`."""
        if variant not in self._fits:
            self._fits[variant] = fit_reported(*self.ranked(variant, asked.cut), asked)
        return self._fits[variant]

    @torch.no_grad()
    def ranked(self, variant: ScoringVariant, asked: Cut) -> tuple[RankedLogits, Tensor]:
        """Logits of some of the tokens under this variant, and the reported log-probs of these tokens."""
        reported, has_one = self.sample.shifted(variant.shift)
        places = has_one.nonzero().squeeze(1)
        most = min(_FITTED_TOKENS, max(MAX_LOGITS // self._vocabulary, 1))
        wanted = torch.zeros_like(has_one)
        wanted[places[:: max(-(-len(places) // most), 1)]] = True
        logits = self._policy.logits(self._inputs(variant, wanted))
        return RankedLogits(logits, self.sample.tokens[wanted], [asked]), reported[wanted]

    def _scored(self, variant: ScoringVariant, wanted: Tensor) -> Tensor:
        """Log-probs of these tokens: with the code that training uses, or from full logits if truncated."""
        inputs = self._inputs(variant, wanted)
        sampling = variant.sampling
        if sampling.cut.kind == "none":
            self._policy.head.temperature = sampling.temperature
            log_probs: Tensor = self._policy(inputs)[0]
            return log_probs
        ranked = RankedLogits(self._policy.logits(inputs), self.sample.tokens[wanted], [sampling.cut])
        return ranked.log_probs(sampling)

    def _inputs(self, variant: ScoringVariant, wanted: Tensor) -> ModelInputs:
        """Prompts and responses, of which the `wanted` tokens (M,) bool are scored."""
        sizes = self.sample.unit.lengths.tolist()
        device = wanted.device
        prompts = [torch.tensor(ids, device=device) for ids in self.prompts[variant.prompt]]
        responses = torch.split(self.sample.tokens, sizes)
        chosen = torch.split(wanted, sizes)
        ids = [part for pair in zip(prompts, responses, strict=True) for part in pair]
        unscored = [torch.zeros_like(prompt, dtype=torch.bool) for prompt in prompts]
        scored = [part for pair in zip(unscored, chosen, strict=True) for part in pair]
        lengths = self.sample.unit.lengths + torch.tensor([*map(len, prompts)], device=device)
        return ModelInputs(torch.cat(ids), torch.cat(scored), lengths)

    def _pieces(self, variant: ScoringVariant) -> Iterator[Tensor]:
        """(M,) bool: tokens that are scored together; fewer where their logits would not fit in memory."""
        count = len(self.sample.tokens)
        most = count if variant.sampling.cut.kind == "none" else MAX_LOGITS * 4 // self._vocabulary
        piece = torch.arange(count, device=self.sample.tokens.device) // max(most, 1)
        return (piece == number for number in range(int(piece[-1]) + 1 if count else 0))

    @property
    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)
