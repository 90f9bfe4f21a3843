"""An adapted policy under DeepSpeed, and the base it still contains."""

from __future__ import annotations

from pathlib import Path

import torch

from rlctl.engine.fsdp import FsdpEngine
from rlctl.engine.lora import BasePolicy, adapter_parameters, add_lora
from rlctl.engine.ranks import Ranks
from tests.models import tiny_batch, tiny_model
from tests.unit.engine import engine_jobs
from tests.unit.engine.engine_jobs import DTYPES, ROWS, take_step, weights_of

RANK, ALPHA = 3, 6.0
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.95), "grad_clip": 1.0}


def adapted_model(seed: int = 0):
    model = tiny_model("qwen2", tied=True)
    torch.manual_seed(seed)
    add_lora(model, RANK, ALPHA, ["q_proj", "down_proj"])
    return model


def adapter_of(actor):
    """The adapter, and the parameters that DeepSpeed had to gather for it."""
    if isinstance(actor, FsdpEngine):
        return actor.adapter(), list(adapter_parameters(engine_jobs.model_of(actor)).values())
    asked, gathered = [], actor._gathered

    def spy(parameters):
        asked.extend(parameters)
        return gathered(parameters)

    actor._gathered = spy
    adapter = actor.adapter()
    actor._gathered = gathered
    return adapter, asked


def adapted(ranks: Ranks, cases: list[tuple[int, str]], directory: str):
    """Per (stage, dtype): steps with reads of the base model between them; save, load elsewhere, one more."""
    found = {}
    batch = tiny_batch(tiny_model(), ROWS, seed=1)
    for stage, dtype in cases:
        at = Path(directory) / f"{stage}-{dtype}-{ranks.world_size}"

        def actor_of(model, stage=stage, dtype=dtype):
            return engine_jobs.actor_of(model, ranks, stage, dtype=DTYPES[dtype], **SETTINGS)

        model = adapted_model()
        actor = actor_of(model)
        base = BasePolicy(actor, model)
        start, bases = weights_of(actor), [base.log_probs(batch.inputs)]
        steps = [take_step(actor, 1, 4)]
        bases.append(base.log_probs(batch.inputs))
        untouched = weights_of(actor)
        steps.append(take_step(actor, 2, 4, skip=True))
        same = all(torch.equal(tensor, untouched[name]) for name, tensor in weights_of(actor).items())
        steps.append(take_step(actor, 3, 2))
        bases.append(base.log_probs(batch.inputs))
        with torch.no_grad():
            log_probs = actor.policy(batch.inputs).log_probs
        actor.save(at / "engine")
        actor.export(at / "model")
        adapter, asked = adapter_of(actor)
        (at / "adapter").mkdir(parents=True, exist_ok=True)
        if ranks.is_main:
            adapter.save(at / "adapter")
        frozen = {name: tensor.float().cpu().clone() for name, tensor in actor.weights(merged=False)}
        saved = weights_of(actor)
        fresh = actor_of(adapted_model(seed=8))
        fresh.load(at / "engine")
        loaded = weights_of(fresh)
        take_step(actor, 4, 2)
        take_step(fresh, 4, 2)
        found[stage, dtype] = {
            "start": start,
            "applied": [step.applied for step in steps],
            "norms": [step.grad_norm for step in steps],
            "skipped is same": same,
            "bases": bases,
            "log_probs": log_probs,
            "saved": saved,
            "loaded": loaded,
            "after": (weights_of(actor), weights_of(fresh)),
            "model": str(at / "model"),
            "adapter": (str(at / "adapter"), adapter.tensors),
            "adapter asked for": len(asked) == sum(p.requires_grad for p in asked) == len(adapter.tensors),
            "frozen": frozen,
        }
    return found
