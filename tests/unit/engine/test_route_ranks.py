"""Recorded experts that are not those of the trainer's routers are found, and the fault has a name."""

from __future__ import annotations

import pytest
import torch

from rlctl.batch import TokenBatch
from rlctl.capabilities.expert_routing.run import ExpertRouting
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import RunFailure
from rlctl.routing import RouteRanks, foreign_routes
from rlctl.run_spec.load import load_spec
from rlctl.train.capability import Probe
from tests.unit.engine.routing_jobs import EXPERTS, KINDS, batch_of, built, sampled
from tests.unit.train.updates import alone


def said_of(model, batch) -> tuple[str, torch.Tensor]:
    with RouteRanks() as ranks, torch.no_grad():
        PolicyModule(model, 0.7)(batch.inputs)
    return foreign_routes(ranks.sums), ranks.sums[..., 0] / ranks.sums[..., 1]


def changed(batch, change):
    experts = batch.column("experts")
    return batch.with_columns(experts=torch.where(experts >= 0, change(experts), experts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_experts_of_the_same_routers_pass(kind: str, dtype: str | None) -> None:
    model = built(kind)
    _, requests, turns = sampled(model, dtype=dtype)
    said, scores = said_of(model, batch_of(requests, turns))
    assert said == ""
    assert scores.diagonal().max() < (0.01 if dtype is None else 0.1)


@pytest.mark.parametrize("shift", [1, -2])
def test_shifted_layers_are_named(shift: int) -> None:
    """Each layer has the record of another one; at the end it starts anew."""
    model = built("mixtral", num_hidden_layers=6)
    _, requests, turns = sampled(model)
    said, _ = said_of(model, changed(batch_of(requests, turns), lambda x: x.roll(shift, 1)))
    assert said.startswith("in 6 of 6 layers the recorded experts are not those of the router")
    words = "1 later" if shift == 1 else "2 earlier"  # where the record of this layer is now
    assert f"they are those of the layer {words}" in said


def test_a_record_without_a_wrapped_layer_names_the_shift() -> None:
    model = built("mixtral", num_hidden_layers=6)
    _, requests, turns = sampled(model)
    whole = batch_of(requests, turns)
    experts = whole.column("experts").clone()
    experts[:, :-1], experts[:, -1] = whole.column("experts")[:, 1:], -1
    said, _ = said_of(model, whole.with_columns(experts=experts))
    assert "they are those of the layer 1 earlier" in said


@pytest.mark.parametrize("kind", KINDS)
def test_permuted_experts_fit_no_layer(kind: str) -> None:
    model = built(kind)
    _, requests, turns = sampled(model)
    order = torch.tensor([3, 0, 5, 1, 7, 2, 4, 6], dtype=torch.int16)
    assert len(order) == EXPERTS
    said, scores = said_of(model, changed(batch_of(requests, turns), lambda x: order[x.clamp(min=0).long()]))
    assert "fit no layer" in said
    assert scores.diagonal().mean() > 0.5


def test_experts_of_another_model_fit_no_layer_and_are_uniform() -> None:
    draw = torch.Generator().manual_seed(0)
    model = built("mixtral")
    _, requests, turns = sampled(model)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(*x.shape[:2], EXPERTS, generator=draw).topk(x.shape[2]).indices.to(x.dtype)

    said, scores = said_of(model, changed(batch_of(requests, turns), drawn))
    assert "fit no layer" in said
    assert scores.mean() == pytest.approx(1.0, abs=0.15)


def test_few_tokens_and_no_ranks_are_no_fault() -> None:
    assert foreign_routes(torch.tensor([[[8.0, 8.0]]], dtype=torch.float64)) == ""
    with RouteRanks() as ranks:
        pass
    assert ranks.sums is None


def test_replay_refuses_a_probe_with_experts_of_other_layers_and_names_the_replica() -> None:
    model = built("mixtral", num_hidden_layers=6)
    _, requests, turns = sampled(model)
    sound = batch_of(requests, turns)
    shifted = changed(sound, lambda x: x.roll(1, 1))
    replays, balances = (
        ExpertRouting(load_spec([], [], [key]).spec)
        for key in ("actor.routing_replay=true", "actor.router_aux_loss_coef=0.1")
    )

    @torch.no_grad()
    def log_probs(batch: TokenBatch) -> torch.Tensor:
        return PolicyModule(model, 0.7)(batch.inputs).log_probs

    replays.check_probe(Probe("http://a", sound, log_probs, alone()))
    balances.check_probe(Probe("http://a", shifted, log_probs, alone()))  # it replays nothing
    with pytest.raises(RunFailure, match="routing replay of http://a: in 6 of 6 layers"):
        replays.check_probe(Probe("http://a", shifted, log_probs, alone()))
