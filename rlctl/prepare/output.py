"""Writes the kept rows to Parquet shards with the columns of a framework, and the manifest.

Each shard is one task. verl's `RLHFDataset` reads the columns unchanged. TRL's GRPO trainer reads `prompt`,
and passes all other columns to the reward functions by name; its `accuracy_reward` reads `solution`.
OpenRLHF's `PromptDataset` reads the columns given by its input key (`input`) and label key, and `datasource`.

The manifest has the inputs, settings and contents of the directory, to reproduce or reuse it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlctl.data.schema import BatchWriter, arrow_schema, integers, placed
from rlctl.errors import UsageError
from rlctl.files import sha256_of
from rlctl.prepare.engines import run
from rlctl.prepare.request import OutputFormat, PrepareRequest, Progress
from rlctl.prepare.sources import Source
from rlctl.prepare.transform import StagedBlock, Staging

#: format → output column → its source in verl's layout; a dot selects a struct field
_COLUMNS: dict[OutputFormat, dict[str, str]] = {
    "verl": {name: name for name in ("data_source", "prompt", "ability", "reward_model", "extra_info")},
    "trl": {
        "prompt": "prompt",
        "solution": "reward_model.ground_truth",
        "ground_truth": "reward_model.ground_truth",
        "data_source": "data_source",
        "ability": "ability",
        "style": "reward_model.style",
        "extra_info": "extra_info",
    },
    "openrlhf": {"input": "prompt", "label": "reward_model.ground_truth", "datasource": "data_source"},
}
#: Approximate bytes of text per output file: readers that load a column in one piece with 32-bit offsets are
#: limited to 2 GiB.
SHARD_BYTES = 1 << 30
MANIFEST = "manifest.json"
FORMAT = 3


def schema(to: OutputFormat, *, with_other: bool) -> pa.Schema:
    """The Arrow schema of the files of a format; for `with_other` see `arrow_schema`."""
    rows = arrow_schema(with_other=with_other)
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in rows.types], schema=rows)
    return convert(empty, to).schema


def convert(batch: pa.RecordBatch, to: OutputFormat) -> pa.RecordBatch:
    """Selects the columns of a format from a batch in verl's layout, without copying."""
    columns = []
    for place in _COLUMNS[to].values():
        column, _, inside = place.partition(".")
        columns.append(batch.column(column).field(inside) if inside else batch.column(column))
    return pa.RecordBatch.from_arrays(columns, names=list(_COLUMNS[to]))


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write."""

    path: Path
    split: str  # `train` or `test`
    parts: list[tuple[StagedBlock, NDArray[np.int32]]]  # its rows: blocks, and row indices within each


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
    num_shards = sum(1 for _ in _shards(staging, is_in, request.rows_per_shard))
    names = [f"{split}-{place:05}-of-{num_shards:05}.parquet" for place in range(num_shards)]
    if num_shards == 1:
        names = [f"{split}.parquet"]
    progress.phase(f"writing {split}", int(is_in.sum()))
    shards = _shards(staging, is_in, request.rows_per_shard)
    tasks = (Shard(stage / name, split, parts) for name, parts in zip(names, shards, strict=True))
    shared = (request.to, schema(request.to, with_other=staging.has_other))
    for shard, _ in run("local", write_shard, shared, tasks, min(request.num_workers, num_shards)):
        progress.advance(sum(len(places) for _, places in shard.parts))
    return names


def write_shard(shared: tuple[OutputFormat, pa.Schema], shard: Shard) -> None:
    """Writes one file; `shared` is its format and schema."""
    to, schema_of_file = shared
    with BatchWriter(shard.path, schema_of_file) as writer:
        for block, places in shard.parts:
            batch, index = block.read()
            if len(places) < block.num_rows:
                chosen = integers(places, pa.int32())
                batch, index = batch.take(chosen), index.take(chosen)
            writer.add(convert(placed(batch, shard.split, index), to))


def _shards(
    staging: Staging, is_in: NDArray[np.bool_], rows_per_shard: int
) -> Iterator[list[tuple[StagedBlock, NDArray[np.int32]]]]:
    parts: list[tuple[StagedBlock, NDArray[np.int32]]] = []
    rows, num_bytes = 0, 0.0
    for block in staging.blocks:
        places = np.flatnonzero(is_in[block.rows]).astype(np.int32)
        row_bytes = block.num_bytes / block.num_rows
        while len(places):
            room = min(rows_per_shard - rows, int((SHARD_BYTES - num_bytes) / row_bytes))
            if room <= 0 and parts:
                yield parts
                parts, rows, num_bytes = [], 0, 0.0
                continue
            parts.append((block, places[: max(1, room)]))
            taken = len(parts[-1][1])
            places, rows, num_bytes = places[taken:], rows + taken, num_bytes + taken * row_bytes
    if parts:
        yield parts


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
    if inside := next((one.path for one in inputs if one.path.resolve().parent == out.resolve()), None):
        what = "the output directory contains this input, and would replace it"
        raise UsageError(what, where=str(inside), fix="choose another --out")


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
