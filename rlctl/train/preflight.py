"""Before a run starts: checks of its files, disk space and trackers; the sources that it reads.

Neither torch nor pyarrow is imported before the files are checked: errors appear within a second.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import Problem, UsageError
from rlctl.files import matches
from rlctl.model_files import check_adapter, check_model, looks_local, model_directory
from rlctl.registry import TRACKERS
from rlctl.spec.keys import flat
from rlctl.spec.model_size import checkpoint_bytes
from rlctl.spec.rollout import RewardTerm
from rlctl.spec.run_spec import RunSpec
from rlctl.track.redaction import is_masked
from rlctl.user_code import files_of


def check_inputs(spec: RunSpec) -> list[Problem]:
    """Problems of the local models, data and reward files of `spec`, and masked values; no hub ids."""
    problems: list[Problem] = []
    if not spec.is_embedded:
        problems += _problem("model.path", check_model, spec.model.path, needs_tokenizer=True)
    for key, path in (spec.other_models | {"reward.model.path": spec.reward.model.path}).items():
        needs_tokenizer = key == "algorithm.teacher.path"  # compared with the policy's
        problems += _problem(key, check_model, path, needs_tokenizer=needs_tokenizer) if path else []
    adapter = spec.model.lora_adapter_path
    if adapter and looks_local(adapter):
        problems += _problem("model.lora_adapter_path", check_adapter, adapter, spec.model)
    files = [("data.train_files", file) for file in spec.data.train_files]
    files += [("data.val_files", file) for file in spec.data.val_files]
    num_rows, size = count_rows(spec.data.train_files) or 0, spec.data.train_batch_size
    if files:
        from rlctl.data.read import check_batch_size, check_files  # imports pyarrow
        from rlctl.prepare.hub import hub_name

        for key, file in files:
            problems += [] if hub_name(file) else _problem(key, check_files, [file])
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


def check_functions(spec: RunSpec) -> list[Problem]:
    """Problems of the graders in users' files, each loaded with its parameters in a process of its own.

    A file that does not exist is a problem of `check_inputs`.
    """

    def check(term: RewardTerm) -> None:
        from rlctl.reward.pool import GradingPool  # slow to import

        with contextlib.closing(GradingPool(term.name, term.params, num_workers=1)) as pool:
            pool.check()

    of_users = (term for term in spec.reward.all_terms if files_of(term.name))
    return [problem for term in of_users for problem in _problem("reward", check, term)]


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
        return [Problem("error", key, error.what, error.fix, error.where if error.where != key else None)]
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
        what = f"all {total} batches of the run would train the critic alone"
        raise UsageError(what, where="trainer.critic_warmup", fix=f"use less than {total}")
    return total


def count_rows(files: Sequence[str]) -> int | None:
    """Number of training rows; None if there are no files, or if one cannot be read or is on the hub."""
    if not files:
        return None
    from rlctl.data.read import check_files
    from rlctl.prepare.hub import hub_name

    if any(map(hub_name, files)):
        return None
    try:
        return check_files(files)
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
    what = f"{free / 2**30:.3g} GiB are free, and a checkpoint takes about {needed / 2**30:.3g} GiB"
    if free >= needed:
        what += f"; those kept and the next one together about {wanted / 2**30:.3g} GiB"
    fix = "free space, name another disk with trainer.run_dir, or set trainer.max_ckpt_to_keep lower"
    severity: Literal["error", "warning"] = "warning" if free >= needed else "error"
    return [Problem(severity, "trainer.run_dir", what, fix, str(there))]


def masked_values(spec: RunSpec) -> list[Problem]:
    """Problems of values that were masked when a run recorded its spec."""
    what, fix = "this value is masked, because its key or form is that of a secret", "give it again"
    values = flat(spec.model_dump(mode="json"))
    return [Problem("error", key, what, fix) for key, value in values.items() if is_masked(value)]


def local_sources(
    spec: RunSpec, note: Callable[[str], None] | None = None
) -> tuple[str, list[str], list[str]]:
    """Model directory, training files, validation files; downloads or builds what is missing.

    Raises:
        UsageError, EnvironmentFailure, RunFailure: a source cannot be had, or the cache cannot be written.
    """
    from rlctl.prepare.hub import local_files
    from rlctl.tiny.game import embedded_task

    train_files = local_files(spec.data.train_files, split="train")
    val_files = local_files(spec.data.val_files, split="test")
    if not spec.is_embedded:
        return model_directory(spec.model.path), train_files, val_files
    task = embedded_task(spec, note)
    return str(task.model_dir), train_files or [str(task.train_file)], val_files or [str(task.val_file)]
