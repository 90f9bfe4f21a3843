"""Checkpointed activations and offloading change where things lie and when they are computed, no number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.engine.deepspeed_setup import recompute_layers
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import UsageError
from tests.models import tiny_batch, tiny_model
from tests.processes import on_ranks
from tests.rounding import assert_same_steps
from tests.unit.engine import option_jobs
from tests.unit.engine.option_jobs import Case
from tests.unit.train import critics

PLAIN: dict[tuple[str, int], Case] = {
    (dtype, rank): (1, dtype, rank, False, "none") for dtype in ("fp32", "bf16") for rank in (0, 4)
}
CASES: list[Case] = [
    (0, "fp32", 0, True, "none"),
    (1, "bf16", 0, True, "optimizer"),
    (2, "fp32", 0, True, "optimizer"),
    (2, "bf16", 4, True, "none"),
    (3, "fp32", 0, True, "none"),
    (3, "fp32", 0, False, "all"),
    (3, "fp32", 4, True, "optimizer"),
    (3, "bf16", 0, True, "all"),
]


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("options")
    return {n: on_ranks(n, option_jobs.steps, [*PLAIN.values(), *CASES], where=where)[0] for n in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_same_steps(by_world_size, world_size: int, case: Case) -> None:
    wanted, got = by_world_size[1][PLAIN[case[1], case[2]]], by_world_size[world_size][case]
    assert got["applied"] == wanted["applied"] == [True, False, True]
    is_exact = case[1] == "fp32"
    assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-4 if is_exact else 0.05)
    for name, tensor in wanted["weights"].items():
        moved = (tensor - wanted["start"][name]).abs().mean()
        gap = (got["weights"][name] - tensor).abs()
        assert gap.max() < 2e-5 if is_exact else gap.mean() <= 0.2 * moved + 1e-4, name


def test_gradients_of_many_micro_batches_are_summed_in_float32(tmp_path: Path) -> None:
    """In bf16 the sum of sixteen is off by a thousandth, of hundreds by more than the smallest of them."""
    cases: list[Case] = [(1, "bf16", 0, False, offload) for offload in ("none", "optimizer")]
    cases += [(2, "bf16", 0, False, offload) for offload in ("none", "optimizer")]
    cases += [(3, "bf16", 0, False, offload) for offload in ("none", "optimizer")]
    found = on_ranks(1, option_jobs.accumulated, cases, 16, where=tmp_path)[0]
    for case in cases:
        assert found[case] == pytest.approx(found[None], rel=2e-5), case


def test_a_critic_learns_the_same(tmp_path: Path) -> None:
    options = [{}, {"gradient_checkpointing": True, "offload": "all"}]
    (plain, weights), (metrics, same) = on_ranks(1, option_jobs.critic_updates, options, where=tmp_path)[0]
    assert metrics == pytest.approx(plain, rel=1e-4)
    assert float(weights["head.weight"].abs().max()) > 1e-3
    assert_same_steps(same, weights, critics.lrs_of("epochs"), sum(critics.LENGTHS))


def saved_bytes(module: PolicyModule) -> tuple[int, dict[str, torch.Tensor]]:
    """Tensors other than weights that a forward pass keeps for its backward pass; and the gradient."""
    batch = tiny_batch(tiny_model(), 8)
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, *_ = module(batch.inputs)
        num_bytes = sum(kept.values())
        (log_probs * batch.advantages).sum().backward()
    return num_bytes, {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_layers_keep_their_inputs_only(kind: str) -> None:
    plain = PolicyModule(tiny_model(kind), 1.0, share_prompts=False)
    model = tiny_model(kind)
    recompute_layers(model)
    recomputed = PolicyModule(model, 1.0, share_prompts=False)
    kept, gradient = saved_bytes(plain)
    kept_inputs, same = saved_bytes(recomputed)
    assert kept_inputs < 0.6 * kept
    for name, tensor in gradient.items():
        torch.testing.assert_close(same[name], tensor)


def test_a_model_that_does_not_mark_its_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="does not mark its layers"):
        recompute_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("given", "bucket", "words"),
    [
        ({"zero_optimization": {"reduce_bucket_size": 4096}}, 4096, ""),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, 0, "engine.deepspeed: DeepSpeed refuses"),
    ],
)
def test_options_reach_deepspeed(given: dict[str, object], bucket: int, words: str, tmp_path: Path) -> None:
    (found,) = on_ranks(1, option_jobs.with_config, given, where=tmp_path)
    assert found[0] == bucket
    assert found[1].startswith(words)
