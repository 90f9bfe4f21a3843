"""Rows as the model reads them, for looking at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rlctl.data.checks import RowError
from rlctl.data.recipes import Recipe, recognise
from rlctl.data.schema import Row
from rlctl.data.sources import Source, find_sources, read_records
from rlctl.errors import UsageError
from rlctl.prepare.histogram import Histogram
from rlctl.prepare.lengths import PromptLengths

#: Rows the length histogram is drawn from.
MEASURED_ROWS = 20_000
MEASURED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """One row, ready to be shown.

    Attributes:
        where: `file:row`.
        row: as a recipe read it; None where it cannot be used.
        problem: why not; also what the model's template has against it.
        pieces: the prompt as the model reads it, in order: (text, whether it is a special token). Without a
            model, or where it cannot be rendered: role and content of each message.
        ids: token ids; None without a model.
    """

    where: str
    row: Row | None
    problem: str = ""
    pieces: tuple[tuple[str, bool], ...] = ()
    ids: list[int] | None = None


def open_lengths(model: str | None, *, trust_remote_code: bool) -> PromptLengths | None:
    """What renders and measures rows; None without a model."""
    return PromptLengths(model, trust_remote_code=trust_remote_code) if model is not None else None


def show_rows(file: str, lengths: PromptLengths | None, *, first: int, count: int) -> list[RenderedRow]:
    """Rows of a file.

    Args:
        file: anything `prepare` reads; of several files their rows in order.
        lengths: renders them; None: messages are shown as they are.
        first: the first row to show, from 1.
        count: how many.

    Raises:
        UsageError: the file cannot be read, or has no such row.
    """
    rows = list(islice(_rows(find_sources([file])), first - 1, first - 1 + count))
    if not rows:
        total = sum(1 for _ in _rows(find_sources([file])))
        raise UsageError(f"there is no row {first}: it has {total}", where=file, fix="lower --row")
    return [_shown(where, row, problem, lengths) for where, row, problem in rows]


def measure(file: str, lengths: PromptLengths | None) -> Histogram:
    """Lengths of the first `MEASURED_ROWS` usable prompts: tokens, or characters without a model."""
    histogram = Histogram("tokens" if lengths else "characters")
    rows = (row for _, row, _ in islice(_rows(find_sources([file])), MEASURED_ROWS) if row is not None)
    while chunk := list(islice(rows, MEASURED_AT_ONCE)):
        if lengths is None:
            histogram.add(sum(len(message.content) for message in row.prompt) for row in chunk)
        else:
            histogram.add(length for length in lengths.measure(chunk).num_tokens if length)
    return histogram


def _rows(sources: Sequence[Source]) -> Iterator[tuple[str, Row | None, str]]:
    """`file:row`, the row or None, and why it is None."""
    for source in sources:
        recipe: Recipe | None = None
        for record in read_records(source):
            if record.values is None:
                yield record.where, None, record.problem
                continue
            recipe = recipe or Recipe(recognise(record.values)).resolve()
            try:
                yield record.where, recipe.to_row(record.values, source.path, record.number - 1), ""
            except RowError as error:
                yield record.where, None, str(error)


def _shown(where: str, row: Row | None, problem: str, lengths: PromptLengths | None) -> RenderedRow:
    if row is None or lengths is None:
        return RenderedRow(where, row, problem, _messages(row) if row else ())
    renderer = lengths.renderer
    try:
        text = renderer.text(row)
        ids = renderer.encode([text])[0]
        renderer.check_start(row, ids)
    except UsageError as error:
        return RenderedRow(where, row, error.what, _messages(row))
    return RenderedRow(where, row, "", tuple(_pieces(text, _special_tokens(lengths))), ids)


def _messages(row: Row) -> tuple[tuple[str, bool], ...]:
    pairs = ((f"{message.role}:", f" {message.content}\n") for message in row.prompt)
    return tuple(piece for role, content in pairs for piece in ((role, True), (content, False)))


def _special_tokens(lengths: PromptLengths) -> list[str]:
    added = lengths.renderer.tokenizer.added_tokens_decoder.values()
    return [str(token) for token in added if str(token)]


def _pieces(text: str, special: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The text cut at special tokens."""
    if not special:
        yield text, False
        return
    longest_first = sorted(special, key=len, reverse=True)
    for piece in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        if piece:
            yield piece, piece in special
