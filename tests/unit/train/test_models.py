"""In which precision a run's models are loaded."""

from __future__ import annotations

import copy

import pytest
import torch

from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train.model_loader import loading_arguments, refuse_unfit
from rlctl.train.models import _endless, _rounded
from tests.models import tiny_model
from tests.unit.rollout.test_hf_rollout import TOKENIZER


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        (["engine.dtype=fp32"], "auto"),
        (["engine.dtype=bf16"], "auto"),
        (["engine.dtype=bf16", "engine.zero_stage=2"], "auto"),
        (["engine.dtype=fp32", "engine.zero_stage=3"], torch.float32),
        (["engine.dtype=bf16", "engine.zero_stage=3"], torch.bfloat16),
        (["engine.dtype=bf16", "model.lora_rank=4"], "auto"),
    ],
)
def test_weights_are_read_as_stored_unless_zero_3_partitions_them_meanwhile(overrides, dtype) -> None:
    spec = load_spec([], [], ["model.path=a/b", "data.train_files=x", *overrides]).spec
    assert loading_arguments(spec)["dtype"] == dtype


def test_the_sampling_copy_is_in_the_engines_precision() -> None:
    """Also that of an engine of the user's own; what the trainer gets keeps its digits."""
    spec = load_spec([], [], ["model.path=a/b", "data.train_files=x", "engine.dtype=bf16"]).spec
    model = tiny_model()
    rounded = _rounded(model, spec)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert _rounded(rounded, spec) is rounded


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize(
    ("rope", "length", "refusal"),
    [({}, 64, ""), ({}, 65, "context is 64"), (LONGROPE, 32, ""), (LONGROPE, 33, "sequences over 32")],
)
def test_lengths_whose_positions_are_defined(rope, length: int, refusal: str) -> None:
    """Beyond a limit, transformers computes all rows of a batch with the frequencies of the longest one."""
    lengths = [f"data.max_prompt_length={length - 8}", "data.max_response_length=8"]
    spec = load_spec([], [], ["model.path=a/b", "data.train_files=x", *lengths]).spec
    model = tiny_model()
    model.config.rope_parameters |= rope
    if not refusal:
        refuse_unfit(model, spec)
        return
    with pytest.raises(UsageError, match=refusal) as caught:
        refuse_unfit(model, spec)
    assert str(length - 1) in str(caught.value.fix)


def test_quantised_weights_are_refused() -> None:
    """Cast to bf16 without their scales, they would be other weights."""
    model = tiny_model()
    model.is_quantized = True  # as transformers marks it
    with pytest.raises(UsageError, match="quantised"):
        refuse_unfit(model, load_spec([], [], ["model.path=a/b", "data.train_files=x"]).spec)


def test_a_run_warns_of_a_template_that_ends_replies_with_no_stop_token():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
    (warning,) = _endless(tokenizer, [tokenizer.eos_token_id])
    assert warning.startswith("warning: the template ends a reply with <|turn|>, which does not end a turn")
    assert "eos_token_id" in warning
    assert _endless(tokenizer, [tokenizer.convert_tokens_to_ids("<|turn|>")]) == []
