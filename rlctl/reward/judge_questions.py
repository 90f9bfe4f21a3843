"""What a judge is asked, and what it replies. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Unreadable(Exception):
    """The judge's text has not the form that it was asked for."""


@dataclass(frozen=True, slots=True)
class JudgeQuestion(Generic[Answer]):
    """Messages for the judge, and what reads its reply; that raises `Unreadable`."""

    messages: list[dict[str, str]]
    read: Callable[[str], Answer]


@dataclass(frozen=True, slots=True)
class JudgeReply(Generic[Answer]):
    """What the judge said."""

    answer: Answer
    text: str
