"""Parses the cells of a log: numbers, steps, or neither."""

from __future__ import annotations

import re

#: Larger numbers are not steps.
LARGEST_STEP = 1 << 62
#: Larger numbers count as overflow: this is far beyond single precision, and its square is still finite.
LARGEST_VALUE = 1e100

#: Regular expression of a number as text.
NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
)
#: A number as Python prints it: bare, quoted, or inside `np.float64(…)` and `tensor(…, device=…)`.
_VALUE = (
    rf"(?:(?:\w{{1,20}}\.){{0,3}}\w{{1,20}}\(|['\"])?"
    rf"(?P<number>{NUMBER}|True|False)(?=['\"),\s}}\]%]|$)"
)
_WHOLE_VALUE = re.compile(_VALUE + r"(?P<percent>%?)", re.IGNORECASE)
_PAIR = re.compile(rf"['\"](?P<name>[^'\"{{}}]{{1,200}})['\"]:\s*{_VALUE}(?!%)", re.IGNORECASE)
#: A step with the total number of steps, as text: `'step': '5/547'`.
_OF_ALL = re.compile(r"['\"](?P<name>\w*step[\w/]*)['\"]:\s*['\"](?P<number>\d+)/\d+['\"]")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def as_number(value: object) -> float:
    """The value of a number, or of its text (`0.5`, `1,234`, `NaN`, `-Infinity`); NaN for anything else."""
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
        except ValueError:
            if isinstance(value, str) and _GROUPED.fullmatch(value.strip()):
                return float(value.replace(",", ""))
            return float("nan")
    return float("nan")


def is_number(value: object) -> bool:
    """Whether a value is a number that cannot be stored as finite: NaN, infinite, or too large.

    A text counts only if it is NaN or infinite.
    """
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-") in {"nan", "inf", "infinity"}
    return isinstance(value, int | float)


def whole(value: object) -> int | None:
    """A step: a whole number of any type, or a text such as `5/547`; None for anything else."""
    if type(value) is not int:
        if isinstance(value, str) and "/" in value:
            value = value.partition("/")[0]
        number = as_number(value) if not isinstance(value, bool) else float("nan")
        if not number.is_integer():
            return None
        value = int(number)
    return value if -LARGEST_STEP < value < LARGEST_STEP else None


def printed_number(text: str) -> float | None:
    """The number that a program printed, a percentage as a share; None for any other text."""
    try:
        return float(text)  # the usual case, and many times faster than a regular expression
    except ValueError:
        match = _WHOLE_VALUE.match(text)
        return None if match is None else _plain(match["number"]) * (0.01 if match["percent"] else 1)


def pairs(text: str) -> dict[str, float | None]:
    """The numbers of a printed dictionary by name."""
    found: dict[str, float | None] = {pair["name"]: _plain(pair["number"]) for pair in _PAIR.finditer(text)}
    if "step" in text:
        found |= {pair["name"]: float(pair["number"]) for pair in _OF_ALL.finditer(text)}
    return found


def _plain(number: str) -> float:
    known = {"true": 1.0, "false": 0.0}.get(number.lower())
    return float(number.replace(",", "")) if known is None else known
