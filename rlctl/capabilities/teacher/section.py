"""The teacher in a spec: `algorithm.teacher`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rlctl.batch import declare_column
from rlctl.capabilities.base import CapabilitySection, FurtherModel, Problems
from rlctl.capabilities.teacher.keys import TeacherSpec
from rlctl.errors import Problem

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

PREFIX = "algorithm.teacher."
PATH = f"{PREFIX}path"
#: Phase of a step in which the teacher scores the batch.
SCORING = "teacher"

declare_column("teacher_log_probs", "log-prob under the teacher, nats")
declare_column("teacher_tail", "the teacher's log-prob of all tokens that it does not list together, nats")

#: Estimators with another expected gradient than the reverse KL's: where → estimator → what it has instead.
_OTHER_GRADIENTS = {
    "loss": {
        "k1": "zero on average: E_π[∇ log π] = 0, so the loss adds noise and teaches nothing",
        "k3": "that of the forward KL(teacher ‖ π), for tokens that the policy samples",
    },
    "reward": {
        "k2": "of second order in the distance to the teacher: it vanishes before the teacher is reached",
        "k3": "the reverse minus the forward KL's, which cancel as the policy comes close to the teacher",
    },
}


class TeacherSection(CapabilitySection):
    """See the module."""

    model_keys = (PATH,)
    scoring_phases = (SCORING,)
    switches: Mapping[str, tuple[str, object]] = {PREFIX: (PATH, None)}
    unread: Mapping[str, tuple[Callable[[RunSpec], bool], str]] = {
        f"{PREFIX}top_k": (
            lambda spec: spec.algorithm.teacher.kl_type is None,
            f"{PREFIX}kl_type reads the sampled token only",
        )
    }

    def is_on(self, spec: RunSpec) -> bool:
        """Whether the policy learns from a teacher."""
        return spec.algorithm.teacher.path is not None

    def problems(self, spec: RunSpec) -> Problems:
        """Only forms whose expected gradient is that of the reverse KL (found by enumeration)."""
        teacher = spec.algorithm.teacher
        if teacher.path is None:
            return
        fixes = {"loss": "use null, k2, unbiased or sequence", "reward": f"use k1, or {PREFIX}kl_in: loss"}
        other = _OTHER_GRADIENTS[teacher.kl_in].get(teacher.kl_type or "")
        if teacher.kl_in == "reward" and not other and teacher.kl_type not in {None, "k1"}:
            other = (
                "unknown, or lost with that of its ratio: of a reward, k1 alone has that of the reverse KL"
            )
        if other:
            message = f"the gradient of {teacher.kl_type} in the {teacher.kl_in} is {other}"
            yield Problem("error", f"{PREFIX}kl_type", message, fixes[teacher.kl_in])
        if teacher.kl_in == "reward" and teacher.top_k != TeacherSpec().top_k:
            message = (
                "the KL over the vocabulary is the same for every sampled token: its reward has no gradient"
            )
            yield Problem("error", f"{PREFIX}top_k", message, f"leave it out, or set {PREFIX}kl_in: loss")
        if lists_tokens(teacher) and spec.algorithm.rollout_correction.score_centering:
            message = (
                "one list of tokens is read at each position: that of the teacher, or that of the sampler"
            )
            key = "algorithm.rollout_correction.score_centering"
            yield Problem("error", key, message, f"set it to null, or {PREFIX}kl_type: k2")
        if teacher.is_served and (spec.rollout.temperature != 1.0 or spec.rollout.exact_sampling):
            message = "a server gives log-probs at temperature 1, of the whole vocabulary"
            fix = "set rollout.temperature: 1.0 and rollout.exact_sampling: false, or name a model"
            yield Problem("error", PATH, message, fix)
        estimator = spec.algorithm.adv_estimator
        if teacher.alone and spec.algorithm.estimator_needs("baseline_scores"):
            message = f"{estimator} subtracts the score of a greedy response, and there is no score"
            fix = "set it to false, or use another estimator, such as rloo"
            yield Problem("error", f"{PREFIX}alone", message, fix)

    def teaches_without_advantage(self, spec: RunSpec) -> bool:
        """The teacher rates every token."""
        return True

    def models(self, spec: RunSpec) -> tuple[FurtherModel, ...]:
        """The teacher, unless a server runs it."""
        teacher = spec.algorithm.teacher
        if teacher.path is None or teacher.is_served:
            return ()
        return (FurtherModel(PATH, teacher.path, "teacher"),)

    def unchecked(self, spec: RunSpec) -> Iterator[str]:
        """Its server."""
        if spec.algorithm.teacher.is_served:
            yield f"{PATH}: the server is asked at the start"

    def num_scoring_passes(self, spec: RunSpec) -> int:
        """One, of the teacher."""
        return 1

    def num_listed_tokens(self, spec: RunSpec) -> tuple[int, int]:
        """The teacher's most likely ones."""
        teacher = spec.algorithm.teacher
        return (teacher.top_k, 0) if lists_tokens(teacher) else (0, 0)


SECTION = TeacherSection()


def lists_tokens(teacher: TeacherSpec) -> bool:
    """Whether the KL in the loss reads the teacher's most likely tokens."""
    return teacher.path is not None and teacher.kl_in == "loss" and teacher.kl_type is None
