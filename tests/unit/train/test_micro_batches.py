"""Cutting a batch by tokens: every row once, within the budget, as many passes on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlctl.engine.inputs import used_columns

from rlctl.engine.protocol import PolicyOutput
from rlctl.reward.protocol import RewardResult
from rlctl.spec.load import load_spec
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.score_batch import score_batch
from rlctl.train.step_metrics import StepTimer
from tests.models import tiny_batch, tiny_model
from tests.unit.train.scored import rollouts_of
from tests.unit.train.updates import alone

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs, Rows, TrainBatch

MODEL = tiny_model()


class Others:
    """`Ranks` of which one makes `most` passes."""

    def __init__(self, most: int) -> None:
        self.most = most

    def max(self, value: float) -> float:
        return max(value, self.most)


def batch_of(lengths: list[int]) -> TrainBatch:
    """Prompts of 1 to 5 tokens, responses of up to 12."""
    return tiny_batch(MODEL, len(lengths), horizon=12, lengths=lengths)


def computed(batch: TrainBatch, parts: list[Rows]) -> list[int]:
    """Tokens that each forward pass computes, padding included."""
    return [used_columns(batch.inputs.pick(rows)).input_ids.numel() for rows in parts]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(17, 120))
def test_every_row_once_and_within_the_budget(lengths: list[int], budget: int) -> None:
    batch = batch_of(lengths)
    parts = micro_batches(batch.inputs, 3, budget, alone())
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    assert max(computed(batch, parts)) <= budget
    found = in_batch_order([batch.pick(rows).input_ids for rows in parts], parts)
    assert torch.equal(found, batch.input_ids)
    for most in range(len(parts), len(lengths) + 1):  # no rank can need more than one per row
        cut = micro_batches(batch.inputs, 3, budget, Others(most))
        assert len(cut) == most
        assert sorted(torch.cat(cut).tolist()) == list(range(len(lengths)))
        assert max(computed(batch, cut)) <= budget


def test_a_row_above_the_budget_goes_alone() -> None:
    batch = batch_of([12, 1, 12, 1])
    assert sorted(len(rows) for rows in micro_batches(batch.inputs, 4, 1, alone())) == [1, 1, 1, 1]


def test_unlike_lengths_do_not_pay_for_each_other() -> None:
    batch = batch_of([12, 1, 1, 1] * 4)
    fixed, packed = (micro_batches(batch.inputs, 4, tokens, alone()) for tokens in (None, 17 * 4))
    assert len(packed) <= len(fixed) == 4
    assert sum(computed(batch, packed)) < 0.6 * sum(computed(batch, fixed))


def test_prompts_shared_by_neighbours_stay_neighbours() -> None:
    batch = batch_of([3, 9, 1, 5])
    [rows] = micro_batches(batch.inputs, 1, 1000, alone())
    assert rows.tolist() == [0, 1, 2, 3]


def scored(*overrides: str):
    """`score_batch` by three models, and the length of every row they received."""
    asked: list[int] = []

    def said(scale: float):
        def answer(batch: ModelInputs) -> torch.Tensor:
            asked.extend(row.sum().item() for row in batch.attention_mask)
            return scale * batch.responses * batch.scored  # a different answer for every token

        return answer

    policy, reference, critic = said(-0.1), said(-0.2), said(0.3)
    algorithm = ["algorithm.adv_estimator=gae", "algorithm.rollout_correction.bypass_mode=false"]
    run = SimpleNamespace(
        spec=load_spec([], [], [*algorithm, *overrides]).spec,
        actor=SimpleNamespace(policy=lambda batch, **_: PolicyOutput(policy(batch), policy(batch))),
        ref=SimpleNamespace(log_probs=reference),
        critic=SimpleNamespace(values=critic),
        ranks=alone(),
    )
    rollouts = rollouts_of()
    scores = torch.zeros(len(rollouts.responses))
    timer = StepTimer(torch.device("cpu"))
    return score_batch(run, rollouts, RewardResult(scores, scores == 0), None, timer), asked


@pytest.mark.parametrize("budget", ["30", "90"])
def test_every_models_answers_come_back_to_their_rows(budget: str) -> None:
    plain, rows = scored()
    packed, shuffled = scored(f"actor.ppo_max_token_len_per_gpu={budget}")
    assert rows != shuffled
    assert sorted(rows) == sorted(shuffled)
    for name in ("old_log_probs", "ref_log_probs", "values"):
        assert torch.equal(getattr(packed, name), getattr(plain, name)), name
        assert getattr(plain, name).abs().sum() > 0
