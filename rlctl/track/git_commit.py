"""The commit of a working directory, read without git.

git runs programs that a repository's configuration names (`core.fsmonitor`, filters), and the directory may
be someone else's.
"""

from __future__ import annotations

import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
#: Longest file of references that is read, in bytes.
_LARGEST = 16 << 20


def git_commit(directory: Path) -> str | None:
    """The commit that is checked out in the repository that contains `directory`; None: there is none."""
    for parent in (directory, *directory.parents):
        found = _repository(parent / ".git")
        if found is not None:
            head = _read(found / "HEAD")
            name = head.removeprefix("ref: ")
            return _commit_of(found, name) if name != head else _checked(head)
    return None


def _repository(directory: Path) -> Path | None:
    """The directory of a repository's files, which `.git` is, or names in a worktree or submodule."""
    if directory.is_dir():
        return directory if (directory / "HEAD").is_file() else None
    named = _read(directory)
    return directory.parent / named.removeprefix("gitdir: ") if named.startswith("gitdir: ") else None


def _commit_of(repository: Path, name: str) -> str | None:
    """The commit of a branch such as `refs/heads/main`."""
    if not name.startswith("refs/") or ".." in name:
        return None
    shared = repository / (_read(repository / "commondir") or ".")  # that of all worktrees
    for place in (repository, shared):
        commit = _checked(_read(place / name))
        if commit:
            return commit
    packed = (line.split(" ", 1) for line in _read(shared / "packed-refs").splitlines())
    return next((_checked(pair[0]) for pair in packed if pair[1:] == [name]), None)


def _checked(text: str) -> str | None:
    return text if _COMMIT.fullmatch(text) else None


def _read(file: Path) -> str:
    """The stripped text of a file; empty without one."""
    try:
        if not file.is_file():
            return ""
        with file.open("rb") as stream:
            return stream.read(_LARGEST).decode("utf-8", "replace").strip()
    except OSError:
        return ""
