"""How large a checkpoint is, before there is one."""

from __future__ import annotations

from rlctl.spec.model import ModelSpec
from rlctl.spec.model_size import model_size
from rlctl.spec.run_spec import RunSpec

#: Of AdamW: two moments and the parameters themselves, float32.
_TRAINED = 12


def checkpoint_bytes(spec: RunSpec) -> int | None:
    """Bytes of one checkpoint: the engine's state, the exported model, the critic's state.

    Batches sampled ahead are not counted. None: the model's size is not known here.
    """
    policy = _num_parameters(spec, spec.model.path)
    critic = _num_parameters(spec, spec.critic.path or spec.model.path) if spec.trains_critic else 0
    if policy is None or critic is None:
        return None
    width = 2 if spec.engine.dtype == "bf16" else 4
    # In float32 the engine trains the parameters themselves; in bf16 it keeps a float32 copy beside them.
    state = _TRAINED + (2 if width == 2 else 0)
    if spec.model.lora_rank:  # the base lies there twice: in the engine's state, and merged in the export
        return policy * 2 * width + critic * state
    return policy * (state + width) + critic * state


def _num_parameters(spec: RunSpec, path: str) -> int | None:
    model: ModelSpec = spec.model.model_copy(update={"path": path})
    return model_size(model).num_parameters
