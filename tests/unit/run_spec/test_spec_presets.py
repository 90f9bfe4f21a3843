"""Presets of models, hardware and algorithms go together, in any order, and fit the cards they name."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from rlctl.run_spec import check_rollout
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import MACHINES
from rlctl.run_spec.memory import memory_parts, memory_total
from rlctl.run_spec.model import EMBEDDED
from rlctl.run_spec.model_size import PUBLISHED, model_size
from rlctl.run_spec.placement import Placement
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.sources import DESCRIPTION, all_presets, read_yaml_file

PROMPTS = ["data.train_files=prompts.parquet"]
#: Memory of a card in bytes, as it is sold.
CARDS = {
    "1gpu-24gb": 24e9,
    "1gpu-lora": 48e9,
    "1gpu-80gb": 80e9,
    "8gpu": 80e9,
    "2x8gpu": 80e9,
    "1xh200": 141e9,
}
#: A critic is trained in full, for which a card of adapters has no room.
WITHOUT_CRITIC = {"1gpu-lora", "1gpu-24gb"}
#: A small card has no room for a pass over the long responses of reasoning models.
SHORTER = {"1gpu-24gb": ["data.max_prompt_length=512", "data.max_response_length=1024"]}
#: What the estimate leaves out: kernels, communication, fragments.
SHARE_THAT_FITS = 0.92


def of_kind(kind: str) -> list[str]:
    return [name for name, preset in all_presets().items() if preset.kind == kind and name != EMBEDDED]


def keys(name: str) -> set[str]:
    return set(read_yaml_file(all_presets()[name].path, ()).leaves) - {DESCRIPTION}


def test_every_kind_is_there() -> None:
    named = {load_spec([name], [], PROMPTS).spec.model.path for name in of_kind("models")}
    assert len(named) == len(of_kind("models"))
    assert named <= PUBLISHED.keys()
    assert set(of_kind("hardware")) == set(CARDS)
    assert len(of_kind("algorithms")) >= 7


def test_order_does_not_matter_because_no_two_kinds_set_the_same_key() -> None:
    for one, other in combinations(("models", "hardware", "algorithms"), 2):
        for first, second in product(of_kind(one), of_kind(other)):
            assert not keys(first) & keys(second), (first, second)


@pytest.mark.parametrize("hardware", list(CARDS))
def test_every_combination_is_accepted_and_fits_its_cards(hardware: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    # Only the critic changes an algorithm's memory; one model is enough to test all combinations.
    with_and_without_critic = {*product(of_kind("models"), ("ppo-seq-is-token-rs", "rloo-seq-is"))}
    for model, algorithm in sorted(
        {*with_and_without_critic, *product(["llama3-8b"], of_kind("algorithms"))}
    ):
        loaded = load_spec([model, hardware, algorithm], [], [*PROMPTS, *SHORTER.get(hardware, [])])
        assert loaded.warnings == [], (model, algorithm)
        spec = loaded.spec
        if not (spec.trains_critic and hardware in WITHOUT_CRITIC):
            training, sampling = peaks(spec, CARDS[hardware])
            assert training < SHARE_THAT_FITS * CARDS[hardware], (model, algorithm, training)
            assert sampling < SHARE_THAT_FITS * CARDS[hardware], (model, algorithm, sampling)


@pytest.mark.parametrize("name", all_presets())
def test_a_preset_does_not_warn_about_itself(name: str) -> None:
    prompts = [] if "data.train_files" in keys(name) or name not in of_kind("models") else PROMPTS
    assert load_spec([name], [], prompts).warnings == []


def test_the_same_values_as_ones_own_are_warned_about(tmp_path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(all_presets()["grpo-token-is-multi-rs"].path.read_text())
    rollout_is = "algorithm.rollout_correction.rollout_is"
    assert [warning.key for warning in load_spec([], [own], []).warnings] == [rollout_is]
    # one's own value together with a preset's
    assert [found.key for found in load_spec(["grpo-rs-only"], [], [f"{rollout_is}=token"]).warnings] == [
        rollout_is
    ]


def peaks(spec: RunSpec, card: float) -> tuple[float, float]:
    """Bytes held while training and while sampling, when vLLM takes the share of the card it is given."""
    parts = memory_parts(spec, model_size(spec.model))
    by_name = {part.name: part.num_bytes for part in parts}
    assert None not in by_name.values()
    always = memory_total([part for part in parts if not part.phases])
    training = memory_total([part for part in parts if part.phases != ("generation",)])
    share = spec.rollout.gpu_memory_utilization * card
    weights, longest = by_name["rollout's weights"], by_name["key-value cache"]  # of one sequence
    # In addition to the weights, the keys and values of a few of the longest sequences fit in memory.
    assert weights + 4 * longest < 0.97 * share, (spec.model.path, weights, longest, share)
    return training, always + share


def test_a_preset_of_hardware_says_which_engine_and_how_large_its_share_is() -> None:
    for name in CARDS:
        assert {"rollout.name", "rollout.gpu_memory_utilization", "trainer.n_gpus_per_node"} <= keys(name)
        assert {"trainer.nnodes", "engine.zero_stage", "actor.ppo_max_token_len_per_gpu"} <= keys(name)


def test_hardware_presets_sample_as_many_at_once_as_the_cache_holds() -> None:
    """A limit of its own would cut a batch into waves."""
    for name in of_kind("hardware"):
        assert "rollout.max_num_seqs" not in keys(name)
        assert load_spec([name, "rloo-seq-is"], [], PROMPTS).spec.rollout.max_num_seqs is None


def test_plain_generation_on_a_gpu_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_rollout, "gpus", lambda: ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"])
    monkeypatch.setattr(check_rollout, "gpus_are_hidden", lambda: False)
    said = {
        engine: [
            problem.fix
            for problem in check_rollout.gpu_samples_fast(
                load_spec([], [], [*PROMPTS, "model.path=Qwen/Qwen2.5-7B", f"rollout.name={engine}"]).spec
            )
        ]
        for engine in ("hf", "vllm")
    }
    assert said["vllm"] == []
    assert len(said["hf"]) == 1
    assert "rollout.name=vllm" in said["hf"][0]


def test_complete_runs_for_gpus_sample_with_vllm() -> None:
    for name in ("qwen2.5-7b-rloo-seq-is", "qwen2.5-7b-grpo-multi-rs"):
        spec = load_spec([name], [], []).spec
        assert spec.trainer.n_gpus_per_node == 8
        assert spec.rollout.name == "vllm"
        assert spec.rollout.max_num_seqs is None
        assert memory_total(memory_parts(spec, model_size(spec.model), 80 * 2**30)) < 76 * 2**30


RC = "algorithm.rollout_correction."


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_without_a_preset_any_estimator_is_ppos_clip_without_weights(estimator):
    """As in TRL and verl: π_old of the trainer, no importance weights, nothing rejected."""
    spec = load_spec([], [], [f"algorithm.adv_estimator={estimator}"]).spec
    correction = spec.algorithm.rollout_correction
    assert (correction.loss_type, correction.rollout_is, correction.rollout_rs) == ("ppo_clip", None, None)
    assert not correction.bypass_mode
    if estimator == "grpo":
        named = load_spec(["grpo-uncorrected"], [], []).spec
        assert named.algorithm == spec.algorithm
        assert named.actor == spec.actor


@pytest.mark.parametrize("kind", ["algorithms", "examples"])
def test_a_preset_of_an_algorithm_depends_on_no_default_of_the_correction(kind):
    for name, preset in all_presets().items():
        if preset.kind == kind:
            origins = load_spec([name], [], []).origins
            for key in ("loss_type", "rollout_is", "rollout_rs", "bypass_mode"):
                assert origins[f"{RC}{key}"].layer == "preset", (name, key)
            assert origins["algorithm.adv_estimator"].layer == "preset"


def test_the_stale_preset_has_something_to_correct_and_one_key_turns_the_correction_off():
    """The two runs of docs/tutorial/stale-data.md."""
    off = f"{RC}rollout_is"
    corrected, without = (load_spec(["stale-token-is"], [], given).spec for given in ([], [f"{off}=null"]))
    assert corrected.model.path == EMBEDDED
    assert corrected.rollout.staleness > 1
    assert corrected.algorithm.rollout_correction.rollout_is == "token"
    assert corrected.trainer.test_freq == corrected.trainer.total_training_steps
    same = {"rollout_is": "token"}
    changed = without.algorithm.rollout_correction.model_copy(update=same)
    algorithm = without.algorithm.model_copy(update={"rollout_correction": changed})
    assert without.model_copy(update={"algorithm": algorithm}) == corrected


@pytest.mark.parametrize(
    ("name", "machine"),
    [("qwen3-4b-lora-24gb", "1x24gb"), ("qwen3-1.7b-thinking", "8xh100"), ("qwen3-4b-agent", "1xh100")],
)
def test_examples_fit_the_machines_that_they_name(name: str, machine: str) -> None:
    spec = load_spec([name]).spec
    placement = Placement(spec, model_size(spec.model), MACHINES[machine])
    assert [problem for problem in placement.problems() if problem.severity == "error"] == []
    training, sampling = peaks(spec, MACHINES[machine].gpu_bytes)
    assert max(training, sampling) < SHARE_THAT_FITS * MACHINES[machine].gpu_bytes
