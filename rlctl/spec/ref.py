"""`ref`: the frozen policy that KL penalties are measured against."""

from __future__ import annotations

from typing import Annotated

from rlctl.spec.base import NullWord, Section


class RefSpec(Section):
    """The reference policy; built only if `use_kl_in_reward` or `use_kl_loss` asks for it."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id; null: the policy as it starts (under LoRA its base, without a second copy)."""
