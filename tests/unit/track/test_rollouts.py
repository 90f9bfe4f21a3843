"""Rollouts come back from Parquet as they were, in whole groups, with nothing twice after a resume."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.batch import Rollouts, TokenLists
from rlctl.errors import RunFailure
from rlctl.track import rollouts as module
from rlctl.track.rollouts import SCHEMA, RolloutWriter, whole_groups


def batch(group_ids: list[int], length: int = 4) -> Rollouts:
    """One row per group id; row i has (i mod length) + 1 response tokens."""
    rows = len(group_ids)
    mask = torch.arange(length) < (torch.arange(rows) % length + 1)[:, None]
    responses = torch.arange(rows * length).reshape(rows, length)
    ids = torch.cat([torch.zeros(rows, 2, dtype=torch.int64), responses], dim=1)
    return Rollouts(
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        position_ids=ids,
        responses=responses,
        response_mask=mask,
        rollout_log_probs=torch.where(mask, -0.5 - responses / 100, 0.0),
        finish_reason=(torch.arange(rows) % 2 == 0).to(torch.int8),
        group_ids=torch.tensor(group_ids),
        policy_version=torch.full((rows,), 7),
        data_sources=("openai/gsm8k",) * rows,
        ground_truths=tuple(str(i) for i in range(rows)),
        prompt_texts=tuple(f"prompt {g}" for g in group_ids),
        response_texts=tuple(f"antwort ü {i}" for i in range(rows)),
    )


def add(writer: RolloutWriter, step: int, rollouts: Rollouts) -> None:
    rows, length = rollouts.responses.shape
    writer.add(
        step,
        rollouts,
        torch.arange(rows, dtype=torch.float32),
        torch.arange(rows) != 1,
        (rollouts.rollout_log_probs - 0.25).to(torch.bfloat16).requires_grad_(),
        torch.full((rows, length), 1.5),
        torch.arange(length).expand(rows, length) != 1,
    )


def test_read_back_with_plain_pyarrow(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, -1)
    rollouts = batch([3, 3, 5, 5, 5, 5])
    add(writer, 1, rollouts)
    writer.flush()
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "rollouts-000001-000001.parquet"
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA, check_metadata=False)
    rows = table.to_pylist()
    assert [row["group_id"] for row in rows] == [3, 3, 5, 5, 5, 5]
    assert [row["reward"] for row in rows] == [0.0, None, 2.0, 3.0, 4.0, 5.0]
    assert [len(row["response_ids"]) for row in rows] == [1, 2, 3, 4, 1, 2]
    third = rows[2]
    assert third["response_ids"] == [8, 9, 10]
    assert third["rollout_log_probs"] == pytest.approx([-0.58, -0.59, -0.60])
    assert third["training_log_probs"] == pytest.approx([-0.83, -0.84, -0.85], abs=4e-3)  # bfloat16
    assert third["rollout_is_weights"] == [1.5] * 3
    assert third["keep_mask"] == [True, False, True]
    assert third["response"] == "antwort ü 2"
    assert (third["step"], third["policy_version"], third["truncated"]) == (1, 7, True)


def test_what_tokens_were_sampled_from_is_kept_with_them(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 3, exact_sampling=True)
    rollouts = batch([3, 3, 5, 5])  # 1, 2, 3 and 4 tokens; whole groups of two at most
    counts = rollouts.response_mask.int() * torch.tensor([2, 0, 1, 3], dtype=torch.int32)
    ids = torch.arange(int(counts.sum()), dtype=torch.int32)
    add(writer, 1, replace(rollouts, kept=TokenLists(counts, ids)))
    writer.flush()
    rows = ds.dataset(tmp_path / "rollouts").to_table().to_pylist()
    assert [row["kept_ids"] for row in rows] == [[[0, 1]], [[2, 3], []]]
    assert RolloutWriter(tmp_path, 3, exact_sampling=True).discard_after(1) == []


@pytest.mark.parametrize(
    ("groups", "limit", "expected"),
    [
        ([0, 0, 1, 1, 2, 2], 4, [0, 1, 2, 3]),
        ([0, 0, 1, 1, 2, 2], 5, [0, 1, 2, 3]),
        ([0, 0, 1, 1, 2, 2], 1, [0, 1]),
        ([0, 1, 0, 1, 2, 2], 2, [0, 2]),
        ([0, 0, 1, 1], -1, [0, 1, 2, 3]),
        ([], 4, []),
    ],
)
def test_groups_stay_whole(groups: list[int], limit: int, expected: list[int]) -> None:
    assert whole_groups(groups, limit) == expected


def test_empty_responses_and_nan(tmp_path: Path) -> None:
    rollouts = batch([0, 0])
    rollouts.response_mask[0] = False
    rollouts.rollout_log_probs[1, 0] = math.nan
    writer = RolloutWriter(tmp_path, -1)
    add(writer, 1, rollouts)
    writer.flush()
    rows = ds.dataset(tmp_path / "rollouts").to_table().to_pylist()
    assert rows[0]["response_ids"] == []
    assert math.isnan(rows[1]["rollout_log_probs"][0])


def test_none_wanted_none_written(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, 0)
    add(writer, 1, batch([0, 0]))
    writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_part_every_64_steps_and_every_64_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RolloutWriter(tmp_path, 2)
    for step in range(1, 130):
        add(writer, step, batch([0, 0]))
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["rollouts-000001-000064.parquet", "rollouts-000065-000128.parquet"]
    monkeypatch.setattr(module, "FLUSH_BYTES", 1)
    add(writer, 130, batch([0, 0]))
    assert (tmp_path / "rollouts" / "rollouts-000129-000130.parquet").exists()


def test_resume_takes_later_steps_back(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, -1)
    for step in range(1, 13):
        add(writer, step, batch([0, 0]))
        if step % 4 == 0:
            writer.flush()
    leftover = tmp_path / "rollouts" / ".rollouts-000013-000014.parquet.1.tmp"
    leftover.write_bytes(b"half")
    resumed = RolloutWriter(tmp_path, -1)
    resumed.discard_after(6)
    resumed.discard_after(6)
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["rollouts-000001-000004.parquet", "rollouts-000005-000006.parquet"]
    add(resumed, 7, batch([0, 0]))
    resumed.flush()
    steps = ds.dataset(tmp_path / "rollouts").to_table(columns=["step"])["step"].to_pylist()
    assert sorted(steps) == [step for step in range(1, 8) for _ in range(2)]


def test_nothing_to_discard(tmp_path: Path) -> None:
    [note] = RolloutWriter(tmp_path, -1).discard_after(3)
    assert "no responses of steps 1 to 3" in note
    assert list(tmp_path.iterdir()) == []


def test_a_resume_names_damaged_and_missing_parts(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, -1)
    for step in range(1, 7):
        add(writer, step, batch([0, 0]))
        if step % 2 == 0:
            writer.flush()
    directory = tmp_path / "rollouts"
    parts = sorted(directory.iterdir())
    assert RolloutWriter(tmp_path, -1).discard_after(6) == []
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    parts[1].unlink()
    damaged, missing = RolloutWriter(tmp_path, -1).discard_after(6)
    assert "rollouts-000001-000002.parquet is damaged" in damaged
    assert "no responses of steps 1 to 4" in missing
    left = ds.dataset(sorted(map(str, directory.glob("*.parquet")))).to_table()["step"]
    assert set(left.to_pylist()) == {5, 6}


def test_a_part_that_cannot_be_written_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: object, path: Path, **_: object) -> None:
        path.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    writer = RolloutWriter(tmp_path, -1)
    add(writer, 1, batch([0, 0]))
    with monkeypatch.context() as patch:
        patch.setattr(module.pq, "write_table", full)
        with pytest.raises(RunFailure, match="No space left"):
            writer.flush()
    assert list((tmp_path / "rollouts").iterdir()) == []
    writer.flush()  # the rows were kept
    assert ds.dataset(tmp_path / "rollouts").count_rows() == 2
