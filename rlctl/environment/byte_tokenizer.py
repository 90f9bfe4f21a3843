"""A tokenizer for environments that are tested without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    template: str | None = _TEMPLATE,
    special: Sequence[str] = ("<|im_end|>", "<|im_start|>"),
    *,
    strips_right: bool = False,
    **given: Any,
) -> Any:
    """A token for each byte; by default with a ChatML template that shows tools and their output.

    Args:
        special: special tokens; the first one ends a turn.
        strips_right: they take the white space after them.
        given: further arguments of the tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, rstrip=strips_right) for text in dict.fromkeys(special)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **{"pad_token": special[0]} | given,
    )
