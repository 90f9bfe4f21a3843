"""The embedded model and its tokenizer: ordinary Hugging Face objects, built from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlctl.spec.embedded import EOS, PAD, UNK, VOCABULARY, EmbeddedRecipe

#: The prompt as the model reads it is the user's words and nothing else.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(recipe: EmbeddedRecipe) -> Any:
    """One token per character; other characters become `<unk>`; decoding puts nothing in between."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=recipe.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(recipe: EmbeddedRecipe) -> Any:
    """A randomly initialised Llama, float32, from torch's global random state.

    Llama because every engine runs it and because transformers then loads the tokenizer as it was
    saved (a Qwen2 directory gets Qwen2's own byte-level class, which drops unknown characters).
    Embeddings are untied: vLLM on CPU keeps a stale output head after a weight sync of tied ones.
    """
    special = {"pad_token_id": VOCABULARY.index(PAD), "eos_token_id": VOCABULARY.index(EOS)}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        initializer_range=recipe.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        architectures=[LlamaForCausalLM.__name__],
        dtype="float32",
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def save_model(model: Any, model_dir: Path) -> None:
    """Write config and weights as `save_pretrained` would, without its progress bar on the terminal."""
    model.config.save_pretrained(model_dir)
    model.generation_config.save_pretrained(model_dir)
    save_file(model.state_dict(), model_dir / "model.safetensors", metadata={"format": "pt"})
