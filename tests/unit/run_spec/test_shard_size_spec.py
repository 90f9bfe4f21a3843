"""`engine.shard_size`: what it needs, and the memory and the time that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.engine.deepspeed_setup import deepspeed_config, frozen_settings
from rlctl.errors import SpecError
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import machine_of
from rlctl.run_spec.memory import memory_parts
from rlctl.run_spec.model_size import model_size
from rlctl.run_spec.placement import Placement
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


def plan(machine: str, *overrides: str) -> Placement:
    nodes = machine.split("x", maxsplit=1)[0] if machine.count("x") == 2 else "1"
    spec = spec_of(f"trainer.nnodes={nodes}", "data.train_batch_size=256", "rollout.n=8", *overrides)
    slow = replace(machine_of(machine), network=3e9)  # bytes/s per GPU: Ethernet
    return Placement(spec, model_size(spec.model), slow)


def update_of(placement: Placement) -> dict[str, float]:
    return next(stage.moved for stage in placement.stages() if stage.name == "update")


@pytest.mark.parametrize("engine", [FSDP, ZERO3])
def test_groups_within_nodes_gather_over_the_links_of_the_node(engine: str) -> None:
    whole, groups = plan("4x8xh100", engine), plan("4x8xh100", engine, GROUPS)
    work = whole.work
    assert update_of(whole) == {"network": work.update_passes * work.gathered + work.reduced}
    gathered, weights = work.update_passes * work.gathered, 2 * P
    assert work.gathered == work.micro_batches * weights
    if engine == FSDP:  # sums a shard of the gradients over the nodes, there and back
        expected = {"GPU to GPU": gathered + work.reduced, "network": 2 * work.reduced / 8}
    else:  # sums gradients over all ranks, and gathers the weights anew after each update
        updates = whole.spec.updates_per_batch
        expected = {"GPU to GPU": gathered, "network": work.reduced + updates * weights}
    assert update_of(groups) == pytest.approx(expected)
    for stage in ("score", "update"):
        assert groups.seconds()[stage] < whole.seconds()[stage]
    assert groups.seconds()["generate"] == whole.seconds()["generate"]


def test_groups_of_several_nodes_still_gather_over_the_network() -> None:
    assert set(update_of(plan("4x8xh100", FSDP, "engine.shard_size=16"))) == {"network"}


@pytest.mark.parametrize("engine", [FSDP, ZERO3])
def test_a_group_of_all_ranks_is_no_group(engine: str) -> None:
    assert plan("8xh100", engine, GROUPS).seconds() == plan("8xh100", engine).seconds()


def test_adapters_alone_are_gathered_anew() -> None:
    lora = ("model.lora_rank=16", "actor.use_kl_loss=false", "ref.path=null")
    full, adapters = plan("4x8xh100", ZERO3, GROUPS), plan("4x8xh100", ZERO3, GROUPS, *lora)
    assert update_of(adapters)["network"] < 0.05 * update_of(full)["network"]


def test_sharding_within_nodes_is_suggested_where_it_is_faster() -> None:
    def suggested(machine: str, *overrides: str) -> dict[str, float]:
        return {each.setting: each.seconds.middle for each in plan(machine, *overrides).suggestions()}

    slow = ("4x8xh100", ZERO3)
    found = suggested(*slow)["engine.shard_size=8"]
    assert found == plan(*slow, GROUPS).intervals["whole step"].middle
    assert found < plan(*slow).intervals["whole step"].middle
    for other in (("8xh100", ZERO3), (*slow, GROUPS), ("4x8xh100", "engine.zero_stage=2")):
        assert not any(setting.startswith("engine.shard_size") for setting in suggested(*other))
