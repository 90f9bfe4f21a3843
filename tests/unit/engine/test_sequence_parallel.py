"""Rows that two ranks run together: the numbers of one rank, with half of the tokens on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.batch import Rollouts
from rlctl.errors import SpecError
from rlctl.reward.protocol import RewardResult
from rlctl.spec.load import load_spec
from rlctl.train.sample_and_grade import shared_rewards, shared_rollouts
from tests.processes import on_ranks, on_ranks_each
from tests.unit.engine.sequence_jobs import flash, refusals, trained

#: Update, ZeRO stage, layers run again in the backward pass, rows per pass.
CASES = [
    ("survivors, all terms", 0, False, 4),
    ("decoupled clip", 2, False, 16),
    ("gspo", 3, True, 4),
    ("bypass clip", 1, True, 2),
    ("bypass clip", 2, False, 16, 2),  # adapters of rank 2
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, list[Any]]]:
    where = tmp_path_factory.mktemp("sequence")
    return {
        ranks: on_ranks_each(ranks, trained, [(ranks, *case) for case in CASES], where=where)
        for ranks in (1, 2)
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_is_the_same(found: dict[int, dict[Any, list[Any]]], case: tuple[Any, ...]) -> None:
    [alone], both = found[1][1, *case], found[2][2, *case]
    for rank in both:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=3e-5, msg=name)
        assert rank["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        torch.testing.assert_close(rank["answers"], alone["answers"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["dumped"], alone["dumped"], rtol=1e-5, atol=2e-6)
        assert rank["widest"] == -(-alone["widest"] // 2)


def test_models_that_cannot_be_cut_up_are_refused(tmp_path: Path) -> None:
    for heads, kernel in on_ranks(2, refusals, where=tmp_path):
        assert heads == "2 attention heads and 1 of keys cannot be divided among 2 ranks"
        assert kernel == "attention eager does not work on parts of a sequence"


def test_flash_attention_over_two_ranks(tmp_path: Path) -> None:
    for plain, shared in on_ranks(2, flash, where=tmp_path):
        torch.testing.assert_close(shared, plain, rtol=1e-4, atol=5e-5)


class Group:
    """Two ranks' records, as `SequenceParallel.exchange` would bring them."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def exchange(self, _: Any) -> list[Any]:
        return list(self.values)


def rollouts_of(rank: int, prompt: int, response: int) -> Rollouts:
    """Four rows, the prompt's tokens all 10 × rank + row, the response's 100 more."""
    rows = torch.arange(4) + 10 * rank
    ids = torch.cat([rows[:, None].expand(4, prompt), 100 + rows[:, None].expand(4, response)], 1)
    ones, reasons = torch.ones(4, response), torch.zeros(4, dtype=torch.int8)
    return Rollouts(
        ids, torch.ones_like(ids).bool(), ids, ids[:, prompt:], ones.bool(), -ones, reasons,
        rows, torch.zeros(4, dtype=torch.int64), ("s",) * 4, ("",) * 4, ("",) * 4,
        tuple(str(int(row)) for row in rows),
    )  # fmt: skip


def test_rows_of_a_group_stand_mini_batch_by_mini_batch() -> None:
    first, second = rollouts_of(0, 2, 3), rollouts_of(1, 3, 1)
    rows = shared_rollouts(Group(first, second), first, mini_batches=2)
    assert rows.group_ids.tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert rows.response_texts == ("0", "1", "10", "11", "2", "3", "12", "13")
    assert rows.input_ids[0].tolist() == [0, 0, 0, 100, 100, 100]
    assert rows.attention_mask[0].tolist() == [False, *[True] * 5]
    assert rows.input_ids[2].tolist() == [10, 10, 10, 110, 0, 0]
    assert rows.response_mask.sum(1).tolist() == [3, 3, 1, 1] * 2
    assert rows.prompt_mask.sum(1).tolist() == [2, 2, 3, 3] * 2
    assert rows.extra_infos == ()
    assert shared_rollouts(None, first, 2) is first


def test_what_graders_say_is_that_of_all_rows() -> None:
    def graded(rank: int, **more: Any) -> RewardResult:
        return RewardResult(torch.arange(2.0) + 10 * rank, torch.tensor([True, rank == 0]), **more)

    both = (
        graded(0, parts={"a": torch.ones(2)}, timeouts={"time-out": 1}, errors_by_term={"a": 1}),
        graded(1, parts={"a": torch.zeros(2)}, timeouts={"time-out": 2}, errors=["why"]),
    )
    result = shared_rewards(Group(*both), both[0], mini_batches=1)
    assert result.scores.tolist() == [0, 1, 10, 11]
    assert result.valid.tolist() == [True, True, True, False]
    assert result.parts["a"].tolist() == [1, 1, 0, 0]
    assert (result.errors, result.errors_by_term, result.timeouts) == (["why"], {"a": 1}, {"time-out": 3})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["trainer.n_gpus_per_node=3", "data.train_batch_size=12"], "cannot form groups of 2"),
        (
            ["trainer.n_gpus_per_node=2", "algorithm.adv_estimator=gae"],
            "a critic does not support sequence parallelism",
        ),
        (["trainer.n_gpus_per_node=2", "model.attn_implementation=eager"], "does not work on parts"),
    ],
)
def test_what_does_not_combine_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec([], [], ["engine.sequence_parallel=2", *given])
