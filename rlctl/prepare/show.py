"""Renders rows as the model reads them, escaped for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from rlctl.data.blocks import Record
from rlctl.data.recipes import read_rows
from rlctl.data.schema import Row
from rlctl.data.sources import find_sources
from rlctl.errors import UsageError
from rlctl.prepare.check import characters
from rlctl.prepare.lengths import Histogram, PromptLengths

#: Number of rows measured for the length histogram.
MEASURED_ROWS = 20_000
MEASURED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One row rendered for display."""

    where: str  # `file:row`
    row: Row | None  # as the recipe read it; None if it cannot be used
    problem: str = ""  # why the row cannot be used or rendered
    #: the prompt as the model reads it: (text, whether it is a special token). Without a model, or if the
    #: prompt cannot be rendered: role and content of each message
    pieces: tuple[tuple[str, bool], ...] = ()
    ids: list[int] | None = None  # token ids; None without a model or if the prompt cannot be rendered


def show_rows(file: str, lengths: PromptLengths | None, *, first: int, count: int) -> list[RenderedRow]:
    """Renders `count` rows of a file or directory from row `first` on, counted from 1 over all its files.

    Without `lengths`, the chat template is not applied.

    Raises:
        UsageError: the file cannot be read, or has no such row.
    """
    rows = list(islice(_rows(file), first - 1, first - 1 + count))
    if not rows:
        total = sum(1 for _ in _rows(file))
        raise UsageError(f"there is no row {first}: it has {total}", where=file, fix="lower --row")
    return [_shown(record.where, row, problem, lengths) for record, row, problem in rows]


def measure(file: str, lengths: PromptLengths | None) -> Histogram:
    """Prompt lengths of the first `MEASURED_ROWS` rows: in tokens, or in characters without a model."""
    histogram = Histogram("tokens" if lengths else "characters")
    rows = (row for _, row, _ in islice(_rows(file), MEASURED_ROWS) if row is not None)
    while chunk := list(islice(rows, MEASURED_AT_ONCE)):
        found = characters(chunk) if lengths is None else [one.num_tokens for one in lengths.measure(chunk)]
        histogram.add(length for length in found if length or lengths is None)
    return histogram


def _rows(file: str) -> Iterator[tuple[Record, Row | None, str]]:
    return chain.from_iterable(map(read_rows, find_sources([file])))


def _shown(where: str, row: Row | None, problem: str, lengths: PromptLengths | None) -> RenderedRow:
    turns = row.prompt if row else ()
    plain = tuple(part for turn in turns for part in ((f"{turn.role}:", True), (f" {turn.content}\n", False)))
    if row is None or lengths is None:
        return RenderedRow(where, row, problem, plain)
    renderer = lengths.renderer
    try:
        text = renderer.text(row)
        ids = renderer.encode([text])[0]
        renderer.check_start(row, ids)
    except UsageError as error:
        return RenderedRow(where, row, error.what, plain)
    added = renderer.tokenizer.added_tokens_decoder.values()
    special = sorted(filter(None, map(str, added)), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    return RenderedRow(where, row, "", tuple((piece, piece in special) for piece in pieces if piece), ids)
