"""A step on a GPU: nothing mixes its tensors with some on the CPU, or reduces the latter over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.algos.segments import HostSums, Sums
from rlctl.batch import Task, TokenBatch
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.ranks import Ranks
from rlctl.engine.values import ValueModule
from rlctl.environment.single_turn import sample_episodes
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.reward.build import build_reward
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.rollout import RewardSpec
from rlctl.track.rollouts import RolloutWriter
from rlctl.train.score_batch import kl_controller, with_advantages, with_penalties
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import token_sums
from rlctl.train.update import update
from tests.models import tiny_model
from tests.other_device import DEVICE, Placed, other_device
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, random_model
from tests.unit.train.scored import ROWS, algorithm_of, scored_batch
from tests.unit.train.updates import CASES, PlainEngine, settings_of, sizes_of

pytestmark = pytest.mark.slow
Move = Callable[[Any], Any]


@pytest.fixture
def move() -> Iterator[Move]:
    with other_device() as found:
        yield found


class OneRank(Ranks):
    """Refuses what NCCL refuses: tensors on the CPU."""

    def all_reduce(self, sums: Sums) -> HostSums:
        assert all(isinstance(value, Placed) for value in sums.values())
        return super().all_reduce(sums)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        assert isinstance(values, Placed)
        return values


RANKS = OneRank(0, 1, DEVICE)


def test_devices_are_told_apart(move: Move) -> None:
    there, here = move(torch.arange(6.0).view(2, 3)), torch.ones(3)
    assert (there * 2.0).sum().item() == 30.0
    assert there[torch.tensor([1])].device == torch.zeros(2, device=there.device).device == DEVICE
    assert torch.equal(there.cpu()[1] + here, torch.tensor([4.0, 5.0, 6.0]))
    for mixed in (lambda: there + here, lambda: torch.stack([there[0], here]), lambda: here[there[0].long()]):
        with pytest.raises(RuntimeError, match="different devices"):
            mixed()
    with pytest.raises(TypeError, match="NumPy"):
        there.numpy()


@pytest.mark.parametrize("micro", [4, "20 tokens"])
@pytest.mark.parametrize("name", CASES)
def test_updates(name: str, micro: int | str, move: Move) -> None:
    case = CASES[name]
    batch = move(case.batch(tiny_model()))
    settings = settings_of(
        case.correction, epochs=case.epochs, mini_rows=case.mini_rows, **sizes_of(micro), **case.options
    )
    outcome = update(batch, PlainEngine(move(tiny_model())), RANKS, settings, lambda _: 1e-3, 0)
    assert outcome.num_updates > 0


@pytest.mark.parametrize("estimator", list(ADVANTAGE_ESTIMATORS))
def test_advantages_and_metrics(estimator: str, move: Move) -> None:
    scored, algorithm = move(scored_batch()), algorithm_of(estimator, use_kl_in_reward=True)
    scored, _, _ = with_penalties(scored, algorithm, kl_controller(algorithm), RANKS)
    batch = with_advantages(scored, EstimatorSettings.of(algorithm), RANKS)
    assert RANKS.all_reduce(token_sums(batch))["critic/rewards.n"] == ROWS


@pytest.mark.parametrize(
    "options",
    [{}, {"greedy": True}, {"top_p": 0.8, "with_kept": True}, {"num_most_likely": 3}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_sampling_scoring_grading_and_dumps(
    options: dict[str, Any], move: Move, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HFRollout(random_model(1), TOKENIZER, DEVICE)
    sampling = Sampling(max_response_length=5, **options)
    tasks = [Task(TOKENIZER(text)["input_ids"], text, group) for group, text in enumerate(TEXTS)]
    episodes = sample_episodes(engine, tasks, 3, sampling, 1, TOKENIZER)
    batch = TokenBatch.of(episodes, DEVICE)
    assert isinstance(batch.token_ids, Placed)
    monkeypatch.setattr("rlctl.engine.log_probs.logits_at_once", lambda _: 40)
    found = PolicyModule(move(random_model(1)), 1.0)(batch.inputs, sum_pi_squared=True)
    found.log_probs.sum().backward()
    assert isinstance(found.log_probs, Placed)
    critic = move(ValueModule(move(random_model(1))))
    critic(batch.inputs).sum().backward()
    reward = {"name": "exact", "overlong": {"buffer_length": 2}}
    built = build_reward(RewardSpec.model_validate(reward), max_response_length=5, device=DEVICE)
    scores = built.score(episodes).scores.tolist()
    built.close()
    writer = RolloutWriter(tmp_path, 6, exact_sampling="kept" in batch.columns)
    columns = {
        "training_log_probs": found.log_probs,
        "rollout_is_weights": torch.zeros_like(batch.rollout_log_probs),
        "keep_mask": torch.ones_like(batch.turns, dtype=torch.bool),
    }
    writer.add(1, episodes, scores, columns)
    writer.flush()
    assert list((tmp_path / "rollouts").glob("*.parquet"))
