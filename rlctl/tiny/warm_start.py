"""Supervised warm start: teach the embedded model about a third of the answers, and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from rlctl.errors import RunFailure
from rlctl.spec.embedded import EOS, RESPONSE_LENGTH, VOCABULARY, Recipe
from rlctl.tiny.task import Problem

#: Problems on which the stopping accuracy is measured: a standard error of about 0.01.
_NUM_MEASURED = 1024

OnStep = Callable[[int, float], None]  # step, accuracy


def warm_start(model: Any, problems: list[Problem], recipe: Recipe, seed: int, on_step: OnStep) -> float:
    """Train `model` in place on right answers until it passes `recipe.target_accuracy`.

    The accuracy of sampling at temperature 1 needs no sampling here: it is the mean probability of
    the one right answer, end of sequence included.

    Returns:
        The accuracy it stopped at.

    Raises:
        RunFailure: `recipe.max_steps` were not enough.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = _tokens(problems)
    measured = tokens[torch.randperm(len(tokens), generator=generator)[:_NUM_MEASURED]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / recipe.warmup_steps))
    model.train()
    for step in range(recipe.max_steps):
        batch = tokens[torch.randint(len(tokens), (recipe.batch_size,), generator=generator)]
        nll = _answer_nll(model, batch)
        optimizer.zero_grad()
        nll.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        warmup.step()
        accuracy = _accuracy(nll)
        # The batch's own figure is free but noisy and one update old: near the goal, measure.
        if accuracy > 0.8 * recipe.target_accuracy:
            with torch.no_grad():
                accuracy = _accuracy(_answer_nll(model, measured))
            if accuracy >= recipe.target_accuracy:
                model.eval()
                return accuracy
        on_step(step, accuracy)
    raise RunFailure(
        f"the embedded model's warm start did not reach an accuracy of {recipe.target_accuracy} "
        f"in {recipe.max_steps} steps",
        fix="try another trainer.seed",
    )


def _tokens(problems: list[Problem]) -> Tensor:
    """(N, P + T) int64: prompt, answer, end of sequence; all rows are of one length."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    return torch.tensor([[*(ids[char] for char in prompt + answer), ids[EOS]] for prompt, answer in problems])


def _answer_nll(model: Any, tokens: Tensor) -> Tensor:
    """Cross-entropy of the answer's tokens, (N, T), nats."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=RESPONSE_LENGTH).logits
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, -RESPONSE_LENGTH:], reduction="none")


def _accuracy(nll: Tensor) -> float:
    """Mean probability of the whole right answer."""
    return float(nll.detach().sum(1).neg().exp().mean())
