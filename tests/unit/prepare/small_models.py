"""Model directories of a config and a small tokenizer, with chat templates good and bad."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

GOOD = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DOUBLE_START = "{{ bos_token }}" + GOOD
NO_GENERATION_PROMPT = GOOD.partition("{% if")[0]
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + GOOD
)


def save_model(
    path: Path, template: str | None = GOOD, *, context: int = 64, adds_start: bool = False
) -> str:
    """A token per word, space or sign; unknown words are one token. Returns the path."""
    words = ["<unk>", "<s>", "</s>", *(chr(i) for i in range(32, 127)), "system", "user", "assistant"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    backend.decoder = decoders.Fuse()
    if adds_start:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(path)
    config = LlamaConfig(max_position_embeddings=context).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
