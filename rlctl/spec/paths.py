"""Local files and directories in a spec: expansion of patterns, conversion to absolute paths."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from rlctl.spec.model import EMBEDDED, NAMED_MODELS
from rlctl.spec.run_spec import RunSpec
from rlctl.user_code import is_file_function, split_names


def matches(name: str) -> list[Path]:
    """Files or directories for `name`: the path itself if it exists, else all matches of the pattern."""
    path = Path(name).expanduser()
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path))))  # noqa: PTH207 - any depth


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """`spec` with every local path absolute, so that the run can be resumed from any directory.

    Paths that exist are local; everything else (a hub id, a missing path) stays unchanged.
    """
    content = spec.model_dump()
    for section, key in (("model", "path"), ("critic", "path"), ("ref", "path")):
        content[section][key] = _absolute(content[section][key])
    for key in ("train_files", "val_files"):
        content["data"][key] = [_absolute(path) for path in content["data"][key]]
    content["reward"]["model"]["path"] = _absolute(content["reward"]["model"]["path"])
    return RunSpec.model_validate(_with_absolute_functions(content))


def _with_absolute_functions(value: Any) -> Any:
    """A copy of the tree in which the file of every `path/to/file.py:function` is absolute, also in lists."""
    if isinstance(value, dict):
        return {key: _with_absolute_functions(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_with_absolute_functions(item) for item in value]
    if isinstance(value, str) and ".py:" in value:
        names = split_names(value)
        absolute = [_absolute_function(name) for name in names]
        return value if absolute == names else ",".join(absolute)
    return value


def _absolute_function(name: str) -> str:
    file, _, function = name.rpartition(":")
    return f"{_absolute(file)}:{function}" if is_file_function(name) else name


def _absolute(path: str | None) -> str | None:
    """Makes an existing path absolute; returns everything else unchanged."""
    if path is None or path == EMBEDDED or path in NAMED_MODELS or not matches(path):
        return path
    return str(Path(path).expanduser().resolve())
