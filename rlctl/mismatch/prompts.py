"""Token ids of prompts: the trainer's, those the engine reports, and others that it may read unreported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.data.render import Renderer
from rlctl.data.schema import Message, Row
from rlctl.mismatch.scoring_variant import OWN

TokenIds = Sequence[Sequence[int]]

ENGINE = "as the engine says"
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


def token_ids(rows: Sequence[Row], tokenizer: Any) -> list[list[int]]:
    """Token ids of each row's prompt, as in training.

    Raises:
        UsageError: the chat template rejects a row.
    """
    renderer = Renderer(tokenizer)
    return renderer.encode([renderer.text(row) for row in rows])


def renderings(rows: Sequence[Row], own: TokenIds, reported: TokenIds, tokenizer: Any) -> dict[str, TokenIds]:
    """Name of a rendering → token ids of all prompts; equal renderings occur once.

    `own` are the trainer's token ids of the rows, `reported` those that the engine reports.
    """
    found: dict[str, TokenIds] = {OWN: own}
    start = tokenizer.bos_token_id
    if start is not None:
        found[ONE_MORE_START] = [[start, *ids] for ids in own]
        if all(len(ids) > 1 and ids[0] == start for ids in own):
            found[NO_START] = [list(ids[1:]) for ids in own]
    if tokenizer.chat_template:
        renderer = Renderer(tokenizer)
        found[NO_GENERATION_PROMPT] = renderer.encode(
            [renderer.text(row, generation_prompt=False) for row in rows]
        )
        found[NO_TEMPLATE] = renderer.encode([row.prompt_text for row in rows])
    found[ENGINE] = reported
    kept: dict[str, TokenIds] = {}
    for name, ids in found.items():
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
