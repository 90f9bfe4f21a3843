"""Settings, batches and engines of the update tests; what runs in processes of its own is here too."""

from __future__ import annotations

from dataclasses import fields

import torch

from rlctl.algos.rules import LossRule
from rlctl.batch import TrainBatch
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.protocol import PolicyOutput, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.spec.resolve import correction_rules
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update
from tests.models import tiny_batch, tiny_model

ROWS, HORIZON = 16, 6
RS = {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.6_1.6,1.5"}
BYPASS, DECOUPLED = {"bypass_mode": True}, {"bypass_mode": False}
REINFORCE, CLIP = {"loss_type": "reinforce"}, {"loss_type": "ppo_clip"}

#: name → correction, loss aggregation, epochs, sequences per mini-batch over all ranks
CASES: dict[str, tuple[dict[str, object], str, int, int]] = {
    "sequence": (BYPASS | REINFORCE | {"rollout_is": "sequence"}, "token-mean", 1, 16),
    "token": (BYPASS | REINFORCE | {"rollout_is": "token"}, "seq-mean-token-sum", 1, 8),
    "geometric": (BYPASS | REINFORCE | {"rollout_is": "geometric"}, "seq-mean-token-mean", 1, 16),
    "survivors": (
        BYPASS | REINFORCE | RS | {"rollout_is": "sequence", "loss_denominator": "after_rejection"},
        "seq-mean-token-mean",
        1,
        8,
    ),
    "rejection only": (BYPASS | REINFORCE | RS | {"rollout_is": None}, "token-mean", 1, 16),
    "no settling": (
        BYPASS | REINFORCE | RS | {"rollout_is": "token", "rollout_is_batch_normalize": False},
        "token-mean",
        2,
        8,
    ),
    "bypass clip": (BYPASS | CLIP | RS | {"rollout_is": "token"}, "seq-mean-token-sum-norm", 1, 16),
    "decoupled clip": (DECOUPLED | CLIP | RS | {"rollout_is": "sequence"}, "token-mean", 2, 8),
    "decoupled reinforce": (
        DECOUPLED | REINFORCE | RS | {"rollout_is": "token", "loss_denominator": "after_rejection"},
        "token-mean",
        2,
        4,
    ),
    "verl": (
        BYPASS
        | REINFORCE
        | {"dialect": "verl", "rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3"}
        | {"rollout_rs_threshold": "0.6_1.6,0.3"},
        "token-mean",
        1,
        16,
    ),
}


def settings_of(
    correction: dict[str, object],
    agg_mode: str = "token-mean",
    epochs: int = 1,
    mini_rows: int = ROWS,
    micro_rows: int = ROWS,
    max_nonfinite_fraction: float = 0.1,
) -> UpdateSettings:
    spec = RolloutCorrectionSpec.model_validate(correction)
    return UpdateSettings(
        rules=correction_rules(spec),
        bypass=spec.bypass_mode,
        loss=LossRule(spec.loss_type, clip_low=0.2, clip_high=0.3),
        agg_mode=agg_mode,
        horizon=HORIZON,
        ppo_epochs=epochs,
        mini_rows=mini_rows,
        micro_rows=micro_rows,
        max_nonfinite_fraction=max_nonfinite_fraction,
    )


def batch_of(model, rows: int = ROWS, seed: int = 3) -> TrainBatch:
    return tiny_batch(model, rows, seed=seed, horizon=HORIZON, gap=0.3)


def select(batch: TrainBatch, rows: list[int]) -> TrainBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return TrainBatch(**{name: None if x is None else x[rows] for name, x in tensors.items()})


class PlainEngine:
    """A `TrainEngine` of plain torch and SGD, which keeps the gradient of its last step."""

    def __init__(self, model) -> None:
        self.model = model
        self.module = PolicyModule(model, 1.0)
        self.gradient: dict[str, torch.Tensor] = {}
        self.num_forwards = 0

    def policy(self, batch: TrainBatch, *, entropy_grad=False, sum_pi_squared=False) -> PolicyOutput:
        self.num_forwards += 1
        columns = (
            batch.input_ids,
            batch.attention_mask,
            batch.position_ids,
            batch.responses,
            batch.response_mask,
        )
        return PolicyOutput(*self.module(*columns, entropy_grad=entropy_grad, sum_pi_squared=sum_pi_squared))

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, *, lr: float, skip: bool = False) -> StepResult:
        named = dict(self.model.named_parameters())
        self.gradient = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = float(torch.stack([g.square().sum() for g in self.gradient.values()]).sum().sqrt())
        if not skip:
            with torch.no_grad():
                for name, gradient in self.gradient.items():
                    named[name] -= lr * gradient
        self.model.zero_grad()
        return StepResult(norm, applied=not skip)


def alone() -> Ranks:
    return Ranks(0, 1, torch.device("cpu"))


def invariance(ranks: Ranks, plan: list[tuple[str, int]]):
    """Weights, metrics and what was seen after one `update` of each (case, micro-batch size)."""
    found = {}
    for name, micro in plan:
        correction, agg_mode, epochs, mini = CASES[name]
        share = mini // ranks.world_size
        mine = [
            start + ranks.rank * share + i for start in range(0, ROWS, mini) for i in range(share)
        ]  # as `rank_positions` deals out prompts
        actor = DeepSpeedEngine(
            tiny_model(),
            ranks,
            zero_stage=0,
            dtype=torch.float32,
            temperature=1.0,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            grad_clip=1.0,
        )
        batch = select(batch_of(tiny_model()), mine)
        settings = settings_of(correction, agg_mode, epochs, share, micro)
        outcome = update(batch, actor, ranks, settings, lambda number: 2e-3 * (number + 1), 0)
        found[name, micro] = {
            "metrics": outcome.metrics,
            "num_updates": outcome.num_updates,
            "rows": mine,
            "seen": (outcome.training_log_probs, outcome.weights, outcome.keep_mask),
            "weights": {n: t.detach().clone() for n, t in actor.weights()},
        }
    return found
