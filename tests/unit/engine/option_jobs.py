"""What the tests of checkpointed activations and of offloading run in processes of their own."""

from __future__ import annotations

import torch

from rlctl.engine.deepspeed import DeepSpeedCritic, DeepSpeedEngine
from rlctl.engine.deepspeed_setup import keeping_buffers
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import add_lora
from rlctl.engine.ranks import Ranks
from rlctl.errors import UsageError
from tests.models import tiny_batch, tiny_model
from tests.unit.engine.engine_jobs import DTYPES, parts_of, take_step, weights_of

#: ZeRO stage, dtype, rank of adapters (0: none), recompute layers, offload.
Case = tuple[int, str, int, bool, str]


def option_engine(ranks: Ranks, case: Case) -> DeepSpeedEngine:
    stage, dtype, lora_rank, checkpointing, offload = case
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5  # must not come in through training mode
    if lora_rank:
        torch.manual_seed(7)
        add_lora(model, rank=lora_rank, alpha=8.0, target_modules=["all-linear"])
    return DeepSpeedEngine(
        model,
        ranks,
        zero_stage=stage,
        dtype=DTYPES[dtype],
        temperature=1.0,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        grad_clip=1.0,
        gradient_checkpointing=checkpointing,
        offload=offload,
    )


def steps(ranks: Ranks, cases: list[Case]):
    """Weights and gradient norms after three steps, the second of which is skipped."""
    found = {}
    for case in cases:
        actor = option_engine(ranks, case)
        start = weights_of(actor)
        results = [take_step(actor, seed, 4, skip=seed == 2) for seed in (1, 2, 3)]
        found[case] = {
            "start": start,
            "weights": weights_of(actor),
            "norms": [result.grad_norm for result in results],
            "applied": [result.applied for result in results],
        }
    return found


def with_config(ranks: Ranks, given: dict[str, object]) -> tuple[int, str]:
    """The bucket size in effect; and where the configuration is refused, the message."""
    settings = {"zero_stage": 2, "dtype": torch.float32, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    try:
        engine = DeepSpeedEngine(
            tiny_model(), ranks, temperature=1.0, grad_clip=1.0, more_config=given, **settings
        )
    except UsageError as error:
        return 0, str(error)
    return engine._engine.zero_reduce_bucket_size(), ""


def critic_updates(ranks: Ranks, options: list[dict[str, object]]):
    """Metrics and weights of one batch's updates of a critic under ZeRO-3, by its options."""
    from rlctl.train.update_critic import update_critic
    from tests.unit.train import critics

    found = []
    for option in options:
        critic = DeepSpeedCritic(
            tiny_model("qwen2"),
            ranks,
            zero_stage=3,
            dtype=torch.float32,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            grad_clip=1.0,
            **option,
        )
        spec = critics.spec_of("epochs")
        metrics = update_critic(critics.batch_of(), critic, ranks, spec, critics.lr_of, 0)
        found.append((metrics, {name: tensor.detach().clone() for name, tensor in critic.weights()}))
    return found


def accumulated(ranks: Ranks, cases: list[Case], micro_batches: int):
    """By case: gradient norm and Σ|first moment| of a step; under None those of float32 sums of gradients."""
    batch = tiny_batch(tiny_model(), micro_batches)
    parts, tokens = parts_of(batch, 1), len(batch.advantages)
    plain = tiny_model()
    with keeping_buffers(plain):
        module = PolicyModule(plain.to(torch.bfloat16), 1.0).eval()
    weights = list(module.parameters())
    sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    for part in parts:
        output = module(part.inputs)
        loss = -(output.log_probs * part.advantages).sum() / tokens
        for total, gradient in zip(sums, torch.autograd.grad(loss, weights), strict=True):
            total.add_(gradient)
    norm = float(torch.stack([total.norm() for total in sums]).norm())
    size = sum(float(total.abs().sum()) for total in sums)
    found: dict[Case | None, tuple[float, float]] = {None: (norm, size * (1 - 0.9) * min(1.0, 1.0 / norm))}
    for case in cases:
        actor = option_engine(ranks, case)
        for index, part in enumerate(parts):
            loss = -(actor.policy(part.inputs).log_probs * part.advantages).sum() / tokens
            actor.backward(loss, last=index == micro_batches - 1)
        result = actor.step(lr=0.0)
        moments = [float(state["exp_avg"].float().abs().sum()) for state in actor._optimizer.state.values()]
        found[case] = result.grad_norm, sum(moments)
    return found
