"""Prepared Parquet into rows, for training and evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl.data.checks import RowError, kind_of, parse_answer, parse_messages
from rlctl.data.schema import OTHER, Row
from rlctl.errors import UsageError

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
REQUIRED = ("data_source", "prompt", "reward_model")
PREPARE = "write it with `rlctl prepare-data parquet`"


def load_rows(files: Sequence[str]) -> list[Row]:
    """The rows of Parquet files (or directories of them) in verl's row schema, in order.

    Columns and fields beyond the schema are ignored, and a `prompt` that is plain text is one user
    message, so verl's own files work unchanged.

    Raises:
        UsageError: a file is missing, broken or empty, or a row does not fit; names file and row.
    """
    return [row for path in _parquet_files(files) for row in _read_file(path)]


def check_files(files: Sequence[str]) -> None:
    """Check the footers of Parquet files: they exist, have rows and the columns.

    Raises:
        UsageError: as `load_rows`, without what only reading the rows shows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in _parquet_files(files):
        try:
            footer = pq.read_metadata(path)
            names = footer.schema.to_arrow_schema().names
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(path, 1, error) from error
        _check_columns(path, names)
        if not footer.num_rows:
            raise _without_rows(path)


def _parquet_files(files: Iterable[str]) -> Iterator[Path]:
    from rlctl.spec.paths import (
        matches,
    )  # the spec takes a while to load, and preparing data has no need of it

    for name in files:
        found = matches(name)
        if not found:
            raise UsageError("no such file or directory", where=name, fix=PREPARE)
        for path in found:
            yield from _inside(path) if path.is_dir() else [path]


def _inside(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.parquet"))
    if not found:
        raise UsageError("the directory holds no .parquet file", where=str(directory), fix=PREPARE)
    splits = {file.name.partition("-")[0].removesuffix(".parquet") for file in found}
    if {"train", "test"} <= splits:
        raise UsageError(
            "the directory holds a training and a test split; reading both would mix them",
            where=str(directory),
            fix=f"name '{directory / 'train*.parquet'}'",
        )
    return found


def _read_file(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            wanted = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=4096, columns=wanted):
                for values in batch.to_pylist():
                    number += 1
                    yield _row(path, number, values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, number + 1, error) from error
    if number == 0:
        raise _without_rows(path)


def _unreadable(path: Path, number: int, error: Exception) -> UsageError:
    return UsageError(f"cannot be read as Parquet: {str(error).splitlines()[0]}", where=f"{path}:{number}")


def _without_rows(path: Path) -> UsageError:
    return UsageError("the file has no rows", where=str(path), fix=PREPARE)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise UsageError(
            f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing "
            f"(it has {', '.join(names)})",
            where=str(path),
            fix="convert it with `rlctl prepare-data parquet`",
        )


def _row(path: Path, number: int, values: Mapping[str, Any]) -> Row:
    where = f"{path}:{number}"
    try:
        source = values["data_source"]
        if not isinstance(source, str) or not source:
            raise RowError(f"data_source is {kind_of(source)}, not text")
        reward_model = values["reward_model"]
        if not isinstance(reward_model, Mapping):
            raise RowError(f"reward_model is {kind_of(reward_model)}, not {{style, ground_truth}}")
        extra = values.get("extra_info")
        extra = extra_of(extra) if isinstance(extra, Mapping) else {}
        index = extra.get("index")
        return Row(
            data_source=source,
            prompt=parse_messages(values["prompt"]),
            ground_truth=parse_answer(
                _as_text(reward_model.get("ground_truth")), "reward_model.ground_truth"
            ),
            ability=values.get("ability") or "",
            style=reward_model.get("style") or "rule",
            split=extra.get("split") or "",
            index=index if isinstance(index, int) else number - 1,
            extra=extra,
            where=where,
        )
    except RowError as problem:
        raise UsageError(str(problem), where=where, fix="correct or remove this row") from None


def _as_text(ground_truth: Any) -> Any:
    """A ground truth with fields of its own, such as verl's for Countdown, as JSON text."""
    return json.dumps(_json_able(ground_truth)) if isinstance(ground_truth, Mapping) else ground_truth


def extra_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_info` as read from Parquet: JSON-able, the fields kept as JSON text merged back."""
    extra = {str(name): _json_able(value) for name, value in values.items()}
    text = extra.get(OTHER)
    if isinstance(text, str):
        try:
            other = json.loads(text) if text else {}
        except ValueError:  # a field of that name in somebody else's file
            other = None
        if isinstance(other, dict):
            del extra[OTHER]
            return extra | other
    return extra


def _json_able(value: Any) -> Any:
    """The value in JSON's types; what has none (dates, decimals, bytes) as text."""
    if isinstance(value, Mapping):
        return {str(name): _json_able(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_able(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
