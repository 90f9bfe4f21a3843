"""What a run dumps is read step by step; errors are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import UsageError
from rlctl.what_if.dumps import find_dump
from tests.dumps import conversation, dumped, write
from tests.unit.what_if.steps import make_step, same, write_part


def test_own_parts_come_back_step_by_step(tmp_path: Path) -> None:
    steps = [make_step(seed) for seed in range(12)]
    steps[3].rewards[2] = np.nan
    for start, stop in ((0, 2), (2, 9), (9, 12)):
        write_part(tmp_path, steps[start:stop])
    for path in (tmp_path, tmp_path / "rollouts"):
        dump = find_dump(path)
        read = list(dump.steps)
        assert len(read) == 12
        assert all(same(one, other) for one, other in zip(read, steps, strict=True))
        assert read[3].advantages is None


def test_sequences_and_turns_of_an_episode(tmp_path: Path) -> None:
    rows = [
        conversation(member=0),
        dumped([9, 9], [-1.0] * 2, [-2.0] * 2, sequence=1, num_turns=2),
        dumped([], [], [], member=1, reward=None),
        conversation(member=2, reward=0.5),
    ]
    write(tmp_path / "rollouts/rollouts-000001-000001.parquet", rows)
    (step,) = find_dump(tmp_path).steps
    assert step.lengths.tolist() == [5, 0, 3]
    assert step.sequence_lengths.tolist() == [3, 2, 0, 3]
    assert step.turn_lengths.tolist() == [2, 1, 2, 2, 1]
    assert step.rewards[[0, 2]].tolist() == [1.0, 0.5]
    assert np.isnan(step.rewards[1])
    assert step.log_probs.tolist() == [-1.5, -1.5, -1.5, -2.0, -2.0, -1.5, -1.5, -1.5]


def test_what_is_no_dump_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        find_dump(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no dumped rollouts") as caught:
        find_dump(tmp_path)
    assert "rollouts/" in (caught.value.fix or "")


def test_broken_files_are_said_with_their_place(tmp_path: Path) -> None:
    whole = write_part(tmp_path, [make_step()])
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be read as rollouts") as caught:
        list(find_dump(tmp_path).steps)
    assert str(whole) in (caught.value.where or "")


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        (
            "training_log_probs",
            lambda rows: [row[:-1] for row in rows],
            "more or fewer log-probs than tokens",
        ),
        ("training_log_probs", lambda rows: [None, *rows[1:]], "null values"),
        ("training_log_probs", lambda rows: ["?" for _ in rows], "cast"),
        ("group_id", lambda rows: [None, *rows[1:]], "null values"),
    ],
)
def test_rows_that_are_no_rollouts_are_said(tmp_path: Path, column: str, values: Any, says: str) -> None:
    whole = write_part(tmp_path, [make_step()])
    table = pq.read_table(whole)
    changed = pa.array(values(table.column(column).to_pylist()))
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, changed), whole)
    with pytest.raises(UsageError, match=says) as caught:
        list(find_dump(tmp_path).steps)
    assert caught.value.where == str(whole)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    whole = write_part(tmp_path, [make_step()])
    pq.write_table(pq.read_table(whole).drop_columns(["training_log_probs"]), whole)
    with pytest.raises(UsageError, match="training_log_probs"):
        list(find_dump(tmp_path).steps)
