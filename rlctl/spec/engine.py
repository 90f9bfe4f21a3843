"""`engine`: DeepSpeed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.spec.base import OpenMapping, Section, json_file


class EngineSpec(Section):
    """The training engine (DeepSpeed)."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over ranks: 1 optimizer states, 2 and gradients, 3 and parameters."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the forward and backward pass."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: `optimizer` (states and float32 copies; stage 1 and up), `all` (the
    parameters too; stage 3). Saves memory on the GPU and costs time."""
    deepspeed: Annotated[OpenMapping, BeforeValidator(json_file)] = Field(default={})
    """Merged into DeepSpeed's configuration, as it is: a mapping, or the path of a JSON file with one."""
