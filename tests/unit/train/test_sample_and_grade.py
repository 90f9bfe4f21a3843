"""What a step samples and how it is graded: the same groups on any number of ranks, and whose greedy response
a response is compared with."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rlctl.batch import Episode, Group
from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.engine.ranks import Ranks
from rlctl.environment.build import EpisodeSource
from rlctl.reward.build import Reward
from rlctl.reward.protocol import Graded, RewardResult, Scorer
from rlctl.rollout.protocol import sampling_of
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model import RECIPE
from rlctl.run_spec.rollout import OverlongSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.tiny.model import build_tokenizer
from rlctl.train.sample_and_grade import greedy_baseline, sample_and_grade, sample_groups
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import StepTimer
from rlctl.train.stream import RolloutStream
from tests.episodes import RandomEngine, flat, groups_of, same

TOKENIZER = build_tokenizer(RECIPE)
ROWS = [Row("s", (Message("user", f"{place + 10}+1="),), str(place)) for place in range(11)]
PROMPTS = PromptDataset(ROWS, TOKENIZER, max_prompt_length=50, filter_overlong=True)


class Length(Scorer):
    """Scores the number of tokens."""

    def grade(self, samples) -> list[float]:
        return [float(len(sample.response_ids)) for sample in samples]


class Engine(RandomEngine):
    """Also notes what else it is asked for, and after which call."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, str]] = []

    def finish(self) -> None:
        self.noted.append((len(self.calls), "finish"))

    def release(self, *, weights_follow: bool) -> None:
        self.noted.append((len(self.calls), f"release, {weights_follow}"))


def spec_of(estimator: str, *overrides: str) -> RunSpec:
    sizes = (
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=3",
        "data.max_response_length=5",
    )
    return load_spec([], [], [f"algorithm.adv_estimator={estimator}", *sizes, *overrides]).spec


def run_of(spec: RunSpec, rank: int = 0, world_size: int = 1, reward: object = None) -> SimpleNamespace:
    engine, ranks = Engine(), Ranks(rank, world_size, torch.device("cpu"))
    run = SimpleNamespace(
        spec=spec,
        total_steps=100,
        sampling=sampling_of(spec),
        estimator=EstimatorSettings.of(spec.algorithm),
        ranks=ranks,
        rollout=engine,
        tokenizer=TOKENIZER,
        train_prompts=PROMPTS,
        episodes=EpisodeSource.of(spec, TOKENIZER),
        draws=None,
        reward=reward or Reward({"length": (1.0, Length())}, OverlongSpec(), 5),
    )
    run.stream = RolloutStream(partial(sample_groups, run), ahead=0, last_step=9)
    return run


def timer() -> StepTimer:
    return StepTimer(torch.device("cpu"))


def by_place(graded: list[Graded]) -> dict[int, tuple[Group, list[float], list[float] | None]]:
    found = {}
    for part in graded:
        sizes = [len(group) for group in part.episodes.groups]
        scores = part.rewards.scores.split(sizes)
        baselines = part.baseline.scores.split(sizes) if part.baseline else [None] * len(sizes)
        for group, own, baseline in zip(part.episodes.groups, scores, baselines, strict=True):
            found[group[0].task.group_id] = (
                group,
                own.tolist(),
                None if baseline is None else baseline.tolist(),
            )
    return found


@pytest.mark.parametrize("estimator", ["rloo", "remax"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_groups_and_grades_are_the_same_on_any_number_of_ranks(estimator: str, world_size: int) -> None:
    spec = spec_of(estimator)
    alone, ranks = run_of(spec), [run_of(spec, rank, world_size) for rank in range(world_size)]
    rows = set()
    for step in (1, 2):
        whole = sample_and_grade(alone, step, timer())
        parts = [sample_and_grade(run, step, timer()) for run in ranks]
        expected = by_place([whole])
        assert list(expected) == list(range(8))
        assert same(sorted(by_place(parts).items()), list(expected.items()))
        for part in (whole, *parts):
            places = [(episode.task.group_id, episode.member) for episode in part.episodes]
            assert places == sorted(places)
            lengths = [float(episode.num_sampled) for episode in part.episodes]
            assert part.rewards.scores.tolist() == lengths
            assert part.sampling_cost == {}
        rows |= {group[0].task.row for group in whole.episodes.groups}
    assert len(rows) == 11, "16 prompts are all rows and some of the next epoch"


def test_only_graded_whole_responses_are_trained_on() -> None:
    [group] = groups_of(sizes=(5,))
    told = (*group[:4], Episode(group[0].task, 4, group[4].sequences, "", "aborted"))
    rewards = RewardResult(torch.arange(5.0), torch.tensor([True, False, True, True, True]))
    assert Graded(flat([told]), rewards, None, {}).valid.tolist() == [True, False, True, True, False]
    baseline = RewardResult(torch.zeros(5), torch.tensor([True, True, False, True, True]))
    assert Graded(flat([told]), rewards, baseline, {}).valid.tolist() == [True, False, False, True, False]
    none = RewardResult(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert Graded(flat([]), none, None, {}).valid.tolist() == []


# --- the greedy response to the same prompt -----------------------------------------------------------


class Places:
    """A reward: the response to prompt g scores 10·g."""

    def __init__(self, ungraded: int = -1) -> None:
        self.ungraded = ungraded
        self.graded: list[Episode] = []

    def score(self, episodes: list[Episode]) -> RewardResult:
        self.graded += episodes
        groups = torch.tensor([episode.task.group_id for episode in episodes])
        valid = groups != self.ungraded
        return RewardResult(10.0 * groups * valid, valid, errors=[] if valid.all() else ["no"])


@pytest.mark.parametrize("sizes", [(3, 3, 3), (5, 1, 4, 2)])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_response_is_compared_with_the_greedy_one_to_its_own_prompt(sizes, is_reversed: bool) -> None:
    """Groups may have unlike numbers of members."""
    groups = groups_of(sizes=sizes)[:: -1 if is_reversed else 1]
    reward = Places()
    run = run_of(spec_of("remax"), reward=reward)
    baseline = greedy_baseline(run, 1, flat(groups), timer())
    assert baseline.scores.tolist() == [10.0 * e.task.group_id for group in groups for e in group]
    [requests] = run.rollout.calls
    assert [list(request.token_ids) for request in requests] == [list(g[0].task.prompt_ids) for g in groups]
    assert len({str(episode.sequences[0].log_probs.tolist()) for episode in reward.graded}) == 1, "all greedy"
    assert run.rollout.noted == [(1, "finish"), (1, "release, True")]


def test_without_a_grade_of_the_greedy_response_its_prompt_is_left_out() -> None:
    """A baseline of 0 in its place would reward every response of that prompt."""
    groups = groups_of(sizes=(2, 3, 1))
    baseline = greedy_baseline(run_of(spec_of("remax"), reward=Places(ungraded=1)), 1, flat(groups), timer())
    assert baseline.valid.tolist() == [True, True, False, False, False, True]
    assert baseline.errors == ["no"]


def test_only_remax_asks_for_greedy_responses() -> None:
    run = run_of(spec_of("rloo", "rollout.sync_every=2", "algorithm.rollout_correction.rollout_is=token"))
    graded = sample_and_grade(run, 1, timer())
    assert graded.baseline is None
    assert len(run.rollout.calls) == 1
    assert run.rollout.noted == [(1, "release, False")], "no sync follows this step"
