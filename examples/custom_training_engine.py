"""A custom training engine: AdamW of PyTorch, on one process or with gradients summed over several.

rlctl train model.path=embedded engine.name=examples/custom_training_engine.py:plain_adamw
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlctl.parts import (
    TRAINING_ENGINES,
    ModelInputs,
    PolicyModule,
    PolicyOutput,
    StepResult,
    TrainContext,
    UsageError,
)


class PlainAdamW:
    """The policy in one copy per rank; a critic is not supported."""

    scales_gradients = True  # `step` multiplies gradients by `grad_scale`

    def __init__(self, context: TrainContext) -> None:
        settings, model = context.settings, context.model
        model = model.to(context.ranks.device, settings["dtype"]).eval()  # no dropout
        self.module = PolicyModule(model, context.temperature, ranks=context.ranks)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        options = {"betas": settings["betas"], "weight_decay": settings["weight_decay"]}
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.0, **options)
        self.limit, self.ranks = settings["grad_clip"] or float("inf"), context.ranks

    def policy(self, inputs: ModelInputs, **asked: bool) -> PolicyOutput:
        """Log-probs and entropy of the scored tokens."""
        return self.module(inputs, **asked)

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """Chooses packed or padded rows."""
        return self.module.reader.plan(passes)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a share of the loss; the shares of all ranks are summed after the last one."""
        loss.backward()
        for weight in self.trained if last and self.ranks.world_size > 1 else ():
            dist.all_reduce(weight.grad)

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """Applies the gradient, or discards it if `skip` is set or it is not finite."""
        for weight in self.trained:
            if weight.grad is not None:
                weight.grad *= grad_scale
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, self.limit))
        applied = not skip and norm < float("inf")
        self.optimizer.param_groups[0]["lr"] = lr
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(grad_norm=norm, applied=applied)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in the model, for the rollout engine."""
        yield from self.module.model.state_dict().items()

    def save(self, directory: Path) -> None:
        """Writes what `load` reads."""
        if self.ranks.is_main:
            torch.save([self.module.state_dict(), self.optimizer.state_dict()], directory / "state.pt")

    def load(self, directory: Path) -> None:
        """Restores weights and moments."""
        module, optimizer = torch.load(directory / "state.pt", map_location=self.ranks.device)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)

    def export(self, directory: Path) -> None:
        """Writes a Hugging Face directory."""
        if self.ranks.is_main:
            self.module.model.save_pretrained(directory)


@TRAINING_ENGINES.register(label="AdamW of PyTorch")
def plain_adamw(context: TrainContext) -> Any:
    """Builds the policy's engine."""
    if context.temperature is None:
        raise UsageError("this engine has no critic", fix="use an estimator without a critic")
    return PlainAdamW(context)
