"""Log-probs of chunks and trimmed columns are those of the plain model's full logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.batch import ModelInputs
from rlctl.engine.inputs import used_columns
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import UsageError
from rlctl.spec import memory
from tests.models import naive_log_probs, tiny_batch, tiny_model

MODELS = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("gemma2", True)]


def forward(policy: PolicyModule, batch, num_chunks: int = 1, **asked: bool):
    """In about so many chunks."""
    tokens = int(batch.response_mask.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MAX_LOGITS", max(1, tokens * policy.model.config.vocab_size // num_chunks))
        return policy(batch.inputs, **asked)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "tied"), MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_chunks", [1, 3, 100])
def test_equal_to_full_log_softmax(kind: str, tied: bool, temperature: float, num_chunks: int) -> None:
    model = tiny_model(kind, tied=tied)
    batch = tiny_batch(model)
    policy = PolicyModule(model, temperature)
    assert policy.head.is_linear == (kind != "gemma2")
    expected, entropy = naive_log_probs(model, batch, temperature)
    expected.mul(batch.advantages).sum().backward()
    wanted = gradients(model)
    model.zero_grad()

    log_probs, ours = forward(policy, batch, num_chunks)
    assert log_probs.dtype == ours.dtype == torch.float32
    assert not ours.requires_grad
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours.double(), entropy, rtol=1e-5, atol=2e-6)
    log_probs.mul(batch.advantages).sum().backward()
    got = gradients(model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():  # an element may be a small sum of large terms
        atol = 1e-5 + 2e-6 * float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropy_with_gradient_and_collision_probability(
    kind: str, num_chunks: int, temperature: float
) -> None:
    model = tiny_model(kind, tied=kind == "gemma2")
    batch = tiny_batch(model)
    _, expected = naive_log_probs(model, batch, temperature)
    expected.mul(batch.advantages).sum().backward()
    wanted = gradients(model)
    model.zero_grad()

    asked = {"entropy_grad": True, "sum_pi_squared": True}
    policy = PolicyModule(model, temperature)
    _, entropy, squared = forward(policy, batch, num_chunks, **asked)
    entropy.mul(batch.advantages).sum().backward()
    got = gradients(model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
    assert not squared.requires_grad
    expected = naive_sum_pi_squared(model, batch, temperature)
    torch.testing.assert_close(squared.double(), expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        assert not any(values.requires_grad for values in forward(policy, batch, num_chunks, **asked))


def naive_sum_pi_squared(model, batch, temperature: float) -> torch.Tensor:
    """(B, T) by definition, one row and one token at a time."""
    found = torch.zeros(batch.responses.shape, dtype=torch.float64)
    for row, mask in enumerate(batch.response_mask):
        ids = batch.input_ids[row][batch.attention_mask[row]]
        with torch.no_grad():
            probs = (model(ids[None]).logits[0].double() / temperature).softmax(-1)
        length = int(mask.sum())
        for token in range(length):
            found[row, token] = sum(float(p) ** 2 for p in probs[len(ids) - length - 1 + token])
    return found


def test_a_soft_cap_that_does_not_act_yet_is_found() -> None:
    """Training makes logits larger: a cap that has no effect on the first weights would have one later."""
    model = tiny_model("gemma2", tied=True)
    model.config.final_logit_softcapping = 30.0
    for parameter in model.parameters():
        parameter.data *= 0.1
    batch = tiny_batch(model)
    policy = PolicyModule(model, 1.0)
    assert not policy.head.is_linear
    model.lm_head.weight.data *= 300.0  # tied to the embedding, which the model normalises
    found, _ = forward(policy, batch)
    torch.testing.assert_close(found.double(), naive_log_probs(model, batch)[0], rtol=1e-5, atol=2e-6)


def test_weights_that_are_not_numbers_are_named() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        next(iter(model.model.layers[0].parameters()))[0, 0] = torch.nan
    with pytest.raises(UsageError, match=r"model\.layers\.0\.\S+ contains NaN or infinite numbers"):
        PolicyModule(model, 1.0)


def test_wrong_temperature_would_show() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    log_probs, _ = forward(PolicyModule(model, 0.6), batch)
    assert (log_probs - naive_log_probs(model, batch)[0]).abs().max() > 0.1


def test_padding_on_either_side_changes_nothing() -> None:
    model = tiny_model()
    batch = tiny_batch(model)
    policy = PolicyModule(model, 1.0)
    log_probs, entropy = forward(policy, batch)
    wide = [torch.nn.functional.pad(batch.input_ids, (4, 3), value=7)]  # any token may stand there
    wide += [torch.nn.functional.pad(batch.attention_mask, (4, 3))]
    wide += [torch.nn.functional.pad(batch.position_ids, (4, 3))]
    scored = torch.nn.functional.pad(batch.response_mask, (0, 3))
    more, more_entropy = policy(ModelInputs(*wide, scored))
    assert not more[:, -3:].any()
    torch.testing.assert_close(more[:, :-3], log_probs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(more_entropy[:, :-3], entropy, rtol=1e-5, atol=1e-6)


def test_tokens_that_are_read_and_not_scored() -> None:
    """As of a tool's output inside a response: attention reads them, log-probs are of the others alone."""
    model = tiny_model()
    batch = tiny_batch(model, 6, lengths=[6, 6, 5, 4, 6, 3])
    whole, _ = forward(PolicyModule(model, 1.0), batch)
    inserted = torch.zeros_like(batch.response_mask)
    inserted[:, 1:3] = True
    inputs = replace(batch.inputs, scored=batch.response_mask & ~inserted)
    trimmed = used_columns(inputs)
    for read in (inputs, trimmed):
        log_probs, _ = PolicyModule(model, 1.0)(read)
        width = log_probs.shape[1]
        assert not log_probs[inserted[:, :width]].any()
        kept = inputs.scored[:, :width]
        torch.testing.assert_close(log_probs[kept], whole[:, :width][kept], rtol=1e-5, atol=1e-6)
    assert torch.equal(batch.inputs.pick(slice(2, 4)).responses, batch.responses[2:4])


def test_columns_used() -> None:
    model = tiny_model()
    batch = tiny_batch(model, 3, lengths=[2, 4, 1], horizon=6)
    widest = int(batch.attention_mask[:, :5].sum(1).max())
    columns = used_columns(batch.inputs)
    assert columns.scored.shape == (3, 4)
    assert columns.input_ids.shape == (3, widest + 4)
    assert torch.equal(columns.input_ids[:, -4:], batch.responses[:, :4])
    empty = tiny_batch(model, 2, lengths=[0, 0])
    assert used_columns(empty.inputs).scored.shape == (2, 1)


def test_a_batch_without_response_tokens_still_backpropagates() -> None:
    model = tiny_model()
    log_probs, entropy = forward(PolicyModule(model, 1.0), tiny_batch(model, 2, lengths=[0, 0]))
    assert not log_probs.any()
    assert not entropy.any()
    log_probs.sum().backward()
    assert not any(g.any() for g in gradients(model).values())


def test_float32_logits_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward ever makes a float32 tensor of more than MAX_LOGITS elements."""
    vocabulary, limit = 5000, 20_000
    monkeypatch.setattr(memory, "MAX_LOGITS", limit)
    model = tiny_model(vocabulary=vocabulary, tied=True)
    batch = tiny_batch(model, 32)
    num_tokens = int(batch.response_mask.sum())
    policy = PolicyModule(model, 1.0)
    assert num_tokens * vocabulary > 10 * limit
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            outputs = result if isinstance(result, (tuple, list)) else [result]
            for tensor in outputs:
                # 16 rows are the head's own weight, transposed.
                by_vocabulary = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (vocabulary,)
                if by_vocabulary and tensor.dtype == torch.float32 and len(tensor) != 16:
                    seen.append(tensor.numel())
            return result

    with Watch():
        log_probs, _ = policy(batch.inputs)
        log_probs.sum().backward()
    assert seen
    assert max(seen) <= limit + vocabulary
