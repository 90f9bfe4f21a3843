"""Import of users' functions by path, `path/to/file.py:function`, with errors that name the line.

Grading processes import this module, so it imports neither Pydantic nor torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import shlex
import shutil
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.errors import UsageError, visible

#: Names of the modules of users' functions: of files imported by path, and of packages that add parts.
USER_MODULES: set[str] = set()


#: Beginnings of names that are command lines.
COMMANDS = ("command:", "mcp:")


def is_file_function(name: str) -> bool:
    """Whether a name has the form `path/to/file.py:function`."""
    file, colon, function = name.rpartition(":")
    return bool(colon) and file.endswith(".py") and function.isidentifier() and not name.startswith(COMMANDS)


def is_users_code(name: str) -> bool:
    """Whether a name is a user's function or class, or a command line."""
    return is_file_function(name) or name.startswith(COMMANDS)


def _files_of_command(name: str) -> list[Path]:
    """The files that a command line names."""
    try:
        words = shlex.split(name.partition(":")[2])
    except ValueError:
        return []
    return [path for word in words if (path := Path(word).expanduser().resolve()).is_file()]


def command_words(line: str, *, where: str, fix: str) -> list[str]:
    """The words of a command line, as a shell would split them; the first one is the program's path.

    Raises:
        UsageError: there is no such program, or it may not be executed.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"the command line cannot be read: {error}", where=where, fix=fix) from error
    if not words:
        raise UsageError("the command line is empty", where=where, fix=fix)
    program = shutil.which(words[0])
    if program is None and Path(words[0]).is_file():
        raise UsageError(f"{words[0]} may not be executed", where=where, fix=f"chmod +x {words[0]}")
    if program is None:
        raise UsageError(f"there is no program {words[0]}", where=where, fix=fix)
    return [str(Path(program).absolute()), *words[1:]]


def absolute_command(name: str) -> str:
    """A command line whose files that are beside or below the working directory have absolute paths."""
    kind, _, line = name.partition(":")
    words = shlex.split(line)
    return (
        f"{kind}:{shlex.join(str(Path(word).absolute()) if Path(word).is_file() else word for word in words)}"
    )


def split_names(joined: str) -> list[str]:
    """The names in a comma-separated list; the path of an existing file may contain a comma too."""
    is_one = is_file_function(joined) and _path_of(joined).is_file()
    return [joined] if is_one else [part.strip() for part in joined.split(",")]


def absolute_name(name: str) -> str:
    """`path/to/file.py:function` with the file's absolute path; any other name unchanged."""
    file, _, function = name.rpartition(":")
    return f"{_path_of(name)}:{function}" if is_file_function(name) and file[0] != "/" else name


def files_of(*names: str | None) -> list[Path]:
    """The users' files in `names`, of which each may be several joined with commas: absolute and sorted."""
    lines = [name for name in names if name and name.startswith(COMMANDS)]
    parts = [part for joined in names if joined and joined not in lines for part in split_names(joined)]
    paths = {_path_of(part) for part in parts if is_file_function(part)}
    paths.update(file for line in lines for file in _files_of_command(line))
    return sorted(filter(Path.is_file, paths))


def missing_methods(value: object, *methods: str) -> str:
    """Names the methods that an object lacks, for a message; empty if it has all."""
    missing = [method for method in methods if not hasattr(value, method)]
    return f"{type(value).__name__} has no {' and no '.join(missing)}" if missing else ""


def call_problem(function: Callable[..., Any], *arguments: object, **options: object) -> str:
    """Why a function cannot be called with these arguments; empty if it can, or has no known signature."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # of some functions in C
        return ""
    return ""


def load_function(name: str, *, key: str) -> Callable[..., Any]:
    """Import the user's `path/to/file.py:function`, which the spec key `key` names.

    A relative path starts at the working directory. A file is imported once; an edited one is imported again
    only if the function was missing, or the import failed.

    Raises:
        UsageError: no such file or function, or an error while importing it (with file and line).
    """
    file, _, function_name = name.rpartition(":")
    path = _path_of(name)
    if not path.is_file():
        raise UsageError(f"{file}: no such file", where=key, fix=f"paths are relative to {Path.cwd()}")
    module = _import_file(path)
    function = getattr(module, function_name, None)
    if not callable(function):
        del sys.modules[module.__name__]
        message = "no such function" if function is None else f"{function_name} is not a function"
        raise UsageError(message, where=name, fix=f"define `def {function_name}(…)` in {file}")
    return function  # type: ignore[no-any-return]


def add_to_import_path(folder: Path) -> None:
    """Add a directory to the import path, after the standard library and before installed packages.

    A user's file with the name of a module of the standard library does not replace that module.
    """
    library = Path(sysconfig.get_path("stdlib"))
    standard = {str(library), str(library / "lib-dynload"), sysconfig.get_path("platstdlib")}
    last = max((index for index, entry in enumerate(sys.path) if entry in standard), default=-1)
    if str(folder) not in sys.path:
        sys.path.insert(last + 1, str(folder))


def _path_of(name: str) -> Path:
    """The absolute path of the file in `path/to/file.py:function`."""
    return Path(name.rpartition(":")[0]).expanduser().resolve()


def _import_file(path: Path) -> ModuleType:
    # Files of the same name in different directories are different modules.
    name = f"rlctl_user_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    USER_MODULES.add(name)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    add_to_import_path(path.parent)
    try:
        # Not by the loader: its bytecode can be that of an earlier version, of equal size in the same second.
        source = path.read_bytes()
        vars(module)["__sha256__"] = hashlib.sha256(source).hexdigest()  # the file may change
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        message = visible(f"importing it failed: {type(error).__name__}: {error}")
        raise UsageError(message, where=_line_of(error, path), fix="correct the file") from error
    return module


def line_in_user_code(error: BaseException) -> str | None:
    """`file:line, in function` of the innermost traceback frame in users' code; None: there is none."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in USER_MODULES:
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return found


def _line_of(error: BaseException, path: Path) -> str:
    """`file:line` of the innermost traceback frame in the user's file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
