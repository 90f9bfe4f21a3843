"""Logs of lines: one JSON object per line, or what a framework prints to the console."""

from __future__ import annotations

import codecs
from functools import partial
from itertools import chain
from typing import IO, Any

from pydantic_core import from_json

from rlctl.diagnose.readers.console import Console
from rlctl.diagnose.readers.reading import Reading

_LONGEST_LINE = 1 << 26
_VERL_KEYS = {"step", "data"}


def read_lines(stream: IO[bytes], reading: Reading) -> None:
    """One pass over the lines.

    A line that is no row (the half line that a killed process leaves) is passed over.
    """
    collector = reading.collector
    console = Console(reading)
    num_objects = num_others = 0
    lines = iter(partial(stream.readline, _LONGEST_LINE), b"")
    first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
    for line in chain((first,), lines):
        row = _object(line) if line[:1] == b"{" else None
        if row is not None:
            if row.keys() == _VERL_KEYS and not num_objects:  # verl's file logger
                reading.hint, collector.null_is_nan = "verl", True
            if collector.add(row):
                num_objects += 1
                if reading.is_full:
                    break
                continue
        if line.isspace():
            continue
        if row is not None or not console.read(line):
            num_others += 1
        elif reading.is_full:
            break
    if num_others and num_objects:  # among printed lines prose is no fault
        reading.notes.append(f"{num_others} unreadable line(s) passed over")
    reading.notes += console.notes()


def _object(line: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        row = from_json(line, cache_strings="keys")
    except ValueError:
        if line.isascii():
            return None
        try:  # bytes that are no UTF-8 may stand in a text of the row
            row = from_json(line.decode("utf-8", "replace"))
        except ValueError:
            return None
    return row if isinstance(row, dict) else None
