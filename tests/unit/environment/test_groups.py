"""Groups of an environment that fails now and then: sampled again, left out, scored, counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlctl.algos.segments import Segments
from rlctl.batch import Episode, Task
from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.engine.ranks import Ranks
from rlctl.environment.build import EpisodeSource
from rlctl.environment.protocol import EnvironmentFault, Outcome, Sampler
from rlctl.errors import RunFailure, SpecError, UsageError
from rlctl.metric_names import describe
from rlctl.reward.build import Reward
from rlctl.reward.protocol import Graded, RewardResult, Scorer
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.rollout import OverlongSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.score_batch import train_batch, with_advantages
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import (
    environment_metrics,
    environment_sums,
    episode_metrics,
    episode_sums,
    metrics_of_episodes,
    turn_metrics,
    turn_sums,
)
from rlctl.train.update import mini_batches
from tests.episodes import RandomEngine, flat, task_of
from tests.scripted import SAMPLING as LONG
from tests.scripted import TOKENIZER, ScriptedEngine, asked, source_of

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


class Flaky:
    """Two turns with one token of the environment between; fails where `fails(attempt, group, member)`."""

    def __init__(self, fails) -> None:
        self._fails, self.attempts = fails, {}

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        key = task.group_id, sampler._member  # type: ignore[attr-defined]
        attempt = self.attempts[key] = self.attempts.get(key, -1) + 1
        context = [1, 2]
        for _ in range(2):
            turn = await sampler.sample(context)
            context = [*context, *turn.token_ids.tolist(), 3]
            if self._fails(attempt, *key):
                raise EnvironmentFault("refused")
        return Outcome("text", reward=float(key[1]), metrics={"num_tool_calls": 2.0, "own": 1.0})

    def close(self) -> None: ...


def groups_of(fails, *, n: int = 3, count: int = 4, **given):
    environment = Flaky(fails)
    source = EpisodeSource(EnvironmentSpec(name="single_turn", others=["x"], **given), None, 1000)
    source._built["x"] = environment
    tasks = [task_of(group, environment="x") for group in range(count)]
    return source.groups(RandomEngine(), tasks, n, Sampling(4), 5).groups, environment


def test_a_group_with_enough_members_is_not_sampled_again() -> None:
    groups, environment = groups_of(lambda _, group, member: group == 1 and member == 0)
    assert [[bool(e.error) for e in group] for group in groups] == [
        [False] * 3, [True, False, False], [False] * 3, [False] * 3,
    ]  # fmt: skip
    assert set(environment.attempts.values()) == {0}


def test_a_group_with_too_few_is_sampled_again_with_other_seeds_and_then_excluded() -> None:
    groups, environment = groups_of(
        lambda attempt, group, member: member > 0 and (group == 3 or (group == 2 and attempt < 1)),
        max_retries=2,
    )
    assert [group[0].task.group_id for group in groups] == [0, 1, 2, 3], "in the order of the tasks"
    assert {key[0]: count for key, count in environment.attempts.items()} == {0: 0, 1: 0, 2: 1, 3: 2}
    assert not any(episode.error for group in groups[:3] for episode in group)
    assert {episode.metrics.get("retries") for episode in groups[2]} == {1.0}
    assert ["min_group" in episode.error for episode in groups[3]] == [True, False, False]
    assert all(episode.error for episode in groups[3])
    again, _ = groups_of(lambda *_: False)
    assert not torch.equal(again[2][0].sequences[0].token_ids, groups[2][0].sequences[0].token_ids)


def test_a_group_of_one_needs_one() -> None:
    groups, environment = groups_of(lambda *_: False, n=1, min_group=2)
    assert not any(episode.error for group in groups for episode in group)
    assert set(environment.attempts.values()) == {0}


# --- scores -------------------------------------------------------------------------------------------


class Half(Scorer):
    """Scores 0.5."""

    def grade(self, samples):
        return [0.5 for _ in samples]


def reward_of(**terms: Scorer) -> Reward:
    return Reward({name: (2.0, scorer) for name, scorer in terms.items()}, OverlongSpec(), 100)


def test_the_environments_reward_is_added_and_graders_are_optional() -> None:
    groups, _ = groups_of(lambda _, group, member: group == 0 and member == 1, count=1)
    [group] = groups
    alone = reward_of().score(group)
    assert (alone.scores.tolist(), alone.valid.tolist()) == ([0.0, 0.0, 2.0], [True, False, True])
    assert alone.errors == []
    both = reward_of(half=Half()).score(group)
    assert (both.scores.tolist(), both.valid.tolist()) == ([1.0, 0.0, 3.0], [True, False, True])
    silent = [replace(episode, reward=None) for episode in group]
    none = reward_of().score(silent)
    assert not none.valid.any(), "nothing gives a score: not 0"
    assert len(none.errors) == 1


@pytest.mark.parametrize(
    ("code", "is_refused"),
    [("def get_reward(self): return 1.0", False), ("def tool(self) -> int:\n        '''A.'''", True)],
)
def test_no_grader_and_no_reward_of_the_environment_is_refused(tmp_path, code: str, is_refused: bool) -> None:
    file = tmp_path / "game.py"
    file.write_text(f"class Game:\n    def reset(self): ...\n    {code}\n")

    for name, expected in ((f"{file}:Game", is_refused), ("single_turn", True)):
        with pytest.raises(SpecError, match="no reward at all") if expected else contextlib.nullcontext():
            load_spec([], [], [f"environment.name={name}", "reward.terms=[]"])


def test_groups_of_several_threads_share_one_environment_and_its_limit(monkeypatch) -> None:
    """As in flight, where each group is sampled in a thread of its own."""
    built: list[Counting] = []

    class Counting(Flaky):
        now = most = 0
        lock = threading.Lock()

        def count(self, number: int) -> None:
            with self.lock:
                self.now += number
                self.most = max(self.most, self.now)

        async def run(self, task: Task, sampler: Sampler) -> Outcome:
            self.count(1)
            await asyncio.sleep(0.02)
            self.count(-1)
            return await super().run(task, sampler)

    def build(name: str, context: object) -> Counting:
        time.sleep(0.05)
        built.append(Counting(lambda *_: False))
        return built[-1]

    monkeypatch.setattr("rlctl.environment.build.build_environment", build)
    source = EpisodeSource(EnvironmentSpec(name="single_turn", others=["x"], concurrency=5), None, 1000)
    tasks = [task_of(group, environment="x") for group in range(8)]
    with ThreadPoolExecutor(8) as threads:
        sampled = [threads.submit(source.groups, RandomEngine(), [task], 2, Sampling(4), 5) for task in tasks]
        assert not any(error for each in sampled for error in each.result().errors)
    assert len(built) == 1
    assert 2 <= built[0].most <= 5


# --- batches ------------------------------------------------------------------------------------------

SPEC = load_spec(
    [], [], ["data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "rollout.n=3",
             "algorithm.adv_estimator=rloo"],
).spec  # fmt: skip


def graded_of(fails) -> Graded:
    groups, _ = groups_of(fails, max_retries=0)
    return Graded(flat(groups), reward_of().score([e for group in groups for e in group]), None, {})


def test_advantages_and_mini_batches_of_groups_with_missing_members() -> None:
    """A missing member is in no baseline; a missing group makes its mini-batch smaller."""
    graded = graded_of(lambda _, group, member: (group == 0 and member == 2) or (group == 3 and member > 0))
    batch = train_batch(SPEC, ALONE, graded, 0)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.members.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert [part.tolist() for part in mini_batches(batch, 2, 2)] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    found = with_advantages(batch, EstimatorSettings.of(SPEC.algorithm), ALONE).advantages
    last = batch.units.episode.starts + batch.units.episode.lengths - 1
    expected = [-1.0, 1.0, -1.5, 0.0, 1.5, -1.5, 0.0, 1.5]
    assert found[last].tolist() == expected
    assert torch.equal(found, Segments(batch.units.episode.lengths).spread(torch.tensor(expected)))


def test_if_all_groups_fail_the_batch_is_empty() -> None:
    batch = train_batch(SPEC, ALONE, graded_of(lambda *_: True), 0)
    assert batch.num_episodes == 0
    assert [len(part) for part in mini_batches(batch, 2, 2)] == [0, 0]


def test_failed_episodes_are_counted_and_in_no_other_metric() -> None:
    graded = graded_of(lambda _, group, member: (group == 0 and member == 2) or (group == 3 and member > 0))
    whole = [e for e in graded.episodes if not e.error]
    host = {name: float(value) for name, value in episode_sums(graded, 0, 10).items()}
    assert host["episode/num_failed"] == 4.0
    assert (host["reward/num_errors"], host["response/num_aborted"]) == (0.0, 0.0)
    assert (host["groups"], host["flat_groups"]) == (3.0, 0.0)
    metrics = episode_metrics(host, compares_siblings=True)
    assert metrics["response_length/mean"] == sum(e.num_sampled for e in whole) / 8
    assert metrics["critic/score/mean"] == pytest.approx((0 + 1 + 3 + 3) / 8)
    assert metrics["reward/error_fraction"] == 0.0


def run_of(spec: RunSpec, vocabulary: int) -> SimpleNamespace:
    return SimpleNamespace(
        ranks=ALONE,
        spec=spec,
        episodes=EpisodeSource(spec.environment, None, 10),
        estimator=EstimatorSettings.of(spec.algorithm),
        policy_version=0,
        tokenizer=range(vocabulary),
    )


def test_metrics_of_episodes() -> None:
    graded = graded_of(lambda _, group, member: group == 0 and member == 2)
    names = sorted({name for e in graded.episodes for name in e.metrics})
    sums = episode_sums(graded, 0, 10) | environment_sums(graded, names)
    metrics = environment_metrics({name: float(value) for name, value in sums.items()})
    whole = [e for e in graded.episodes if not e.error]
    assert (metrics["episode/num_turns/mean"], metrics["episode/num_turns/max"]) == (2.0, 2.0)
    assert metrics["episode/num_tool_calls"] == 2.0
    assert metrics["episode/own"] == 1.0
    assert metrics["episode/num_failed"] == 1.0
    assert metrics["episode/stop/completed"] == 1.0
    assert metrics["episode/stop/environment_error"] == 0.0
    sampled = sum(e.num_sampled for e in whole)
    assert metrics["episode/observation_fraction"] == pytest.approx(len(whole) / (len(whole) + sampled))
    assert metrics["episode/seconds/policy"] >= 0.0
    assert all(map(describe, metrics)), "all are documented"


def test_too_many_failures_end_the_run_with_the_first_of_them() -> None:
    graded = graded_of(lambda _, group, member: group > 0)
    spec = SPEC.model_copy(update={"environment": SPEC.environment.model_copy(update={"name": "a.py:A"})})
    run = run_of(spec, 20)
    with pytest.raises(RunFailure, match=r"9 of 12 episodes failed.*refused"):
        metrics_of_episodes(run, graded)
    few = graded_of(lambda _, group, member: group == 0 and member == 0)
    assert metrics_of_episodes(run, few)["episode/num_failed"] == 1.0


def test_mismatch_by_turn() -> None:
    batch = train_batch(SPEC, ALONE, graded_of(lambda *_: False), 0)
    gaps = torch.where(batch.turns == 0, 0.1, -0.2)
    found = turn_metrics(
        {name: float(value) for name, value in turn_sums(batch, batch.rollout_log_probs - gaps).items()}
    )
    assert found["rollout_corr/turn_1/kl"] == pytest.approx(0.1)
    assert found["rollout_corr/turn_2/kl"] == pytest.approx(-0.2)
    assert "rollout_corr/turn_3/kl" not in found
    of_turns = batch.units.turn
    ratios = (-of_turns.sum(gaps)).exp()[batch.turns[of_turns.starts] == 0]
    ess = float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))
    assert found["rollout_corr/turn_1/eff_sample_size"] == pytest.approx(ess)


def test_an_episode_without_a_turn_can_be_counted() -> None:
    failed = Episode(task_of(), 0, (), "", "environment_error", error="refused")
    graded = Graded(
        flat([(failed,)]), RewardResult(torch.zeros(1), torch.zeros(1, dtype=torch.bool)), None, {}
    )
    assert episode_sums(graded, 0, 10)["episode/num_failed"] == 1.0
    assert environment_sums(graded, [])["observed"] == 0.0
    assert train_batch(SPEC, ALONE, graded, 0).num_episodes == 0


def test_names_in_the_data_are_checked_before_anything_is_sampled() -> None:
    spec = EnvironmentSpec.model_construct(name="a.py:A", others=["b.py:B"])
    source = EpisodeSource(spec, None, 10)
    source.check([task_of(0), task_of(1, environment="b.py:B")])
    with pytest.raises(UsageError, match=r"row 2 of the data chooses the environment '/tmp/evil.py:E'"):
        source.check([task_of(2, environment="/tmp/evil.py:E")])


# --- first prompts that do not fit ---------------------------------------------------------------------
TALKATIVE = """
    class Game:
        def reset(self, words: int = 0, **row) -> str:
            return "x" * words

        def look(self, at: str) -> str:
            '''Looks at something, and says what is there.

            Args:
                at: What to look at.
            '''
            return "nothing"

        def get_reward(self) -> float:
            return 1.0
"""


def limited(folder: Path, max_prompt_length: int) -> EpisodeSource:
    source = source_of(folder, TALKATIVE)
    return EpisodeSource(source.spec, TOKENIZER, 4000, None, max_prompt_length)


def test_the_first_length_has_the_descriptions_of_tools(tmp_path: Path) -> None:
    with contextlib.closing(limited(tmp_path, 3999)) as source:
        task = asked()
        [[episode]] = source.groups(ScriptedEngine(lambda _: "done"), [task], 1, LONG, 0).groups
        assert source.first_length(task) == episode.num_prompt > len(task.prompt_ids) + 100


def test_a_first_prompt_that_is_too_long_ends_before_anything_is_sampled(tmp_path: Path) -> None:
    with contextlib.closing(limited(tmp_path, 3999)) as source:
        fits = source.first_length(asked()) + 40
    with contextlib.closing(limited(tmp_path, fits)) as source:
        engine = ScriptedEngine(lambda _: "done")
        tasks = [asked(0, extra_info={"words": 20}), asked(1, extra_info={"words": 60})]
        short, long = source.groups(engine, tasks, 2, LONG, 0).groups
    assert [episode.error for episode in short] == ["", ""]
    assert len(engine.read) == 2, "the long ones are not sampled, nor sampled again"
    for episode in long:
        assert (episode.stop_reason, episode.num_sampled) == ("prompt_overlong", 0)
        assert f"first prompt has {fits + 20} tokens, more than {fits}" in episode.error
    rewards = RewardResult(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([True, True, False, False]))
    graded = Graded(flat([short, long]), rewards, None, {})
    sums = {name: float(value) for name, value in episode_sums(graded, 0, fits).items()}
    assert (sums["episode/num_failed"], sums["episode/num_overlong_prompts"]) == (0.0, 2.0)
    assert episode_metrics(sums, compares_siblings=False)["prompt_length/mean"] == fits - 20
    spec = load_spec([], [], {"data.filter_overlong_prompts": False, "model.path": "embedded"}).spec
    run = run_of(spec, 200)
    with pytest.raises(RunFailure, match=r"row 0: its first prompt has .* tokens, more than"):
        metrics_of_episodes(run, graded)


def test_rows_whose_tools_do_not_fit_are_left_out_or_refused(tmp_path: Path) -> None:
    rows = [Row("a", (Message("user", "q" * length),), "1", index=length) for length in (1, 50, 99)]
    with contextlib.closing(limited(tmp_path, 3999)) as source:
        lengths = [source.first_length(asked(text="q" * length)) for length in (1, 50, 99)]
        given = {"max_prompt_length": lengths[1], "first_length": source.first_length}
        kept = PromptDataset(rows, TOKENIZER, filter_overlong=True, **given)
        assert ([row.index for row in kept.rows], kept.num_dropped) == ([1, 50], 1)
        with pytest.raises(UsageError, match=f"has {lengths[2]} tokens, descriptions of tools included"):
            PromptDataset(rows, TOKENIZER, filter_overlong=False, **given)
