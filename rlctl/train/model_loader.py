"""Loads models of a run beside the policy; what all of them are loaded with, and what none may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rlctl.engine.deepspeed import FrozenPolicy, load_partitioned
from rlctl.engine.deepspeed_setup import Settings, frozen_settings
from rlctl.engine.model import load_other_model
from rlctl.engine.policy_engine import FrozenModule
from rlctl.engine.ranks import Ranks
from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.errors import UsageError
from rlctl.rollout.hf import DTYPES
from rlctl.run_spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads further models of a run beside the policy.

    Attributes:
        model_path: of the policy.
        sequence: with sequence parallelism how ranks share sequences.
    """

    spec: RunSpec
    model_path: str
    tokenizer: Any
    ranks: Ranks
    sequence: SequenceParallel | None

    def other(self, path: str | None, key: str, settings: Settings) -> Any:
        """Another model from `path`, which the spec names in `key`; None: from the policy's path.

        Raises:
            UsageError, EnvironmentFailure: it cannot be loaded or does not fit the spec.
        """
        spec = self.spec
        is_partitioned = spec.engine.zero_stage == 3
        partition = partial(load_partitioned, settings) if is_partitioned else None
        loading = loading_arguments(spec) | {"partition": partition}
        revision = spec.model.revision if path in {None, spec.model.path} else None
        other = load_other_model(
            path or self.model_path, self.tokenizer, key=key, revision=revision, **loading
        )
        refuse_unfit(other, spec)
        return other

    def frozen(self, path: str | None, key: str) -> FrozenModule:
        """A policy that is not trained; arguments and errors as of `other`."""
        spec = self.spec
        dtype = DTYPES[self.spec.engine.dtype]
        shard_size = spec.engine.shard_size
        model = self.other(path, key, frozen_settings(dtype, shard_size))
        numbers: Any = {"dtype": dtype, "temperature": spec.rollout.temperature, "shard_size": shard_size}
        if spec.engine.name == "fsdp":
            from rlctl.engine.fsdp import FsdpReference

            return FsdpReference(model, self.ranks, **numbers)
        sharding: Any = {"zero_stage": spec.engine.zero_stage, "sequence": self.sequence}
        return FrozenPolicy(model, self.ranks, **sharding, **numbers)


def loading_arguments(spec: RunSpec) -> dict[str, Any]:
    """Loading arguments of a model."""
    # As stored: files are mapped, and no rank has a copy of its own in host memory; and the float32 copies of
    # trained weights must not start rounded. ZeRO-3 partitions weights, in the engine's dtype, as it reads.
    return {
        "trust_remote_code": spec.model.trust_remote_code,
        "attn_implementation": spec.model.attn_implementation,
        "dtype": DTYPES[spec.engine.dtype] if spec.engine.zero_stage == 3 else "auto",
        "use_liger": spec.model.use_liger,
    }


def refuse_unfit(model: Any, spec: RunSpec) -> None:
    """Refuses quantised weights, and lengths at which the model's positions are undefined or change."""
    if getattr(model, "is_quantized", False):
        message = "its weights are quantised, and cannot be trained"
        fix = "name a checkpoint in bf16 or fp32"
        raise UsageError(message, where=f"model.path={model.name_or_path}", fix=fix)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    limit = getattr(config, "max_position_embeddings", None)
    why = "the model's context is"
    if rope.get("rope_type") == "longrope":
        # transformers chooses the frequencies by the longest sequence of a batch, vLLM by max_model_len.
        limit = rope["original_max_position_embeddings"]
        why = "its rotary embedding changes for sequences over"
    wanted = spec.data.max_prompt_length + spec.data.max_response_length
    if limit is not None and wanted > limit:
        raise UsageError(
            f"prompt and response may have {wanted} tokens together, {why} {limit}",
            where="data.max_prompt_length, data.max_response_length",
            fix=f"make their sum {limit} or less",
        )
