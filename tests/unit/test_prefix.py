"""A prompt that siblings share is run once, and nothing but the time it takes shows it."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlctl.batch import ModelInputs
from rlctl.engine.log_probs import PolicyModule
from rlctl.prefix import can_share_prefix, shared_prefix
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.seeds import turn_seed
from rlctl.run_spec.model import RECIPE
from rlctl.tiny.model import build_model, build_tokenizer

VOCABULARY = 23
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPT, HORIZON = 6, 4


def a_model(kind: str):
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    # A window shorter than the prompt: only the last keys of the prefix may be read.
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=3))


def inputs_of(*siblings: int) -> ModelInputs:
    """Prompts of up to PROMPT tokens, each with as many random responses as said."""
    draw = torch.Generator().manual_seed(1)
    sequences, scored = [], []
    for number, count in enumerate(siblings):
        length = PROMPT - number if number < 2 else int(torch.randint(1, PROMPT + 1, (), generator=draw))
        prompt = torch.randint(2, VOCABULARY, (length,), generator=draw)
        for member in range(count):
            size = HORIZON - member if member < 2 else int(torch.randint(1, HORIZON + 1, (), generator=draw))
            response = torch.randint(2, VOCABULARY, (size,), generator=draw)
            sequences.append(torch.cat([prompt, response]))
            scored.append(torch.arange(length + size) >= length)
    return ModelInputs(torch.cat(sequences), torch.cat(scored), torch.tensor([len(ids) for ids in sequences]))


def tokens_read(module: PolicyModule, inputs: ModelInputs) -> tuple[list[int], torch.Tensor]:
    """Tokens in each pass through the embedding, and the log-probs."""
    counts: list[int] = []
    embedding = module.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, given, _output: counts.append(given[0].numel()))
    log_probs, *_ = module(inputs)
    hook.remove()
    return counts, log_probs


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
@pytest.mark.parametrize(
    ("siblings", "blocks"),
    [((4, 4, 4), 3), ((4, 4, 2), 3), ((4, 4, 3), 3), ((2, 1, 3), 3), ((1, 1, 1), None), ((5,), 1)],
    ids=str,
)
def test_log_probs_and_gradient_are_those_of_whole_rows(kind: str, siblings, blocks) -> None:
    inputs, model = inputs_of(*siblings), a_model(kind)
    found = []
    for share in (True, False):
        module = PolicyModule(model, 0.7, share_prompts=share)
        module.reader.layout = "padded"
        model.zero_grad()
        counts, log_probs = tokens_read(module, inputs)
        (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
        found.append((counts, log_probs.detach(), [p.grad.clone() for p in model.parameters()]))
    (counts, ours, our_grads), (whole, theirs, their_grads) = found
    count = sum(siblings)
    assert whole == [count * (PROMPT + HORIZON - 1)]
    assert counts == (whole if blocks is None else [blocks * (PROMPT - 1), count * HORIZON])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-6)


def test_a_shared_beginning_that_scores_is_read_by_every_row() -> None:
    """From shared tokens only keys and values are kept, not the states that score."""
    model = a_model("qwen2")
    first = torch.tensor([3, 4, 5, 6, 7])
    ids = torch.stack([torch.cat([first, torch.tensor([last, 9])]) for last in (10, 11, 12, 13)])
    scored = torch.tensor([False, False, True, False, False, True, True]).repeat(4)
    inputs = ModelInputs(ids.flatten(), scored, torch.full((4,), 7))
    module = PolicyModule(model, 1.0)
    module.reader.layout = "padded"
    counts, log_probs = tokens_read(module, inputs)
    assert counts == [1, 4 * 5]
    logits = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(log_probs, logits[:, [1, 4, 5]].flatten(), rtol=1e-5, atol=1e-6)


def test_equal_tokens_under_different_masks_are_not_shared() -> None:
    ids = torch.full((4, 3), 5)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]).bool()
    positions = torch.arange(3).expand(4, 3)
    assert shared_prefix(None, ids, mask, positions) is None  # the body is never called


def test_nothing_to_share_in_prompts_of_one_token() -> None:
    nothing = torch.zeros(4, 0, dtype=torch.int64)
    assert shared_prefix(None, nothing, nothing.bool(), nothing) is None


def test_recurrent_and_checkpointed_models_read_whole_rows() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    assert not can_share_prefix(MambaForCausalLM(config))
    model = a_model("qwen2")
    assert can_share_prefix(model)
    model.gradient_checkpointing_enable()
    assert not can_share_prefix(model)


def test_the_probe_leaves_the_mode_alone() -> None:
    model = a_model("qwen2").train()
    can_share_prefix(model)
    assert model.training


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_second_turn_shares_the_prompt_of_its_group(kind: str) -> None:
    """Groups of different sizes, rows of different lengths, and one that stands alone."""
    inputs = inputs_of(3, 1, 4)
    prompts = [ids.tolist() for ids in inputs.token_ids.split(inputs.lengths.tolist())]
    tokenizer = build_tokenizer(RECIPE)
    for window, most in ((1000, 3 * PROMPT + 8 * HORIZON), (4, 8 * (PROMPT + HORIZON))):
        model = a_model(kind)
        model.config.sliding_window = window
        engine = HFRollout(model, tokenizer, "cpu")
        counts: list[int] = []
        embedding = engine._model.get_input_embeddings()
        embedding.register_forward_hook(lambda _m, x, _out, c=counts: c.append(x[0].numel()))
        requests = [Request(ids, turn_seed(1, 0, one)) for one, ids in enumerate(prompts)]
        together = engine.sample(requests, Sampling(4))
        assert sum(counts) <= most + 8 * 3
        for request, turn in zip(requests, together, strict=True):
            alone = engine.sample([request], Sampling(4))[0]
            assert torch.equal(turn.token_ids, alone.token_ids)
            torch.testing.assert_close(turn.log_probs, alone.log_probs, rtol=1e-5, atol=1e-6)


def test_rollouts_run_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: LlamaForCausalLM = build_model(RECIPE)
    tokenizer = build_tokenizer(RECIPE)
    prompts = [tokenizer(text)["input_ids"] for text in ("12+34=", "5+6=")]
    requests = [Request(prompts[group], turn_seed(1, group, one)) for group in range(2) for one in range(8)]
    found = []
    for share in (True, False):
        monkeypatch.setattr("rlctl.rollout.hf.can_share_prefix", lambda _model, share=share: share)
        engine = HFRollout(model, tokenizer, "cpu")
        first: list[int] = []
        embedding = engine._model.get_input_embeddings()
        embedding.register_forward_hook(lambda _m, inputs, _out, first=first: first.append(inputs[0].numel()))
        found.append((engine.sample(requests, Sampling(4)), first))
    (ours, our_tokens), (theirs, their_tokens) = found
    assert our_tokens[:2] == [2 * 5, 16]
    assert their_tokens[0] == 16 * 6
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-6)
