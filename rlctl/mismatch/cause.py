"""Causes of a gap that another scoring variant explains, in words, with what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlctl.mismatch.examine import Examination
from rlctl.mismatch.gap import Gap
from rlctl.mismatch.layout import POSITION_MISTAKES
from rlctl.mismatch.prompts import ENGINE, NO_GENERATION_PROMPT, NO_TEMPLATE, first_difference
from rlctl.mismatch.scoring_variant import OWN, Factor

_FINER = ("engine.dtype=fp32 rollout.dtype=fp32", "algorithm.rollout_correction.rollout_is=token")
_ROUNDING_FIX = "compute in a finer precision on both sides, or correct for the gap"
SYNC_FIX = (
    "check that every weight sync ends before sampling starts, "
    "and that the engine's prefix cache is cleared after it"
)
DTYPE_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why the two sides differ.

    Attributes:
        name: short and stable, for programs.
        what: one sentence.
        fix: what to do, in words.
        spec: changes of the spec that do it, or avoid it; alternatives, each one or more `key=value`.
        before, after: the gap without and with it explained; None: it does not show in the gap.
        share: of the mean |log-ratio| at the start that it explains; 0.0 where it does not show.
    """

    name: str
    what: str
    fix: str
    spec: tuple[str, ...] = ()
    before: Gap | None = None
    after: Gap | None = None
    share: float = 0.0


def _prompt(found: Examination, value: str) -> Cause:
    sides, prompts = found.sides, found.scorer.prompts
    where = first_difference(prompts[OWN], prompts[value], sides.tokenizer)
    told = value == ENGINE or list(found.scorer.sample.prompts) == list(prompts[value])
    hidden = "" if told else ", though it does not say so"
    theirs = sides.engine_tokenizer or sides.tokenizer
    another = value == ENGINE and theirs.chat_template != sides.tokenizer.chat_template
    if another or value in {NO_GENERATION_PROMPT, NO_TEMPLATE}:
        what = "of another template" if value == ENGINE else f"with {value}"
        return Cause(
            "chat template",
            f"the engine reads prompts {what}{hidden}: {where}",
            "give the engine the trainer's token ids, or both sides one chat template",
        )
    what = "other token ids" if value == ENGINE else f"prompts with {value}"
    return Cause(
        "token ids",
        f"the engine reads {what}{hidden}: {where}",
        "give the engine token ids instead of text; a template that writes the start token must be "
        "tokenised without adding another",
    )


def _shift(found: Examination, value: str) -> Cause:
    whose = "following" if value == "1" else "preceding"
    return Cause(
        "shifted log-probs",
        f"each log-prob reported is that of the {whose} token",
        "log-prob t must be that of response token t; logits at a position predict the next one",
    )


def _positions(found: Examination, value: str) -> Cause:
    return Cause(
        "positions",
        f"prompts of different lengths are padded wrongly: {POSITION_MISTAKES[value]}",
        "number positions from the first real token, and mask padding",
    )


def _weights(found: Examination, value: str) -> Cause:
    return Cause("stale weights", f"the engine's weights are those of {value}", SYNC_FIX)


def _dtype(found: Examination, value: str) -> Cause:
    what = "has weights rounded to bf16" if value == "bf16 weights" else f"computes in {value}"
    own = DTYPE_NAMES[str(found.scorer.model.dtype)]
    spec = (f"rollout.dtype={own}", f"engine.dtype={value}")
    return Cause(
        "dtype",
        f"the engine {what}, the trainer in {own}",
        "use one precision on both sides",
        spec if value in DTYPE_NAMES.values() else spec[:1],
    )


def _steps(found: Examination, value: str) -> Cause:
    what = "sampling goes token by token with a cache, scoring is one pass, and the two round differently"
    return Cause("prefill against decode", what, _ROUNDING_FIX, _FINER)


def _attention(found: Examination, value: str) -> Cause:
    own = found.scorer.model.config._attn_implementation
    return Cause(
        "attention kernel",
        f"the engine's attention rounds as `{value}` does, the trainer runs `{own}`",
        "use one kernel on both sides, or a finer precision",
        (f"model.attn_implementation={value}", *_FINER[:1]),
    )


def _rows(found: Examination, value: str) -> Cause:
    what = "prompts are run one by one, in the trainer together with padding, and the two round differently"
    return Cause("batch size", what, _ROUNDING_FIX, _FINER)


#: What each factor but `sampling` is as a cause.
DESCRIBED: Mapping[Factor, Callable[[Examination, str], Cause]] = {
    "prompt": _prompt,
    "shift": _shift,
    "positions": _positions,
    "weights": _weights,
    "dtype": _dtype,
    "steps": _steps,
    "attention": _attention,
    "rows": _rows,
}
