"""Explanation of a spec as plain data: bands of ρ in words, and numbers of batches and steps.

`rlctl.cli.dry_run` prints it. The memory estimate is in `rlctl.run_spec.memory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlctl.algos.rules import LOG_RATIO_CLAMP, LossRule, RejectRule, WeightRule
from rlctl.capabilities.sections import sections_on
from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA, ClipBand
from rlctl.run_spec.resolve import correction_rules, examples, loss_rule
from rlctl.run_spec.run_spec import RunSpec

#: Tolerance of comparisons of bounds on log ρ.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Band:
    """The effect of one threshold, as an interval of ρ = π_train / π_rollout."""

    name: str  # `IS weight`, the name of the loss's clip, or the criterion as in the spec
    lower: float  # smallest value inside the band (0: no lower bound)
    upper: float  # largest value inside the band (inf: no upper bound)
    bounds: str  # the bounded quantity in words: each token's ρ, the product, the geometric mean
    outside: str  # the effect on values outside the band, in words
    symbol: str = "ρ"  # symbol of the bounded quantity: `ρ`, `w`, or the formula of a statistic

    @property
    def interval(self) -> str:
        """E.g. `0.6 ≤ ρ ≤ 1.6`."""
        lower = f"{_bound(self.lower)} ≤ " if self.lower > 0 else ""
        upper = f" ≤ {_bound(self.upper)}" if self.upper < math.inf else ""
        return f"{lower}{self.symbol}{upper}" if lower or upper else f"any {self.symbol}"


def _bound(value: float) -> str:
    """The value with four digits, or as many more as show its distance from 1: `1.0004`."""
    texts = (f"{value:.{digits}g}" for digits in range(4, 18))
    return next(text for text in texts if abs(float(text) - value) <= 1e-3 * abs(value - 1.0))


class BatchArithmetic:
    """Numbers of samples, mini-batches, micro-batches and optimizer steps of a spec, per batch if not noted.

    `num_rows` is the number of training rows; None: not known before the run. `num_batches` and
    `total_steps`, for the whole run, are None if they depend on them. With a token budget
    (`micro_batch_tokens`), the number of micro-batches depends on the lengths of the responses, and
    `micro_batches_per_rank` is None.
    """

    def __init__(self, spec: RunSpec, num_rows: int | None = None) -> None:
        prompts = spec.data.train_batch_size
        mini = spec.ppo_mini_batch_size
        n = spec.rollout.n
        self.samples = prompts * n
        self.samples_per_mini_batch = mini * n
        self.mini_batches = max(1, prompts // mini)
        self.samples_per_rank = self.samples_per_mini_batch // spec.data_ranks
        self.micro_batch_tokens = spec.pass_tokens
        self.micro_batch_size = min(spec.actor.ppo_micro_batch_size_per_gpu, self.samples_per_rank)
        count = None if self.micro_batch_tokens else -(-self.samples_per_rank // self.micro_batch_size)
        self.micro_batches_per_rank = count
        self.num_rows = num_rows
        self.num_batches = spec.trainer.total_training_steps
        if self.num_batches is None and num_rows is not None:
            self.num_batches = num_rows * spec.trainer.total_epochs // prompts
        #: optimizer steps of the policy, per batch and in the whole run
        self.steps_per_batch = spec.updates_per_batch
        self.total_steps = None
        if self.num_batches is not None:
            trained = max(self.num_batches - spec.trainer.critic_warmup, 0)
            self.total_steps = trained * self.steps_per_batch


def bands(spec: RunSpec) -> list[Band]:
    """Bands of the IS weight, of the loss's clip if it has one, and of every rejection criterion."""
    correction = spec.algorithm.rollout_correction
    rules = correction_rules(correction)
    loss = loss_rule(spec)
    is_measured_only = correction.bypass_mode and loss.has_ratio
    explained = []
    if rules.weight.level is not None:
        explained.append(_weight_band(rules.weight, is_measured_only=is_measured_only))
    clip = POLICY_LOSSES.part(loss.name).clip
    if clip:
        explained.append(_clip_band(clip, loss, bypass=correction.bypass_mode))
    return explained + [_reject_band(rule) for rule in rules.reject]


def notes(spec: RunSpec) -> list[str]:
    """Further remarks on the correction of this spec."""
    correction = spec.algorithm.rollout_correction
    rules = correction_rules(correction)
    lines = []
    if rules.weight.level is None:
        lines.append("No importance weights are applied; the ratios are still measured.")
    if not rules.reject:
        lines.append("Nothing is rejected.")
    lines += _implied(rules.reject, spec.data.max_response_length)
    if spec.rollout.exact_sampling:
        lines.append(
            "Exact sampling: π_θ, π_old and π_ref are renormalised over the tokens that top_p, top_k and "
            "min_p left when each token was sampled."
        )
    for section in sections_on(spec).values():
        lines += section.remarks(spec)
    if correction.bypass_mode:
        lines.append(
            "Bypass mode: π_old is the rollout's own; ρ = π_θ / π_rollout, computed at every update."
        )
    else:
        lines.append("Decoupled: ρ = π_old / π_rollout once per batch, from one extra forward pass.")
    multiplies = rules.weight.level == "sequence" or any(
        rule.reduction == "sum" and rule.statistic in {"ratio", "k1"} for rule in rules.reject
    )
    if multiplies:
        length = spec.data.max_response_length
        lines.append(
            f"A product over {length} tokens reaches the clamp of e^±{LOG_RATIO_CLAMP:g} when the mean "
            f"log-ratio per token is {LOG_RATIO_CLAMP / length:.2g}: watch rollout_corr/saturated_sequences."
        )
    return lines


def _implied(rules: tuple[RejectRule, ...], horizon: int) -> list[str]:
    """A remark for each criterion that another one makes redundant; of two equivalent ones, for the later."""
    lines = []
    for index, rule in enumerate(rules):
        for other_place, other in enumerate(rules):
            is_later = other_place < index or not implies(rule, other, horizon)
            if other is not rule and implies(other, rule, horizon) and is_later:
                lines.append(
                    f"{rule.name} never rejects anything: {other.name} implies it ({rule.name} accepts all "
                    f"that {other.name} accepts). It is only measured."
                )
                break
    return lines


def implies(rule: RejectRule, other: RejectRule, horizon: int) -> bool:
    """Whether `other` accepts everything that `rule` accepts, and so rejects nothing more.

    True is always correct, for responses of 1 to `horizon` tokens. Not every implication is detected:
    those between k2 and k3 are not, nor those from a mean to a sum of k2 or k3.
    """
    removes_less = rule.scope == "token" and other.scope == "sequence"
    if removes_less or (rule.negative_advantage_only and not other.negative_advantage_only):
        return False
    mine = _subject(rule)
    others = _subject(other)
    if mine is None or others is None:
        return False
    (low, high), (least, most) = (tuple(map(_log, each.band())) for each in (rule, other))
    if mine != others:
        # k2 and k3 are never negative, so a bound on their sum also bounds each token's value.
        bounds_tokens = mine in ("token", "sum of k2", "sum of k3")
        # k2 and k3 are convex in log ρ: at the mean of log ρ they are at most their mean (Jensen), so
        # a bound on their mean bounds the geometric mean.
        from_tokens = others in ("token", "mean of k2", "mean of k3")
        follows = others in ("product", "geometric mean") or (bounds_tokens and from_tokens)
        if not follows or low > _ROUNDING or high < -_ROUNDING:
            return False
        if others == "product":
            low = horizon * low
            high = horizon * high
    return low >= least - _ROUNDING and high <= most + _ROUNDING


def _subject(rule: RejectRule) -> str | None:
    """The quantity that `band` bounds; None: there is none (a lower bound on k2, k3 or a maximum)."""
    if not rule.bounds_ratio:
        return None
    if rule.lower is not None and (rule.statistic in ("k2", "k3") or rule.reduction == "max"):
        return None
    if rule.reduction in ("none", "max"):
        return "token"
    if rule.statistic in ("ratio", "k1"):
        return "product" if rule.reduction == "sum" else "geometric mean"
    return f"{rule.reduction} of {rule.statistic}"


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf


def _weight_band(rule: WeightRule, *, is_measured_only: bool) -> Band:
    lower, upper = rule.band()
    weight = CORRECTION_WEIGHTS.part(rule.level or "token")
    outside = {
        "clip": f"the weight is set to the nearer bound, {lower:.4g} or {upper:.4g}",
        "truncate": f"a larger weight is set to {upper:.4g}",
        "mask": "the weight is 0",
    }[rule.bound]
    if rule.normalize:
        outside += "; then all weights are divided by their mean over the mini-batch"
    if is_measured_only:
        outside = "measured, not applied: the loss's own ratio is the correction"
    is_basic = weight.name in ("token", "sequence", "geometric")
    bounds = weight.label if is_basic or not weight.formula else f"w = {weight.formula}: {weight.label}"
    return Band(
        name="IS weight",
        lower=lower,
        upper=upper,
        bounds=bounds,
        outside=outside,
        symbol="ρ" if is_basic else "w",
    )


def criterion_bands(name: str) -> dict[str, str]:
    """Dialect → what the criterion does there with a threshold, as an example; empty if there is none."""
    found = {}
    for dialect, threshold, rule in examples(name):
        band = _reject_band(rule)
        found[dialect] = f"{threshold}: {band.interval}, {band.bounds}; outside: {band.outside}"
    return found


def _clip_band(clip: ClipBand, loss: LossRule, *, bypass: bool) -> Band:
    subject = clip.bounds + (" (π_θ / π_rollout)" if bypass else " (π_θ / π_old, not ρ itself)")
    outside = clip.outside
    if loss.clip_c is not None:
        outside += f"; for negative advantages none above {loss.clip_c:g} either"
    return Band(
        name=clip.name,
        lower=max(0.0, 1.0 - loss.clip_low),
        upper=1.0 + loss.clip_high,
        bounds=subject,
        outside=outside,
    )


def _reject_band(rule: RejectRule) -> Band:
    outside = f"the {'token' if rule.scope == 'token' else 'whole response'} is rejected"
    if rule.negative_advantage_only:
        outside += ", if its advantage is negative"
    if not rule.bounds_ratio:
        part = REJECTION_CRITERIA.part(rule.statistic)
        least = -math.inf if rule.lower is None else rule.lower
        most = math.inf if rule.upper is None else rule.upper
        return Band(
            name=rule.name,
            lower=least,
            upper=most,
            bounds=part.label,
            outside=outside,
            symbol=part.formula or "the value",
        )
    is_product = rule.statistic in {"ratio", "k1"}
    subjects = {
        "none": "each token's ρ",
        "max": "each token's ρ (by its largest violation)",
        "sum": "the product of a response's ρ"
        if is_product
        else f"one token's ρ, if all others were 1 (sum of {rule.statistic})",
        "mean": "the geometric mean of a response's ρ"
        if is_product
        else f"every token's ρ, if all were equal (mean {rule.statistic})",
    }
    if rule.statistic == "ratio" and rule.reduction == "max":
        subjects["max"] = "the largest ρ of a response"
    return Band(rule.name, *rule.band(), subjects[rule.reduction], outside)
