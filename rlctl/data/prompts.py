"""Renders rows with the chat template, tokenises them, and chooses those of each step.

Training, evaluation and data preparation share this module, so that measured lengths are those in training.
Rendering does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.batch import Task
from rlctl.data.read import check_batch_size
from rlctl.data.schema import Row
from rlctl.errors import UsageError

TOKENISE_AT_ONCE = 1024


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
        self._reads_tools = re.search(r"\btools\b", template) is not None
        added = tokenizer("")["input_ids"]
        #: whether the tokenizer adds its start token to plain text
        self.adds_start = bool(added) and added[0] == tokenizer.bos_token_id

    def text(self, row: Row, *, generation_prompt: bool = True) -> str:
        """Returns the row's prompt as text, including special tokens.

        If it ends with a message of the assistant, the response continues this message.

        Raises:
            UsageError: the template refuses the prompt; names the row.
        """
        if not self.tokenizer.chat_template:
            start = str(self.tokenizer.bos_token) if self.adds_start else ""
            return start + row.prompt_text
        continues = row.prompt[-1].role == "assistant"
        given: dict[str, Any] = {"tools": row.tools} if row.tools else {}
        if given and not self._reads_tools:
            what = "the row has tools, but the model's chat template shows none"
            raise UsageError(what, where=place_of(row), fix="describe them in the system message")
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages_of(row)),
                add_generation_prompt=generation_prompt and not continues,
                continue_final_message=continues,
                tokenize=False,
                **given,
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
        if not texts:  # which tokenizers refuse
            return []
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


class PromptDataset:
    """Prompts for a model, as token ids.

    Prompts of more than `max_prompt_length` tokens are dropped if `filter_overlong`, else they are an error.

    Raises:
        UsageError: a prompt cannot be rendered, starts with two start tokens or is too long (if not
            filtered; names the row), or no prompt is left.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        *,
        max_prompt_length: int,
        filter_overlong: bool,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.rows: list[Row] = []  # those kept, in order
        self.token_ids: list[list[int]] = []
        self.texts: list[str] = []  # their rendered prompts
        renderer = Renderer(tokenizer, chat_template_kwargs)
        for start in range(0, len(rows), TOKENISE_AT_ONCE):
            chunk = rows[start : start + TOKENISE_AT_ONCE]
            texts = [renderer.text(row) for row in chunk]
            for row, text, ids in zip(chunk, texts, renderer.encode(texts), strict=True):
                renderer.check_start(row, ids)
                if len(ids) <= max_prompt_length:
                    self.rows.append(row)
                    self.token_ids.append(ids)
                    self.texts.append(text)
                elif not filter_overlong:
                    limit = f"data.max_prompt_length = {max_prompt_length}"
                    fix = f"{len(ids)}, or set data.filter_overlong_prompts=true"
                    raise UsageError(
                        f"the prompt has {len(ids)} tokens, more than {limit}",
                        where=place_of(row),
                        fix=f"raise data.max_prompt_length to {fix}",
                    )
        self.num_dropped = len(rows) - len(self.rows)  # because of their length
        if not self.rows:
            raise UsageError(
                f"no prompt remains: all {len(rows)} have more than {max_prompt_length} tokens",
                where="data.max_prompt_length",
                fix="raise data.max_prompt_length",
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of sources, rendered prompts as token ids, ground truths and other fields, in order.

        Shipped graders do not read the other fields, but user-defined graders may.
        """
        digest = hashlib.sha256()
        for row, ids in zip(self.rows, self.token_ids, strict=True):
            messages = [[message.role, message.content] for message in row.prompt]  # graders may read them
            content = [row.data_source, ids, messages, row.ground_truth, row.extra]
            digest.update(json.dumps(content, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def check_batch_size(self, batch_size: int) -> None:
        """Raises a UsageError if the data set is smaller than one batch."""
        more = f" ({self.num_dropped} more were too long)" if self.num_dropped else ""
        check_batch_size(len(self), batch_size, more)

    def batch_indices(self, step: int, batch_size: int, *, seed: int, shuffle: bool) -> list[int]:
        """Indices of the prompts of step `step` (from 0, over all epochs); resuming needs no saved state.

        A batch that begins at the end of an epoch continues with the next one, so that every row is used.
        """
        first = step * batch_size
        return [self.row_at(first + i, seed=seed, shuffle=shuffle) for i in range(batch_size)]

    def row_at(self, position: int, *, seed: int, shuffle: bool) -> int:
        """Index of the prompt at a position in the concatenated epochs.

        With `shuffle`, each epoch has a different permutation of all rows, drawn from `seed` and its number.
        """
        epoch, place = divmod(position, len(self))
        return int(_permutation(len(self), seed, epoch)[place]) if shuffle else place

    def tasks(self, indices: Sequence[int], group_ids: Sequence[int]) -> list[Task]:
        """The prompts at `indices`; `group_ids` are their positions in the batch over all ranks."""
        return [
            Task(
                prompt_ids=self.token_ids[index],
                text=self.texts[index],
                group_id=group_id,
                row=index,
                data_source=self.rows[index].data_source,
                ground_truth=self.rows[index].ground_truth,
                extra_info=self.rows[index].extra,
                messages=messages_of(self.rows[index]),
                environment=self.rows[index].environment,
            )
            for index, group_id in zip(indices, group_ids, strict=True)
        ]

    def all_tasks(self) -> list[Task]:
        """All prompts, each as a group of its own."""
        return self.tasks(range(len(self)), range(len(self)))


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # RandomState, not Generator: NumPy guarantees that its streams never change between versions.
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    return state.permutation(size)
