"""`reward`: who grades the responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlctl.spec.base import Section


class RewardSpec(Section):
    """Grading of responses."""

    name: Literal["auto", "maths", "exact"] = "auto"
    """`maths`: math-verify; `exact`: text equals ground truth; `auto`: by each row's `data_source`."""
    max_error_fraction: float = Field(default=0.1, ge=0, le=1)
    """Stop when grading fails on more of a batch than this (failures are left out, never scored 0)."""
