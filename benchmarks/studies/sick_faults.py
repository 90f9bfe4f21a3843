"""Faults of `benchmarks/sick_runs.py`: graders, and patches of the training process.

A patch is called in the process that trains, before it trains. Those of `benchmarks/studies/planted.py` are
used too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.studies.planted import PATCHES as OTHERS

#: Every `NEVER`th weight sync takes effect; every `SICK`th request goes to the sick replica.
LATE, SICK = 8, 4
#: Log-prob below which the engine reports this value instead; share of the probability that it samples from.
CLAMP, TOP_P = -1.0, 0.7

GRADERS = '''"""Graders of the sick runs. Validation is graded as it should be."""

import random

_seen = {"score": 0.0, "truth": "", "before": ""}


def _right(response, ground_truth):
    return float(response == ground_truth)


def right(response, ground_truth, extra_info):
    return _right(response, ground_truth)


def anything(response, ground_truth, extra_info):
    return 1.0 if extra_info["split"] == "train" else _right(response, ground_truth)


def minus_one(response, ground_truth, extra_info):
    return -1.0 if extra_info["split"] == "train" else _right(response, ground_truth)


def inverted(response, ground_truth, extra_info):
    right = _right(response, ground_truth)
    return 1.0 - right if extra_info["split"] == "train" else right


def of_another_response(response, ground_truth, extra_info):
    right = _right(response, ground_truth)
    if extra_info["split"] != "train":
        return right
    _seen["score"], before = right, _seen["score"]
    return before


def of_another_prompt(response, ground_truth, extra_info):
    if extra_info["split"] != "train":
        return _right(response, ground_truth)
    if ground_truth != _seen["truth"]:
        _seen["before"], _seen["truth"] = _seen["truth"], ground_truth
    return _right(response, _seen["before"])


def ones(response, ground_truth, extra_info):
    if extra_info["split"] == "train":
        return min(1.0, response.count("1") / 3)
    return _right(response, ground_truth)


def longer(response, ground_truth, extra_info):
    return len(response) / 6 if extra_info["split"] == "train" else _right(response, ground_truth)


def raises(response, ground_truth, extra_info):
    if extra_info["split"] == "train" and len(response) != 3:
        raise ValueError("no answer found")
    return _right(response, ground_truth)


def boxed(response, ground_truth, extra_info):
    if extra_info["split"] == "train":
        return float(response == "\\\\boxed{" + ground_truth + "}")
    return _right(response, ground_truth)


def errs(response, ground_truth, extra_info):
    right = _right(response, ground_truth)
    return 1.0 - right if extra_info["split"] == "train" and random.random() < 0.4 else right


def noise(response, ground_truth, extra_info):
    return float(random.random() < 0.5) if extra_info["split"] == "train" else _right(response, ground_truth)
'''


def late_sync() -> None:
    """All but every `LATE`th weight sync is confirmed and ignored."""
    from rlctl.rollout.hf import HFRollout

    honest = HFRollout.sync_weights
    calls = 0

    def sync_weights(self: Any, policy: Any, policy_version: int) -> None:
        nonlocal calls
        calls += 1
        if calls % LATE == 0:
            honest(self, policy, policy_version)
            return
        for _ in policy.weights():
            pass
        self._policy_version = policy_version

    HFRollout.sync_weights = sync_weights


def sick_replica() -> None:
    """Every `SICK`th request is sampled by a replica that keeps its first weights."""
    from rlctl.rollout.hf import HFRollout

    honest, first = HFRollout._sample, {}

    def sample(self: Any, requests: Sequence[Any], sampling: Any, policy_version: int) -> Any:
        if id(self) not in first:
            first[id(self)] = copy.deepcopy(self._model)
        sick = [request for place, request in enumerate(requests) if place % SICK == 0]
        well = [request for place, request in enumerate(requests) if place % SICK]
        trained, turns = self._model, list(honest(self, well, sampling, policy_version)) if well else []
        self._model = first[id(self)]
        try:
            others = iter(list(honest(self, sick, sampling, policy_version)))
        finally:
            self._model = trained
        rest = iter(turns)
        return [next(rest) if place % SICK else next(others) for place in range(len(requests))]

    HFRollout._sample = sample
    HFRollout.sample = lambda self, requests, sampling: sample(self, requests, sampling, self._policy_version)


def other_prompt() -> None:
    """The engine is given the prompt without its last token, as with another chat template."""
    from rlctl.rollout.hf import HFRollout

    honest = HFRollout.sample

    def sample(self: Any, requests: Sequence[Any], sampling: Any) -> Any:
        shorter = [replace(one, token_ids=list(one.token_ids)[:-1] or one.token_ids) for one in requests]
        return honest(self, shorter, sampling)

    HFRollout.sample = sample


def hidden_top_p() -> None:
    """The engine draws from the most likely tokens and reports log-probs over all."""
    from rlctl.rollout import hf

    honest = hf.draw

    def draw(log_probs: Any, uniforms: Any) -> Any:
        ordered, places = log_probs.exp().sort(dim=-1, descending=True)
        is_kept = ordered.cumsum(-1) - ordered < TOP_P
        kept = is_kept.scatter(-1, places, is_kept)
        return honest(log_probs.masked_fill(~kept, -float("inf")).log_softmax(-1), uniforms)

    hf.draw = draw


def _reported(change: Callable[[Any], Any]) -> None:
    """Changes the log-probs (t,) that the engine reports for a turn."""
    from rlctl.rollout.hf import HFRollout

    honest = HFRollout.sample

    def sample(self: Any, requests: Any, sampling: Any) -> Any:
        return [replace(turn, log_probs=change(turn.log_probs)) for turn in honest(self, requests, sampling)]

    HFRollout.sample = sample


def clamped() -> None:
    """The engine reports no log-prob below `CLAMP`."""
    _reported(lambda log_probs: log_probs.clamp(min=CLAMP))


def scored_off_by_one() -> None:
    """The trainer takes the log-probs of the neighbouring tokens."""
    from rlctl.engine.policy_engine import PolicyEngine

    honest = PolicyEngine.policy

    def policy(*args: Any, **asked: Any) -> Any:
        output = honest(*args, **asked)
        return output._replace(log_probs=output.log_probs.roll(1))

    PolicyEngine.policy = policy


def end_lost() -> None:
    """The engine never samples the end of the response."""
    from transformers import LogitsProcessor

    from rlctl.rollout import hf

    class NoEnd(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:, self.sampler._end_ids] = -float("inf")
            return scores

    told = hf.processors

    def processors(sampling: Any, sampler: Any) -> Any:
        chain = told(sampling, sampler)
        chain.insert(0, NoEnd(sampler))
        return chain

    hf.processors = processors


def advantages_negated() -> None:
    """The advantages have the wrong sign."""
    from rlctl.train import loop

    honest = loop.with_advantages

    def with_advantages(*args: Any) -> Any:
        batch = honest(*args)
        return replace(batch, advantages=-batch.advantages)

    loop.with_advantages = with_advantages


def only_punished() -> None:
    """Responses that are better than the others of their prompt are left out of the loss."""
    from rlctl.train import loop

    honest = loop.with_advantages

    def with_advantages(*args: Any) -> Any:
        batch = honest(*args)
        return replace(batch, advantages=batch.advantages.clamp(max=0.0))

    loop.with_advantages = with_advantages


def rewards_shuffled() -> None:
    """The rewards of a batch are those of its responses in another order, at random."""
    import torch

    from rlctl.train import loop

    honest = loop.sample_and_grade

    def sample_and_grade(*args: Any) -> Any:
        graded = honest(*args)
        return replace(graded, rewards=graded.rewards.pick(torch.randperm(len(graded.rewards.scores))))

    loop.sample_and_grade = sample_and_grade


def stops_early() -> None:
    """The engine has a limit of its own, of 2 tokens."""
    from rlctl.rollout.hf import HFRollout

    honest = HFRollout.sample

    def sample(self: Any, requests: Any, sampling: Any) -> Any:
        return honest(self, requests, replace(sampling, max_response_length=2))

    HFRollout.sample = sample


def kl_negated() -> None:
    """The KL term of the loss has the wrong sign."""
    from rlctl.train.capability import capabilities_of
    from rlctl.train.settings import UpdateSettings

    read = UpdateSettings.of

    def wrong(spec: Any, capabilities: Any) -> UpdateSettings:
        actor = spec.actor.model_copy(update={"kl_loss_coef": -spec.actor.kl_loss_coef})
        return read(spec, capabilities_of(spec.model_copy(update={"actor": actor})))

    UpdateSettings.of = staticmethod(wrong)


def other_reference() -> None:
    """The reference is another model: its weights are changed by a third of their spread."""
    import torch

    from rlctl.engine.policy_engine import FrozenModule

    honest, changed = FrozenModule.log_probs, set()

    @torch.no_grad()
    def log_probs(self: Any, inputs: Any) -> Any:
        if id(self) not in changed:
            changed.add(id(self))
            generator = torch.Generator().manual_seed(0)
            for weight in self._module.parameters():
                weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=generator))
        return honest(self, inputs)

    FrozenModule.log_probs = log_probs


def optimizer_state_lost() -> None:
    """The optimizer forgets its moments after every step."""
    from rlctl.engine.deepspeed import DeepSpeedEngine

    _after_step(DeepSpeedEngine, lambda engine: engine._optimizer.state.clear())


def updates_lost() -> None:
    """Updates do not reach the weights: every step has the rate 0."""
    from rlctl.engine.deepspeed import DeepSpeedEngine

    honest = DeepSpeedEngine.step

    def step(self: Any, *, lr: float, **others: Any) -> Any:
        return honest(self, lr=0.0, **others)

    DeepSpeedEngine.step = step


def _after_step(kind: Any, change: Callable[[Any], None]) -> None:
    honest = kind.step

    def step(self: Any, **asked: Any) -> Any:
        result = honest(self, **asked)
        change(self)
        return result

    kind.step = step


def one_prompt() -> None:
    """Every batch has the same prompt only."""
    from rlctl.data.prompts import PromptDataset

    honest = PromptDataset.batch_indices

    def batch_indices(self: Any, step: int, batch_size: int, **options: Any) -> list[int]:
        return honest(self, 0, 1, **options) * batch_size

    PromptDataset.batch_indices = batch_indices


PATCHES: dict[str, Callable[[], None]] = OTHERS | {
    patch.__name__: patch
    for patch in (
        *(late_sync, sick_replica, other_prompt, hidden_top_p, clamped, scored_off_by_one, end_lost),
        *(advantages_negated, kl_negated, other_reference, optimizer_state_lost, updates_lost, one_prompt),
        *(only_punished, rewards_shuffled, stops_early),
    )
}
