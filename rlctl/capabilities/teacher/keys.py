"""The spec section `algorithm.teacher`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.registry import KL_ESTIMATORS
from rlctl.run_spec.base import KLNames, NullWord, Registered, Section


class TeacherSpec(Section):
    """On-policy distillation: the reverse KL(π ‖ teacher) at every token that the policy samples."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id of the teacher, a model with the policy's tokenizer; null: there is none. Or the
    address of a server that gives log-probs of prompts, as vLLM's does: `http://localhost:8000/v1`."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where kl_coef × KL is: `loss`, the gradient of each token's KL given the tokens before it; `reward`,
    subtracted from the reward of every token, for the advantage estimator: the KL of whole responses."""
    kl_type: Annotated[Annotated[str, Registered(KL_ESTIMATORS)] | None, NullWord, KLNames] = None
    """KL estimator that reads the sampled token only. null: k1 in the reward; in the loss the KL of the
    `top_k` tokens and all others together."""
    kl_coef: float = Field(default=1.0, gt=0)
    """Coefficient of the KL."""
    top_k: int = Field(default=64, ge=1)
    """Number of the teacher's most likely tokens that the KL in the loss distinguishes. A lower bound of the
    KL, which increases with it and is exact for the size of the vocabulary."""
    alone: bool = False
    """Train on the teacher alone: the task's rewards are measured, and are in no advantage."""

    @property
    def is_served(self) -> bool:
        """Whether the teacher runs in a server."""
        return self.path is not None and self.path.startswith(("http://", "https://"))
