from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from rlctl.batch import Prompts, Rollouts
from rlctl.errors import RunFailure, UsageError
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import RolloutEngine, Sampling
from rlctl.rollout.weights import PlainWeights
from rlctl.spec.model import RECIPE
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


def make_prompts(texts: tuple[str, ...] = TEXTS, extra_padding: int = 0) -> Prompts:
    encoded = TOKENIZER(list(texts), padding=True, return_tensors="pt")
    pad = (extra_padding, 0)
    return Prompts(
        prompt_ids=torch.nn.functional.pad(encoded["input_ids"], pad, value=PAD),
        prompt_mask=torch.nn.functional.pad(encoded["attention_mask"], pad).bool(),
        group_ids=torch.arange(len(texts)),
        data_sources=tuple(f"source {text}" for text in texts),
        ground_truths=tuple(f"truth {text}" for text in texts),
        texts=texts,
    )


def take(prompts: Prompts, rows: list[int]) -> Prompts:
    """Some of the prompts, as one rank gets them."""
    values = {field.name: getattr(prompts, field.name) for field in fields(Prompts)}
    return Prompts(
        **{k: v[rows] if isinstance(v, Tensor) else tuple(v[i] for i in rows if v) for k, v in values.items()}
    )


def generate(
    model: Any, sampling: Sampling = PLAIN, prompts: Prompts | None = None, n: int = 3, **engine: Any
) -> Rollouts:
    prompts = prompts or make_prompts()
    return HFRollout(model, TOKENIZER, "cpu", **engine).generate(
        prompts, sampling, n=n, step_seed=11, num_groups_total=len(TEXTS)
    )


def run(engine: HFRollout) -> Rollouts:
    return engine.generate(make_prompts(), PLAIN, n=3, step_seed=11, num_groups_total=len(TEXTS))


def sampled(rollouts: Rollouts) -> list[tuple[int, list[int], list[float]]]:
    """Per row: group, tokens without padding, log-probs."""
    lengths = rollouts.response_mask.sum(1).tolist()
    return [
        (group, row[:length], values[:length])
        for group, row, values, length in zip(
            rollouts.group_ids.tolist(),
            rollouts.responses.tolist(),
            rollouts.rollout_log_probs.tolist(),
            lengths,
            strict=True,
        )
    ]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert [(group, tokens) for group, tokens, _ in ours] == [(group, tokens) for group, tokens, _ in theirs]
    for (_, _, values), (_, _, expected) in zip(ours, theirs, strict=True):
        assert values == pytest.approx(expected, abs=1e-5)


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
    rollouts = generate(model, sampling)
    for row, (group, tokens, values) in enumerate(sampled(rollouts)):
        prompt = TOKENIZER(TEXTS[group])["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for position, token in enumerate(tokens):
            expected = truncated_log_probs(logits[position], sampling)[token]
            assert values[position] == pytest.approx(float(expected), abs=1e-5), (row, position)


def test_first_tokens_are_as_frequent_as_probable(model: Any) -> None:
    n = 4000
    prompts = make_prompts(("3+4=",))
    engine = HFRollout(model, TOKENIZER, "cpu")
    rollouts = engine.generate(prompts, Sampling(2), n=n, step_seed=3, num_groups_total=1)
    with torch.no_grad():
        probs = model(prompts.prompt_ids).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(rollouts.responses[:, 0], minlength=len(probs)).double()
    chi2 = ((counts - probs * n) ** 2 / (probs * n)).sum()
    assert chi2 < 36.1  # 0.999 quantile for 14 degrees of freedom


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks_do_not_change_samples(model: Any, size: int) -> None:
    assert_same(sampled(generate(model, max_num_seqs=size)), sampled(generate(model)))


def test_ranks_do_not_change_samples(model: Any) -> None:
    whole = sampled(generate(model))
    shares = [[0, 2, 4], [1, 3, 5]]
    ranks = [sampled(generate(model, prompts=take(make_prompts(), share))) for share in shares]
    assert_same(sorted(ranks[0] + ranks[1], key=lambda row: row[0]), whole)


def test_left_padding_does_not_change_samples(model: Any) -> None:
    assert_same(sampled(generate(model, prompts=make_prompts(extra_padding=5))), sampled(generate(model)))


def test_torchs_random_state_is_neither_read_nor_moved(model: Any) -> None:
    torch.manual_seed(1)
    first = sampled(generate(model))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert sampled(generate(model)) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_seed_and_sibling_change_samples(model: Any) -> None:
    engine = HFRollout(model, TOKENIZER, "cpu")
    one, two = (
        engine.generate(make_prompts(), PLAIN, n=3, step_seed=seed, num_groups_total=len(TEXTS))
        for seed in (1, 2)
    )
    assert sampled(one) != sampled(two)
    assert len({tuple(tokens) for _, tokens, _ in sampled(one)}) > len(TEXTS)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_masks_by_brute_force(model: Any, length: int) -> None:
    rollouts = generate(model, Sampling(length), n=4, max_num_seqs=5)
    prompts = make_prompts()
    batch, width = rollouts.responses.shape
    assert batch == len(TEXTS) * 4
    ended = 0
    for row in range(batch):
        prompt = row // 4
        tokens = rollouts.responses[row].tolist()
        stop = tokens.index(EOS) + 1 if EOS in tokens else width
        ended += EOS in tokens
        assert rollouts.response_mask[row].tolist() == [t < stop for t in range(width)]
        assert bool(rollouts.truncated[row]) == (EOS not in tokens)
        assert EOS in tokens or width == length
        assert tokens[stop:] == [PAD] * (width - stop)
        assert rollouts.rollout_log_probs[row, stop:].tolist() == [0.0] * (width - stop)
        assert (rollouts.rollout_log_probs[row, :stop] < 0).all()
        mask = prompts.prompt_mask[prompt].tolist() + [t < stop for t in range(width)]
        assert rollouts.attention_mask[row].tolist() == mask
        assert rollouts.input_ids[row].tolist() == prompts.prompt_ids[prompt].tolist() + tokens
        positions = [max(sum(mask[: t + 1]) - 1, 0) for t in range(len(mask))]
        assert rollouts.position_ids[row].tolist() == positions
        assert rollouts.group_ids[row] == prompt
        assert rollouts.prompt_texts[row] == TEXTS[prompt]
        assert rollouts.ground_truths[row] == f"truth {TEXTS[prompt]}"
        assert rollouts.data_sources[row] == f"source {TEXTS[prompt]}"
        words = [token for token in tokens[:stop] if token not in TOKENIZER.all_special_ids]
        assert rollouts.response_texts[row] == "".join(TOKENIZER.convert_ids_to_tokens(words))
    assert length == 1 or 0 < ended < batch  # both kinds were seen
    assert rollouts.attention_mask.dtype == rollouts.response_mask.dtype == torch.bool
    assert rollouts.rollout_log_probs.dtype == torch.float32
    assert rollouts.responses.dtype == torch.int64


def test_greedy_takes_the_most_likely_token(model: Any) -> None:
    rollouts = generate(model, replace(PLAIN, greedy=True), n=1)
    for group, tokens, _ in sampled(rollouts):
        ids = TOKENIZER(TEXTS[group])["input_ids"]
        for token in tokens:
            with torch.no_grad():
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids = [*ids, token]


def test_the_models_own_generation_config_does_not_leak_in(model: Any) -> None:
    opinionated = copy.deepcopy(model)
    opinionated.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.5, repetition_penalty=5.0, max_length=7,
        min_new_tokens=4, num_beams=2, no_repeat_ngram_size=1, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    assert sampled(generate(opinionated)) == sampled(generate(model))


def test_every_end_of_sequence_ends(model: Any) -> None:
    two_ends = copy.deepcopy(model)
    other = TOKENIZER.convert_tokens_to_ids("7")
    two_ends.generation_config = GenerationConfig(eos_token_id=[EOS, other])
    rollouts = generate(two_ends, n=8)
    last = {tokens[-1] for _, tokens, _ in sampled(rollouts)}
    assert {EOS, other} <= last
    assert not any({EOS, other} & set(tokens[:-1]) for _, tokens, _ in sampled(rollouts))
    assert not any("7" in text for text in rollouts.response_texts)


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
    rollouts = engine.generate(make_prompts(), PLAIN, n=3, step_seed=11, num_groups_total=len(TEXTS))
    assert sampled(rollouts) == sampled(generate(model))
    assert trained.training
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_after_a_sync_it_samples_from_the_new_weights(model: Any) -> None:
    engine = HFRollout(model, TOKENIZER, "cpu")
    assert run(engine).policy_version.tolist() == [0] * 18
    other = random_model(2)
    engine.sync_weights(PlainWeights(other.named_parameters()), policy_version=5)
    rollouts = run(engine)
    assert sampled(rollouts) == sampled(generate(other)) != sampled(generate(model))
    assert rollouts.policy_version.tolist() == [5] * 18
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert sampled(run(engine)) == sampled(rollouts)


def test_sync_casts_to_the_copys_dtype(model: Any) -> None:
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    engine = HFRollout(random_model(2), TOKENIZER, "cpu")
    engine.sync_weights(
        PlainWeights(((name, p.bfloat16()) for name, p in rounded.named_parameters())), policy_version=1
    )
    assert sampled(run(engine)) == sampled(generate(rounded))


def test_low_precision_copy_is_the_model_as_transformers_loads_it(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    engine = HFRollout(random_model(2), TOKENIZER, "cpu", dtype="bf16")
    engine.sync_weights(PlainWeights(model.named_parameters()), policy_version=1)
    assert sampled(run(engine)) == sampled(generate(loaded))
    assert run(engine).rollout_log_probs.dtype == torch.float32


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
    untouched = copy.deepcopy(model)
    built = HFRollout(model, TOKENIZER, "cpu", dtype="int8")
    synced = HFRollout(random_model(2), TOKENIZER, "cpu", dtype="int8")
    synced.sync_weights(PlainWeights(model.named_parameters()), policy_version=1)
    wanted = sampled(generate(by_hand_int8(model)))
    assert_same(sampled(run(built)), wanted)
    assert_same(sampled(run(synced)), wanted)
    exact = {(group, *tokens): values for group, tokens, values in sampled(generate(model))}
    gaps = [
        abs(ours - theirs)
        for group, tokens, values in wanted
        for ours, theirs in zip(values, exact.get((group, *tokens), []), strict=False)
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
    assert sampled(generate(low, dtype="fp32")) == sampled(generate(high))


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
    assert sampled(run(engine)) == sampled(generate(random_model(2)))


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
    assert sampled(run(engine)) == sampled(generate(other))
    engine.sync_weights(PlainWeights(other.state_dict().items()), policy_version=2)  # both names
    assert sampled(run(engine)) == sampled(generate(other))


def test_bad_weights_give_nan_log_probs_not_a_crash(model: Any) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight[4] = torch.nan
    rollouts = generate(broken)
    assert rollouts.rollout_log_probs[rollouts.response_mask].isnan().all()


def test_rollouts_can_enter_a_loss(model: Any) -> None:
    """No inference tensors: autograd must be able to save them."""
    rollouts = generate(model)
    weight = torch.ones((), requires_grad=True)
    (weight * rollouts.rollout_log_probs).sum().backward()
    assert weight.grad is not None
