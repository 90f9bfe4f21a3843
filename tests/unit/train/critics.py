"""A critic of plain torch, what its batch holds, and the update of the real one in processes of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.batch import ModelInputs, TokenBatch
from rlctl.engine.deepspeed import DeepSpeedCritic
from rlctl.engine.protocol import StepResult
from rlctl.engine.ranks import Ranks
from rlctl.engine.values import ValueModule
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.update_critic import update_critic
from tests.models import tiny_batch, tiny_model
from tests.unit.train.updates import HORIZON, ROWS, Micro, sizes_of

LENGTHS = [6, 1, 3, 0, 5, 2, 6, 4, 1, 3, 6, 2, 4, 5, 1, 3]
CLIP = 0.2

#: name → loss aggregation, epochs, sequences per mini-batch over all ranks
CASES = {
    "one step": ("token-mean", 1, 16),
    "epochs": ("token-mean", 2, 8),
    "sequences": ("seq-mean-token-mean", 2, 4),
    "sums": ("seq-mean-token-sum", 1, 8),
    "horizon": ("seq-mean-token-sum-norm", 1, 8),
}


def spec_of(name: str, *, micro_sequences: int = ROWS, micro_tokens: int | None = None) -> RunSpec:
    agg_mode, epochs, mini = CASES[name]
    return spec_with(agg_mode, epochs, mini, micro_sequences, micro_tokens)


def spec_with(
    agg_mode: str, epochs: int, mini: int, micro: int, tokens: int | None = None, clip: float = CLIP
) -> RunSpec:
    """Batches of `ROWS` prompts with one response each."""
    values = {
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": ROWS,
        "data.max_response_length": HORIZON,
        "critic.cliprange_value": clip,
        "critic.loss_agg_mode": agg_mode,
        "critic.ppo_epochs": epochs,
        "actor.ppo_mini_batch_size": mini,
        "critic.ppo_micro_batch_size_per_gpu": micro,
        "critic.ppo_max_token_len_per_gpu": "null" if tokens is None else tokens,
    }
    return load_spec([], [], [f"{key}={value}" for key, value in values.items()]).spec


def batch_of(seed: int = 5) -> TokenBatch:
    """Old values near zero, where the new ones start."""
    batch = tiny_batch(tiny_model("qwen2"), ROWS, seed=seed, horizon=HORIZON, lengths=LENGTHS)
    draw = torch.Generator().manual_seed(seed)
    values, returns = torch.randn(2, sum(LENGTHS), generator=draw)
    return batch.with_columns(values=0.3 * values, returns=returns)


def lr_of(number: int) -> float:
    return 2e-3 * (number + 1)


def lrs_of(name: str) -> list[float]:
    """Learning rates of the steps of a case."""
    _, epochs, mini = CASES[name]
    return list(map(lr_of, range(epochs * ROWS // mini)))


class PlainCritic:
    """A `CriticEngine` of plain torch and SGD, which keeps the gradient of its last step."""

    def __init__(self) -> None:
        self.module = ValueModule(tiny_model("qwen2"))
        torch.manual_seed(1)
        torch.nn.init.normal_(self.module.head.weight, std=0.1)
        self.gradient: dict[str, torch.Tensor] = {}
        self.num_forwards = 0

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        return "as it is"

    def values(self, inputs: ModelInputs) -> torch.Tensor:
        self.num_forwards += 1
        return self.module(inputs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        named = dict(self.module.named_parameters())
        self.gradient = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = float(torch.stack([g.square().sum() for g in self.gradient.values()]).sum().sqrt())
        if not skip:
            with torch.no_grad():
                for name, gradient in self.gradient.items():
                    named[name] -= lr * gradient
        self.module.zero_grad()
        return StepResult(norm, applied=not skip)


def invariance(ranks: Ranks, plan: list[tuple[str, Micro]]):
    """Weights and metrics after one update of the real critic of each (case, rows or budget per pass)."""
    found = {}
    for name, micro in plan:
        mini = CASES[name][2]
        share = mini // ranks.world_size
        mine = [start + ranks.rank * share + i for start in range(0, ROWS, mini) for i in range(share)]
        critic = DeepSpeedCritic(
            tiny_model("qwen2"),
            ranks,
            zero_stage=0,
            dtype=torch.float32,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            grad_clip=1.0,
        )
        spec = spec_of(name, **sizes_of(micro))
        metrics = update_critic(batch_of().pick(mine), critic, ranks, spec, lr_of, 0)
        found[name, micro] = (metrics, {n: t.detach().clone() for n, t in critic.weights()})
    return found
