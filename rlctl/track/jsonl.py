"""`metrics.jsonl`: one flat JSON object per step; the log from which all other outputs can be rebuilt.

    {"step": 12, "timestamp": "2025-01-31T12:00:00.123+00:00", "actor/pg_loss": -0.03, …}

Standard JSON only: NaN and infinities are the strings "NaN", "Infinity", "-Infinity" (Python's `float` and
JavaScript's `Number` parse them). Each line is written in one system call, so a killed process leaves at most
one incomplete line, the last.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlctl.errors import RunFailure
from rlctl.files import lines_of, open_to_append, replacing

METRICS_FILE = "metrics.jsonl"
DISCARDED_FILE = "metrics.discarded.jsonl"
#: How a line writes numbers that JSON has not.
_NO_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})
#: Steps that a column of 64-bit integers can hold.
_STEPS = range(-(2**63), 2**63)


class JsonlSink:
    """Appends steps to `metrics.jsonl`.

    Raises:
        RunFailure: the file cannot be opened or written. This is the only sink whose failure stops the run,
            because a run without metrics is useless.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_to_append(path, "ab", buffering=0)
        except OSError as error:
            raise _failure(path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        if self._file.closed:
            raise RunFailure("metrics were logged after the log was closed", where=str(self.path))
        data = encode_line(step, metrics).encode()
        try:
            while data:  # a full disk or a signal can cause a partial write
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _failure(self.path, error) from error

    def close(self, status: str) -> None:
        """Flushes the file to disk and closes it; can be called twice."""
        if not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())


def encode_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line of `metrics.jsonl`, with newline."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    values = {key: _plain(value) for key, value in metrics.items()}
    return json.dumps({"step": step, "timestamp": now, **values}, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: float) -> float | int | str:
    """Converts a number, NumPy scalar or 0-d tensor to a JSON number; NaN and infinities to strings."""
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)  # "NaN", "Infinity" or "-Infinity"


def truncate_after(path: Path, step: int) -> list[int]:
    """Removes all steps after `step`, so that a resumed run does not repeat steps.

    Later lines, and incomplete or unreadable ones, move to `metrics.discarded.jsonl` in the same directory.
    The log itself is replaced atomically; if the process is killed before, the next call repeats both.
    Returns the steps that are kept. A missing file counts as empty.

    Raises:
        RunFailure: the files cannot be read or written.
    """
    try:
        lines = list(lines_of(path)) if path.exists() else []
        steps = [_step_of(line) for line in lines]
        kept = [line for line, n in zip(lines, steps, strict=True) if n is not None and n <= step]
        if len(kept) < len(lines):
            discarded = [line for line, n in zip(lines, steps, strict=True) if n is None or n > step]
            with open_to_append(path.with_name(DISCARDED_FILE)) as file:
                file.writelines(line.removesuffix(b"\n") + b"\n" for line in discarded)
                file.flush()
                os.fsync(file.fileno())
            with replacing(path) as temporary:
                temporary.write_bytes(b"".join(kept))
    except OSError as error:
        raise _failure(path, error) from error
    return [n for n in steps if n is not None and n <= step]


def decode_line(line: bytes) -> dict[str, Any]:
    """A row of `metrics.jsonl`.

    Raises:
        ValueError: the line is not an object with an integer `step` and numbers.
    """
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if not isinstance(row, dict) or type(step := row.get("step")) is not int or step not in _STEPS:
        raise ValueError("no integer `step`")
    for key, value in row.items():
        if not (isinstance(value, str | None) if key == "timestamp" else _is_number(value)):
            raise ValueError(f"{key} is no number")
    return row


def _is_number(value: Any) -> bool:
    """Whether a value of a row is a number that a float64 can hold, one of `_NO_NUMBERS`, or missing."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return value is None or isinstance(value, float) or (isinstance(value, str) and value in _NO_NUMBERS)


def _step_of(line: bytes) -> int | None:
    """Step of a complete line; None for an incomplete or invalid line."""
    try:
        return int(decode_line(line)["step"]) if line.endswith(b"\n") else None
    except ValueError:
        return None


def _failure(path: Path, error: OSError) -> RunFailure:
    return RunFailure(
        f"the metrics log cannot be written: {error.strerror or error}",
        where=str(path),
        fix="free space or correct the permissions, then run again with --resume",
    )
