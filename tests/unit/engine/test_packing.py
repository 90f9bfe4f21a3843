"""Packed rows give the log-probs and gradients of whole rows, and read no token twice."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ElectraConfig,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
    SmolLM3Config,
)

from rlctl.batch import ModelInputs
from rlctl.engine import inputs
from rlctl.engine.inputs import can_pack, reads_past_only, same_values
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import UsageError
from rlctl.prefix import body_of, can_share_prefix
from tests.flash_attention import use_flash
from tests.unit.test_prefix import HORIZON, PROMPT, SHAPE, VOCABULARY, rows_of, tokens_read

ARCHITECTURES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layers=[1, 0]),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=16),
    "mistral": MistralConfig(**SHAPE, sliding_window=16),
}


def a_model(kind: str, attention: str = "sdpa"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[kind], attn_implementation=attention).eval()


def answers(module: PolicyModule, rows: dict[str, torch.Tensor]):
    """Tokens read, log-probs and gradients."""
    module.zero_grad()
    counts, log_probs = tokens_read(module, rows)
    (log_probs * torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)).sum().backward()
    return counts, log_probs.detach(), {n: p.grad.clone() for n, p in module.model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "sdpa") for kind in ARCHITECTURES), ("llama", "eager")]
)
@pytest.mark.parametrize("siblings", [(4, 4, 4), (4, 1, 3), (1, 1), (9,)], ids=str)
@pytest.mark.parametrize("width", [1, 24])  # a row as wide as the longest sequence; some sequences in a row
def test_log_probs_and_gradients_are_those_of_whole_rows(
    kind: str, attention: str, siblings: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "packed_width", lambda _hidden: width)
    module, rows = PolicyModule(a_model(kind, attention), 0.7), rows_of(*siblings)
    assert module.packs
    [read], ours, our_grads = answers(module, rows)
    module.packs = module.shares_prompts = False
    [whole], theirs, their_grads = answers(module, rows)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    for name, gradient in their_grads.items():
        atol = 2e-6 + 2e-6 * float(gradient.abs().max())  # an element may be a small sum of large terms
        torch.testing.assert_close(our_grads[name], gradient, rtol=1e-4, atol=atol)
    assert read < whole


def test_a_prompt_is_read_once_for_all_responses_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "packed_width", lambda _hidden: 1000)
    rows = rows_of(5)
    [read], _, _ = answers(PolicyModule(a_model("llama"), 1.0), rows)
    prompt = int(rows["attention_mask"][0, :PROMPT].sum())
    assert read == prompt + int((rows["scored"].sum(1) - 1).sum())


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_reads_all_sequences_in_one_row(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the second kernel from the hub if the package of the first one is missing."""
    rows = rows_of(3, 1)
    plain = PolicyModule(a_model("llama"), 0.7)
    plain.packs = plain.shares_prompts = False
    _, theirs, their_grads = answers(plain, rows)
    model = a_model("llama")
    use_flash(model, monkeypatch, kernel)
    module = PolicyModule(model, 0.7)
    assert module.packs
    [read], ours, our_grads = answers(module, rows)
    assert read == int((rows["attention_mask"][:, :PROMPT].sum(1) + rows["scored"].sum(1) - 1).sum())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    for name, gradient in their_grads.items():
        torch.testing.assert_close(our_grads[name], gradient, rtol=1e-4, atol=2e-6)


def test_a_window_shorter_than_a_sequence_is_not_packed() -> None:
    config = MistralConfig(**SHAPE, sliding_window=3)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = rows_of(2, 2)
    module = PolicyModule(model, 1.0, share_prompts=False)
    counts, log_probs = tokens_read(module, rows)
    assert counts == [4 * (PROMPT + HORIZON - 1)]
    module.packs = False
    torch.testing.assert_close(module(ModelInputs(**rows))[0], log_probs)


#: Some layers, or a part of each, carry a state from token to token besides keys and values.
RECURRENT = {
    "mamba": MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    # With the usual initial weights, the state changes the attention layers' result by less than a percent.
    "falcon_h1": FalconH1Config(
        **SHAPE | {"initializer_range": 0.02},
        **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_read_whole_rows(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(RECURRENT[kind]).eval()
    assert not can_pack(body_of(model))
    assert not can_share_prefix(model)
    module, rows = PolicyModule(model, 0.7), rows_of(2)
    log_probs, _ = module(ModelInputs(**rows))
    torch.testing.assert_close(log_probs, whole_rows(model, rows, 0.7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_that_counts_places_instead_of_positions_is_not_packed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=64)
    assert not can_pack(body_of(AutoModelForCausalLM.from_config(config).to(dtype).eval()))


def test_a_model_that_multiplies_rounding_is_not_refused() -> None:
    """In a deep model in bf16, other shapes change the result by more than in one layer."""
    torch.manual_seed(1)
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 32, "initializer_range": 0.8})
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    assert can_pack(body_of(model))
    assert reads_past_only(model)


def test_a_difference_is_rounding_if_rounding_the_embeddings_explains_it() -> None:
    plain = torch.ones(8, dtype=torch.bfloat16)
    assert same_values(plain * 1.0625, plain, rounded=plain * 0.9375)
    assert not same_values(plain * 1.125, plain, rounded=plain * 1.03125)
    assert not same_values(plain * 1.015625, plain, rounded=plain)


def test_a_model_that_reads_padding_is_refused() -> None:
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        **SHAPE, head_dim=8, lru_width=16, attention_window_size=16, block_types=["recurrent", "attention"]
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    with pytest.raises(UsageError, match="reads padding"):
        PolicyModule(model, 1.0)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_reads_later_tokens_is_refused(is_decoder: bool) -> None:
    """Encoders load as causal language models too, with a warning of transformers."""
    torch.manual_seed(0)
    # A wider head than embedding, and a transformation of the states before the head.
    config = ElectraConfig(**SHAPE, embedding_size=24, is_decoder=is_decoder)
    model = AutoModelForCausalLM.from_config(config).eval()
    if not is_decoder:
        with pytest.raises(UsageError, match="tokens after those that it predicts"):
            PolicyModule(model, 1.0)
        return
    rows = rows_of(3, 1)
    log_probs, _ = PolicyModule(model, 0.7)(ModelInputs(**rows))
    torch.testing.assert_close(log_probs, whole_rows(model, rows, 0.7), rtol=1e-4, atol=1e-5)


#: Scale their logits after the head, some by what the body's output or the body itself contains.
SCALED = {
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 8.0}, True),
    "cohere": ({"logit_scale": 0.25}, True),
    "falcon_h1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
        | {"lm_head_multiplier": 0.2},
        False,
    ),
    "llama4_text": (  # its body has another name than its prefix
        {"num_local_experts": 2, "head_dim": 8, "intermediate_size_mlp": 24, "attention_chunk_size": 64},
        True,
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_log_probs_of_what_the_model_computes_after_its_body(kind: str) -> None:
    torch.manual_seed(0)
    options, can_share = SCALED[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **options)).eval()
    rows, module = rows_of(3, 1), PolicyModule(model, 0.7)
    assert (module.packs or module.shares_prompts) == can_share
    log_probs, _ = module(ModelInputs(**rows))
    torch.testing.assert_close(log_probs, whole_rows(model, rows, 0.7), rtol=1e-4, atol=1e-5)


def whole_rows(model, rows: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """Log-probs (B, T) from one pass per row, without padding."""
    found = torch.zeros(rows["scored"].shape)
    for row, (ids, mask, scored) in enumerate(
        zip(rows["input_ids"], rows["attention_mask"], rows["scored"], strict=True)
    ):
        tokens, count = ids[mask][None], int(scored.sum())
        logits = model(input_ids=tokens).logits[0, -count - 1 : -1] / temperature
        found[row, :count] = logits.log_softmax(-1).gather(-1, tokens[0, -count:, None]).squeeze(-1)
    return found.detach()


def test_nothing_scored_gives_zeros() -> None:
    rows = rows_of(2)
    rows["scored"] = torch.zeros_like(rows["scored"])
    log_probs, _ = PolicyModule(a_model("llama"), 1.0)(ModelInputs(**rows))
    assert not log_probs.any()
