"""Compiled layers compute what plain layers compute, without breaks; what cannot be compiled is refused."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from rlctl.engine.deepspeed_setup import INDUCTOR, compile_layers
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import EnvironmentFailure, SpecError, UsageError
from rlctl.run_spec.load import load_spec
from tests.models import tiny_batch, tiny_model
from tests.processes import on_ranks_each
from tests.unit.engine import compile_jobs
from tests.unit.engine.engine_jobs import FSDP

#: Stage or engine, dtype, rank of adapters, recomputed layers.
CASES = [(2, "fp32", 4, True), (FSDP, "fp32", 0, False)]


@pytest.mark.slow
@pytest.mark.thorough
def test_engines_take_the_same_steps(tmp_path: Path) -> None:
    found = on_ranks_each(
        2, compile_jobs.steps, [(*case, on) for case in CASES for on in (False, True)], where=tmp_path
    )
    for case in CASES:
        plain, compiled = (found[*case, on][0] for on in (False, True))
        assert compiled["norms"] == pytest.approx(plain["norms"], rel=1e-5), case
        for name, weight in plain["weights"].items():
            torch.testing.assert_close(compiled["weights"][name], weight, rtol=0, atol=1e-6)
        assert plain["graphs"] == 0
        assert 0 < compiled["graphs"] < compiled["limit"], case  # at the limit torch stops compiling
        assert compiled["breaks"] == {}, case


def outputs(model: torch.nn.Module, rows: int, horizon: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a random batch, and the gradients of a weighted sum of them."""
    module = PolicyModule(model, 0.7).eval()
    log_probs = module(tiny_batch(tiny_model(), rows, prompt=3, horizon=horizon).inputs).log_probs
    (log_probs * torch.linspace(0.5, 1.0, len(log_probs))).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return log_probs.detach(), gradients


@pytest.fixture
def compiler() -> Iterator[None]:
    """torch compiles, which `tests/conftest.py` switches off; what a test sets is undone."""
    config = torch._dynamo.config
    with config.patch(disable=False, recompile_limit=config.recompile_limit):
        torch._dynamo.reset()
        counters.clear()
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("kind", "kinds_of_layers"), [("llama", 1), pytest.param("gemma2", 2, marks=pytest.mark.thorough)]
)
def test_log_probs_and_gradients_are_equal_for_batches_of_all_sizes(kind: str, kinds_of_layers: int) -> None:
    plain = tiny_model(kind)
    compiled = copy.deepcopy(plain)
    compile_layers(compiled, "aot_eager")
    sizes = [(rows, horizon) for rows in range(2, 8) for horizon in (3, 5, 9)]
    for rows, horizon in sizes:
        wanted, found = outputs(plain, rows, horizon), outputs(compiled, rows, horizon)
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-6)
        assert found[1].keys() == wanted[1].keys()
        for name, gradient in wanted[1].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)
    # With and without gradient, one row or many, with a mask or without.
    assert 0 < counters["stats"]["unique_graphs"] <= 8 * kinds_of_layers < len(sizes)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("compiler")
def test_a_model_that_does_not_mark_its_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="does not mark its layers") as caught:
        compile_layers(torch.nn.Linear(2, 2), "aot_eager")
    assert caught.value.where == "model.compile_layers"


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentFailure, match="needs a C compiler"):
        compile_layers(tiny_model(), INDUCTOR)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("engine.zero_stage=3",), "ZeRO-3"),
        (("engine.offload=all",), "ZeRO-3"),  # the fix of which sets stage 3
        (("engine.sequence_parallel=2", "trainer.n_gpus_per_node=2"), "sequence_parallel"),
        (("actor.router_aux_loss_coef=0.01",), "routers"),
    ],
)
def test_layers_that_do_more_than_compute_are_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec([], [], ["model.compile_layers=true", *settings])
    assert [
        words in problem.what for problem in caught.value.problems if problem.key == "model.compile_layers"
    ] == [True]


def test_fsdp_may_compile() -> None:
    load_spec([], [], ["model.compile_layers=true", "engine.name=fsdp"])
