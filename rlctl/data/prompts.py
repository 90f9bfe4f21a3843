"""Renders rows with the chat template, tokenises them, and chooses those of each step.

Training, evaluation and data preparation share this module, so that measured lengths are those in training.
Rendering does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlctl.batch import Task
from rlctl.chat_template import rendered
from rlctl.data.mixture import MixedSource, PromptMixture, permutation
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
        unread = [name for name in self._kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]
        if unread:
            raise UsageError(
                f"the model's chat template reads no `{unread[0]}`"
                if template
                else "the model has no chat template",
                where="data.chat_template_kwargs",
                fix=f"leave it out; where a preset gives it: data.chat_template_kwargs.{unread[0]}=null",
            )
        self._reads_tools = re.search(r"\btools\b", template) is not None
        self._reads_calls = "tool_calls" in template
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
            problem = "the row has tools, but the model's chat template shows none"
            raise UsageError(problem, where=place_of(row), fix="describe them in the system message")
        if not self._reads_calls and any("tool_calls" in message.other for message in row.prompt):
            problem = "the prompt has tool calls, but the model's chat template shows none"
            raise UsageError(
                problem, where=place_of(row), fix="write the calls into the content of the message"
            )
        try:
            text = rendered(
                self.tokenizer,
                messages_of(row),
                add_generation_prompt=generation_prompt and not continues,
                continue_final_message=continues,
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


def messages_of(row: Row) -> tuple[dict[str, Any], ...]:
    """The row's prompt in the format that chat templates expect."""
    return tuple(message.fields for message in row.prompt)


def template_sha256(chat_template: str | None) -> str | None:
    """SHA-256 of the chat template; None without a template."""
    return hashlib.sha256(chat_template.encode()).hexdigest() if chat_template else None


def place_of(row: Row) -> str:
    """The row's origin, for messages."""
    return row.where or f"row {row.index}"


def _task_of(row: Row, text: str, ids: list[int]) -> Task:
    """The row as an environment reads it, with its rendered prompt as text and as tokens."""
    return Task(
        prompt_ids=ids,
        text=text,
        row=row.index,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra,
        messages=messages_of(row),
        environment=row.environment,
    )


class PromptDataset:
    """Prompts for a model, as token ids.

    Prompts of more than `max_prompt_length` tokens are dropped if `filter_overlong`, else they are an error.
    `first_length` says how many tokens the first turn of a task reads; None: those of the rendered row.

    `mix` gives name, number of rows and weight of the sources whose rows follow each other; without it,
    every row comes once per epoch.

    Raises:
        UsageError: a prompt cannot be rendered, starts with two start tokens or is too long (if not
            filtered; names the row), or no prompt is left, or none of a source.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        *,
        max_prompt_length: int,
        filter_overlong: bool,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mix: Sequence[MixedSource] = (),
        first_length: Callable[[Task], int] | None = None,
    ) -> None:
        kept: list[int] = []  # indices of the rows that are kept
        self.rows: list[Row] = []  # those kept, in order
        self.token_ids: list[list[int]] = []
        self.texts: list[str] = []  # their rendered prompts
        self._tasks: list[Task] = []  # the same, for environments and graders
        renderer = Renderer(tokenizer, chat_template_kwargs)
        for start in range(0, len(rows), TOKENISE_AT_ONCE):
            chunk = rows[start : start + TOKENISE_AT_ONCE]
            texts = [renderer.text(row) for row in chunk]
            encoded = renderer.encode(texts)
            for number, (row, text, ids) in enumerate(zip(chunk, texts, encoded, strict=True), start):
                renderer.check_start(row, ids)
                task = _task_of(row, text, ids)
                length = len(ids) if first_length is None else first_length(task)
                if length <= max_prompt_length:
                    kept.append(number)
                    self._tasks.append(replace(task, row=len(self.rows)))
                    self.rows.append(row)
                    self.token_ids.append(ids)
                    self.texts.append(text)
                elif not filter_overlong:
                    limit = f"data.max_prompt_length = {max_prompt_length}"
                    fix = f"{length}, or set data.filter_overlong_prompts=true"
                    tools = ", descriptions of tools included" if length > len(ids) else ""
                    raise UsageError(
                        f"the prompt has {length} tokens{tools}, more than {limit}",
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
        ends = np.cumsum([0, *(source.size for source in mix)])
        sizes = np.diff(np.searchsorted(kept, ends))
        parts = (replace(source, size=int(size)) for source, size in zip(mix, sizes, strict=True))
        self.mixture = PromptMixture(tuple(parts)) if mix else None  # of the rows that are kept

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of sources, rendered prompts as token ids, ground truths and other fields, in order.

        Shipped graders do not read the other fields, but user-defined graders may.
        """
        digest = hashlib.sha256()
        for row, ids in zip(self.rows, self.token_ids, strict=True):
            # Graders may read the messages.
            messages = [[turn.role, turn.content, *filter(None, [turn.other])] for turn in row.prompt]
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
        A mixture has the shares of its sources in each epoch.
        """
        if self.mixture:
            return self.mixture.row_at(position, seed=seed, shuffle=shuffle)
        size = len(self.rows)
        epoch, place = divmod(position, size)
        return int(permutation(size, (seed, epoch))[place]) if shuffle else place

    def tasks(self, indices: Sequence[int], group_ids: Sequence[int]) -> list[Task]:
        """The prompts at `indices`; `group_ids` are their positions in the batch over all ranks."""
        return [
            self._tasks[index].in_group(group_id) for index, group_id in zip(indices, group_ids, strict=True)
        ]

    def all_tasks(self) -> list[Task]:
        """All prompts, each as a group of its own."""
        return self.tasks(range(len(self)), range(len(self)))
