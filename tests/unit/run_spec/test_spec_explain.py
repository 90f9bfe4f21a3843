"""Dry-run figures checked by hand."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import save_file

from rlctl.run_spec.explain import BatchArithmetic, bands, notes
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import MemoryPart, adapter_parameters, memory_parts, memory_total
from rlctl.run_spec.model import NAMED_MODELS, ModelSpec
from rlctl.run_spec.model_size import PUBLISHED, ModelSize, Shape, model_size

RC = "algorithm.rollout_correction."


def spec_of(*overrides, preset=None):
    return load_spec([preset] if preset else [], [], list(overrides)).spec


def test_bands_of_the_guides_multi_rs():
    found = {band.name: band for band in bands(spec_of(preset="grpo-token-is-multi-rs"))}
    assert found["token_k1"].interval == "0.6 ≤ ρ ≤ 1.6"
    assert found["seq_max_k2"].interval == "ρ ≤ 2.5"
    assert found["PPO clip"].interval == "0.8 ≤ ρ ≤ 1.2"
    assert "not applied" in found["IS weight"].outside
    assert all("whole response" in found[name].outside for name in ("token_k1", "seq_max_k2"))


def test_the_same_words_in_verls_dialect():
    found = {band.name: band for band in bands(spec_of(f"{RC}dialect=verl", preset="grpo-token-is-multi-rs"))}
    assert found["token_k1"].interval == "0.625 ≤ ρ ≤ 1.667"
    assert found["token_k1"].outside == "the token is rejected"
    assert found["seq_max_k2"].interval == "0.1069 ≤ ρ ≤ 9.356"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "product"),
        ([f"{RC}rollout_is=token"], "each token"),
        ([f"{RC}rollout_is=geometric"], "geometric mean"),
    ],
)
def test_bands_say_what_they_bound(overrides, words):
    [band] = bands(spec_of(*overrides, preset="rloo-seq-is"))
    assert words in band.bounds
    assert "divided by their mean" in band.outside


def test_notes_warn_of_long_products():
    assert any("0.0049" in note for note in notes(spec_of(preset="qwen2.5-7b-rloo-seq-is")))
    assert not any("product" in note for note in notes(spec_of(f"{RC}rollout_is=token")))


@pytest.mark.parametrize(
    ("preset", "overrides", "implied"),
    [
        ("grpo-token-is-multi-rs", [], {"seq_max_k2": "token_k1"}),
        ("grpo-rs-only", [], {"seq_max_k2": "token_k1"}),
        ("grpo-rs-only", [f"{RC}rollout_rs_threshold=0.7_1.4,1.3"], {}),
        # verl's token_k1 removes tokens, its seq_max_k2 sequences: neither does the other's work
        ("grpo-rs-only", [f"{RC}dialect=verl"], {}),
        ("rloo-seq-is", [], {}),
    ],
)
def test_notes_name_the_criterion_that_another_implies(preset, overrides, implied):
    said = [note for note in notes(spec_of(*overrides, preset=preset)) if "never rejects" in note]
    assert [tuple(note.split()[:1]) for note in said] == [(name,) for name in implied]
    assert all(f"{other} implies it" in note for note, other in zip(said, implied.values(), strict=True))


def test_of_two_criteria_alike_one_is_named():
    same = [f"{RC}rollout_rs=token_k1,token_veto", f"{RC}rollout_rs_threshold=0.5_1e9,0.5"]
    assert len([note for note in notes(spec_of(*same)) if "never rejects" in note]) == 1


def test_batch_arithmetic():
    batch = BatchArithmetic(spec_of("trainer.n_gpus_per_node=4", preset="qwen2.5-7b-rloo-seq-is"))
    assert (batch.samples, batch.mini_batches, batch.samples_per_mini_batch) == (640, 4, 160)
    assert (batch.samples_per_rank, batch.micro_batch_tokens, batch.steps_per_batch) == (40, 16384, 4)
    assert batch.num_batches is None
    assert batch.total_steps is None
    tiny = BatchArithmetic(
        spec_of("actor.ppo_micro_batch_size_per_gpu=200", "trainer.total_training_steps=240")
    )
    assert (tiny.samples_per_rank, tiny.micro_batches_per_rank) == (512, 3)
    assert tiny.total_steps == 480
    budget = BatchArithmetic(spec_of("actor.ppo_max_token_len_per_gpu=200"))
    assert (budget.micro_batches_per_rank, budget.micro_batch_tokens) == (None, 200)


def test_total_steps_from_the_number_of_rows():
    overrides = ["model.path=a/b", "data.train_files=x", "trainer.total_epochs=2"]
    batch = BatchArithmetic(spec_of(*overrides, "actor.ppo_mini_batch_size=64"), 300)
    assert (batch.num_rows, batch.num_batches, batch.total_steps) == (300, 4, 8)
    three = [*overrides[:2], "trainer.total_epochs=3"]
    assert BatchArithmetic(spec_of(*three), 300).num_batches == 7, (
        "900 rows: a batch may hold rows of two epochs"
    )
    assert BatchArithmetic(spec_of(*overrides)).num_batches is None


def test_batches_that_train_the_critic_alone_have_no_step_of_the_policy():
    gae = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=10", "trainer.critic_warmup=4"]
    batch = BatchArithmetic(spec_of(*gae, "actor.ppo_mini_batch_size=null", "actor.ppo_epochs=3"))
    assert (batch.num_batches, batch.total_steps) == (10, 18)


@pytest.mark.parametrize(("high", "shown"), [("4e-4", "0.9997 ≤ ρ ≤ 1.0004"), ("0.28", "0.9997 ≤ ρ ≤ 1.28")])
def test_a_narrow_band_shows_its_distance_from_1(high, shown):
    rule = "algorithm.rollout_correction.loss_type=gspo"
    spec = spec_of(rule, "actor.clip_ratio_low=3e-4", f"actor.clip_ratio_high={high}")
    assert shown in [band.interval for band in bands(spec)]


@pytest.mark.parametrize(
    ("path", "place", "variables"),
    [
        ("smollm2-135m", "rlctl/models/{name}", {"RLCTL_CACHE": "rlctl"}),
        (
            "org/model-7b",
            "xdg/huggingface/hub/models--org--model-7b/snapshots/main",
            {"XDG_CACHE_HOME": "xdg"},
        ),
        ("org/model-7b", "old/models--org--model-7b/snapshots/main", {"HUGGINGFACE_HUB_CACHE": "old"}),
        ("org/model-7b", "home/hub/models--org--model-7b/snapshots/main", {"HF_HOME": "home"}),
    ],
)
def test_a_cached_model_is_on_this_machine(path, place, variables, tmp_path, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    named = NAMED_MODELS.get(path)
    directory = tmp_path / place.format(name=f"{path}-{named.version}" if named else "")
    spec = ModelSpec(path=path)
    assert "not on this machine" in model_size(spec).source
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert "not on this machine" not in model_size(spec).source


def test_memory_by_hand():
    spec = spec_of("trainer.n_gpus_per_node=8", "model.path=a/b-7B", preset="qwen2.5-7b-rloo-seq-is")
    size = model_size(spec.model)
    assert size.num_parameters == 7_000_000_000
    parts = {part.name: part.num_bytes for part in memory_parts(spec, size)}
    assert parts["weights"] == 7e9 * 2 / 8
    assert parts["gradients"] == 7e9 * 4 / 8
    assert parts["optimizer (AdamW)"] == 7e9 * 12 / 8
    assert parts["rollout's weights"] == 7e9 * 2
    assert parts["key-value cache"] is None
    unsharded = spec_of("engine.zero_stage=1", "model.path=a/b-7B", preset="qwen2.5-7b-rloo-seq-is")
    parts = {part.name: part.num_bytes for part in memory_parts(unsharded, size)}
    assert (parts["weights"], parts["optimizer (AdamW)"]) == (7e9 * 2, 7e9 * 12 / 8)
    assert parts["gradients"] == 7e9 * 4  # summed in float32; the step takes them as they lie
    assert "gradients of the step" not in parts
    moved = spec_of("engine.offload=all", "trainer.n_gpus_per_node=8", preset="qwen2.5-7b-rloo-seq-is")
    parts = {part.name: part.num_bytes for part in memory_parts(moved, size)}
    assert parts["weights"] == parts["gradients"] == parts["optimizer (AdamW)"] == 0.0
    assert parts["gathered weights"] == 1e9 * 2


def test_memory_of_activations_by_hand():
    """Llama 3 8B: bytes per token and layer of norms, attention, log-sum-exp, mask, feed-forward."""
    overrides = [
        "model.path=meta-llama/Meta-Llama-3-8B",
        "data.train_files=x",
        "actor.ppo_max_token_len_per_gpu=1000",
    ]
    overrides += ["engine.dtype=bf16", "data.max_prompt_length=200", "data.max_response_length=800"]
    size = PUBLISHED["meta-llama/Meta-Llama-3-8B"]

    def parts(*more):
        return {part.name: part for part in memory_parts(spec_of(*overrides, *more), size)}

    layer = 2 * 4096 * (4 + 2 + 2) + 4 * 4096 * 2 + 32 * 4 + 1000 * 2 + 4 * 14_336 * 2
    gradients = 2 * 4096 * 2 + 2 * 14_336 * 2
    kept = parts()
    assert kept["activations"].num_bytes == 1000 * 32 * layer
    assert kept["one layer backward"].num_bytes == 1000 * gradients
    again = parts("model.enable_gradient_checkpointing=true")
    assert again["activations"].num_bytes == 1000 * 32 * 4096 * 2
    assert again["one layer backward"].num_bytes == 1000 * (layer + gradients)
    assert again["activations"].phases == ("head", "layers")
    assert again["output head's gradient"].num_bytes == 128_256 * 4096 * 2
    adapters = parts("model.lora_rank=16")
    assert "output head's gradient" not in adapters
    less = 2 * 4096 * 2 - 7 * 16 * 2  # no scaled inputs of norms; what every A puts out
    assert adapters["activations"].num_bytes == 1000 * 32 * (layer - less)
    queries, keys, gated = 2 * 4096 + 2 * 4096, 4096 + 1024, 4096 + 14_336
    each = queries + 2 * keys + 3 * gated
    assert adapters["gradients"].num_bytes == 32 * 16 * each * 4


def test_the_largest_phase_counts():
    parts = [
        MemoryPart("weights", 100.0),
        MemoryPart("activations", 50.0, ("head", "layers")),
        MemoryPart("logits", 30.0, ("head",)),
        MemoryPart("one layer", 40.0, ("layers",)),
        MemoryPart("critic's", 80.0, ("critic",)),
        MemoryPart("unknown", None, ("generation",)),
    ]
    assert memory_total(parts) == 100 + 50 + 40
    assert memory_total(parts[:1]) == 100


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        (["engine.dtype=fp32"], 4 + 4 + 8 + 4),
        (["engine.dtype=fp32", "engine.zero_stage=2"], 4 + 4 + 12 + 4),
        (["engine.dtype=bf16"], 2 + 4 + 12),
        (["engine.dtype=bf16", "engine.zero_stage=2"], 2 + 4 + 12 + 4),
        (["engine.dtype=fp32", "engine.zero_stage=3"], 4 + 4 + 12 + 4 + 4 + 4),
        (["engine.dtype=bf16", "engine.zero_stage=3"], 2 + 4 + 12 + 4 + 2 + 4),
    ],
)
def test_memory_of_an_update_is_what_benchmarks_measure(overrides, bytes_each):
    """`benchmarks/memory.py` and docs/how-to/scale.md: one rank, without the batch."""
    parts = memory_parts(spec_of(*overrides), ModelSize("counted", 1000))
    known = [part.num_bytes for part in parts if part.num_bytes is not None and "rollout" not in part.name]
    assert sum(known) == 1000 * bytes_each


def test_memory_of_a_rollout_engine_is_counted_where_and_while_it_is_held():
    size = model_size(spec_of().model)
    phases = {}
    for where in ("hf", "colocated", "server"):
        overrides = [] if where == "hf" else ["rollout.name=vllm", f"rollout.mode={where}"]
        phases[where] = {part.name: part.phases for part in memory_parts(spec_of(*overrides), size)}
    assert phases["hf"]["rollout's weights"] == ()
    assert phases["colocated"]["rollout's weights"] == ("generation",)  # asleep while the trainer trains
    assert phases["colocated"]["key-value cache"] == ("generation",)
    assert not {"rollout's weights", "key-value cache"} & phases["server"].keys()


def test_memory_of_the_embedded_model_is_complete():
    spec = spec_of()
    parts = memory_parts(spec, model_size(spec.model))
    sizes = {part.name: part.num_bytes for part in parts}
    # 2 × 2 layers × 2 kv heads × 32 × 14 tokens × 1024 sequences × 4 bytes
    assert sizes["key-value cache"] == 2 * 2 * 2 * 32 * 14 * 1024 * 4
    held = sizes["weights"] + sizes["gradients"] + sizes["optimizer (AdamW)"] + sizes["rollout's weights"]
    update = sizes["activations"] + max(
        sizes["one layer backward"],
        sizes["last norm and states"] + sizes["logits and their gradient"] + sizes["output head's gradient"],
    )
    assert memory_total(parts) == held + max(sizes["key-value cache"], update)
    half = memory_parts(spec_of("rollout.dtype=bf16"), model_size(spec.model))  # keys in the engine's type
    cache = {part.name: part.num_bytes for part in half}["key-value cache"]
    assert cache == sizes["key-value cache"] / 2


def write_model(directory, *, with_weights: bool):
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 10,
        "intermediate_size": 16,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    if with_weights:
        import numpy as np

        save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "billions", "billions_per_token", "adapters"),
    [
        (
            {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
             "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
             "num_experts_per_tok": 2},
            46.7, 12.9, 13_631_488,  # Mixtral-8x7B
        ),
        (
            {"num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936,
             "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
             "moe_intermediate_size": 768, "num_experts_per_tok": 8},
            30.5, 3.3, 13_369_344,  # Qwen3-30B-A3B
        ),
    ],
)  # fmt: skip
def test_the_experts_of_a_configuration_are_counted(config, billions, billions_per_token, adapters, tmp_path):
    """A directory of the hub's cache may hold the configuration alone.

    The number of adapter parameters, of rank 16 on all linear layers, is that of PEFT: experts have none.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = model_size(ModelSpec(path=str(tmp_path)))
    assert size.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (size.num_parameters - size.num_idle) / 1e9 == pytest.approx(billions_per_token, rel=0.02)
    assert (
        adapter_parameters(spec_of("model.path=a/b", "data.train_files=x", "model.lora_rank=16"), size)
        == adapters
    )


def test_model_size_from_a_directory(tmp_path):
    write_model(tmp_path / "m", with_weights=True)
    size = model_size(ModelSpec(path=str(tmp_path / "m")))
    assert (size.num_parameters, size.shape) == (
        17,
        Shape(2, 8, 16, heads=4, kv_heads=2, head_dim=2, vocab=10),
    )
    write_model(tmp_path / "c", with_weights=False)
    attention, mlp = 8 * 8 * 2 + 8 * 4 * 2, 3 * 8 * 16
    assert model_size(ModelSpec(path=str(tmp_path / "c"))).num_parameters == 80 + 2 * (attention + mlp)


def test_model_size_knows_norms_of_queries_and_keys(tmp_path):
    write_model(tmp_path, with_weights=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not model_size(ModelSpec(path=str(tmp_path))).shape.norms_heads
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    assert model_size(ModelSpec(path=str(tmp_path))).shape.norms_heads


def test_model_size_from_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--thing"
    write_model(repository / "snapshots" / "abc", with_weights=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert model_size(ModelSpec(path="org/thing")).num_parameters == 17
    assert model_size(ModelSpec(path="org/thing", revision="abc")).num_parameters == 17
    assert model_size(ModelSpec(path="org/thing", revision="other")).num_parameters is None


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen/Qwen2.5-Coder-7B", 7e9),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("a/Llama-3.2-1B-Instruct", 1e9),
        ("x/y-350m", 350e6),
        ("gpt2", None),
        ("a/b2b", None),
    ],
)
def test_model_size_from_a_name(name, count, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_size(ModelSpec(path=name)).num_parameters == count


def test_broken_weights_do_not_break_the_estimate(tmp_path):
    write_model(tmp_path / "m", with_weights=False)
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\xff" * 20)
    assert model_size(ModelSpec(path=str(tmp_path / "m"))).source == "config.json"
