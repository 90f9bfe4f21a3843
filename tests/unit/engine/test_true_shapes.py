"""The memory estimate against passes at true shapes without memory, and against one of sixteen ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlctl.engine.deepspeed_setup import recompute_layers
from rlctl.engine.ranks import Ranks
from rlctl.prefix import body_of
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import memory_parts
from rlctl.run_spec.model_size import PUBLISHED, ModelSize
from tests.models import config_of, tiny_batch, tiny_model
from tests.processes import Job
from tests.unit.engine.engine_jobs import engine

TOKENS = 2048
#: Published model, its family, number of layers (None: all).
SHAPES = [
    ("Qwen/Qwen2.5-7B", "qwen2", None),
    ("meta-llama/Meta-Llama-3-8B", "llama", 2),
    ("Qwen/Qwen3-8B", "qwen3", 2),
]


@pytest.mark.parametrize(("name", "family", "layers"), SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_at_true_shape_saves_what_is_estimated(
    name: str, family: str, layers: int | None, checkpointing: bool
) -> None:
    """Tensors without memory: what autograd keeps of one row of 2,048 tokens in bf16."""
    size = PUBLISHED[name]
    shape = replace(size.shape, layers=layers or size.shape.layers)
    config = config_of(family, shape)
    kept: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if checkpointing:
            recompute_layers(model)
        own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        own.add(mask.untyped_storage()._cdata)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if (storage := tensor.untyped_storage()._cdata) not in own:
                kept[storage] = tensor
            return tensor

        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    given = ["engine.dtype=bf16", f"actor.ppo_max_token_len_per_gpu={TOKENS}", "data.max_prompt_length=1024"]
    given += [
        "data.max_response_length=1024",
        f"model.enable_gradient_checkpointing={str(checkpointing).lower()}",
    ]
    parts = memory_parts(load_spec([], [], given).spec, ModelSize("a test", size.num_parameters, shape))
    [activations] = [part.num_bytes for part in parts if part.name == "activations"]
    last_norm = TOKENS * shape.hidden * (4 + 2)
    # With two layers only, rotary tables and ids are about 1 %.
    assert saved == pytest.approx(activations + last_norm, rel=0.02)


def shares(result: str, world_size: int, rank: int) -> int:
    """Stage → bytes of the optimizer and of the weights of one rank, whose peers do nothing."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    found = {}
    for stage in (1, 2, 3):
        actor = engine(Ranks(rank, world_size, torch.device("cpu")), stage, "bf16", kind="llama")
        if stage < 3:  # without peers there are no whole weights for a pass of stage 3
            inputs = tiny_batch(tiny_model(), 2, seed=1).inputs
            actor.backward(-actor.policy(inputs).log_probs.sum(), last=True)
            actor.step(lr=1e-2)
        states = [
            tensor for state in actor._optimizer.state.values() for tensor in state.values() if tensor.ndim
        ]
        masters = [p for group in actor._optimizer.param_groups for p in group["params"]]
        masters += getattr(actor._engine.optimizer, "fp32_partitioned_groups_flat", [])
        whole = actor._model.parameters()
        weights = [getattr(p, "ds_tensor", p) for p in whole]
        found[stage] = (
            sum(t.nbytes for t in {t.data_ptr(): t for t in [*states, *masters]}.values()),
            sum(t.nbytes for t in {t.data_ptr(): t for t in weights}.values()),
        )
    torch.save(found, result)
    return 0


@pytest.mark.parametrize("rank", [0, 9])
def test_sixteen_ranks_hold_a_sixteenth_of_what_is_sharded(rank: int, tmp_path: Path) -> None:
    job = Job(shares, str(tmp_path / "result"), 16, rank, log=tmp_path / "log")
    assert job.wait() == 0, job.output
    found = torch.load(tmp_path / "result")
    for stage, (optimizer, weights) in found.items():
        model = tiny_model("llama", tied=stage % 2 == 1)
        size = sum(p.numel() for p in model.parameters())
        given = [
            "engine.dtype=bf16",
            f"engine.zero_stage={stage}",
            "trainer.n_gpus_per_node=8",
            "trainer.nnodes=2",
        ]
        given += ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
        parts = {
            part.name: part.num_bytes
            for part in memory_parts(load_spec([], [], given).spec, ModelSize("", size))
        }
        # Each part is rounded up to a whole number of elements.
        made = 1 if stage < 3 else 4 / 12  # the moments are made in the first step
        assert optimizer == pytest.approx(made * parts["optimizer (AdamW)"], rel=0.1)
        assert weights == pytest.approx(parts["weights"], rel=0.1)
