"""A resumed run continues with its original rows, or reports which of them changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.data.schema import Message, Row
from rlctl.errors import UsageError
from rlctl.train.preflight import data_fingerprint, refuse_changed_data

ROWS = [Row("s", (Message("user", f"{i}"),), str(i), extra={"a": i}) for i in range(3)]
TRAIN = "data.train_files"


@pytest.mark.parametrize(
    "changed",
    [
        ROWS[:2],
        ROWS[::-1],
        [*ROWS[:2], replace(ROWS[2], ground_truth="4")],
        [*ROWS[:2], replace(ROWS[2], data_source="t")],
        [*ROWS[:2], replace(ROWS[2], extra={"a": 5})],
        [*ROWS[:2], replace(ROWS[2], prompt=(Message("system", "2"),))],
    ],
)
def test_other_rows_are_refused(changed: list[Row]) -> None:
    before, now = {TRAIN: data_fingerprint(ROWS)}, {TRAIN: data_fingerprint(changed)}
    with pytest.raises(UsageError, match="not those at the start of the run") as caught:
        refuse_changed_data(before, now, Path("runs/a"))
    assert caught.value.where == TRAIN
    assert "delete runs/a/data.json" in str(caught.value.fix)


def test_the_same_rows_from_elsewhere_and_new_validation_rows_are_fine() -> None:
    moved = [replace(row, where="/elsewhere:1") for row in ROWS]
    before = {TRAIN: data_fingerprint(ROWS)}
    refuse_changed_data(before, {TRAIN: data_fingerprint(moved), "data.val_files": "new"}, Path("a"))
