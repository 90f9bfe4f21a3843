"""What a run may change when it continues: its settings, and the inputs that it reads again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlctl.capabilities.sections import other_models
from rlctl.engine.checkpoint import parts_of_files
from rlctl.errors import Problem, RunFailure, SpecError, UsageError, failing_together
from rlctl.files import sha256_of, write_text
from rlctl.model_files import LOADED_FILES, hub_commit, model_directory
from rlctl.run_spec.keys import changes
from rlctl.run_spec.rollout import ServerSpec
from rlctl.run_spec.run_spec import EarlyStopSpec, GuardrailsSpec, RunSpec, TrainerSpec
from rlctl.track.redaction import is_masked
from rlctl.track.run_dir import read_mapping
from rlctl.track.trust import code_files, texts_in

if TYPE_CHECKING:
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.ranks import Ranks

#: File in a run directory: fingerprints of `files` and `rows` at the run's start.
INPUTS_FILE = "inputs.json"
_Part = Literal["files", "rows"]
#: Bytes above which a file is hashed by one of all ranks.
_SHARED_FROM = 16 << 20

#: Safe if the learning rate does not depend on the length of the run.
_LENGTH = frozenset({"trainer.total_epochs", "trainer.total_training_steps"})
#: Keys of `trainer` that change what is computed.
_COMPUTING = _LENGTH | {"trainer.critic_warmup", "trainer.seed"}

#: Keys that change memory use, logging, validation or saving, not what is computed. Guardrails: a user who
#: resumes a run that they stopped must be able to overrule them. Servers: a preemption changes addresses.
_SAFE = frozenset(
    {
        "actor.ppo_micro_batch_size_per_gpu",
        "actor.ppo_max_token_len_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "engine.sequence_parallel",
        "model.enable_gradient_checkpointing",
        "reward.model.batch_size",
        "reward.max_error_fraction",
        "reward.threads",
        *(f"reward.judge.{name}" for name in ("url", "key_variable", "concurrency", "timeout", "retries")),
        *(f"reward.judge.{name}" for name in ("step_timeout", "calls_per_step")),
        "rollout.free_cache_engine",
        "rollout.gpu_memory_utilization",
        "rollout.max_num_seqs",
        *(f"rollout.server.{name}" for name in ServerSpec.model_fields),
        "rollout.tensor_model_parallel_size",
        *(f"trainer.{name}" for name in TrainerSpec.model_fields),
        *(f"trainer.guardrails.{name}" for name in GuardrailsSpec.model_fields),
        *(f"trainer.early_stop.{name}" for name in EarlyStopSpec.model_fields),
    }
).difference(_COMPUTING)


def refuse_unsafe(before: RunSpec, after: RunSpec) -> list[str]:
    """Returns the safe changes as lines to show.

    Raises:
        SpecError: a change would make the rest of the run a different experiment.
    """
    found = {key: pair for key, pair in changes(before, after).items() if not is_masked(pair[0])}
    safe = _SAFE | _LENGTH if after.actor.lr_scheduler_type == "constant" else _SAFE
    problems = [
        Problem("error", key, f"was {old!r} and cannot become {new!r} during a run", _fix(key))
        for key, (old, new) in found.items()
        if key not in safe
    ]
    if problems:
        raise SpecError(problems)
    return [f"{key}: {old!r} → {new!r}" for key, (old, new) in found.items()]


def _fix(key: str) -> str:
    if key in _LENGTH:
        return (
            "the learning rate decays until the configured last step; omit the key, or train on from the "
            "exported model. With actor.lr_scheduler_type: constant a run can be extended"
        )
    return "leave it out, or start a new run"


# --- fingerprints of what a resumed run reads again: models, rows, and users' files ------------------


def compare_inputs(run_dir: Path, part: _Part, now: Mapping[str, str] | None, *, accepts: bool) -> list[str]:
    """Stores fingerprints; in a resumed run first compares them with those stored.

    Args:
        now: name → fingerprint; None: not known yet, nothing is done.
        accepts: continue with inputs that have changed.

    Returns:
        Warnings about accepted changes.

    Raises:
        UsageError: inputs have changed, are new or are missing.
    """
    if now is None:
        return []
    recorded = read_mapping(run_dir / INPUTS_FILE)
    before = recorded.get(part, now)
    if not isinstance(before, dict) and before is not now:
        message = f"`{part}` is no mapping of names to fingerprints"
        fix = "restore the file; or remove it, to continue with the inputs as they are"
        raise UsageError(message, where=str(run_dir / INPUTS_FILE), fix=fix)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed and not accepts:
        raise UsageError(
            f"not as at the start of the run: {', '.join(changed)}",
            where=str(run_dir),
            fix="restore them; to continue with them as they are, add trainer.accept_changed_inputs=true",
        )
    write_text(run_dir / INPUTS_FILE, json.dumps(recorded | {part: now}, indent=2) + "\n")
    message = "has changed since the run began: steps before and after differ in more than data"
    return [f"warning: {name} {message}" for name in changed]


def file_fingerprints(spec: RunSpec) -> dict[str, str]:
    """Fingerprints of the models' files and of users' code, by name.

    A model on the hub has its commit as fingerprint.

    Raises:
        UsageError, EnvironmentFailure: a model cannot be found.
    """
    commits, files = _listed(spec)
    return commits | _hashed(files)


def hashes_alone(spec: RunSpec) -> bool:
    """Whether one process hashes all files before the ranks start, with the processors of the only node."""
    return spec.trainer.nnodes == 1


def check_files(spec: RunSpec, run_dir: Path, ranks: Ranks) -> list[str]:
    """`compare_inputs` of `file_fingerprints`, in which each rank hashes its part; unless `hashes_alone`.

    It is a collective. Weights are read where each rank finds them: on a disk that all nodes share, or in a
    copy of each node. Small files, and the code of users, are those of the main rank.

    Raises:
        UsageError, EnvironmentFailure, RunFailure: a resumed run has other files, or a rank cannot read one.
    """
    if hashes_alone(spec):
        return []
    commits, files, parts = dict[str, str](), dict[str, Path](), list[dict[str, str]]()
    with failing_together(ranks.first):
        if ranks.is_main:
            commits, files = _listed(spec)
            large = {name: str(file) for name, file in files.items() if file.stat().st_size > _SHARED_FROM}
            parts = parts_of_files(Path(), dict.fromkeys(large.values(), ""), ranks.world_size)
    parts = ranks.from_main(parts)
    digests: dict[str, str] = {}
    with failing_together(ranks.first), _naming(ranks.rank):
        digests = _hashed({name: Path(name) for name in parts[ranks.rank]})
    by_file = dict(ranks.exchange(list(digests.items())))
    notes: list[str] = []
    with failing_together(ranks.first):
        if ranks.is_main:
            small = _hashed({name: file for name, file in files.items() if str(file) not in by_file})
            shared = {name: by_file[str(file)] for name, file in files.items() if str(file) in by_file}
            found = commits | small | shared
            notes = compare_inputs(run_dir, "files", found, accepts=spec.trainer.accept_changed_inputs)
    return notes


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Context that names the rank which cannot read a file.

    Raises:
        RunFailure: instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        message = f"rank {rank} cannot read a file of a model: {error.strerror or error}"
        fix = "the models must be on a disk that all nodes share, or on each node at the same path"
        raise RunFailure(message, where=str(error.filename), fix=fix) from error


def _hashed(files: Mapping[str, Path]) -> dict[str, str]:
    """Name → SHA-256."""
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        return dict(zip(files, threads.map(sha256_of, files.values()), strict=True))


def _listed(spec: RunSpec) -> tuple[dict[str, str], dict[str, Path]]:
    """Commits of models on the hub, and files of other models and of users' code, by name.

    Raises:
        UsageError, EnvironmentFailure: a model cannot be found.
    """
    others = other_models(spec) | {"reward.model.path": spec.reward.model.path}
    models = {"model.path": spec.model.path} | others
    found: dict[str, str] = {}
    files = {str(file): file for file in code_files(texts_in(spec.model_dump(mode="json")))}
    for key, path in models.items():
        if path is None or (key == "model.path" and spec.is_embedded):
            continue
        revision = spec.model.revision if path == spec.model.path else None
        commit = hub_commit(path, revision, key)
        if commit:
            found[f"{key}: commit"] = commit
            continue
        directory = Path(model_directory(path)).expanduser()
        files |= {
            f"{key}: {file.relative_to(directory)}": file
            for pattern in LOADED_FILES
            for file in directory.glob(pattern)
        }
    return found, files


def check_rows(
    spec: RunSpec, prompts: Mapping[str, PromptDataset | None], run_dir: Path, ranks: Ranks
) -> list[str]:
    """`compare_inputs` of training and validation rows; a collective.

    Raises:
        UsageError: a resumed run has other rows, or they are rendered differently.
    """
    notes: list[str] = []
    with failing_together(ranks.first):
        if ranks.is_main:
            rows = {key: each.fingerprint for key, each in prompts.items() if each}
            notes = compare_inputs(run_dir, "rows", rows, accepts=spec.trainer.accept_changed_inputs)
    return notes
