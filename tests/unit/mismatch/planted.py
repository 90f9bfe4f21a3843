"""Engines with injected faults, and the expected report of `diagnose mismatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlctl.batch import Turn
from rlctl.data.schema import Message, Row
from rlctl.mismatch.causes import Cause, causes
from rlctl.mismatch.examine import Examination, Sides, examine
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from rlctl.run_spec.model import RECIPE
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
    ask: Callable[[list[Request]], list[Request]] = lambda requests: requests
    sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling
    report: Callable[[Request, Turn], Tensor] = lambda request, turn: turn.log_probs  # (t,)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        asked = self.ask(list(requests))
        turns = self.inner.sample(asked, self.sampling(sampling))
        pairs = zip(asked, turns, strict=True)
        return [replace(turn, log_probs=self.report(request, turn)) for request, turn in pairs]


@torch.no_grad()
def raw(request: Request, turn: Turn) -> Tensor:
    """(t,) log-probs at temperature 1 from the full logits."""
    prompt = torch.tensor(request.token_ids)
    logits = MODEL(torch.cat([prompt, turn.token_ids])[None]).logits[0, len(prompt) - 1 : -1]
    found: Tensor = logits.log_softmax(-1).gather(-1, turn.token_ids[:, None]).squeeze(-1)
    return found


def with_start(requests: list[Request]) -> list[Request]:
    """The same prompts with one more start token, that of `with_start_token`."""
    start = with_start_token().bos_token_id
    return [replace(request, token_ids=[start, *request.token_ids]) for request in requests]


def look(engine: Any, *, model: Any = MODEL, sampling: Sampling = PLAIN, **sides: Any) -> Examination:
    sides = {"tokenizer": TOKENIZER, "rows": ROWS, **sides}
    return examine(Sides(model=model, engine=engine, sampling=sampling, **sides))


def found(engine: Any, **sides: Any) -> list[Cause]:
    return causes(look(engine, **sides))


def names(found: list[Cause]) -> list[str]:
    return [cause.name for cause in found]


def plain(model: Any = MODEL, **options: Any) -> HFRollout:
    return HFRollout(model, TOKENIZER, "cpu", **options)
