"""Prepared files read by columns give the rows that their records give, or are left to the slower reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlctl.data.plain_rows import plain_rows
from rlctl.data.records import parse_row
from rlctl.data.schema import LARGE_SCHEMA, OTHER, PLACE, Message, Row, batch_of

PATH = Path("rows.parquet")
ROWS = [
    Row("s", (Message("user", "2+2=?"),), "4", "math", "rule", "train", 0, "2+2=?", "4"),
    Row("s", (Message("system", "Ü"), Message("user", "x")), "  ", "", "", "test", 7, "x", ""),
    Row("t", (Message("user", "choose"),), '["a", "b"]', extra={"level": 3, "nested": {"a": [1, None]}}),
    Row("t", (Message("user", "list"),), "[1, 2]", extra={"environment": "calc", "big": 2**70}),
    Row("t", (Message("user", "name"),), "apple", extra={"text": "1234567890123456789012", "x": 0.1}),
    Row("t", (Message("user", "empty box"),), "", extra={"other_index": 3}),
]


def by_records(batch: Any) -> list[Row]:
    places = [values.get(PLACE) or f"{PATH}:{number}" for number, values in enumerate(batch.to_pylist(), 5)]
    return [
        parse_row(values, number=number - 1, where=where)
        for (number, values), where in zip(enumerate(batch.to_pylist(), 5), places, strict=True)
    ]


@pytest.mark.parametrize("with_places", [False, True])
def test_rows_are_those_of_the_records(with_places: bool) -> None:
    batch = batch_of(ROWS)
    if with_places:
        batch = batch.append_column(PLACE, pa.array([f"a.csv:{i}" for i in range(len(ROWS))]))
    for part in (batch, batch.slice(2, 3)):
        rows = plain_rows(part, PATH, 5)
        assert rows == by_records(part)
        assert rows is not None
        assert [list(row.extra.items()) for row in rows] == [list(r.extra.items()) for r in by_records(part)]


def test_no_field_besides_the_columns() -> None:
    place = LARGE_SCHEMA.get_field_index("extra_info")
    whole = batch_of(ROWS[:2])
    extra = whole.column(place)
    fields = [field for field in extra.type if field.name != OTHER]
    short = pa.StructArray.from_arrays([extra.field(field.name) for field in fields], fields=fields)
    batch = whole.set_column(place, "extra_info", short)
    assert plain_rows(batch, PATH, 5) == by_records(batch)


REFUSED = {
    "a reply last": Row("s", (Message("user", "a"), Message("assistant", "b")), "4"),
    "an empty message": Row("s", (Message("user", " \n"),), "4"),
    "no role": Row("s", (Message("", "a"),), "4"),
    "tool calls": Row("s", (Message("user", "a", '{"name": "x"}'),), "4"),
    "no messages": Row("s", (), "4"),
    "no data source": Row(" ", (Message("user", "a"),), "4"),
    "a list that is none": Row("s", (Message("user", "a"),), "['a' 'b']"),
    "NaN": Row("s", (Message("user", "a"),), "4", extra={"x": float("nan")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_rows_are_left_to_the_reader_of_records(name: str) -> None:
    assert plain_rows(batch_of([ROWS[0], REFUSED[name]]), PATH, 1) is None


@pytest.mark.parametrize("change", ["null", "another column", "no text", "another field", "text index"])
def test_other_columns_are_left_to_the_reader_of_records(change: str) -> None:
    batch = batch_of(ROWS[:1])
    if change == "null":
        batch = batch.set_column(2, "ability", pa.array([None], pa.large_string()))
    elif change == "another column":
        batch = batch.append_column("environment", pa.array(["calc"]))
    elif change == "no text":
        batch = batch.set_column(2, "ability", pa.array([3]))
    else:
        fields = {"split": "train", "index": 1, "answer": "", "question": "q"}
        fields |= {"level": 3} if change == "another field" else {"index": "one"}
        batch = batch.set_column(4, "extra_info", pa.array([fields]))
    assert plain_rows(batch, PATH, 1) is None
    assert json.dumps(by_records(batch)[0].extra)
