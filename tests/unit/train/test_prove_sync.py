"""The proof of a weight sync: faults that leave old weights in a replica are planted and must be named."""

from __future__ import annotations

import contextlib
import copy
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import Adapter, adapter_parameters, add_lora
from rlctl.engine.perturb import parts_of, perturbed
from rlctl.engine.policy_engine import plain_weights
from rlctl.errors import RunFailure
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Policy, sampling_of
from rlctl.rollout.shared_engine import EngineLock, LockedRollout
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model import ALL_LINEAR
from rlctl.train import sync
from rlctl.train.capability import Capability, Probe
from rlctl.train.sync import confirm_sync, prove_sync
from tests.models import tiny_model
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model
from tests.unit.train.test_sync import ALONE, Prompts, frozen


class Actor:
    """A policy under training without its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model, self._policy = model, frozen(copy.deepcopy(model))
        model.requires_grad_(True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name or not adapter_parameters(model))
        self.parts, self.perturbed = parts_of(model), partial(perturbed, model)

    def policy(self, inputs: Any) -> Any:
        grads = {name: p.requires_grad for name, p in self.model.named_parameters()}
        found = PolicyModule(copy.deepcopy(self.model).eval(), 1.0)(inputs)
        assert grads == {name: p.requires_grad for name, p in self.model.named_parameters()}
        return found

    def weights(self, *, merged: bool = True) -> Any:
        return ((weight.name, weight.value()) for weight in plain_weights(self.model, merged=merged))

    def adapter(self) -> Adapter:
        tensors = {name: p.detach().clone() for name, p in adapter_parameters(self.model).items()}
        return Adapter.of(self.model, tensors)


class Replicas:
    """Engines behind one interface, as servers are."""

    def __init__(self, *engines: Any) -> None:
        self.engines = {f"http://engine-{number}": engine for number, engine in enumerate(engines)}

    def each(self) -> dict[str, Any]:
        return self.engines

    def sample(self, *arguments: Any) -> Any:
        return next(iter(self.engines.values())).sample(*arguments)

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        for engine in self.engines.values():
            engine.sync_weights(policy, policy_version)


class Severed(HFRollout):
    """It confirms every sync and keeps the weights that it has."""

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        list(policy.weights())


class WithoutAdapter(HFRollout):
    """It gets base and adapter, and samples with the base."""

    def sync_weights(self, policy: Any, policy_version: int) -> None:
        policy.adapter()
        super().sync_weights(SimpleNamespace(weights=partial(policy.weights, merged=False)), policy_version)


class StaleHead(HFRollout):
    """A sync does not reach a packed copy of the tied output head."""

    def __init__(self, model: Any, *more: Any, **options: Any) -> None:
        super().__init__(model, *more, **options)
        head = copy.deepcopy(self._model.get_output_embeddings())
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self._model.set_output_embeddings(head)


class StaleLayer(HFRollout):
    """A sync does not reach one kind of layers, as experts that were packed at the start."""

    def sync_weights(self, policy: Any, policy_version: int) -> None:
        old = {name: weight.clone() for name, weight in self._weights.items() if "down_proj" in name}
        super().sync_weights(policy, policy_version)
        for name, weight in old.items():
            self._weights[name].copy_(weight)


class OneWay(HFRollout):
    """Only the first sync arrives."""

    count = 0

    def sync_weights(self, policy: Any, policy_version: int) -> None:
        self.count += 1
        weights = policy.weights()
        if self.count == 1:
            super().sync_weights(SimpleNamespace(weights=lambda: weights), policy_version)
        list(weights)


class Recorder(Capability):
    """Keeps the probes that it is shown."""

    def __init__(self) -> None:
        self.probes: list[Probe] = []

    def check_probe(self, probe: Probe) -> None:
        self.probes.append(probe)


def tied_model() -> Any:
    model = tiny_model(tied=True, vocabulary=len(TOKENIZER))
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return model


def run_with(
    *engines: type[HFRollout], model: Any = None, lora: bool = False, learnt: float = 0.0, dtype: Any = None
) -> Any:
    """A run whose replicas are of these kinds and start with the policy."""
    model = random_model(1) if model is None else model
    replicas = [engine(model, TOKENIZER, "cpu", dtype=dtype) for engine in engines]
    base = frozen(copy.deepcopy(model))
    if lora:
        torch.manual_seed(0)
        add_lora(model, 2, 4.0, [ALL_LINEAR])
        for name, parameter in adapter_parameters(model).items():
            if "lora_B" in name and learnt:
                nn.init.normal_(parameter, std=learnt)
    spec = load_spec([], [], ["rollout.name=vllm", "trainer.seed=3", f"model.lora_rank={2 * lora}"]).spec
    actor = Actor(model)
    engine = Replicas(*replicas) if len(replicas) > 1 else replicas[0]
    engine.sync_weights(actor, policy_version=0)
    return SimpleNamespace(
        spec=spec,
        sampling=sampling_of(spec),
        ranks=ALONE,
        train_prompts=Prompts(range(6)),
        rollout=LockedRollout(engine, EngineLock(), first=True),
        actor=actor,
        base=base if lora else None,
        tokenizer=TOKENIZER,
        policy_version=0,
        capabilities=(Recorder(),),
    )


@pytest.mark.parametrize(
    ("engines", "options"),
    [
        ([HFRollout], {}),
        ([HFRollout, HFRollout], {}),
        ([HFRollout], {"dtype": "bf16"}),
        ([HFRollout], {"dtype": "int8"}),
        ([HFRollout], {"lora": True}),
        ([HFRollout], {"lora": True, "learnt": 0.1}),
        ([HFRollout], {"model": tied_model()}),
        ([HFRollout], {"model": tiny_model("qwen2", vocabulary=len(TOKENIZER))}),
    ],
    ids=["one", "two", "bf16", "int8", "new adapter", "adapter", "tied", "biases"],
)
def test_a_sound_engine_passes_and_all_weights_are_as_before(
    engines: list[type[HFRollout]], options: dict[str, Any]
) -> None:
    run = run_with(*engines, **options)
    engine = run.rollout._engine
    replicas = list(engine.engines.values()) if len(engines) > 1 else [engine]
    before = [
        {name: weight.clone() for name, weight in held.items()}
        for held in (run.actor.model.state_dict(), *(replica._weights for replica in replicas))
    ]
    said = prove_sync(run, 0)
    probes = run.capabilities[0].probes
    assert len(probes) == len(engines)
    for probe in probes:
        assert probe.log_probs(probe.batch).shape == probe.batch.rollout_log_probs.shape
    assert said.startswith(
        f"the weight sync reaches {'all 2 replicas' if len(engines) == 2 else 'the rollout'}"
    )
    after = [run.actor.model.state_dict(), *(replica._weights for replica in replicas)]
    for old, new in zip(before, after, strict=True):
        for name, weight in old.items():
            assert torch.equal(weight, new[name]), name


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_the_distance_of_whole_distributions_is_bounded(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of the message contain the total variation over the whole vocabulary."""
    monkeypatch.setattr(sync, "PROBE_LISTED", 4)  # of a vocabulary of 15
    run = run_with(HFRollout, dtype=dtype)
    seen: list[Any] = []
    probes = sync._probes
    monkeypatch.setattr(
        sync, "_probes", lambda *given, **more: seen.append(probes(*given, **more)) or seen[-1]
    )
    said = prove_sync(run, 0)
    low, high = map(float, re.findall(r"is between (\S+) and (\S+) on average", said)[0])
    [(_, batch)] = seen[0]
    assert batch.columns["most_likely"].counts.unique().tolist() == [4]
    models = copy.deepcopy(run.actor.model), run.rollout._engine._model
    p, q = (PolicyModule(m.float().eval(), 1.0).logits(batch.inputs).softmax(-1).double() for m in models)
    truth = float(0.5 * (p - q).abs().sum(-1).mean())
    if dtype is None:
        assert low < 1e-5
        assert truth < 1e-5
    else:
        assert 1e-4 < low <= truth * 1.1
    assert truth <= high * 1.1


@pytest.mark.parametrize("lora", [False, True])
def test_a_severed_replica_is_named(lora: bool) -> None:
    run = run_with(HFRollout, Severed, HFRollout, lora=lora)
    assert confirm_sync(run, 0)["rollout/sync_gap"] < 1e-5  # unnoticed until the weights change
    with pytest.raises(RunFailure, match="no weight sync reaches http://engine-1: after a change"):
        prove_sync(run, 0)
    with pytest.raises(RunFailure, match=r"no weight sync reaches the rollout engine"):
        prove_sync(run_with(Severed), 0)


@pytest.mark.parametrize("learnt", [0.0, 0.01])
def test_an_adapter_that_is_not_applied_is_named(learnt: float) -> None:
    run = run_with(WithoutAdapter, lora=True, learnt=learnt)
    with pytest.raises(RunFailure, match="the rollout engine samples without the adapter") as caught:
        prove_sync(run, 0)
    assert "rollout.merge_lora=true" in str(caught.value.fix)


def test_a_tied_head_that_is_not_repacked_is_named() -> None:
    run = run_with(StaleHead, model=tied_model())
    assert confirm_sync(run, 0)["rollout/sync_gap"] < 1e-5
    with pytest.raises(
        RunFailure, match="does not reach the output head, which is tied to embed_tokens:"
    ) as caught:
        prove_sync(run, 0)
    assert "repack" in str(caught.value.fix)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_layer_that_keeps_old_weights_is_named(dtype: Any) -> None:
    with pytest.raises(RunFailure, match="a weight sync to the rollout engine does not reach down_proj:"):
        prove_sync(run_with(StaleLayer, dtype=dtype), 0)


def test_a_change_that_is_not_undone_is_caught() -> None:
    run = run_with(HFRollout)
    run.rollout._engine = OneWay(random_model(1), TOKENIZER, "cpu")
    with pytest.raises(RunFailure, match="after a change of the weights and its reversal"):
        prove_sync(run, 0)


def test_a_policy_that_no_change_moves_is_not_proven() -> None:
    run = run_with(HFRollout)
    run.actor.perturbed = lambda *_: contextlib.nullcontext()
    assert prove_sync(run, 0).startswith("warning: the weight sync is not proven")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_perturbation_is_of_the_size_asked_for_and_exact(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with perturbed(model, 4):
        for name, weight in model.named_parameters():
            change = ((weight - before[name]).float() / before[name].float()).abs()
            there = change[before[name] != 0]
            assert 1 / 33 < there.min() <= there.max() <= 1 / 16, name
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
