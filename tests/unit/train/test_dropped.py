"""What was sampled and not trained on: every episode with its reason, and what it may hide of the reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlctl.batch import Episode, TokenSequence
from rlctl.capabilities.dropped_episodes.run import DroppedEpisodes, dropped_episodes
from rlctl.episodes import Episodes
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.run_spec.load import load_spec
from rlctl.track.dropped import DROPPED_FILE, DroppedEpisode, DroppedLedger
from rlctl.train.capability import StepRecord
from tests.episodes import task_of
from tests.unit.train.updates import alone

IN_FLIGHT = (
    *("rollout.in_flight=true", "rollout.max_staleness=1", "rollout.name=vllm", "rollout.mode=server"),
    "rollout.max_age_updates=2",
)


def episode(group: int, member: int, length: int, version: int = 5, **about: str) -> Episode:
    sequence = TokenSequence(
        token_ids=torch.arange(length + 1),
        sampled=torch.arange(length + 1) > 0,
        log_probs=torch.full((length,), -1.0),
        versions=torch.full((length,), version),
        turns=torch.zeros(length, dtype=torch.int64),
    )
    return Episode(task_of(group), member, (sequence,), "", **about)


RECORDS = [
    episode(0, 0, 4),
    episode(0, 1, 5),
    episode(1, 0, 6, stop_reason="aborted"),
    episode(1, 1, 7, error="Traceback\nrefused"),
    episode(2, 0, 40, version=1),
    episode(2, 1, 5),
    episode(3, 0, 0, stop_reason="prompt_overlong", error="too long"),
]
SCORES = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
GRADED = [True, True, True, False, True, False, False]


def graded(*unused: DroppedEpisode) -> Graded:
    result = RewardResult(torch.tensor(SCORES), torch.tensor(GRADED))
    return Graded(Episodes.of(RECORDS), result, None, {}, unused)


def spec_of(*overrides: str):
    return load_spec([], [], ["trainer.seed=1", *overrides]).spec


def test_every_episode_has_its_reason() -> None:
    found = dropped_episodes(spec_of(*IN_FLIGHT), graded(), 5, withheld=False)
    reasons = {(one.group_id, one.member): one.reason for one in found}
    assert reasons == {
        (1, 0): "the engine aborted it",
        (1, 1): "the environment failed: refused",
        (2, 0): "older than rollout.max_age_updates: 2",
        (2, 1): "it could not be graded",
        (3, 0): "the prompt is too long",
    }
    by_place = {(one.group_id, one.member): one for one in found}
    assert (by_place[2, 0].length, by_place[2, 0].age, by_place[2, 0].reward) == (40, 4, 1.0)
    assert by_place[2, 1].reward is None
    assert (by_place[3, 0].length, by_place[3, 0].age) == (0, 0)


@pytest.mark.parametrize("choice", ["down_weight", "pace"])
def test_an_old_episode_that_is_trained_on_is_not_dropped(choice: str) -> None:
    spec = spec_of(*IN_FLIGHT, f"rollout.beyond_max_age={choice}")
    assert (2, 0) not in {
        (one.group_id, one.member) for one in dropped_episodes(spec, graded(), 5, withheld=False)
    }


def test_a_withheld_batch_drops_what_is_left() -> None:
    found = dropped_episodes(spec_of(), graded(), 5, withheld=True)
    assert len(found) == len(RECORDS)
    withheld = [one for one in found if "withheld" in one.reason]
    assert [(one.group_id, one.member) for one in withheld] == [(0, 0), (0, 1), (2, 0)]


def account_of(tmp_path: Path, *overrides: str) -> DroppedEpisodes:
    account = DroppedEpisodes(spec_of(*overrides))
    account.open_records(tmp_path, 0)
    return account


def record_of(step: int, sampled: Graded) -> StepRecord:
    """A step whose policy had made five updates before."""
    batch = sampled.episodes.tokens
    return StepRecord(
        step=step,
        ranks=alone(),
        data_ranks=alone(),
        graded=sampled,
        batch=batch,
        before_updates=batch.rollout_log_probs,
        policy_version=5,
        withheld=False,
        metrics={},
    )


def test_bounds_contain_whatever_the_unknown_ones_would_have_scored(tmp_path: Path) -> None:
    account = account_of(tmp_path, "reward.score_range=[0,1]", *IN_FLIGHT)
    metrics = account.updated(record_of(7, graded()))
    assert metrics["dropped/episodes"] == 5
    assert metrics["dropped/fraction"] == pytest.approx(5 / 7)
    known = [1.0, 0.0, 1.0]  # of the graded ones; the aborted one's grade means nothing
    assert metrics["dropped/reward_low"] == pytest.approx(sum(known) / 7)
    assert metrics["dropped/reward_high"] == pytest.approx((sum(known) + 4) / 7)
    lines = [json.loads(line) for line in (tmp_path / DROPPED_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [7] * 5
    assert {"reason", "length", "age", "prompt", "row", "reward"} <= lines[0].keys()
    # no class of length without a known reward: 0 tokens has none
    assert "dropped/reward_by_length" not in metrics


def test_without_a_declared_range_there_are_no_bounds(tmp_path: Path) -> None:
    metrics = account_of(tmp_path, "reward.name=rewards.py:f").updated(record_of(1, graded()))
    assert not {"dropped/reward_low", "dropped/reward_high"} & metrics.keys()
    account = account_of(tmp_path, "reward.score_range=[0.5,1]")  # a reward is outside
    assert "dropped/reward_low" not in account.updated(record_of(2, graded()))


def test_the_estimate_by_length_undoes_a_loss_of_long_ones(tmp_path: Path) -> None:
    """Long episodes score 1 and half of them are lost; the mean of the known ones is too low."""
    records = [episode(g, 0, 4) for g in range(8)] + [episode(8 + g, 0, 64) for g in range(8)]
    scores = torch.tensor([0.0] * 8 + [1.0] * 8)
    valid = torch.tensor([True] * 8 + [True, False] * 4)
    one = Graded(Episodes.of(records), RewardResult(scores, valid), None, {})
    metrics = account_of(tmp_path).updated(record_of(1, one))
    assert scores[valid].mean() == pytest.approx(1 / 3)
    assert metrics["dropped/reward_by_length"] == pytest.approx(0.5)


def test_unused_groups_of_dynamic_sampling_are_listed(tmp_path: Path) -> None:
    unused = DroppedEpisode(-1, 0, 9, "the rewards of its group do not differ", 3, 0, 1.0, "1+1")
    metrics = account_of(tmp_path).updated(record_of(1, graded(unused)))
    assert metrics["dropped/fraction"] == pytest.approx(5 / 8)
    lines = [json.loads(line) for line in (tmp_path / DROPPED_FILE).read_text().splitlines()]
    assert lines[0]["reason"] == "the rewards of its group do not differ"


def test_nothing_is_written_of_a_step_without_dropped_episodes(tmp_path: Path) -> None:
    whole = Graded(Episodes.of(RECORDS[:2]), RewardResult(torch.zeros(2), torch.ones(2).bool()), None, {})
    assert account_of(tmp_path).updated(record_of(1, whole)) == {}
    assert not (tmp_path / DROPPED_FILE).exists()


def test_a_resume_forgets_the_steps_that_it_repeats(tmp_path: Path) -> None:
    ledger = DroppedLedger(tmp_path, keep_until=0)
    one = DroppedEpisode(0, 0, 0, "why", 1, 0, None, "p\ud800")
    for step in (1, 2, 3):
        ledger.add(step, [one])
    with ledger.path.open("a") as file:
        file.write('{"step": 2, "rea')
    DroppedLedger(tmp_path, keep_until=2)
    assert [json.loads(line)["step"] for line in ledger.path.read_text().splitlines()] == [1, 2]
