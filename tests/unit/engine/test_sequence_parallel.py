"""Rows that two ranks run together: the numbers of one rank, with half of the tokens on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import SpecError
from rlctl.run_spec.load import load_spec
from tests.processes import on_ranks, on_ranks_each
from tests.rounding import assert_same_steps
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
        assert_same_steps(rank["weights"], alone["weights"], alone["lrs"], alone["num_tokens"])
        assert rank["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert rank["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        torch.testing.assert_close(rank["answers"], alone["answers"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["seen"], alone["seen"], rtol=1e-5, atol=2e-6)
        assert rank["layout"].startswith("packed rows")
        assert rank["widest"] == -(-alone["widest"] // 2)


def test_models_that_cannot_be_cut_up_are_refused(tmp_path: Path) -> None:
    for heads, kernel in on_ranks(2, refusals, where=tmp_path):
        assert heads == "2 attention heads and 1 of keys cannot be divided among 2 ranks"
        assert kernel == "attention eager does not work on parts of a sequence"


def test_flash_attention_over_two_ranks(tmp_path: Path) -> None:
    for plain, shared in on_ranks(2, flash, where=tmp_path):
        torch.testing.assert_close(shared, plain, rtol=1e-4, atol=5e-5)


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
