"""Rollouts come back from Parquet as they were, in whole groups, with nothing twice after a resume."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.batch import Episode, Task, TokenLists, TokenSequence, Turn
from rlctl.errors import RunFailure
from rlctl.track import rollouts as module
from rlctl.track.open_run import log_ratios, spans
from rlctl.track.rollouts import SCHEMA, RolloutWriter, whole_groups


def turn_of(first: int, count: int, *, kept: TokenLists | None = None) -> Turn:
    """Tokens first, first + 1, …; their log-probs are −0.5 − token / 100."""
    ids = torch.arange(first, first + count)
    return Turn(ids, -0.5 - ids / 100, torch.full((count,), 7), "stop", kept)


def batch(group_ids: list[int], length: int = 4) -> list[Episode]:
    """One episode per group id; episode i has (i mod length) + 1 sampled tokens after two of the prompt."""
    return [
        Episode(
            task=Task([98, 99], f"prompt {group}", group, data_source="openai/gsm8k", ground_truth=str(i)),
            member=group_ids[:i].count(group),
            sequences=(TokenSequence.of_turn([98, 99], turn_of(i * length, i % length + 1)),),
            response=f"antwort ü {i}",
            stop_reason="max_tokens" if i % 2 == 0 else "completed",
        )
        for i, group in enumerate(group_ids)
    ]


def conversation() -> Episode:
    """Two turns with a tool's answer between them, and a second sequence that begins anew."""
    first = TokenSequence(
        token_ids=torch.tensor([1, 2, 10, 11, 3, 4, 20]),
        sampled=torch.tensor([False, False, True, True, False, False, True]),
        log_probs=torch.tensor([-0.1, -0.2, -0.3]),
        versions=torch.tensor([5, 5, 6]),
        turns=torch.tensor([0, 0, 1]),
    )
    second = TokenSequence.of_turn([1, 9], turn_of(30, 2), number=2)
    return Episode(Task([1, 2], "question", 4), 1, (first, second), "last answer", "completed")


def add(writer: RolloutWriter, step: int, episodes: list[Episode]) -> None:
    rewards = [None if place == 1 else float(place) for place in range(len(episodes))]
    counts = torch.tensor([episode.num_sampled for episode in episodes])
    is_graded = torch.tensor([reward is not None for reward in rewards]).repeat_interleave(counts)
    log_probs = torch.cat([s.log_probs for episode in episodes for s in episode.sequences])
    places = torch.cat([torch.arange(len(s.log_probs)) for episode in episodes for s in episode.sequences])

    def column(values: torch.Tensor) -> torch.Tensor:
        return torch.where(is_graded, values.float(), torch.nan)

    columns = {
        "training_log_probs": column(log_probs - 0.25).to(torch.bfloat16).requires_grad_(),
        "rollout_is_weights": column(torch.full_like(log_probs, 1.5)),
        "keep_mask": column(places != 1),
    }
    writer.add(step, episodes, rewards, columns)


def written(
    where: Path, episodes: list[Episode], limit: int = -1, **options: bool
) -> list[dict[str, object]]:
    writer = RolloutWriter(where, limit, **options)
    add(writer, 1, episodes)
    writer.flush()
    return ds.dataset(where / "rollouts").to_table().to_pylist()


def test_read_back_with_plain_pyarrow(tmp_path: Path) -> None:
    rows = written(tmp_path, batch([3, 3, 5, 5, 5, 5]))
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "rollouts-000001-000001.parquet"
    assert pq.read_schema(path).equals(SCHEMA, check_metadata=False)
    assert [row["group_id"] for row in rows] == [3, 3, 5, 5, 5, 5]
    assert [row["reward"] for row in rows] == [0.0, None, 2.0, 3.0, 4.0, 5.0]
    assert [sum(row["sampled"]) for row in rows] == [1, 2, 3, 4, 1, 2]
    third = rows[2]
    assert third["token_ids"] == [98, 99, 8, 9, 10]
    assert third["sampled"] == [False, False, True, True, True]
    assert third["turn"] == [-1, -1, 0, 0, 0]
    assert third["versions"] == [-1, -1, 7, 7, 7]
    assert third["rollout_log_probs"] == [None, None, *(pytest.approx(x) for x in (-0.58, -0.59, -0.60))]
    assert third["training_log_probs"][2:] == pytest.approx([-0.83, -0.84, -0.85], abs=4e-3)  # bfloat16
    assert third["rollout_is_weights"] == [None, None, 1.5, 1.5, 1.5]
    assert third["keep_mask"] == [False, False, True, False, True]
    assert third["response"] == "antwort ü 2"
    assert (third["step"], third["policy_version"], third["truncated"]) == (1, 7, True)
    assert (third["episode_id"], third["sequence"], third["num_turns"]) == ("1/5/0", 0, 1)
    assert third["stop_reason"] == "max_tokens"
    assert len({row["episode_id"] for row in rows}) == 6


def test_an_episode_that_was_not_graded_was_not_trained_on(tmp_path: Path) -> None:
    ungraded = written(tmp_path, batch([3, 3]))[1]
    assert ungraded["rollout_log_probs"][2:] == pytest.approx([-0.54, -0.55])
    assert ungraded["training_log_probs"] == [None] * 4
    assert ungraded["rollout_is_weights"] == [None, None, 0.0, 0.0]
    assert not any(ungraded["keep_mask"])
    assert log_ratios(ungraded) == []


def test_every_sequence_of_an_episode_is_a_row(tmp_path: Path) -> None:
    first, second = written(tmp_path, [conversation()])
    assert first["token_ids"] == [1, 2, 10, 11, 3, 4, 20]
    assert first["turn"] == [-1, -1, 0, 0, -1, -1, 1]
    assert first["versions"] == [-1, -1, 5, 5, -1, -1, 6]
    assert (first["policy_version"], second["policy_version"]) == (5, 7)
    assert (first["sequence"], second["sequence"]) == (0, 1)
    assert first["num_turns"] == second["num_turns"] == 3
    assert first["episode_id"] == second["episode_id"] == "1/4/1"
    assert first["keep_mask"] == [False, False, True, False, False, False, True]
    assert spans(first) == [(0, range(2, 4)), (-1, range(4, 6)), (1, range(6, 7))]
    assert log_ratios(first) == pytest.approx([-0.25] * 3, abs=4e-3)


def test_means_skip_what_was_not_sampled(tmp_path: Path) -> None:
    written(tmp_path, [conversation()])
    column = ds.dataset(tmp_path / "rollouts").to_table()["rollout_log_probs"]
    assert pc.mean(column[0].values).as_py() == pytest.approx(-0.2)
    pytest.importorskip("pandas")
    frame = ds.dataset(tmp_path / "rollouts").to_table().to_pandas()
    values, sampled = frame["rollout_log_probs"][0], frame["sampled"][0]
    assert values[sampled].tolist() == pytest.approx([-0.1, -0.2, -0.3])


def test_what_tokens_were_sampled_from_is_kept_with_them(tmp_path: Path) -> None:
    episodes = batch([3, 3, 5, 5])  # 1, 2, 3 and 4 tokens; whole groups of two at most
    first = 0
    for place, episode in enumerate(episodes):
        counts = torch.tensor([2, 0, 1, 3][: place + 1], dtype=torch.int32)
        kept = TokenLists(counts, torch.arange(first, first + int(counts.sum()), dtype=torch.int32))
        first += int(counts.sum())
        turn = turn_of(place * 4, place + 1, kept=kept)
        episodes[place] = replace(episode, sequences=(TokenSequence.of_turn([98, 99], turn),))
    rows = written(tmp_path, episodes, 3, exact_sampling=True)
    assert [row["kept_ids"] for row in rows] == [[[], [], [0, 1]], [[], [], [2, 3], []]]
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


def test_empty_sequences_and_nan(tmp_path: Path) -> None:
    empty, other = batch([0, 0])
    empty = replace(empty, sequences=(TokenSequence.of_turn([98], turn_of(0, 0)),))
    broken = replace(other.sequences[0], log_probs=torch.tensor([math.nan, -1.0]))
    rows = written(tmp_path, [empty, replace(other, sequences=(broken,))])
    assert (rows[0]["token_ids"], rows[0]["policy_version"], rows[0]["sampled"]) == ([98], None, [False])
    assert spans(rows[0]) == []
    assert math.isnan(rows[1]["rollout_log_probs"][2])


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


def test_the_prompt_is_what_the_policy_read(tmp_path: Path) -> None:
    plain, other = batch([0])[0], conversation()
    rows = written(tmp_path, [plain, other], decode=lambda ids: f"decoded {ids}")
    assert [row["prompt"] for row in rows] == ["prompt 0", "question", "decoded [1, 9]"]
