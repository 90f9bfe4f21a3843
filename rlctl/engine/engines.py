"""Training engines by name: what each is built from, and the functions that build them.

    @TRAINING_ENGINES.register(label="…")
    def my_engine(context: TrainContext) -> TrainEngine: …

A user's engine is named `path/to/file.py:function`, see docs/how-to/extend.md. Does not import torch, because
the spec reads the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.errors import RunFailure
from rlctl.registry import TRAINING_ENGINES
from rlctl.user_code import missing_methods

if TYPE_CHECKING:
    from rlctl.engine.deepspeed_setup import Settings
    from rlctl.engine.ranks import Ranks

_MEMBERS = ("plan", "backward", "step", "save", "load", "scales_gradients")


@dataclass(frozen=True, slots=True)
class TrainContext:
    """Inputs from which a training engine is built, on every rank.

    Attributes:
        model: Hugging Face causal language model; parameters that require gradient are trained.
        settings: dtype, optimizer and memory settings.
        temperature: sampling temperature, at which log-probs are computed; None: the engine is a
            `CriticEngine` on the model's body, else a `TrainEngine`.
    """

    model: Any
    ranks: Ranks
    settings: Settings
    temperature: float | None = None


def build_training_engine(name: str, context: TrainContext) -> Any:
    """Builds the policy's or the critic's engine that the spec names.

    Raises:
        RunFailure: the function does not return such an engine.
        UsageError: the engine does not support the model or the settings.
    """
    engine = TRAINING_ENGINES[name](context)
    own = ("values",) if context.temperature is None else ("policy", "weights", "export")
    message = missing_methods(engine, *_MEMBERS, *own)
    if message:
        raise RunFailure(message, where=f"engine.name: {name}", fix="see rlctl/engine/protocol.py")
    return engine


@TRAINING_ENGINES.register(label="DeepSpeed, with ZeRO stages 0 to 3")
def deepspeed(context: TrainContext) -> Any:
    """The policy, or a critic, under DeepSpeed."""
    from rlctl.engine.deepspeed import DeepSpeedCritic, DeepSpeedEngine

    if context.temperature is None:
        return DeepSpeedCritic(context.model, context.ranks, **context.settings)
    return DeepSpeedEngine(context.model, context.ranks, temperature=context.temperature, **context.settings)


@TRAINING_ENGINES.register(label="FSDP2 of PyTorch, which shards as ZeRO-3 does", experimental=True)
def fsdp(context: TrainContext) -> Any:
    """The policy, or a critic, under FSDP2."""
    from rlctl.engine.fsdp import FsdpCritic, FsdpEngine

    if context.temperature is None:
        return FsdpCritic(context.model, context.ranks, **context.settings)
    return FsdpEngine(context.model, context.ranks, temperature=context.temperature, **context.settings)
