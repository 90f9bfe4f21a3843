"""Every layout gives the log-probs and gradients of separate sequences; packed rows read no token twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

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
from rlctl.engine import layout
from rlctl.engine.layout import can_pack, choose_layout, idle_inputs, reads_past_only, same_values
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import UsageError
from rlctl.prefix import body_of, can_share_prefix
from tests.flash_attention import use_flash
from tests.unit.test_prefix import HORIZON, PROMPT, SHAPE, VOCABULARY, inputs_of, tokens_read

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


def policy_of(model, how: str, temperature: float = 0.7) -> PolicyModule:
    """With packed rows; padded ones; or "whole", padded ones without shared prompts."""
    module = PolicyModule(model, temperature, share_prompts=how != "whole")
    module.reader.layout = "packed" if how == "packed" else "padded"
    return module


def answers(module: PolicyModule, inputs: ModelInputs):
    """Tokens read, log-probs and gradients."""
    module.zero_grad()
    counts, log_probs = tokens_read(module, inputs)
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return counts, log_probs.detach(), {n: p.grad.clone() for n, p in module.model.named_parameters()}


def assert_same(ours, theirs, our_grads, their_grads) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    for name, gradient in their_grads.items():
        atol = 2e-6 + 2e-6 * float(gradient.abs().max())  # an element may be a small sum of large terms
        torch.testing.assert_close(our_grads[name], gradient, rtol=1e-4, atol=atol)


@cache
def answers_of_whole_rows(kind: str, attention: str, siblings: tuple[int, ...]):
    return answers(policy_of(a_model(kind, attention), "whole"), inputs_of(*siblings))


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "sdpa") for kind in ARCHITECTURES), ("llama", "eager")]
)
# A row as wide as the longest sequence, or some sequences in a row.
@pytest.mark.parametrize(
    ("siblings", "width"),
    [((4, 4, 4), 24), ((4, 1, 3), 1), ((4, 1, 3), 24), ((1, 1), 1), ((9,), 24)],
    ids=str,
)
def test_log_probs_and_gradients_are_those_of_whole_rows(
    kind: str, attention: str, siblings: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "packed_width", lambda _hidden: width)
    module = policy_of(a_model(kind, attention), "packed")
    assert module.reader.packs
    [read], ours, our_grads = answers(module, inputs_of(*siblings))
    [whole], theirs, their_grads = answers_of_whole_rows(kind, attention, siblings)
    assert_same(ours, theirs, our_grads, their_grads)
    assert read <= whole if width == 1 and set(siblings) == {1} else read < whole


def episodes() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences that share a prompt, some a first turn, one all of another's tokens; and what each scores."""
    draw = torch.Generator().manual_seed(3)

    def some(count: int) -> torch.Tensor:
        return torch.randint(2, VOCABULARY, (count,), generator=draw)

    prompt, first, tool = some(4), some(5), some(2)
    turns = [(first, tool, some(3)), (first, tool, some(6)), (first, some(2), some(4)), (first,), (some(3),)]
    sequences, scored = [], []
    for turn in turns:
        pieces = [prompt, *turn]
        sequences.append(torch.cat(pieces))
        marks = [torch.full((len(piece),), place % 2 == 1) for place, piece in enumerate(pieces)]
        scored.append(torch.cat(marks))
    other = some(7)
    sequences += [other, other, torch.cat([other, some(3)])]
    scored += [torch.arange(7) >= 3, torch.arange(7) >= 3, torch.arange(10) >= 9]
    sequences.append(some(3))  # nothing of it is scored
    scored.append(torch.zeros(3, dtype=torch.bool))
    sequences.append(torch.cat([other, some(2)]))
    scored.append(torch.arange(9) >= 2)
    return sequences, scored


def together(sequences, scored) -> ModelInputs:
    return ModelInputs(torch.cat(sequences), torch.cat(scored), torch.tensor([len(ids) for ids in sequences]))


@pytest.mark.parametrize(
    ("how", "width"), [("packed", 1), ("packed", 1000), ("padded", 1000), ("whole", 1)]
)  # only packed rows have this width
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_branches_of_an_episode_are_separate_sequences(
    kind: str, how: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "packed_width", lambda _hidden: width)
    _, ours, our_grads = answers(policy_of(a_model(kind), how), together(*episodes()))
    theirs, their_grads = answers_of_each_sequence(kind)
    assert_same(ours, theirs, our_grads, their_grads)


@cache
def answers_of_each_sequence(kind: str):
    model = a_model(kind)
    sequences, scored = episodes()
    wanted = []
    for ids, marks in zip(sequences, scored, strict=True):
        logits = model(ids[None]).logits[0, :-1] / 0.7
        wanted.append(logits.log_softmax(-1)[marks[1:]].gather(-1, ids[marks][:, None]).squeeze(-1))
    theirs = torch.cat(wanted)
    (theirs * torch.linspace(-1, 1, len(theirs))).sum().backward()
    return theirs.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_tree_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "packed_width", lambda _hidden: 1000)
    sequences, scored = episodes()
    read = [
        ids[: int(marks.nonzero()[-1])] for ids, marks in zip(sequences, scored, strict=True) if marks.any()
    ]
    beginnings = {tuple(ids[: length + 1].tolist()) for ids in read for length in range(len(ids))}
    [count], _, _ = answers(policy_of(a_model("llama"), "packed"), together(sequences, scored))
    assert count == len(beginnings)


def test_a_first_token_cannot_be_scored() -> None:
    inputs = ModelInputs(torch.tensor([2, 3]), torch.tensor([True, True]), torch.tensor([2]))
    with pytest.raises(ValueError, match="nothing predicts the first token"):
        PolicyModule(a_model("llama"), 1.0)(inputs)


def test_a_prompt_is_read_once_for_all_responses_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "packed_width", lambda _hidden: 1000)
    inputs = inputs_of(5)
    [read], _, _ = answers(policy_of(a_model("llama"), "packed"), inputs)
    assert read == PROMPT + int((inputs.lengths - PROMPT - 1).sum())


@pytest.mark.parametrize("kernel", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_reads_all_sequences_in_one_row(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes the second kernel from the hub if the package of the first one is missing."""
    inputs = inputs_of(3, 1)
    _, theirs, their_grads = answers(policy_of(a_model("llama"), "whole"), inputs)
    model = a_model("llama")
    use_flash(model, monkeypatch, kernel)
    module = policy_of(model, "packed")
    assert module.reader.packs
    [read], ours, our_grads = answers(module, inputs)
    assert read == int((inputs.lengths - 1).sum())
    assert_same(ours, theirs, our_grads, their_grads)


def test_a_window_shorter_than_a_sequence_is_not_packed() -> None:
    config = MistralConfig(**SHAPE, sliding_window=3)
    model = AutoModelForCausalLM.from_config(config).eval()
    inputs = inputs_of(2, 2)
    module = PolicyModule(model, 0.7, share_prompts=False)
    module.reader.packs, module.reader.layout = True, "packed"
    counts, log_probs = tokens_read(module, inputs)
    assert counts == [4 * (PROMPT + HORIZON - 1)]
    torch.testing.assert_close(log_probs, separately(model, inputs, 0.7), rtol=1e-4, atol=1e-5)


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
    inputs = inputs_of(2, 1)
    log_probs, *_ = PolicyModule(model, 0.7)(inputs)
    torch.testing.assert_close(log_probs, separately(model, inputs, 0.7), rtol=1e-4, atol=1e-4)


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


def test_padding_on_the_right_is_never_read() -> None:
    """This model's recurrence and convolution read the tokens of padding on the left."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        **SHAPE, head_dim=8, lru_width=16, attention_window_size=16, block_types=["recurrent", "attention"]
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    inputs = inputs_of(2, 1)
    log_probs, *_ = PolicyModule(model, 0.7)(inputs)
    torch.testing.assert_close(log_probs, separately(model, inputs, 0.7), rtol=1e-4, atol=1e-5)


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
    inputs = inputs_of(3, 1)
    log_probs, *_ = PolicyModule(model, 0.7)(inputs)
    torch.testing.assert_close(log_probs, separately(model, inputs, 0.7), rtol=1e-4, atol=1e-5)


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
    inputs, module = inputs_of(3, 1), PolicyModule(model, 0.7)
    assert (module.reader.packs or module.reader.shares_prompts) == can_share
    wanted = separately(model, inputs, 0.7)
    torch.testing.assert_close(module(inputs)[0], wanted, rtol=1e-4, atol=1e-5)
    log_probs = (module.logits(inputs) / 0.7).log_softmax(-1).gather(-1, inputs.tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-4, atol=1e-5)


def separately(model, inputs: ModelInputs, temperature: float) -> torch.Tensor:
    """Log-probs (M,) from one pass per sequence."""
    found, lengths = [], inputs.lengths.tolist()
    for ids, scored in zip(inputs.token_ids.split(lengths), inputs.scored.split(lengths), strict=True):
        log_probs = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        found.append(log_probs.gather(-1, ids[1:, None]).squeeze(-1)[scored[1:]])
    return torch.cat(found).detach()


@pytest.mark.parametrize("how", ["packed", "padded"])
def test_nothing_scored_has_a_gradient_of_zero(how: str) -> None:
    inputs, module = inputs_of(2), policy_of(a_model("llama"), how)
    for given in (
        replace(inputs, scored=torch.zeros_like(inputs.scored)),
        ModelInputs(inputs.token_ids[:0], inputs.scored[:0], inputs.lengths[:0]),
    ):
        module.zero_grad()
        log_probs, entropy, *_ = module(given, entropy_grad=True)
        assert log_probs.shape == entropy.shape == (0,)
        (log_probs.sum() + entropy.sum()).backward()
        assert not any(parameter.grad.any() for parameter in module.parameters())
    module.zero_grad()
    log_probs, *_ = module(idle_inputs())
    assert log_probs.shape == (1,)
    (0.0 * log_probs.sum()).backward()
    assert not any(parameter.grad.any() for parameter in module.parameters())


class OtherRank:
    """Two ranks, of which the other one adds these costs and supports packed rows or not."""

    def __init__(self, packed: float, padded: float, packs: bool) -> None:
        self.costs, self.packs = (packed, padded), packs

    def sum(self, values):
        return [one + other for one, other in zip(values, self.costs, strict=True)]

    def max(self, value):
        """Of whether something does not hold: first that rows can be packed, then what else is asked."""
        value, self.packs = max(value, float(not self.packs)), True
        return value


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("other", "chosen"), [((0, 0), "packed"), ((1e6, 0), "padded")])
def test_ranks_choose_one_layout(other, chosen: str, packs: bool) -> None:
    inputs = inputs_of(8, 8)
    reader = PolicyModule(a_model("llama"), 1.0, ranks=OtherRank(*other, packs)).reader
    assert reader.packs == packs
    words = reader.plan([inputs, inputs])
    assert reader.layout == (chosen if packs else "padded")
    assert words.startswith(f"{reader.layout} rows; cost in tokens: packed ")


def test_what_a_pass_reads_is_found_out_once_for_the_plan_and_the_pass(monkeypatch) -> None:
    """Also if the inputs are made anew from the same tensors; a pass that was not planned reads its own."""
    read = []
    monkeypatch.setattr(layout, "_tokens_read", lambda x, f=layout._tokens_read: read.append(x) or f(x))
    module = PolicyModule(a_model("llama"), 1.0)
    module.reader.probe()
    first, second = inputs_of(8, 8), inputs_of(5, 9, 7)
    alone = [module(inputs)[0] for inputs in (first, second)]
    read.clear()
    module.reader.plan([first])
    assert torch.equal(module(replace(first))[0], alone[0])
    assert len(read) == 1
    assert torch.equal(module(second)[0], alone[1])
    assert len(read) == 2
    module.reader.forget_plan()
    assert torch.equal(module(first)[0], alone[0])
    assert len(read) == 3


def test_short_rows_of_equal_length_are_padded_and_long_tails_packed() -> None:
    """On a CPU; `benchmarks/packing.py` measures both."""
    draw = torch.Generator().manual_seed(0)

    def costs(lengths: list[int]) -> tuple[float, float]:
        ids = torch.randint(2, VOCABULARY, (sum(lengths),), generator=draw)
        scored = torch.cat([torch.arange(length) == length - 1 for length in lengths])
        reader = PolicyModule(a_model("llama"), 1.0).reader
        inputs = ModelInputs(ids, scored, torch.tensor(lengths))
        reader.plan([inputs])
        packed, padded = reader._costs(reader._placed(inputs))
        assert reader.layout == choose_layout(packed, padded)
        return packed, padded

    packed, padded = costs([12] * 64)
    assert padded < packed
    packed, padded = costs([6] * 15 + [60])
    assert packed < 0.5 * padded
