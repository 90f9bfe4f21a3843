"""What rlctl, slime, miles and NeMo-RL dump is recognised and read step by step; errors are reported."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.errors import UsageError
from rlctl.what_if import dumps
from rlctl.what_if.dumps import find_dump
from tests.dumps import conversation, dumped, write
from tests.unit.track.test_rollouts import version_1
from tests.unit.what_if.steps import make_step, same, write_part


def test_own_parts_come_back_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "_ROWS_AT_ONCE", 5)  # so that steps begin and end within batches
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


def test_parts_of_version_1_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "_ROWS_AT_ONCE", 3)
    version_1(tmp_path / "rollouts/rollouts-000001-000002.parquet", range(1, 3))
    steps = list(find_dump(tmp_path).steps)
    assert [step.number for step in steps] == [1, 2]
    for step in steps:
        assert step.group_ids.tolist() == [3, 3, 5, 5]
        assert step.lengths.tolist() == [2, 0, 1, 3]
        assert step.log_probs.tolist() == [-1.0] * 6


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


def slime_columns(rows: int = 6) -> dict[str, list]:
    """Columns of a training dump: two prompts, three responses each, the last one partly masked."""
    generator = torch.Generator().manual_seed(1)
    lengths = [2, 3, 1, 4, 2, 3][:rows]
    return {
        "tokens": [torch.tensor([7, 8 + row // 3, *range(10, 10 + n)]) for row, n in enumerate(lengths)],
        "response_lengths": lengths,
        "rewards": [0.5, -0.5, 0.0, 1.0, -1.0, 0.0][:rows],
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths[:-1]] + [torch.tensor([1, 0, 1])],
        "rollout_log_probs": [-torch.rand(n, generator=generator) for n in lengths],
        "log_probs": [-torch.rand(n, generator=generator).to(torch.bfloat16) for n in lengths],
        "advantages": [torch.full((n,), float(row)) for row, n in enumerate(lengths)],
    }


def check_slime(path: Path, columns: dict[str, list]) -> None:
    (step,) = find_dump(path).steps
    assert step.number == 4
    assert step.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert step.lengths.tolist() == [*columns["response_lengths"][:-1], 2]  # one was not sampled
    for name in ("rollout_log_probs", "log_probs"):
        values = torch.cat(columns[name]).float().tolist()
        assert getattr(step, name).tolist() == pytest.approx([*values[:13], values[14]])
    assert step.advantages.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_slime_samples(tmp_path: Path) -> None:
    columns = slime_columns()
    samples = [{name: values[row] for name, values in columns.items()} for row in range(6)]
    (tmp_path / "train_data").mkdir()
    saved = {"format_version": 2, "rollout_id": 4, "rank": 0, "samples": samples, "dp_shards": []}
    torch.save(saved, tmp_path / "train_data" / "4.pt")
    check_slime(tmp_path, columns)


def test_slime_columns_as_miles_writes_them(tmp_path: Path) -> None:
    columns = slime_columns()
    data = columns | {"partition": [0, 1, 2, 3, 4, 5], "num_microbatches": [1], "raw_reward": [0.0] * 9}
    torch.save({"rollout_id": 4, "rank": 0, "rollout_data": data}, tmp_path / "4_0.pt")
    check_slime(tmp_path / "4_0.pt", columns)


def test_files_of_several_ranks_are_one_step(tmp_path: Path) -> None:
    """Two data-parallel ranks, siblings on both, and a tensor-parallel copy of the first."""
    columns = slime_columns()
    parts = {0: [0, 1, 3], 1: [0, 1, 3], 2: [2, 4, 5]}
    for rollout in (4, 10):
        for rank, rows in parts.items():
            data = {name: [values[row] for row in rows] for name, values in columns.items()}
            saved = {"rollout_id": rollout, "rank": rank, "rollout_data": data | {"partition": rows}}
            torch.save(saved, tmp_path / f"{rollout}_{rank}.pt")
    steps = list(find_dump(tmp_path).steps)
    assert [step.number for step in steps] == [4, 10]
    for step in steps:
        assert step.advantages.tolist() == [0.0, 1.0, 3.0, 2.0, 4.0, 5.0]
        assert step.group_ids.tolist() == [0, 0, 1, 0, 1, 1]


def nemo_row(prompt: list[int], response: list[int], reward: float, masked: int | None = None) -> dict:
    """One line as `log_batched_dict_as_jsonl` writes it: every value a batch of one, right-padded."""
    tokens, pad = [*prompt, *response], 3
    mask = [0] * len(prompt) + [1] * len(response) + [0] * pad
    if masked is not None:
        mask[len(prompt) + masked] = 0
    lps = [0.0] * len(prompt) + [-0.1 * (t + 1) for t in range(len(response))] + [0.0] * pad
    return {
        "token_ids": [[*tokens, *[0] * pad]],
        "token_loss_mask": [mask],
        "sample_loss_mask": [1.0],
        "rewards": [reward],
        "advantages": [[reward - 0.5] * len(mask)],
        "generation_logprobs": [lps],
        "prev_logprobs": [[x - 0.05 if x else 0.0 for x in lps]],
        "input_lengths": [len(tokens)],
    }


def test_nemo_rows(tmp_path: Path) -> None:
    for step in (2, 10):
        rows = [
            nemo_row([1, 2], [5, 6, 7], 1.0, masked=1),
            nemo_row([1, 2], [5], 0.0),
            nemo_row([3], [9], 1.0),
        ]
        text = "".join(json.dumps(row | {"idx": i}) + "\n" for i, row in enumerate(rows))
        (tmp_path / f"train_data_step{step}.jsonl").write_text(text)
    first, second = find_dump(tmp_path).steps
    assert (first.number, second.number) == (2, 10)  # by number, not by name
    assert first.group_ids.tolist() == [0, 0, 1]
    assert first.lengths.tolist() == [2, 1, 1]
    assert first.rollout_log_probs.tolist() == pytest.approx([-0.1, -0.3, -0.1, -0.1])
    assert first.log_probs.tolist() == pytest.approx([-0.15, -0.35, -0.15, -0.15])
    assert first.advantages.tolist() == [0.5, -0.5, 0.5]
    assert first.rewards.tolist() == [1.0, 0.0, 1.0]


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("touched-by-a-pickle"),))


def test_a_pickle_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1.pt").write_bytes(pickle.dumps({"rollout_id": 1, "samples": [Evil()]}))
    torch.save({"rollout_id": 2, "samples": [Evil()]}, tmp_path / "2.pt")
    for name in ("1.pt", "2.pt"):
        with pytest.raises(UsageError, match="cannot be loaded"):
            list(find_dump(tmp_path / name).steps)
    assert not (tmp_path / "touched-by-a-pickle").exists()


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

    torch.save({"rollout_id": 1, "samples": [{"tokens": torch.tensor([1])}]}, tmp_path / "1.pt")
    with pytest.raises(UsageError, match="no slime training dump"):
        list(find_dump(tmp_path / "1.pt").steps)
    columns = slime_columns()
    columns["log_probs"][2] = torch.zeros(9)
    torch.save({"rollout_id": 1, "rollout_data": columns}, tmp_path / "2.pt")
    with pytest.raises(UsageError, match="row 2: token arrays of lengths"):
        list(find_dump(tmp_path / "2.pt").steps)

    lines = tmp_path / "train_data_step3.jsonl"
    lines.write_text(json.dumps(nemo_row([1], [2], 1.0)) + "\n" + '{"rewards": [1.0]}\n')
    with pytest.raises(UsageError, match="no NeMo-RL training row") as caught:
        list(find_dump(lines).steps)
    assert caught.value.where == f"{lines}:2"
    short = nemo_row([1], [2, 3], 1.0)
    short["prev_logprobs"] = [[0.0, -0.1]]
    lines.write_text(json.dumps(short) + "\n")
    with pytest.raises(UsageError, match="row 0: token arrays of lengths") as caught:
        list(find_dump(lines).steps)
    assert caught.value.where == str(lines)


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
    with pytest.raises(UsageError, match="no column training_log_probs"):
        list(find_dump(tmp_path).steps)
