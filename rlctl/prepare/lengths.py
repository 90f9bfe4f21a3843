"""How many tokens each prompt takes with the model's own tokenizer and template, and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rlctl.data.render import Renderer, template_sha256
from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError
from rlctl.prepare.tokenizer import load_tokenizer, tokenizer_sha256

Overlong = Literal["keep", "drop", "cut-left", "cut-right"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring rows found; three lists as long as the rows.

    Attributes:
        rows: the rows; one that was cut is another object than the one handed in.
        num_tokens: of the rendered prompt, after cutting; 0 where it cannot be rendered.
        problems: "" or why the row cannot be used: the template refuses it, it starts with two start tokens,
            or nothing of its question would be left after cutting.
    """

    rows: list[Row]
    num_tokens: list[int]
    problems: list[str]


class PromptLengths:
    """Measures rows, and cuts those that are too long.

    Made once per worker; where it is pickled only its arguments travel.

    Args:
        model: directory or hub id of the model whose tokenizer and template will be used.
        trust_remote_code: let the tokenizer's own code run.
        max_prompt_length: tokens; None: only measure.
        overlong: `keep` and `drop` leave rows as they are (dropping is the caller's); `cut-left` and
            `cut-right` remove tokens at the start or end of the question in the last user message, never of
            an instruction or system prompt around it.

    Attributes:
        renderer: turns rows into text and ids as training does.
        context: the model's context in tokens; None where its config does not say.

    Raises:
        UsageError: the tokenizer cannot be loaded, or cannot cut (it does not say which characters a token
            covers).
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
        self._rebuild = partial(
            PromptLengths,
            model,
            trust_remote_code=trust_remote_code,
            max_prompt_length=max_prompt_length,
            overlong=overlong,
        )
        tokenizer, self.context = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._tokenizer_sha256 = tokenizer_sha256(tokenizer)
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
        texts, problems = [], []
        for row in rows:
            text, problem = self._render(row)
            texts.append(text)
            problems.append(problem)
        measured = Measured(list(rows), [0] * len(rows), problems)
        for place, ids in enumerate(self.renderer.encode(texts)):
            if not problems[place]:
                self._check_length(measured, place, ids)
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

    def _render(self, row: Row) -> tuple[str, str]:
        try:
            return self.renderer.text(row), ""
        except UsageError as error:
            return "", error.what

    def _check_length(self, measured: Measured, place: int, ids: Sequence[int]) -> None:
        """Note a row's length; cut it first where it is too long."""
        row = measured.rows[place]
        try:
            self.renderer.check_start(row, ids)
        except UsageError as error:
            measured.problems[place] = error.what
            return
        measured.num_tokens[place] = len(ids)
        if self._limit is None or len(ids) <= self._limit or not self._overlong.startswith("cut"):
            return
        cut = self._cut(row, len(ids), self._limit)
        if cut is None:
            measured.problems[place] = (
                f"the prompt has {len(ids)} tokens; cutting its question does not bring it to {self._limit}"
            )
        else:
            measured.rows[place], measured.num_tokens[place] = cut

    def _cut(self, row: Row, num_tokens: int, limit: int) -> tuple[Row, int] | None:
        """The row with just enough of its question cut away, and its length; None: it cannot be done.

        Tokens at the seam may merge otherwise once it is cut, so it is measured again, and cut further.
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
    """Where the question stands in the row's message at `place`, without the instruction around it.

    `row.question` is the text of the whole original conversation, perhaps behind a system prompt that was
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
