"""States of engines that were saved on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from rlctl.engine.deepspeed import DeepSpeedCritic, DeepSpeedEngine
from rlctl.engine.fsdp import FsdpCritic, FsdpEngine, in_full
from rlctl.engine.ranks import Ranks
from tests.hooks import python_is
from tests.models import tiny_batch, tiny_model
from tests.unit.engine.engine_jobs import DTYPES, FSDP, ROWS, actor_of, take_step
from tests.unit.engine.lora_jobs import SETTINGS, adapted_model


def moved(ranks: Ranks, kind: str, stage: int, dtype: str, root: str, before: int, python: str):
    """Loads what `before` ranks saved (0: nothing), and saves the state after one step more.

    Returns:
        The state as loaded, and as saved.
    """
    python_is(python)
    settings = {"dtype": DTYPES[dtype], **SETTINGS}
    if kind == "critic":
        critic = FsdpCritic if stage == FSDP else DeepSpeedCritic
        actor = critic(tiny_model(seed=before), ranks, zero_stage=min(stage, 3), **settings)
    else:
        model = adapted_model(before) if kind == "lora" else tiny_model(kind, seed=before)
        actor = actor_of(model, ranks, stage, **settings)
    checkpoints = Path(root) / f"{kind}-{stage}-{dtype}"
    if before:
        actor.load(checkpoints / f"of-{before}" / "engine")
    loaded = state_of(actor) if before else {}
    for seed in (1, 2):
        _step(actor, seed)
    to = checkpoints / f"of-{ranks.world_size}" / "engine"
    if ranks.is_main:
        to.mkdir(parents=True)
    ranks.barrier()
    actor.save(to)
    ranks.barrier()
    assert [path.name for path in checkpoints.iterdir() if not path.name.startswith("of-")] == []
    return loaded, state_of(actor)


def _step(actor, seed: int) -> None:
    if isinstance(actor, DeepSpeedEngine | FsdpEngine):
        take_step(actor, seed, 2)
        return
    share = ROWS // actor.ranks.world_size
    batch = tiny_batch(tiny_model(), ROWS, seed=seed).pick(list(range(actor.ranks.rank * share, ROWS)))
    values = actor.values(batch.pick(list(range(share))).inputs)
    actor.backward((values - 1.0).square().sum(), last=True)
    actor.step(lr=1e-2)


def state_of(actor) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's numbers of each that is trained; copies, in full."""
    found = {name: tensor.detach().float().cpu().clone() for name, tensor in actor.weights()}
    if isinstance(actor, FsdpEngine | FsdpCritic):
        for name, parameter in actor._module.named_parameters():
            for key, value in actor._optimizer.state[parameter].items() if parameter.requires_grad else ():
                found[f"{name} {key}"] = in_full(value).clone()
            found[f"{name} fp32"] = in_full(parameter.detach()).clone()
        return found
    for name, parameter in actor._engine.module.named_parameters():
        if parameter.requires_grad and actor.zero_stage:
            found[f"{name} fp32"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found
