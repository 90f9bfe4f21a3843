"""Writes the kept rows to Parquet shards with verl's columns, and the manifest.

The manifest has the inputs, settings and contents of the directory, to reproduce or reuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlctl.data.schema import PLACE, BatchWriter, arrow_schema, placed
from rlctl.errors import UsageError
from rlctl.files import sha256_of
from rlctl.prepare.engines import run
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.sources import Source
from rlctl.prepare.transform import StagedBlock, Staging

#: Approximate bytes of text per output file: readers that load a column in one piece with 32-bit offsets are
#: limited to 2 GiB.
SHARD_BYTES = 1 << 30
MANIFEST = "manifest.json"
FORMAT = 5


def write_split(
    request: PrepareRequest,
    split: str,
    staging: Staging,
    is_in: NDArray[np.bool_],
    stage: Path,
    progress: Progress,
) -> list[str]:
    """Writes the rows where `is_in` (rows,) is true, in input order; returns the names of the files.

    Without rows there is no file. A split that fits in one file is written as `SPLIT.parquet`.
    """
    rows = np.flatnonzero(is_in)
    row_bytes = sum(block.num_bytes for block in staging.blocks) / max(1, staging.num_rows)
    most = min(request.rows_per_shard, max(1, int(SHARD_BYTES / max(1.0, row_bytes))))
    shards = [rows[start : start + most] for start in range(0, len(rows), most)]
    names = [f"{split}-{index:05}-of-{len(shards):05}.parquet" for index in range(len(shards))]
    if len(names) == 1:
        names = [f"{split}.parquet"]
    progress.phase(f"writing {split}", len(rows))
    schema = arrow_schema(
        with_other=staging.has_other, with_calls=staging.has_calls, with_places=request.keeps_places
    )
    shared = (split, schema, staging.blocks, staging.file("number"))
    tasks = zip([stage / name for name in names], shards, strict=True)
    for (_, written), _ in run(write_shard, shared, tasks, min(request.num_workers, len(names))):
        progress.advance(len(written))
    return names


def write_shard(
    shared: tuple[str, pa.Schema, list[StagedBlock], Path], task: tuple[Path, NDArray[np.int64]]
) -> None:
    """Writes one file with some of the staged rows; `shared`: split, schema, blocks, file of row numbers."""
    split, schema, blocks, numbers = shared
    path, rows = task
    has_places = PLACE in schema.names
    number = np.memmap(numbers, np.uint64, "r") if has_places else None
    with BatchWriter(path, schema) as writer:
        for block in blocks:
            low, high = np.searchsorted(rows, (block.rows.start, block.rows.stop))
            if low < high:
                batch, index = block.read()
                chosen = pa.array(rows[low:high] - block.first_row)
                written = placed(batch.take(chosen), split, index.take(chosen))
                if number is not None:
                    text = pa.large_string()
                    of_rows = pa.array(number[rows[low:high]]).cast(text)
                    file = pa.scalar(block.source.name, text)
                    colon = pa.scalar(":", text)
                    written = written.append_column(PLACE, pc.binary_join_element_wise(file, of_rows, colon))
                writer.add(written)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Inputs, settings and contents of a prepared directory."""

    made_from: Mapping[str, Any]  # everything the output depends on: input hashes, recipe, split, versions
    counts: Mapping[str, int]  # rows of the input, per split, quarantined, and dropped per reason
    report: Mapping[str, Any]  # statistics: duplicates, leakage, lengths, findings
    splits: Mapping[str, list[str]]  # split → its Parquet files
    outputs: Mapping[str, str]  # file name → sha256

    def write(self, directory: Path) -> None:
        """Writes `manifest.json`, without dates: equal inputs and settings give identical bytes."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2, ensure_ascii=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def matches(self, directory: Path) -> bool:
        """Whether the directory still contains every file of the manifest, unchanged."""
        return all(
            (directory / name).is_file() and sha256_of(directory / name) == digest
            for name, digest in self.outputs.items()
        )


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None if it is missing, unreadable or of another format version."""
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        return Manifest(*(content[field.name] for field in fields(Manifest)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_replaceable(out: Path, inputs: Sequence[Source]) -> None:
    """Checks that replacing `out` would delete nothing but the output of an earlier run, and no input.

    Raises:
        UsageError: `out` is a file, or contains other files or an input.
    """
    if out.exists() and not out.is_dir():
        raise UsageError("the output is a file, not a directory", where=str(out), fix="choose another --out")
    entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    manifest = read_manifest(out)
    foreign = entries - {MANIFEST, *(manifest.outputs if manifest else ())}
    if foreign or (entries and manifest is None):
        raise UsageError(
            f"the directory contains files that prepare-data did not write ({min(foreign or entries)})",
            where=str(out),
            fix="choose another --out",
        )
    inside = next((one.path for one in inputs if one.path.resolve().parent == out.resolve()), None)
    if inside:
        message = "the output directory contains this input, and would replace it"
        raise UsageError(message, where=str(inside), fix="choose another --out")


def describe_inputs(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Names, size and hash of each input; names have no directory, so that data may be moved."""
    return [
        {
            "name": source.path.name,
            "data_source": source.name,
            "bytes": source.num_bytes,
            "sha256": sha256_of(source.path),
        }
        for source in sources
    ]
