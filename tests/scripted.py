"""A policy that says what a script says: an engine without a model, and a tokenizer of single characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlctl.batch import Episode, Task, Turn
from rlctl.environment.build import EpisodeSource
from rlctl.rollout.protocol import Request, Sampling
from rlctl.run_spec.environment import EnvironmentSpec

_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAMPLING = Sampling(max_response_length=400)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character, and `<end>`."""
    tokens = ["<pad>", "<end>", "<unk>", *map(chr, range(32, 127)), "\n", "…"]
    backend = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=_TEMPLATE, **special)


TOKENIZER = character_tokenizer()


class ScriptedEngine:
    """Answers each conversation, as text, with what `says` returns for it.

    Attributes:
        read: the conversations that it answered.
    """

    def __init__(self, says: Callable[[str], str]) -> None:
        self._says = says
        self.read: list[str] = []

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """One turn per request."""
        return [self._turn(request, request.limit(sampling)) for request in requests]

    def finish(self) -> None:
        """Nothing is shared."""

    def _turn(self, request: Request, limit: int) -> Turn:
        text = TOKENIZER.decode(request.token_ids)
        self.read.append(text)
        ids = TOKENIZER(self._says(text) + "<end>", add_special_tokens=False)["input_ids"]
        found = torch.tensor(ids[:limit])
        count = len(found)
        reason = "stop" if len(ids) <= limit else "length"
        return Turn(found, -torch.ones(count), torch.zeros(count, dtype=torch.int64), reason)


def one_after_the_other(*replies: str) -> Callable[[str], str]:
    """A script: reply k is the k-th turn of its conversation; the last one is said again."""
    return lambda text: replies[min(text.count("<|assistant|>") - 1, len(replies) - 1)]


def asked(group: int = 0, text: str = "go", **given: object) -> Task:
    """A task with this question."""
    messages = ({"role": "user", "content": text},)
    prompt = TOKENIZER.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    return Task(ids, prompt, group, messages=messages, **given)  # type: ignore[arg-type]


def source_of(folder: Path, code: str, name: str = "Game", **given: object) -> EpisodeSource:
    """The environment of a user's file with this code."""
    file = folder / f"game_{abs(hash(code))}.py"
    file.write_text(dedent(code))
    spec = EnvironmentSpec(name=f"{file}:{name}", **given)  # type: ignore[arg-type]
    return EpisodeSource(spec, TOKENIZER, 4000)


def played(
    folder: Path,
    code: str,
    says: Callable[[str], str],
    tasks: Sequence[Task] = (),
    n: int = 1,
    name: str = "Game",
    **given: object,
) -> tuple[list[Episode], ScriptedEngine]:
    """The episodes of these tasks in an environment of a user's file, and the engine that it spoke with."""
    source, engine = source_of(folder, code, name, **given), ScriptedEngine(says)
    members = [(task, member) for task in (tasks or [asked()]) for member in range(n)]
    try:
        return source.sample(engine, members, SAMPLING, 1), engine
    finally:
        source.close()
