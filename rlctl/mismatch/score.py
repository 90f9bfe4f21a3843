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

from rlctl.algos.correction import correct
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, WeightRule
from rlctl.algos.statistics import correction_metrics
from rlctl.batch import ModelInputs
from rlctl.data.prompts import left_padded
from rlctl.engine.inputs import body_inputs, used_columns
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import RunFailure, first_line
from rlctl.mismatch.settings_fit import RankedLogits, fit_reported
from rlctl.mismatch.variants import AGREE, OWN, Cut, SamplingSettings, ScoringVariant, TokenIds
from rlctl.prefix import body_of
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
    """Statistics of r = log π_trainer − log π_engine, in nats, over response tokens."""

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


def measure(trainer: Tensor, engine: Tensor, mask: Tensor) -> Gap:
    """The gap between two (B, T) float32 log-probs of the same tokens, where `mask` (B, T) bool is True."""
    correction = correct(trainer, engine, mask, _TOKENS)
    by_token = correction_metrics(correction.sums.to_host(), _TOKENS)
    by_sequence = correction_metrics(correct(trainer, engine, mask, _SEQUENCES).sums.to_host(), _SEQUENCES)
    counted = mask & ~correction.nonfinite[:, None]
    log_ratio = (trainer - engine)[counted].double()
    if not len(log_ratio):
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
        num_tokens=int(counted.sum()),
        num_nonfinite=int(correction.nonfinite.sum()),
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


def parts_of(trainer: Tensor, engine: Tensor, mask: Tensor) -> tuple[GapPart, ...]:
    """The gap by position and by probability, without empty parts; arguments as of `measure`."""
    counted = mask & (trainer - engine).isfinite()
    log_ratio, found = (trainer - engine)[counted].double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), []
    position, probability = mask.cumsum(1)[counted].double(), engine[counted].double().exp()
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


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The engine's responses and the log-probs it reports."""

    n: int  # responses per prompt, adjacent
    prompts: TokenIds  # (B) token ids that the engine reports
    responses: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, tokens that the engine sampled
    reported: Tensor  # (B, T) float32, the engine's log-probs
    attended: Tensor  # (B, T) bool, response positions that are not padding

    def shifted(self, shift: int) -> tuple[Tensor, Tensor]:
        """Log-probs if reported value t belongs to token t + shift, and where there is one; both (B, T)."""
        if not shift:
            return self.reported, self.mask
        moved, has_one = self.reported.roll(shift, 1), self.mask & self.mask.roll(shift, 1)
        edge = slice(0, shift) if shift > 0 else slice(shift, None)
        has_one[:, edge] = False
        return moved, has_one


@dataclass(eq=False)
class VariantScorer:
    """Scores one sample under many variants and caches the results."""

    model: Any  # the trainer's; never changed
    sample: EngineSample  # on the model's device
    prompts: Mapping[str, TokenIds]  # renderings by name, each (B) token ids
    weights: Mapping[str, Weights]  # other weights by name
    pad_id: int

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
        reported, mask = self.sample.shifted(variant.shift)
        return measure(self.log_probs(variant), reported, mask)

    def parts(self, variant: ScoringVariant) -> tuple[GapPart, ...]:
        """The same gap by position and probability."""
        reported, mask = self.sample.shifted(variant.shift)
        return parts_of(self.log_probs(variant), reported, mask)

    def effect(self, variant: ScoringVariant, other: ScoringVariant) -> float:
        """Mean |difference| of the trainer's own log-probs between two variants, nats per token."""
        difference = self.log_probs(variant) - self.log_probs(other)
        return float(difference[self.sample.mask].abs().mean())

    @torch.no_grad()
    def log_probs(self, variant: ScoringVariant) -> Tensor:
        """(B, T) float32 of the sampled tokens, 0.0 on padding.

        Raises:
            RunFailure: the model cannot be run under this variant; contains the reason.
        """
        variant = replace(variant, shift=0)  # affects the reported values, not the model
        if variant not in self._scores:
            # The trainer's own code scores without truncation only.
            score = self._as_trainer if variant.sampling.cut.kind == "none" else self._from_logits
            found = torch.zeros_like(self.sample.reported)
            try:
                policy = self._policy(variant)
                for rows in self._rows(variant):
                    score(policy, variant, rows, found)
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
        """Logits of N of the tokens under this variant, and the reported log-probs of these tokens (N,)."""
        reported, mask = self.sample.shifted(variant.shift)
        logits, tokens, values = [], [], []
        policy = self._policy(variant)
        size = policy.model.config.get_text_config().vocab_size
        wanted = _thinned(mask, min(_FITTED_TOKENS, max(MAX_LOGITS // size, 1)))
        for rows in self._rows(variant):
            found = self._logits(policy, variant, rows)
            columns = slice(found.shape[1])
            here = wanted[rows, columns]
            logits.append(found[here])
            tokens.append(self.sample.responses[rows, columns][here])
            values.append(reported[rows, columns][here])
        return RankedLogits(torch.cat(logits), torch.cat(tokens), [asked]), torch.cat(values)

    def _as_trainer(self, policy: PolicyModule, variant: ScoringVariant, rows: slice, out: Tensor) -> None:
        """Scores with the code that training uses."""
        inputs = self._inputs(variant, rows)
        policy.head.temperature = variant.sampling.temperature
        log_probs, _ = policy(inputs)
        out[rows, : log_probs.shape[1]] = log_probs

    def _from_logits(self, policy: PolicyModule, variant: ScoringVariant, rows: slice, out: Tensor) -> None:
        """Scores from full logits, which truncation needs."""
        logits = self._logits(policy, variant, rows)
        columns = slice(logits.shape[1])
        tokens, mask = self.sample.responses[rows, columns], self.sample.mask[rows, columns]
        ranked = RankedLogits(logits[mask], tokens[mask], [variant.sampling.cut])
        out[rows, columns] = out[rows, columns].masked_scatter(mask, ranked.log_probs(variant.sampling))

    def _logits(self, policy: PolicyModule, variant: ScoringVariant, rows: slice) -> Tensor:
        """(b, t, V) logits of the responses of the given rows, of the first t columns."""
        inputs = self._inputs(variant, rows)
        read = body_inputs(body_of(policy.model), inputs, share_prompts=policy.shares_prompts)
        logits: Tensor = policy.model(**read, logits_to_keep=inputs.scored.shape[1]).logits
        return logits

    def _inputs(self, variant: ScoringVariant, rows: slice) -> ModelInputs:
        """Model inputs of the given rows, without columns that no row uses."""
        sample, prompts = self.sample, self.prompts[variant.prompt][rows]
        tensors = (sample.responses[rows], sample.attended[rows], sample.mask[rows])
        return used_columns(lay_out(prompts, *tensors, self.pad_id))

    def _rows(self, variant: ScoringVariant) -> Iterator[slice]:
        """Slices of rows that are run together; smaller ones where the logits would not fit in memory."""
        count, horizon = self.sample.responses.shape
        size = count
        if variant.sampling.cut.kind != "none":
            vocabulary = self.model.config.get_text_config().vocab_size
            size = max(1, MAX_LOGITS * 4 // (horizon * vocabulary))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

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


def lay_out(
    prompts: TokenIds, responses: Tensor, attended: Tensor, scored: Tensor, pad_id: int
) -> ModelInputs:
    """Model inputs of B prompts and responses (B, T), of which `attended` (B, T) are read by attention."""
    prompt_ids, prompt_mask = (part.to(responses.device) for part in left_padded(prompts, pad_id))
    attention_mask = torch.cat([prompt_mask, attended], dim=1)
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return ModelInputs(torch.cat([prompt_ids, responses], dim=1), attention_mask, position_ids, scored)


def _thinned(mask: Tensor, most: int) -> Tensor:
    """(B, T) bool: at most `most` of the True cells, evenly spread."""
    cells = mask.flatten().nonzero().flatten()
    kept = cells[:: max(-(-len(cells) // most), 1)]
    thinned = torch.zeros_like(mask).flatten()
    thinned[kept] = True
    return thinned.view_as(mask)
