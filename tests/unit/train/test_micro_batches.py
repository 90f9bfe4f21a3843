"""Division into passes: every episode once, within the limit, as many passes on every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.batch import ModelInputs, TokenBatch
from rlctl.capabilities.teacher.run import Distillation
from rlctl.engine.protocol import PolicyOutput
from rlctl.run_spec.load import load_spec
from rlctl.train.deal import in_passes, in_step, micro_batches, output_of
from rlctl.train.score_batch import score_batch
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import StepTimer
from tests.models import tiny_batch, tiny_model
from tests.unit.train.scored import scored_batch
from tests.unit.train.updates import alone

MODEL = tiny_model()
Model = Callable[[ModelInputs], torch.Tensor]
SIZES = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), max_size=12)


class Others:
    """`Ranks` of which one makes `most` passes."""

    def __init__(self, most: int) -> None:
        self.most = most

    def max(self, value: float) -> float:
        return max(value, self.most)


def batch_of(lengths: list[int]) -> TokenBatch:
    """Prompts of 1 to 5 tokens, responses of up to 12."""
    return tiny_batch(MODEL, len(lengths), horizon=12, lengths=lengths)


def of_sequences(sizes: list[list[int]]) -> TokenBatch:
    """Episodes of sequences of these numbers of tokens; all but the first one are sampled."""
    lengths = torch.tensor([size + 1 for episode in sizes for size in episode], dtype=torch.int64)
    sampled = torch.ones(int(lengths.sum()), dtype=torch.bool)
    sampled[lengths.cumsum(0) - lengths] = False
    zeros = torch.zeros(int(sampled.sum()), dtype=torch.int64)
    places = torch.arange(len(sizes))
    return TokenBatch(
        token_ids=torch.arange(len(sampled)),
        sampled=sampled,
        lengths=lengths,
        owners=places.repeat_interleave(torch.tensor([len(x) for x in sizes], dtype=torch.int64)),
        group_ids=places,
        members=torch.zeros_like(places),
        prompt_weights=torch.ones(len(sizes)),
        rollout_log_probs=zeros.float(),
        versions=zeros,
        turns=zeros,
        rewards=zeros.float(),
    )


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 40), st.booleans(), st.integers(0, 2**12 - 1))
def test_every_episode_once_and_within_the_limit(
    sizes: list[list[int]], limit: int, by_tokens: bool, flags: int
) -> None:
    batch = of_sequences(sizes)
    first = torch.tensor([bool(flags >> place & 1) for place in range(len(sizes))], dtype=torch.bool)
    costs = [sum(x) + len(x) if by_tokens else len(x) for x in sizes]
    for given_first in (None, first):
        parts = micro_batches(batch, limit, limit if by_tokens else None, first=given_first)
        places = [part.tolist() for part in parts]
        assert sorted(chain.from_iterable(places)) == list(range(len(sizes)))
        assert all(part == sorted(part) for part in places)
        assert all(len(part) == 1 or sum(costs[x] for x in part) <= limit for part in places)
        if given_first is None:
            assert list(chain.from_iterable(places)) == list(range(len(sizes))), "siblings stay adjacent"
            together = [sum(costs[x] for x in [*one, other[0]]) for one, other in pairwise(places)]
            assert all(cost > limit for cost in together), "no pass could have taken the next episode"
        else:
            kinds = [{bool(first[x]) for x in part} for part in places]
            assert all(len(kind) == 1 for kind in kinds)
            assert kinds == sorted(kinds, key=lambda kind: kind != {True})


@settings(max_examples=20, deadline=None)
@given(SIZES, st.integers(1, 40), st.integers(0, 14))
def test_outputs_are_in_the_order_of_the_batch(sizes: list[list[int]], limit: int, most: int) -> None:
    batch, calls = of_sequences(sizes), []

    def model(inputs: ModelInputs) -> torch.Tensor:
        calls.append(len(inputs.lengths))
        return torch.stack([inputs.tokens, -inputs.tokens], 1).float()

    found = in_passes(model, batch, 1, limit, Others(most))
    tokens = batch.inputs.tokens.float()
    assert torch.equal(found, torch.stack([tokens, -tokens], 1))
    assert len(calls) == max(len(micro_batches(batch, 1, limit)), most, 1)
    assert all(calls), "an idle pass has a sequence too"


@pytest.mark.parametrize("most", [0, 2, 5])
def test_every_rank_makes_as_many_passes(most: int) -> None:
    batch = batch_of([3, 1, 4])
    for own in (batch, batch.pick([0]), batch.pick([])):
        found = in_step(own, 1, None, Others(most))
        assert len(found) == max(most, own.num_episodes, 1)
        assert [part.num_episodes for part in found[: own.num_episodes]] == [1] * own.num_episodes
        for idle in found[own.num_episodes :]:
            assert idle.num_episodes == 0
            assert output_of(lambda inputs: inputs.tokens[:, None], idle).shape == (0, 1)


def test_an_episode_above_the_budget_goes_alone() -> None:
    batch = batch_of([12, 1, 12, 1])
    assert [len(part) for part in micro_batches(batch, 4, 1)] == [1, 1, 1, 1]


def run_of(model: Callable[[str], Model], *overrides: str, **more: Any) -> Any:
    """A run whose models answer as `model` of their name."""
    policy, changes = model("policy"), ["algorithm.adv_estimator=gae"]
    changes += ["algorithm.rollout_correction.bypass_mode=false", *overrides]
    spec = load_spec([], [], changes).spec
    return SimpleNamespace(
        spec=spec,
        estimator=EstimatorSettings.of(spec.algorithm),
        actor=SimpleNamespace(policy=lambda inputs, **_: PolicyOutput(policy(inputs), torch.zeros(0))),
        ref=SimpleNamespace(log_probs=model("ref")),
        critic=SimpleNamespace(values=model("critic")),
        ranks=alone(),
        data_ranks=alone(),
        **{"capabilities": ()} | more,
    )


def scored(*overrides: str) -> tuple[TokenBatch, list[int]]:
    """`score_batch` by three models, and the length of every sequence that they received."""
    asked: list[int] = []
    scales = {"policy": -0.1, "ref": -0.2, "critic": 0.3}

    def model(name: str) -> Model:
        def answer(inputs: ModelInputs) -> torch.Tensor:
            asked.extend(inputs.lengths.tolist())
            return scales[name] * inputs.tokens.float()

        return answer

    return score_batch(run_of(model, *overrides), scored_batch(), StepTimer(torch.device("cpu"))), asked


def test_only_the_policy_replays_the_experts_of_the_sampler() -> None:
    """The others are other models, with experts of their own."""
    batch, routed = scored_batch(), {}
    batch = batch.with_columns(experts=torch.zeros(len(batch.token_ids), 2, 1, dtype=torch.int16))

    def model(name: str) -> Model:
        def answer(inputs: ModelInputs) -> torch.Tensor:
            routed[name] = inputs.experts is not None
            return torch.zeros(len(inputs.tokens))

        return answer

    taught = ("algorithm.teacher.path=teacher", "algorithm.teacher.kl_in=reward")
    run = run_of(model, *taught)
    distillation = Distillation(run.spec)
    distillation.model = SimpleNamespace(log_probs=model("teacher"))
    run.capabilities = (distillation,)
    score_batch(run, batch, StepTimer(torch.device("cpu")))
    assert routed == {"policy": True, "ref": False, "teacher": False, "critic": False}


@pytest.mark.parametrize("budget", ["14", "30", "90"])
def test_every_models_answers_come_back_to_their_tokens(budget: str) -> None:
    plain, lengths = scored()
    packed, same_lengths = scored(f"actor.ppo_max_token_len_per_gpu={budget}")
    assert lengths == same_lengths
    tokens = plain.inputs.tokens.float()
    for name, scale in {"old_log_probs": -0.1, "ref_log_probs": -0.2, "values": 0.3}.items():
        assert torch.equal(packed.column(name), scale * tokens), name
        assert torch.equal(plain.column(name), scale * tokens), name
