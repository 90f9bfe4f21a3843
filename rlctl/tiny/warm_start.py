"""Supervised warm start: teach the embedded model most of the answers, then make it unsure of them.

A model stopped in the middle of its lessons is often confidently wrong: whole groups of responses
repeat one mistake and there is nothing to compare. So it is taught further than it shall start, and
its output head is then scaled down until the accuracy of sampling is the one wanted: every prompt has
right answers to be found and wrong ones to be unlearnt, whatever the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from rlctl.errors import RunFailure
from rlctl.spec.embedded import EOS, RESPONSE_LENGTH, VOCABULARY, EmbeddedRecipe
from rlctl.tiny.task import Problem

#: Problems on which the stopping accuracy is measured: a standard error of about 0.01.
_NUM_MEASURED = 1024

OnStep = Callable[[int, float], None]  # step, accuracy


def warm_start(
    model: Any, problems: list[Problem], recipe: EmbeddedRecipe, seed: int, on_step: OnStep
) -> float:
    """Train `model` in place on right answers up to `recipe.taught_accuracy`, then soften it.

    The accuracy of sampling at temperature 1 needs no sampling here: it is the mean probability of
    the one right answer, end of sequence included.

    Returns:
        The accuracy it is left at, `recipe.target_accuracy`.

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
        if accuracy > 0.8 * recipe.taught_accuracy:
            accuracy = _measure(model, measured)
            if accuracy >= recipe.taught_accuracy:
                model.eval()
                if recipe.target_accuracy < recipe.taught_accuracy:
                    accuracy = _soften(model, measured, recipe.target_accuracy)
                return accuracy
        on_step(step, accuracy)
    raise RunFailure(
        f"the embedded model's warm start did not reach an accuracy of {recipe.taught_accuracy} "
        f"in {recipe.max_steps} steps",
        fix="try another trainer.seed",
    )


@torch.no_grad()
def _soften(model: Any, measured: Tensor, target: float) -> float:
    """Scale the output head by the factor in (0, 1) that brings the accuracy down to `target`."""
    head = model.get_output_embeddings().weight
    taught = head.clone()
    low, high = 0.0, 1.0  # at 0 every token is equally likely, at 1 the model is as taught
    for _ in range(20):
        middle = 0.5 * (low + high)
        head.copy_(taught * middle)
        low, high = (middle, high) if _measure(model, measured) < target else (low, middle)
    return _measure(model, measured)


@torch.no_grad()
def _measure(model: Any, tokens: Tensor) -> float:
    """Accuracy of sampling at temperature 1 on these problems."""
    return _accuracy(_answer_nll(model, tokens))


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
