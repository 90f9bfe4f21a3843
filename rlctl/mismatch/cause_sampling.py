"""Temperature, truncation and log-prob mode as causes: by what was asked, reported and drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlctl.mismatch.cause import Cause
from rlctl.mismatch.examine import Examination
from rlctl.mismatch.scoring_variant import Cut, SamplingSettings
from rlctl.mismatch.search import Taken

_CUT_OFF = {"top_p": "rollout.top_p=1", "top_k": "rollout.top_k=-1", "min_p": "rollout.min_p=0"}
_EXPLICIT = (
    "pass temperature, top_p, top_k and min_p to the engine explicitly: what is missing it may take from the "
    "model's generation_config.json"
)
_PROCESSED = (
    "have the engine report the log-probs of the distribution it samples from (vLLM: "
    "logprobs_mode=processed_logprobs)"
)


def sampling_causes(found: Examination, taken: Taken) -> Iterator[Cause]:
    """Log-prob mode; or temperature, truncation or both, each with its part of the gap."""
    gap, asked, reported = found.scorer.gap, found.sides.asked, taken.after.sampling
    before, after = gap(taken.before), gap(taken.after)
    if found.drawn is not None and found.drawn.not_reported and not found.drawn.not_asked:
        yield replace(_mode(reported, asked), before=before, after=after)
        return
    unsure = "" if found.drawn is not None and found.drawn.not_asked else " (or only reports so)"
    middle = gap(taken.before.changed("sampling", SamplingSettings(reported.temperature)))
    value = f"{reported.temperature:.3g}"
    if reported.temperature != asked.temperature:
        what = f"the engine samples at temperature {value}{unsure}, {asked.temperature:.3g} was asked for"
        yield Cause("temperature", what, _EXPLICIT, (f"rollout.temperature={value}",), before, middle)
    if reported.cut.kind == "none":
        return
    what = f"the engine samples with {reported.cut}{unsure}, {asked.cut} was asked for"
    fix = _EXPLICIT
    if reported.cut.is_like(asked.cut):
        what = f"the engine samples with {asked.cut}, as asked; the trainer scores the whole distribution"
        fix = "sample without truncation: it biases every ratio by the mass cut off"
    yield Cause("truncation", what, fix, _spec(reported.cut), middle, after)


def _mode(reported: SamplingSettings, drawn: SamplingSettings) -> Cause:
    raw = " (the raw ones)" if reported == SamplingSettings(1.0) else ""
    spec = " ".join(("rollout.temperature=1", *_spec(drawn.cut)))
    return Cause(
        "log-prob mode",
        f"tokens are drawn at {drawn}, the log-probs reported are those of {reported}{raw}",
        _PROCESSED,
        (spec,) if raw else (),
    )


def drawn_otherwise(found: Examination) -> Iterator[Cause]:
    """Tokens drawn from what is neither reported nor seen in the gap."""
    reported = found.explanation.variant.sampling
    shows = any(taken.factor == "sampling" for taken in found.explanation.taken)
    if found.drawn is None or not found.drawn.not_reported or found.drawn.settings.is_like(reported):
        return
    if not shows or found.drawn.not_asked:
        yield _mode(reported, found.drawn.settings)


def _spec(cut: Cut) -> tuple[str, ...]:
    return (_CUT_OFF[cut.kind],) if cut.kind in _CUT_OFF else ()
