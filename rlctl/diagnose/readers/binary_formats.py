"""Binary logs: Parquet tables, TensorBoard's event files, and W&B's `.wandb` file of an offline run."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from rlctl.diagnose.readers.collect import MAIN, OWN_CLOCKS
from rlctl.diagnose.readers.console import ConsoleReader
from rlctl.diagnose.readers.reading import LogReading

PARQUET_MARK, WANDB_MARK = b"PAR1", b":W&B"
#: Part of the first record of every event file.
EVENTS_MARK = b"brain.Event:"

_LARGEST_RECORD = 1 << 28
_TRAINER_ARGUMENTS = "args/text_summary"  # Hugging Face's callback: the training arguments as JSON
# LevelDB's log format, which W&B uses.
_HEADER_BYTES, _BLOCK_BYTES, _RECORD_HEADER_BYTES = 7, 1 << 15, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def read_parquet(path: Path, reading: LogReading) -> bool:
    """Reads the wanted columns, batch by batch; False if there is no step column.

    Raises:
        ValueError: the file is damaged, or not a Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    names = file.schema_arrow.names
    step_keys = [key for key in reading.collector.step_keys if key in names]
    if not step_keys:
        return False
    # With several clocks, a row has the steps of the others as nulls; rollouts are logged before updates.
    has_clocks = step_keys[0] in OWN_CLOCKS
    clocks = [key for key in reversed(step_keys) if key.endswith("/step")] if has_clocks else step_keys[:1]
    reading.collector.names.update(names)
    checks = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
    numeric = [one.name for one in file.schema_arrow if any(check(one.type) for check in checks)]
    wanted = [name for name in numeric if name not in step_keys and reading.collector.keeps(name)]
    num_without = 0
    for batch in file.iter_batches(columns=[*clocks, *wanted]):
        is_without = np.ones(batch.num_rows, dtype=bool)
        for key in clocks:
            steps = batch.column(key).to_numpy(zero_copy_only=False)
            has_step = np.isfinite(steps.astype(np.float64))
            is_without &= ~has_step
            columns = {name: _logged(batch.column(name), has_step) for name in wanted}
            clock = key if key in OWN_CLOCKS else MAIN
            reading.collector.add_columns(clock, steps[has_step].astype(np.int64), columns)
        num_without += int(is_without.sum())
        if reading.is_full:
            break
    if num_without:
        reading.notes.append(f"{num_without} row(s) without a step skipped")
    return True


def _logged(column: Any, rows: np.ndarray[Any, Any]) -> Any:
    values = column.to_numpy(zero_copy_only=False).astype(np.float64)[rows]
    return values, column.is_valid().to_numpy(zero_copy_only=False)[rows]


def read_events(files: Sequence[Path], reading: LogReading) -> None:
    """Reads the scalars of one run from its files, in the order in which they were begun."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    scalars: dict[str, tuple[array[int], array[float]]] = {}
    collector = reading.collector
    num_read = 0
    for path in sorted(files, key=lambda file: file.name):
        with path.open("rb") as stream:
            for record in _event_records(stream, path, reading):
                try:
                    event = Event.FromString(record)
                except DecodeError:
                    reading.notes.append(f"{path.name}: a damaged record was skipped")
                    continue
                for value in event.summary.value:
                    tag = value.tag
                    collector.names.add(tag)
                    if tag == _TRAINER_ARGUMENTS:
                        reading.config |= _arguments(value)
                    elif collector.keeps(tag) and (number := _scalar(value)) is not None:
                        if tag not in scalars:
                            scalars[tag] = (array("q"), array("d"))
                        scalars[tag][0].append(event.step)
                        scalars[tag][1].append(number)
                num_read += 1
                if reading.limit is not None and num_read >= reading.limit * 100:
                    break
    for tag, (steps, values) in scalars.items():
        numbers = np.array(values)
        was_logged = np.ones(len(numbers), dtype=bool)
        collector.add_columns(tag, np.array(steps, dtype=np.int64), {tag: (numbers, was_logged)})


def _event_records(stream: IO[bytes], path: Path, reading: LogReading) -> Iterator[bytes]:
    """The records' contents: length (8 bytes), its checksum (4), content, checksum (4).

    TensorBoard's reader is not used, because it spends most of its time on checksums in Python. A file that
    is still being written may end with an incomplete record.
    """
    while head := stream.read(12):
        length = int.from_bytes(head[:8], "little")
        content = stream.read(length + 4) if length < _LARGEST_RECORD else b""
        if len(head) < 12 or len(content) < length + 4:
            reading.notes.append(f"{path.name} ends with an incomplete record, or is damaged there")
            return
        yield content[:-4]


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor":
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        numbers = make_ndarray(value.tensor)
    except (TypeError, ValueError):
        return None
    return float(numbers.item()) if numbers.size == 1 and numbers.dtype.kind in "fiu" else None


def _arguments(value: Any) -> dict[str, Any]:
    try:
        config = json.loads(value.tensor.string_val[0])
    except (ValueError, IndexError):
        return {}
    return config if isinstance(config, dict) else {}


def read_wandb(stream: IO[bytes], reading: LogReading) -> None:
    """Reads history and configuration of the run; its console output where it has no history."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    console = ConsoleReader(reading)
    cut = ""
    number = 0
    for content in _wandb_records(stream, reading):
        try:
            record = Record.FromString(content)
        except DecodeError:
            reading.notes.append("a damaged record was skipped")
            continue
        kind = record.WhichOneof("record_type")
        if kind == "history":
            # Sorted, because W&B writes items in any order, and the collector groups rows by their keys.
            row = {_name(item): _value(item) for item in sorted(record.history.item, key=_name)}
            if record.history.HasField("step"):
                row.setdefault("_step", record.history.step.num)
            reading.collector.add(row)
            if reading.is_full:
                return
        elif kind in {"run", "config"}:
            config = record.run.config if kind == "run" else record.config
            for item in config.update:
                _set(reading.config, list(item.nested_key) or [item.key], _value(item))
        elif kind in {"output", "output_raw"} and not reading.collector.num_rows:
            *lines, cut = (cut + getattr(record, kind).line).split("\n")
            for line in lines:
                number += 1
                console.read(line.encode(), number)
    console.read(cut.encode(), number + 1)
    console.finish()


def _wandb_records(stream: IO[bytes], reading: LogReading) -> Iterator[bytes]:
    """The records' contents, in LevelDB's log format.

    The file consists of blocks of 32 KiB. A record is one chunk or several: checksum (4 bytes), length (2),
    kind (1), content. The end of a block is padding if it is too short for a header. The wandb package no
    longer includes a reader of this format.
    """
    stream.read(_HEADER_BYTES)
    position = _HEADER_BYTES
    parts = b""
    while True:
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEADER_BYTES:
            position += len(stream.read(left))
        header = stream.read(_RECORD_HEADER_BYTES)
        length = int.from_bytes(header[4:6], "little")
        kind = header[6:]
        content = stream.read(length)
        if len(header) < _RECORD_HEADER_BYTES or len(content) < length or kind == b"\0":
            if header.strip(b"\0"):
                reading.notes.append("the file ends with an incomplete record")
            return
        position += _RECORD_HEADER_BYTES + length
        if kind[0] in {_FULL, _FIRST}:
            parts = b""
        parts += content
        if kind[0] in {_FULL, _LAST}:
            yield parts


def _name(item: Any) -> str:
    return "/".join(item.nested_key) or str(item.key)


def _value(item: Any) -> Any:
    try:
        return from_json(item.value_json)
    except ValueError:
        return None


def _set(config: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        below = config.setdefault(key, {})
        if not isinstance(below, dict):
            return
        config = below
    config[path[-1]] = value
