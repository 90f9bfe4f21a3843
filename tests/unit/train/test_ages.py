"""Episodes beyond `rollout.max_age_updates`: which are trained on, how, and how they are described."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algos.segments import to_host
from rlctl.batch import Episode, Turn
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.score_batch import train_batch, with_advantages
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import age_metrics, age_sums, step_warnings
from rlctl.train.update import update
from tests.episodes import episode_of, flat, task_of
from tests.models import tiny_model
from tests.unit.train.updates import PlainEngine, alone, batch_of, settings_of

VERSION = 10
#: Group → versions of the tokens of each episode.
VERSIONS = [[[10, 10], [9, 9, 10]], [[7, 8, 8, 9, 10], [10]], [[5, 10, 10, 10], [8, 8]]]
AGES = [0, 1, 3, 0, 5, 2]
SCORES = [1.0, 0.0, 1.0, 0.0, 0.5, 0.5]
LENGTHS = [2, 3, 5, 1, 4, 2]


def spec_of(*overrides: str) -> RunSpec:
    return load_spec([], [], ["algorithm.adv_estimator=rloo", "rollout.n=2", *overrides]).spec


def graded(valid: list[bool] | None = None) -> Graded:
    groups = []
    for group, members in enumerate(VERSIONS):
        episodes: list[Episode] = []
        for member, versions in enumerate(members):
            ids, log_probs = torch.full((len(versions),), 3), torch.full((len(versions),), -0.5)
            turn = Turn(ids, log_probs, torch.tensor(versions), "stop")
            episodes.append(episode_of(task_of(group), member, turn))
        groups.append(tuple(episodes))
    kept = torch.tensor(valid or [True] * len(SCORES))
    return Graded(flat(groups), RewardResult(torch.tensor(SCORES), kept), None, {})


def members_of(batch) -> list[tuple[int, int]]:
    return list(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True))


def test_an_episode_is_as_old_as_its_oldest_token() -> None:
    assert graded().episodes.ages(VERSION).tolist() == AGES


@pytest.mark.parametrize(
    ("limit", "kept"), [(0, [0, 3]), (2, [0, 1, 3, 5]), (3, [0, 1, 2, 3, 5]), (5, range(6)), (None, range(6))]
)
def test_older_episodes_are_dropped_and_the_others_unchanged(limit: int | None, kept) -> None:
    limits = [] if limit is None else [f"rollout.max_age_updates={limit}"]
    batch = train_batch(spec_of(*limits), alone(), graded(), VERSION)
    assert members_of(batch) == [divmod(place, 2) for place in kept]
    assert batch.prompt_weights.tolist() == [1.0] * len(kept)
    assert batch.column("age").tolist() == [
        VERSION - v for place in kept for v in VERSIONS[place // 2][place % 2]
    ]


def test_older_episodes_are_weighted_by_how_much_older_they_are() -> None:
    limits = ("rollout.max_age_updates=2", "rollout.beyond_max_age=down_weight")
    batch, plain = (train_batch(spec_of(*some), alone(), graded(), VERSION) for some in (limits, ()))
    factors = [(1 + 2) / (1 + age) if age > 2 else 1.0 for age in AGES]
    assert batch.prompt_weights.tolist() == pytest.approx(factors)
    found, expected = (
        with_advantages(x, EstimatorSettings.of(spec_of().algorithm), alone()) for x in (batch, plain)
    )
    spread = batch.units.episode.spread(torch.tensor(factors))
    assert torch.allclose(found.advantages, expected.advantages * spread)


def test_a_batch_of_which_all_are_too_old_has_no_episodes() -> None:
    found = train_batch(spec_of("rollout.max_age_updates=0"), alone(), graded(), VERSION + 1)
    assert found.num_episodes == 0


def test_what_was_dropped_is_described_beside_what_was_kept() -> None:
    """Their lengths, scores, and the scores of their prompts, over the graded ones."""
    valid = [True, True, True, True, True, False]
    sums = to_host(age_sums(graded(valid), VERSION, 2))
    found = age_metrics(sums)
    old, young = (2, 4), (0, 1, 3)
    prompts = {0: 0.5, 1: 0.5, 2: 0.5}
    expected = {"age/older_episodes": 2.0, "age/mixed_episodes": 3 / 5}
    for part, rows in (("older", old), ("within", young)):
        expected[f"age/{part}_length"] = sum(LENGTHS[row] for row in rows) / len(rows)
        expected[f"age/{part}_score"] = sum(SCORES[row] for row in rows) / len(rows)
        expected[f"age/{part}_prompt_score"] = sum(prompts[row // 2] for row in rows) / len(rows)
    ages = [VERSION - v for row in range(5) for v in VERSIONS[row // 2][row % 2]]
    expected["age/token_mean"] = sum(ages) / len(ages)
    assert found == pytest.approx(expected)


def test_without_old_episodes_only_the_others_are_described() -> None:
    found = age_metrics(to_host(age_sums(graded(), VERSION, 5)))
    assert found["age/older_episodes"] == 0.0
    assert {"age/within_length", "age/within_score"} <= found.keys()
    assert not {"age/older_length", "age/older_score"} & found.keys()
    assert set(age_metrics(to_host(age_sums(graded(), VERSION, None)))) == {
        "age/token_mean",
        "age/mixed_episodes",
    }
    nothing = age_metrics(to_host(age_sums(graded([False] * 6), VERSION, 2)))
    assert all(math.isfinite(value) for value in nothing.values())


@pytest.mark.parametrize(
    ("overrides", "older", "said"),
    [
        (["rollout.max_age_updates=2"], 6.0, "older than rollout.max_age_updates = 2; set it higher"),
        (["rollout.max_age_updates=2"], 0.0, "no episode of them was graded"),
        (["rollout.max_age_updates=2", "rollout.beyond_max_age=down_weight"], 6.0, "was graded"),
        ([], None, "no episode of them was graded"),
    ],
)
def test_updates_without_episodes_say_whether_these_were_too_old(overrides, older, said: str) -> None:
    nothing = batch_of(tiny_model()).pick([])
    settings = settings_of({}, mini_rows=8)
    outcome = update(nothing, PlainEngine(tiny_model()), alone(), settings, lambda _: 1e-3, 0)
    metrics = outcome.metrics | {"reward/num_errors": 0.0, "reward/num_timeouts": 0.0}
    metrics |= {} if older is None else {"age/older_episodes": older}
    [(kind, text)] = step_warnings(spec_of(*overrides), metrics, outcome.missed, [], {})
    assert (kind, metrics["rollout_corr/skipped_updates"]) == ("skipped empty", 2.0)
    assert text.startswith("2 updates withheld: ")
    assert said in text
