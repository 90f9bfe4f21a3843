"""Updates with rows that ranks run together, in processes of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from rlctl.engine import layout
from rlctl.engine.deepspeed import DeepSpeedEngine, FrozenPolicy
from rlctl.engine.deepspeed_setup import recompute_layers
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import add_lora
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import share_rows
from rlctl.errors import UsageError
from rlctl.train.update import update
from tests.flash_attention import use_flash
from tests.models import tiny_model
from tests.unit.train.updates import CASES, ROWS, batch_of, settings_of

LR = 1e-2


def a_model(attention: str = "sdpa"):
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, vocab_size=23,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def trained(
    ranks: Ranks, size: int, name: str, stage: int, recompute: bool, micro: int, lora_rank: int = 0
) -> dict[str, object]:
    """Weights, metrics and log-probs of the updates on one batch, and the most tokens a layer ran at once."""
    sequence, data = share_rows(ranks, size)
    case, model, widths = CASES[name], a_model(), []
    model.model.layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    frozen = FrozenPolicy(
        a_model(), ranks, zero_stage=stage, dtype=torch.float32, temperature=1.0, sequence=sequence
    )
    if lora_rank:
        add_lora(model, rank=lora_rank, alpha=4, target_modules=["all-linear"])
    actor = DeepSpeedEngine(
        model, ranks, zero_stage=stage, dtype=torch.float32, temperature=1.0, weight_decay=0.1,
        betas=(0.9, 0.95), grad_clip=1.0, gradient_checkpointing=recompute, sequence=sequence,
    )  # fmt: skip
    share = case.mini_rows // data.world_size
    starts = range(0, ROWS, case.mini_rows)
    mine = [start + data.rank * share + row for start in starts for row in range(share)]
    batch = batch_of(a_model()).pick(mine)
    with torch.no_grad():
        before = actor.policy(batch.inputs, sum_pi_squared=True)
    # With checkpointing the actor computes a shared prompt once per response, the frozen policy once.
    frozen_log_probs, top_k = frozen.log_probs(batch.inputs), frozen.top_k(batch.inputs, 3, 20)
    torch.testing.assert_close(frozen_log_probs, before.log_probs, rtol=1e-5, atol=1e-6)
    assert torch.equal(top_k[:, 0], frozen_log_probs)
    widths.clear()
    settings = settings_of(
        case.correction, **case.options, epochs=case.epochs, mini_rows=case.mini_rows, micro_sequences=micro
    )
    with pytest.MonkeyPatch.context() as patched:  # alone, such short rows would be padded
        patched.setattr(layout, "choose_layout", lambda *_: "packed")
        outcome = update(batch, actor, data, settings, lambda _: LR, 0)
    return {
        "weights": {name: value.detach().clone() for name, value in actor.weights()},
        "lrs": [LR] * outcome.num_updates,
        "num_tokens": len(batch.advantages),
        "metrics": outcome.metrics,
        "answers": [*(values.sum() for values in vars_of(before)), top_k],
        "seen": outcome.seen.training_log_probs,
        "layout": outcome.layout,
        "widest": max(widths),
    }


def vars_of(output):
    return output.log_probs, output.entropy, output.sum_pi_squared


def refusals(ranks: Ranks):
    """What each model that cannot be shared is refused with."""
    sequence, _ = share_rows(ranks, 2)
    found = []
    for model in (tiny_model(), a_model("eager")):
        try:
            sequence.install(model)
        except UsageError as error:
            found.append(error.what)
    return found


def flash(ranks: Ranks):
    """Log-probs and gradients with flash attention over both ranks, and with sdpa on each."""
    found = []
    for attention, sequence in (("sdpa", None), ("flash", share_rows(ranks, 2)[0])):
        model = a_model()
        with pytest.MonkeyPatch.context() as patched:
            if attention == "flash":
                use_flash(model, patched)
            module = PolicyModule(model, 1.0, share_prompts=False, sequence=sequence)
            recompute_layers(model)
            log_probs, *_ = module(batch_of(a_model()).inputs)
            log_probs.square().sum().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        if sequence:
            dist.all_reduce(gradients)
        found.append((log_probs.detach(), gradients))
    return found
