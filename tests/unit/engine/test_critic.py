"""Values are those of the states before each token; critic, actor and reference live side by side."""

from __future__ import annotations

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from rlctl.engine import values
from rlctl.engine.layout import Layout
from rlctl.engine.values import ValueModule
from rlctl.errors import UsageError
from tests.models import naive_log_probs, tiny_batch, tiny_model
from tests.processes import on_ranks
from tests.unit.engine import critic_jobs

FSDP = critic_jobs.FSDP
CASES = {
    1: [(0, "fp32"), (1, "bf16"), (3, "fp32")],
    2: [(0, "fp32"), (2, "fp32"), (3, "bf16"), (FSDP, "fp32")],
}


def naive_values(body, head: torch.Tensor, batch) -> torch.Tensor:
    """(M,), one sequence at a time."""
    found, lengths = [], batch.lengths.tolist()
    for ids, sampled in zip(batch.token_ids.split(lengths), batch.sampled.split(lengths), strict=True):
        states = body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        found.append(states[sampled[1:]] @ head[0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_values_and_gradient_by_definition(kind: str, layout: Layout, share_prompts: bool) -> None:
    model = tiny_model(kind)
    module = ValueModule(model, share_prompts=share_prompts)
    module.reader.layout = layout
    assert not any("lm_head" in name for name, _ in module.named_parameters())
    batch, targets = critic_jobs.batch_and_targets(4)
    assert not module(batch.inputs).any()  # nothing learnt, nothing claimed

    torch.nn.init.normal_(module.head.weight)
    expected = naive_values(module.body, module.head.weight, batch)
    expected.mul(targets).sum().backward()
    wanted = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    found = module(batch.inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.mul(targets).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_a_batch_without_sampled_tokens_still_backpropagates() -> None:
    module = ValueModule(tiny_model())
    batch = tiny_batch(tiny_model(), 2, lengths=[0, 0])
    module(batch.inputs).sum().backward()
    assert not module.head.weight.grad.any()


def test_states_of_another_width_than_the_layers() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = OPTForCausalLM(OPTConfig(vocab_size=23, word_embed_proj_dim=8, **shape)).eval()
    module, batch = ValueModule(model), tiny_batch(model)
    torch.nn.init.normal_(module.head.weight)
    expected = naive_values(model.model, module.head.weight, batch)
    torch.testing.assert_close(module(batch.inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_is_its_own_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "body_of", lambda _model: None)
    with pytest.raises(UsageError, match="does not expose hidden states") as caught:
        ValueModule(tiny_model())
    assert caught.value.where == "critic.path"


def trained_slowly() -> tuple[dict[str, torch.Tensor], list[float], list[torch.Tensor]]:
    """Two steps on undivided batches with torch's own AdamW and clipping; weights, norms, values."""
    body = critic_jobs.value_model().model
    head = torch.nn.Linear(16, 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    named = {f"body.{name}": p for name, p in body.named_parameters()} | {"head.weight": head.weight}
    optimizer = torch.optim.AdamW(named.values(), lr=critic_jobs.LR, betas=(0.9, 0.95), weight_decay=0.1)
    norms, seen = [], []
    for seed in (1, 2):
        batch, targets = critic_jobs.batch_and_targets(seed)
        values = naive_values(body, head.weight, batch)
        seen.append(values.detach())
        (values - targets).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in named.items()}, norms, seen


@pytest.fixture(scope="module")
def slow():
    return trained_slowly()


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("critic")
    return {
        count: on_ranks(count, critic_jobs.side_by_side, cases, str(where), where=where)
        for count, cases in CASES.items()
    }


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def mean_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean())


@pytest.mark.parametrize(
    ("stage", "dtype", "world_size"), [(*case, count) for count, cases in CASES.items() for case in cases]
)
class TestSideBySide:
    def test_critic_learns_as_plain_torch_would(self, by_world_size, slow, stage, dtype, world_size) -> None:
        wanted, norms, seen = slow
        results = [found[stage, dtype] for found, _ in by_world_size[world_size]]
        for result in results:
            assert distance(result["saved"], results[0]["saved"]) == 0.0
        values = [torch.cat([result["values"][i] for result in results]) for i in (0, 1)]
        got = results[0]
        moved = distance(got["start"], wanted)
        assert moved > 1e-2
        if dtype == "fp32":
            assert distance(got["saved"], wanted) < 2e-5
            assert got["norms"] == pytest.approx(norms, rel=1e-4)
            torch.testing.assert_close(values[1], seen[1], rtol=1e-3, atol=1e-4)
        else:
            assert mean_distance(got["saved"], wanted) < 0.1 * mean_distance(got["start"], wanted)
            assert got["norms"] == pytest.approx(norms, rel=0.05)
        assert not values[0].any()
        assert values[1].any()

    def test_it_goes_on_bit_for_bit_after_loading(self, by_world_size, stage, dtype, world_size) -> None:
        for found, _ in by_world_size[world_size]:
            result = found[stage, dtype]
            assert distance(result["saved"], result["loaded"]) == 0.0
            assert distance(*result["after"]) == 0.0
            assert distance(result["saved"], result["after"][0]) > 1e-3

    def test_the_actor_does_not_notice(self, by_world_size, stage, dtype, world_size) -> None:
        for found, alone in by_world_size[world_size]:
            if dtype == "fp32":
                assert distance(found[stage, dtype]["actor"], alone[stage % 2]) < 2e-5

    def test_the_reference_stays(self, by_world_size, stage, dtype, world_size) -> None:
        batch, _ = critic_jobs.batch_and_targets(1)
        wanted, _ = naive_log_probs(tiny_model("qwen2"), batch, 0.7)
        for found, _ in by_world_size[world_size]:
            first, second = found[stage, dtype]["reference"]
            assert torch.equal(first, second)
            assert not first.requires_grad
            tolerance = 1e-5 if dtype == "fp32" else 0.1
            torch.testing.assert_close(first.double(), wanted.detach(), rtol=0, atol=tolerance)
