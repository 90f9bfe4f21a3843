"""Base of the optional parts of training, see `rlctl.capabilities`: where each of them acts within a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.capabilities.sections import sections_on

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.batch import TokenBatch
    from rlctl.engine.ranks import Ranks
    from rlctl.reward.protocol import Graded
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.batch_scorer import BatchScorer
    from rlctl.train.model_loader import ModelLoader
    from rlctl.train.terms import Term


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a step has computed up to its updates.

    Attributes:
        step: its number, from 1.
        ranks, data_ranks: all ranks; those over which sums count each token once.
        graded: the episodes that this rank sampled, and their grades.
        batch: the episodes that this rank trained on, with all columns.
        before_updates: (M,) log π of its tokens before any update on the batch, nats; NaN: not computed.
        policy_version: optimizer updates of the policy before those of the step.
        withheld: no update was made of the batch, and the policy was not held on purpose.
        metrics: of the sampled episodes, over all ranks.
    """

    step: int
    ranks: Ranks
    data_ranks: Ranks
    graded: Graded
    batch: TokenBatch
    before_updates: Tensor
    policy_version: int
    withheld: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens that the rollout engine sampled with the weights of the policy.

    Attributes:
        replica: name of the replica of the engine; empty: it has no replicas.
        batch: the tokens that this rank scores.
        log_probs: runs the policy over a batch: its log-probs, nats.
        ranks: all ranks.
    """

    replica: str
    batch: TokenBatch
    log_probs: Callable[[TokenBatch], Tensor]
    ranks: Ranks


class Capability:
    """What a capability adds, in the order of a step; by default nothing.

    `name`: of its folder.
    """

    name: str = ""

    @property
    def dumped(self) -> tuple[str, ...]:
        """Columns of the sampled tokens that are kept with the rollouts."""
        return ()

    def check_policy(self, model: Any) -> None:
        """Checks that the Hugging Face model of the policy fits, before any engine starts.

        Raises:
            UsageError: it does not.
        """

    def load(self, loader: ModelLoader) -> None:
        """Loads the models that it needs (all ranks call this)."""

    def open_records(self, run_dir: Path, last_step: int) -> None:
        """Opens files of its own beside the log of the run (only the main rank calls this).

        Args:
            last_step: what is recorded of later steps is removed: a resumed run repeats them.

        Raises:
            RunFailure: a file cannot be read or written.
        """

    def check_probe(self, probe: Probe) -> None:
        """Checks what the rollout engine records of its tokens, at the start (all ranks call this).

        Raises:
            RunFailure: it is wrong.
        """

    def scored(self, scorer: BatchScorer, batch: TokenBatch, unrouted: TokenBatch) -> TokenBatch:
        """The batch with columns of its models, before the updates (all ranks call this).

        Args:
            unrouted: the batch as other models than the policy read it.
        """
        return batch

    def rewarded(self, batch: TokenBatch, ranks: Ranks) -> tuple[TokenBatch, dict[str, float]]:
        """The batch with other rewards per token, and metrics (all ranks call this)."""
        return batch, {}

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """Its terms of the actor's loss; `rules`: of the correction in this update."""
        return ()

    def updated(self, record: StepRecord) -> dict[str, float]:
        """Metrics of a step after its updates (all ranks call this)."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to continue, as JSON; the same on every rank."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after what `state` returned."""

    def token_sums(self, batch: TokenBatch) -> Sums:
        """Sums over the tokens that this rank trained on, for metrics."""
        return {}

    def token_metrics(self, sums: HostSums) -> dict[str, float]:
        """Metrics from `token_sums` of all ranks."""
        return {}


def capabilities_of(spec: RunSpec) -> tuple[Capability, ...]:
    """The capabilities that a spec uses, ready to train; imports their code."""
    capabilities: list[Capability] = []
    for name in sections_on(spec):
        capability = importlib.import_module(f"rlctl.capabilities.{name}.run").capability(spec)
        capability.name = name
        capabilities.append(capability)
    return tuple(capabilities)
