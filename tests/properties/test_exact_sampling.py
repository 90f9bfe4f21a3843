"""Exact sampling: the trainer's policy is restricted to what the sampler kept, and renormalised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.batch import Task, TokenBatch
from rlctl.engine.log_probs import PolicyModule
from rlctl.environment.single_turn import sample_episodes
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec import memory
from tests.processes import on_ranks
from tests.properties.enumerated_updates import ROUNDING, enumerate_truncated
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, random_model

PLAIN = Sampling(max_response_length=9, with_kept=True)
TRUNCATED = {
    "top-p": replace(PLAIN, top_p=0.9),
    "top-k": replace(PLAIN, top_k=3),
    "min-p": replace(PLAIN, min_p=0.1),
    "temperature and all": replace(PLAIN, temperature=0.7, top_p=0.9, top_k=8, min_p=0.02),
}
WAYS = ["packed", "shared prompts", "plain", "in chunks", "model's own head"]


@pytest.fixture(scope="module")
def model():
    return random_model(1, sharpness=3.0)


def sample(model, sampling: Sampling, max_num_seqs: int | None = None) -> TokenBatch:
    engine = HFRollout(model, TOKENIZER, "cpu", max_num_seqs)
    tasks = [Task(TOKENIZER(text)["input_ids"], text, group) for group, text in enumerate(TEXTS)]
    return TokenBatch.of(sample_episodes(engine, tasks, 6, sampling, 3, TOKENIZER))


def policy_of(model, temperature: float, way: str = "packed") -> PolicyModule:
    policy = PolicyModule(model, temperature, share_prompts=way == "shared prompts")
    policy._probe()
    policy.reader.layout = "packed" if way in ("packed", "in chunks") else "padded"
    policy.head.is_linear = way != "model's own head"
    return policy


def gaps(model, batch: TokenBatch, temperature: float, way: str = "packed"):
    with torch.no_grad():
        output = policy_of(model, temperature, way)(batch.inputs)
    return (output.log_probs - batch.rollout_log_probs).abs()


@pytest.mark.parametrize("name", TRUNCATED)
@pytest.mark.parametrize("way", WAYS)
def test_the_gap_is_rounding(model, monkeypatch, name, way) -> None:
    if way == "in chunks":
        monkeypatch.setattr(memory, "MAX_LOGITS", 100)
    rollouts = sample(model, TRUNCATED[name])
    temperature = TRUNCATED[name].temperature
    assert gaps(model, rollouts, temperature, way).mean() <= 1e-6
    assert gaps(model, rollouts, temperature, way).max() <= 5e-6
    # And without it, truncation is most of what is seen.
    assert gaps(model, rollouts.with_columns(kept=None), temperature, way).mean() > 0.02


def test_sets_are_those_of_the_processed_distribution(model) -> None:
    """Responses that end early and chunks included; a whole vocabulary is stored as nothing."""
    sampling = TRUNCATED["top-k"]
    whole, cut = sample(model, sampling), sample(model, sampling, max_num_seqs=5)
    assert (whole.column("kept").counts == 3).all()
    assert torch.equal(whole.column("kept").counts, cut.column("kept").counts)
    assert torch.equal(whole.column("kept").ids, cut.column("kept").ids)
    assert not whole.column("kept").without(whole.inputs.tokens).any()
    everything = sample(model, PLAIN).column("kept")
    assert not everything.counts.any()
    assert len(everything.ids) == 0
    assert "kept" not in sample(model, replace(PLAIN, with_kept=False)).columns


def test_episodes_in_any_order_take_their_sets_along(model) -> None:
    """As micro-batches do."""
    batch = sample(model, TRUNCATED["top-p"])
    for chosen in ([30, 3, 17, 3], list(range(7, 20))):
        kept = batch.pick(chosen).column("kept")
        sets = [set(x.tolist()) for x in kept.ids.split(kept.counts.tolist())]
        one_by_one = []
        for row in chosen:
            own = batch.column("kept")[batch.units.episode.index == row]
            one_by_one += [set(x.tolist()) for x in own.ids.split(own.counts.tolist())]
        assert sets == one_by_one


def test_entropy_and_collision_are_of_the_restricted_policy_too(model) -> None:
    rollouts = sample(model, TRUNCATED["top-k"])
    policy = policy_of(model, 1.0)
    output = policy(rollouts.inputs, entropy_grad=True, sum_pi_squared=True)
    entropy, squares = output.entropy, output.sum_pi_squared
    assert (entropy <= torch.tensor(3.0).log() + 1e-6).all()
    assert (squares >= 1 / 3 - 1e-6).all()
    entropy.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_gradient_is_that_of_the_restricted_policy(tmp_path) -> None:
    """`update` on DeepSpeed, every batch enumerated: exact with the sets, far off without them."""
    (found,) = on_ranks(1, enumerate_truncated, where=tmp_path)
    for (old, is_exact, micro_rows), deviation in found.items():
        if is_exact:
            assert deviation.error < ROUNDING, (old, micro_rows)
            assert deviation.scale == pytest.approx(1.0, rel=1e-4)
        else:
            assert deviation.error > 0.05, (old, micro_rows)
