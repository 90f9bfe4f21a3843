"""Mixtures of experts, what is sampled from them, and what the tests of routing replay run on ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.batch import Episode, Task, TokenBatch, TokenSequence
from rlctl.engine import layout
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import share_rows
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling

EXPERTS, CHOSEN = 8, 2
SHAPE = {
    "vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": CHOSEN, "initializer_range": 0.5,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
KINDS = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 8, "intermediate_size": 24, "head_dim": 8}
    | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 8},
}
TOKENIZER = SimpleNamespace(eos_token_id=1, pad_token_id=0)
PROMPTS = [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [7, 8, 9], [7, 8, 9]]
SAMPLING = Sampling(8, temperature=0.7, with_experts=True)


def built(kind: str, **shape: int):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | KINDS[kind] | shape)
    return AutoModelForCausalLM.from_config(config).eval()


def sampled(model, dtype=None, noise: float = 0.0):
    """Engine, requests and turns of the same model with weights that are rounded or changed."""
    engine = HFRollout(model, TOKENIZER, "cpu", dtype=dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    return engine, requests, engine.sample(requests, SAMPLING)


def batch_of(requests, turns) -> TokenBatch:
    return TokenBatch.of(
        [
            Episode(
                Task(request.token_ids, "", place // 2),
                place % 2,
                (TokenSequence.of_turn(request.token_ids, turn),),
                "",
            )
            for place, (request, turn) in enumerate(zip(requests, turns, strict=True))
        ]
    )


#: ZeRO stage, and ranks that process each row together.
CASES = [(3, 1), (1, 2)]


def model_and_batch():
    """A model whose heads two ranks can share, and a batch that another one sampled."""
    model = built("qwen3_moe", num_key_value_heads=2)
    _, requests, turns = sampled(model, noise=0.3)
    return model, batch_of(requests, turns)


def replayed(ranks: Ranks, stage: int, size: int) -> tuple[torch.Tensor, float]:
    """Log-probs, and the norm of the gradient of their weighted sum."""
    model, batch = model_and_batch()
    sequence, data = share_rows(ranks, size)
    actor = DeepSpeedEngine(
        model, ranks, zero_stage=stage, dtype=torch.float32, temperature=1.0, weight_decay=0.0,
        betas=(0.9, 0.95), grad_clip=0.0, gradient_checkpointing=True, sequence=sequence,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:  # alone, such short rows would be padded
        patched.setattr(layout, "choose_layout", lambda *_: "packed")
        log_probs = actor.policy(batch.inputs).log_probs
    weights = torch.linspace(-1, 1, len(log_probs)) / data.world_size
    actor.backward((log_probs * weights).sum(), last=True)
    return log_probs.detach(), actor.step(lr=0.0).grad_norm
