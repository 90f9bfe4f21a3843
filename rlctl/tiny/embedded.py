"""`ensure_embedded`: the embedded model and task on disk, built once and cached.

An entry of the cache appears by one rename, complete, or not at all. A lock makes a second process
wait for the first; its holder removes what a killed builder left.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.files import cache_root
from rlctl.spec.embedded import RECIPE, EmbeddedRecipe
from rlctl.tiny.task import split, write_parquet

#: Called with the fraction done in [0, 1] and a line saying what is going on.
Progress = Callable[[float, str], None]

_MANIFEST = "manifest.json"
_LOCK_TIMEOUT_S = 600.0
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
        RunFailure: the warm start failed, or another process holds the lock for 10 minutes.
    """
    parent = (cache_dir or cache_root()) / "embedded"
    entry = parent / recipe.key(seed)
    if _is_complete(entry):
        return _task(entry)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock", timeout=_LOCK_TIMEOUT_S):
            if not _is_complete(entry):
                _build_entry(entry, seed, progress or _silent, recipe)
    except Timeout as error:
        raise RunFailure(
            "another process has been building the embedded model for 10 minutes", where=f"{entry}.lock"
        ) from error
    except OSError as error:
        raise EnvironmentFailure(
            f"the embedded model cannot be cached: {error.strerror or error}",
            where=str(parent),
            fix="free some space there, or set RLCTL_CACHE to a directory that can be written",
        ) from error
    return _task(entry)


def _build_entry(entry: Path, seed: int, progress: Progress, recipe: EmbeddedRecipe) -> None:
    """Build in a directory beside `entry`, then rename. The caller holds the lock."""
    for leftover in (entry, *entry.parent.glob(f"{entry.name}.building-*")):
        shutil.rmtree(leftover, ignore_errors=True)
    building = entry.with_name(f"{entry.name}.building-{os.getpid()}")
    building.mkdir()
    try:
        task = _task(building)
        train, val = split(recipe.num_val_prompts)
        write_parquet(train, "train", task.train_file)
        write_parquet(val, "test", task.val_file)
        _build_model(task.model_dir, seed, progress, recipe)
        files = [path for path in sorted(building.rglob("*")) if path.is_file()]
        manifest = {path.relative_to(building).as_posix(): _sha256(path) for path in files}
        (building / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        building.rename(entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)


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


def _is_complete(entry: Path) -> bool:
    """Whether every file is there and unchanged since it was written."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_sha256(entry / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _silent(_fraction: float, _message: str) -> None:
    pass
