"""Checks the files that a run reads before torch is imported: errors appear within a second."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import Problem, UsageError
from rlctl.files import matches
from rlctl.model_files import check_directory
from rlctl.spec.model_size import checkpoint_bytes
from rlctl.spec.run_spec import RunSpec
from rlctl.user_code import files_of

#: At least one of these must exist for a tokenizer to load.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WEIGHTS = ("*.safetensors", "*.bin")


def check_inputs(spec: RunSpec) -> list[Problem]:
    """Problems of the local models, data files and reward files of `spec`; hub ids are not checked."""
    checks: list[tuple[str, Callable[[], None]]] = []
    if not spec.is_embedded:
        checks.append(("model.path", partial(_check_model, spec.model.path, needs_tokenizer=True)))
    others = {"critic.path": spec.critic.path, "ref.path": spec.ref.path}
    others["reward.model.path"] = spec.reward.model.path
    checks += [(key, partial(_check_model, path)) for key, path in others.items() if path]
    for key, files in (("train_files", spec.data.train_files), ("val_files", spec.data.val_files)):
        checks += [(f"data.{key}", partial(_check_data, file)) for file in files]
    of_rewards = "reward.terms" if spec.reward.terms else "reward.name"
    missing = [
        Problem("error", of_rewards, f"no such file: {file}", "create it, or correct the path")
        for file in (term.name.rpartition(":")[0] for term in spec.reward.all_terms)
        if file and not matches(file)
    ]
    return [problem for key, check in checks for problem in _problem_of(key, check)] + missing


def check_functions(spec: RunSpec) -> list[Problem]:
    """Problems of the graders in users' files, each loaded with its parameters in a process of its own.

    A file that does not exist is a problem of `check_inputs`.
    """
    terms = [term for term in spec.reward.all_terms if files_of(term.name)]
    checks = [("reward", partial(_check_function, term.name, term.params)) for term in terms]
    return [problem for key, check in checks for problem in _problem_of(key, check)]


def _check_function(name: str, params: dict[str, Any]) -> None:
    from rlctl.reward.pool import GradingPool  # slow to import

    pool = GradingPool(name, params, num_workers=1)
    try:
        pool.check()
    finally:
        pool.close()


def _problem_of(key: str, check: Callable[[], None]) -> list[Problem]:
    try:
        check()
    except UsageError as error:
        return [Problem("error", key, error.what, error.fix, error.where)]
    return []


def _check_data(file: str) -> None:
    # Imports pyarrow, which a dry run without data files does not need.
    from rlctl.data.read import check_files

    check_files([file])


def _check_model(path: str, *, needs_tokenizer: bool = False) -> None:
    """Refuses a directory without configuration, weights or tokenizer; any other path may be a hub id.

    Raises:
        UsageError: the directory cannot be loaded.
    """
    check_directory(os.path.expanduser(path), path)  # noqa: PTH111 - a Path would drop the "./" of a local path
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return
    config = directory / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"config.json cannot be read: {error}", where=str(config)) from error
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
        what = "the model directory holds no weights (*.safetensors or *.bin)"
        raise UsageError(what, where=path, fix="copy them there, or name a complete directory")
    if needs_tokenizer and not any((directory / name).is_file() for name in _TOKENIZERS):
        what = "the model directory holds no tokenizer (tokenizer.json)"
        raise UsageError(
            what, where=path, fix="copy the tokenizer's files there, or name a complete directory"
        )


def check_disk(spec: RunSpec) -> list[Problem]:
    """Reports too little disk space: an error if no checkpoint fits, a warning if not all kept ones fit."""
    needed = checkpoint_bytes(spec)
    place = Path(spec.trainer.run_dir or "runs").expanduser().absolute()
    there = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(there).free
    kept = spec.trainer.max_ckpt_to_keep
    wanted = (needed or 0) * ((kept or 1) + 1 + (spec.trainer.keep_best and spec.trainer.test_freq > 0))
    if needed is None or free >= wanted:
        return []
    what = f"{free / 2**30:.3g} GiB are free, and a checkpoint takes about {needed / 2**30:.3g} GiB"
    if free >= needed:
        what += f"; those kept and the next one together about {wanted / 2**30:.3g} GiB"
    fix = "free space, name another disk with trainer.run_dir, or set trainer.max_ckpt_to_keep lower"
    severity: Literal["error", "warning"] = "warning" if free >= needed else "error"
    return [Problem(severity, "trainer.run_dir", what, fix, str(there))]
