"""In which precision a run's models are loaded."""

from __future__ import annotations

import pytest
import torch

from rlctl.spec.load import load_spec
from rlctl.train.models import _loading, _rounded
from tests.models import tiny_model


@pytest.mark.parametrize(
    ("overrides", "policy", "critic"),
    [
        (["engine.dtype=fp32"], torch.float32, torch.float32),
        (["engine.dtype=bf16"], "auto", "auto"),
        (["engine.dtype=bf16", "engine.zero_stage=2"], "auto", "auto"),
        (["engine.dtype=bf16", "engine.zero_stage=3"], torch.bfloat16, torch.bfloat16),
        (["engine.dtype=bf16", "model.lora_rank=4"], torch.bfloat16, "auto"),
    ],
)
def test_weights_that_are_trained_in_bf16_are_read_as_stored(overrides, policy, critic) -> None:
    spec = load_spec([], [], ["model.path=a/b", "data.train_files=x", *overrides]).spec
    assert _loading(spec, spec.actor)["dtype"] == policy
    assert _loading(spec, spec.critic)["dtype"] == critic
    assert _loading(spec, None)["dtype"] == {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.engine.dtype]


def test_the_sampling_copy_is_in_the_engines_precision() -> None:
    """Also that of an engine of the user's own; what the trainer gets keeps its digits."""
    spec = load_spec([], [], ["model.path=a/b", "data.train_files=x", "engine.dtype=bf16"]).spec
    model = tiny_model()
    rounded = _rounded(model, spec)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert _rounded(rounded, spec) is rounded
