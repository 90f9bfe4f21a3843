"""Error classes with structured messages: what is wrong, where, and what to write instead.

Library code raises errors; only `rlctl.cli.app` prints them and exits.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar
from unicodedata import category

_Value = TypeVar("_Value")

#: Substrings of torch's errors about exhausted host memory.
_NO_HOST_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory")

#: Types of Pydantic's errors whose messages use Python's words.
_KINDS = {
    **dict.fromkeys(("dict_type", "model_type"), "must be a mapping, `name: value`"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list, `[a, b]`"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "string_type": "must be a text",
    "extra_forbidden": "unknown parameter",
    "missing": "is missing",
}


class RlctlError(Exception):
    """A failure whose message is meant for the user.

    Args:
        what: one sentence saying what is wrong.
        where: file, line, row or key of the error, if known.
        fix: what to write or run instead, if known.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        """One line for logs; the CLI prints the parts separately."""
        return _in_one_line(self.where, self.what, self.fix)


class RunFailure(RlctlError):
    """A valid request failed at run time (exit 1)."""


class LostRank(RunFailure):
    """Another rank ended or cannot be reached; the error of that rank is the cause."""


class UsageError(RlctlError):
    """The request itself is wrong: arguments, paths, input data (exit 2)."""

    exit_code = 2


class EnvironmentFailure(RlctlError):
    """Something this machine lacks: a package, a device, disk space (exit 4)."""

    exit_code = 4


def _in_one_line(where: str | None, what: str, fix: str | None) -> str:
    return (f"{where}: " if where else "") + what + (f" ({fix})" if fix else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def typed_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    name = type(error).__name__
    line = first_line(error)
    return name if line == name else f"{name}: {line}"


def one_line(error: BaseException) -> str:
    """An error's text on one line; the name of its type if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def failing_together(agree: Callable[[str], str]) -> Iterator[None]:
    """Runs a block on every rank; if it raises on one rank, all ranks raise.

    A `RuntimeError` is raised at once, because after torch's error about a lost rank no collective ends.

    Args:
        agree: returns on every rank the first text among all ranks' that is not empty (a collective).

    Raises:
        RunFailure: the block raised on other ranks only.
    """
    failure: Exception | None = None
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        failure = error
    words = agree(one_line(failure) if failure else "")
    if failure:
        raise failure
    if words:
        raise RunFailure(f"another rank failed: {words}")


def known(value: _Value | None) -> _Value:
    """A value that is set here, of a field that may be None elsewhere."""
    assert value is not None
    return value


def visible(text: str, keep: str = "\n\t") -> str:
    """Escapes control, format and private-use characters: `\\x1b`, `\\u202e`.

    The result cannot control a terminal and hides no character. Spaces of every width are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep or category(char) == "Zs" else repr(char)[1:-1]
        for char in text
    )


def in_words(details: Mapping[str, Any]) -> str:
    """What one entry of `pydantic.ValidationError.errors()` says, after the name of the value."""
    said = str(details["msg"]).removeprefix("Value error, ")
    return _KINDS.get(details["type"]) or re.sub("(Input|Tuple|List) should", "must", said)


def memory_failure(error: BaseException) -> RunFailure | None:
    """Converts an out-of-memory error of the host or a GPU to a failure with a fix; None for other errors."""
    first = first_line(error)
    of_gpu = type(error).__name__ == "OutOfMemoryError"
    of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    of_host = of_host or (isinstance(error, RuntimeError) and any(text in first for text in _NO_HOST_MEMORY))
    if not (of_gpu or of_host):
        return None
    return RunFailure(
        f"out of memory ({'GPU' if of_gpu else 'host'}): {first[:200]}",
        fix="lower actor.ppo_micro_batch_size_per_gpu (or actor.ppo_max_token_len_per_gpu), "
        "rollout.max_num_seqs or the lengths in data; `--dry-run` shows the memory of each part",
    )


def lost_rank(error: BaseException) -> LostRank | None:
    """Converts an error of torch's process groups; None for other errors.

    gloo has no error class; the text of its errors contains its source path.
    """
    text = str(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "DistError" not in kinds and not ("RuntimeError" in kinds and "/gloo/" in text):
        return None
    reason = re.sub(r"^((Gloo \w+ failed with )?\[.*?\] )+", "", first_line(error)).partition(". ")[0]
    fix = "see the first error in the output of the other ranks; continue with --resume RUN_DIR"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the host's")
    if not interface.startswith("lo"):
        fix += f". If there is none, others cannot reach this node at its interface {interface}: set "
        fix += "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that they reach"
    return LostRank(f"another rank has ended or cannot be reached: {reason}", fix=fix)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning about a spec."""

    severity: Literal["error", "warning"]  # an error stops the run
    key: str  # dotted, e.g. `actor.lr`; empty where a whole file or argument is wrong
    what: str  # one sentence
    fix: str | None = None  # what to write instead
    where: str | None = None  # `file:line`, `command line` or None for a default


class SpecError(UsageError):
    """Every problem found in a spec, reported together (exit 2).

    `spec` is the one in which they were found, if the files that it names can be checked all the same.
    """

    def __init__(self, problems: list[Problem], spec: Any = None) -> None:
        self.problems = problems
        self.spec = spec
        count = len(problems)
        super().__init__(f"the spec has {count} problem{'s' if count != 1 else ''}")

    def __str__(self) -> str:
        lines = [self.what]
        for problem in self.problems:
            key = f"{problem.key}: " if problem.key else ""
            lines.append("  " + _in_one_line(problem.where, key + problem.what, problem.fix))
        return "\n".join(lines)


def steps_in_words(steps: Iterable[int | range]) -> str:
    """Formats ascending steps, and ranges of them, compactly: `steps 1 to 4, 7`."""
    spans: list[tuple[int, int]] = []
    for each in steps:
        first, last = (each.start, each.stop - 1) if isinstance(each, range) else (each, each)
        if spans and spans[-1][1] == first - 1:
            first = spans.pop()[0]
        spans.append((first, last))
    written = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans]
    shown = written if len(written) <= 8 else [*written[:7], f"… {written[-1]}"]
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return ("step " if is_one else "steps ") + ", ".join(shown)


def missing_steps(known: Iterable[range], last: int) -> list[range]:
    """Ranges of the steps from 1 to `last` that are in none of the known ranges, ascending.

    The numbers are of a run's files, which someone else may have written, so that no loop goes over steps.
    """
    missing, free = [], 1  # the first step that is in no range so far
    for each in sorted((each for each in known if each), key=lambda each: each.start):
        if each.start > last:
            break
        if each.start > free:
            missing.append(range(free, each.start))
        free = max(free, each.stop)
    return [*missing, range(free, last + 1)] if free <= last else missing
