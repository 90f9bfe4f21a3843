"""Hypotheses about how an engine's computation of log-probs may differ from the trainer's.

A `ScoringVariant` is one such computation; `renderings` are the token ids that the engine may have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlctl.data.prompts import Renderer
from rlctl.data.schema import Message, Row

#: Mean |log-ratio| up to which two float32 computations of one distribution agree.
AGREE = 1e-5
#: Value of a factor that is the same as in the trainer.
OWN = "trainer"

#: Factors in which the two sides may differ. Among changes that explain the same amount, the first is
#: reported: coarse factors come first, the fitted one last.
Factor = Literal["prompt", "shift", "sampling"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Truncation of a distribution before sampling, with renormalisation."""

    kind: Literal["none", "top_p", "top_k", "min_p"] = "none"  # `none`, or the processor's name
    value: float = 0.0  # its parameter; 0 for `none`

    def __str__(self) -> str:
        """As settings are written, e.g. `top_p 0.9`."""
        return "no truncation" if self.kind == "none" else f"{self.kind} {self.value:.3g}"

    def is_like(self, other: Cut) -> bool:
        """Whether both are equal within the precision of an estimate from samples."""
        near = abs(self.value - other.value) <= (0 if self.kind == "top_k" else 0.025)
        return self.kind == other.kind and near


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """A distribution derived from logits: divided by `temperature`, then truncated."""

    temperature: float
    cut: Cut = Cut()

    def __str__(self) -> str:
        """As settings are written, e.g. `temperature 0.7, top_p 0.9`."""
        cut = "" if self.cut.kind == "none" else f", {self.cut}"
        return f"temperature {self.temperature:.3g}{cut}"


@dataclass(frozen=True, slots=True)
class ScoringVariant:
    """One way to compute log-probs of the engine's tokens with the trainer's model."""

    sampling: SamplingSettings  # distribution of the log-probs
    prompt: str = OWN  # rendering of the prompts
    shift: int = 0  # reported log-prob t belongs to response token t + shift

    def changed(self, factor: Factor, value: Any) -> ScoringVariant:
        """This variant with one factor changed."""
        return replace(self, **{factor: value})

    def with_factor(self, factor: Factor, other: ScoringVariant) -> ScoringVariant:
        """This variant with one factor as in `other`."""
        return self.changed(factor, getattr(other, factor))


# --- prompts --------------------------------------------------------------------------------------

TokenIds = Sequence[Sequence[int]]

ENGINE = "by the engine's tokenizer"
ONE_MORE_START = "one more start token"
NO_START = "no start token"
NO_GENERATION_PROMPT = "no generation prompt"
NO_TEMPLATE = "no chat template"

#: Used if no data is given; the lengths differ, so that there is padding.
QUESTIONS = (
    "What is 17 + 25?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "A train travels 120 km in 1.5 hours. What is its average speed, and how far does it get in 4 hours?",
    "Translate 'good morning' into French.",
    "List the prime numbers between 10 and 30, and say how many there are.",
    "Why is the sky blue? Answer in two sentences.",
    "x + 3 = 11. What is x?",
    "Sort these words alphabetically: pear, apple, orange, banana, fig.",
    "Ann has 12 apples. She gives a third of them to Bob and eats two herself. How many are left?",
    "Write a Python function that returns the larger of two numbers.",
    "Which is heavier: a kilogram of feathers or a pound of iron?",
    "Continue the sequence: 2, 4, 8, 16,",
    "Explain in simple words what a neural network is, for somebody who has never programmed.",
    "Yes or no: is 91 a prime number?",
    "Say hello.",
)


def question_rows() -> list[Row]:
    """The built-in questions as rows of a data set."""
    return [Row("questions", (Message("user", text),), "", index=i) for i, text in enumerate(QUESTIONS)]


def token_ids(rows: Sequence[Row], renderer: Renderer) -> list[list[int]]:
    """Token ids of each row's prompt.

    Raises:
        UsageError: the chat template rejects a row.
    """
    return renderer.encode([renderer.text(row) for row in rows])


def renderings(
    rows: Sequence[Row], own: TokenIds, theirs: TokenIds, renderer: Renderer
) -> dict[str, TokenIds]:
    """Name of a rendering → token ids of all prompts; equal renderings occur once.

    `own` are the trainer's token ids of the rows, `theirs` those of the engine's tokenizer.
    """
    variants: dict[str, TokenIds] = {OWN: own}
    start = renderer.tokenizer.bos_token_id
    if start is not None:
        variants[ONE_MORE_START] = [[start, *ids] for ids in own]
        if all(len(ids) > 1 and ids[0] == start for ids in own):
            variants[NO_START] = [list(ids[1:]) for ids in own]
    if renderer.tokenizer.chat_template:
        variants[NO_GENERATION_PROMPT] = renderer.encode(
            [renderer.text(row, generation_prompt=False) for row in rows]
        )
        variants[NO_TEMPLATE] = renderer.encode([row.prompt_text for row in rows])
    variants[ENGINE] = theirs
    kept: dict[str, TokenIds] = {}
    for name, ids in variants.items():
        plain = [list(row) for row in ids]
        if all(plain) and plain not in kept.values():
            kept[name] = plain
    return kept


def first_difference(own: TokenIds, other: TokenIds, tokenizer: Any) -> str:
    """Describes the first difference in the first prompt that differs."""
    for number, (ours, theirs) in enumerate(zip(own, other, strict=True), start=1):
        if list(ours) != list(theirs):
            pairs = zip(ours, theirs, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
            shown = [tokenizer.decode(ids[same : same + 4]) or "nothing" for ids in (theirs, ours)]
            return f"from token {same + 1} of prompt {number} on {shown[0]!r} instead of {shown[1]!r}"
    return "no difference"
