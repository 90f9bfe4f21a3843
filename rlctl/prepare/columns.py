"""What a Parquet file's columns say before a row is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.data.read import COLUMNS, REQUIRED
from rlctl.prepare.findings import DataFinding

if TYPE_CHECKING:
    import pyarrow as pa

#: Bytes that 32-bit offsets of one Arrow array reach.
OFFSET_BYTES = 1 << 31
_ANSWERS = {"answer", "solution", "ground_truth", "label"}


def read_schema(path: Path) -> pa.Schema | None:
    """The Arrow schema of a Parquet file; None for other formats, and for a broken one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() != ".parquet":
        return None
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return None


def is_verl(names: list[str]) -> bool:
    """Whether the columns are verl's, perhaps with some missing."""
    known = {"data_source", "prompt"} <= set(names) and not _ANSWERS & set(names)
    return known or "reward_model" in names


def column_findings(path: Path, schema: pa.Schema) -> list[DataFinding]:
    """Missing and surplus columns, columns of nothing but nulls, texts beyond 32-bit offsets."""
    import pyarrow as pa

    found = []
    if is_verl(schema.names):
        missing = [name for name in REQUIRED if name not in schema.names]
        if missing:
            what = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing: no row can be read"
            fix = "convert the source with `rlctl prepare-data parquet`"
            found.append(DataFinding("missing-columns", "error", what, len(missing), (str(path),), fix))
        other = [name for name in schema.names if name not in COLUMNS]
        if other:
            what = f"columns that training does not read: {', '.join(other)}"
            fix = "what a grader needs belongs into extra_info"
            found.append(DataFinding("unknown-columns", "info", what, len(other), (str(path),), fix))
    nulls = [name for name, kind in _leaves(schema) if pa.types.is_null(kind)]
    if nulls:
        what = f"of type null: {', '.join(nulls)}"
        fix = "give the column a type: other files of the same data set will not concatenate with it"
        found.append(DataFinding("null-type", "warning", what, len(nulls), (str(path),), fix))
    return found + _offset_findings(path, schema)


def _offset_findings(path: Path, schema: pa.Schema) -> list[DataFinding]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    large = []
    for place, (name, kind) in enumerate(_leaves(schema)):
        size = sum(group.column(place).total_uncompressed_size for group in groups)
        if size >= OFFSET_BYTES and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            large.append(f"{name} ({size / 2**30:.1f} GiB)")
    if not large:
        return []
    what = f"over 2 GiB of text with 32-bit offsets: {', '.join(large)}"
    fix = "write it as large_string, or in several files: readers that load it in one piece fail"
    return [DataFinding("small-offsets", "warning", what, len(large), (str(path),), fix)]


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Name and type of every Parquet column, in its order."""
    for field in schema:
        yield from _leaves_of(field.name, field.type)


def _leaves_of(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        for inner in kind:
            yield from _leaves_of(f"{name}.{inner.name}", inner.type)
    elif pa.types.is_map(kind):
        yield from _leaves_of(f"{name}.key", kind.key_type)
        yield from _leaves_of(f"{name}.value", kind.item_type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _leaves_of(name, kind.value_type)
    elif pa.types.is_dictionary(kind):
        yield name, kind.value_type
    else:
        yield name, kind
