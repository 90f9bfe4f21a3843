"""Settings and data that a resumed run may change, and checks of the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlctl.data.schema import Row
from rlctl.errors import Problem, SpecError, UsageError
from rlctl.files import sha256_of
from rlctl.spec.keys import flat
from rlctl.spec.rollout import ServerSpec
from rlctl.spec.run_spec import GuardrailsSpec, RunSpec
from rlctl.user_code import files_of

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
        "rollout.free_cache_engine",
        "rollout.gpu_memory_utilization",
        "rollout.max_num_seqs",
        *(f"rollout.server.{name}" for name in ServerSpec.model_fields),
        "rollout.tensor_model_parallel_size",
        *(f"trainer.guardrails.{name}" for name in GuardrailsSpec.model_fields),
        "trainer.logger",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.save_freq",
        "trainer.save_every",
        "trainer.keep_best",
        "trainer.test_freq",
        "trainer.hang_timeout",
        "trainer.max_ckpt_to_keep",
        "trainer.rollouts_per_step",
        "trainer.run_dir",
    }
)

#: Safe if the learning rate does not depend on the length of the run.
_LENGTH = frozenset({"trainer.total_epochs", "trainer.total_training_steps"})


#: File in a run directory: fingerprints of its training and validation rows, and of users' files with parts.
DATA_FILE = "data.json"


def data_fingerprint(rows: Iterable[Row]) -> str:
    """SHA-256 of sources, prompts, ground truths and other fields, in order.

    Shipped graders do not read the other fields, but user-defined graders may.
    """
    digest = hashlib.sha256()
    for row in rows:
        messages = [[message.role, message.content] for message in row.prompt]
        content = [row.data_source, messages, row.ground_truth, row.extra]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def code_fingerprints(spec: RunSpec) -> dict[str, str]:
    """Absolute path of each user's file that the spec names as `file.py:function` → its SHA-256."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield from texts(part)

    return {str(file): sha256_of(file) for file in files_of(*texts(spec.model_dump(mode="json")))}


def known_data(run_dir: Path) -> dict[str, str]:
    """Key of the spec, or file → fingerprint when the run began; empty for runs of older versions."""
    path = run_dir / DATA_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def refuse_changed_data(before: Mapping[str, str], now: Mapping[str, str], run_dir: Path) -> None:
    """Refuses to continue with other rows, because batches are drawn by row number.

    Raises:
        UsageError: rows differ from those that the run began with.
    """
    for key, fingerprint in now.items():
        if before.get(key, fingerprint) != fingerprint:
            raise UsageError(
                "the rows are not those at the start of the run",
                where=key,
                fix=f"restore the files; to continue with the new rows, delete {run_dir / DATA_FILE}",
            )


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Warnings about users' files that differ from those at the start of the run."""
    return [
        f"warning: {file} has changed since the run began: steps before and after differ in more than data"
        for file, fingerprint in now.items()
        if before.get(file, fingerprint) != fingerprint
    ]


def changes(before: RunSpec, after: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (value before, value after), for every value that differs."""
    old, new = (flat(spec.model_dump(mode="json")) for spec in (before, after))
    return {key: (old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)}


def refuse_unsafe(before: RunSpec, after: RunSpec) -> list[str]:
    """Returns the safe changes as lines to show.

    Raises:
        SpecError: a change would make the rest of the run a different experiment.
    """
    found = changes(before, after)
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
