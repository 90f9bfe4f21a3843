"""Changes what is in a run directory, without following links that can lead out of it.

A run directory may come from someone else, or others may write to it, so that `checkpoints` can be a link
to any directory of this user. The run directory itself, and what is above it, may be links: they are the
user's. Removing and renaming look up a directory once, as a descriptor, so that no exchange in between
has an effect.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlctl.errors import UsageError

#: Names of the directories that a run makes in its own; `wandb` is the only one of others' making.
DIRECTORIES = ("checkpoints", "rollouts", "evaluations", "engines", "tensorboard", "wandb", ".ranks")


def create_directory(path: Path) -> None:
    """Creates a directory in that of a run, unless it exists.

    Raises:
        OSError: it is a link, or a file, or from the file system.
    """
    path.mkdir(exist_ok=True)  # also if it is a link to a directory
    with _opened(path):
        pass


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Removes a file, a link, or a directory with all that is in it; nothing may be there.

    Args:
        ignore_errors: leave what cannot be removed.

    Raises:
        OSError: the directory of `path` is a link, or from the file system.
    """
    try:
        with _opened(path.parent) as parent:
            if stat.S_ISDIR(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(path.name, ignore_errors, dir_fd=parent)
            else:
                os.unlink(path.name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError:
        if not ignore_errors:
            raise


def rename(path: Path, target: Path) -> None:
    """Renames a file or a link, which replaces one at `target`; or a directory, which replaces anything.

    Raises:
        OSError: the directory of one of them is a link, or from the file system.
    """
    if path.is_dir() and not path.is_symlink():
        remove(target)
    with ExitStack() as stack:
        before, after = (stack.enter_context(_opened(each.parent)) for each in (path, target))
        os.rename(path.name, target.name, src_dir_fd=before, dst_dir_fd=after)


def refuse_links(run_dir: Path) -> None:
    """Refuses a run directory with links that lead out of it where a run reads and writes.

    Raises:
        UsageError: as above; says how the run can be on another disk.
    """
    inner = [run_dir / name for name in DIRECTORIES if name != "wandb"]
    directories = [run_dir, *(path for path in inner if path.is_dir() and not path.is_symlink())]
    for link in (path for each in directories for path in sorted(each.iterdir()) if path.is_symlink()):
        leads_out = not _real(link).is_relative_to(_real(run_dir))
        if leads_out or (link.parent == run_dir and link.name in DIRECTORIES):
            raise UsageError(
                f"it is a link to {link.readlink()}" + (", which leads out of the run" if leads_out else ""),
                where=str(link),
                fix="a run would read, overwrite and delete files there: remove the link. For another disk, "
                "move the whole run directory there, and make that a link",
            )


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """A descriptor of a directory that is no link."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if directory.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, which a run does not follow", str(directory)) from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # `Path.resolve` fails for a link to itself
