"""What a run needs of a machine, by hand; what a machine has too little of is refused with the figures."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.app import run
from rlctl.run_spec import machine as machine_module
from rlctl.run_spec.cards import CARDS
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import GIB, MACHINES, Machine, machine_of, this_machine
from rlctl.run_spec.memory import CONTEXT, MemoryPart, memory_total
from rlctl.run_spec.model_size import PUBLISHED, ModelSize, Shape, checkpoint_bytes, model_size
from rlctl.run_spec.placement import Placement

BASE = ["data.train_files=x", "engine.dtype=bf16", "model.path=Qwen/Qwen2.5-7B"]
P = 7_615_616_512


def place(machine: str | Machine, *overrides: str, presets: tuple[str, ...] = ()) -> Placement:
    spec = load_spec(list(presets), [], [*BASE, *overrides]).spec
    chosen = MACHINES[machine] if isinstance(machine, str) else machine
    return Placement(spec, model_size(spec.model), chosen)


def errors(placement: Placement) -> dict[str, str]:
    return {problem.key: problem.what for problem in placement.problems() if problem.severity == "error"}


def host(placement: Placement) -> dict[str, float]:
    return {part.name: part.num_bytes or 0.0 for part in placement.host_parts}


UNPINNED = "engine.deepspeed.zero_optimization.offload_optimizer.pin_memory=false"


def test_offloading_is_twenty_bytes_a_parameter_on_the_host() -> None:
    names = ("fp32 weights", "gradients of the step", "moments", "sums of gradients")
    plain = host(place("1xh100", "engine.zero_stage=3", "engine.offload=optimizer", UNPINNED))
    assert sum(plain[name] for name in names) == 20 * P
    two = host(place("1xh100", "engine.zero_stage=2", "engine.offload=optimizer", UNPINNED))
    assert sum(two.get(name, 0.0) for name in names) == 16 * P  # the sums are on the GPU
    dense = {
        part.name: part.num_bytes
        for part in place("1xh100", "engine.zero_stage=2", "engine.offload=optimizer").gpu_parts
    }
    assert dense["gradients"] == 4 * P


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [
        ([], 2 * P),
        (["engine.zero_stage=3", "trainer.n_gpus_per_node=8"], 2 * P),  # every rank has all of it
        (["reward.model.dtype=fp32"], 4 * P),
        (["reward.model.device=cuda:7"], None),
        (["reward.name=maths"], None),
        (["reward.terms=[{name: model}, {name: exact}]", "reward.name=auto"], 2 * P),
    ],
)
def test_a_reward_model_on_the_rank_s_gpu_takes_its_memory(given: list[str], num_bytes: float | None) -> None:
    reward = ("reward.name=model", "reward.model.path=Qwen/Qwen2.5-7B")
    placement = place("8xh100", *reward, *given)
    found = {part.name: part.num_bytes for part in placement.gpu_parts}
    assert found.get("reward model's weights") == num_bytes


def test_pinned_buffers_are_powers_of_two() -> None:
    found = host(place("1xh100", "engine.zero_stage=2", "engine.offload=optimizer"))
    assert found["fp32 weights"] == found["gradients of the step"] == pytest.approx(32 * GIB)  # 28.4 GiB
    assert found["moments"] == 8 * P
    three = host(place("1xh100", "engine.zero_stage=3", "engine.offload=optimizer"))
    assert three["fp32 weights"] == pytest.approx(P * 4 * GIB / 1e9)  # sub-groups of 10⁹ numbers
    assert three["sums of gradients"] == 32 * GIB


def test_a_sleeping_engine_keeps_its_weights_only_where_no_full_sync_follows() -> None:
    vllm = ("rollout.name=vllm", "trainer.n_gpus_per_node=8")
    assert "sleeping vLLM's weights" not in host(place("8xh100", *vllm))
    for kept in ("rollout.sync_every=2", "model.lora_rank=8"):
        copy = host(place("8xh100", *vllm, kept))["sleeping vLLM's weights"]
        assert 8 * 2 * P < copy < 8 * 4 * P


def test_the_memory_of_cpu_ranks_is_that_of_the_host() -> None:
    cores = replace(MACHINES["1xh100"], gpus=0, host_bytes=24 * GIB)
    [problem] = place(cores).problems()
    assert (problem.severity, problem.key) == ("warning", "model.path")
    assert "a node's host memory must hold" in problem.what
    assert not [*place(replace(cores, host_bytes=1000 * GIB)).problems()]
    two = ("trainer.n_gpus_per_node=2", "model.path=smollm2-135m", "engine.dtype=fp32")
    needed = 2 * 134_515_008 * 16  # weights, gradients and moments of two ranks
    assert [*place(replace(cores, host_bytes=needed), *two).problems()]


def test_ranks_share_what_they_read_unless_the_rollout_engine_copies_it() -> None:
    """A full update of a 7B model on eight GPUs fits into 128 GiB of host memory."""
    machine = replace(MACHINES["8xh100"], host_bytes=128 * GIB)
    eight = ("trainer.n_gpus_per_node=8", "engine.zero_stage=2", "model.enable_gradient_checkpointing=true")
    vllm = place(machine, *eight, "rollout.name=vllm")
    shape = vllm.size.shape
    assert host(vllm)["weights in transfer"] == 8 * 2 * 2 * shape.vocab * shape.hidden
    assert "engine.offload" not in errors(vllm)
    copies = place(machine, *eight, "rollout.name=hf")
    assert host(copies)["weights in transfer"] == 8 * 2 * P
    assert "engine.offload" in errors(copies)
    experts = replace(
        vllm.size, shape=replace(shape, has_experts=True, experts_per_token=1)
    )  # joined as they are read
    assert host(Placement(vllm.spec, experts, machine))["weights in transfer"] == 8 * 2 * P


def test_a_small_dev_shm_is_refused_before_the_start() -> None:
    docker = replace(MACHINES["8xh100"], shm_bytes=64 * 2**20)
    server = ("rollout.name=vllm", "rollout.mode=server", "rollout.server.replicas=4")
    server += ("trainer.n_gpus_per_node=4", "engine.zero_stage=3", "model.enable_gradient_checkpointing=true")
    found = errors(place(docker, *server, "rollout.server.weight_transfer=files"))
    assert "rollout.server.weights_dir" not in errors(place(docker, *server))  # weights are broadcast
    assert found["rollout.server.weights_dir"].startswith("/dev/shm must hold 28.5 GiB")
    assert "64.0 MiB" in found["rollout.server.weights_dir"]
    assert errors(place("8xh100", *server)) == {}
    assert errors(place(docker, *server, "rollout.server.weights_dir=/disk")) == {}


@pytest.mark.parametrize(
    ("machine", "overrides", "key", "says"),
    [
        (
            "1xh100",
            ["model.path=a/b-70B", "engine.zero_stage=3"],
            "engine.zero_stage",
            "are always needed",
        ),
        (
            "1xh100",
            ["engine.zero_stage=3", "engine.offload=all", "model.path=a/b-70B"],
            "engine.offload",
            "240.0 GiB",
        ),
        (
            "1x24gb",
            ["model.lora_rank=32", "rollout.name=vllm"],
            "rollout.gpu_memory_utilization",
            "does not hold",
        ),
        ("1xh100", ["trainer.n_gpus_per_node=8"], "trainer.n_gpus_per_node", "8 GPUs"),
        ("8xh100", ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"], "trainer.nnodes", "2 nodes"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_figures(
    machine: str, overrides: list[str], key: str, says: str
) -> None:
    assert says in errors(place(machine, *overrides))[key]


def test_a_model_that_no_gpu_holds_whole_is_read_in_parts() -> None:
    """Under ZeRO-3; an engine that copies the policy, or too few GPUs, keep their memory requirement."""
    size = ModelSize("as published", 70_553_706_496, Shape(80, 8192, 28_672, 64, 8, 128, 128_256))
    big = ("model.path=a/b-70B", "engine.zero_stage=3", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    more = ("engine.offload=optimizer", "rollout.name=vllm", "rollout.mode=server")
    more += ("rollout.server.urls=[http://n:1]", "model.enable_gradient_checkpointing=true")
    more += ("actor.ppo_micro_batch_size_per_gpu=1",)
    given = load_spec([], [], [*BASE, *big, *more]).spec
    plan = Placement(given, size, MACHINES["2x8h100"])
    assert errors(plan) == {}
    on_the_way = host(plan)["weights in transfer"]
    assert 8 * 2 * 2 * 128_256 * 8192 <= on_the_way < 8 * 2 * size.num_parameters / 10
    partition = next(stage for stage in plan.stages() if stage.name == "partition")
    assert partition.gpu < 40 * GIB
    # A node whose memory does not hold the optimizer's states is refused.
    small = replace(MACHINES["2x8h100"], host_bytes=600 * GIB)
    assert "moments" in errors(Placement(given, size, small))["engine.offload"]
    whole = load_spec([], [], [*BASE, *big, *more[:1], *more[4:]]).spec  # Hugging Face generation
    copies = Placement(whole, size, MACHINES["2x8h100"])
    assert host(copies)["weights in transfer"] == 8 * 2 * size.num_parameters
    assert errors(copies)


def test_an_engine_over_several_gpus_holds_what_one_gpu_does_not() -> None:
    size = ModelSize("as published", 70_553_706_496, Shape(80, 8192, 28_672, 64, 8, 128, 128_256))
    big = ("model.path=a/b-70B", "engine.zero_stage=3", "trainer.n_gpus_per_node=8", "rollout.name=vllm")
    more = (
        "rollout.gpu_memory_utilization=0.7",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
    )

    def plan(shared: int, *overrides: str) -> Placement:
        own = f"rollout.tensor_model_parallel_size={shared}"
        return Placement(
            load_spec([], [], [*BASE, *big, *more, own, *overrides]).spec, size, MACHINES["8xh100"]
        )

    def part(placement: Placement, name: str) -> float:
        return next(each.num_bytes or 0.0 for each in placement.gpu_parts if each.name == name)

    key = "rollout.gpu_memory_utilization"
    assert "does not hold the weights" in errors(plan(1))[key]
    four = plan(4)
    assert key not in errors(four)
    weights = part(four, "rollout's weights")
    assert weights == 2 * size.num_parameters / 4
    # Each of four GPUs has two of eight heads of keys; each of eight one.
    one = 2 * 80 * 2 * 128 * 2048 * 2
    left = 0.7 * MACHINES["8xh100"].gpu_bytes - weights - part(four, "rollout's workspace")
    cache = next(each for each in four.gpu_parts if each.name == "key-value cache")
    assert cache.num_bytes == left
    assert f"{left / one:.0f} sequences" in cache.note
    copied = "sleeping vLLM's weights"
    kept = ("rollout.sync_every=2",)
    assert host(plan(8, *kept))[copied] < 0.6 * host(plan(4, *kept))[copied]
    # Eight GPUs read the weights faster; more responses per engine cost its process more.
    few = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
    assert plan(8, *few).seconds()["generate"] < plan(4, *few).seconds()["generate"]
    odd = replace(size, shape=replace(size.shape, heads=60))
    assert (
        "60 attention heads"
        in errors(Placement(plan(8).spec, odd, MACHINES["8xh100"]))["rollout.tensor_model_parallel_size"]
    )


#: Published logs of vLLM: GiB of the GPU, its share, GiB of the weights, vocabulary; GiB for the cache.
#: Llama 3 8B with 0.6.5 (https://github.com/vllm-project/vllm/pull/10511), a model of 14 GiB and Llama 3.1 8B
#: with versions of September 2025 and October 2026 (lines "Actual usage is … GiB for weight").
CACHES = [
    (79.22, 0.9, 14.96, 128_256, 53.29),
    (79.19, 0.9, 14.08, 131_072, 55.15 - 0.67),  # less its CUDA graphs, which that version did not count
    (79.25, 0.92, 15.0, 128_256, 56.21),
]


@pytest.mark.parametrize(("gpu", "share", "weights", "vocab", "cache"), CACHES)
def test_the_cache_is_that_of_published_logs(
    gpu: float, share: float, weights: float, vocab: int, cache: float
) -> None:
    shape = replace(PUBLISHED["meta-llama/Meta-Llama-3-8B"].shape, vocab=vocab)
    size = ModelSize("a log", int(weights * GIB / 2), shape)
    card = replace(MACHINES["1xh100"], gpu_bytes=gpu * GIB)
    given = ["rollout.name=vllm", f"rollout.gpu_memory_utilization={share}"]
    parts = {part.name: part for part in Placement(place(card, *given).spec, size, card).gpu_parts}
    assert parts["key-value cache"].num_bytes / GIB == pytest.approx(cache, rel=0.03)
    taken = [part.num_bytes for name, part in parts.items() if name.startswith(("rollout's", "key-value"))]
    assert sum(taken) == pytest.approx(share * gpu * GIB)


def test_no_stage_of_a_step_takes_no_time() -> None:
    spec = load_spec(["qwen2.5-7b", "8gpu", "rloo-seq-is"], [], ["data.train_files=x"]).spec
    found = Placement(spec, model_size(spec.model), MACHINES["8xh100"]).stages()
    shown = {stage.name: str(stage.seconds) for stage in found if stage.name in {"update", "step", "sync"}}
    assert len(shown) == 3
    assert "0.0" not in shown.values()


def test_free_memory_of_gpus_is_put_to_use() -> None:
    """Long responses wait for a small cache: a larger share is said to be faster, where it fits."""

    def plan(*given: str, mean: float | None = None) -> Placement:
        lengths = ("data.max_prompt_length=1024", "data.max_response_length=4096", "rollout.n=32")
        found = place("8xh100", *lengths, *given, presets=("8gpu", "rloo-seq-is"))
        return Placement(found.spec, found.size, found.machine, mean)

    keys = {each.setting.partition("=")[0]: each for each in plan(mean=3000).suggestions()}
    share = keys["rollout.gpu_memory_utilization"]
    assert float(share.setting.partition("=")[2]) > 0.38
    better = plan(share.setting, mean=3000)
    assert better.intervals["whole step"] == share.seconds
    assert memory_total(better.gpu_parts) < MACHINES["8xh100"].gpu_bytes
    short = {
        each.setting.partition("=")[0] for each in plan("data.train_batch_size=16", mean=100).suggestions()
    }
    assert "rollout.gpu_memory_utilization" not in short  # all fit into the cache already
    assert place("1x24gb", presets=("8gpu", "rloo-seq-is")).suggestions() == []  # does not fit at all


def test_dense_attention_over_long_rows_is_warned_about_on_gpus() -> None:
    key, long = "model.attn_implementation", ("data.max_prompt_length=1024", "data.max_response_length=8192")
    [warning] = [p for p in place("8xh100", *long, "trainer.n_gpus_per_node=8").problems() if p.key == key]
    assert (warning.severity, "dense mask" in warning.what) == ("warning", True)
    for kernel in ("varlen", "flash_attention_2", "flash_attention_3"):
        assert key not in {p.key for p in place("8xh100", *long, f"{key}={kernel}").problems()}
    shorter = ("data.max_prompt_length=1024", "data.max_response_length=7168")
    assert key not in {p.key for p in place("8xh100", *shorter).problems()}


@pytest.mark.parametrize("model", ["qwen3-8b", "smollm3-3b", "deepseek-r1-qwen-7b"])
@pytest.mark.parametrize("machine", [("1gpu-80gb", "1xh100"), ("8gpu", "8xh100")])
def test_thinking_needs_one_switch_and_a_length(model: str, machine: tuple[str, str]) -> None:
    """With the default attention, and tokens per pass of the preset of the hardware."""
    switch = [] if "r1" in model else ["data.chat_template_kwargs.enable_thinking=true"]
    given = ["data.train_files=x", "data.max_response_length=24576", *switch]
    spec = load_spec([model, machine[0], "rloo-seq-is"], [], given).spec
    assert (spec.model.attn_implementation, spec.actor.ppo_max_token_len_per_gpu) == ("sdpa", 25600)
    problems = Placement(spec, model_size(spec.model), MACHINES[machine[1]]).problems()
    assert [p.key for p in problems if p.severity == "error"] == []


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "gemma-7b", "mistral-7b"])
def test_the_preset_of_24_gb_fits(model: str) -> None:
    spec = load_spec([model, "1gpu-24gb", "rloo-seq-is"], [], ["data.train_files=x"]).spec
    placement = Placement(spec, model_size(spec.model), MACHINES["1x24gb"])
    assert errors(placement) == {}
    assert max(stage.gpu for stage in placement.stages()) < 0.95 * MACHINES["1x24gb"].gpu_bytes
    both = spec.model_copy(update={"engine": spec.engine.model_copy(update={"offload_base": False})})
    assert errors(Placement(both, model_size(spec.model), MACHINES["1x24gb"]))


def test_the_step_of_a_7b_on_eight_gpus() -> None:
    """1,024 responses of at most 2k tokens, corrected in its decoupled form, stay below 80 s."""
    decoupled = "algorithm.rollout_correction.bypass_mode=false"
    lengths = ("data.max_prompt_length=512", "data.max_response_length=1536")
    given = ("data.train_batch_size=128", "rollout.n=8", decoupled, *lengths)
    plan = place("8xh100", *given, presets=("8gpu", "grpo-rs-only"))
    seconds = plan.seconds()
    stages = [time for name, time in seconds.items() if name != "whole step"]
    assert sum(stages) == pytest.approx(seconds["whole step"])
    assert seconds["whole step"] < 80
    slow = replace(MACHINES["8xh100"], flops=MACHINES["8xh100"].flops / 2)
    assert place(slow, *given, presets=("8gpu", "grpo-rs-only")).seconds()["update"] > 1.5 * seconds["update"]
    assert (
        place("8xh100", *given, "rollout.name=hf", presets=("8gpu", "grpo-rs-only")).seconds()["generate"]
        > 4 * seconds["generate"]
    )


def test_weights_are_gathered_once_per_pass_that_is_made() -> None:
    """Under ZeRO-3, scoring gathers all weights once per micro-batch and scored model; bypass scores none."""
    given = ("engine.zero_stage=3", "trainer.n_gpus_per_node=8", "model.enable_gradient_checkpointing=true")
    given += (
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        "actor.ppo_max_token_len_per_gpu=8192",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    tokens = 128 * 8 / 8 * (512 / 2 + 512 * 0.4)  # of a rank, at the mean lengths
    once = tokens / 8192 * 2 * P
    summed = tokens / 8192 * 4 * P  # gradients in float32, after every backward pass

    def moved(*overrides: str) -> dict[str, float]:
        return {
            stage.name: stage.moved.get("GPU to GPU", 0.0)
            for stage in place("8xh100", *given, *overrides).stages()
        }

    bypass = moved()
    assert (bypass["score"], bypass["update"]) == (0.0, pytest.approx(4 * once + summed))
    decoupled = ("algorithm.rollout_correction.bypass_mode=false", "actor.use_kl_loss=true")
    assert moved(*decoupled)["score"] == pytest.approx(2 * once)
    assert moved("actor.ppo_epochs=3")["update"] == pytest.approx(3 * bypass["update"])
    assert moved("algorithm.adv_estimator=optimal_token_baseline")["score"] == pytest.approx(once)
    by_rows = ("actor.ppo_max_token_len_per_gpu=null", "actor.ppo_micro_batch_size_per_gpu=8")
    # Whatever the lengths: 128 responses of a rank are 16 micro-batches of 8, in 2 mini-batches 2 × 7 of 10.
    assert moved(*by_rows)["update"] == (4 * 2 + 4) * 16 * P
    by_rows = (*by_rows[:1], "actor.ppo_micro_batch_size_per_gpu=10", "actor.ppo_mini_batch_size=64")
    assert moved(*by_rows)["update"] == (4 * 2 + 4) * 2 * 7 * P


def test_scoring_keeps_no_activations() -> None:
    plan = place("8xh100", "trainer.n_gpus_per_node=8", "algorithm.rollout_correction.bypass_mode=false")
    parts = {part.name: part.num_bytes or 0.0 for part in plan.gpu_parts}
    peaks = {stage.name: stage.gpu for stage in plan.stages()}
    head = sum(parts[name] for name in ("last norm and states", "logits and their gradient"))
    head += parts["output head's gradient"]
    passing = max(head, parts["one layer backward"])
    assert peaks["score"] == pytest.approx(plan.gpu_peak() + passing)
    assert peaks["update"] == pytest.approx(peaks["score"] + parts["activations"])


def test_gradients_are_summed_over_the_ranks_and_weights_are_collected() -> None:
    """Gradients per step in float32 (ZeRO 0: to all ranks), or per micro-batch (ZeRO 2)."""
    batch = (
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=64",
        "rollout.n=8",
        "data.max_prompt_length=512",
    )
    batch += ("data.max_response_length=512", "actor.ppo_max_token_len_per_gpu=4096")
    micro = 64 * (512 / 2 + 512 * 0.4) / 4096  # responses of a rank, at the mean length

    def moved(*overrides: str) -> float:
        stages = place("8xh100", *batch, *overrides).stages()
        return next(stage.moved["GPU to GPU"] for stage in stages if stage.name == "update")

    assert moved("engine.dtype=fp32") == 8 * P
    assert moved("engine.zero_stage=1") == (4 + 2) * P
    assert moved("engine.zero_stage=1", "actor.ppo_mini_batch_size=16") == 4 * (4 + 2) * P
    assert moved("engine.zero_stage=2", "actor.ppo_epochs=2") == pytest.approx(2 * (4 * micro + 2) * P)
    adapted = [(3584, 3584), *2 * [(3584, 512)], (3584, 3584), *2 * [(3584, 18_944)], (18_944, 3584)]
    assert moved("model.lora_rank=16") == (4 + 2) * 28 * 16 * sum(map(sum, adapted))


def test_an_engine_of_ones_own_that_forms_batches_is_not_taken_for_slow(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from rlctl.registry import ROLLOUT_ENGINES\n"
        "from rlctl.run_spec.rollout import EngineCapabilities\n\n"
        "def plain(context): ...\n\n"
        "@ROLLOUT_ENGINES.register(label='own', capabilities=EngineCapabilities(forms_batches=True))\n"
        "def own(context): ...\n"
    )
    seconds = {
        name: place("1xh100", f"rollout.name={name}", presets=("grpo-rs-only",)).seconds()["generate"]
        for name in ("vllm", f"{file}:own", f"{file}:plain", "hf")
    }
    assert len(set(seconds.values())) == 2
    assert seconds["vllm"] == seconds[f"{file}:own"] < seconds[f"{file}:plain"]


def test_the_step_of_a_small_model_on_two_cores() -> None:
    """Of `make train-llm`, as measured: docs/how-to/real-model.md, "What a step costs"."""
    measured = {"generate": 5.6, "whole step": 15.1}
    spec = load_spec(["smollm2-135m-sums"], [], ["data.train_files=x", "engine.dtype=fp32"]).spec
    cores = replace(this_machine(), gpus=0, flops=140e9, gpu_bandwidth=20e9)
    seconds = Placement(spec, model_size(spec.model), cores).seconds()
    assert seconds["score"] == 0.0
    for phase, real in measured.items():
        assert 0.5 < real / seconds[phase] < 2


def test_prompts_count_once_for_the_responses_that_share_a_pass() -> None:
    """Prompts of 2k tokens, responses of 150: eight of one prompt take about an eighth of the time."""
    lengths = ("data.max_prompt_length=4096", "data.max_response_length=200", "rollout.n=8")

    def update(*overrides: str) -> float:
        return place("1xh100", *lengths, "engine.zero_stage=3", *overrides).seconds()["update"]

    together, apart = (
        update("actor.ppo_micro_batch_size_per_gpu=8"),
        update("actor.ppo_micro_batch_size_per_gpu=1"),
    )
    assert 4 < apart / together < 8
    assert update("actor.ppo_max_token_len_per_gpu=40000") == pytest.approx(apart)


def test_a_token_is_computed_by_its_own_experts() -> None:
    """The others are read, moved and stored, and compute nothing."""
    dense = place("8xh100", "rollout.name=vllm", presets=("8gpu", "grpo-rs-only"))
    shape = dense.size.shape
    assert shape
    idle = shape.layers * 3 * shape.hidden * shape.inner * 3 // 4  # of four experts, a token chooses one
    size = replace(dense.size, shape=replace(shape, has_experts=True, experts_per_token=1), num_idle=idle)
    sparse = Placement(dense.spec, size, dense.machine)
    times, less = dense.seconds(), sparse.seconds()
    assert 0.4 * times["update"] < less["update"] < 0.7 * times["update"]
    # 128 sequences at once choose nearly all experts between them: all are read.
    assert 0.9 * times["generate"] < less["generate"] < 1.1 * times["generate"]
    few = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=2")
    one = place("8xh100", "rollout.name=vllm", *few, presets=("8gpu", "grpo-rs-only"))
    alone = Placement(one.spec, size, one.machine)
    assert alone.seconds()["generate"] < 0.8 * one.seconds()["generate"]
    assert less["sync"] == times["sync"]


def test_an_unknown_size_is_no_error() -> None:
    spec = load_spec([], [], ["data.train_files=x", "model.path=a/b"]).spec
    placement = Placement(spec, ModelSize("unknown"), MACHINES["8xh100"])
    assert placement.seconds() == {}
    assert errors(placement) == {}


def test_a_peak_with_an_unknown_part_is_a_lower_bound(capsys: Any) -> None:
    run(["train", "data.train_files=x", "model.path=a/b", "--dry-run", "--all", "--machine", "8xh100"])
    of_host = capsys.readouterr().out.partition("Host memory per node")[2]
    assert re.search(r"peak +over 4\.0 GiB *\n", of_host)


def test_the_dry_run_plans_for_a_machine(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("rlctl.cli.dry_run"), "check_inputs", lambda spec: [])
    nothing = import_module("rlctl.train.first_row").FirstRow()
    monkeypatch.setattr(import_module("rlctl.cli.dry_run"), "check_first_row", lambda *_, **__: nothing)
    train = [
        "train",
        "-p",
        "qwen2.5-7b",
        "-p",
        "8gpu",
        "-p",
        "rloo-seq-is",
        "data.train_files=x",
        "--dry-run",
    ]
    assert run([*train, "--machine", "8xh100", "--all"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Host memory per node (8xh100",
        "Stages on 8xh100 (1 × 8 × H100",
        "one step:",
        "sequences of",
    ):
        assert words in out
    slow = "Hugging Face generation on a GPU takes about five times as long as vLLM's"
    assert slow not in out
    assert run([*train, "--machine", "8xh100", "rollout.name=hf"]) == 0
    assert slow in capsys.readouterr().out
    assert run([*train, "--machine", "1xh100"]) == 2
    assert "the run takes 8 GPUs of each node, 1xh100 has 1" in capsys.readouterr().out
    assert run([*train, "--machine", "9xh1000"]) == 2
    assert "8xh100" in capsys.readouterr().err
    assert run(["train", "--machine", "8xh100"]) == 2


def test_a_start_that_cannot_fit_is_refused_with_exit_code_4(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(MACHINES["1x24gb"], name="this machine")
    monkeypatch.setattr(machine_module, "this_machine", lambda: small)
    monkeypatch.setattr(import_module("rlctl.train.preflight"), "check_inputs", lambda spec: [])
    first_row = import_module("rlctl.train.first_row")
    monkeypatch.setattr(first_row, "check_first_row", lambda *_, **__: first_row.FirstRow())
    given = ["model.path=Qwen/Qwen2.5-7B", "data.train_files=x", "engine.dtype=bf16", "rollout.name=vllm"]
    assert run(["train", *given]) == 4
    assert "50% of a GPU of 23.6 GiB does not hold the weights" in capsys.readouterr().err


def test_a_full_disk_is_a_warning_of_the_dry_run_and_refuses_the_start(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    assert run(["train", "--dry-run"]) == 0
    assert "GiB are free" in capsys.readouterr().out
    assert run(["train", "--dry-run", "--machine", "1xh100"]) == 0
    assert "GiB are free" not in capsys.readouterr().out
    assert run(["train"]) == 4
    assert "GiB are free" in capsys.readouterr().err


def test_this_machine_has_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{3 * GIB}\n")
    monkeypatch.setattr(machine_module, "_CGROUP_LIMITS", (limit,))
    monkeypatch.setattr(machine_module, "gpus", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"] * 2)
    monkeypatch.setattr(machine_module, "gpus_are_hidden", lambda: False)
    machine_module.this_machine.cache_clear()
    found = machine_of(None)
    assert (found.gpus, found.host_bytes, found.flops) == (2, 3 * GIB, CARDS["h100"].flops)
    assert found.gpu_bytes == pytest.approx(79.6 * GIB, rel=1e-2)
    monkeypatch.setattr(machine_module, "gpus_are_hidden", lambda: True)
    machine_module.this_machine.cache_clear()
    assert machine_of(None).gpus == 0
    machine_module.this_machine.cache_clear()


def test_a_gpu_without_memory_of_its_own_has_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "gpus", lambda: ["NVIDIA GB10, [N/A], 580.95.05"])
    monkeypatch.setattr(machine_module, "gpus_are_hidden", lambda: False)
    machine_module.this_machine.cache_clear()
    found = machine_of(None)
    machine_module.this_machine.cache_clear()
    assert (found.gpu, found.gpus, found.gpu_bytes) == ("NVIDIA GB10", 1, found.host_bytes)


def test_int8_weights_are_read_in_the_engines_dtype() -> None:
    """As in `rollout's weights`: they are rounded to 8 bits, and stored in float32 here."""
    given = ("engine.dtype=fp32", "rollout.name=hf")
    rounded, plain = (place("1xh100", *given, f"rollout.dtype={dtype}") for dtype in ("int8", "null"))
    assert rounded.seconds()["generate"] == plain.seconds()["generate"]


def test_the_revision_is_that_of_the_policy_alone(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """A critic of another repository is loaded from its main branch, so its size is read there."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--critic" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--critic" / "refs").mkdir()
    (tmp_path / "models--org--critic" / "refs" / "main").write_text("abc")
    sizes = '"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32'
    (snapshot / "config.json").write_text(f"{{{sizes}}}")
    given = ["data.train_files=x", "model.path=Qwen/Qwen2.5-7B", "algorithm.adv_estimator=gae"]
    spec = load_spec([], [], [*given, "model.revision=v1", "critic.path=org/critic"]).spec
    assert checkpoint_bytes(spec) is not None


def slow_steps(placement: Placement) -> list[Any]:
    return [problem for problem in placement.problems() if "a step takes" in problem.what]


def test_a_step_of_more_than_ten_minutes_is_warned_about_with_what_shortens_it() -> None:
    """Settings that do the same work in less time first, then what makes a step smaller."""
    chosen = ["llama3-8b", "1gpu-24gb", "rloo-seq-is"]
    given = ["data.train_files=x", "data.train_batch_size=128"]
    spec = load_spec(chosen, [], given).spec
    placement = Placement(spec, model_size(spec.model), MACHINES["1x24gb"])
    now = placement.intervals["whole step"]
    assert now.middle > 600
    [warning] = slow_steps(placement)
    assert warning.severity == "warning"
    assert f"{now.low / 60:,.0f}–{now.high / 60:,.0f} minutes" in warning.what
    faster, _, smaller = warning.fix.partition("; or less in a step: ")
    assert faster.startswith(f"{placement.suggestions()[0].setting}: ")
    assert "data.train_batch_size=" in smaller
    assert "data.max_response_length=" in smaller
    changes = [re.fullmatch(r"(\S+): (\S+) s", each) for each in f"{faster}; {smaller}".split("; ")]
    for change in changes:  # a spec with the change is accepted, and takes what was said
        assert change
        other = load_spec(chosen, [], [*given, change[1]]).spec
        seconds = Placement(other, placement.size, placement.machine).intervals["whole step"]
        assert str(seconds) == change[2]
        assert seconds.middle < now.middle
    larger = load_spec(chosen, [], [*given, "actor.ppo_max_token_len_per_gpu=200000"]).spec
    unfit = Placement(larger, placement.size, placement.machine)
    assert errors(unfit)
    assert not slow_steps(unfit)  # it must fit first: its seconds are those of a run that cannot be
    fast = replace(placement.machine, flops=1e16, gpu_bandwidth=1e14, bus=1e13, host_bandwidth=1e13)
    assert not slow_steps(Placement(spec, placement.size, fast))


@pytest.mark.parametrize(("of_peak", "severity"), [(0.99, "error"), (1.02, "warning"), (1.06, None)])
def test_a_peak_that_leaves_nothing_for_fragments_is_warned_about(of_peak: float, severity: str) -> None:
    """What does not fit by the suggestions is never without a problem."""
    large = place("8xh100", "rollout.name=hf", presets=("8gpu", "grpo-rs-only"))
    peak = max(stage.gpu for stage in large.stages())
    plan = Placement(large.spec, large.size, replace(large.machine, gpu_bytes=of_peak * peak))
    found = {problem.severity for problem in plan.problems() if "are needed at once" in problem.what}
    assert found == ({severity} if severity else set())
    assert plan.fits() == (severity is None)


def test_a_gpu_that_is_not_in_the_table_has_no_seconds() -> None:
    unknown = replace(MACHINES["1x24gb"], gpu="Tesla T4", flops=0, gpu_bandwidth=0, link=0, bus=0)
    placement = place(unknown)
    assert placement.seconds() == {}
    assert {stage.seconds for stage in placement.stages()} == {None}
    assert max(stage.gpu for stage in placement.stages()) > 0
    assert not slow_steps(placement)


def test_the_copy_from_which_a_checkpoint_is_written_is_host_memory_where_it_fits() -> None:
    name, key = "copy of a checkpoint", "trainer.save_in_background"
    roomy = place("8xh100")
    whole = checkpoint_bytes(roomy.spec)
    assert whole
    assert host(roomy)[name] == whole
    assert host(place("2x8h100", "trainer.nnodes=2"))[name] == whole / 2
    assert name not in host(place("8xh100", f"{key}=false"))
    small = replace(MACHINES["8xh100"], host_bytes=roomy.machine.host_bytes / 20)
    tight = place(small)
    assert name not in host(tight)  # training waits for the files
    assert key not in {problem.key for problem in tight.problems()}
    [warning] = [problem for problem in place(small, f"{key}=true").problems() if problem.key == key]
    assert warning.severity == "warning"
    assert "training waits while checkpoints are written" in warning.what
    assert not [problem for problem in place("8xh100", f"{key}=true").problems() if problem.key == key]


def test_memory_that_the_container_lacks_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("max", "current", "stat")]
    for name, file in zip(("_CGROUP_LIMITS", "_CGROUP_USES", "_CGROUP_PARTS"), files, strict=True):
        monkeypatch.setattr(machine_module, name, (file,))
    of_machine = machine_module.free_host_bytes()  # no control group
    assert of_machine > 0
    for file, text in zip(
        files, ("3000000\n", "2500000\n", "anon 5\nfile 900000\nshmem 100000\n"), strict=True
    ):
        file.write_text(text)
    assert machine_module.free_host_bytes() == 3_000_000 - 2_500_000 + 900_000 - 100_000
    files[0].write_text("max\n")
    assert machine_module.free_host_bytes() > 3_000_000


def test_what_cuda_and_nccl_take_is_counted_on_gpus() -> None:
    def taken(plan: Placement) -> float:
        return sum(part.num_bytes or 0.0 for part in plan.gpu_parts if part.name == CONTEXT)

    alone, many = place("1xh100"), place("8xh100", "trainer.n_gpus_per_node=8")
    assert 0.5 * GIB < taken(alone) < 1.0 * GIB
    assert 1.5 * GIB < taken(many) < 2.5 * GIB
    assert many.gpu_peak() >= taken(many)  # in every phase
    assert taken(place(replace(MACHINES["1xh100"], gpus=0))) == 0.0


#: Options of vLLM → what of the engine they halve.
FP8 = {"quantization": "rollout's weights", "kv_cache_dtype": "key-value cache"}


def test_sampling_in_fp8_is_suggested_where_the_gpu_has_it_and_it_is_faster() -> None:
    lengths = ("data.max_prompt_length=1024", "data.max_response_length=8192")

    def suggested(machine: str, *given: str) -> dict[str, float]:
        plan = place(machine_of(machine), *lengths, *given, presets=("8gpu", "rloo-seq-is"))
        return {each.setting: each.seconds.middle for each in plan.suggestions()}

    settings = {name: f"rollout.engine_kwargs.{name}=fp8" for name in FP8}
    for setting in settings.values():
        found = suggested("8xh100")[setting]
        changed = place("8xh100", *lengths, setting, presets=("8gpu", "rloo-seq-is"))
        assert changed.intervals["whole step"].middle == pytest.approx(found)
        assert setting not in suggested("8xh100", setting)
    assert not suggested("8xa100").keys() & set(settings.values())
    assert not suggested("8xh100", "rollout.name=hf").keys() & set(settings.values())


def test_fp8_takes_half_of_the_memory() -> None:
    def parts(*given: str) -> dict[str, MemoryPart]:
        plan = place("8xh100", *given, presets=("8gpu", "rloo-seq-is"))
        return {part.name: part for part in plan.gpu_parts}

    plain = parts()
    weights = parts("rollout.engine_kwargs.quantization=fp8")
    assert weights["rollout's weights"].num_bytes == P == plain["rollout's weights"].num_bytes / 2
    assert weights["key-value cache"].num_bytes == plain["key-value cache"].num_bytes + P  # of the same share
    cache = parts("rollout.engine_kwargs.kv_cache_dtype=fp8")
    numbers = [int(re.search(r"for (\d+) seq", each["key-value cache"].note)[1]) for each in (plain, cache)]
    assert numbers[1] == pytest.approx(2 * numbers[0], abs=1)


def test_ligers_kernels_are_suggested_where_they_make_it_fit() -> None:
    """Also where layers need not be computed again with them; the estimate has no other seconds of theirs."""
    again = "model.enable_gradient_checkpointing"

    def suggested(tokens: int, recomputes: str) -> set[str]:
        given = ("data.max_prompt_length=512", "data.max_response_length=3072", f"{again}={recomputes}")
        given += ("model.attn_implementation=varlen", f"actor.ppo_max_token_len_per_gpu={tokens}")
        return {
            each.setting for each in place("8xh100", *given, presets=("8gpu", "rloo-seq-is")).suggestions()
        }

    assert "model.use_liger=true" in suggested(10_500, "false")  # 85 GiB, with Liger 67
    assert f"model.use_liger=true {again}=false" in suggested(10_500, "true")
    assert f"{again}=false" in suggested(4000, "true")
    assert not any("use_liger" in setting for setting in suggested(4000, "true"))  # it fits without
