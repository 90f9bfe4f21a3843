"""Engines with injected faults, and the expected report of `diagnose mismatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlctl.batch import Prompts, Rollouts
from rlctl.data.schema import Message, Row
from rlctl.mismatch.causes import Cause, causes
from rlctl.mismatch.examine import Examination, Sides, examine
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.spec.model import RECIPE
from rlctl.tiny.model import build_tokenizer
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model

TEXTS = ("12+34=", "9=", "1+1=", "77+8=", "0=", "5+55=", "31+4=", "8+8=")
ROWS = [Row("sums", (Message("user", text),), "0", index=i) for i, text in enumerate(TEXTS)]
PLAIN = Sampling(max_response_length=7)
NUCLEUS = replace(PLAIN, temperature=0.7, top_p=0.8)
MODEL = random_model(1)


def with_start_token() -> Any:
    """A tokenizer that has a start token, which its template does not write."""
    tokenizer = build_tokenizer(RECIPE)
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    return tokenizer


@dataclass
class Engine:
    """`inner`, except that something happens to what goes in or comes out; takes no weights."""

    inner: Any
    ask: Callable[[Prompts], Prompts] = lambda prompts: prompts
    sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling
    answer: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts

    def generate(self, prompts: Prompts, sampling: Sampling, **options: Any) -> Rollouts:
        return self.answer(self.inner.generate(self.ask(prompts), self.sampling(sampling), **options))


def reporting(compute: Callable[[Rollouts], Tensor]) -> Callable[[Rollouts], Rollouts]:
    """Other log-probs (B, T) for the same tokens."""
    return lambda rollouts: replace(
        rollouts, rollout_log_probs=compute(rollouts).masked_fill(~rollouts.response_mask, 0.0)
    )


@torch.no_grad()
def naive(model: Any, rollouts: Rollouts, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """(B, T) log-probs at temperature 1 from the full logits, whatever positions and mask are given."""
    horizon = rollouts.responses.shape[1]
    logits = model(
        input_ids=rollouts.input_ids, attention_mask=attention_mask.long(), position_ids=position_ids
    ).logits[:, -horizon - 1 : -1]
    return logits.log_softmax(-1).gather(-1, rollouts.responses[..., None]).squeeze(-1)


def raw(rollouts: Rollouts) -> Tensor:
    return naive(MODEL, rollouts, rollouts.attention_mask, rollouts.position_ids)


def look(engine: Any, *, model: Any = MODEL, sampling: Sampling = PLAIN, **sides: Any) -> Examination:
    sides = {"tokenizer": TOKENIZER, "rows": ROWS, **sides}
    return examine(Sides(model=model, engine=engine, sampling=sampling, **sides))


def found(engine: Any, **sides: Any) -> list[Cause]:
    return causes(look(engine, **sides))


def names(found: list[Cause]) -> list[str]:
    return [cause.name for cause in found]


def plain(model: Any = MODEL, **options: Any) -> HFRollout:
    return HFRollout(model, TOKENIZER, "cpu", **options)
