"""From a source's own columns to the row schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from rlctl.data.checks import RowError, parse_answer, parse_messages
from rlctl.data.schema import GSM8K_SOURCE, Message, Row

RecipeName = Literal["gsm8k", "generic"]
ANSWER_MARK = "####"
GSM8K_INSTRUCTION = 'Think step by step, and put the final number on a last line after "####".'


@dataclass(frozen=True, slots=True)
class Recipe:
    """How records become rows. None means the recipe's own default.

    Attributes:
        name: `gsm8k`: worked solutions ending in `#### number`; `generic`: a prompt and an answer column.
        prompt_key: column of the prompt; a dot reaches into nested values.
        answer_key: column of the answer.
        data_source: names the source, and so the grader; default: the file's name.
        system_prompt: put before the conversation.
        instruction: put after the last user message.
    """

    name: RecipeName
    prompt_key: str | None = None
    answer_key: str | None = None
    data_source: str | None = None
    system_prompt: str | None = None
    instruction: str | None = None

    def resolve(self) -> Recipe:
        """The same with the recipe's defaults filled in."""
        gsm8k = self.name == "gsm8k"
        return replace(
            self,
            prompt_key=self.prompt_key or ("question" if gsm8k else "prompt"),
            answer_key=self.answer_key or "answer",
            data_source=self.data_source or (GSM8K_SOURCE if gsm8k else None),
            instruction=GSM8K_INSTRUCTION if gsm8k and self.instruction is None else self.instruction,
        )

    def to_row(self, values: Mapping[str, Any], path: Path, index: int) -> Row:
        """One record as a row; `self` must be resolved.

        Raises:
            RowError: the record lacks a column or holds the wrong thing in it.
        """
        asked = parse_messages(_lookup(values, self.prompt_key or ""))
        answer = parse_answer(_lookup(values, self.answer_key or ""), f"column {self.answer_key!r}")
        return Row(
            data_source=self.data_source or path.name.split(".")[0] or "data",
            prompt=self._dress(asked),
            ground_truth=_gsm8k_number(answer) if self.name == "gsm8k" else answer.strip(),
            ability="math" if self.name == "gsm8k" else "",
            index=index,
            question="\n\n".join(message.content for message in asked),
            answer=answer,
        )

    def _dress(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self.instruction:
            last = messages[-1]
            messages = (*messages[:-1], Message(last.role, f"{last.content}\n{self.instruction}"))
        if self.system_prompt:
            messages = (Message("system", self.system_prompt), *messages)
        return messages


def recognise(values: Mapping[str, Any]) -> RecipeName:
    """The recipe whose columns a record has."""
    answer = values.get("answer")
    is_gsm8k = "question" in values and isinstance(answer, str) and ANSWER_MARK in answer
    return "gsm8k" if is_gsm8k else "generic"


def _gsm8k_number(answer: str) -> str:
    """The number after the last `####`, without its thousands separators."""
    _, mark, tail = answer.rpartition(ANSWER_MARK)
    number = tail.strip().replace(",", "")
    if not mark:
        raise RowError(f"the answer has no {ANSWER_MARK!r}")
    try:
        finite = Decimal(number).is_finite()
    except InvalidOperation:
        finite = False
    if not finite:
        raise RowError(f"what follows {ANSWER_MARK!r} is not a number: {tail.strip()[:50]!r}")
    return number


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    if key in values:
        return values[key]
    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise RowError(f"no column {key!r} (it has {', '.join(map(str, values)) or 'none'})")
        found = found[part]
    return found
