"""Weights & Biases' `.wandb` file, as an offline run leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from pydantic_core import from_json

from rlctl.diagnose.readers.reading import Reading

#: The file's first bytes.
MARK = b":W&B"

_HEADER_BYTES = 7
_BLOCK_BYTES = 1 << 15
_RECORD_HEADER_BYTES = 7
_FULL, _FIRST, _LAST = 1, 2, 4


def read_wandb(stream: IO[bytes], reading: Reading) -> None:
    """Read history and configuration of the run."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(stream, reading):
        try:
            record = Record.FromString(content)
        except DecodeError:
            reading.notes.append("a damaged record was passed over")
            continue
        kind = record.WhichOneof("record_type")
        if kind == "history":
            # Sorted: W&B writes a row's items in any order, and rows with the same keys are kept together.
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


def _records(stream: IO[bytes], reading: Reading) -> Iterator[bytes]:
    """The records' contents, in LevelDB's log format.

    Blocks of 32 KiB; a record is a chunk or several: checksum (4 bytes), length (2), kind (1), content. Space
    that holds no further header is padding. The package no longer ships a reader for it.
    """
    stream.read(_HEADER_BYTES)
    position, parts = _HEADER_BYTES, b""
    while True:
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _RECORD_HEADER_BYTES:
            position += len(stream.read(left))
        header = stream.read(_RECORD_HEADER_BYTES)
        length, kind = int.from_bytes(header[4:6], "little"), header[6:]
        content = stream.read(length)
        if len(header) < _RECORD_HEADER_BYTES or len(content) < length or kind == b"\0":
            if header.strip(b"\0"):
                reading.notes.append("the file ends in half a record")
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
