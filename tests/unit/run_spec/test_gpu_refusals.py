"""Settings of GPUs that are refused say the value that helps, and that value is accepted."""

from __future__ import annotations

import re

import pytest

from rlctl.errors import SpecError
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import machine_of
from rlctl.run_spec.memory import memory_total
from rlctl.run_spec.model_size import ModelSize, Shape
from rlctl.run_spec.placement import Placement

#: Qwen3 32B, by its config.json.
SIZE_32B = ModelSize(
    "as published", 32_762_123_264, Shape(64, 5120, 25_600, 64, 8, 128, 151_936, norms_heads=True)
)


@pytest.mark.parametrize("hardware", ["8gpu", "2x8gpu", "1gpu-80gb", "1xh200", "1gpu-24gb"])
def test_fsdp_combines_with_hardware_presets_by_what_its_refusals_say(hardware: str) -> None:
    given = ["data.train_files=x", "engine.name=fsdp"]
    for _ in range(4):
        try:
            spec = load_spec(["qwen2.5-7b", hardware, "rloo-seq-is"], [], given).spec
            break
        except SpecError as error:
            for problem in error.problems:
                assert problem.key.startswith("engine.")
                assert problem.fix
                written = re.search(r"write (engine\.\w+=\w+)", problem.fix)
                assert written, problem.fix
                given.append(written[1])
    assert spec.engine.name == "fsdp"
    assert spec.engine.effective_stage == 3


def plan_of_32b(*given: str) -> Placement:
    settings = ["data.train_files=x", "model.path=org/model-32B", *given]
    spec = load_spec(["8gpu", "rloo-seq-is"], [], settings).spec
    return Placement(spec, SIZE_32B, machine_of("8xh100"))


def test_weights_that_one_gpu_does_not_hold_are_offered_several() -> None:
    key = "rollout.gpu_memory_utilization"
    [problem] = [each for each in plan_of_32b().problems() if each.key == key]
    written = re.search(r"write (rollout.tensor_model_parallel_size=(\d+))", problem.fix or "")
    assert written
    better = plan_of_32b(written[1])
    assert key not in {each.key for each in better.problems() if each.severity == "error"}
    assert memory_total(better.gpu_parts, ("generation",)) > 0
    fewer = int(written[2]) // 2  # no smaller number does
    if fewer > 1:
        still = plan_of_32b(f"rollout.tensor_model_parallel_size={fewer}").problems()
        assert key in {each.key for each in still if each.severity == "error"}


def test_several_gpus_are_not_offered_where_none_helps() -> None:
    huge = ModelSize("a log", 2_000_000_000_000, SIZE_32B.shape)
    plan = Placement(plan_of_32b().spec, huge, machine_of("8xh100"))
    [problem] = [each for each in plan.problems() if each.key == "rollout.gpu_memory_utilization"]
    assert "tensor_model_parallel_size" not in (problem.fix or "")
