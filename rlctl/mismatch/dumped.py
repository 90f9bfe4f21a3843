"""Dumped rollouts of a run, scored under the weights that the run kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.algos.segments import Segments
from rlctl.batch import ModelInputs, TokenLists, torch_device
from rlctl.engine.checkpoint import verify
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.model import load_policy
from rlctl.errors import RlctlError, UsageError
from rlctl.model_files import model_directory
from rlctl.rollout.hf import DTYPES, truncation
from rlctl.rollout.protocol import sampling_of
from rlctl.run_spec.run_spec import RunSpec
from rlctl.tiny.game import embedded_task
from rlctl.track.open_run import RunRecord
from rlctl.track.rollouts import KEPT

#: Sequences of each step that are scored.
PER_STEP = 16
#: Name of the policy without its adapter.
BASE = "the base model"


@dataclass(frozen=True)
class DumpedStep:
    """Some sequences of one step, with columns of their M sampled tokens."""

    step: int
    inputs: ModelInputs
    unit: Segments  # the tokens of each sequence
    versions: Tensor  # (M,) int64, as recorded
    rollout: Tensor  # (M,) float32 log-probs, of the engine
    trained: Tensor  # (M,) of the trained policy; NaN: not graded


def spread_over(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` rows, at equal distances."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def dumped_steps(record: RunRecord) -> Iterator[DumpedStep]:
    """The steps with dumped rollouts, in order.

    Raises:
        UsageError: there are none, or they have no tokens of prompts (rlctl before 0.1).
    """
    for step in record.rollout_steps():
        rows = [row for row in record.rollouts(step).to_pylist() if any(row["sampled"])]
        rows = spread_over(rows, PER_STEP)
        if not rows:
            continue
        if any(row["sampled"][0] for row in rows):
            message = "the dump has no prompts, so that its responses cannot be scored"
            raise UsageError(message, where=f"{record.path}, step {step}")
        sampled = [np.array(row["sampled"], dtype=bool) for row in rows]
        mask = np.concatenate(sampled)

        def column(name: str, dtype: Any, rows: Any = rows, mask: Any = mask) -> Tensor:
            values = np.concatenate([np.array(row[name], dtype=dtype) for row in rows])  # None: NaN
            return torch.from_numpy(values)[torch.from_numpy(mask)]

        kept = None
        if KEPT.name in rows[0]:
            lists = list(compress((ids for row in rows for ids in row[KEPT.name]), mask))
            counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
            kept = TokenLists(counts, torch.tensor([*chain.from_iterable(lists)], dtype=torch.int32))
        ids = torch.tensor([token for row in rows for token in row["token_ids"]])
        lengths = torch.tensor([len(own) for own in sampled])
        yield DumpedStep(
            step=step,
            inputs=ModelInputs(ids, torch.from_numpy(mask), lengths, kept),
            unit=Segments(torch.tensor([int(own.sum()) for own in sampled])),
            versions=column("versions", np.int64),
            rollout=column("rollout_log_probs", np.float32),
            trained=column("training_log_probs", np.float32),
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights that a run kept."""

    name: str
    version: int | None  # optimizer updates; None: `BASE`, where it is no version of the policy
    path: str


def kept_weights(record: RunRecord) -> tuple[list[Kept], list[str]]:
    """The initial policy and the intact checkpoints by version, then the base of LoRA; notes on others."""
    spec = record.spec
    notes = []
    weights = {}
    for path in record.checkpoints:
        problem, checkpoint = verify(path)
        if checkpoint is None:
            notes.append(f"{path.name} is damaged and left out: {problem}")
        else:
            state = checkpoint.state
            weights[state.policy_version] = Kept(
                f"step {state.step}", state.policy_version, str(checkpoint.model_dir)
            )
    base = []
    try:
        start = str(embedded_task(spec).model_dir) if spec.is_embedded else model_directory(spec.model.path)
        if spec.model.lora_adapter_path:
            base = [Kept(BASE, None, start)]
        else:
            weights[0] = Kept("the initial policy" + (f", {BASE}" if spec.model.lora_rank else ""), 0, start)
    except RlctlError as error:
        notes.append(f"the initial policy is left out: {error.what}")
    return [*(weights[version] for version in sorted(weights)), *base], notes


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the M sampled tokens of a step under some weights."""

    log_probs: Tensor  # (M,) float32, as the trainer computes them
    log_mass: Tensor  # (M,) log of the mass that top-k, top-p and min-p keep; 0 where the trainer knows it

    @property
    def of_engine(self) -> Tensor:
        """(M,) log-probs of the distribution that the engine samples from."""
        return self.log_probs - self.log_mass


class WeightsScorer:
    """The trainer's code with given weights, at the run's temperature."""

    def __init__(self, spec: RunSpec, path: str) -> None:
        model, _ = load_policy(
            path,
            revision=None,
            trust_remote_code=spec.model.trust_remote_code,
            attn_implementation=spec.model.attn_implementation,
            dtype=DTYPES[spec.engine.dtype],
        )
        self.model = model.to(torch_device()).eval().requires_grad_(False)
        self._sampling = sampling_of(spec)
        self._truncation = truncation(self._sampling)
        self._policy = PolicyModule(self.model, self._sampling.temperature)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits over the temperature, in float32."""
        return logits.float() / self._sampling.temperature

    @torch.no_grad()
    def score(self, dumped: DumpedStep) -> Scores:
        """Log-probs as the trainer computes them, and what the run's truncation changes, on the CPU."""
        inputs = _on(dumped.inputs, self.model.device)
        log_probs = self._policy(inputs)[0].float().cpu()
        if not self._truncation or inputs.kept is not None:
            return Scores(log_probs, torch.zeros_like(log_probs))
        logits = self.scaled(self._policy.logits(inputs))
        kept = self._truncation(inputs.tokens[:, None], logits.clone())
        kept.scatter_(1, inputs.tokens[:, None], logits.gather(1, inputs.tokens[:, None]))  # at its edge
        return Scores(log_probs, (kept.logsumexp(1) - logits.logsumexp(1)).cpu())


def _on(inputs: ModelInputs, device: Any) -> ModelInputs:
    kept = None if inputs.kept is None else inputs.kept.to(device)
    return ModelInputs(inputs.token_ids.to(device), inputs.scored.to(device), inputs.lengths.to(device), kept)
