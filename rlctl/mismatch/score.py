"""Scores the engine's tokens with the trainer's model under a `ScoringVariant`, and measures the gap."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rlctl.algos.correction import correct, correction_metrics
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, WeightRule
from rlctl.algos.segments import Segments, Units, to_host
from rlctl.batch import ModelInputs
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import RunFailure, first_line
from rlctl.mismatch.settings_fit import RankedLogits, fit_reported
from rlctl.mismatch.variants import AGREE, OWN, Cut, SamplingSettings, ScoringVariant, TokenIds
from rlctl.rollout.hf import into_precision
from rlctl.spec.memory import MAX_LOGITS

#: Loads other weights into a copy of the trainer's model.
Weights = Callable[[Any], None]
#: `bf16 weights`: weights rounded to bfloat16, arithmetic as in the trainer.
DTYPES = ("bf16", "bf16 weights", "int8", "fp32")
#: Maximum number of tokens to which settings are fitted.
_FITTED_TOKENS = 512
#: Size of the change of each parameter in the sync check, as a fraction of its root mean square.
_MOVED_BY = 0.05
_TOKENS, _SEQUENCES = (CorrectionRules(WeightRule(level)) for level in ("token", "sequence"))
_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"


def all_and_head(name: str, state: Callable[[], dict[str, Tensor]]) -> dict[str, Weights]:
    """Two hypotheses: all weights are those of `state`; or only the output head, which a sync missed.

    `name` is that of these weights, such as `step 40`; `state` is called when they are needed.
    """

    def put_all(model: Any) -> None:
        model.load_state_dict(state())

    def put_head(model: Any) -> None:
        head = copy.deepcopy(model.get_output_embeddings())
        names = model.state_dict(keep_vars=True).items()
        name = next(name for name, tensor in names if tensor is model.get_output_embeddings().weight)
        head.weight = nn.Parameter(state()[name].to(head.weight), requires_grad=False)
        model.set_output_embeddings(head)  # separate, even if tied to the embeddings

    return {name: put_all, f"{name}, output head only": put_head}


@torch.no_grad()
def moved(model: Any) -> Any:
    """A copy of the model with a small random change of every parameter."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=draw).to(parameter)
        parameter.add_(_MOVED_BY * parameter.float().square().mean().sqrt().to(parameter) * noise)
    return other


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
    both, units = (trainer, engine), Units.of_responses(unit.lengths)
    of_tokens, of_sequences = correct(*both, units, _TOKENS), correct(*both, units, _SEQUENCES)
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
    counted, found = (trainer - engine).isfinite(), []
    log_ratio = (trainer - engine)[counted].double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    position, probability = 1.0 + unit.places[counted], engine[counted].double().exp()
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
                found.append(GapPart(cast(Any, by), low, end, len(inside), *sizes))
    return tuple(found)


@dataclass(frozen=True)
class EngineSample:
    """The engine's R responses of M tokens and the log-probs it reports."""

    prompts: TokenIds  # (R) token ids that the engine was given
    tokens: Tensor  # (M,) int64
    reported: Tensor  # (M,) float32, the engine's log-probs
    unit: Segments  # the responses

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
    weights: Mapping[str, Weights]  # other weights by name

    def __post_init__(self) -> None:
        self._own = PolicyModule(self.model, 1.0)
        self._changed: tuple[tuple[str, str], PolicyModule] | None = None
        self._scores: dict[ScoringVariant, Tensor] = {}
        self._fits: dict[ScoringVariant, SamplingSettings] = {}

    def gap(self, variant: ScoringVariant) -> Gap:
        """The gap between engine and trainer if the trainer scores under this variant.

        Raises:
            RunFailure: the model cannot be run under this variant; contains the reason.
        """
        return measure(*self._compared(variant))

    def parts(self, variant: ScoringVariant) -> tuple[GapPart, ...]:
        """The same gap by position and probability."""
        return parts_of(*self._compared(variant))

    def _compared(self, variant: ScoringVariant) -> tuple[Tensor, Tensor, Segments]:
        reported, has_one = self.sample.shifted(variant.shift)
        return self.log_probs(variant)[has_one], reported[has_one], self.sample.unit.kept(has_one)

    def effect(self, variant: ScoringVariant, other: ScoringVariant) -> float:
        """Mean |difference| of the trainer's own log-probs between two variants, nats per token."""
        return float((self.log_probs(variant) - self.log_probs(other)).abs().mean())

    @torch.no_grad()
    def log_probs(self, variant: ScoringVariant) -> Tensor:
        """(M,) float32 of the engine's tokens.

        Raises:
            RunFailure: the model cannot be run under this variant; contains the reason.
        """
        variant = replace(variant, shift=0)  # affects the reported values, not the model
        if variant not in self._scores:
            found = torch.zeros_like(self.sample.reported)
            try:
                policy = self._policy(variant)
                for wanted in self._pieces(variant):
                    found[wanted] = self._scored(policy, variant, wanted)
            except (RuntimeError, ValueError, ImportError, KeyError) as error:  # no such kernel, no memory
                reason = first_line(error)
                raise RunFailure(f"the model cannot run with this setting: {reason}") from error
            self._scores[variant] = found
        return self._scores[variant]

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
        logits = self._policy(variant).logits(self._inputs(variant, wanted))
        return RankedLogits(logits, self.sample.tokens[wanted], [asked]), reported[wanted]

    def _scored(self, policy: PolicyModule, variant: ScoringVariant, wanted: Tensor) -> Tensor:
        """Log-probs of these tokens: with the code that training uses, or from full logits if truncated."""
        inputs, sampling = self._inputs(variant, wanted), variant.sampling
        if sampling.cut.kind == "none":
            policy.head.temperature = sampling.temperature
            log_probs: Tensor = policy(inputs)[0]
            return log_probs
        ranked = RankedLogits(policy.logits(inputs), self.sample.tokens[wanted], [sampling.cut])
        return ranked.log_probs(sampling)

    def _inputs(self, variant: ScoringVariant, wanted: Tensor) -> ModelInputs:
        """Prompts and responses, of which the `wanted` tokens (M,) bool are scored."""
        sizes, device = self.sample.unit.lengths.tolist(), wanted.device
        prompts = [torch.tensor(ids, device=device) for ids in self.prompts[variant.prompt]]
        responses, chosen = torch.split(self.sample.tokens, sizes), torch.split(wanted, sizes)
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

    def _policy(self, variant: ScoringVariant) -> PolicyModule:
        """The trainer's model, or a changed copy (the last one is cached)."""
        change = (variant.weights, variant.dtype)
        if change == (OWN, OWN):
            return self._own
        if self._changed is None or self._changed[0] != change:
            self._changed = None  # freed before the next copy is allocated
            policy = copy.deepcopy(self._own)
            if variant.weights != OWN:
                self.weights[variant.weights](policy.model)
            if variant.dtype == "bf16 weights":
                own = next(policy.model.parameters()).dtype
                into_precision(policy.model, "bf16")
                policy.model.to(own)
            elif variant.dtype != OWN:
                into_precision(policy.model, cast(Literal["fp32", "bf16", "int8"], variant.dtype))
            self._changed = (change, policy)
        return self._changed[1]
