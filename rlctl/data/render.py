"""Renders the messages of a row with the chat template and tokenises them. Does not import torch.

Training, evaluation and data preparation share this module, so that measured lengths are those in training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.data.schema import Row
from rlctl.errors import UsageError


class Renderer:
    """Renders and tokenises rows with one Hugging Face tokenizer; its chat template renders the messages.

    Without a template the contents are joined by blank lines, after a start token if it adds one.
    `chat_template_kwargs` are further arguments of the template; those that are None are omitted.

    Raises:
        UsageError: the template does not use one of them.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._kwargs = {
            name: value for name, value in (chat_template_kwargs or {}).items() if value is not None
        }
        template = str(tokenizer.chat_template or "")
        if unread := [name for name in self._kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]:
            raise UsageError(
                f"the model's chat template reads no `{unread[0]}`"
                if template
                else "the model has no chat template",
                where="data.chat_template_kwargs",
                fix=f"leave it out; where a preset gives it: data.chat_template_kwargs.{unread[0]}=null",
            )
        added = tokenizer("")["input_ids"]
        #: whether the tokenizer adds its start token to plain text
        self.adds_start = bool(added) and added[0] == tokenizer.bos_token_id

    def text(self, row: Row, *, generation_prompt: bool = True) -> str:
        """Returns the row's prompt as text, including special tokens.

        Raises:
            UsageError: the template refuses the prompt; names the row.
        """
        if not self.tokenizer.chat_template:
            start = str(self.tokenizer.bos_token) if self.adds_start else ""
            return start + row.prompt_text
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages_of(row)),
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # Jinja's own errors and whatever the template raises
            raise UsageError(
                f"the model's chat template refuses this prompt: {error}",
                where=place_of(row),
                fix="use roles that the template supports (many have no system role)",
            ) from error
        return text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of rendered texts; adds no special tokens, because the texts contain them."""
        # verbose=False, because callers report long prompts.
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def check_start(self, row: Row, ids: Sequence[int]) -> None:
        """Checks that a prompt has tokens, and does not start with two start tokens.

        Raises:
            UsageError: the check fails; names the row.
        """
        if not ids:
            raise UsageError("the prompt has no tokens", where=place_of(row))
        start = self.tokenizer.bos_token_id
        if start is not None and list(ids[:2]) == [start, start]:
            raise UsageError(
                "the rendered prompt starts with two start-of-sequence tokens",
                where=place_of(row),
                fix="remove the start token from the prompt or from the chat template",
            )


def messages_of(row: Row) -> tuple[dict[str, str], ...]:
    """The row's prompt in the format that chat templates expect."""
    return tuple({"role": message.role, "content": message.content} for message in row.prompt)


def template_sha256(chat_template: str | None) -> str | None:
    """SHA-256 of the chat template; None without a template."""
    return hashlib.sha256(chat_template.encode()).hexdigest() if chat_template else None


def place_of(row: Row) -> str:
    """The row's origin, for messages."""
    return row.where or f"row {row.index}"
