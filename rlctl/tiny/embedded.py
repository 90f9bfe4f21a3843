"""`ensure_embedded`: the embedded model and task on disk, built once and cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlctl.files import cache_root, cached_directory
from rlctl.spec.embedded import RECIPE, EmbeddedRecipe
from rlctl.tiny.task import split, write_parquet

#: Called with the fraction done in [0, 1] and a line saying what is going on.
Progress = Callable[[float, str], None]

_TYPICAL_STEPS = 270  # of a warm start, for the progress bar


@dataclass(frozen=True, slots=True)
class EmbeddedTask:
    """Where the embedded model and its data lie.

    Attributes:
        model_dir: Hugging Face directory (config, safetensors, tokenizer with chat template).
        train_file: Parquet in verl's row schema.
        val_file: the same; shares no prompt with `train_file`.
    """

    model_dir: Path
    train_file: Path
    val_file: Path


def ensure_embedded(
    seed: int,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    recipe: EmbeddedRecipe = RECIPE,
) -> EmbeddedTask:
    """Build the embedded model and task for `seed` unless the cache has them (about 10 s once).

    Args:
        seed: seeds initialisation and warm start; each seed is its own model.
        cache_dir: root of the cache; None: `cache_root()`.
        progress: is told how far the build is; never called when the cache has everything.
        recipe: what to build; tests pass a smaller one.

    Raises:
        EnvironmentFailure: the cache directory cannot be written.
        RunFailure: the warm start failed, or another process holds the lock for half an hour.
    """
    entry = (cache_dir or cache_root()) / "embedded" / recipe.key(seed)

    def build(directory: Path) -> None:
        task = _task(directory)
        train, val = split(recipe.num_val_prompts)
        write_parquet(train, "train", task.train_file)
        write_parquet(val, "test", task.val_file)
        _build_model(task.model_dir, seed, progress or _silent, recipe)

    return _task(cached_directory(entry, build, what="the embedded model"))


def _build_model(model_dir: Path, seed: int, progress: Progress, recipe: EmbeddedRecipe) -> None:
    """Initialise, warm-start and save the model; torch's global random state is left as it was."""
    progress(0.0, "building the embedded model")
    import torch

    from rlctl.tiny.model import build_model, build_tokenizer, save_model
    from rlctl.tiny.warm_start import warm_start

    def on_step(step: int, accuracy: float) -> None:
        goal = f"accuracy {accuracy:.2f} of {recipe.taught_accuracy:.2f}"
        progress(min(0.99, step / _TYPICAL_STEPS), f"warm start: step {step + 1}, {goal}")

    num_threads = torch.get_num_threads()
    # Matrices this small gain little from a second thread, and on busy cores two threads spend
    # minutes waiting for each other. One also makes the result the same on every number of cores.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(recipe)
            accuracy = warm_start(model, split(recipe.num_val_prompts)[0], recipe, seed, on_step)
    finally:
        torch.set_num_threads(num_threads)
    save_model(model, model_dir)
    build_tokenizer(recipe).save_pretrained(model_dir)
    progress(1.0, f"embedded model ready, accuracy {accuracy:.2f}")


def _task(entry: Path) -> EmbeddedTask:
    return EmbeddedTask(entry / "model", entry / "train.parquet", entry / "val.parquet")


def _silent(_fraction: float, _message: str) -> None:
    pass
