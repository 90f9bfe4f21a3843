"""The cells of a log: numbers, steps, or neither."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Larger numbers are not steps.
LARGEST_STEP = 1 << 62
#: Far beyond what single precision holds: more is an overflow, and what is less may be squared.
_LARGEST_VALUE = 1e100


def is_finite(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which values rules can calculate with."""
    return np.abs(values) <= _LARGEST_VALUE


def as_numbers(
    rows: list[tuple[Any, ...]], null_is_nan: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(n, m) numbers, and whether each was logged as a number at all."""
    shape = len(rows), len(rows[0])
    try:
        flat = np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=shape[0] * shape[1])
    except (ValueError, TypeError, OverflowError):  # texts, null, lists, integers beyond a double
        flat = np.array([as_number(value) for value in chain.from_iterable(rows)])
    numbers = flat.reshape(shape)
    was_logged = np.ones(shape, dtype=bool)
    for row, place in zip(*np.nonzero(~np.isfinite(numbers)), strict=True):
        value = rows[row][place]
        was_logged[row, place] = null_is_nan if value is None else _is_number(value)
    return numbers, was_logged


def as_number(value: object) -> float:
    """A number, or a text that says one (`0.5`, `NaN`, `-Infinity`); NaN for anything else."""
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
        except ValueError:
            return float("nan")
    return float("nan")


def _is_number(value: object) -> bool:
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
