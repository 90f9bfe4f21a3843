"""What a step does in Python for every episode: sampling, grading and batching work on columns."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlctl.environment.single_turn import sample_episodes
from rlctl.reward.build import build_reward
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.model import RECIPE
from rlctl.run_spec.rollout import RewardSpec
from rlctl.tiny.embedded import DATA_SOURCE
from rlctl.tiny.model import build_model, build_tokenizer
from tests.episodes import task_of


def calls(job: Callable[[], object]) -> int:
    """Number of calls of functions, Python's and C's."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
    return count


def test_an_episode_of_one_turn_costs_few_calls() -> None:
    """Those of the model do not depend on the number of episodes: every response has one token."""
    tokenizer = build_tokenizer(RECIPE)
    engine = HFRollout(build_model(RECIPE), tokenizer, "cpu")
    reward = build_reward(RewardSpec(), max_response_length=1)
    tasks = [task_of(group, data_source=DATA_SOURCE, ground_truth="1") for group in range(8)]

    def step(n: int) -> None:
        episodes = sample_episodes(engine, tasks, n, Sampling(1), 1, tokenizer)
        assert len(episodes) == 8 * n
        assert reward.score(episodes).valid.all()

    step(2)  # what is imported or cached at the first time
    few, many = (calls(lambda n=n: step(n)) for n in (8, 72))
    assert (many - few) / (8 * 64) <= 8
