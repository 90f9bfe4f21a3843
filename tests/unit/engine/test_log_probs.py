"""Log-probs of chunks are those of the plain model's full logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.batch import TokenLists
from rlctl.engine.log_probs import PolicyModule
from rlctl.errors import UsageError
from rlctl.run_spec import memory
from tests.models import naive_log_probs, tiny_batch, tiny_model

MODELS = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("gemma2", True)]


def forward(policy: PolicyModule, batch, num_chunks: int = 1, **asked: bool):
    """In about so many chunks."""
    tokens = len(batch.advantages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MAX_LOGITS", max(1, tokens * policy.model.config.vocab_size // num_chunks))
        return policy(batch.inputs, **asked)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("kind", "tied"), MODELS)
@pytest.mark.parametrize(("temperature", "num_chunks"), [(1.0, 1), (0.6, 3), (1.0, 100)])
def test_equal_to_full_log_softmax(kind: str, tied: bool, temperature: float, num_chunks: int) -> None:
    model = tiny_model(kind, tied=tied)
    batch = tiny_batch(model)
    policy = PolicyModule(model, temperature)
    assert policy.head.is_linear == (kind != "gemma2")
    expected, entropy = naive_log_probs(model, batch, temperature)
    expected.mul(batch.advantages).sum().backward()
    wanted = gradients(model)
    model.zero_grad()

    log_probs, ours, *_ = forward(policy, batch, num_chunks)
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
    _, entropy, squared, *_ = forward(policy, batch, num_chunks, **asked)
    entropy.mul(batch.advantages).sum().backward()
    got = gradients(model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
    assert not squared.requires_grad
    expected = naive_sum_pi_squared(model, batch, temperature)
    torch.testing.assert_close(squared.double(), expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        assert not any(values.requires_grad for values in forward(policy, batch, num_chunks, **asked)[:3])


def naive_sum_pi_squared(model, batch, temperature: float) -> torch.Tensor:
    """(M,) by definition, one sequence and one token at a time."""
    found, lengths = [], batch.lengths.tolist()
    for ids, sampled in zip(batch.token_ids.split(lengths), batch.sampled.split(lengths), strict=True):
        with torch.no_grad():
            probs = (model(ids[None]).logits[0].double() / temperature).softmax(-1)
        found += [sum(float(p) ** 2 for p in probs[int(place) - 1]) for place in sampled.nonzero()]
    return torch.tensor(found, dtype=torch.float64)


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
    found, *_ = forward(policy, batch)
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
    log_probs, *_ = forward(PolicyModule(model, 0.6), batch)
    assert (log_probs - naive_log_probs(model, batch)[0]).abs().max() > 0.1


def test_tokens_that_are_read_and_not_scored() -> None:
    """As of a tool's output inside a response: attention reads them, log-probs are of the others alone."""
    model = tiny_model()
    batch = tiny_batch(model, 6, lengths=[6, 6, 5, 4, 6, 3])
    whole, *_ = forward(PolicyModule(model, 1.0), batch)
    places = batch.units.sequence.places
    scored = batch.sampled.clone()
    scored[batch.sampled.nonzero().squeeze(1)[(places == 1) | (places == 2)]] = False
    log_probs, *_ = PolicyModule(model, 1.0)(replace(batch.inputs, scored=scored))
    torch.testing.assert_close(log_probs, whole[(places < 1) | (places > 2)], rtol=1e-5, atol=1e-6)


def test_a_batch_without_sampled_tokens_still_backpropagates() -> None:
    model = tiny_model()
    log_probs, entropy, *_ = forward(PolicyModule(model, 1.0), tiny_batch(model, 2, lengths=[0, 0]))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert not any(g.any() for g in gradients(model).values())


def test_float32_logits_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward ever makes a float32 tensor of more than MAX_LOGITS elements."""
    vocabulary, limit = 5000, 20_000
    monkeypatch.setattr(memory, "MAX_LOGITS", limit)
    model = tiny_model(vocabulary=vocabulary, tied=True)
    batch = tiny_batch(model, 32)
    num_tokens = len(batch.advantages)
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
        log_probs, *_ = policy(batch.inputs)
        log_probs.sum().backward()
    assert seen
    assert max(seen) <= limit + vocabulary


@pytest.mark.parametrize(("kind", "num_chunks"), [("llama", 1), ("llama", 3), ("gemma2", 3)])
@pytest.mark.parametrize("restricted", [False, True])
def test_the_most_likely_tokens_and_all_others(kind: str, num_chunks: int, restricted: bool) -> None:
    """A teacher's list among the first 20 tokens, and the same tokens under another model, with gradient."""
    teacher, model = tiny_model(kind, seed=1), tiny_model(kind)
    batch = tiny_batch(model)
    count, size = len(batch.advantages), model.config.vocab_size
    kept = None
    if restricted:  # to 3 tokens or to 15, the sampled one among them
        sets = [torch.arange(size)[torch.arange(size) % (2 + 6 * (place % 2)) == 0] for place in range(count)]
        sets = [
            torch.cat([ids, token[None]]).unique()
            for ids, token in zip(sets, batch.inputs.tokens, strict=True)
        ]
        kept = TokenLists(torch.tensor([len(ids) for ids in sets], dtype=torch.int32), torch.cat(sets).int())
        batch = batch.with_columns(kept=kept)

    def full(network) -> torch.Tensor:
        """(M, V) log-probs, one sequence at a time, in float64."""
        parts = zip(*(x.split(batch.lengths.tolist()) for x in (batch.token_ids, batch.sampled)), strict=True)
        logits = torch.cat(
            [network(ids[None]).logits[0, :-1][sampled[1:]] for ids, sampled in parts]
        ).double()
        for place in range(count if kept else 0):
            others = torch.ones(size, dtype=torch.bool)
            others[sets[place]] = False
            logits = logits.masked_fill(others & (torch.arange(count) == place)[:, None], -torch.inf)
        return (logits / 0.7).log_softmax(-1)

    with torch.no_grad():
        output = forward(PolicyModule(teacher, 0.7), batch, num_chunks, top_k=(4, 20))
        own, listed = output.log_probs, output.most_likely
        wanted = full(teacher)
    chosen = wanted.gather(1, batch.inputs.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(own.double(), chosen, rtol=1e-5, atol=2e-6)
    log_probs, tail, ids = listed[:, :4], listed[:, 4], listed[:, 5:].long()
    torch.testing.assert_close(
        log_probs.exp().double(), wanted[:, :20].topk(4).values.exp(), rtol=1e-5, atol=1e-7
    )
    rest = torch.ones(count, size).scatter(1, ids, 0.0).bool()
    torch.testing.assert_close(tail.exp().double(), (wanted.exp() * rest).sum(1), rtol=1e-5, atol=1e-9)

    lists = TokenLists(torch.full((count,), 4), ids.flatten(), log_probs.flatten())
    batch = batch.with_columns(most_likely=lists)
    found = forward(PolicyModule(model, 0.7), batch, num_chunks, tail=True).most_likely
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    expected = full(model).exp()
    expected = torch.cat([expected.gather(1, ids), (expected * rest).sum(1, keepdim=True)], 1)
    torch.testing.assert_close(found.exp().double(), expected, rtol=1e-5, atol=1e-7)
    (found.exp() * factors).sum().backward()
    got = gradients(model)
    model.zero_grad()
    (expected * factors).sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
