"""An actor, a critic and a reference policy side by side in one process, as a PPO run has them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rlctl.batch import Episode, Task, TokenBatch, TokenSequence, Turn
from rlctl.engine.deepspeed import DeepSpeedCritic, FrozenPolicy
from rlctl.engine.fsdp import FsdpCritic, FsdpReference
from rlctl.engine.ranks import Ranks
from tests.models import VOCABULARY, tiny_model
from tests.unit.engine.engine_jobs import DTYPES, FSDP, ROWS, engine, parts_of, take_step, weights_of

LR = 1e-2
SEED = 3


def value_model(seed: int = SEED):
    return tiny_model("qwen2", seed=seed)


def critic(ranks: Ranks, stage: int, dtype: str, seed: int = SEED) -> DeepSpeedCritic | FsdpCritic:
    kind = FsdpCritic if stage == FSDP else DeepSpeedCritic
    return kind(
        value_model(seed),
        ranks,
        zero_stage=min(stage, 3),
        dtype=DTYPES[dtype],
        weight_decay=0.1,
        betas=(0.9, 0.95),
        grad_clip=1.0,
    )


def batch_and_targets(seed: int):
    """Siblings of two prompts, so that prompts are shared, and what their values should become."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=draw) for length in (3, 5)]
    lengths = torch.randint(1, 7, (ROWS,), generator=draw).tolist()
    responses = [torch.randint(2, VOCABULARY, (length,), generator=draw) for length in lengths]
    episodes = []
    for row, response in enumerate(responses):
        prompt = prompts[row // (ROWS // 2)]
        turn = Turn(response, torch.zeros(len(response)), torch.zeros_like(response), "stop")
        episodes.append(
            Episode(Task(prompt, text=""), row, (TokenSequence.of_turn(prompt, turn),), response="")
        )
    batch = TokenBatch.of(episodes)
    targets = batch.units.episode.spread(torch.randn(ROWS, generator=draw))
    return replace(batch, advantages=targets), targets


def fit(values: DeepSpeedCritic | FsdpCritic, seed: int, micro: int):
    """One step of the critic on ROWS sequences spread over the ranks; grad norm and values before it."""
    batch, targets = batch_and_targets(seed)
    share = parts_of(batch, ROWS // values.ranks.world_size)[values.ranks.rank]
    micros, before = parts_of(share, micro), []
    for index, part in enumerate(micros):
        predicted = values.values(part.inputs)
        before.append(predicted.detach())
        error = (predicted - part.advantages).square()
        values.backward(error.sum() / len(targets), last=index == len(micros) - 1)
    return values.step(lr=LR).grad_norm, torch.cat(before)


def side_by_side(ranks: Ranks, cases: list[tuple[int, str]], directory: str):
    """Per (stage, dtype): two critic steps between actor steps, then save, load elsewhere, one more."""
    found = {}
    for stage, dtype in cases:
        at = Path(directory) / f"{stage}-{dtype}-{ranks.world_size}"
        actor, values = engine(ranks, stage, dtype), critic(ranks, stage, dtype)
        reference_of = FsdpReference if stage == FSDP else partial(FrozenPolicy, zero_stage=stage)
        frozen = reference_of(tiny_model("qwen2"), ranks, dtype=DTYPES[dtype], temperature=0.7)
        start = weights_of(values)
        reference = [frozen.log_probs(batch_and_targets(1)[0].inputs)]
        norm, first = fit(values, 1, 2)
        take_step(actor, 1, 4)
        second_norm, second = fit(values, 2, 4)
        take_step(actor, 3, 2)
        reference.append(frozen.log_probs(batch_and_targets(1)[0].inputs))

        values.save(at)
        saved = weights_of(values)
        fresh = critic(ranks, stage, dtype, seed=9)
        fresh.load(at)
        loaded = weights_of(fresh)
        fit(values, 3, 2)
        fit(fresh, 3, 2)
        found[stage, dtype] = {
            "start": start,
            "values": (first, second),
            "norms": (norm, second_norm),
            "saved": saved,
            "loaded": loaded,
            "after": (weights_of(values), weights_of(fresh)),
            "actor": weights_of(actor),
            "reference": reference,
        }
    alone = {}
    for stage in (0, 1):  # odd stages are tied: another model
        actor = engine(ranks, stage)
        take_step(actor, 1, 4)
        take_step(actor, 3, 2)
        alone[stage] = weights_of(actor)
    return found, alone
