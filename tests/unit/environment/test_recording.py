"""What an episode's turns read and sampled, as the sequences that are trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.batch import Episode, Task, TokenBatch, TokenLists, Turn
from rlctl.environment.recording import Recorder


def turn_of(*ids: int, kept: bool = False, version: int = 0) -> Turn:
    count = len(ids)
    lists = TokenLists(torch.ones(count, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))
    log_probs = -torch.tensor([float(token) for token in ids])
    versions = torch.full((count,), version)
    token_ids = torch.tensor(ids, dtype=torch.int64)
    return Turn(token_ids, log_probs, versions, "stop", lists if kept else None, lists if kept else None)


def test_a_turn_that_reads_all_tokens_so_far_continues_its_sequence() -> None:
    recorder = Recorder()
    recorder.add([1, 2], turn_of(3, 4))
    recorder.add([1, 2, 3, 4, 5], turn_of(6, version=1))
    recorder.add([1, 2, 3, 4, 5, 6], turn_of(7))  # nothing new in between
    [sequence] = recorder.sequences()
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.sampled.tolist() == [False, False, True, True, False, True, True]
    assert sequence.log_probs.tolist() == [-3.0, -4.0, -6.0, -7.0]
    assert sequence.versions.tolist() == [0, 0, 1, 0]
    assert sequence.turns.tolist() == [0, 0, 1, 2]
    assert sequence.rewards is None
    assert (recorder.num_turns, recorder.num_sampled) == (3, 4)


@pytest.mark.parametrize("context", [[1, 2, 9, 4, 5], [1, 2, 3], [9], [1, 2, 3, 5]])
def test_any_other_context_begins_a_new_sequence(context: list[int]) -> None:
    """One token changed, some left out, or a summary: what was sampled before is then context."""
    recorder = Recorder()
    recorder.add([1, 2], turn_of(3, 4))
    recorder.add(context, turn_of(6))
    recorder.add([*context, 6, 7], turn_of(8))
    first, second = recorder.sequences()
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert second.token_ids.tolist() == [*context, 6, 7, 8]
    assert second.sampled.tolist() == [False] * len(context) + [True, False, True]
    assert (first.turns.tolist(), second.turns.tolist()) == ([0, 0], [1, 2])
    sampled = [sequence.token_ids[sequence.sampled].tolist() for sequence in (first, second)]
    assert sampled == [[3, 4], [6, 8]], "every sampled token once"


@pytest.mark.parametrize("first", [True, False])
def test_a_turn_without_lists_leaves_those_of_others_at_their_tokens(first: bool) -> None:
    """One that has none gets the whole vocabulary at every place, as in a batch of turns."""
    recorder = Recorder()
    recorder.add([1], turn_of(2, 3, kept=first))
    recorder.add([1, 2, 3], turn_of(4, 5, kept=not first))
    [sequence] = recorder.sequences()
    assert sequence.kept is not None
    assert sequence.kept.counts.tolist() == ([1, 1, 0, 0] if first else [0, 0, 1, 1])
    assert sequence.kept.ids.tolist() == ([2, 3] if first else [4, 5])
    TokenBatch.of([Episode(Task(0, ()), "", (sequence,), "completed")])


def test_rewards_of_turns_are_at_their_last_tokens() -> None:
    recorder = Recorder()
    recorder.add([1], turn_of(2, 3))
    recorder.add([1, 2, 3, 4], turn_of(5))
    recorder.add([9], turn_of(6, 7, 8))
    first, second = recorder.sequences([0.5, -1.0, 2.0])
    assert first.rewards is not None
    assert second.rewards is not None
    assert (first.rewards.tolist(), second.rewards.tolist()) == ([0.0, 0.5, -1.0], [0.0, 0.0, 2.0])
    with pytest.raises(ValueError, match="2 rewards of 3 turns"):
        recorder.sequences([0.5, 1.0])


def test_lists_of_kept_tokens_follow_the_sampled_tokens() -> None:
    recorder = Recorder()
    recorder.add([1], turn_of(2, 3, kept=True))
    recorder.add([1, 2, 3, 4], turn_of(5, kept=True))
    [sequence] = recorder.sequences()
    for lists in (sequence.kept, sequence.most_likely):
        assert lists is not None
        assert (lists.counts.tolist(), lists.ids.tolist()) == ([1, 1, 1], [2, 3, 5])
        assert not lists.without(sequence.token_ids[sequence.sampled]).any()


def test_experts_are_those_of_the_turn_that_computed_a_token_first() -> None:
    """A later turn reads the last token of an earlier one, and what its own context adds."""

    def routed(turn: Turn, count: int, expert: int) -> Turn:
        return replace(turn, experts=torch.full((count, 1, 2), expert, dtype=torch.int16))

    recorder = Recorder()
    recorder.add([1, 2], routed(turn_of(3, 4), 3, 5))
    recorder.add([1, 2, 3, 4, 9], turn_of(6))  # not reported
    recorder.add([1, 2, 3, 4, 9, 6, 8], routed(turn_of(7, 7), 8, 6))
    recorder.add([4], turn_of(5))
    first, second = recorder.sequences()
    assert first.experts is not None
    assert first.experts[:, 0, 0].tolist() == [5, 5, 5, 6, 6, 6, 6, 6, -1]
    assert second.experts is None
    assert first.experts.dtype == torch.int16
    batch = TokenBatch.of([Episode(Task([1], ""), 0, (first, second), "")])
    assert "experts" in batch.columns
    assert batch.column("experts")[:, 0, 1].tolist() == [5, 5, 5, 6, 6, 6, 6, 6, -1, -1, -1]
    assert batch.inputs.experts is batch.column("experts")


def test_a_turn_without_a_token_leaves_a_sequence_that_can_be_batched() -> None:
    """The engine may end a turn before its first token."""
    recorder = Recorder()
    recorder.add([1, 2], turn_of())
    [sequence] = recorder.sequences([1.0])
    assert sequence.token_ids.tolist() == [1, 2]
    assert not sequence.sampled.any()
    assert len(sequence.log_probs) == 0
    assert Recorder().sequences() == ()
    assert TokenBatch.of([]).num_episodes == 0
