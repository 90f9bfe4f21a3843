"""How many tokens each prompt takes with the model's own tokenizer and template, and what fits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlctl.data.render import Renderer, template_sha256
from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError
from rlctl.prepare.findings import Finding

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

    Made once per worker; rebuilt from its arguments where it is pickled, so only they travel.

    Args:
        model: directory or hub id of the model whose tokenizer and template will be used.
        trust_remote_code: let the tokenizer's own code run.
        max_prompt_length: tokens; None: only measure.
        overlong: `keep` and `drop` leave rows as they are (dropping is the caller's); `cut-left` and
            `cut-right` remove tokens at the start or end of the question in the last user message, never of
            an instruction or system prompt around it.

    Raises:
        UsageError: the tokenizer cannot be loaded, or cannot cut (it does not say which characters a token
            covers).
    """

    def __init__(
        self,
        model: str,
        *,
        trust_remote_code: bool = False,
        max_prompt_length: int | None = None,
        overlong: Overlong = "keep",
    ) -> None:
        self._model, self._trust = model, trust_remote_code
        self._limit, self._overlong = max_prompt_length, overlong
        self.tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self.renderer = Renderer(self.tokenizer)
        if overlong.startswith("cut") and not self.tokenizer.is_fast:
            raise UsageError(
                "this tokenizer does not say which characters a token covers, so prompts cannot be cut",
                where=model,
                fix="use --overlong drop",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._model, self._trust, self._limit, self._overlong)

    def measure(self, rows: Sequence[Row]) -> Measured:
        """The rows, perhaps cut, with their lengths in tokens."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the lengths depend on, for the manifest: tokenizer, template, context; no paths."""
        raise NotImplementedError

    def template_findings(self) -> list[Finding]:
        """What is unusual about the template itself."""
        raise NotImplementedError

    @property
    def context(self) -> int | None:
        """The model's context in tokens; None where its config does not say."""
        raise NotImplementedError
