"""Spec section `reward`: grading of responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.registry import GRADERS
from rlctl.spec.base import NullWord, OpenMapping, Section
from rlctl.spec.parts import Registered

GraderName = Annotated[str, Registered(GRADERS, imports_files=False)]


class RewardTerm(Section):
    """One term of a weighted sum of rewards."""

    name: GraderName
    """As `reward.name`."""
    weight: float = 1.0
    """Factor of its scores."""
    params: OpenMapping = Field(default={})
    """As `reward.params`."""

    @property
    def label(self) -> str:
        """Name in metrics: that of the grader or of the user's function."""
        return self.name.rpartition(":")[2]


class RewardModelSpec(Section):
    """The reward model of `name: model`."""

    path: Annotated[str | None, NullWord] = None
    """Hugging Face sequence classifier with one output."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass."""
    max_length: int = Field(default=4096, ge=1)
    """Tokens of prompt and response it reads; longer ones lose the start of the prompt."""
    device: Annotated[str | None, NullWord] = None
    """`cpu`, `cuda:1` …; null: the rank's own."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Its arithmetic."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Only if you trust its author."""


class CodeSpec(Section):
    """The sandbox of `name: code`."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one response may run, all of its tests together."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory that its process may use, in MiB."""


class OverlongSpec(Section):
    """Soft penalty for responses near the length limit (DAPO, section 3.4)."""

    buffer_length: int = Field(default=0, ge=0)
    """Tokens before `data.max_response_length` over which the penalty grows; 0: none."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """Penalty at the limit."""


class RewardSpec(Section):
    """Grading of responses."""

    name: GraderName = "auto"
    """`maths`: math-verify; `exact`: text equals ground truth; `multiple_choice`: the option's letter;
    `countdown`: an equation; `code`: runs the response against tests; `model`: a reward model;
    `file.py:function`: your own; `auto`: by each row's `data_source`."""
    params: OpenMapping = Field(default={})
    """The grader's own parameters, where it has some: `reward.params.NAME=VALUE`."""
    terms: Annotated[list[RewardTerm] | None, NullWord] = None
    """Several rewards with weights, added up; null: `name` alone."""
    max_error_fraction: float = Field(default=0.1, ge=0, le=1)
    """Fraction of responses that may stay ungraded (they are excluded, not scored 0): above it a run stops,
    and `evaluate` gives the worst and the best case."""
    model: RewardModelSpec = RewardModelSpec()
    code: CodeSpec = CodeSpec()
    overlong: OverlongSpec = OverlongSpec()

    @property
    def all_terms(self) -> list[RewardTerm]:
        """`terms`, or `name` as the only term."""
        return [RewardTerm(name=self.name, params=self.params)] if self.terms is None else self.terms
