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
    """Grader of this term, as in `reward.name`."""
    weight: float = 1.0
    """Factor of its scores in the sum."""
    params: OpenMapping = Field(default={})
    """Parameters of the grader, as in `reward.params`."""

    @property
    def label(self) -> str:
        """Name in metrics: that of the grader or of the user's function."""
        return self.name.rpartition(":")[2]


class RewardModelSpec(Section):
    """The reward model of `name: model`."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id of a Hugging Face sequence classifier with one output."""
    batch_size: int = Field(default=8, ge=1)
    """Sequences per forward pass of the reward model."""
    max_length: int = Field(default=4096, ge=1)
    """Maximum number of tokens of prompt and response together; longer inputs are truncated at the start."""
    device: Annotated[str | None, NullWord] = None
    """Device of the reward model: `cpu`, `cuda:1` …; null: the device of the rank."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the reward model."""
    trust_remote_code: bool = False
    """Run Python code that is shipped with the model. Enable it only if you trust the author."""


class CodeSpec(Section):
    """The sandbox of `name: code`."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Time limit in seconds for all tests of one response together."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory limit of the process that runs a response, in MiB."""


class OverlongSpec(Section):
    """Soft penalty for responses near the length limit (DAPO, section 3.4)."""

    buffer_length: int = Field(default=0, ge=0)
    """Number of tokens before `data.max_response_length` over which the penalty grows linearly; 0: no
    penalty."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """Penalty at the length limit, which is subtracted from the score."""


class RewardSpec(Section):
    """Grading of responses."""

    name: GraderName = "auto"
    """Grader. `maths`: math-verify; `exact`: text equals ground truth; `multiple_choice`: the option's
    letter; `countdown`: an equation; `code`: runs the response against tests; `model`: a reward model;
    `file.py:function`: a user-defined grader; `auto`: chosen by each row's `data_source`."""
    params: OpenMapping = Field(default={})
    """Parameters that the grader declares: `reward.params.NAME=VALUE`."""
    terms: Annotated[list[RewardTerm] | None, NullWord] = None
    """Weighted sum of several rewards; null: only `reward.name`."""
    max_error_fraction: float = Field(default=0.1, ge=0, le=1)
    """Maximum fraction of responses that cannot be graded (they are excluded, not scored 0). Above it, a run
    stops and `evaluate` reports the worst and the best case."""
    model: RewardModelSpec = RewardModelSpec()
    code: CodeSpec = CodeSpec()
    overlong: OverlongSpec = OverlongSpec()

    @property
    def all_terms(self) -> list[RewardTerm]:
        """`terms`, or `name` as the only term."""
        return [RewardTerm(name=self.name, params=self.params)] if self.terms is None else self.terms
