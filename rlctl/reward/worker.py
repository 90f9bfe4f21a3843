"""Grading process: reads numbered requests and writes numbered replies, one JSON object per line.

Run as `python -P -m rlctl.reward.worker GRADER PARAMETERS`; `rlctl.reward.pool` starts it and enforces the
deadlines. There are two processes. The first one is a supervisor: when the pool or the second process ends,
it ends the second process and all processes that it started. The second one grades.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import math
import os
import resource
import select
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import CodeType
from typing import Any

from rlctl.errors import UsageError
from rlctl.registry import GRADERS
from rlctl.reward.pool import is_ours
from rlctl.reward.protocol import Sample
from rlctl.user_code import is_file_function

MEMORY_LIMIT_BYTES = 4 << 30
#: Maximum characters of an error that are sent: the last ones.
MAX_ERROR_CHARS = 4000
_PR_SET_CHILD_SUBREAPER = 36
#: Parameters of a function of one response: fields of `Sample`, and verl's name of the response.
_KNOWN = ("response", "solution_str", "ground_truth", "prompt", "data_source", "extra_info", "messages")
#: And one that a function must name: `**kwargs` does not get it.
_NAMED_ONLY = "response_ids"
#: Parameters of TRL's reward functions that are not columns of the data; logged values are discarded.
_OF_TRAINER = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
#: Parameters that get the ground truth if the data has no column of that name.
_GROUND_TRUTHS = ("solution", "answer")

#: Samples → one value per sample.
Call = Callable[[Sequence[Sample]], Sequence[object]]


def main(grader: str, params: dict[str, Any]) -> None:
    """Grades until the input ends, which happens when the pool's process ends."""
    # Separate descriptors for requests and replies, so that the grader's input and output cannot mix with
    # them.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Descendants whose parent has ended become children of this process, also those in another session.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _serve(grader, params, requests, replies)
        return
    code = _wait(child, requests)
    _end_children()
    if code is not None:
        os.write(replies, json.dumps({"ended": code}).encode() + b"\n")
    os._exit(0)


def _wait(child: int, requests: int) -> int | None:
    """Waits for the child's exit code, negative for a signal; returns None if the pool has ended."""
    poll = select.poll()
    poll.register(requests, 0)  # reports only that no process can write to it any more
    while not poll.poll(50):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:  # also orphans of the grader
            if found[0] == child:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_children() -> None:
    """Ends every process that the grader started; children of ended ones become children of this process."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                import psutil

                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                os.wait()


def _serve(grader: str, params: dict[str, Any], requests: int, replies: int) -> None:
    me = os.getpid()

    def reply(number: int, **values: object) -> None:
        if os.getpid() != me:  # a copy of this process that the grader has forked
            os._exit(0)
        line = json.dumps({"number": number, **values}).encode() + b"\n"
        while line:
            line = line[os.write(replies, line) :]

    sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        # A user's function may import libraries that reserve tens of GiB of address space, so only writable
        # memory counts for it.
        limit = resource.RLIMIT_AS if is_ours(grader) else resource.RLIMIT_DATA
        resource.setrlimit(limit, (MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))
        loaded = load_grader(grader, params)
    except UsageError as error:
        is_absent = error.where == GRADERS.key and not is_file_function(grader)  # it is in the pool's process
        fix = f"other processes grade: name it as path/to/file.py:{grader}" if is_absent else error.fix
        reply(0, what=error.what, where=error.where, fix=fix)
        return
    if is_ours(grader):  # runs lazy imports now; an error occurs again, and is reported, when grading
        with contextlib.suppress(Exception):
            loaded.grade([Sample("\\boxed{x + 1}", "\\frac{x}{2}")])
    reply(0, pid=me, takes_groups=loaded.takes_groups, reads_answers=loaded.answer_of is not None)
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "answer_of" in asked:
                answer = None
                with contextlib.suppress(Exception):  # the score is valid without an answer
                    answer = loaded.answer_of(asked["answer_of"]) if loaded.answer_of else None
                reply(asked["number"], answer=answer)
                continue
            try:
                samples = [Sample(**one) for one in asked["samples"]]
                # None from a TRL function means that it does not grade the sample; from others it is an
                # error.
                skipped = {"error": "the grader returned None", "kind": "inapplicable"}
                values = loaded.grade(samples)
                grades = [skipped if loaded.takes_groups and v is None else checked(v) for v in values]
            except MemoryError:
                text = f"the grading needs more than {MEMORY_LIMIT_BYTES >> 30} GiB"
                grades = [{"error": text, "kind": "memory"}] * len(asked["samples"])
            except Exception as error:
                grades = [{"error": text_of(error)}] * len(asked["samples"])
            reply(asked["number"], grades=grades)


def text_of(error: BaseException) -> str:
    """The traceback, starting at the first frame outside this package."""
    trace, ours = error.__traceback__, os.path.dirname(__file__)  # noqa: PTH120
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-MAX_ERROR_CHARS:]


def checked(value: object) -> dict[str, object]:
    """Converts a grader's result to a reply: a finite number, or an error that describes the result.

    If the result is a mapping, as verl's reward functions return, only its `score` is used.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            return {"error": f"the grader returned a dict without `score`: {repr(value)[:200]}"}
        value = value["score"]
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or PyTorch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        what = f"{repr(value)[:200]} of type {type(value).__name__}"
        return {"error": f"the grader returned {what}, not a number"}
    score = float(value)
    return {"score": score} if math.isfinite(score) else {"error": f"the grader returned {score}"}


@dataclass(frozen=True, slots=True)
class LoadedGrader:
    """A grader as the grading process calls it."""

    grade: Call
    takes_groups: bool  # `grade` must be called with all responses to one prompt
    answer_of: Callable[[str], str | None] | None  # see `rlctl.registry.Part`


def load_grader(name: str, params: dict[str, Any]) -> LoadedGrader:
    """Imports a grader and checks that it can be called.

    Raises:
        UsageError: the grader does not exist or cannot be imported (with file and line), `params` are not
            valid for it, or rlctl has no value for a parameter without default.
    """
    part = GRADERS.part(name)
    function = part.function
    fixed: dict[str, object] = {}
    if params or part.params:
        from rlctl.spec.base import param_problems, params_of  # imports Pydantic

        for problem in param_problems(GRADERS, name, "reward.params", params):
            raise UsageError(problem.what, where=problem.key, fix=problem.fix)
        fixed = {"params": params_of(part, params)}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        fix = "wrap it in a function of yours"
        raise UsageError("its parameters cannot be read", where=name, fix=fix) from None
    if "completions" in parameters:
        return LoadedGrader(_of_lists(function, list(parameters.values()), fixed), True, part.answer_of)
    call = _bound(function, list(parameters.values()), name, fixed)
    return LoadedGrader(lambda samples: [call(sample) for sample in samples], False, part.answer_of)


def _bound(
    function: Callable[..., Any], parameters: list[inspect.Parameter], name: str, fixed: dict[str, object]
) -> Callable[[Sample], object]:
    """Wraps `function` as a function of one sample; unknown parameters keep their defaults."""
    positional: list[str] = []
    named: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            named += [known for known in _KNOWN if known not in {"solution_str", *named, *positional}]
        elif parameter.kind is parameter.VAR_POSITIONAL or parameter.name in fixed:
            continue
        elif parameter.name in {*_KNOWN, _NAMED_ONLY}:
            (positional if parameter.kind is parameter.POSITIONAL_ONLY else named).append(parameter.name)
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"rlctl has no value for the parameter `{parameter.name}`",
                where=name,
                fix=f"give it a default, or use {', '.join(_KNOWN)}, {_NAMED_ONLY}",
            )

    def call(sample: Sample) -> object:
        names = (*_KNOWN, _NAMED_ONLY)
        given = {known: getattr(sample, known.replace("solution_str", "response")) for known in names}
        values = [given[known] for known in positional]
        return _result(function(*values, **{known: given[known] for known in named}, **fixed))

    return call


def _of_lists(
    function: Callable[..., Any], parameters: list[inspect.Parameter], fixed: dict[str, object]
) -> Call:
    """Wraps `function` to be called as in TRL: lists of prompts, completions and columns, by keyword."""
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    needed = {one.name for one in parameters if one.name in names and one.default is one.empty}
    annotation = str(next(one.annotation for one in parameters if one.name == "completions"))
    as_messages = "dict" in annotation.lower() or ("str" not in annotation and _reads_messages(function))

    def call(samples: Sequence[Sample]) -> Sequence[object]:
        prompts: list[Any] = [sample.prompt for sample in samples]
        completions: list[Any] = [sample.response for sample in samples]
        if as_messages:
            asked = (sample.messages or [{"role": "user", "content": sample.prompt}] for sample in samples)
            prompts = [[dict(message) for message in messages] for messages in asked]
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        truths = [sample.ground_truth for sample in samples]
        given: dict[str, object] = {name: truths for name in _GROUND_TRUTHS if name in names}
        columns = dict.fromkeys(name for sample in samples for name in sample.extra_info)
        given |= {name: [sample.extra_info.get(name) for sample in samples] for name in columns}
        given |= {"data_source": [sample.data_source for sample in samples], "ground_truth": truths}
        given |= {"prompts": prompts, "completions": completions, **_OF_TRAINER, **fixed}
        if all(sample.response_ids for sample in samples):
            given["completion_ids"] = [list(sample.response_ids) for sample in samples]
        if missing := sorted(needed - given.keys()):
            what = f"the reward function needs {', '.join(missing)}, the data has {', '.join(columns)}"
            raise ValueError(f"{what}; give a parameter a default to make it optional")
        values = _result(function(**{k: v for k, v in given.items() if takes_all or k in names}))
        found = list(values) if hasattr(values, "__iter__") and not isinstance(values, str) else []
        if len(found) != len(samples):
            raise ValueError(f"it must return one number per completion, not {repr(values)[:200]}")
        return found

    return call


def _reads_messages(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function that it calls, contains the constant "content": a key of messages."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of functools.partial
    inner = inner if hasattr(inner, "__code__") else type(inner).__call__  # a callable object
    waiting: list[CodeType] = [inner.__code__] if hasattr(inner, "__code__") else []
    known, seen = getattr(inner, "__globals__", {}), set()
    while waiting:
        code = waiting.pop()
        if "content" in code.co_consts:
            return True
        if code not in seen:
            seen.add(code)
            called = (known.get(name) for name in code.co_names)
            waiting += [one.__code__ for one in called if inspect.isfunction(one)]
            waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _result(value: object) -> Any:
    """The value itself, or the result of a coroutine."""
    import asyncio

    return asyncio.run(value) if inspect.iscoroutine(value) else value


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
