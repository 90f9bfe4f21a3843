"""What the tests of sharding within groups of ranks run in processes of their own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rlctl.engine.deepspeed import FrozenPolicy, load_partitioned
from rlctl.engine.deepspeed_setup import frozen_settings
from rlctl.engine.fsdp import FsdpReference
from rlctl.engine.ranks import Ranks
from tests.models import tiny_batch, tiny_model
from tests.unit.engine.engine_jobs import DTYPES, FSDP, ROWS, actor_of, take_step, weights_of
from tests.unit.engine.lora_jobs import SETTINGS


def trained(ranks: Ranks, stage: int, dtype: str, size: int | None, root: str) -> dict[str, object]:
    """Log-probs, norms and weights of three steps, the second of which is skipped; and the numbers held."""
    actor = actor_of(tiny_model(tied=True), ranks, stage, dtype=DTYPES[dtype], shard_size=size, **SETTINGS)
    inputs = tiny_batch(tiny_model(), ROWS, seed=9).inputs
    norms, log_probs = [], []
    for seed in (1, 2, 3):
        norms.append(take_step(actor, seed, 2, skip=seed == 2).grad_norm)
        with torch.no_grad():  # between steps, as old log-probs are computed
            log_probs.append(actor.policy(inputs).log_probs.float().clone())
    weights = weights_of(actor)
    found = {"norms": norms, "log_probs": log_probs, "weights": weights, **held(actor, stage)}
    if stage == FSDP:  # a state of either layout continues in the other
        place = Path(root) / f"{dtype}-{size}" / "engine"
        if ranks.is_main:
            place.mkdir(parents=True)
        ranks.barrier()
        actor.save(place)
        ranks.barrier()
        other = actor_of(
            tiny_model(tied=True, seed=5),
            ranks,
            stage,
            dtype=DTYPES[dtype],
            shard_size=None if size else 2,
            **SETTINGS,
        )
        other.load(place)
        take_step(other, 4, 2)
        take_step(actor, 4, 2)
        found["continued"] = weights_of(actor), weights_of(other)
    return found


def held(actor, stage: int) -> dict[str, int]:
    """Numbers that this rank holds: of weights, of a second copy of them, of a moment."""
    parameters = list(actor._module.parameters())
    if stage == FSDP:
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        moments = [state["exp_avg"] for state in actor._optimizer.state.values()]
        moment = sum(m.to_local().numel() if isinstance(m, DTensor) else m.numel() for m in moments)
        return {"own": sum(p.numel() for p in local), "second": 0, "moment": moment}
    second = [p.ds_secondary_tensor for p in parameters]
    moment = sum(state["exp_avg"].numel() for state in actor._optimizer.state.values())
    own = sum(p.ds_tensor.numel() for p in parameters)
    return {"own": own, "second": sum(t.numel() for t in second if t is not None), "moment": moment}


def reference(ranks: Ranks, stage: int, size: int | None) -> torch.Tensor:
    """Log-probs of a model that is never trained, twice."""
    options = {"dtype": torch.float32, "temperature": 1.0, "shard_size": size}
    if stage == FSDP:
        frozen = FsdpReference(tiny_model(), ranks, **options)
    else:
        settings = frozen_settings(torch.float32, size)
        model = tiny_model()
        model = load_partitioned(settings, lambda: model, model.config)
        frozen = FrozenPolicy(model, ranks, zero_stage=3, **options)
    inputs = tiny_batch(tiny_model(), ROWS, seed=9).inputs
    first, second = (frozen.log_probs(inputs).clone() for _ in range(2))
    assert torch.equal(first, second)
    return first
