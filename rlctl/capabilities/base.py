"""What a spec knows of a capability; see `rlctl.capabilities`. Imports neither torch nor `rlctl.run_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.errors import Problem

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

Problems = Iterator[Problem]


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model beside the policy that scores its tokens.

    Attributes:
        key: of the spec, that names the model.
        path: directory or hub id.
        role: of the model, in the table of memory.
    """

    key: str
    path: str
    role: str


class CapabilitySection:
    """A capability in a spec; by default it adds nothing.

    Attributes:
        model_keys: dotted keys that may name further models.
        switches: keys, separated by spaces → the key and its value with which they are not read; a name that
            ends in a dot stands for all keys below it.
        unread: keys, separated by spaces → whether they are read, and why not, if the capability is on.
        corrects: whether it corrects for the gap between π_rollout and π_θ.
        scoring_phases: names of `timing_s/*` under which its models score the batch.
    """

    model_keys: tuple[str, ...] = ()
    switches: Mapping[str, tuple[str, object]] = {}
    unread: Mapping[str, tuple[Callable[[RunSpec], bool], str]] = {}
    corrects: bool = False
    scoring_phases: tuple[str, ...] = ()

    def is_on(self, spec: RunSpec) -> bool:
        """Whether the spec uses it."""
        raise NotImplementedError

    def problems(self, spec: RunSpec) -> Problems:
        """Contradictions with other keys; called whether it is on or not."""
        yield from ()

    def teaches_without_advantage(self, spec: RunSpec) -> bool:
        """Whether the policy learns from responses whose advantage is 0, if it is on."""
        return False

    def asks_of_sampler(self, spec: RunSpec) -> Mapping[str, Any]:
        """Fields of `rlctl.rollout.protocol.Sampling` that must be set, if it is on."""
        return {}

    def models(self, spec: RunSpec) -> tuple[FurtherModel, ...]:
        """Models that are loaded beside the policy, if it is on."""
        return ()

    def num_scoring_passes(self, spec: RunSpec) -> int:
        """Forward passes over the batch before the updates, if it is on."""
        return 0

    def num_listed_tokens(self, spec: RunSpec) -> tuple[int, int]:
        """Tokens listed per position, with log-probs, if it is on; further batches that have them."""
        return 0, 0

    def remarks(self, spec: RunSpec) -> Iterator[str]:
        """Sentences of the dry run, if it is on."""
        yield from ()

    def unchecked(self, spec: RunSpec) -> Iterator[str]:
        """What a dry run cannot check, if it is on: `key: why`."""
        yield from ()

    def why_not_replayed(self, spec: RunSpec) -> str:
        """Why dumped rollouts do not show its effect, if it is on; empty: they do."""
        return ""
