"""`rlctl train` without its command line: run directory, ranks, exit code.

start_run          checks, run directory, what a resumed run may change, sources; starts the ranks
  run_rank         each rank: joins the others
    setup.build    models and engines, prompts, graders, tracker; the state of a resumed run
    loop.train     the steps
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlctl import leftovers
from rlctl.capabilities.sections import sections
from rlctl.engine.checkpoint import CHECKPOINTS, has_published, remove_unwritten
from rlctl.engine.launch import run_ranks, under_torchrun
from rlctl.errors import EnvironmentFailure, RlctlError, SpecError, UsageError
from rlctl.files import is_utf8, keep_compiled_code, matches
from rlctl.model_files import hub_commit
from rlctl.run_files import remove
from rlctl.run_spec.base import seconds
from rlctl.run_spec.keys import leaves_of
from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, recorded_spec
from rlctl.run_spec.model import EMBEDDED, NAMED_MODELS
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.console import Startup
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.run_dir import EARLIER, RunDir, claim_default_path, is_in_use, open_run_dir
from rlctl.track.trust import sign, values_of
from rlctl.train.open_files import allow_open_files
from rlctl.train.preflight import check_trackers, local_sources, masked_values
from rlctl.train.resume import compare_inputs, file_fingerprints, hashes_alone, refuse_unsafe
from rlctl.train.stop import Watchdog, catching_signals, end_process
from rlctl.user_code import COMMANDS, absolute_command, absolute_name, files_of, split_names

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks

#: Exit code if the guardrails ended the run; the same as for findings under `rlctl diagnose --fail-on`.
STOPPED_BY_GUARDRAILS = 3

#: Keys of local paths, and of lists of them.
_PATHS = frozenset(
    {
        *("model.path", "model.lora_adapter_path", "critic.path", "ref.path"),
        *(key for section in sections().values() for key in section.model_keys),
        *("reward.model.path", "data.train_files", "data.val_files"),
    }
)

#: Called with a step and its metrics.
Callback = Callable[[int, Mapping[str, float]], None]


def start_run(
    spec: RunSpec,
    *,
    resume: Path | None,
    note: Callable[[str], None],
    callbacks: Sequence[Callback] = (),
    on_second_signal: Callable[[int], None] = end_process,
    trains: bool = True,
) -> tuple[Path, int]:
    """Starts or resumes a run and trains to its end.

    Args:
        resume: the run directory to continue; None: a new one.
        callbacks: called after each step on rank 0, if rank 0 is this process.
        on_second_signal: called in this process by a signal that follows the one which stops the run.
        trains: False: end before the first step, after the checks at the start.

    Returns:
        The run directory and the exit code: 0, 3 if the guardrails ended the run, or 128 + signal.

    Raises:
        RlctlError: the run cannot start or continue.
    """
    keep_compiled_code()
    leftovers.clear()
    spec = with_absolute_paths(spec)
    _check_ranks(spec)
    masked = masked_values(spec)
    if masked:
        raise SpecError(masked)
    _check_utf8(spec)
    run_dir = resume or _path_of(spec)
    if under_torchrun() and os.environ["RANK"] != "0":
        return run_dir, run_rank(dump_spec(spec), str(run_dir), resume is not None, trains)
    for problem in check_trackers(spec):  # only rank 0 needs them
        raise EnvironmentFailure(problem.what, where=problem.key, fix=problem.fix)
    lines: list[str] = []
    if resume and resume.is_dir() and any(resume.iterdir()):  # otherwise `open_run_dir` says so
        _require_checkpoint(resume)
        lines = [f"changed: {line}" for line in changes_of(run_dir, spec)]
    if not spec.is_embedded:
        spec = _updated(spec, "model", revision=hub_commit(spec.model.path, spec.model.revision))
    inputs = file_fingerprints(spec) if hashes_alone(spec) else None
    with open_run_dir(run_dir, resume=resume is not None, is_lost=_has_no_checkpoint) as opened:
        lines += [] if resume else _set_aside(opened)
        lines += compare_inputs(run_dir, "files", inputs, accepts=spec.trainer.accept_changed_inputs)
        for line in [*lines, *allow_open_files(spec)]:
            note(line)
        _record(opened, spec, note)
        note(f"run directory: {run_dir}")
        target_args = (dump_spec(spec), str(run_dir), resume is not None, trains)
        fetch = partial(local_sources, spec, note, run_dir)
        try:
            if not under_torchrun():
                fetch()  # before the ranks start: their collectives would time out
            if spec.world_size > 1 and not under_torchrun():
                exit_code = run_ranks(spec.trainer.n_gpus_per_node, run_rank, *target_args)
            else:
                exit_code = run_rank(*target_args, callbacks, on_second_signal, fetch)
            if exit_code > 128 and not resume:
                _remove_unused(run_dir)
            return run_dir, exit_code
        except BaseException as error:  # Ctrl-C and SIGTERM included
            is_removed = not resume and _remove_unused(run_dir)
            if isinstance(error, Exception) and not is_removed:
                _record_failure(opened, error, spec)
            raise


def _record(opened: RunDir, spec: RunSpec, note: Callable[[str], None]) -> None:
    """Writes the spec and the environment of the run, and the permission for its code."""
    opened.write_spec(_updated(spec, "trainer", accept_changed_inputs=False).model_dump(mode="json"))
    opened.write_environment()
    warning = sign(opened.path, values_of(recorded_spec(opened.path / RUN_SPEC_FILE)))
    if warning:
        note(f"warning: {warning}")


def prove(spec: RunSpec, note: Callable[[str], None]) -> int:
    """Starts a run in a temporary directory, up to the proof of its weight sync; returns the exit code.

    Raises:
        RlctlError: the run cannot start, or the proof fails.
    """
    with leftovers.temporary_directory("proof") as directory:
        spec = _updated(spec, "trainer", run_dir=str(directory / "run"), logger=["console"])
        spec = _updated(spec, "rollout", prove_sync=True)
        return start_run(spec, resume=None, note=note, trains=False)[1]


def changes_of(run_dir: Path, spec: RunSpec) -> list[str]:
    """Values of a run that `spec` changes when it resumes, as lines to show.

    Raises:
        SpecError: a change would make the rest of the run a different experiment.
    """
    return refuse_unsafe(recorded_spec(run_dir / RUN_SPEC_FILE), with_absolute_paths(spec))


def _has_no_checkpoint(run_dir: Path) -> bool:
    """Whether the run in a directory has written no checkpoint, so that it cannot be resumed."""
    return not has_published(run_dir / CHECKPOINTS)


def _require_checkpoint(run_dir: Path) -> None:
    """Refuses to resume a run without a checkpoint before anything is loaded.

    Raises:
        UsageError: as above.
    """
    if (run_dir / RUN_SPEC_FILE).is_file() and _has_no_checkpoint(run_dir) and not is_in_use(run_dir):
        spec = shlex.quote(str(run_dir / RUN_SPEC_FILE))
        again = shlex.quote(f"trainer.run_dir={run_dir}")
        raise UsageError(
            "the run ended before its first checkpoint, so there is nothing to resume",
            where=str(run_dir),
            fix=f"start it again, in the same directory if you like: rlctl train {spec} {again}",
        )


def _set_aside(opened: RunDir) -> list[str]:
    """Makes the directory of a run without a checkpoint empty; a line to show if there was one."""
    earlier = opened.set_aside()
    where = f"{opened.path}: its files are in {earlier.name}/" if earlier else ""
    return [f"the last run ended before its first checkpoint, in {where}"] if earlier else []


def _record_failure(opened: RunDir, error: Exception, spec: RunSpec) -> None:
    """Leaves the directory of a run that failed with its reason and without half a checkpoint."""
    remove_unwritten(opened.path / CHECKPOINTS, error)
    if isinstance(error, RlctlError) and _has_no_checkpoint(opened.path):
        error.fix = _without_resuming(error.fix, spec)
    opened.write_failure(error)


def _without_resuming(fix: str | None, spec: RunSpec) -> str:
    """What to do about a failure before the first checkpoint, instead of resuming."""
    again = "start it again with the same command; the directory can be used again"
    every = f"trainer.save_freq = {spec.trainer.save_freq}"
    none = f"no checkpoint was written yet ({every}), so there is nothing to resume: {again}"
    kept = [
        part for part in (fix or "").split("; ") if "--resume" not in part and "checkpoints are" not in part
    ]
    return "; ".join([*filter(None, kept), none])


def _remove_unused(run_dir: Path) -> bool:
    """Removes a run that failed before its first step, so that the corrected command can reuse its path.

    The files of earlier runs in the directory stay.
    """
    metrics = run_dir / METRICS_FILE
    is_unused = not metrics.exists() or not metrics.stat().st_size
    if is_unused and any(run_dir.glob(f"{EARLIER}*")):
        for path in run_dir.resolve().iterdir():
            if not path.name.startswith(EARLIER):
                remove(path)
    elif is_unused:
        shutil.rmtree(run_dir, ignore_errors=True)
    return is_unused


def run_rank(
    spec_text: str,
    run_dir: str,
    is_resumed: bool,
    trains: bool = True,
    callbacks: Sequence[Callback] = (),
    on_second_signal: Callable[[int], None] = end_process,
    first: Callable[[], object] = lambda: None,
) -> int:
    """Runs one rank, from joining the process group to leaving it; returns the run's exit code.

    `first`: see `join_ranks`.
    """
    spec = RunSpec.model_validate(yaml.safe_load(spec_text))
    rank = int(os.environ.get("RANK", "0"))
    allow_open_files(spec)
    timeout = seconds(spec.trainer.hang_timeout)
    per_node = spec.trainer.n_gpus_per_node
    watchdog = Watchdog(rank, spec.world_size, Path(run_dir), timeout, per_node)
    with (
        catching_signals(on_second_signal) as stop,
        watchdog,
        Startup(is_shown=rank == 0, also=watchdog.begin_phase) as startup,
    ):
        stop.at_once = spec.world_size > 1  # otherwise a rank may wait for one that the signal ended
        startup.phase("importing torch, transformers and DeepSpeed")
        from rlctl.engine.ranks import (
            clear_single_rank_env,
            join_ranks,
            leave_ranks,
            missing_ranks,
            split_groups_of_vllm,
        )
        from rlctl.train.loop import train
        from rlctl.train.saving import write_summary
        from rlctl.train.setup import build

        try:
            if spec.world_size == 1 and stop.signal_number:
                return 128 + stop.signal_number
            with missing_ranks():
                if spec.world_size > 1:
                    startup.phase(f"waiting for all {spec.world_size} ranks")
                split_groups_of_vllm(spec)
                ranks = join_ranks(timeout, on_loopback=spec.is_on_one_machine, first=first)
                stop.at_once = False
                spec = _as_on_main(spec, ranks)
                with contextlib.ExitStack() as stack:
                    run = build(spec, Path(run_dir), ranks, stop, startup, watchdog, stack, resume=is_resumed)
                    run.callbacks.extend(callbacks if ranks.is_main else ())
                    if trains and not ranks.max(float(stop.signal_number)):  # else: a signal during the start
                        train(run)
                        if ranks.is_main:
                            write_summary(run)
                    stopped_by = int(ranks.max(float(stop.signal_number)))  # maybe of another rank
                leave_ranks()
            if stopped_by:
                return 128 + stopped_by
            return STOPPED_BY_GUARDRAILS if run.stopped_because else 0
        finally:
            clear_single_rank_env()


def _as_on_main(spec: RunSpec, ranks: Ranks) -> RunSpec:
    """The spec with what the main rank resolved: dtype, which depends on its hardware, and model's commit."""
    dtype, revision = (
        ranks.first((value or "") if ranks.is_main else "")
        for value in (spec.engine.dtype, spec.model.revision)
    )
    return _updated(_updated(spec, "engine", dtype=dtype), "model", revision=revision or None)


def _updated(spec: RunSpec, section: str, **values: Any) -> RunSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=values)})


def _path_of(spec: RunSpec) -> Path:
    if spec.trainer.run_dir:
        return Path(spec.trainer.run_dir).expanduser()
    if under_torchrun():
        raise UsageError(
            "ranks started by torchrun cannot agree on a run directory named after the time",
            where="trainer.run_dir",
            fix="set trainer.run_dir=…, the same on every rank",
        )
    return claim_default_path(spec.trainer.project_name, spec.trainer.experiment_name)


def _check_utf8(spec: RunSpec) -> None:
    for key, value in leaves_of(spec).items():
        if not is_utf8(json.dumps(value, ensure_ascii=False, default=str)):
            message = "the value is not UTF-8, so that no file of the run could hold it"
            raise UsageError(message, where=key, fix="rename the file or the directory")


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """`spec` with every local path absolute, so that the run can be resumed from any directory.

    Paths that exist are local; everything else (a hub id, a missing path) stays unchanged.
    """
    return RunSpec.model_validate(_absolute(spec.model_dump()))


def _absolute(value: Any, key: str = "") -> Any:
    """A copy of the value at a dotted key, in which paths and the files of users' functions are absolute."""
    if isinstance(value, dict):
        renamed = {name: _absolute(name, key) if key in _PATHS else name for name in value}
        return {renamed[name]: _absolute(below, f"{key}.{name}".lstrip(".")) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_absolute(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if key in _PATHS:
        is_name = value == EMBEDDED or value in NAMED_MODELS
        return value if is_name or not matches(value) else str(Path(value).expanduser().resolve())
    if value.startswith(COMMANDS):
        return absolute_command(value) if files_of(value) else value
    names = split_names(value) if ".py:" in value else []
    absolute = [absolute_name(name) if files_of(name) else name for name in names]
    return value if absolute == names else ",".join(absolute)


def _check_ranks(spec: RunSpec) -> None:
    """Refuses to start if the number of ranks differs from the spec."""
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size != spec.world_size:
            raise UsageError(
                f"ranks started: {world_size}, ranks of the spec: {spec.world_size}",
                where="trainer.n_gpus_per_node × trainer.nnodes",
                fix="use the same number in the spec and in the launcher",
            )
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        # 0: also of a launcher that shows each rank one GPU.
        if local_rank not in {0, rank % spec.trainer.n_gpus_per_node}:
            raise UsageError(
                f"rank {rank} is number {local_rank} of its node: the ranks of a node are not consecutive",
                where="trainer.n_gpus_per_node",
                fix="start every node by torchrun, see --print-command; or with Slurm's --distribution=block",
            )
    elif spec.trainer.nnodes > 1:
        raise UsageError(
            f"trainer.nnodes is {spec.trainer.nnodes}, but no launcher has started the other nodes",
            where="trainer.nnodes",
            fix="--print-command shows the commands that start all nodes",
        )
