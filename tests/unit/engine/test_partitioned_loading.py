"""A model cut up while it is read is the model read whole; no rank holds it whole; passes gather once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.engine.deepspeed_setup import expert_blocks
from rlctl.engine.log_probs import PolicyModule
from tests.models import tiny_model
from tests.processes import on_ranks, on_ranks_each
from tests.rounding import assert_same_steps
from tests.unit.engine import partition_jobs

#: Kind of module, arithmetic, tied embeddings.
CASES = [
    ("actor", "fp32", False),
    ("actor", "bf16", True),
    ("lora", "fp32", True),
    ("offload", "fp32", False),
    ("reference", "bf16", False),
    ("critic", "bf16", False),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("partitioned")
    cases = []
    for kind, dtype, tied in CASES:
        directory = where / f"{'tied' if tied else 'untied'}-model"
        if not directory.exists():
            tiny_model("qwen2", tied=tied).save_pretrained(directory, max_shard_size="8KB")
            assert len(list(directory.glob("*.safetensors"))) > 1
        cases.append((str(directory), dtype, kind, str(where)))
    results = on_ranks_each(2, partition_jobs.both_ways, cases, where=where)
    return dict(zip(CASES, results.values(), strict=True))


def assert_same(wanted, got, where: str) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(wanted, got), where
    elif isinstance(wanted, dict):
        assert wanted.keys() == got.keys(), where
        for key in wanted:
            assert_same(wanted[key], got[key], f"{where} {key}")
    elif isinstance(wanted, list):
        for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
            assert_same(one, other, f"{where} {number}")
    else:
        assert wanted == got, where


@pytest.mark.parametrize("case", CASES)
def test_same_weights_figures_checkpoints_and_exports(found, case) -> None:
    for by_way in found[case]:
        (whole, _), (cut_up, _) = by_way[True], by_way[False]
        assert_same(whole, cut_up, "")
        if "after" in whole:
            moved = max(float((whole["after"][n] - w).abs().max()) for n, w in whole["start"].items())
            assert moved > 1e-3
            assert_same(whole["after"], cut_up["resumed"], "resumed")


@pytest.mark.parametrize("case", CASES)
def test_no_rank_holds_more_than_a_weight_at_a_time(found, case) -> None:
    _, dtype, tied = case
    model = tiny_model("qwen2", tied=tied)
    largest, size = max(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())
    for by_way in found[case]:
        (_, (whole, _)), (_, (cut_up, num_bytes)) = by_way[True], by_way[False]
        assert whole == size
        # Tied embeddings are compared with the head when all are read: they are held until then.
        assert cut_up <= largest * (2 if tied else 1) < whole / 3
        if dtype == "bf16":  # of float32 files, which are read by copies: half of all, and what is on its way
            on_its_way = 4 + tied
            assert num_bytes <= 2 * (size / 2 + on_its_way * largest) < 2 * size


def test_passes_cost_no_more_than_their_budget(tmp_path: Path) -> None:
    """Under ZeRO-3 with the vocabulary of a 7B model, whose output head runs in many chunks."""
    results = on_ranks(2, partition_jobs.recorded, 152_064, False, 1 << 21, where=tmp_path)
    size = sum(p.numel() for p in tiny_model(vocabulary=152_064).parameters())
    head = 152_064 * 16
    for found in results:
        assert found["tokens"] * 152_064 > 3 * (1 << 21)  # as many chunks
        for name, passes in (("score", 1), ("train", 2)):  # forward; and backward, which reads weights again
            counts = found[name]
            # Embeddings and head: as many numbers each.
            assert counts["sizes"]["_allgather_base_", head] == 2 * passes
            assert counts["num_bytes"]["_allgather_base_"] == 4 * size * passes
            # The host waits for the micro-batch's tokens, not per layer or chunk. It lays them out in its own
            # memory, which is counted here too.
            assert sum(counts["syncs"].values()) <= 32, counts["syncs"]
            others = {"_allgather_base_", "_reduce_scatter_base_"}
            assert sum(n for call, n in counts["calls"].items() if call not in others) == 0, counts["calls"]
        assert found["score"]["num_bytes"].get("_reduce_scatter_base_", 0) == 0
        assert found["train"]["num_bytes"]["_reduce_scatter_base_"] == 4 * size
        (plain_norm, plain), (norm, weights) = found[0], found[3]
        assert norm == pytest.approx(plain_norm, rel=1e-5)
        assert_same_steps(weights, plain, [1e-2], found["tokens"])


@pytest.mark.parametrize("kind", ["list", "qwen3"])
def test_a_mixture_of_experts_learns_under_zero_3_as_without(tmp_path: Path, kind: str) -> None:
    """Ranks choose different experts: those of a block are gathered together, on all ranks."""
    [(start, norms, wanted, _)] = on_ranks(1, partition_jobs.mixed, kind, 0, where=tmp_path)
    cut_up = on_ranks(2, partition_jobs.mixed, kind, 3, where=tmp_path)
    if kind == "list":
        assert cut_up[0][3] != cut_up[1][3]
    moved = max(float((wanted[name] - tensor).abs().max()) for name, tensor in start.items())
    assert moved > 1e-3
    for _, theirs, weights, _ in cut_up:
        assert theirs == pytest.approx(norms, rel=1e-4)
        for name, tensor in wanted.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=5e-5)


def test_experts_are_found_by_what_they_are() -> None:
    found = expert_blocks(PolicyModule(partition_jobs.mixture("list"), 1.0))
    assert [type(block) for block in found] == [partition_jobs.ListOfExperts] * 2
    # Weights of all experts in one tensor; as many layers as experts.
    assert expert_blocks(PolicyModule(partition_jobs.mixture("qwen3"), 1.0)) == []
    assert expert_blocks(PolicyModule(tiny_model(), 1.0)) == []
