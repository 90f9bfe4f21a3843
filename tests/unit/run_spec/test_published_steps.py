"""Steps and servings that others have published are inside the estimate's interval."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_steps import TABLE, placement_of, served, tables
from rlctl.cli.app import run
from rlctl.run_spec.cards import CARDS
from rlctl.run_spec.lengths import Lengths
from rlctl.run_spec.machine import gpu_speeds, machine_of
from rlctl.run_spec.model_size import PUBLISHED
from rlctl.run_spec.step_time import _TABLE as RATES
from rlctl.run_spec.step_time import GPU_RATES, Seconds
from tests.unit.test_docs_site import ROOT

STEPS = {row["name"]: row for row in TABLE["step"]}


@pytest.mark.parametrize("name", STEPS)
def test_a_published_step_is_inside_the_interval(name: str) -> None:
    row = STEPS[name]
    intervals = placement_of(row).intervals
    for stage, values in row["published"].items():
        low, high = intervals[stage]
        assert low <= min(values), stage
        assert max(values) <= round(high, 1), stage
    low, high = intervals["generate" if "sampled_only" in row else "whole step"]
    assert (high / low <= 1.6) != ("wider" in row)


def test_a_published_server_is_inside_the_interval() -> None:
    points = [pair for row in TABLE["serving"] for pair in served(row)]
    assert len(points) >= 26
    for (*where, measured), (low, high) in points:
        assert low <= measured <= high, where
        assert high / low <= 1.6


def test_the_page_has_the_tables_as_they_are_computed() -> None:
    page = (ROOT / "docs/evidence/planned-steps.md").read_text(encoding="utf-8")
    for line in tables().splitlines():
        assert line in page


def test_an_estimate_is_no_copy_of_its_rows() -> None:
    """Half of the speed, twice the responses, a longer mean: seconds change as they must."""
    row = next(iter(STEPS.values()))
    plan = placement_of(row)
    slow = type(plan)(plan.spec, plan.size, replace(plan.machine, flops=plan.machine.flops / 2), 803)
    for now, then in zip(plan.intervals["update"], slow.intervals["update"], strict=True):
        assert 1.7 < then / now <= 2.0
    more = placement_of(row, "rollout.n=64")
    assert 1.9 < more.intervals["score"].low / plan.intervals["score"].low < 2.1
    # The straggler sets most of the time: twice the responses take less than twice as long.
    assert 1.1 < more.intervals["generate"].low / plan.intervals["generate"].low < 1.7
    longer = placement_of(row | {"mean_response": 2000})
    assert longer.intervals["whole step"].low > 1.5 * plan.intervals["whole step"].low


def test_ranks_that_share_a_card_share_its_products_and_its_memory() -> None:
    plan = placement_of(next(iter(STEPS.values())))
    shared = replace(plan.machine, gpus=plan.machine.gpus // 2)
    halved = type(plan)(plan.spec, plan.size, shared, 803)
    for now, then in zip(plan.intervals["score"], halved.intervals["score"], strict=True):
        assert then == pytest.approx(2 * now, rel=0.05)


def test_rates_have_a_source_and_their_ends_in_order() -> None:
    fast, slow = GPU_RATES
    for name, entry in RATES.items():
        assert len(entry["source"]) > 7
        shares = name in {"passes", "masked_attention", "sampling", "bandwidth", "collectives"}
        assert (entry["fast"] > entry["slow"]) == shares
        assert (getattr(fast, name), getattr(slow, name)) == (entry["fast"], entry["slow"])


@pytest.mark.parametrize(("mean", "limit"), [(795, 4096), (50, 4096), (4096, 4096), (3277, 8192), (4, 10)])
def test_lengths_have_the_mean_and_the_limit_that_are_given(mean: float, limit: int) -> None:
    lengths = Lengths.of(256, limit, mean)
    found = lengths.responses
    assert sum(found) / len(found) == pytest.approx(mean, rel=1e-3)
    assert max(found) <= limit
    assert list(found) == sorted(found)
    assert max(found) <= lengths.longest(1000) <= lengths.longest(100_000) <= limit
    assert lengths.context >= 128 + mean / 2  # long responses are sampled in more steps


def test_checkpointed_layers_and_adapters_change_the_passes_of_an_update() -> None:
    row = next(iter(STEPS.values()))

    def update(*settings: str) -> float:
        return placement_of(row, *settings).work.update_passes

    again = "model.enable_gradient_checkpointing=true"
    assert (update(), update(again)) == (3, 4)
    assert (update("model.lora_rank=8"), update("model.lora_rank=8", again)) == (2, 3)


def test_a_mask_costs_more_than_the_flash_kernel() -> None:
    row = STEPS["the same, PyTorch's DTensor, recomputed layers"]
    masked = placement_of(row, "model.attn_implementation=sdpa")
    assert 1.15 < masked.intervals["update"].low / placement_of(row).intervals["update"].low < 2.5
    assert "model.attn_implementation=varlen" in {each.setting for each in masked.suggestions()}


def test_nodes_send_over_all_of_their_network_cards() -> None:
    """Under ZeRO-3 on two nodes an 8B update is not bound by the network of 8 × 50 GB/s."""
    row = STEPS["the same, PyTorch's DTensor, recomputed layers"] | {"machine": "2x8h100"}
    two = placement_of(row, "trainer.nnodes=2")
    one = placement_of(STEPS["the same, PyTorch's DTensor, recomputed layers"])
    assert two.intervals["update"].low < 0.7 * one.intervals["update"].low
    slow = type(two)(two.spec, two.size, replace(two.machine, network=1e9), 790)
    assert slow.intervals["update"].low > 3 * two.intervals["update"].low


def test_linear_attention_keeps_no_keys_and_values() -> None:
    row = next(row for row in STEPS.values() if "Qwen3.5" in row["name"])
    plan = placement_of(row)
    assert plan.work.cached_bytes(plan.size.shape) == 2 * 8 * 4 * 256 * 2


MIXTURE = next(row for row in TABLE["serving"] if "idle" in row)


def test_of_experts_only_those_are_read_that_a_token_chooses() -> None:
    """One token reads 8 of 128 experts of each layer, many tokens read all, and each of few adds its own."""
    plan = placement_of(MIXTURE, "rollout.mode=server")
    shape = plan.size.shape
    assert shape
    expert = 2 * 3 * 2048 * 768 * shape.layers  # bytes of an expert of every layer
    one, two, many = (plan.work._weights_read(shape, count) for count in (1, 2, 1000))
    assert many - one == pytest.approx(120 * expert)
    assert two - one == pytest.approx(120 * 8 / 128 * expert, rel=0.01)


def test_products_of_experts_are_slower_than_those_of_dense_layers() -> None:
    """An update of a mixture is slower than of a dense model with as many active parameters."""
    settings = next(iter(STEPS.values()))["settings"]
    row = MIXTURE | {"settings": settings, "machine": "8xh200", "mean_response": 803}
    active = row["parameters"] - row["idle"]
    dense = placement_of(row | {"parameters": active, "idle": 0})
    for mixed, equal in zip(placement_of(row).intervals["score"], dense.intervals["score"], strict=True):
        assert 1.2 < mixed / equal < 4


def test_prompts_are_summed_over_the_gpus_of_an_engine() -> None:
    """Eight GPUs whose data pass through the host take longer for a prompt than one that holds the model."""
    row = next(iter(STEPS.values()))
    alone, eight = (
        placement_of(row | {"machine": "8xrtx4090"}, f"rollout.tensor_model_parallel_size={gpus}")
        for gpus in (1, 8)
    )
    shape = alone.size.shape
    assert shape
    for rates in GPU_RATES:
        each = [plan.work.prompt_token(shape, 128, rates) for plan in (alone, eight)]
        sent = 32 * 2 * 2 * 7 / 8 * 4096 * 2
        assert each[1] == pytest.approx(each[0] / 8 + sent / (6e9 * rates.collectives))


def test_an_embedding_that_is_looked_up_costs_no_arithmetic() -> None:
    row = next(iter(STEPS.values()))
    tied = row | {"parameters": row["parameters"] - 128256 * 4096}
    apart = placement_of(row).intervals["score"]
    assert placement_of(tied).intervals["score"] == pytest.approx(apart)


@pytest.mark.parametrize(
    ("path", "is_apart"),
    [
        ("google/gemma-3-4b-it", False),
        ("Qwen/Qwen3-4B", False),
        ("Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-30B-A3B", True),
    ],
)
def test_an_embedding_is_apart_from_the_head_or_shared_with_it(path: str, is_apart: bool) -> None:
    """An encoder of images is not taken for a second embedding."""
    size = PUBLISHED[path]
    plan = placement_of(next(iter(STEPS.values())))
    work = type(plan)(plan.spec, size, plan.machine).work
    assert size.shape
    assert work._idle_embedding(size.shape) == is_apart * size.shape.vocab * size.shape.hidden


def test_a_card_is_as_fast_as_its_products() -> None:
    """An A100 reaches more of its peak than an H100, whose power limits it."""
    row = next(iter(STEPS.values()))
    old = placement_of(row | {"machine": "8xa100"}).intervals["score"]
    new = placement_of(row).intervals["score"]
    assert 0.8 * 794 / 271 < old.low / new.low < 794 / 271  # its memory is less behind


def test_passes_of_a_small_model_are_bound_by_the_memory() -> None:
    """What norms, sums and logits read and write is most of it: twice the FLOP/s save little."""
    row = next(iter(STEPS.values()))
    plan = placement_of(row)
    shares = []
    for path in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-8B"):
        now, fast = (
            type(plan)(plan.spec, PUBLISHED[path], replace(plan.machine, flops=flops)).intervals["score"]
            for flops in (plan.machine.flops, 2 * plan.machine.flops)
        )
        shares.append(fast.low / now.low)
    small, large = shares
    assert small > 0.75
    assert large < 0.7


# --- cards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX A1000", None),
        ("Tesla T4", None),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_reports(driver: str, card: str | None) -> None:
    speeds = gpu_speeds(driver)
    expected = CARDS.get(card or "")
    assert speeds == (expected and (expected.flops, expected.bandwidth, expected.link, expected.bus))


def test_every_card_has_a_source_and_can_be_planned_for() -> None:
    for name, card in CARDS.items():
        assert card.source.startswith("https://") or card.source.startswith("http://")
        assert 50e12 < card.peak < 5e15
        assert 0.5 < card.flops / card.peak < 1.1
        assert 0.2e12 < card.bandwidth < 10e12
        machine = machine_of(f"4x{name}")
        assert (machine.gpus, machine.nodes, machine.gpu_bytes) == (4, 1, card.memory)
        assert machine.host_bytes == 4 * card.host
    assert machine_of("2x8h200").nodes == 2


# --- what the dry run prints ----------------------------------------------------------------------


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("rlctl.cli.dry_run"), "check_inputs", lambda spec: [])
    nothing = import_module("rlctl.train.first_row").FirstRow()
    monkeypatch.setattr(import_module("rlctl.cli.dry_run"), "check_first_row", lambda *_, **__: nothing)


PLAN = ["train", "-p", "qwen3-8b", "-p", "8gpu", "-p", "rloo-seq-is", "data.train_files=x", "--dry-run"]


def document(capsys: Any, *more: str) -> dict[str, Any]:
    assert run([*PLAN, *more, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_plan_as_json_has_both_ends_and_what_was_not_known(capsys: Any, without_files: None) -> None:
    plan = document(capsys, "--machine", "8xh100")
    seconds = {stage["name"]: stage["seconds"] for stage in plan["stages"]}
    assert seconds["load"] is None
    for stage in ("generate", "update", "step", "sync"):
        assert 0 < seconds[stage]["low"] < seconds[stage]["high"]
    whole = plan["step"]["seconds"]
    for end in ("low", "high"):
        assert whole[end] == pytest.approx(sum(each[end] for each in seconds.values() if each))
    assert any("--mean-response" in words for words in plan["not_known"])
    assert plan["gpu_memory"]["peak_bytes"] > 40 * 2**30
    assert plan["host_memory"]["peak_bytes"] > 20 * 2**30
    # The preset samples and trains in bypass mode: what other software would add is apart.
    [own] = plan["own_design"]
    assert own["step_seconds_with"]["low"] > whole["low"]
    known = document(capsys, "--machine", "8xh100", "--mean-response", "400")
    assert known["step"]["seconds"]["high"] < whole["high"]
    assert not any("--mean-response" in words for words in known["not_known"])


def test_suggestions_are_faster_fit_and_come_in_order(capsys: Any, without_files: None) -> None:
    plan = document(capsys, "--machine", "8xh100")
    now = plan["step"]["seconds"]
    found = [each["step_seconds"] for each in plan["suggestions"]]
    assert found
    middles = [each["low"] * each["high"] for each in found]
    assert middles == sorted(middles)
    assert middles[-1] < now["low"] * now["high"]
    for each in plan["suggestions"]:
        again = document(capsys, "--machine", "8xh100", each["setting"])
        assert again["step"]["seconds"] == pytest.approx(each["step_seconds"])
        assert not [problem for problem in again["problems"] if problem["severity"] == "error"]


@pytest.mark.parametrize(
    "large",
    [
        ["engine.zero_stage=1"],  # gradients and weights of an 8B model on every GPU
        ["model.enable_gradient_checkpointing=false"],  # activations of 16k tokens
        ["rollout.gpu_memory_utilization=0.9"],
    ],
)
def test_a_run_that_does_not_fit_is_told_what_makes_it_fit(
    capsys: Any, without_files: None, large: list[str]
) -> None:
    large = [*large, "--machine", "8xh100"]
    assert run([*PLAN, *large, "--format", "json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpu_memory"]["peak_bytes"] > plan["machine"]["gpu_bytes"]
    assert plan["suggestions"]
    [problem] = [problem for problem in plan["problems"] if "needed" in problem["what"]]
    assert problem["fix"].startswith(f"write {plan['suggestions'][0]['setting']}, with which it fits")
    for each in plan["suggestions"]:
        fits = document(capsys, *large, each["setting"])
        assert fits["gpu_memory"]["peak_bytes"] < fits["machine"]["gpu_bytes"]


def test_weights_that_a_share_does_not_hold_give_no_seconds_and_two_ways_out(
    capsys: Any, without_files: None
) -> None:
    """More GPUs per engine, or a larger share; seconds without a cache would mean nothing."""
    large = ["model.path=Qwen/Qwen3-30B-A3B", "--machine", "8xh200"]
    assert run([*PLAN, *large, "--format", "json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert plan["step"]["seconds"] is None
    assert "seconds: vLLM's share of a GPU does not hold the weights" in plan["not_known"]
    keys = {each["setting"].partition("=")[0] for each in plan["suggestions"]}
    assert keys >= {"rollout.tensor_model_parallel_size", "rollout.gpu_memory_utilization"}
    for each in plan["suggestions"]:
        changed = document(capsys, *large, each["setting"])
        assert changed["step"]["seconds"] == pytest.approx(each["step_seconds"])
    assert run([*PLAN, *large]) == 2
    assert "unknown: the run does not fit" in capsys.readouterr().out


def test_an_unknown_card_gives_memory_and_no_seconds(
    capsys: Any, without_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = replace(machine_of("8xh100"), gpu="Other GPU", flops=0, gpu_bandwidth=0, link=0, bus=0)
    monkeypatch.setattr(import_module("rlctl.cli.dry_run"), "machine_of", lambda name: unknown)
    plan = document(capsys, "--machine", "8xh100")
    assert plan["step"]["seconds"] is None
    assert {str(stage["seconds"]) for stage in plan["stages"]} == {"None"}
    assert "the speed of Other GPU: no seconds" in plan["not_known"]
    assert plan["gpu_memory"]["peak_bytes"] > 0


def test_a_model_whose_dimensions_are_unknown_has_no_seconds_and_says_why(
    capsys: Any, without_files: None
) -> None:
    run([*PLAN, "model.path=org/unknown-9B", "--machine", "8xh100"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "one step" in line]
    assert "dimensions are not known" in line
    assert "--machine" not in line


@pytest.mark.parametrize("path", ["Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B"])
def test_usual_large_models_are_planned_before_they_are_downloaded(
    capsys: Any, without_files: None, path: str
) -> None:
    large = [f"model.path={path}", "trainer.nnodes=4", "rollout.tensor_model_parallel_size=4"]
    run([*PLAN, *large, "--machine", "4x8xh200", "--format", "json"])
    assert json.loads(capsys.readouterr().out)["step"]["seconds"]["low"] > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mean-response", "0"], "above 0"),
        (["--mean-response", "9000"], "data.max_response_length"),
        (["--machine", "8xvoodoo"], "4xa100"),
        (["--machine", "0xh100"], "no machine"),
    ],
)
def test_mistakes_of_a_plan_are_errors(capsys: Any, without_files: None, words: list[str], says: str) -> None:
    assert run([*PLAN, *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--mean-response", "9"], ["--format", "json"]])
def test_options_of_a_plan_need_a_dry_run(capsys: Any, words: list[str]) -> None:
    assert run(["train", *words]) == 2
    assert "add --dry-run" in capsys.readouterr().err


def test_an_earlier_run_says_how_long_responses_are(capsys: Any, without_files: None, tmp_path: Path) -> None:
    run_dir = tmp_path / "earlier"
    run_dir.mkdir()
    rows = [{"step": step, "response_length/mean": 2000.0 if step < 30 else 300.0} for step in range(50)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = document(capsys, "--machine", "8xh100", "--mean-response", str(run_dir))
    assert plan["step"]["mean_response"] == 300.0
    given = document(capsys, "--machine", "8xh100", "--mean-response", "300")
    assert plan["step"]["seconds"] == given["step"]["seconds"]
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run([*PLAN, "--mean-response", str(run_dir)]) == 2
    assert "response_length/mean" in capsys.readouterr().err
    assert run([*PLAN, "--mean-response", str(tmp_path / "absent")]) == 2


def test_seconds_are_printed_with_two_ends() -> None:
    assert [str(Seconds(*ends)) for ends in ((36.4, 57.2), (0.41, 0.62), (0.0, 0.0))] == [
        "36–57",
        "0.4–0.6",
        "0.0",
    ]


def test_the_page_lists_every_card() -> None:
    page = (ROOT / "docs/evidence/planned-steps.md").read_text(encoding="utf-8")
    for card in CARDS.values():
        products = f"{card.peak / 1e12:,.0f} | {card.flops / 1e12:,.0f}"
        assert f"| `{card.name}` | {products} | {card.bandwidth / 1e12:.2f} |" in page
