"""A custom rollout engine: samples with PyTorch from a copy of the policy, without a key-value cache.

    rlctl train model.path=embedded rollout.name=examples/custom_engine.py:plain_sampling \
        rollout.engine_params.max_rows=64
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby

import torch
from pydantic import BaseModel, Field

from rlctl.parts import (
    ROLLOUT_ENGINES,
    EngineCapabilities,
    EngineContext,
    Policy,
    Request,
    Sampling,
    Turn,
    synced,
)


class Options(BaseModel, extra="forbid"):
    """Parameters of the engine: `rollout.engine_params.*`."""

    max_rows: int = Field(default=256, ge=1)
    """Requests sampled at once."""


class PlainSampling:
    """Samples token by token; every request has a separate random generator."""

    def __init__(self, context: EngineContext) -> None:
        self.model = copy.deepcopy(context.model).to(context.device).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.end, self.device = context.tokenizer.eos_token_id, context.device
        self.max_rows = context.params.max_rows
        self.version: int | None = 0

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Copies all weights by name; for tied weights, one of the names is enough."""
        self.version = None  # until the sync has finished
        for name, tensor in policy.weights():
            if name in self.weights:
                self.weights[name].copy_(tensor)
        self.version = policy_version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """Samples one turn per request; requests with the same tokens are adjacent, and sampled together."""
        version = synced(self.version)  # raises RunFailure if the last sync did not finish
        turns: list[Turn] = []
        for _, equal in groupby(requests, key=lambda request: tuple(request.token_ids)):
            siblings = list(equal)
            for start in range(0, len(siblings), self.max_rows):
                turns += self._sample(siblings[start : start + self.max_rows], sampling, version)
        return turns

    @torch.no_grad()
    def _sample(self, requests: list[Request], sampling: Sampling, version: int) -> list[Turn]:
        """One turn per request; all have the same tokens."""
        text = torch.tensor([list(request.token_ids) for request in requests], device=self.device)
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        limits = [request.limit(sampling) for request in requests]
        prompt_length, columns = text.shape[1], []
        for _ in range(max(limits)):
            logits = self.model(input_ids=text).logits[:, -1]
            scores = (logits.float() / sampling.temperature).log_softmax(-1)
            if sampling.greedy:
                drawn = scores.argmax(-1, keepdim=True)
            else:
                noise = torch.stack([torch.rand(scores.shape[1], generator=g) for g in generators])
                drawn = (scores - (-noise.log()).log().to(scores)).argmax(-1, keepdim=True)
            columns.append(scores.gather(1, drawn))
            text = torch.cat([text, drawn], dim=1)
            if (text[:, prompt_length:] == self.end).any(1).all():
                break
        turns = []
        rows = zip(text[:, prompt_length:].cpu(), torch.cat(columns, dim=1).cpu(), limits, strict=True)
        for tokens, log_probs, limit in rows:
            ends = (tokens[:limit] == self.end).nonzero()
            length = int(ends[0]) + 1 if len(ends) else limit
            token_ids = tokens[:length].clone()
            reason = "stop" if len(ends) else "length"
            versions = torch.full_like(token_ids, version)
            turns.append(Turn(token_ids, log_probs[:length].clone(), versions, reason))
        return turns

    def close(self) -> None:
        """Frees the memory."""
        del self.model, self.weights


@ROLLOUT_ENGINES.register(
    label="Plain sampling with PyTorch",
    params=Options,
    capabilities=EngineCapabilities(starts_with_policy=True),
)
def plain_sampling(context: EngineContext) -> PlainSampling:
    """A copy of the policy in the trainer's process."""
    return PlainSampling(context)
