"""Tables for the terminal, without borders. Imported inside functions, because it imports Rich."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.table import Table
from rich.text import Text

from rlctl.errors import visible
from rlctl.terminal import Console

#: More columns than any table has.
NO_LIMIT = 10_000


def text_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Container[int] = (),
    whole: Container[int] = (),
) -> Table:
    """A table in which no text becomes markup. Long cells continue on the next line.

    `right` has the numbers of the right-aligned columns, from 0. Cells of these and of `whole` stay whole.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        is_right = number in right
        table.add_column(
            Text(heading),
            justify="right" if is_right else "left",
            overflow="fold",
            no_wrap=is_right or number in whole,
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row))
    return table


def print_wide(console: Console, table: Table) -> None:
    """Prints a table that is never cut or wrapped to fit the terminal."""
    width, console.width = console.width, NO_LIMIT
    console.print(table)
    console.width = width
