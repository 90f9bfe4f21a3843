"""Whole JSON documents: Hugging Face's `trainer_state.json`, exported histories, metric → step → value."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from rlctl.diagnose.readers.collect import STEP_KEYS
from rlctl.diagnose.readers.reading import Reading
from rlctl.diagnose.readers.values import as_number


def read_document(stream: IO[bytes], reading: Reading) -> bool:
    """Read a document; False if it is no JSON, or of no shape that holds a history."""
    content = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        document = from_json(content, cache_strings="keys")
    except ValueError:
        return False
    if isinstance(document, Mapping) and isinstance(document.get("log_history"), list):
        document = document["log_history"]
    if isinstance(document, list):
        return _rows(document, reading)
    if not isinstance(document, Mapping):
        return False
    if any(isinstance(document.get(key), list | Mapping) for key in STEP_KEYS):
        return _rows(_transposed(document), reading)
    return _by_step(document, reading)


def _rows(rows: Iterable[Any], reading: Reading) -> bool:
    found = [reading.collector.add(row) for row in rows if isinstance(row, dict)]
    return any(found)


def _transposed(columns: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Column → list, or column → index → value, as rows."""
    indexed = {
        name: values if isinstance(values, Mapping) else dict(enumerate(values))
        for name, values in columns.items()
        if isinstance(values, list | Mapping)
    }
    step = next(values for key in STEP_KEYS if (values := indexed.get(key)) is not None)
    for index in step:
        yield {name: values.get(index) for name, values in indexed.items()}


def _by_step(document: Mapping[str, Any], reading: Reading) -> bool:
    """Metric → step → value: every metric on a clock of its own."""
    found = False
    for name, values in document.items():
        if not isinstance(values, Mapping) or not values or not all(key.isdecimal() for key in values):
            continue
        found = True
        steps = np.array([int(key) for key in values], dtype=np.int64)
        numbers = np.array([as_number(value) for value in values.values()])
        order = np.argsort(steps, kind="stable")
        told = np.array([value is not None for value in values.values()])
        reading.collector.add_columns(name, steps[order], {name: (numbers[order], told[order])})
    return found
