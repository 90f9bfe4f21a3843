"""A tokenizer with ChatML, and an engine that answers with given texts."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlctl.batch import Turn
from rlctl.rollout.protocol import Request, Sampling

END = "<|im_end|>"
_SPECIAL = ("<pad>", END, "<unk>", "<|im_start|>")
_TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and ChatML's own tokens."""
    known = [*_SPECIAL, *string.printable, "…", "ü"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token=END,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE,
    )


class ScriptedEngine:
    """Answers each request with the text that `answer` makes of what it reads.

    Attributes:
        asked: all requests.
        turns: what it sampled, in that order.
        batches: number of requests of each call.
    """

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.tokenizer = chat_tokenizer()
        self._answer = answer
        self.asked: list[Request] = []
        self.turns: list[Turn] = []
        self.batches: list[int] = []

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """One turn per request; the log-prob of each token is a number of its own."""
        self.batches.append(len(requests))
        return [self._turn(request, sampling) for request in requests]

    def _turn(self, request: Request, sampling: Sampling) -> Turn:
        text = self._answer(self.tokenizer.decode(request.token_ids))
        ids = self.tokenizer(text + END, add_special_tokens=False)["input_ids"]
        limit = request.limit(sampling)
        cut = torch.tensor(ids[:limit])
        log_probs = -torch.arange(1.0, len(cut) + 1) - len(self.turns) * 1000
        reason = "stop" if len(ids) <= limit else "length"
        self.asked.append(request)
        self.turns.append(Turn(cut, log_probs, torch.full_like(cut, 7), reason))
        return self.turns[-1]
