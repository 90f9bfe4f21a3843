"""Options for vLLM and DeepSpeed: merged unchanged; refused if a spec key sets the same option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.engine.deepspeed_setup import merged
from rlctl.errors import SpecError
from rlctl.rollout.replicas import as_arguments
from rlctl.run_spec.check_rollout import DEEPSPEED_OWNERS, VLLM_OWNERS
from rlctl.run_spec.load import dump_spec, load_spec

VLLM = "rollout.name=vllm"


def problems(*overrides: str) -> dict[str, str]:
    """Key → message of every error."""
    try:
        load_spec([], [], list(overrides))
    except SpecError as error:
        return {each.key: f"{each.what} ({each.fix})" for each in error.problems if each.severity == "error"}
    return {}


def test_options_keep_their_types_through_every_layer(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "rollout:\n  name: vllm\n  engine_kwargs:\n    enforce_eager: true\n    block_size: 32\n"
        "    compilation_config:\n      level: 0\n"
    )
    given = ["rollout.engine_kwargs.block_size=64", "rollout.engine_kwargs.swap_space=1.5"]
    spec = load_spec([], [file], given).spec
    assert spec.rollout.engine_kwargs == {
        "enforce_eager": True,
        "block_size": 64,
        "compilation_config": {"level": 0},
        "swap_space": 1.5,
    }
    again = tmp_path / "again.yaml"
    again.write_text(dump_spec(spec))
    assert load_spec([], [again], []).spec == spec


def test_a_json_file_is_read_into_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"overlap_comm": False}}))
    spec = load_spec([], [], [f"engine.deepspeed={file}"]).spec
    assert spec.engine.deepspeed == {"zero_optimization": {"overlap_comm": False}}
    file.write_text("[1]")
    assert "must hold a JSON object" in problems(f"engine.deepspeed={file}")["engine.deepspeed"]
    file.write_text("{")
    assert str(file) in problems(f"engine.deepspeed={file}")["engine.deepspeed"]
    missing = problems(f"engine.deepspeed={file}.absent")
    assert "No such file" in missing["engine.deepspeed"]


@pytest.mark.parametrize("option", VLLM_OWNERS)
def test_what_the_spec_sets_is_refused_for_vllm(option: str) -> None:
    key = f"rollout.engine_kwargs.{option}"
    found = problems(VLLM, f"{key}=1")
    assert set(found) == {key}
    assert option in found[key]
    assert VLLM_OWNERS[option] in found[key]


@pytest.mark.parametrize("option", DEEPSPEED_OWNERS)
def test_what_the_spec_sets_is_refused_for_deepspeed(option: str) -> None:
    key = f"engine.deepspeed.{option}"
    found = problems(f"{key}=1")
    assert set(found) == {key}
    assert DEEPSPEED_OWNERS[option] in found[key]


def test_what_nobody_owns_passes() -> None:
    assert (
        problems(
            "engine.deepspeed.zero_optimization.overlap_comm=false",
            "engine.deepspeed.wall_clock_breakdown=true",
        )
        == {}
    )
    assert problems(VLLM, "rollout.engine_kwargs.enforce_eager=true") == {}


def test_options_nobody_reads_are_refused() -> None:
    key = "rollout.engine_kwargs"
    assert "rollout.name is hf" in problems(f"{key}.enforce_eager=true")[key]
    there = [VLLM, "rollout.mode=server", "rollout.server.urls=http://a:1", "rollout.server.weights_dir=/tmp"]
    assert "run already" in problems(*there, f"{key}.enforce_eager=true")[key]


def test_merging_goes_mapping_by_mapping() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(base, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}
    assert merged(base, {"a": 1}) == {"a": 1, "d": 3}
    assert merged(base, {"e": {}}) == {**base, "e": {}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_arguments_of_a_server() -> None:
    options = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "block_size": 32,
        "hf_overrides": {"a": 1},
    }
    assert as_arguments(options) == [
        *("--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32"),
        *("--hf-overrides", '{"a": 1}'),
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.deepspeed.zero_optimization=3", "engine.zero_stage"),
        ("engine.deepspeed.bf16=true", "engine.dtype"),
        ("engine.deepspeed.bfloat16.enabled=true", "engine.dtype"),
        ("engine.deepspeed.torch_autocast.enabled=true", "engine.dtype"),
        ("engine.deepspeed.zero_optimization.cpu_offload=true", "engine.offload"),
        ("engine.deepspeed.zero_optimisation.stage=3", "DeepSpeed ignores unknown names"),
        ("engine.deepspeed.zero_optim.stage=2", "DeepSpeed ignores unknown names"),
        ("engine.deepspeed=nope.json", "must be a mapping, or a JSON file: No such file"),
        ("rollout.engine_kwargs=nope.json", "must be a mapping, or a JSON file: No such file"),
        ("engine.deepspeed.optimizer.params.lr=1", "actor.lr"),
        ("rollout.engine_kwargs.max-model-len=8", "data.max_prompt_length"),
        ("rollout.engine_kwargs.tp=2", "rollout.tensor_model_parallel_size"),
        ("rollout.engine_kwargs.override_generation_config.temperature=2", "rollout.temperature"),
    ],
)
def test_other_spellings_of_what_the_spec_sets(override: str, words: str) -> None:
    (found,) = problems(VLLM, override).values()
    assert words in found


def test_a_name_that_deepspeed_may_not_know_is_a_warning() -> None:
    (found,) = load_spec([], [], ["engine.deepspeed.foo=1"]).warnings
    assert (found.key, found.severity) == ("engine.deepspeed.foo", "warning")
    assert "ignores unknown names" in found.what


def test_options_of_vllm_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text('{"enforce_eager": true}')
    spec = load_spec([], [], [VLLM, f"rollout.engine_kwargs={tmp_path}/options.json"]).spec
    assert spec.rollout.engine_kwargs == {"enforce_eager": True}
    (tmp_path / "options.json").write_text("enforce_eager: true\n")
    (found,) = problems(VLLM, f"rollout.engine_kwargs={tmp_path}/options.json").values()
    assert "this file is not JSON" in found


@pytest.mark.parametrize("option", ["comms_logger.enabled=true", "zero_optimization.overlap_comm=true"])
def test_other_options_of_deepspeed_are_passed_on(option: str) -> None:
    assert problems(f"engine.deepspeed.{option}") == {}
