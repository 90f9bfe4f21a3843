"""Estimate of the size of a checkpoint."""

from __future__ import annotations

from rlctl.spec.model_size import model_size, size_at
from rlctl.spec.run_spec import RunSpec

#: Bytes per trained parameter with AdamW: two moments and the parameter, in float32.
_TRAINED = 12


def checkpoint_bytes(spec: RunSpec) -> int | None:
    """Bytes of one checkpoint: the engine's state, the exported model, the critic's state.

    Batches sampled ahead are not included. None: a model's size is unknown.
    """
    size = model_size(spec.model)
    policy, trained = size.num_parameters, size.num_trainable
    critic = size_at(spec.model, spec.critic.path).num_trainable if spec.trains_critic else 0
    if policy is None or trained is None or critic is None:
        return None
    width = spec.engine.width
    # In float32 the engine trains the parameters directly; in bf16 it also keeps a float32 copy of them.
    state = _TRAINED + (2 if width == 2 else 0)
    if spec.model.lora_rank:  # the base is stored twice: in the engine's state, and merged in the export
        return policy * 2 * width + critic * state
    frozen = policy - trained  # stored in the engine's state and in the export
    return trained * (state + width) + frozen * 2 * width + critic * state
