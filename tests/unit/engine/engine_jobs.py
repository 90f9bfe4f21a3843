"""What the engine tests run in processes of their own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

from rlctl.batch import TokenBatch
from rlctl.engine import model as engine_model
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.fsdp import FsdpEngine, in_full
from rlctl.engine.layout import idle_inputs
from rlctl.engine.ranks import Ranks
from rlctl.run_spec import memory
from tests.models import tiny_batch, tiny_model

ROWS = 8
#: In place of a ZeRO stage: the engine on FSDP2, with tied weights.
FSDP = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def engine(
    ranks: Ranks,
    stage: int,
    dtype: str = "fp32",
    grad_clip: float = 1.0,
    seed: int = 0,
    kind: str = "llama",
):
    model = tiny_model(kind, seed=seed, tied=stage % 2 == 1 or kind == "gemma2")
    settings = {"dtype": DTYPES[dtype], "weight_decay": 0.1, "betas": (0.9, 0.95), "grad_clip": grad_clip}
    return actor_of(model, ranks, stage, **settings)


def actor_of(model, ranks: Ranks, stage: int, **settings) -> DeepSpeedEngine | FsdpEngine:
    """A policy under training; `stage`: of ZeRO, or `FSDP`."""
    kind = FsdpEngine if stage == FSDP else DeepSpeedEngine
    return kind(model, ranks, temperature=1.0, zero_stage=min(stage, 3), **settings)


def parts_of(batch: TokenBatch, size: int) -> list[TokenBatch]:
    """Consecutive parts of `size` episodes; the last may be smaller."""
    count = batch.num_episodes
    return [batch.pick(range(start, min(start + size, count))) for start in range(0, count, size)]


def weights_of(actor: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in actor.weights()}


def model_of(actor):
    return actor._model


def take_step(
    actor: DeepSpeedEngine,
    seed: int,
    micro: int,
    *,
    skip: bool = False,
    lr: float = 1e-2,
    bonus: float = 0.0,
):
    """One step on ROWS sequences spread over the ranks, each rank `micro` at a time."""
    backward(actor, seed, micro, bonus)
    return actor.step(lr=lr, skip=skip)


def backward(actor: DeepSpeedEngine, seed: int, micro: int, bonus: float = 0.0) -> None:
    batch = tiny_batch(tiny_model(), ROWS, seed=seed)
    micros = parts_of(parts_of(batch, ROWS // actor.ranks.world_size)[actor.ranks.rank], micro)
    for index, part in enumerate(micros):
        output = actor.policy(part.inputs, entropy_grad=bonus > 0, sum_pi_squared=bonus > 0)
        gain = output.log_probs * part.advantages + bonus * output.entropy
        loss = -gain.sum() / len(batch.advantages)
        assert (output.sum_pi_squared is not None) == output.entropy.requires_grad == (bonus > 0)
        actor.backward(loss, last=index == len(micros) - 1)


def gradients(ranks: Ranks, stage: int) -> dict[str, torch.Tensor]:
    """Accumulated gradients of a step in bf16, summed over the ranks."""
    actor = engine(ranks, stage, "bf16", kind="gemma2")  # with tied weights at every stage
    backward(actor, 1, 2)
    named = actor._model.named_parameters()
    found = {name: safe_get_full_grad(parameter).clone() for name, parameter in named}
    actor.step(lr=0.0)
    return found


def perturbation(ranks: Ranks, stage: int, dtype: str) -> dict[str, list[torch.Tensor]]:
    """Log-probs and weights before, within and after a perturbation; of a tied model, on this rank."""
    actor = engine(ranks, stage, dtype, kind="gemma2")
    inputs = tiny_batch(tiny_model(), ROWS, seed=1).inputs
    found: dict[str, list[torch.Tensor]] = {"log_probs": [], "weights": []}

    def look() -> None:
        with torch.no_grad():
            found["log_probs"].append(actor.policy(inputs).log_probs.clone())
        found["weights"].append(torch.cat([weight.flatten() for weight in weights_of(actor).values()]))

    look()
    with actor.perturbed(3):
        look()
    look()
    return found


def matrix(ranks: Ranks, cases: list[tuple[int, str, int]]):
    """Weights and gradient norms after two steps, the second of three being skipped."""
    found = {}
    for stage, dtype, micro in cases:
        actor = engine(ranks, stage, dtype)
        if stage != FSDP:
            assert actor.zero_stage == (1 if (stage, dtype) == (0, "bf16") else stage)
        start = weights_of(actor)
        first = take_step(actor, 1, micro)
        after_one = weights_of(actor)
        skipped = take_step(actor, 2, micro, skip=True)
        untouched = all(torch.equal(a, after_one[n]) for n, a in weights_of(actor).items())
        second = take_step(actor, 3, micro)
        found[stage, dtype, micro] = {
            "start": start,
            "weights": weights_of(actor),
            "norms": (first.grad_norm, second.grad_norm),
            "applied": (first.applied, skipped.applied, second.applied),
            "untouched": untouched,
        }
    return found


def in_step(ranks: Ranks, stage: int):
    """Two planned steps, of which rank 1 takes its part in one pass and idle ones; weights and layouts."""
    batch = tiny_batch(tiny_model(), ROWS, seed=1)
    actor, layouts = engine(ranks, stage), []
    share = parts_of(batch, ROWS // ranks.world_size)[ranks.rank]
    for _ in range(2):
        parts = parts_of(share, 1 if ranks.rank == 0 else ROWS)
        layouts.append(actor.plan([part.inputs for part in parts]))
        for number in range(ROWS // ranks.world_size):
            part = parts[number] if number < len(parts) else None
            output = actor.policy(part.inputs if part else idle_inputs())
            weights = part.advantages if part else torch.zeros(1)
            loss = -(output.log_probs * weights).sum() / len(batch.advantages)
            actor.backward(loss, last=number == ROWS // ranks.world_size - 1)
        actor.step(lr=1e-2)
        assert actor._module.reader.layout is None  # a run that is resumed here has none
    return weights_of(actor), layouts


def small_step(ranks: Ranks, stage: int) -> tuple[bool, float]:
    """Whether the float32 copies are the loaded weights; share of the weights above 0.01 that change."""
    actor = engine(ranks, stage, "bf16")
    loaded = dict(tiny_model(seed=0, tied=stage % 2 == 1).named_parameters())
    get = in_full if stage == FSDP else safe_get_full_fp32_param
    copies = {name: get(parameter) for name, parameter in model_of(actor).named_parameters()}
    same = all(torch.equal(copies[name].cpu(), loaded[name]) for name in loaded)
    before = weights_of(actor)
    take_step(actor, 1, ROWS, lr=1e-5)
    after = weights_of(actor)
    pairs = [
        (before[name][large], after[name][large])
        for name in before
        if (large := before[name].abs() > 0.01).any()
    ]
    changed, total = sum(int((a != b).sum()) for a, b in pairs), sum(len(a) for a, _ in pairs)
    return same, changed / total


def save_and_load(ranks: Ranks, stage: int, dtype: str, directory: str):
    """The step after a save, by the engine that saved and by a fresh one with other weights."""
    at = Path(directory) / f"{stage}-{dtype}-{ranks.world_size}"
    actor = engine(ranks, stage, dtype)
    take_step(actor, 1, 2)
    take_step(actor, 2, 4)
    actor.save(at)
    saved = weights_of(actor)
    fresh = engine(ranks, stage, dtype, seed=5)
    fresh.load(at)
    loaded = weights_of(fresh)
    norms = take_step(actor, 3, 2).grad_norm, take_step(fresh, 3, 2).grad_norm
    return saved, loaded, weights_of(actor), weights_of(fresh), norms


def export(ranks: Ranks, stage: int, directory: str, share: int):
    """Weights of the engine; `share`: bytes from which ranks share the export."""
    engine_model.SHARE_BYTES = share
    actor = engine(ranks, stage)
    take_step(actor, 1, 4)
    # Loaded with a warning, as many models on the hub have it; transformers refuses to save it.
    model_of(actor).generation_config.temperature = 0.6
    actor.export(Path(directory))
    return weights_of(actor)


def export_again(ranks: Ranks, directory: str):
    """Exports to one directory: shared and killed while the parts were joined, then as one file."""
    actor, rename = engine(ranks, 0), Path.rename
    killed = (KeyboardInterrupt,) if ranks.is_main else ()

    def once(path, target):
        rename(path, target)
        raise KeyboardInterrupt

    engine_model.SHARE_BYTES, Path.rename = 1000, once
    with contextlib.suppress(*killed):
        actor.export(Path(directory))
    if ranks.is_main:
        ranks.barrier()  # in place of that of the export
    left = sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*.safetensors"))
    ranks.barrier()
    engine_model.SHARE_BYTES, Path.rename = 2**30, rename
    actor.export(Path(directory))
    return left


def chunked(ranks: Ranks, stage: int, kind: str):
    """Steps whose output head runs in many recomputed chunks, and in a single piece."""
    whole, pieces = engine(ranks, stage, kind=kind), engine(ranks, stage, kind=kind)
    for seed in (1, 2):  # ZeRO-3 records the order of modules in its first step and relies on it after
        take_step(whole, seed, 4, bonus=0.5)
        memory.MAX_LOGITS = 100
        take_step(pieces, seed, 4, bonus=0.5)
        memory.MAX_LOGITS = 1 << 25
    return weights_of(whole), weights_of(pieces)


def bad_gradient(ranks: Ranks, stage: int, grad_clip: float):
    """A NaN reaches the gradient although the loss is finite; the step's result, and the weights."""
    from rlctl.errors import RunFailure

    actor = engine(ranks, stage, grad_clip=grad_clip)
    take_step(actor, 1, 4)
    before = weights_of(actor)

    def spoil(_module, _given, output):
        output.register_hook(lambda grad: grad * float("nan"))

    hook = model_of(actor).model.norm.register_forward_hook(spoil)
    try:
        result = take_step(actor, 2, 4)
        said = f"applied={result.applied}"
    except RunFailure as error:
        said = str(error)
    hook.remove()
    return said, before, weights_of(actor)


def load_nothing(ranks: Ranks, directory: str) -> str:
    from rlctl.errors import RunFailure

    try:
        engine(ranks, 0).load(Path(directory))
    except RunFailure as error:
        return str(error)
    return "loaded"


def dropout(ranks: Ranks, stage: int):
    """Two forward passes of one batch, with gradient, through a model that was configured with dropout."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    settings = {"dtype": torch.float32, "weight_decay": 0.0, "betas": (0.9, 0.95), "grad_clip": 1.0}
    actor = actor_of(model.train(), ranks, stage, **settings)
    batch = tiny_batch(tiny_model(), ROWS, seed=1)
    return [actor.policy(batch.inputs).log_probs.detach() for _ in range(2)]
