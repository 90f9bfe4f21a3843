"""The load-balancing loss of a mixture of experts: transformers' own, however the mini-batch is divided."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rlctl.errors import SpecError, UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train.update import update
from tests.models import VOCABULARY, tiny_batch, tiny_model
from tests.unit.train.updates import (
    BYPASS,
    DECOUPLED,
    HORIZON,
    REINFORCE,
    ROWS,
    PlainEngine,
    alone,
    settings_of,
    sizes_of,
)

COEFFICIENT, EXPERTS, CHOSEN = 0.3, 4, 2
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
KINDS = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 8, "head_dim": 8},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 8},
}


@cache
def built(kind: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, num_experts_per_tok=CHOSEN, initializer_range=0.5, **SHAPE, **KINDS[kind]
    )
    return AutoModelForCausalLM.from_config(config).eval()


class Engine(PlainEngine):
    def policy(self, inputs, **asked):
        self.num_forwards += 1
        return self.module(inputs, **asked)


def batch_of(model):
    batch = tiny_batch(model, ROWS, seed=3, horizon=HORIZON)
    return replace(batch, advantages=torch.zeros_like(batch.advantages))


def updated(kind: str, mode, micro, coefficient: float = COEFFICIENT):
    engine = Engine(copy.deepcopy(built(kind)))
    terms = {"router_aux_loss_coef": coefficient}
    settings = settings_of(mode | REINFORCE | {"rollout_is": None}, **sizes_of(micro), **terms)
    return update(batch_of(engine.model), engine, alone(), settings, lambda _: 0.0, 0), engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [BYPASS, DECOUPLED])
@pytest.mark.parametrize("micro", [16, 3, "30 tokens"])
def test_value_and_gradient_are_those_of_transformers(kind: str, mode, micro) -> None:
    outcome, engine = updated(kind, mode, micro)
    model = copy.deepcopy(built(kind))  # its experts have no kernel for float64
    batch = batch_of(model)
    rows_of = batch.sequences.padded
    sampled = rows_of(batch.sampled, False)
    found = model.model(
        input_ids=rows_of(batch.token_ids),
        attention_mask=rows_of(torch.ones_like(batch.token_ids)),
        output_router_logits=True,
    )
    predicting = torch.zeros_like(sampled)  # the positions whose states predict sampled tokens
    predicting[:, :-1] = sampled[:, 1:]
    loss = load_balancing_loss_func(found.router_logits, EXPERTS, CHOSEN, predicting.float())
    (COEFFICIENT * loss).backward()
    assert outcome.metrics["actor/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert abs(loss.item() / CHOSEN - 1) > 0.001  # equal use of all experts gives the number chosen
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            got = engine.gradient.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=2e-6)
    assert engine.gradient["model.layers.0.mlp.gate.weight"].abs().max() > 1e-5


def test_without_the_key_nothing_is_added() -> None:
    outcome, engine = updated("qwen3_moe", BYPASS, 4, coefficient=0.0)
    assert "actor/router_aux_loss" not in outcome.metrics
    assert not any(gradient.any() for gradient in engine.gradient.values())


def test_a_model_without_experts_is_refused() -> None:
    engine = Engine(tiny_model())
    settings = settings_of(BYPASS | REINFORCE, router_aux_loss_coef=0.1)
    with pytest.raises(UsageError, match="no routing of its tokens") as caught:
        update(batch_of(engine.model), engine, alone(), settings, lambda _: 0.0, 0)
    assert caught.value.where == "actor.router_aux_loss_coef"


def test_rows_that_ranks_share_are_refused() -> None:
    given = ["engine.sequence_parallel=2", "trainer.n_gpus_per_node=2"]
    with pytest.raises(SpecError, match="routing of rows that ranks share"):
        load_spec([], [], [*given, "actor.router_aux_loss_coef=0.1"])
    load_spec([], [], given)
