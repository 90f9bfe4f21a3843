"""The cells of a log: numbers, steps, or neither."""

from __future__ import annotations

#: Larger numbers are not steps.
LARGEST_STEP = 1 << 62
#: Far beyond what single precision holds: more is an overflow, and what is less may be squared.
LARGEST_VALUE = 1e100


def as_number(value: object) -> float:
    """A number, or a text that is one (`0.5`, `NaN`, `-Infinity`); NaN for anything else."""
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
        except ValueError:
            return float("nan")
    return float("nan")


def is_number(value: object) -> bool:
    """Whether a value that is not finite is a number nevertheless, or a text that is one."""
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-") in {"nan", "inf", "infinity"}
    return isinstance(value, int | float)


def whole(value: object) -> int | None:
    """A step: a whole number, whatever its type; None for anything else."""
    if type(value) is not int:
        number = as_number(value) if not isinstance(value, bool) else float("nan")
        if not number.is_integer():
            return None
        value = int(number)
    return value if -LARGEST_STEP < value < LARGEST_STEP else None
