"""`engine.shard_size`: what it needs, and the memory that it takes."""

from __future__ import annotations

import pytest
import torch

from rlctl.engine.deepspeed_setup import deepspeed_config, frozen_settings
from rlctl.errors import SpecError
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import memory_parts
from rlctl.run_spec.model_size import model_size
from rlctl.run_spec.run_spec import RunSpec

P = 7_615_616_512
BASE = ("data.train_files=x", "model.path=Qwen/Qwen2.5-7B", "engine.dtype=bf16", "ref.path=Qwen/Qwen2.5-7B")
NODES = ("trainer.n_gpus_per_node=8", "trainer.nnodes=4", "actor.use_kl_loss=true")
FSDP, ZERO3, GROUPS = "engine.name=fsdp", "engine.zero_stage=3", "engine.shard_size=8"


def spec_of(*overrides: str) -> RunSpec:
    return load_spec([], [], [*BASE, *NODES, *overrides]).spec


def parts(*overrides: str) -> dict[str, float]:
    spec = spec_of(*overrides)
    found = memory_parts(spec, model_size(spec.model))
    names = [part.name for part in found if part.num_bytes]
    assert len(names) == len(set(names))
    return {part.name: part.num_bytes for part in found if part.num_bytes}


def test_fsdp_shards_everything_within_the_group() -> None:
    whole, groups = parts(FSDP), parts(FSDP, GROUPS)
    sharded = ("weights", "gradients", "optimizer (AdamW)", "gradients of the step", "reference's weights")
    for name in sharded:
        assert groups[name] == 4 * whole[name]
    assert groups["weights"] == 2 * P / 8
    assert {name: groups[name] for name in whole if name not in sharded} == {
        name: whole[name] for name in whole if name not in sharded
    }


def test_deepspeed_holds_a_second_copy_of_the_weights() -> None:
    whole, groups = parts(ZERO3), parts(ZERO3, GROUPS)
    added = {"weights of a group": 2 * P / 8, "reference's weights of a group": 2 * P / 8}
    assert groups == whole | added


def test_deepspeed_is_told_the_size() -> None:
    config = deepspeed_config(frozen_settings(torch.bfloat16, 8))
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8
    assert (
        "zero_hpz_partition_size"
        not in deepspeed_config(frozen_settings(torch.bfloat16))["zero_optimization"]
    )


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        ((GROUPS,), "only ZeRO-3 and FSDP2 shard the weights", "engine.zero_stage: 3"),
        ((ZERO3, "engine.shard_size=3"), "32 ranks cannot be divided into groups of 3", "write 8"),
        ((FSDP, "engine.shard_size=5"), "32 ranks cannot be divided into groups of 5", "write 8"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], what: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(*overrides)
    [problem] = caught.value.problems
    assert problem.key == "engine.shard_size"
    assert what in problem.what
    assert fix in (problem.fix or "")
