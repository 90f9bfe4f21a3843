"""The embedded task, and the embedded model: both are built once and cached on disk.

The task is two-digit addition, with the digits of the sum least significant first. The answer to `12+34=` is
`640`: 46 padded with zeros to three digits and reversed. With the least significant digit first, each carry
comes from digits already written, which a two-layer model can learn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.data.schema import Message, Row, write_rows
from rlctl.files import cache_root, cached_directory
from rlctl.lean_imports import import_models
from rlctl.run_spec.model import RECIPE, EmbeddedRecipe

DATA_SOURCE = "embedded/addition"
#: Note shown with responses of the task.
WRITTEN = "The built-in task writes sums lowest digit first, padded to three digits: 71+63= → 431 means 134."

Problem = tuple[str, str]  # prompt, right answer


@dataclass(frozen=True, slots=True)
class EmbeddedTask:
    """Paths of the embedded model and its data."""

    model_dir: Path  # Hugging Face directory (config, safetensors, tokenizer with chat template)
    #: train_file, val_file: Parquet in verl's row schema; they share no prompt
    train_file: Path
    val_file: Path


def ensure_embedded(
    seed: int,
    cache_dir: Path | None = None,
    note: Callable[[str], None] | None = None,
    recipe: EmbeddedRecipe = RECIPE,
) -> EmbeddedTask:
    """Builds the embedded model and task for `seed` unless they are cached (about 10 s once).

    Each seed gives a different model. `cache_dir` is the root of the cache (None: `cache_root()`). `note`
    shows a line before and after a build.

    Raises:
        EnvironmentFailure: the cache directory cannot be written.
        RunFailure: the warm start failed, or another process holds the lock for half an hour.
    """
    entry = (cache_dir or cache_root()) / "embedded" / recipe.key(seed)

    def build(directory: Path) -> None:
        task = paths(directory)
        train, val = split(recipe.num_val_prompts)
        write_parquet(train, "train", task.train_file)
        write_parquet(val, "test", task.val_file)
        _build_model(task.model_dir, seed, note or (lambda _: None), recipe)

    return paths(cached_directory(entry, build, what="the embedded model"))


def _build_model(model_dir: Path, seed: int, note: Callable[[str], None], recipe: EmbeddedRecipe) -> None:
    """Initialises, warm-starts and saves the model of the addition task."""

    def teach(model: Any) -> str:
        from rlctl.tiny.model import warm_start

        accuracy = warm_start(model, split(recipe.num_val_prompts)[0], recipe, seed)
        return f"accuracy {accuracy:.2f}"

    note("building the embedded model, once (about 10 s)")
    note(f"embedded model ready, {build_files(model_dir, seed, recipe, teach)}")


def build_files(
    model_dir: Path,
    seed: int,
    recipe: EmbeddedRecipe,
    teach: Callable[[Any], str],
    chat_template: str | None = None,
) -> str:
    """Writes a new model that `teach` trains, and its tokenizer; returns what `teach` says.

    Restores torch's global random state.
    """
    import torch

    import_models()
    from rlctl.tiny.model import build_model, build_tokenizer, save_model

    num_threads = torch.get_num_threads()
    # Such small matrices gain little from a second thread, and on busy cores two threads spend minutes
    # waiting for each other. One thread also makes the result independent of the number of cores.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(recipe)
            said = teach(model)
    finally:
        torch.set_num_threads(num_threads)
    save_model(model, model_dir)
    tokenizer = build_tokenizer(recipe)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    tokenizer.save_pretrained(model_dir)
    return said


def paths(entry: Path) -> EmbeddedTask:
    """The files of a cache entry."""
    return EmbeddedTask(entry / "model", entry / "train.parquet", entry / "val.parquet")


def problem(a: int, b: int) -> Problem:
    """Prompt and answer of a + b for two-digit a and b: `problem(12, 34) == ("12+34=", "640")`."""
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"[::-1]


def example_row() -> Row:
    """A row of the task as it is read from its file, for checks before the task is built."""
    prompt, answer = problem(12, 34)
    extra = {"split": "train", "index": 0, "answer": "", "question": ""}
    return Row(
        DATA_SOURCE,
        (Message("user", prompt),),
        answer,
        ability="maths",
        extra=extra,
        where="the built-in task",
    )


def split(num_val: int) -> tuple[list[Problem], list[Problem]]:
    """Splits all 8,100 problems into (training, validation), disjoint, in pseudo-random order.

    Problems are ordered by the SHA-256 of the prompt, independent of library versions and seed.
    """
    everything = [problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    everything.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return everything[num_val:], everything[:num_val]


def write_parquet(problems: list[Problem], split_name: str, path: Path) -> None:
    """Writes one split as Parquet in verl's row schema."""
    rows = [
        Row(DATA_SOURCE, (Message("user", prompt),), answer, ability="maths", index=index)
        for index, (prompt, answer) in enumerate(problems)
    ]
    write_rows(path, split_name, rows)
