"""What the tests of compiled layers run in processes of their own."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from rlctl.engine.lora import add_lora
from rlctl.engine.ranks import Ranks
from tests.models import tiny_model
from tests.unit.engine.engine_jobs import DTYPES, actor_of, take_step, weights_of


def steps(ranks: Ranks, stage: int, dtype: str, lora_rank: int, recomputes: bool, compiles: bool):
    """Weights and gradient norms after two steps, and what torch counted."""
    model = tiny_model("qwen2")
    if lora_rank:
        torch.manual_seed(7)
        add_lora(model, rank=lora_rank, alpha=8.0, target_modules=["all-linear"])
    torch._dynamo.config.disable = False  # the tests disable it elsewhere
    torch._dynamo.reset()
    counters.clear()
    actor = actor_of(
        model,
        ranks,
        stage,
        dtype=DTYPES[dtype],
        weight_decay=0.1,
        betas=(0.9, 0.95),
        grad_clip=1.0,
        gradient_checkpointing=recomputes,
        compile_backend="aot_eager" if compiles else None,
    )
    norms = [take_step(actor, seed, 4).grad_norm for seed in (1, 2)]
    return {
        "norms": norms,
        "weights": weights_of(actor),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "limit": torch._dynamo.config.recompile_limit,
    }
