"""From a source's own columns to the row schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.data.blocks import Record
from rlctl.data.layouts import LAYOUTS, RecipeName
from rlctl.data.records import RowError, source_named
from rlctl.data.schema import Message, Row
from rlctl.data.sources import Source, read_records
from rlctl.errors import UsageError

__all__ = ["Recipe", "RecipeName", "read_rows", "recognise"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How records become rows. None means the recipe's own default, see `LAYOUTS`."""

    name: RecipeName  # the column layout
    #: column of the prompt; a dot reaches into nested values, `|` separates alternatives
    prompt_key: str | None = None
    answer_key: str | None = None  # column of the answer
    #: names the source, and so the grader; default: the record's own, the recipe's, else the file's name
    data_source: str | None = None
    system_prompt: str | None = None  # put before the conversation
    instruction: str | None = None  # put after the last user message
    source_key: str | None = None  # column that names each record's data source

    def resolve(self) -> Recipe:
        """The same with the recipe's defaults filled in.

        Raises:
            UsageError: both a data source and a column of data sources are given.
        """
        if self.data_source and self.source_key:
            raise UsageError("--data-source and --source-key exclude each other", fix="give one of them")
        layout = LAYOUTS[self.name]
        return replace(
            self,
            prompt_key=self.prompt_key or layout.prompt_key,
            answer_key=self.answer_key or layout.answer_key,
            instruction=layout.instruction if self.instruction is None else self.instruction,
        )

    def to_row(self, values: Mapping[str, Any], path: Path, index: int) -> Row:
        """One record as a row; `self` must be resolved.

        Raises:
            RowError: the record lacks a column or holds the wrong thing in it.
        """
        layout = LAYOUTS[self.name]
        parsed = layout.read(values, self.prompt_key or "", self.answer_key or "")
        messages = parsed.messages
        last = messages[-1]
        if last.role == "assistant":
            raise RowError(
                "the prompt ends with a reply of the assistant, which would show the model an answer: "
                "end it with the message that is to be answered"
            )
        if self.instruction:
            messages = (*messages[:-1], Message(last.role, f"{last.content}\n{self.instruction}"))
        if self.system_prompt:
            messages = (Message("system", self.system_prompt), *messages)
        own = (self.data_source or "") if self.source_key is None else source_named(values, self.source_key)
        return Row(
            data_source=own or parsed.data_source or layout.data_source or path.name.split(".")[0] or "data",
            prompt=messages,
            ground_truth=parsed.ground_truth,
            ability=parsed.ability,
            style=parsed.style,
            index=index if parsed.index is None else parsed.index,
            question=parsed.question or "\n\n".join(message.content for message in parsed.messages),
            answer=parsed.answer,
            extra=parsed.extra,
        )


def recognise(values: Mapping[str, Any]) -> RecipeName:
    """The recipe whose columns a record has."""
    return next(name for name, layout in LAYOUTS.items() if layout.recognises(values))


def read_rows(source: Source, recipe: Recipe | None = None) -> Iterator[tuple[Record, Row | None, str]]:
    """Every record of a file with its row; None and why not where it cannot be used.

    Args:
        source: the file.
        recipe: resolved; None: recognised by the first record that has columns.
    """
    for index, record in enumerate(read_records(source)):
        row, problem = None, record.problem
        if record.values is not None:
            if recipe is None and record.values:
                recipe = Recipe(recognise(record.values)).resolve()
            try:
                chosen = recipe or Recipe("generic").resolve()
                row = replace(chosen.to_row(record.values, Path(source.name), index), where=record.where)
            except RowError as error:
                problem = str(error)
        yield record, row, problem
