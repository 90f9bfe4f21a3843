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
    SamplingSettings,
    ScoringVariant,
    first_difference,
)

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


def causes(examination: Examination) -> list[Cause]:
    """All causes found: each explains most of what the previous ones leave."""
    everything: list[Cause] = []
    for taken in examination.explanation.taken:
        if taken.factor == "sampling":
            everything += _sampling(examination, taken)
        else:
            describe = _prompt if taken.factor == "prompt" else _shift
            cause = describe(examination, taken.after)
            before = examination.scorer.gap(taken.before)
            after = examination.scorer.gap(taken.after)
            everything.append(replace(cause, before=before, after=after))
    everything += _dtype(examination)
    scale = examination.start.abs_mean or 1.0
    for index, cause in enumerate(everything):
        if cause.before and cause.after:
            explained = max(cause.before.abs_mean - cause.after.abs_mean, 0.0)
            everything[index] = replace(cause, share=explained / scale)
    return everything


def _shift(found: Examination, after: ScoringVariant) -> Cause:
    whose = "following" if after.shift == 1 else "preceding"
    message = f"each log-prob reported is that of the {whose} token"
    fix = "log-prob t must be that of response token t; logits at a position predict the next one"
    return Cause("shifted log-probs", message, fix)


def _prompt(found: Examination, after: ScoringVariant) -> Cause:
    sides = found.sides
    prompts = found.scorer.prompts
    value = after.prompt
    where = first_difference(prompts[OWN], prompts[value], sides.tokenizer)
    hidden = "" if value == ENGINE else ", although it was given others"
    theirs = sides.engine_tokenizer or sides.tokenizer
    another = value == ENGINE and theirs.chat_template != sides.tokenizer.chat_template
    if another or value in {NO_GENERATION_PROMPT, NO_TEMPLATE}:
        message = "of another template" if value == ENGINE else f"with {value}"
        fix = "give the engine the trainer's token ids, or both sides one chat template"
        return Cause("chat template", f"the engine reads prompts {message}{hidden}: {where}", fix)
    message = "other token ids" if value == ENGINE else f"prompts with {value}"
    fix = (
        "give the engine token ids instead of text; a template that writes the start token must be "
        "tokenised without adding another"
    )
    return Cause("token ids", f"the engine reads {message}{hidden}: {where}", fix)


def _sampling(examination: Examination, taken: Taken) -> Iterator[Cause]:
    """The causes from `sampling`: log-prob mode; or temperature, truncation or both, with their gaps."""
    gap = examination.scorer.gap
    asked = examination.sides.asked
    reported = taken.after.sampling
    before = gap(taken.before)
    after = gap(taken.after)
    if reported == SamplingSettings(1.0):  # another one was requested
        spec = " ".join(("rollout.temperature=1", *_spec(asked.cut)))
        message = f"the log-probs reported are those of {reported} (the raw ones), {asked} was requested"
        yield Cause(
            name="log-prob mode",
            what=message,
            fix=_PROCESSED,
            spec=(spec,),
            before=before,
            after=after,
        )
        return
    trained = taken.before.sampling.cut
    middle = gap(taken.before.changed("sampling", SamplingSettings(reported.temperature, trained)))
    value = f"{reported.temperature:.3g}"
    if reported.temperature != asked.temperature:
        message = f"the engine samples at temperature {value}, {asked.temperature:.3g} was requested"
        yield Cause(
            name="temperature",
            what=message,
            fix=_EXPLICIT,
            spec=(f"rollout.temperature={value}",),
            before=before,
            after=middle,
        )
    if reported.cut == trained:
        return
    message = f"the engine samples with {reported.cut}, {asked.cut} was requested"
    fix = _EXPLICIT
    if reported.cut.is_like(asked.cut):
        message = (
            f"the engine samples with {asked.cut}, as requested; the trainer scores the whole distribution"
        )
        fix = (
            "sample without truncation, or set rollout.exact_sampling: "
            "the removed probability mass biases every ratio"
        )
    yield Cause(
        name="truncation",
        what=message,
        fix=fix,
        spec=_spec(reported.cut),
        before=middle,
        after=after,
    )


def _spec(cut: Cut) -> tuple[str, ...]:
    return (_CUT_OFF[cut.kind],) if cut.kind in _CUT_OFF else ()


def _dtype(examination: Examination) -> Iterator[Cause]:
    """The engine's precision, if the same engine in the trainer's closes the gap."""
    if examination.same_precision is None:
        return
    theirs = examination.sides.dtype
    own = _DTYPES[str(examination.scorer.model.dtype)]
    message = f"the engine computes in {theirs}, the trainer in {own}"
    spec = [f"rollout.dtype={own}", *([f"engine.dtype={theirs}"] if theirs in _DTYPES.values() else [])]
    fix = "use one precision on both sides"
    yield Cause(
        name="dtype",
        what=message,
        fix=fix,
        spec=tuple(spec),
        before=examination.left,
        after=examination.same_precision,
    )


def open_questions(found: Examination) -> list[str]:
    """Questions that these comparisons cannot answer, and what would answer them."""
    sides = found.sides
    notes = []
    if sides.asked == SamplingSettings(1.0):
        notes.append(
            "whether log-probs are raw or processed: at temperature 1 without truncation they are the same; "
            "add --temperature 0.7"
        )
    if found.start.num_nonfinite:
        notes.append(f"{found.start.num_nonfinite} sequences with a NaN or infinite log-prob are excluded")
    return notes


def remainder(examination: Examination) -> str | None:
    """Possible origin of the part of the gap that no cause explains; None: there is no such part."""
    left = examination.same_precision or examination.left
    if left.agrees or left.abs_mean <= 0.1 * examination.start.abs_mean:
        return None
    rounding = examination.scorer.rounding(examination.explanation.start)
    size = f"a mean |log-ratio| of {left.abs_mean:.2g} is not explained"
    if left.abs_mean <= 2.0 * rounding:
        return f"{size}, as large as rounding differences ({rounding:.2g}): another precision or kernel"
    return f"{size}, larger than rounding differences ({rounding:.2g}): other weights, or other model code"
