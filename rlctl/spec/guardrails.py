"""`trainer.guardrails`: what training does when a rule of `rlctl diagnose` fires while it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.spec.base import NullWord, Section


class GuardrailsSpec(Section):
    """The rules' levels are diagnosis's own; here is what follows from them."""

    mode: Literal["off", "warn", "act"] = "warn"
    """Whether rules are watched while training, and whether their actions are taken or only named."""
    ess_floor: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Raw effective sample size under which an update is far off-policy; null: diagnosis's level, 0.3."""
    on_low_ess: Literal["warn", "scale_lr", "skip_step"] = "scale_lr"
    """One update under the floor. `scale_lr`: its rate × ESS / floor; `skip_step`: no update. After both the
    rate is halved until updates are well again."""
    on_drift: Literal["warn", "skip_step"] = "skip_step"
    """One update at which the policy is over 0.1 nats per token from the one that sampled. `skip_step` as
    above."""
    on_heavy_tail: Literal["warn", "tighten"] = "tighten"
    """Raw ESS under the floor batch after batch. `tighten`: bounds of weights and rejection halve in log ρ
    until it recovers."""
    on_collapse: Literal["warn", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """Nothing is learned any more: no reward for 20 batches, no update for 11, or a spiral into gibberish."""
