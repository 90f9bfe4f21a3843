"""Checkpoints that are either complete or absent.

Everything is written into a hidden directory, hashed into `manifest.json`, synced, and published by
one rename. A directory whose manifest is missing or whose hashes do not match is not a checkpoint; no
pointer file overrides this.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlctl.errors import RlctlError, RunFailure, UsageError, first_line, lost_rank
from rlctl.files import apply_umask, read_text, sha256_of, sync
from rlctl.run_files import create_directory, remove, rename

#: Subdirectory of a run directory for its checkpoints.
CHECKPOINTS = "checkpoints"
#: Subdirectory of a checkpoint for the adapter.
ADAPTER = "adapter"
_MANIFEST = "manifest.json"
_PREFIX = "step_"
_PARTIAL = ".partial-"
_SET_ASIDE = "damaged-"
#: Directory and file → its SHA-256 → the problem of a file, or "".
Differing = Callable[[Path, Mapping[str, str]], str]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State that the training loop restores, besides models, batches sampled ahead, draws and the log.

    Attributes:
        step: batches trained on.
        policy_version: optimizer updates so far.
        world_size: number of ranks that wrote it.
        kl_coef: coefficient of the KL penalty in the reward for the next batch; None: no penalty.
        capabilities: name → what it continues with; None: in checkpoints of earlier versions.
    """

    step: int
    policy_version: int
    world_size: int
    kl_coef: float | None = None
    capabilities: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises a `ValueError` for values of other types, as in a manifest that was edited."""
        for name in ("step", "policy_version", "world_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}, not a number of steps, updates or ranks")
        if type(self.kl_coef) not in {float, int, type(None)}:
            raise ValueError(f"kl_coef is {self.kl_coef!r}, not a number")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk; `rlctl.train.saving` writes and reads its other parts."""

    path: Path
    state: TrainerState

    @property
    def model_dir(self) -> Path:
        """Weights, config and tokenizer in Hugging Face's format."""
        return self.path / "model"

    @property
    def adapter_dir(self) -> Path:
        """The LoRA weights in PEFT's format; missing without LoRA and in checkpoints of older versions."""
        return self.path / ADAPTER


def begin(root: Path, step: int, parts: Iterable[str] = ("engine", "model")) -> Path:
    """Creates a hidden directory for the checkpoint of `step`, with subdirectories `parts` (one rank)."""
    partial = partial_path(root, step)
    root.parent.mkdir(parents=True, exist_ok=True)
    create_directory(root)
    remove(partial)
    for each in (partial, *(partial / name for name in parts)):
        each.mkdir()
    return partial


def partial_path(root: Path, step: int) -> Path:
    """The directory that `begin` creates, for ranks that did not call it."""
    return root / f"{_PARTIAL}{step:06d}"


@contextmanager
def writing(root: Path, step: int) -> Iterator[None]:
    """Turns exceptions other than `RlctlError` into `RunFailure`; then call `remove_unwritten`.

    Errors about a lost rank are passed on. A full disk raises OSError in Python, RuntimeError in torch, and
    another error in safetensors.

    Raises:
        RunFailure: the checkpoint of `step` could not be written; earlier checkpoints are intact.
    """
    try:
        yield
    except RlctlError:
        raise
    except Exception as error:
        if lost_rank(error):
            raise
        cause: BaseException | None = error
        while cause and not isinstance(cause, OSError):  # torch raises its own error after that of the write
            cause = cause.__context__
        reason = getattr(cause, "strerror", None) or first_line(error)
        message = f"the checkpoint of step {step} could not be written: {reason}"
        fix = "free space or set trainer.max_ckpt_to_keep lower; earlier checkpoints are intact"
        raise RunFailure(message, where=str(root), fix=fix) from error


def remove_unwritten(root: Path, error: Exception) -> None:
    """Removes the checkpoint of which `writing` reported that it could not be written.

    Call it when no rank writes any more: it would fail, and not the rank that failed first would be named.
    """
    for partial in root.glob(f"{_PARTIAL}*") if getattr(error, "where", None) == str(root) else ():
        remove(partial, ignore_errors=True)


def hash_share(partial: Path, known: Collection[str], share: int, shares: int) -> dict[str, str]:
    """Hashes and syncs one of `shares` parts of the files below `partial`, except those in `known`.

    Every rank of the machine that wrote the files processes one part. Returns file below `partial` → its
    SHA-256.
    """
    files = {name: path for path in _files(partial) if (name := str(path.relative_to(partial))) not in known}
    left = sorted(files, key=lambda name: -files[name].stat().st_size)
    return {name: hash_and_sync(files[name]) for name in left[share::shares]}


def publish(
    root: Path,
    partial: Path,
    state: TrainerState,
    *,
    keep: int | None,
    best: int | None = None,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> Checkpoint:
    """Syncs and renames `partial`; then removes old checkpoints (one rank, when all have written).

    Call it in a context of `writing`, for its errors.

    Args:
        partial: the directory from `begin`.
        keep: number of newest checkpoints to keep, besides `best`; None: all.
        best: step of the checkpoint that is never removed.
        digests: file below `partial` → its SHA-256, already synced; other files are hashed here.
    """
    final = root / f"{_PREFIX}{state.step:06d}"
    apply_umask(partial)
    files = {**digests, **hash_share(partial, digests, 0, 1)}
    manifest = partial / _MANIFEST
    content = {"state": asdict(state), "sha256": files}
    manifest.write_text(json.dumps(content | {"manifest_sha256": _digest(content)}, indent=1))
    sync(manifest)
    rename(partial, final)
    sync(root)
    if keep is not None:
        for step, path in _published(root)[:-keep]:
            if step != best:
                remove(path, ignore_errors=True)
    return Checkpoint(final, state)


def newest_intact(
    root: Path, step: int | None = None, *, differing: Differing | None = None, set_aside: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files all match their checksums.

    Args:
        step: accept only this step; None: any.
        differing: as `first_differing`, which is the default.
        set_aside: rename damaged and incomplete ones; otherwise nothing is changed, so the run may still be
            in progress.

    Returns:
        The checkpoint or None, and the problems of checkpoints that were passed over.
    """
    notes: list[str] = []
    for partial in root.glob(f"{_PARTIAL}*") if set_aside else ():
        notes.append(f"set aside {partial.name}: the run ended while it was being written")
        _set_aside(partial)
    for number, path in reversed(_published(root)):
        if step not in {None, number}:
            continue
        problem, checkpoint = verify(path, differing or first_differing)
        if checkpoint is not None:
            return checkpoint, [f"{note}; {path.name} is used instead" for note in notes]
        if set_aside:
            notes.append(f"set aside {path.name}: {problem}")
            _set_aside(path)
        else:
            notes.append(f"{path.name} is damaged: {problem}")
    return None, notes


def checkpoint_of_run(run_dir: Path, step: int | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest intact checkpoint of a run, or that of `step`, and the problems of others passed over.

    Raises:
        UsageError: there is none.
    """
    root = run_dir / CHECKPOINTS
    checkpoint, notes = newest_intact(root, step)
    if checkpoint is not None:
        return checkpoint, notes
    there = ", ".join(path.name for path in sorted(root.glob(f"{_PREFIX}*")))
    wait = "wait for one (see trainer.save_freq), or resume the run until it ends"
    of_step = "" if step is None else f" of step {step}"
    why = f" ({notes[0]})" if notes else ""
    fix = wait if step is None or not there else f"checkpoints here: {there}"
    raise UsageError(f"the run has no complete checkpoint{of_step}{why}", where=str(root), fix=fix)


def has_published(root: Path) -> bool:
    """Whether a checkpoint was written, intact or not."""
    return bool(_published(root))


def bytes_of_newest(root: Path) -> int:
    """Size of the newest checkpoint in bytes; 0 without one."""
    found = _published(root)
    return sum(path.stat().st_size for path in _files(found[-1][1])) if found else 0


def point_to(root: Path, name: str, step: int | None) -> None:
    """Creates a symbolic link `name` to the checkpoint of `step`, for users and scripts; never read here."""
    link = root / name
    with contextlib.suppress(OSError):  # not every file system has links
        if step is None or not (root / f"{_PREFIX}{step:06d}").is_dir():
            if link.is_symlink():
                remove(link)
            return
        new = root / f".{name}.new"
        remove(new)
        new.symlink_to(f"{_PREFIX}{step:06d}", target_is_directory=True)
        rename(new, link)


def model_checksums(checkpoint: Checkpoint) -> dict[str, str]:
    """File of `model_dir` → its SHA-256, as recorded when the checkpoint was written."""
    _, expected = _read_manifest(checkpoint.path)
    place = checkpoint.model_dir.name + "/"
    return {name.removeprefix(place): digest for name, digest in expected.items() if name.startswith(place)}


def first_differing(path: Path, expected: Mapping[str, str]) -> str:
    """The problem of the first file below `path` that is not as expected; "": there is none.

    Args:
        expected: file → its SHA-256.
    """
    for name, digest in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256_of(file) != digest:
            return f"{name} differs from its checksum"
    return ""


def parts_of_files(path: Path, expected: Mapping[str, str], count: int) -> list[dict[str, str]]:
    """Divides the files of a checkpoint into `count` parts of about equal size in bytes.

    Args:
        expected: file → its SHA-256.
    """
    sizes = {name: file.stat().st_size if (file := path / name).is_file() else 0 for name in expected}
    parts: list[dict[str, str]] = [{} for _ in range(count)]
    smallest = [(0, number) for number in range(count)]  # a heap of bytes and part
    for name in sorted(expected, key=lambda name: -sizes[name]):
        num_bytes, number = smallest[0]
        parts[number][name] = expected[name]
        heapq.heapreplace(smallest, (num_bytes + sizes[name], number))
    return parts


def verify(path: Path, differing: Differing = first_differing) -> tuple[str, Checkpoint | None]:
    """Verifies one checkpoint; returns its problem and None, or "" and the checkpoint."""
    try:
        state, expected = _read_manifest(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest is unreadable ({error})", None
    if path.name != f"{_PREFIX}{state.step:06d}":
        return f"its manifest contains step {state.step}", None
    if not expected:
        return "its manifest lists no file", None
    if path.is_symlink():
        return "it is a link", None
    odd = next((each for each in sorted(path.rglob("*")) if not _is_plain(each)), None)
    if odd:
        return f"{odd.relative_to(path)} is a link, or no file", None
    problem = differing(path, expected)
    return problem, None if problem else Checkpoint(path, state)


def _read_manifest(path: Path) -> tuple[TrainerState, dict[str, str]]:
    """The state, and the SHA-256 of every file.

    Raises:
        OSError, ValueError, KeyError, TypeError: the manifest cannot be read, or differs from its checksum.
            Manifests of versions before 0.2 have no checksum.
    """
    manifest = json.loads(read_text(path / _MANIFEST))
    digest = manifest.pop("manifest_sha256", None)
    if digest is not None and digest != _digest(manifest):
        raise ValueError("it differs from its checksum")
    manifest["state"].pop("zero_stage", None)  # of older versions
    files = dict(manifest["sha256"])
    if not all(isinstance(digest, str) for digest in files.values()):
        raise ValueError("a checksum is no text")
    return TrainerState(**manifest["state"]), files


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _published(root: Path) -> list[tuple[int, Path]]:
    """(step, directory), oldest first."""
    found = [(path.name.removeprefix(_PREFIX), path) for path in root.glob(f"{_PREFIX}*")]
    return sorted((int(step), path) for step, path in found if step.isdecimal())


def _set_aside(path: Path) -> None:
    rename(path, path.with_name(f"{_SET_ASIDE}{path.name.lstrip('.')}"))


def _is_plain(path: Path) -> bool:
    """Whether it is a file or a directory; of someone else, a link may lead to a secret of this user."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def hash_and_sync(path: Path) -> str:
    """Waits until a file is on the disk; returns its SHA-256."""
    sync(path)
    return sha256_of(path)
