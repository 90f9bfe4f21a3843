"""The trainer computes each token with the experts that the sampler chose for it."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.batch import TokenBatch
from rlctl.capabilities.expert_routing.run import ExpertRouting
from rlctl.engine import layout
from rlctl.engine.deepspeed_setup import recompute_layers
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import RunFailure, UsageError
from rlctl.routing import Mixture, Routing
from rlctl.run_spec.load import load_spec
from tests.models import tiny_model
from tests.processes import on_ranks_each
from tests.unit.engine import routing_jobs
from tests.unit.engine.routing_jobs import (
    CHOSEN,
    EXPERTS,
    KINDS,
    PROMPTS,
    SAMPLING,
    SHAPE,
    batch_of,
    built,
    sampled,
)


def with_forced(router, experts):
    """Both architectures: softmax over all experts, the chosen ones normalised; −1: the k most likely."""

    def forward(states):
        logits = functional.linear(states.reshape(-1, states.shape[-1]), router.weight)
        shares = logits.float().softmax(-1)
        highest = shares.argsort(-1, descending=True)[:, :CHOSEN]
        chosen = torch.where(experts < 0, highest, experts)
        weights = torch.stack([row[each] for row, each in zip(shares, chosen, strict=True)])
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


def one_by_one(model, batch: TokenBatch, temperature: float = 0.7):
    """Log-probs (M,) of the slow way: each sequence by itself, with routers that are given their choice."""
    found, at = [], 0
    model = copy.deepcopy(model)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    lengths = batch.lengths.tolist()
    for ids, scored in zip(batch.token_ids.split(lengths), batch.sampled.split(lengths), strict=True):
        experts = batch.column("experts")[at : at + len(ids)].long()
        at += len(ids)
        for place, router in enumerate(routers):
            router.forward = with_forced(router, experts[:, place])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)[scored[1:]])
    return torch.cat(found), model


def gradients_of(model, log_probs):
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


HOW = ["packed", "padded", "recomputed", "recomputed and padded"]


@pytest.mark.parametrize(
    ("kind", "how", "case"),
    [*((kind, how, "noise") for kind in KINDS for how in HOW), *((kind, "packed", "bf16") for kind in KINDS)],
)
def test_log_probs_and_gradients_are_those_of_a_forced_choice(kind: str, how: str, case: str) -> None:
    model = built(kind)
    _, requests, turns = sampled(model, dtype="bf16") if case == "bf16" else sampled(model, noise=0.3)
    batch = batch_of(requests, turns)
    wanted, slow = one_by_one(model, batch)
    live = PolicyModule(model, 0.7)(replace(batch.inputs, experts=None))[0]
    assert (live - wanted).abs().max() > 1e-3, "the sampler chose other experts"
    if "recomputed" in how:
        recompute_layers(model)
    module = PolicyModule(model, 0.7, share_prompts="recomputed" not in how)
    assert module.reader.packs
    module.reader.layout = "padded" if "padded" in how else "packed"
    found = module(batch.inputs)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)
    expected, got = gradients_of(slow, wanted), gradients_of(model, found)
    assert any("gate.weight" in name and gradient.any() for name, gradient in expected.items())
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-4, atol=1e-5 * float(1 + gradient.abs().max())
        )


@contextlib.contextmanager
def calls_of_experts(model):
    """What the modules of experts are called with, in order: name, (n, k)."""
    seen: list[tuple[str, torch.Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: seen.append((name, given[1])))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def chosen_in(model, ids) -> torch.Tensor:
    """(n, routers, k): the experts of one pass over a sequence."""
    with torch.no_grad(), calls_of_experts(model) as seen:
        model(input_ids=ids[None], use_cache=False)
    return torch.stack([chosen for _, chosen in seen], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [True, False])
def test_the_engine_records_what_it_chose(kind: str, shares: bool) -> None:
    """For each token but the last, whatever is padded and whatever prompts are computed once."""
    engine, requests, _ = sampled(built(kind))
    assert engine._shares_prompts
    engine._shares_prompts = shares
    requests[2] = replace(requests[2], max_tokens=3)
    for request, turn in zip(requests, engine.sample(requests, SAMPLING), strict=True):
        ids = torch.tensor([*request.token_ids, *turn.token_ids.tolist()])
        assert turn.experts.dtype == torch.int16
        assert torch.equal(turn.experts.long().sort(-1)[0], chosen_in(engine._model, ids[:-1]).sort(-1)[0])
    assert engine.sample(requests, replace(SAMPLING, with_experts=False))[0].experts is None


def test_the_trainer_chooses_what_the_engine_chose() -> None:
    """In bf16 and with other weights, in the pass and in its recomputation."""
    model = built("qwen3_moe")
    _, requests, turns = sampled(model, dtype="bf16", noise=0.3)
    recompute_layers(model)
    module = PolicyModule(model, 0.7, share_prompts=False)
    for request, turn in zip(requests, turns, strict=True):
        ids = torch.tensor([*request.token_ids, *turn.token_ids.tolist()])
        assert not torch.equal(chosen_in(model, ids[:-1]).sort(-1)[0], turn.experts.long().sort(-1)[0])
        with calls_of_experts(model) as seen:
            module(batch_of([request], [turn]).inputs)[0].sum().backward()
        forward, backward = seen[:2], seen[2:][::-1]
        assert [name for name, _ in forward] == [name for name, _ in backward]
        for place, (once, again) in enumerate(zip(forward, backward, strict=True)):
            assert torch.equal(once[1], turn.experts[:, place].long())
            assert torch.equal(again[1], once[1])


def test_tokens_without_experts_are_routed_by_the_trainer() -> None:
    model = built("qwen3_moe")
    _, requests, turns = sampled(model, noise=0.3)
    turns = [replace(turn, experts=turn.experts[-len(turn.token_ids) :]) for turn in turns]  # of no prompt
    batch = batch_of(requests, turns)
    wanted, _ = one_by_one(model, batch)
    torch.testing.assert_close(PolicyModule(model, 0.7)(batch.inputs)[0], wanted, rtol=1e-5, atol=5e-6)
    scored = replace(batch, rewards=torch.zeros(len(batch.turns)), advantages=torch.zeros(len(batch.turns)))
    sums = ExpertRouting(load_spec([], [], []).spec).token_sums(scored)
    assert sums["actor/live_routed_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    none = batch_of(requests, [replace(turns[0], experts=None), *turns[1:]])
    wanted, _ = one_by_one(model, none)
    torch.testing.assert_close(PolicyModule(model, 0.7)(none.inputs)[0], wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_prompt_is_shared_as_far_as_its_experts_are_the_same(how: str, monkeypatch) -> None:
    """Kernels may choose other experts for the same tokens of a sibling."""
    monkeypatch.setattr(layout, "packed_width", lambda _: 64)
    model = built("qwen3_moe")
    _, requests, turns = sampled(model)
    other = turns[1].experts.clone()
    other[2] = (other[2] + 1) % EXPERTS
    batch = batch_of(requests, [turns[0], replace(turns[1], experts=other), *turns[2:]])
    module = PolicyModule(model, 0.7)
    module.reader.layout = how
    wanted, _ = one_by_one(model, batch)
    torch.testing.assert_close(module(batch.inputs)[0], wanted, rtol=1e-5, atol=5e-6)
    common = layout._tokens_read(batch.inputs).common
    assert common[1] == 2
    assert layout._tokens_read(replace(batch.inputs, experts=None)).common[1] >= len(PROMPTS[0])


def test_the_balancing_loss_counts_the_experts_that_were_used() -> None:
    model = built("mixtral")
    _, requests, turns = sampled(model, noise=0.3)
    batch = batch_of(requests, turns)
    module = PolicyModule(model, 0.7)
    predicting = batch.sampled.roll(-1)
    used = functional.one_hot(batch.column("experts")[predicting].long(), EXPERTS).sum(-2).float().mean(1)
    output = module(batch.inputs, routing=True)
    torch.testing.assert_close(output.routing[:, EXPERTS:], used)
    live = module(replace(batch.inputs, experts=None), routing=True)
    assert not torch.equal(live.routing[:, EXPERTS:], used)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("routing")
    return on_ranks_each(2, routing_jobs.replayed, routing_jobs.CASES, where=where)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), routing_jobs.CASES)
def test_under_zero_and_with_rows_that_ranks_share(on_two_ranks, stage: int, size: int) -> None:
    """With recomputed layers; the gradient's norm over all ranks."""
    model, batch = routing_jobs.model_and_batch()
    wanted, slow = one_by_one(model, batch, 1.0)
    total = sum(float(each.square().sum()) for each in gradients_of(slow, wanted).values()) ** 0.5
    for log_probs, norm in on_two_ranks[stage, size]:
        torch.testing.assert_close(log_probs, wanted.detach(), rtol=1e-5, atol=5e-6)
        assert norm == pytest.approx(total, rel=1e-4)


def test_experts_of_all_decoder_layers_are_those_of_the_layers_with_a_router() -> None:
    """vLLM reports a row for every decoder layer, dense ones included."""
    model = built("qwen3_moe")
    _, requests, turns = sampled(model, noise=0.3)
    batch = batch_of(requests, turns)
    everywhere = torch.zeros(len(batch.token_ids), 3, CHOSEN, dtype=torch.int16)
    everywhere[:, [0, 2]] = batch.column("experts")
    module = PolicyModule(model, 0.7)
    found = module(replace(batch.inputs, experts=everywhere))[0]
    assert torch.equal(found, module(batch.inputs)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda experts: experts[:, :1], r"\(1, 2\) experts per token"),
        (lambda experts: experts[..., :1], r"\(2, 1\) experts per token"),
        (lambda experts: experts + EXPERTS, "the highest 1[0-9]"),
    ],
)
def test_experts_of_another_model_are_refused(change, words: str) -> None:
    model = built("qwen3_moe")
    _, requests, turns = sampled(model)
    inputs = batch_of(requests, turns).inputs
    with pytest.raises(RunFailure, match=words) as caught:
        PolicyModule(model, 0.7)(replace(inputs, experts=change(inputs.experts)))
    assert caught.value.where == "actor.routing_replay"


def test_a_model_without_experts_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(UsageError, match="LlamaModel reports no routing") as caught:
        Mixture.of(model.model, "actor.routing_replay")
    assert caught.value.where == "actor.routing_replay"


def test_a_model_that_chooses_twice_per_layer_is_refused() -> None:
    """JetMoE also chooses experts of its attention."""
    config = AutoConfig.for_model("jetmoe", **SHAPE | {"num_local_experts": EXPERTS, "kv_channels": 8})
    model = AutoModelForCausalLM.from_config(config).eval()
    mixture, body = Mixture.of(model.model, "actor.routing_replay"), model.model
    with Routing(mixture) as routing, torch.no_grad():
        body(input_ids=torch.arange(5)[None], use_cache=False)
    with pytest.raises(UsageError, match="does not choose the experts of a layer once"):
        routing.check(body, 1)
