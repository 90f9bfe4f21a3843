"""What sequence parallelism changes in counts, budgets and memory of a run that is planned."""

from __future__ import annotations

import pytest

from rlctl.errors import SpecError
from rlctl.run_spec.explain import BatchArithmetic
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import memory_parts
from rlctl.run_spec.model_size import ModelSize, Shape
from rlctl.run_spec.run_spec import RunSpec

GIVEN = ("trainer.n_gpus_per_node=4", "data.train_batch_size=16", "data.max_prompt_length=512",
         "data.max_response_length=1536", "rollout.n=2",
         "actor.ppo_mini_batch_size=16", "actor.ppo_micro_batch_size_per_gpu=4")  # fmt: skip


def spec_of(*more: str) -> RunSpec:
    return load_spec([], [], [*GIVEN, *more]).spec


def test_rows_are_shared_by_the_ranks_of_a_group() -> None:
    alone, together = spec_of(), spec_of("engine.sequence_parallel=2")
    assert BatchArithmetic(together).samples_per_rank == 2 * BatchArithmetic(alone).samples_per_rank


def test_a_budget_is_that_of_each_gpu() -> None:
    budget = "actor.ppo_max_token_len_per_gpu=1024"
    together = spec_of("engine.sequence_parallel=2", budget)
    assert together.pass_tokens == 2048
    with pytest.raises(SpecError, match="may have 2048"):
        spec_of(budget)
    with pytest.raises(SpecError, match="use 1024 or more"):
        spec_of("engine.sequence_parallel=2", "actor.ppo_max_token_len_per_gpu=1023")


def test_activations_are_cut_up() -> None:
    shape = Shape(layers=4, hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocab=1000)
    size = ModelSize("given", 300_000, shape)

    def largest(*more: str) -> dict[str, float]:
        return {part.name: part.num_bytes or 0.0 for part in memory_parts(spec_of(*more), size)}

    alone, together = largest(), largest("engine.sequence_parallel=4")
    assert together["last norm and states"] == alone["last norm and states"] / 4
    assert together["activations"] < alone["activations"]
    budget = "actor.ppo_max_token_len_per_gpu=2048"
    assert (
        largest(budget)["last norm and states"]
        == largest(budget, "engine.sequence_parallel=4")["last norm and states"]
    )
