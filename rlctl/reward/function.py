"""The user's own reward, `file.py:function`. No torch: it runs in grading processes."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.errors import UsageError
from rlctl.reward.protocol import Sample

MODULE = "rlctl_user_reward"
KEY = "reward"
#: Parameter → what it is given.
KNOWN: dict[str, Callable[[Sample], object]] = {
    "response": lambda sample: sample.response,
    "solution_str": lambda sample: sample.response,
    "ground_truth": lambda sample: sample.ground_truth,
    "prompt": lambda sample: sample.prompt,
    "data_source": lambda sample: sample.data_source,
    "extra_info": lambda sample: sample.extra_info,
    "messages": lambda sample: sample.messages,
}


def load(name: str) -> Callable[[Sample], object]:
    """Import the file and bind the function's parameters by their names.

    Args:
        name: `path/to/file.py:function`, the path as seen from the working directory.

    Raises:
        UsageError: no such file or function, an error while importing it (with file and line), or a
            parameter without default that nothing is known for.
    """
    file, _, function_name = name.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{file}: no such file", where=KEY, fix=f"paths are seen from {Path.cwd()}")
    function = getattr(_module(path), function_name, None)
    if not callable(function):
        what = "no such function" if function is None else f"{function_name} is not a function"
        raise UsageError(
            what, where=f"{file}:{function_name}", fix=f"define `def {function_name}(response, ground_truth)`"
        )
    return _bound(function, f"{file}:{function_name}")


def text_of(error: BaseException) -> str:
    """The traceback, starting at the first frame that is not this package's; text that can be printed."""
    trace, ours = error.__traceback__, str(Path(__file__).parent)
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text.encode("utf-8", "backslashreplace").decode()  # it may quote half of a surrogate pair


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise UsageError("not a Python file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses and pickle look a module up by its name
    sys.path.insert(0, str(path.parent))  # so that it can import what lies next to it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        what = f"importing it failed: {type(error).__name__}: {error}"
        raise UsageError(what, where=_place(error, path), fix="correct the file") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """`file:line` of the innermost line of the user's file that the error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _bound(function: Callable[..., Any], where: str) -> Callable[[Sample], object]:
    """`function` with its parameters filled by name; those with a default that nobody knows keep it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UsageError(
            "its parameters cannot be read", where=where, fix="wrap it in a function of yours"
        ) from None
    positional: list[str] = []
    named: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            named += [name for name in KNOWN if name not in {"solution_str", *named, *positional}]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in KNOWN:
            (positional if parameter.kind is parameter.POSITIONAL_ONLY else named).append(parameter.name)
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"nothing is known to fill the parameter `{parameter.name}` with",
                where=where,
                fix=f"give it a default, or use {', '.join(KNOWN)}",
            )

    def call(sample: Sample) -> object:
        values = [KNOWN[name](sample) for name in positional]
        return function(*values, **{name: KNOWN[name](sample) for name in named})

    return call
