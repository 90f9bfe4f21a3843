"""How many tokens each prompt takes with the model's own tokenizer and template, and what fits."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rlctl.data.render import Renderer, template_sha256
from rlctl.data.schema import Message, Row
from rlctl.errors import RlctlError, UsageError
from rlctl.prepare.findings import DataFinding

Overlong = Literal["keep", "drop", "cut-left", "cut-right"]
_PROBE = Row("probe", (Message("user", "How much is 2 + 2?"),), "4")


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring rows found; three lists as long as the rows."""

    rows: list[Row]  # the rows; one that was cut is another object than the one handed in
    num_tokens: list[int]  # of the rendered prompt, after cutting; 0 where it cannot be rendered
    #: "" or why the row cannot be used: the template refuses it, it starts with two start tokens, or nothing
    #: of its question would be left after cutting
    problems: list[str]


class PromptLengths:
    """Measures rows, and cuts those that are too long.

    Made once per worker: pickling keeps only its arguments.

    Args:
        model: directory or hub id of the model whose tokenizer and template will be used.
        trust_remote_code: let the tokenizer's own code run.
        max_prompt_length: tokens; None: only measure.
        overlong: `keep` and `drop` leave rows as they are (dropping is the caller's); `cut-left` and
            `cut-right` remove tokens at the start or end of the question in the last user message, never of
            an instruction or system prompt around it.

    Attributes:
        renderer: turns rows into text and ids as training does.
        context: `max_position_embeddings` of the model, in tokens; None where its config does not say.

    Raises:
        UsageError: there is no such model, its tokenizer cannot be read, or cannot cut (it does not say which
            characters a token covers).
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """

    def __init__(
        self,
        model: str,
        *,
        trust_remote_code: bool = False,
        max_prompt_length: int | None = None,
        overlong: Overlong = "keep",
    ) -> None:
        self._limit, self._overlong = max_prompt_length, overlong
        options: dict[str, Any] = {"max_prompt_length": max_prompt_length, "overlong": overlong}
        self._rebuild = partial(PromptLengths, model, trust_remote_code=trust_remote_code, **options)
        # Workers are parallel already.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from rlctl.engine.model import load_reader

        try:
            tokenizer, config = load_reader(model, trust_remote_code=trust_remote_code)
        except RlctlError:
            raise
        except Exception as error:  # the tokenizers library and tokenizers' own code raise anything
            raise UsageError(f"the tokenizer cannot be read: {error}", where=model) from error
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.context = positions if isinstance(positions, int) else None
        if tokenizer.is_fast:
            content = tokenizer.backend_tokenizer.to_str()
        else:
            content = json.dumps([tokenizer.get_vocab(), type(tokenizer).__name__], sort_keys=True)
        self._tokenizer_sha256 = hashlib.sha256(content.encode()).hexdigest()
        self.renderer = Renderer(tokenizer)
        if overlong.startswith("cut") and not tokenizer.is_fast:
            raise UsageError(
                "this tokenizer does not say which characters a token covers, so prompts cannot be cut",
                where=model,
                fix="use --overlong drop",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild, ()

    def measure(self, rows: Sequence[Row]) -> Measured:
        """The rows, perhaps cut, with their lengths in tokens."""
        texts: list[str] = []
        measured = Measured(list(rows), [0] * len(rows), [""] * len(rows))
        for place, row in enumerate(rows):
            try:
                texts.append(self.renderer.text(row))
            except UsageError as error:
                texts.append("")
                measured.problems[place] = error.what
        for place, ids in enumerate(self.renderer.encode(texts)):
            row = measured.rows[place]
            if measured.problems[place]:
                continue
            try:
                self.renderer.check_start(row, ids)
            except UsageError as error:
                measured.problems[place] = error.what
                continue
            measured.num_tokens[place] = len(ids)
            if self._limit is None or len(ids) <= self._limit or not self._overlong.startswith("cut"):
                continue
            if cut := self._cut(row, len(ids), self._limit):
                measured.rows[place], measured.num_tokens[place] = cut
            else:
                what = f"cutting its question does not bring it to {self._limit}"
                measured.problems[place] = f"the prompt has {len(ids)} tokens; {what}"
        return measured

    def describe(self) -> dict[str, Any]:
        """What the lengths depend on, without paths, for the manifest.

        `template_sha256` is that of an evaluation's `results.json`.
        """
        tokenizer = self.renderer.tokenizer
        return {
            "tokenizer": type(tokenizer).__name__,
            "tokenizer_sha256": self._tokenizer_sha256,
            "vocabulary": len(tokenizer),
            "template_sha256": template_sha256(tokenizer.chat_template),
            "context": self.context,
        }

    def _cut(self, row: Row, num_tokens: int, limit: int) -> tuple[Row, int] | None:
        """The row with just enough of its question cut away, and its length; None: it cannot be done.

        Tokens next to the cut may merge differently afterwards, so it is measured again, and cut further.
        """
        place = next((i for i in reversed(range(len(row.prompt))) if row.prompt[i].role == "user"), None)
        if place is None:
            return None
        content = row.prompt[place].content
        start, end = question_span(row, place)
        spans = self.renderer.tokenizer(
            content[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        excess = num_tokens - limit
        while excess < len(spans):
            if self._overlong == "cut-left":
                kept = content[start + spans[excess][0] : end].lstrip()
            else:
                kept = content[start : start + spans[-excess - 1][1]].rstrip()
            if not kept:
                return None
            message = Message(row.prompt[place].role, content[:start] + kept + content[end:])
            shorter = replace(row, prompt=(*row.prompt[:place], message, *row.prompt[place + 1 :]))
            length = len(self.renderer.encode([self.renderer.text(shorter)])[0])
            if length <= limit:
                return shorter, length
            excess += length - limit
        return None


def question_span(row: Row, place: int) -> tuple[int, int]:
    """First and last character of the question in the row's message at `place`, without any instruction.

    `row.question` is the text of the whole original conversation, perhaps after a system prompt that was
    added; where it is not found the whole message is the question.
    """
    content, asked = row.prompt[place].content, row.question
    found = content.find(asked) if asked else -1
    if found >= 0:
        return found, found + len(asked)
    for first in range(place):
        before = "".join(f"{message.content}\n\n" for message in row.prompt[first:place])
        rest = asked.removeprefix(before)
        if rest and rest != asked and content.startswith(rest):
            return 0, len(rest)
    return 0, len(content)


def template_findings(renderer: Renderer) -> list[DataFinding]:
    """What is unusual about a model's chat template, tried with one plain question."""
    tokenizer = renderer.tokenizer
    if not tokenizer.chat_template:
        what = "the tokenizer has no chat template: messages are joined by blank lines, roles are lost"
        return [DataFinding("no-template", "warning", what, 1, fix="use the instruct model's tokenizer")]
    try:
        text = renderer.text(_PROBE)
        renderer.check_start(_PROBE, renderer.encode([text])[0])
    except UsageError as error:
        return [DataFinding("template", "error", f"a plain question: {error.what}", 1, fix=error.fix or "")]
    found = []
    if text == renderer.text(_PROBE, generation_prompt=False):
        what = "the chat template adds no generation prompt: nothing tells the model that its turn begins"
        fix = "correct for a model trained so; else add `{% if add_generation_prompt %}…` to the template"
        found.append(DataFinding("no-generation-prompt", "warning", what, 1, fix=fix))
    start = tokenizer.bos_token
    if start and renderer.adds_start and text.startswith(start):
        what = f"both the tokenizer and its chat template put {start} first"
        fix = "rlctl adds it once; elsewhere encode rendered prompts with add_special_tokens=False"
        found.append(DataFinding("start-token", "info", what, 1, fix=fix))
    return found


class Histogram:
    """Counts of lengths; memory grows with the number of different lengths, not of prompts."""

    def __init__(self, unit: Literal["tokens", "characters"]) -> None:
        self.unit = unit
        self._counts: Counter[int] = Counter()

    def add(self, lengths: Iterable[int]) -> None:
        """Some more."""
        self._counts.update(lengths)

    @property
    def total(self) -> int:
        """How many there are."""
        return self._counts.total()

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share in [0, 1] do not exceed; 0 is the shortest."""
        seen, wanted = 0, share * self.total
        for length, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return length
        return 0

    def summary(self) -> dict[str, int]:
        """The shortest, some quantiles and the longest."""
        shares = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: self.quantile(share) for name, share in shares.items()}

    def bins(self, number: int) -> list[tuple[int, int, int]]:
        """(from, to, count) of at most so many ranges of equal width, both ends included."""
        if not self.total:
            return []
        low, high = self.quantile(0), self.quantile(1)
        width = -(-(high - low + 1) // number)
        counts = Counter[int]()
        for length, count in self._counts.items():
            counts[(length - low) // width] += count
        return [
            (low + place * width, min(high, low + (place + 1) * width - 1), counts[place])
            for place in range(-(-(high - low + 1) // width))
        ]

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        bins = [{"from": low, "to": high, "rows": count} for low, high, count in self.bins(20)]
        return {"unit": self.unit, **self.summary(), "histogram": bins}
