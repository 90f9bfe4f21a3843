"""Tables with a step column: CSV, and Parquet."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlctl.diagnose.readers.collect import MAIN, STEP_KEYS
from rlctl.diagnose.readers.reading import Reading

_DELIMITERS = ",;\t"
_RUN_SEPARATOR = " - "  # W&B's export: "run name - metric", with __MIN and __MAX beside it


def csv_header(head: bytes) -> tuple[list[str], str] | None:
    """(names, delimiter) if the first line names columns, a step among them; None otherwise."""
    line = head.partition(b"\n")[0].decode("utf-8-sig", "replace").strip("\r")
    delimiter = max(_DELIMITERS, key=line.count)
    if delimiter not in line:
        return None
    try:
        names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return None
    return (names, delimiter) if any(name in STEP_KEYS for name in names) else None


def read_csv(stream: IO[bytes], names: list[str], delimiter: str, reading: Reading) -> None:
    """One pass over the rows; empty cells were not logged."""
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
    rows = csv.reader((line.replace("\0", "") for line in lines), delimiter=delimiter)
    next(rows, None)
    columns = _columns_of_one_run(names, reading)
    num_unreadable = 0
    try:
        for cells in rows:
            row = {name: cells[place] or None for name, place in columns.items() if place < len(cells)}
            if len(cells) < len(names) or not reading.collector.add(row):
                num_unreadable += bool(cells)
            elif reading.is_full:
                break
    except csv.Error as error:
        reading.notes.append(f"reading stopped in line {rows.line_num}: {error}")
    if num_unreadable:
        reading.notes.append(f"{num_unreadable} unreadable line(s) passed over")


def _columns_of_one_run(names: list[str], reading: Reading) -> dict[str, int]:
    """Name → place. An export of several runs has a column per run and metric: the first run's are taken."""
    plain = {name: place for place, name in enumerate(names) if name}
    steps = {name: place for name, place in plain.items() if name in STEP_KEYS}
    others = {name: place for name, place in plain.items() if name not in steps}
    if not others or not all(_RUN_SEPARATOR in name for name in others):
        return plain
    runs = {name: name.rpartition(_RUN_SEPARATOR)[0] for name in others}
    first = next(iter(runs.values()))
    if len(set(runs.values())) > 1:
        reading.notes.append(f"{len(set(runs.values()))} runs in one table: {first} was read")
    return steps | {
        name.rpartition(_RUN_SEPARATOR)[2]: place
        for name, place in others.items()
        if runs[name] == first and not name.endswith(("__MIN", "__MAX"))
    }


def read_parquet(path: Path, reading: Reading) -> bool:
    """Read the wanted columns, batch by batch; False if there is no step column.

    Raises:
        ValueError: it is damaged, or no Parquet.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    step_key = next((key for key in STEP_KEYS if key in names), None)
    if step_key is None:
        return False
    reading.collector.names.update(names)
    wanted = [
        name
        for name in names
        if name not in STEP_KEYS
        and reading.collector.keeps(name)
        and _is_numeric(pa, file.schema_arrow.field(name).type)
    ]
    for batch in file.iter_batches(columns=[step_key, *wanted]):
        steps = batch.column(step_key).to_numpy(zero_copy_only=False)
        has_step = np.isfinite(steps.astype(np.float64))
        columns = {name: _logged(batch.column(name), has_step) for name in wanted}
        reading.collector.add_columns(MAIN, steps[has_step].astype(np.int64), columns)
        if reading.is_full:
            break
    return True


def _is_numeric(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _logged(column: Any, rows: np.ndarray[Any, Any]) -> Any:
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)[rows]
    return values, column.is_valid().to_numpy(zero_copy_only=False)[rows]
