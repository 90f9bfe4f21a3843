"""Constants of the embedded model and its task. Imports no torch, because the dry run reads this module."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

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
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = 4 * hidden * hidden
        layer = attention + 3 * hidden * inner + 2 * hidden  # two norms
        return self.num_layers * layer + 2 * len(VOCABULARY) * hidden + hidden

    def key(self, seed: int) -> str:
        """Name of the cache entry: changes with the recipe and the seed, not with library versions."""
        text = json.dumps({**asdict(self), "vocabulary": VOCABULARY, "seed": seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


RECIPE = EmbeddedRecipe()
