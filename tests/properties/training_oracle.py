"""PPO's optimizer steps in float64, from the papers; and what the real engines do, in processes of their own.

- policy: Schulman et al. 2017, arXiv 1707.06347, equation 7, as a mean over all tokens of the mini-batch;
- critic: the same with the value clip of OpenAI's baselines (`ppo2`), ½ · max of both squared errors;
- gradient clip: Pascanu et al. 2013, algorithm 1, with the norm of all parameters together;
- AdamW: Loshchilov and Hutter 2019, algorithm 2, without amsgrad.

Nothing here is taken from rlctl. Models are tiny; a rank holds its share of every mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from rlctl.batch import TokenBatch
from rlctl.engine.deepspeed import DeepSpeedCritic, DeepSpeedEngine
from rlctl.engine.ranks import Ranks
from rlctl.train.update import update
from rlctl.train.update_critic import update_critic
from tests.models import naive_log_probs, tiny_batch, tiny_model
from tests.unit.engine.test_critic import naive_values
from tests.unit.train.critics import spec_with
from tests.unit.train.updates import CLIP, DECOUPLED, HORIZON, ROWS, settings_of

MINI, EPOCHS, MICRO = 8, 2, 3
RATIO_CLIP = (0.2, 0.3)
#: Whose critic → its value clip. In bf16 a value near the clip falls on either side: another gradient.
VALUE_CLIPS = {"critic": 0.1, "critic without clip": 1e6}
#: All of them matter: every gradient is clipped, and the decay is as large as the steps.
WEIGHT_DECAY, BETAS, GRAD_CLIP, EPS = 0.3, (0.8, 0.95), 0.05, 1e-8
Weights = dict[str, Tensor]
#: Whose steps; ZeRO stage; dtype of the forward pass.
Case = tuple[str, int, torch.dtype]


def lr_of(number: int) -> float:
    return 4e-3 * (number + 1)


def batch_of() -> TokenBatch:
    batch = tiny_batch(tiny_model(), ROWS, seed=7, horizon=HORIZON)
    draw = torch.Generator().manual_seed(8)
    values, returns = torch.randn(2, len(batch.turns), generator=draw)
    return batch.with_columns(values=0.1 * values, returns=returns)


@dataclass(frozen=True)
class Trained:
    """Weights before and after all steps, and the mean norm of the gradients before the clip."""

    start: Weights
    end: Weights
    norm: float


def steps(start: Weights, loss_of: Callable[[Weights, TokenBatch], Tensor]) -> Trained:
    """All steps on one batch in float64."""
    weights = {name: tensor.double().requires_grad_() for name, tensor in start.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    norms: list[float] = []
    for _ in range(EPOCHS):
        for first_row in range(0, ROWS, MINI):
            mini = batch_of().pick(range(first_row, first_row + MINI))
            gradients = torch.autograd.grad(loss_of(weights, mini), list(weights.values()))
            norm = float(sum(g.square().sum() for g in gradients)) ** 0.5
            number, lr = len(norms) + 1, lr_of(len(norms))
            norms.append(norm)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                g = gradient * min(1.0, GRAD_CLIP / norm)
                first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
                second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g**2
                mean, square = first[name] / (1 - BETAS[0] ** number), second[name] / (1 - BETAS[1] ** number)
                change = lr * (mean / (square.sqrt() + EPS) + WEIGHT_DECAY * weight.detach())
                weights[name] = (weight.detach() - change).requires_grad_()
    end = {name: tensor.detach() for name, tensor in weights.items()}
    return Trained(start, end, sum(norms) / len(norms))


def policy_objective(weights: Weights, mini: TokenBatch) -> Tensor:
    log_probs, _ = naive_log_probs(lambda **inputs: functional_call(ACTOR, weights, (), inputs), mini)
    total = torch.zeros((), dtype=torch.float64)
    for log_prob, old, advantage in zip(
        log_probs, mini.old_log_probs.tolist(), mini.advantages.tolist(), strict=True
    ):
        ratio = (log_prob - old).exp()
        total = total - torch.minimum(
            ratio * advantage, ratio.clamp(1 - RATIO_CLIP[0], 1 + RATIO_CLIP[1]) * advantage
        )
    return total / len(mini.turns)


def value_objective(weights: Weights, mini: TokenBatch, clip: float) -> Tensor:
    body = {name.removeprefix("body."): x for name, x in weights.items() if name.startswith("body.")}
    values = naive_values(
        lambda **inputs: functional_call(BODY, body, (), inputs), weights["head.weight"], mini
    )
    total = torch.zeros((), dtype=torch.float64)
    for value, old, target in zip(
        values, mini.column("values").tolist(), mini.column("returns").tolist(), strict=True
    ):
        clipped = old + (value - old).clamp(-clip, clip)
        total = total + 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)
    return total / len(mini.turns)


ACTOR = tiny_model().double()
BODY = tiny_model().double().model
OBJECTIVES = {"actor": policy_objective}
OBJECTIVES |= {who: partial(value_objective, clip=clip) for who, clip in VALUE_CLIPS.items()}


# --- the real engines -------------------------------------------------------------------------------


def trained(ranks: Ranks, cases: list[Case]) -> dict[Case, Trained]:
    share = MINI // ranks.world_size
    rows = [start + ranks.rank * share + i for start in range(0, ROWS, MINI) for i in range(share)]
    batch, found = batch_of().pick(rows), {}
    for case in cases:
        who, stage, dtype = case
        options = {
            "zero_stage": stage,
            "dtype": dtype,
            "weight_decay": WEIGHT_DECAY,
            "betas": BETAS,
            "grad_clip": GRAD_CLIP,
        }
        if who == "actor":
            engine = DeepSpeedEngine(tiny_model(), ranks, temperature=1.0, **options)
            start = copied(engine)
            numbers = {"clip_low": RATIO_CLIP[0], "clip_high": RATIO_CLIP[1]}
            settings = settings_of(
                DECOUPLED | CLIP | {"rollout_is": None},
                epochs=EPOCHS,
                mini_rows=MINI,
                micro_sequences=MICRO,
                numbers=numbers,
            )
            metrics = update(batch, engine, ranks, settings, lr_of, 0).metrics
        else:
            engine = DeepSpeedCritic(tiny_model(), ranks, **options)
            start = copied(engine)
            spec = spec_with("token-mean", EPOCHS, MINI, MICRO, clip=VALUE_CLIPS[who])
            metrics = update_critic(batch, engine, ranks, spec, lr_of, 0)
            assert (0.05 < metrics["critic/vf_clipfrac"] < 0.95) == (who == "critic")
        norm = metrics["actor/grad_norm" if who == "actor" else "critic/grad_norm"]
        found[case] = Trained(start, copied(engine), norm)
    return found


def copied(engine: DeepSpeedEngine | DeepSpeedCritic) -> Weights:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in engine.weights()}
