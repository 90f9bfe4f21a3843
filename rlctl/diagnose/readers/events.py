"""TensorBoard's event files."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlctl.diagnose.readers.reading import Reading

#: In the first record of every event file.
MARK = b"brain.Event:"

_LARGEST_RECORD = 1 << 28
_TRAINER_ARGUMENTS = "args/text_summary"  # Hugging Face's callback: the training arguments as JSON


def read_events(files: Sequence[Path], reading: Reading) -> None:
    """Read the scalars of one run; its files in the order they were begun."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    scalars: dict[str, tuple[array[int], array[float]]] = {}
    collector = reading.collector
    num_read = 0
    for path in sorted(files, key=lambda file: file.name):
        with path.open("rb") as stream:
            for record in _records(stream, path, reading):
                try:
                    event = Event.FromString(record)
                except DecodeError:
                    reading.notes.append(f"{path.name}: a damaged record was passed over")
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
        told = np.ones(len(numbers), dtype=bool)
        collector.add_columns(tag, np.array(steps, dtype=np.int64), {tag: (numbers, told)})


def _records(stream: IO[bytes], path: Path, reading: Reading) -> Iterator[bytes]:
    """The records' contents: length (8 bytes), its checksum (4), content, checksum (4).

    The package's own reader spends most of its time on checksums in Python. A file that is still written to
    ends in half a record.
    """
    while head := stream.read(12):
        length = int.from_bytes(head[:8], "little")
        content = stream.read(length + 4) if length < _LARGEST_RECORD else b""
        if len(head) < 12 or len(content) < length + 4:
            reading.notes.append(f"{path.name} ends in half a record")
            return
        yield content[:-4]


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor":
        return None
    tensor = value.tensor
    for numbers in (tensor.float_val, tensor.double_val, tensor.int64_val, tensor.int_val):
        if len(numbers) == 1:
            return float(numbers[0])
    dtype = {1: "<f4", 2: "<f8"}.get(tensor.dtype)
    if dtype and len(tensor.tensor_content) == np.dtype(dtype).itemsize:
        return float(np.frombuffer(tensor.tensor_content, dtype)[0])
    return None


def _arguments(value: Any) -> dict[str, Any]:
    try:
        config = json.loads(value.tensor.string_val[0])
    except (ValueError, IndexError):
        return {}
    return config if isinstance(config, dict) else {}
