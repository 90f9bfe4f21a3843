from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rlctl.batch import Turn
from rlctl.errors import RunFailure, UsageError
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, RolloutEngine, Sampling
from rlctl.rollout.seeds import turn_seed
from rlctl.run_spec.model import RECIPE
from rlctl.tiny.model import build_model, build_tokenizer

TOKENIZER = build_tokenizer(RECIPE)
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
TEXTS = ("12+34=", "9=", "1+1=", "77+8=", "0=", "5+55=")
PLAIN = Sampling(max_response_length=9)


def random_model(seed: int, sharpness: float = 6.0) -> Any:
    """Random weights whose distributions are neither flat nor one-hot, and which sometimes end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(RECIPE).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(1)


def make_requests(texts: Sequence[str] = TEXTS, n: int = 3, step_seed: int = 11) -> list[Request]:
    """n requests per text, siblings adjacent."""
    return [
        Request(ids, turn_seed(step_seed, group, member))
        for group, ids in enumerate(TOKENIZER(list(texts))["input_ids"])
        for member in range(n)
    ]


def sample(
    model: Any, sampling: Sampling = PLAIN, requests: list[Request] | None = None, **engine: Any
) -> list[Turn]:
    return HFRollout(model, TOKENIZER, "cpu", **engine).sample(requests or make_requests(), sampling)


def run(engine: HFRollout) -> list[Turn]:
    return engine.sample(make_requests(), PLAIN)


def values_of(turns: list[Turn]) -> list[tuple[list[int], list[float], str]]:
    """Per turn: tokens, log-probs, finish reason."""
    return [(turn.token_ids.tolist(), turn.log_probs.tolist(), turn.finish_reason) for turn in turns]


def assert_same(ours: list[Turn], theirs: list[Turn]) -> None:
    for (tokens, values, reason), expected in zip(values_of(ours), values_of(theirs), strict=True):
        assert (tokens, reason) == (expected[0], expected[2])
        assert values == pytest.approx(expected[1], abs=1e-5)


def truncated_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """(V,) the distribution by its definition, token by token, in float64."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    kept: list[int] = []
    mass, total = 0.0, float(probs[order].sum())
    for token in order:
        if mass < sampling.top_p * total:
            kept.append(token)
        mass += float(probs[token])
    kept = [token for token in kept if probs[token] >= sampling.min_p * probs.max()]
    result = torch.full_like(probs, -torch.inf)
    result[kept] = (probs[kept] / probs[kept].sum()).log()
    return result


SAMPLINGS = [
    PLAIN,
    replace(PLAIN, temperature=0.6),
    replace(PLAIN, temperature=1.7),
    replace(PLAIN, top_p=0.7),
    replace(PLAIN, top_k=3),
    replace(PLAIN, min_p=0.15),
    replace(PLAIN, temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probs_are_those_of_the_distribution_sampled_from(model: Any, sampling: Sampling) -> None:
    requests = make_requests()
    for request, turn in zip(requests, sample(model, sampling), strict=True):
        prompt, tokens = list(request.token_ids), turn.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for position, token in enumerate(tokens):
            expected = truncated_log_probs(logits[position], sampling)[token]
            assert float(turn.log_probs[position]) == pytest.approx(float(expected), abs=1e-5), position


@pytest.mark.parametrize("sampling", [replace(PLAIN, top_k=3), replace(PLAIN, min_p=0.15), PLAIN], ids=str)
def test_the_kept_set_and_the_most_likely_tokens_are_those_of_the_distribution(
    model: Any, sampling: Sampling
) -> None:
    """Flat lists per turn; no kept set where nothing is cut off."""
    requests = make_requests()
    asked = replace(sampling, with_kept=True, num_most_likely=2)
    for request, turn in zip(requests, sample(model, asked), strict=True):
        assert turn.kept is not None
        assert turn.most_likely is not None
        prompt = list(request.token_ids)
        with torch.no_grad():
            text = torch.tensor([prompt + turn.token_ids.tolist()])
            logits = model(text).logits[0, len(prompt) - 1 : -1]
        kept = turn.kept.ids.split(turn.kept.counts.tolist())
        ids, log_probs = turn.most_likely.padded()
        for position in range(len(turn.token_ids)):
            expected = truncated_log_probs(logits[position], sampling)
            finite = expected.isfinite().nonzero().flatten().tolist()
            assert sorted(kept[position].tolist()) == ([] if len(finite) == len(expected) else finite)
            torch.testing.assert_close(
                log_probs[position].double(), expected.topk(2).values, atol=1e-5, rtol=0
            )
            listed = ids[position][log_probs[position] > -torch.inf]
            assert listed.tolist() == expected.topk(len(listed)).indices.tolist()
        assert not turn.kept.without(turn.token_ids).any()


def test_first_tokens_are_as_frequent_as_probable(model: Any) -> None:
    n = 4000
    requests = make_requests(("3+4=",), n, step_seed=3)
    turns = sample(model, Sampling(2), requests)
    with torch.no_grad():
        probs = model(torch.tensor([requests[0].token_ids])).logits[0, -1].double().softmax(-1)
    first = torch.stack([turn.token_ids[0] for turn in turns])
    counts = torch.bincount(first, minlength=len(probs)).double()
    chi2 = ((counts - probs * n) ** 2 / (probs * n)).sum()
    assert chi2 < 36.1  # 0.999 quantile for 14 degrees of freedom


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks_do_not_change_samples(model: Any, size: int) -> None:
    assert_same(sample(model, max_num_seqs=size), sample(model))


def test_a_turn_depends_on_its_own_request_only(model: Any) -> None:
    """Requests of any length and limit in any order, as ranks and turns of a conversation mix them."""
    texts = (*TEXTS, "1", "+".join(["12"] * 9) + "=")
    limits = [9, 2, None, 14, 1]
    requests = [
        replace(request, max_tokens=limits[place % 5]) for place, request in enumerate(make_requests(texts))
    ]
    whole = sample(model, requests=requests)
    assert {turn.finish_reason for turn in whole} == {"stop", "length"}
    alone = [sample(model, requests=[request])[0] for request in requests]
    assert_same(alone, whole)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = sample(model, requests=[requests[place] for place in order], max_num_seqs=11)
    assert_same(mixed, [whole[place] for place in order])
    for request, turn in zip(requests, whole, strict=True):
        limit = 9 if request.max_tokens is None else request.max_tokens
        tokens = turn.token_ids.tolist()
        assert EOS not in tokens[:-1]
        assert len(tokens) <= limit
        assert (tokens[-1] == EOS, len(tokens) == limit or tokens[-1] == EOS) == (
            turn.finish_reason == "stop",
            True,
        )


@pytest.mark.parametrize("window", [None, 4])
def test_rows_that_have_ended_are_not_computed_for_long(model: Any, window: int | None) -> None:
    """When half of them have ended, the rest goes on alone, with all that is recorded of its tokens."""
    if window:
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        model = MistralForCausalLM(
            MistralConfig(vocab_size=len(TOKENIZER), num_key_value_heads=1, sliding_window=window, **shape)
        )
    requests = [Request([2 + place % 3, 5], place, 1 + 3 * place) for place in range(12)]
    asked = replace(PLAIN, top_k=3, with_kept=True, num_most_likely=2)
    engine, computed = HFRollout(model, TOKENIZER, "cpu"), list[int]()
    hook = engine._model.register_forward_hook(lambda *args: computed.append(len(args[2].logits)))
    turns = engine.sample(requests, asked)
    hook.remove()
    expected = rows = len(requests)
    for place, count in enumerate(computed):
        assert count == expected
        num_left = sum(len(turn.token_ids) > place + 1 for turn in turns)
        expected = rows = num_left if 2 * num_left <= rows else rows
    assert expected == 0
    assert min(computed) < 3
    for turn, request in zip(turns, requests, strict=True):
        [other] = engine.sample([request], asked)
        assert_same([turn], [other])
        for ours, theirs in ((turn.kept, other.kept), (turn.most_likely, other.most_likely)):
            assert ours is not None
            assert theirs is not None
            assert (ours.ids.tolist(), ours.counts.tolist()) == (theirs.ids.tolist(), theirs.counts.tolist())


def test_no_requests_give_no_turns(model: Any) -> None:
    assert list(HFRollout(model, TOKENIZER, "cpu").sample([], PLAIN)) == []


def test_torchs_random_state_is_neither_read_nor_moved(model: Any) -> None:
    torch.manual_seed(1)
    first = values_of(sample(model))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert values_of(sample(model)) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_changes_samples(model: Any) -> None:
    one, two = (values_of(sample(model, requests=make_requests(step_seed=seed))) for seed in (1, 2))
    assert one != two
    assert len({tuple(tokens) for tokens, _, _ in one}) > len(TEXTS)


def test_types_are_those_of_a_turn(model: Any) -> None:
    """Views of the columns of all turns."""
    for turn in sample(model):
        size = len(turn.token_ids)
        for values, dtype in (
            (turn.token_ids, torch.int64),
            (turn.log_probs, torch.float32),
            (turn.versions, torch.int64),
        ):
            assert (values.dtype, tuple(values.shape), values.device.type) == (dtype, (size,), "cpu")
        assert (turn.log_probs < 0).all()


def test_greedy_takes_the_most_likely_token(model: Any) -> None:
    requests = make_requests(n=1)
    for request, turn in zip(requests, sample(model, replace(PLAIN, greedy=True), requests), strict=True):
        ids = list(request.token_ids)
        for token in turn.token_ids.tolist():
            with torch.no_grad():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids = [*ids, token]


def test_the_models_own_generation_config_does_not_leak_in(model: Any) -> None:
    opinionated = copy.deepcopy(model)
    opinionated.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.5, repetition_penalty=5.0, max_length=7,
        min_new_tokens=4, num_beams=2, no_repeat_ngram_size=1, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    assert values_of(sample(opinionated)) == values_of(sample(model))


def test_every_end_of_sequence_ends(model: Any) -> None:
    two_ends = copy.deepcopy(model)
    other = TOKENIZER.convert_tokens_to_ids("7")
    two_ends.generation_config = GenerationConfig(eos_token_id=[EOS, other])
    found = values_of(sample(two_ends, requests=make_requests(n=8)))
    assert {EOS, other} <= {tokens[-1] for tokens, _, _ in found}
    assert not any({EOS, other} & set(tokens[:-1]) for tokens, _, _ in found)
    assert all((reason == "stop") == (tokens[-1] in {EOS, other}) for tokens, _, reason in found)


def test_a_model_without_an_end_is_refused(model: Any) -> None:
    endless = copy.deepcopy(model)
    endless.generation_config = GenerationConfig()
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="end-of-sequence"):
        HFRollout(endless, tokenizer, "cpu")


def test_engine_keeps_its_own_weights(model: Any) -> None:
    trained = copy.deepcopy(model).train()
    engine: RolloutEngine = HFRollout(trained, TOKENIZER, "cpu")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert values_of(engine.sample(make_requests(), PLAIN)) == values_of(sample(model))
    assert trained.training
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_after_a_sync_it_samples_from_the_new_weights(model: Any) -> None:
    engine = HFRollout(model, TOKENIZER, "cpu")
    assert {version for turn in run(engine) for version in turn.versions.tolist()} == {0}
    other = random_model(2)
    engine.sync_weights(PlainWeights(other.named_parameters()), policy_version=5)
    turns = run(engine)
    assert values_of(turns) == values_of(sample(other)) != values_of(sample(model))
    assert {version for turn in turns for version in turn.versions.tolist()} == {5}
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert values_of(run(engine)) == values_of(turns)


def test_sync_casts_to_the_copys_dtype(model: Any) -> None:
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    engine = HFRollout(random_model(2), TOKENIZER, "cpu")
    engine.sync_weights(
        PlainWeights(((name, p.bfloat16()) for name, p in rounded.named_parameters())), policy_version=1
    )
    assert values_of(run(engine)) == values_of(sample(rounded))


def test_low_precision_copy_is_the_model_as_transformers_loads_it(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    engine = HFRollout(random_model(2), TOKENIZER, "cpu", dtype="bf16")
    engine.sync_weights(PlainWeights(model.named_parameters()), policy_version=1)
    assert values_of(run(engine)) == values_of(sample(loaded))
    assert all(turn.log_probs.dtype == torch.float32 for turn in run(engine))


def away_from_ties(model: Any) -> Any:
    """A copy with no weight near the middle of two levels, which float32 and float64 may round apart."""
    moved = copy.deepcopy(model)
    for name, parameter in moved.named_parameters():
        if parameter.ndim == 2 and "embed_tokens" not in name:
            step = parameter.detach().double().abs().amax(1, keepdim=True) / 127
            level = (parameter.detach().double() / step).round()
            rest = (parameter.detach().double() / step - level).clamp(-0.45, 0.45)
            parameter.data = ((level + rest) * step).to(parameter.dtype)
    return moved


def by_hand_int8(model: Any) -> Any:
    """A copy whose linear weights are rounded number by number in Python's own arithmetic."""
    rounded = copy.deepcopy(model)
    for name, parameter in rounded.named_parameters():
        if parameter.ndim == 2 and "embed_tokens" not in name:
            rows = []
            for row in parameter.tolist():
                step = max(abs(value) for value in row) / 127
                rows.append([round(value / step) * step for value in row])
            parameter.data = torch.tensor(rows, dtype=parameter.dtype)
    return rounded


def test_int8_samples_from_the_rounded_model_and_says_so(model: Any) -> None:
    """Its log-probs are those of the rounded model, after construction and after a sync alike."""
    model = away_from_ties(model)
    untouched = copy.deepcopy(model)
    built = HFRollout(model, TOKENIZER, "cpu", dtype="int8")
    synced = HFRollout(random_model(2), TOKENIZER, "cpu", dtype="int8")
    synced.sync_weights(PlainWeights(model.named_parameters()), policy_version=1)
    wanted = sample(by_hand_int8(model))
    assert_same(run(built), wanted)
    assert_same(run(synced), wanted)
    gaps = [
        float((ours.log_probs - theirs.log_probs).abs().max())
        for ours, theirs in zip(wanted, sample(model), strict=True)
        if torch.equal(ours.token_ids, theirs.token_ids)
    ]
    assert max(gaps) > 1e-3  # the mismatch that correction is for
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_int8_has_255_levels_per_row_and_leaves_the_rest_alone(model: Any) -> None:
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        zeroed.lm_head.weight[3] = 0.0
    weights = HFRollout(zeroed, TOKENIZER, "cpu", dtype="int8")._model.state_dict()
    for name, original in zeroed.state_dict().items():
        if original.ndim == 2 and "embed_tokens" not in name:
            step = original.abs().amax(1, keepdim=True) / 127
            assert ((weights[name] - original).abs() <= step * 0.5001).all(), name
            assert all(len(row.unique()) <= 255 for row in weights[name]), name
        else:
            assert torch.equal(weights[name], original), name


def test_fp32_copy_of_a_bf16_model_computes_in_fp32(model: Any) -> None:
    low = copy.deepcopy(model)
    for parameter in low.parameters():
        parameter.data = parameter.data.bfloat16()
    high = copy.deepcopy(low)
    for parameter in high.parameters():
        parameter.data = parameter.data.float()
    assert values_of(sample(low, dtype="fp32")) == values_of(sample(high))


def test_an_incomplete_sync_is_an_error_until_a_complete_one(model: Any) -> None:
    engine = HFRollout(model, TOKENIZER, "cpu")
    weights = random_model(2).state_dict()
    missing = {name: tensor for name, tensor in weights.items() if "norm.weight" not in name}
    with pytest.raises(RunFailure, match=r"model\.norm\.weight is missing") as caught:
        engine.sync_weights(PlainWeights(missing.items()), policy_version=1)
    assert "lm_head" not in str(caught.value)
    with pytest.raises(RunFailure, match="old and new weights"):
        run(engine)
    engine.sync_weights(PlainWeights(weights.items()), policy_version=2)
    assert values_of(run(engine)) == values_of(sample(random_model(2)))


def test_sync_refuses_what_it_does_not_know(model: Any) -> None:
    engine = HFRollout(model, TOKENIZER, "cpu")
    weights = model.state_dict()
    with pytest.raises(RunFailure, match=r"module\.extra is unknown"):
        engine.sync_weights(
            PlainWeights({**weights, "module.extra": torch.zeros(1)}.items()), policy_version=1
        )
    with pytest.raises(RunFailure, match=r"model.norm.weight has shape \(3,\) instead of \(64,\)"):
        engine.sync_weights(
            PlainWeights({**weights, "model.norm.weight": torch.zeros(3)}.items()), policy_version=1
        )


def test_tied_weights_need_one_name() -> None:
    def tied(seed: int) -> Any:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=15, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=True, eos_token_id=EOS,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()

    engine, other = HFRollout(tied(1), TOKENIZER, "cpu"), tied(2)
    names = [name for name, _ in other.named_parameters()]
    assert "lm_head.weight" not in names
    engine.sync_weights(PlainWeights(other.named_parameters()), policy_version=1)
    assert values_of(run(engine)) == values_of(sample(other))
    engine.sync_weights(PlainWeights(other.state_dict().items()), policy_version=2)  # both names
    assert values_of(run(engine)) == values_of(sample(other))


def test_bad_weights_give_nan_log_probs_not_a_crash(model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[4] = torch.nan
    assert all(turn.log_probs.isnan().all() for turn in sample(broken))


def test_turns_can_enter_a_loss(model: Any) -> None:
    """No inference tensors: autograd must be able to save them."""
    weight = torch.ones((), requires_grad=True)
    (weight * torch.cat([turn.log_probs for turn in sample(model)])).sum().backward()
    assert weight.grad is not None
