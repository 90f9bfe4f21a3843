"""Tables for the terminal, without borders. Imported inside functions, because it imports Rich."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlctl.errors import visible
from rlctl.terminal import Console

#: More columns than any table has.
NO_LIMIT = 10_000


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Container[int] = (),
    whole: Container[int] = (),
    indent: int = 0,
    wide: bool = False,
) -> None:
    """Prints a table in which no text becomes markup. Long cells continue on the next line.

    Args:
        headings: of the columns; if all are empty, there is no line of headings.
        right: numbers of the right-aligned columns, from 0; their cells stay whole.
        whole: numbers of further columns whose cells stay whole.
        indent: spaces to the left of the table.
        wide: the table is never cut or wrapped to fit the terminal.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=any(headings))
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
    width = console.width
    console.width = NO_LIMIT if wide else width
    console.print(Padding(table, (0, 0, 0, indent), expand=False))
    console.width = width
