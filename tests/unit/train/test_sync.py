"""The proof of a sync: an engine that samples without the adapter, or with another policy, is caught."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.batch import Task, Turn
from rlctl.engine.deepspeed import FrozenPolicy
from rlctl.engine.lora import adapter_parameters, add_lora
from rlctl.engine.policy_engine import plain_weights
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import EngineReport, sampling_of
from rlctl.rollout.shared_engine import EngineLock, LockedRollout
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model import ALL_LINEAR
from rlctl.train.loop import performance
from rlctl.train.step_metrics import StepTimer
from rlctl.train.sync import confirm_sync
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, random_model

ALONE = Ranks(0, 1, torch.device("cpu"))
LORA = ("rollout.name=vllm", "model.lora_rank=2", "trainer.seed=3")


class Prompts(tuple[int, ...]):
    def tasks(self, places: list[int], group_ids: list[int]) -> list[Task]:
        rows = zip(places, group_ids, strict=True)
        return [Task(TOKENIZER(TEXTS[row])["input_ids"], TEXTS[row], group) for row, group in rows]


def frozen(model: Any) -> FrozenPolicy:
    return FrozenPolicy(model, ALONE, zero_stage=0, dtype=torch.float32, temperature=1.0)


@pytest.fixture
def engine() -> HFRollout:
    return HFRollout(random_model(1), TOKENIZER, "cpu")


def test_memory_of_a_sleeping_engine_is_not_counted_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts what vLLM's allocator has given back to the driver as allocated."""
    report = EngineReport(sleeping_bytes=30 * 2**30)
    engine, timer = SimpleNamespace(report=lambda: report), StepTimer(torch.device("cpu"))
    timer.seconds["step"] = 1.0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 95 * 2**30)
    for rollout, gib in ((engine, 65.0), (SimpleNamespace(), 95.0)):
        own = LockedRollout(rollout, EngineLock(), first=True).report().sleeping_bytes
        ranks = Ranks(0, 1, torch.device("cuda"))
        found = performance({"perf/total_num_tokens": 1.0}, timer, ranks, own)
        assert found["perf/max_memory_allocated_gb"] == gib


def run_with(engine: HFRollout, *overrides: str, learnt: float) -> tuple[Any, PlainWeights]:
    """A run whose adapter has learnt so much, the policy's own weights, and an engine as it is."""
    model = random_model(1)
    add_lora(model, 2, 4.0, [ALL_LINEAR])
    torch.manual_seed(0)
    for name, parameter in adapter_parameters(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=learnt)
    policy = frozen(model)
    spec = load_spec([], [], [*LORA, *overrides]).spec
    run = SimpleNamespace(
        spec=spec,
        sampling=sampling_of(spec),
        ranks=ALONE,
        train_prompts=Prompts(range(6)),
        rollout=LockedRollout(engine, EngineLock(), first=True),
        actor=SimpleNamespace(policy=lambda batch: SimpleNamespace(log_probs=policy.log_probs(batch))),
        base=frozen(random_model(1)),
        sequence=None,
        tokenizer=TOKENIZER,
    )
    weights = [(weight.name, weight.value()) for weight in plain_weights(model)]
    return run, PlainWeights(weights)


@pytest.mark.parametrize("learnt", [0.0, 0.01, 0.3])
def test_an_engine_with_the_adapter_passes(engine: HFRollout, learnt: float) -> None:
    run, weights = run_with(engine, learnt=learnt)
    engine.sync_weights(weights, policy_version=1)
    assert confirm_sync(run, 1)["rollout/sync_gap"] < 1e-5


def test_an_engine_without_it_is_caught_long_before_it_is_far_away(engine: HFRollout) -> None:
    run, _ = run_with(engine, learnt=0.003)
    with pytest.raises(RunFailure, match="samples without the adapter") as caught:
        confirm_sync(run, 1)
    assert "rollout.merge_lora=true" in str(caught.value.fix)
    gap = float(caught.value.what.split(" are ")[1].split()[0])
    assert gap < 0.1
    run, _ = run_with(engine, "rollout.merge_lora=true", learnt=0.003)
    assert confirm_sync(run, 1)["rollout/sync_gap"] == pytest.approx(gap, rel=1e-2)


def test_an_engine_with_other_weights_is_caught(engine: HFRollout) -> None:
    run, _ = run_with(engine, learnt=0.3)
    engine.sync_weights(PlainWeights(random_model(2).named_parameters()), policy_version=1)
    with pytest.raises(RunFailure, match="does not sample with the synced weights"):
        confirm_sync(run, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda turn: {"log_probs": turn.log_probs.bfloat16()}, "type torch.bfloat16"),
        (lambda turn: {"log_probs": turn.log_probs[:-1]}, r"log_probs of turn 1 of shape"),
        (lambda turn: {"token_ids": turn.token_ids.int()}, "token_ids .* type torch.int32"),
        (lambda turn: {"finish_reason": "tired"}, "finish_reason 'tired' of turn 1"),
        (
            lambda turn: {name: getattr(turn, name)[:0] for name in ("token_ids", "log_probs", "versions")},
            "sampled no token",
        ),
    ],
    ids=["half precision", "shorter", "narrow tokens", "unknown reason", "empty"],
)
def test_what_an_engine_returns_is_checked(
    engine: HFRollout, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    run, _ = run_with(engine, learnt=0.0)
    sample = engine.sample

    def changed(*arguments: Any) -> list[Turn]:
        return [replace(turn, **change(turn)) for turn in sample(*arguments)]

    monkeypatch.setattr(engine, "sample", changed)
    with pytest.raises(RunFailure, match=words):
        confirm_sync(run, 1)
