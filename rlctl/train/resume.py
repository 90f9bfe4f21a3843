"""What a run may change when it continues: its settings, and the inputs that it reads again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlctl.errors import Problem, SpecError, UsageError, failing_together
from rlctl.files import sha256_of, write_text
from rlctl.model_files import LOADED_FILES, hub_commit, model_directory
from rlctl.spec.keys import changes
from rlctl.spec.rollout import ServerSpec
from rlctl.spec.run_spec import GuardrailsSpec, RunSpec, TrainerSpec
from rlctl.track.redaction import is_masked
from rlctl.track.run_dir import read_mapping
from rlctl.user_code import files_of

if TYPE_CHECKING:
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.ranks import Ranks

#: File in a run directory: fingerprints of `files` and `rows` at the run's start.
INPUTS_FILE = "inputs.json"
_Part = Literal["files", "rows"]

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
        "rollout.free_cache_engine",
        "rollout.gpu_memory_utilization",
        "rollout.max_num_seqs",
        *(f"rollout.server.{name}" for name in ServerSpec.model_fields),
        "rollout.tensor_model_parallel_size",
        *(f"trainer.{name}" for name in TrainerSpec.model_fields),
        *(f"trainer.guardrails.{name}" for name in GuardrailsSpec.model_fields),
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


def compare_inputs(run_dir: Path, part: _Part, now: Mapping[str, str], *, accepts: bool) -> list[str]:
    """Stores fingerprints; in a resumed run first compares them with those stored.

    Args:
        now: name → fingerprint.
        accepts: continue with inputs that have changed.

    Returns:
        Warnings about accepted changes.

    Raises:
        UsageError: inputs have changed, are new or are missing.
    """
    recorded = read_mapping(run_dir / INPUTS_FILE)
    before = recorded.get(part, now)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed and not accepts:
        raise UsageError(
            f"not as at the start of the run: {', '.join(changed)}",
            where=str(run_dir),
            fix="restore them; to continue with them as they are, add trainer.accept_changed_inputs=true",
        )
    write_text(run_dir / INPUTS_FILE, json.dumps(recorded | {part: now}, indent=2) + "\n")
    what = "has changed since the run began: steps before and after differ in more than data"
    return [f"warning: {name} {what}" for name in changed]


def file_fingerprints(spec: RunSpec) -> dict[str, str]:
    """Fingerprints of the models' files and of users' code, by name.

    A model on the hub has its commit as fingerprint.

    Raises:
        UsageError, EnvironmentFailure: a model cannot be found.
    """
    others = spec.other_models | {"reward.model.path": spec.reward.model.path}
    models = {"model.path": spec.model.path} | others
    found: dict[str, str] = {}
    files = {str(file): file for file in _code(spec)}
    for key, path in models.items():
        if path is None or (key == "model.path" and spec.is_embedded):
            continue
        revision = spec.model.revision if path == spec.model.path else None
        if commit := hub_commit(path, revision, key):
            found[f"{key}: commit"] = commit
            continue
        directory = Path(model_directory(path)).expanduser()
        files |= {
            f"{key}: {file.relative_to(directory)}": file
            for pattern in LOADED_FILES
            for file in directory.glob(pattern)
        }
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        return found | dict(zip(files, threads.map(sha256_of, files.values()), strict=True))


def _code(spec: RunSpec) -> set[Path]:
    """Users' files that the spec names as `file.py:function`, and what they import from beside them."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield from texts(part)

    found = set(files_of(*texts(spec.model_dump(mode="json"))))
    for file in list(found):
        finder = ModuleFinder(path=[str(file.parent)], excludes=["rlctl"])
        try:
            finder.run_script(str(file))  # reads it, and does not run it
        except SyntaxError:  # reported when it is imported
            continue
        modules = (getattr(module, "__file__", None) for module in finder.modules.values())
        found |= {Path(path) for path in modules if path}
    return found


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
