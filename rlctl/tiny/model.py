"""Builds the embedded model and its tokenizer as standard Hugging Face objects, without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlctl.spec.model import EOS, PAD, UNK, VOCABULARY, EmbeddedRecipe

#: Renders only the message contents.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(recipe: EmbeddedRecipe) -> Any:
    """Character-level tokenizer: unknown characters become `<unk>`; decoding inserts no separators."""
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
    """A Llama model in float32, initialised from torch's global random state.

    Llama, because every engine supports it and transformers loads the saved tokenizer unchanged (for a Qwen2
    directory it uses Qwen2's byte-level class, which drops unknown characters). Embeddings are untied,
    because vLLM on CPU keeps a stale output head after a weight sync of tied embeddings.
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
    """Writes config and weights like `save_pretrained`, but without its progress bar."""
    model.config.save_pretrained(model_dir)
    model.generation_config.save_pretrained(model_dir)
    save_file(model.state_dict(), model_dir / "model.safetensors", metadata={"format": "pt"})
