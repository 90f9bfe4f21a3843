"""Times of day, as a text or in a sentence: "10:30 AM", "The train arrives at 10:30 in the morning."."""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.assertion import is_asserted
from rlctl.reward.numbers import plain
from rlctl.reward.statements import is_statement

_HALF = r"[ap]\.?\s?m\b\.?|in the (?:morning|afternoon|evening)\b"
#: A time of day, perhaps with its half of the day.
TIME_OF_DAY = lazy_pattern(
    r"(?<![\d:.,])(?P<hour>\d{1,2}):(?P<minute>\d\d)(?![\d:])"
    rf"(?:\s*\\?\s*(?:\\text\s*\{{\s*)?(?P<half>{_HALF})\s*\}}?)?",
    re.IGNORECASE,
)
#: Before a time that is a bound.
_NOT_AT = lazy_pattern(
    r"\b(?:after|before|since|until|till|by|from|around|about|past|than|almost|nearly)\s*$", re.IGNORECASE
)
_SENTENCE_END = lazy_pattern(r"(?<=[.!?])\s+(?=[A-Z])|\n+")
_AFTERNOON = {"pm", "intheafternoon", "intheevening"}
_NOON = 12


def time_of_day(text: str) -> re.Match[str] | None:
    """The time of day that the last sentence with one states; None if there is none, or more than one."""
    for sentence in reversed(_SENTENCE_END.split(text)):
        times = list(TIME_OF_DAY.finditer(sentence))
        if times:
            before, after = plain(sentence[: times[-1].start()]), sentence[times[-1].end() :]
            is_only = len(times) == 1 and not _NOT_AT.search(before) and not re.search(r"\w", after)
            is_stated = is_only and is_asserted(before, after) and is_statement(before, "1", after)
            return times[-1] if is_stated else None
    return None


def is_time_of_day(gold: str, time: re.Match[str] | None) -> bool:
    """Whether a match of `TIME_OF_DAY` is the time `gold`, of which am or pm counts only if it has it."""
    wanted = TIME_OF_DAY.fullmatch(gold.strip())
    if wanted is None or time is None:
        return False
    if not wanted["half"]:
        return [int(time["hour"]), time["minute"]] == [int(wanted["hour"]), wanted["minute"]]
    return _clock(time) == _clock(wanted)


def _clock(time: re.Match[str]) -> tuple[int, str] | None:
    """Hours of 24 and minutes; None if am or pm is missing."""
    hour, half = int(time["hour"]), re.sub(r"\W", "", (time["half"] or "").casefold())
    if half and hour <= _NOON:
        hour = hour % _NOON + (_NOON if half in _AFTERNOON else 0)
    elif not half and 0 < hour <= _NOON:
        return None
    return hour, time["minute"]
