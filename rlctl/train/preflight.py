"""Before a run starts: checks of its files, disk space and trackers; the sources that it reads.

Neither torch nor pyarrow is imported before the files are checked: errors appear within a second.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlctl.capabilities.sections import further_models, other_models
from rlctl.errors import Problem, UsageError
from rlctl.files import is_file, matches, sha256_of, write_text
from rlctl.model_files import check_adapter, check_model, looks_local, model_directory
from rlctl.registry import TRACKERS
from rlctl.run_spec.keys import flat
from rlctl.run_spec.model_size import checkpoint_bytes
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.redaction import is_masked
from rlctl.track.run_dir import read_mapping

#: File in a run directory: the cached files that the run reads, with their hashes.
DATA_FILE = "data.json"


def check_inputs(spec: RunSpec) -> list[Problem]:
    """Problems of the local models, data and reward files of `spec`, and masked values; no hub ids."""
    problems: list[Problem] = []
    if not spec.is_embedded:
        problems += _problem("model.path", check_model, spec.model.path, needs_tokenizer=True)
    with_tokenizer = {model.key for model in further_models(spec)}  # compared with the policy's
    for key, path in (other_models(spec) | {"reward.model.path": spec.reward.model.path}).items():
        needs_tokenizer = key in with_tokenizer
        problems += _problem(key, check_model, path, needs_tokenizer=needs_tokenizer) if path else []
    adapter = spec.model.lora_adapter_path
    if adapter and looks_local(adapter):
        problems += _problem("model.lora_adapter_path", check_adapter, adapter, spec.model)
    files = [("data.train_files", file) for file in spec.data.train_files]
    files += [("data.val_files", file) for file in spec.data.val_files]
    num_rows = count_rows(spec) or 0
    size = spec.data.train_batch_size
    if files:
        from rlctl.data.read import check_batch_size  # imports pyarrow
        from rlctl.prepare.data_files import hub_name

        for key, file in files:
            problems += [] if hub_name(file) else _problem(key, _check_file, spec, file)
        if num_rows:
            problems += _problem("data.train_batch_size", check_batch_size, num_rows, size)
    if spec.trainer.total_training_steps or num_rows >= size:
        problems += _problem("trainer.critic_warmup", num_batches, spec, num_rows)
    of_rewards = "reward.terms" if spec.reward.terms else "reward.name"
    problems += [
        Problem("error", of_rewards, f"no such file: {file}", "create it, or correct the path")
        for file in (term.name.rpartition(":")[0] for term in spec.reward.all_terms)
        if file and not matches(file)
    ]
    return problems + masked_values(spec)


def has_errors(problems: Iterable[Problem]) -> bool:
    """Whether one of the problems stops the run."""
    return any(problem.severity == "error" for problem in problems)


def check_trackers(spec: RunSpec) -> list[Problem]:
    """Problems of trackers whose packages are not installed on this machine."""
    return [
        Problem(
            "error",
            "trainer.logger",
            f"{package} is not installed",
            f"pip install {package}, or leave {name} out",
        )
        for name in spec.trainer.logger
        for package in sorted(TRACKERS.part(name).needs)
        if find_spec(package) is None
    ]


def _problem(key: str, check: Callable[..., object], *given: Any, **options: Any) -> list[Problem]:
    try:
        check(*given, **options)
    except UsageError as error:
        return [
            Problem(
                severity="error",
                key=key,
                what=error.what,
                fix=error.fix,
                where=error.where if error.where != key else None,
            )
        ]
    return []


def num_batches(spec: RunSpec, num_rows: int) -> int:
    """Number of full batches in all epochs of a run with so many training rows.

    Raises:
        UsageError: all of them would train the critic alone.
    """
    total = (
        spec.trainer.total_training_steps
        or num_rows * spec.trainer.total_epochs // spec.data.train_batch_size
    )
    if spec.trainer.critic_warmup >= total:
        message = f"all {total} batches of the run would train the critic alone"
        raise UsageError(message, where="trainer.critic_warmup", fix=f"use less than {total}")
    return total


def _check_file(spec: RunSpec, file: str) -> int:
    """Checks a file; returns the number of its rows. What is not prepared is prepared and cached."""
    from rlctl.data.read import check_files
    from rlctl.prepare.data_files import local_files

    return check_files(local_files([file], **_reading(spec, "train")))


def _reading(spec: RunSpec, split: str) -> dict[str, Any]:
    continues = spec.data.continue_final_message
    return {"split": split, "reward": spec.reward, "continue_final_message": continues}


def count_rows(spec: RunSpec) -> int | None:
    """Number of training rows; None if there are no files, or if one cannot be read or is on the hub."""
    files = spec.data.train_files
    if not files:
        return None
    from rlctl.prepare.data_files import hub_name

    if any(map(hub_name, files)):
        return None
    try:
        return sum(_check_file(spec, file) for file in files)
    except UsageError:  # a problem of `check_inputs`
        return None


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
    message = f"{free / 2**30:.3g} GiB are free, and a checkpoint takes about {needed / 2**30:.3g} GiB"
    if free >= needed:
        message += f"; those kept and the next one together about {wanted / 2**30:.3g} GiB"
    fix = "free space, name another disk with trainer.run_dir, or set trainer.max_ckpt_to_keep lower"
    severity: Literal["error", "warning"] = "warning" if free >= needed else "error"
    return [
        Problem(
            severity=severity,
            key="trainer.run_dir",
            what=message,
            fix=fix,
            where=str(there),
        )
    ]


def masked_values(spec: RunSpec) -> list[Problem]:
    """Problems of values that were masked when a run recorded its spec."""
    message = "this value is masked, because its key or form is that of a secret"
    fix = "give it again"
    values = flat(spec.model_dump(mode="json"))
    return [Problem("error", key, message, fix) for key, value in values.items() if is_masked(value)]


@dataclass(frozen=True, slots=True)
class LocalSources:
    """What a run reads from this machine's disks."""

    model_path: str
    train_files: dict[str, list[str]]  # name in the spec → prepared files
    val_files: dict[str, list[str]]


def local_sources(
    spec: RunSpec, note: Callable[[str], None] | None = None, run_dir: Path | None = None
) -> LocalSources:
    """Model directory, training and validation files; downloads, prepares or builds what is missing.

    `run_dir`: of a run that may have recorded its files; they are read again if they still exist.

    Raises:
        UsageError, EnvironmentFailure, RunFailure: a source cannot be had, or the cache cannot be written.
    """
    from rlctl.prepare.data_files import files_by_name
    from rlctl.tiny.game import embedded_task

    found = {}
    for key, names, split in (
        ("data.train_files", spec.data.train_files, "train"),
        ("data.val_files", spec.data.val_files, "test"),
    ):
        recorded = recorded_files(run_dir, key) if run_dir else {}
        missing = [name for name in names if name not in recorded]
        prepared = files_by_name(missing, **_reading(spec, split), note=note or (lambda _: None))
        found[key] = {name: recorded.get(name) or prepared[name] for name in names}
    train_files, val_files = found.values()
    if not spec.is_embedded:
        return LocalSources(model_directory(spec.model.path), train_files, val_files)
    task = embedded_task(spec, note)
    if not train_files:  # other rows are not validated on the task of the embedded model
        val_files = val_files or {str(task.val_file): [str(task.val_file)]}
        train_files = {str(task.train_file): [str(task.train_file)]}
    return LocalSources(str(task.model_dir), train_files, val_files)


def record_files(run_dir: Path, sources: LocalSources) -> None:
    """Records the cached files that a run reads, with their hashes, for `recorded_files`."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for key, by_name in {
        "data.train_files": sources.train_files,
        "data.val_files": sources.val_files,
    }.items():
        cached = {name: files for name, files in by_name.items() if files != [name]}
        found[key] = {name: {file: sha256_of(Path(file)) for file in files} for name, files in cached.items()}
    write_text(run_dir / DATA_FILE, json.dumps(found, indent=2) + "\n")


def recorded_files(run_dir: Path, key: str) -> dict[str, list[str]]:
    """Name → files of the cache that a run recorded, if all of them are there and unchanged."""
    recorded = read_mapping(run_dir / DATA_FILE).get(key, {})
    return {
        name: list(files)
        for name, files in recorded.items()
        if files and all(is_file(file) and sha256_of(Path(file)) == digest for file, digest in files.items())
    }
