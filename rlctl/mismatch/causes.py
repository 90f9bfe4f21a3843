"""Derives causes, with their fixes, and open questions from the comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlctl.mismatch.examine import Examination
from rlctl.mismatch.score import Gap
from rlctl.mismatch.search import Taken
from rlctl.mismatch.variants import (
    ENGINE,
    NO_GENERATION_PROMPT,
    NO_TEMPLATE,
    OWN,
    Cut,
    Factor,
    SamplingSettings,
    first_difference,
)

_SAME_PRECISION = "use one precision on both sides"
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
_CUT_OFF = {"top_p": "rollout.top_p=1", "top_k": "rollout.top_k=-1", "min_p": "rollout.min_p=0"}
_EXPLICIT = (
    "pass temperature, top_p, top_k and min_p to the engine explicitly: missing values may come from the "
    "model's generation_config.json"
)
_PROCESSED = (
    "have the engine report the log-probs of the distribution it samples from (vLLM: "
    "logprobs_mode=processed_logprobs); or pass it the settings, if it ignores them"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of the difference between engine and trainer."""

    name: str  # short and stable, for programs
    what: str  # one sentence
    fix: str  # what to do, in words
    #: changes of the spec that apply the fix or avoid the cause; alternatives, each one or more `key=value`
    spec: tuple[str, ...] = ()
    #: before, after: the gap before and after this cause is accounted for; None until it is computed
    before: Gap | None = None
    after: Gap | None = None
    share: float = 0.0  # explained fraction of the initial mean |log-ratio|


def causes(found: Examination) -> list[Cause]:
    """All causes found: each explains most of what the previous ones leave."""
    everything: list[Cause] = []
    for taken in found.explanation.taken:
        if taken.factor == "sampling":
            everything += _sampling(found, taken)
        else:
            cause = _described(found, taken.factor, str(getattr(taken.after, taken.factor)))
            before, after = found.scorer.gap(taken.before), found.scorer.gap(taken.after)
            everything.append(replace(cause, before=before, after=after))
    everything = list(_in_one_precision(found, everything))
    scale = found.start.abs_mean or 1.0
    for place, cause in enumerate(everything):
        if cause.before and cause.after:
            explained = max(cause.before.abs_mean - cause.after.abs_mean, 0.0)
            everything[place] = replace(cause, share=explained / scale)
    return everything


def _described(found: Examination, factor: Factor, value: str) -> Cause:
    """The cause for a factor other than `sampling`."""
    if factor == "prompt":
        return _prompt(found, value)
    own = _DTYPES.get(str(found.scorer.model.dtype), "")
    whose = "following" if value == "1" else "preceding"
    computes = "has weights rounded to bf16" if value == "bf16 weights" else f"computes in {value}"
    in_own = (f"rollout.dtype={own}", f"engine.dtype={value}")
    described: dict[Factor, Cause] = {
        "shift": Cause(
            "shifted log-probs",
            f"each log-prob reported is that of the {whose} token",
            "log-prob t must be that of response token t; logits at a position predict the next one",
        ),
        "dtype": Cause(
            "dtype",
            f"the engine {computes}, the trainer in {own}",
            _SAME_PRECISION,
            in_own if value in _DTYPES.values() else in_own[:1],
        ),
    }
    return described[factor]


def _prompt(found: Examination, value: str) -> Cause:
    sides, prompts = found.sides, found.scorer.prompts
    where = first_difference(prompts[OWN], prompts[value], sides.tokenizer)
    hidden = "" if value == ENGINE else ", although it was given others"
    theirs = sides.engine_tokenizer or sides.tokenizer
    another = value == ENGINE and theirs.chat_template != sides.tokenizer.chat_template
    if another or value in {NO_GENERATION_PROMPT, NO_TEMPLATE}:
        what = "of another template" if value == ENGINE else f"with {value}"
        fix = "give the engine the trainer's token ids, or both sides one chat template"
        return Cause("chat template", f"the engine reads prompts {what}{hidden}: {where}", fix)
    what = "other token ids" if value == ENGINE else f"prompts with {value}"
    fix = (
        "give the engine token ids instead of text; a template that writes the start token must be "
        "tokenised without adding another"
    )
    return Cause("token ids", f"the engine reads {what}{hidden}: {where}", fix)


def _sampling(found: Examination, taken: Taken) -> Iterator[Cause]:
    """The causes from `sampling`: log-prob mode; or temperature, truncation or both, with their gaps."""
    gap, asked, reported = found.scorer.gap, found.sides.asked, taken.after.sampling
    before, after = gap(taken.before), gap(taken.after)
    if reported == SamplingSettings(1.0):  # another one was requested
        spec = " ".join(("rollout.temperature=1", *_spec(asked.cut)))
        what = f"the log-probs reported are those of {reported} (the raw ones), {asked} was requested"
        yield Cause("log-prob mode", what, _PROCESSED, (spec,), before, after)
        return
    trained = taken.before.sampling.cut
    middle = gap(taken.before.changed("sampling", SamplingSettings(reported.temperature, trained)))
    value = f"{reported.temperature:.3g}"
    if reported.temperature != asked.temperature:
        what = f"the engine samples at temperature {value}, {asked.temperature:.3g} was requested"
        yield Cause("temperature", what, _EXPLICIT, (f"rollout.temperature={value}",), before, middle)
    if reported.cut == trained:
        return
    what, fix = f"the engine samples with {reported.cut}, {asked.cut} was requested", _EXPLICIT
    if reported.cut.is_like(asked.cut):
        what = f"the engine samples with {asked.cut}, as requested; the trainer scores the whole distribution"
        fix = (
            "sample without truncation, or set rollout.exact_sampling: "
            "the removed probability mass biases every ratio"
        )
    yield Cause("truncation", what, fix, _spec(reported.cut), middle, after)


def _spec(cut: Cut) -> tuple[str, ...]:
    return (_CUT_OFF[cut.kind],) if cut.kind in _CUT_OFF else ()


def _in_one_precision(found: Examination, others: list[Cause]) -> Iterator[Cause]:
    """The causes with the gap that the engine has in the trainer's precision, if that closes the gap."""
    precise = found.same_precision
    if precise is None:
        yield from others
        return
    yield from (cause for cause in others if cause.name != "dtype")
    own = _DTYPES[str(found.scorer.model.dtype)]
    what = f"the engine's precision: in {own}, as the trainer, the same engine has a smaller gap"
    imitated = next((cause for cause in others if cause.name == "dtype"), None)
    cause = imitated or Cause("dtype", what, _SAME_PRECISION, (f"rollout.dtype={own}",), found.left)
    yield replace(cause, after=precise)


def open_questions(found: Examination) -> list[str]:
    """Questions that these comparisons cannot answer, and what would answer them."""
    sides, notes = found.sides, []
    if sides.asked == SamplingSettings(1.0):
        notes.append(
            "whether log-probs are raw or processed: at temperature 1 without truncation they are the same; "
            "add --temperature 0.7"
        )
    if found.start.num_nonfinite:
        notes.append(f"{found.start.num_nonfinite} sequences with a NaN or infinite log-prob are excluded")
    return notes


def remainder(found: Examination) -> str | None:
    """Possible origin of the part of the gap that no cause explains; None: there is no such part."""
    left = found.same_precision or found.left
    if left.agrees or left.abs_mean <= 0.1 * found.start.abs_mean:
        return None
    start, own = found.explanation.start, _DTYPES.get(str(found.scorer.model.dtype))
    rounding = found.scorer.effect(start, start.changed("dtype", "fp32" if own == "bf16" else "bf16"))
    size = f"a mean |log-ratio| of {left.abs_mean:.2g} is not explained"
    if left.abs_mean <= 2.0 * rounding:
        return f"{size}, as large as rounding differences ({rounding:.2g}): the two kernels round differently"
    return f"{size}, larger than rounding differences ({rounding:.2g}): other weights, or other model code"
