"""A custom rollout engine: samples with PyTorch from a copy of the policy, without a key-value cache.

    rlctl train model.path=embedded rollout.name=examples/custom_engine.py:plain_sampling \
        rollout.engine_params.max_rows=64
"""

from __future__ import annotations

import copy

import torch
from pydantic import BaseModel, Field

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.assemble import assemble, positions, sample_ids, synced
from rlctl.rollout.engines import EngineCapabilities, EngineContext
from rlctl.rollout.protocol import Policy, Sampled, Sampling


class Options(BaseModel, extra="forbid"):
    """Parameters of the engine: `rollout.engine_params.*`."""

    max_rows: int = Field(default=256, ge=1)
    """Responses sampled at once."""


class PlainSampling:
    """Samples token by token; every row has a separate random generator."""

    def __init__(self, context: EngineContext) -> None:
        self.model = copy.deepcopy(context.model).to(context.device).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.tokenizer, self.device = context.tokenizer, context.device
        self.max_rows = context.params.max_rows
        self.version: int | None = 0

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Copies all weights by name; for tied weights, one of the names is enough."""
        self.version = None  # until the sync has finished
        for name, tensor in policy.weights():
            if name in self.weights:
                self.weights[name].copy_(tensor)
        self.version = policy_version

    @torch.no_grad()
    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """Samples n responses per prompt; a response depends only on its seed and its prompt."""
        version = synced(self.version)  # raises RunFailure if the last sync did not finish
        ids = prompts.prompt_ids.to(self.device).repeat_interleave(n, dim=0)
        mask = prompts.prompt_mask.to(self.device).repeat_interleave(n, dim=0)
        seeds = [step_seed % 2**31 + place for place in sample_ids(prompts.group_ids, n).tolist()]
        length = sampling.max_response_length
        tokens = torch.full((len(ids), length), self.tokenizer.pad_token_id, device=self.device)
        log_probs = torch.zeros(len(ids), length, device=self.device)
        lengths = torch.zeros(len(ids), dtype=torch.int64, device=self.device)
        stopped = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        for start in range(0, len(ids), self.max_rows):
            rows = slice(start, start + self.max_rows)
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[rows]]
            text, attention = ids[rows], mask[rows]
            for place in range(length):
                logits = self.model(
                    input_ids=text, attention_mask=attention.long(), position_ids=positions(attention)
                ).logits[:, -1]
                scores = (logits.float() / sampling.temperature).log_softmax(-1)
                if sampling.greedy:
                    drawn = scores.argmax(-1, keepdim=True)
                else:
                    noise = torch.stack([torch.rand(scores.shape[1], generator=g) for g in generators])
                    drawn = (scores - (-noise.log()).log().to(scores)).argmax(-1, keepdim=True)
                running = ~stopped[rows]
                tokens[rows, place] = torch.where(running, drawn[:, 0], tokens[rows, place])
                log_probs[rows, place] = torch.where(running, scores.gather(1, drawn)[:, 0], 0.0)
                lengths[rows] += running
                stopped[rows] |= running & (drawn[:, 0] == self.tokenizer.eos_token_id)
                text = torch.cat([text, drawn], dim=1)
                attention = torch.cat([attention, running[:, None]], dim=1)
        reason = torch.where(stopped, FINISH_REASONS.index("stop"), FINISH_REASONS.index("length"))
        sampled = Sampled(tokens, log_probs, lengths, reason.to(torch.int8))
        return assemble(prompts, sampled, n=n, tokenizer=self.tokenizer, policy_version=version)

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
