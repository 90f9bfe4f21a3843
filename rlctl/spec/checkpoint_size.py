"""Estimate of the size of a checkpoint."""

from __future__ import annotations

from rlctl.spec.model import ModelSpec
from rlctl.spec.model_size import ModelSize, model_size
from rlctl.spec.run_spec import RunSpec

#: Bytes per trained parameter with AdamW: two moments and the parameter, in float32.
_TRAINED = 12


def checkpoint_bytes(spec: RunSpec) -> int | None:
    """Bytes of one checkpoint: the engine's state, the exported model, the critic's state.

    Batches sampled ahead are not included. None: a model's size is unknown.
    """
    size = _size(spec, spec.model.path)
    policy, trained = size.num_parameters, size.num_trainable
    critic = _size(spec, spec.critic.path or spec.model.path).num_trainable if spec.trains_critic else 0
    if policy is None or trained is None or critic is None:
        return None
    width = 2 if spec.engine.dtype == "bf16" else 4
    # In float32 the engine trains the parameters directly; in bf16 it also keeps a float32 copy of them.
    state = _TRAINED + (2 if width == 2 else 0)
    if spec.model.lora_rank:  # the base is stored twice: in the engine's state, and merged in the export
        return policy * 2 * width + critic * state
    frozen = policy - trained  # stored in the engine's state and in the export
    return trained * (state + width) + frozen * 2 * width + critic * state


def _size(spec: RunSpec, path: str) -> ModelSize:
    model: ModelSpec = spec.model.model_copy(update={"path": path})
    return model_size(model)
