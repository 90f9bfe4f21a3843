"""Grading process: reads numbered requests and writes numbered replies, one JSON object per line.

`python -P -m rlctl.reward.worker GRADER` runs a server that forks one for each message on its standard
input, a socket (`rlctl.reward.fork_server`); `rlctl.reward.pool` enforces the deadlines. A fork is two
processes. The first one is a supervisor: when the pool or the second process ends, it ends the second process
and all processes that it started. The second one grades.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import CodeType
from typing import Any

from rlctl.errors import UsageError
from rlctl.extras import missing_package
from rlctl.lazy import compile_patterns
from rlctl.registry import GRADERS
from rlctl.reward.fork_server import receive, send
from rlctl.reward.pool import is_ours
from rlctl.reward.protocol import Sample
from rlctl.reward.together import MOST_AT_ONCE, EventLoop, Outcome, TookTooLong, in_threads, is_async
from rlctl.supervision import supervise
from rlctl.user_code import is_file_function

MEMORY_LIMIT_BYTES = 4 << 30
#: Maximum characters of an error that are sent: the last ones.
MAX_ERROR_CHARS = 4000
#: Parameters of a function of one response: fields of `Sample`, and verl's name of the response.
_KNOWN = ("response", "solution_str", "ground_truth", "prompt", "data_source", "extra_info", "messages")
#: And one that a function must name: `**kwargs` does not get it.
_NAMED_ONLY = "response_ids"
#: Parameters of TRL's reward functions that are not columns of the data; logged values are discarded.
_OF_TRAINER = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
#: Parameters that get the ground truth if the data has no column of that name.
_GROUND_TRUTHS = ("solution", "answer")

#: Samples of one call → what the function returns, which may have to be awaited.
Begin = Callable[[Sequence[Sample]], Any]
#: That result, awaited, and the number of samples → one value per sample.
Values = Callable[[Any, int], Sequence[object]]


def main(preloaded: str) -> None:
    """Forks a supervisor for each message, until the socket is closed.

    Args:
        preloaded: the built-in grader that is loaded and called once before; empty: none.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if preloaded:
        with contextlib.suppress(Exception):  # it occurs again, and is reported, in the fork
            _warm_up(load_grader(preloaded, {}))
        compile_patterns()
    gc.collect()
    gc.freeze()  # collections in the forks would copy the memory of all objects
    while True:
        message, descriptors = receive(control)
        if message is None:
            return
        if "end" in message:
            _end(message["end"])
            send(control, {})
            continue
        pid = os.fork()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        send(control, {"pid": pid})
    control.close()
    _become(message, *descriptors)


def _end(pid: int) -> None:
    """Ends a fork and its process group, and removes it from the table of processes."""
    for kill in (os.killpg, os.kill):  # the group exists once the fork has run
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _become(message: Mapping[str, Any], requests: int, replies: int, directory: int) -> None:
    """In a fork: grades until the requests end, which happens when the pool's process ends."""
    os.setsid()
    os.fchdir(directory)
    os.close(directory)
    os.environ.clear()
    os.environ.update(message["environment"])
    tempfile.tempdir = None  # its environment names another one
    sys.argv[1:] = [message["grader"]]
    os.dup2(2, 1)  # the grader's output cannot mix with the replies
    code = supervise(partial(_serve, message["grader"], message["params"], requests, replies), requests)
    if code is not None:
        os.write(replies, json.dumps({"ended": code}).encode() + b"\n")
    os._exit(0)


def _warm_up(grader: LoadedGrader) -> None:
    """Runs the lazy imports of a built-in grader."""
    grader.begin([Sample("\\boxed{x + 1}", "\\frac{x}{2}")])


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
    if is_ours(grader):
        with contextlib.suppress(Exception):  # it occurs again, and is reported, when grading
            _warm_up(loaded)
    about = {"takes_groups": loaded.takes_groups, "reads_answers": loaded.answer_of is not None}
    at_once = MOST_AT_ONCE if loaded.is_async else 1
    reply(0, pid=me, asks=loaded.asks, at_once=at_once, **about)
    loop = EventLoop()
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "answer_of" in asked:
                answer = None
                missing = None
                try:
                    answer = loaded.answer_of(asked["answer_of"]) if loaded.answer_of else None
                except Exception as error:  # the score is valid without an answer
                    missing = _module_of_an_extra(error)
                reply(asked["number"], answer=answer, missing=missing)
            elif "calls" in asked:
                _grade_together(loaded, loop, asked, partial(reply, asked["number"]))
            else:
                missing = None
                samples = [Sample(**one) for one in asked["samples"]]
                started = time.monotonic()
                computed = time.process_time()
                try:
                    found: Any = loop.result(loaded.begin(samples))
                except Exception as error:
                    found = error
                    missing = _module_of_an_extra(error) if is_ours(grader) else None
                elapsed_s = time.monotonic() - started
                waited_s = max(0.0, elapsed_s - (time.process_time() - computed))
                grades = _grades_of(loaded, found, len(samples))
                reply(asked["number"], grades=grades, missing=missing, waited_s=waited_s)


def _grade_together(
    loaded: LoadedGrader, loop: EventLoop, asked: Mapping[str, Any], reply: Callable[..., None]
) -> None:
    """Makes several calls at the same time, and replies to each when it is done."""
    calls = [[Sample(**one) for one in samples] for samples in asked["calls"]]

    def tell(outcome: Outcome) -> None:
        call, found = outcome
        grades = _grades_of(loaded, found, len(calls[call]))
        reply(call=call, grades=grades)

    begins: list[Callable[[], Any]] = [partial(loaded.begin, samples) for samples in calls]
    if loaded.is_async:
        loop.together(begins, asked["deadline_s"], tell)
    else:
        in_threads(begins, asked["threads"], tell)


def _grades_of(loaded: LoadedGrader, found: Any, count: int) -> list[dict[str, object]]:
    """What is replied for the samples of one call, of what the function returned or raised."""
    if isinstance(found, TookTooLong):
        kind = "busy" if found.is_busy else "time-out"
        return [{"error": "the grading took longer than its time limit", "kind": kind}] * count
    try:
        if isinstance(found, Exception):
            raise found
        # None from a TRL function means that it does not grade the sample; from others it is an error.
        skipped: dict[str, object] = {"error": "the grader returned None", "kind": "inapplicable"}
        values = loaded.values(found, count)
        return [skipped if loaded.takes_groups and v is None else checked(v) for v in values]
    except MemoryError:
        text = f"the grading needs more than {MEMORY_LIMIT_BYTES >> 30} GiB"
        return [{"error": text, "kind": "memory"}] * count
    except Exception as error:
        return [{"error": text_of(error)}] * count


def _module_of_an_extra(error: Exception) -> str | None:
    """The module of rlctl's extras whose import failed; None: another error."""
    missing = missing_package(error)
    return missing.module if missing else None


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
        message = f"{repr(value)[:200]} of type {type(value).__name__}"
        return {"error": f"the grader returned {message}, not a number"}
    score = float(value)
    return {"score": score} if math.isfinite(score) else {"error": f"the grader returned {score}"}


@dataclass(frozen=True, slots=True)
class LoadedGrader:
    """A grader as the grading process calls it."""

    begin: Begin
    values: Values
    takes_groups: bool  # `begin` must be called with all responses to one prompt
    is_async: bool  # the function itself is `async`
    answer_of: Callable[[str], str | None] | None  # see `rlctl.registry.Part`
    #: parameters without a default that the row must provide: `ground_truth`, and columns by name
    asks: tuple[str, ...] = ()


def load_grader(name: str, params: dict[str, Any]) -> LoadedGrader:
    """Imports a grader and checks that it can be called.

    Raises:
        UsageError: the grader does not exist or cannot be imported (with file and line), `params` are not
            valid for it, or rlctl has no value for a parameter without default.
    """
    registered = GRADERS.part(name)
    function = registered.function
    fixed: dict[str, object] = {}
    if params or registered.params:
        from rlctl.run_spec.base import param_problems, params_of  # imports Pydantic

        for problem in param_problems(GRADERS, name, "reward.params", params):
            raise UsageError(problem.what, where=problem.key, fix=problem.fix)
        fixed = {"params": params_of(registered, params)}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        fix = "wrap it in a function of yours"
        raise UsageError("its parameters cannot be read", where=name, fix=fix) from None
    if "completions" in parameters:
        listed = _of_lists(function, list(parameters.values()), fixed)
        given = (True, is_async(function), registered.answer_of, _asked(parameters, fixed))
        return LoadedGrader(listed, _one_per_completion, *given)
    call = _bound(function, list(parameters.values()), name, fixed)
    given = (False, is_async(function), registered.answer_of, _asked(parameters, fixed))
    return LoadedGrader(lambda samples: call(samples[0]), lambda value, _: [value], *given)


def _asked(parameters: Mapping[str, inspect.Parameter], fixed: Mapping[str, object]) -> tuple[str, ...]:
    """Parameters that need a value of the row, beside its prompt, its data source and the response."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {p.name for p in parameters.values() if p.default is p.empty and p.kind not in variable}
    provided = {*_KNOWN, _NAMED_ONLY, *_OF_TRAINER, *fixed, "prompts", "completions", "completion_ids"}
    return tuple(sorted(required - (provided - {"ground_truth"})))


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
        return function(*values, **{known: given[known] for known in named}, **fixed)

    return call


def _of_lists(
    function: Callable[..., Any], parameters: list[inspect.Parameter], fixed: dict[str, object]
) -> Begin:
    """Wraps `function` to be called as in TRL: lists of prompts, completions and columns, by keyword."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.name in names and parameter.default is parameter.empty
    }
    annotation = str(
        next(parameter.annotation for parameter in parameters if parameter.name == "completions")
    )
    as_messages = "dict" in annotation.lower() or ("str" not in annotation and _reads_messages(function))

    def call(samples: Sequence[Sample]) -> object:
        prompts: list[Any] = [sample.prompt for sample in samples]
        completions: list[Any] = [sample.response for sample in samples]
        if as_messages:
            asked = (sample.messages or [{"role": "user", "content": sample.prompt}] for sample in samples)
            prompts = [[dict(message) for message in messages] for messages in asked]
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        truths = [sample.ground_truth for sample in samples]
        arguments: dict[str, object] = {name: truths for name in _GROUND_TRUTHS if name in names}
        columns = dict.fromkeys(name for sample in samples for name in sample.extra_info)
        arguments |= {name: [sample.extra_info.get(name) for sample in samples] for name in columns}
        arguments |= {"data_source": [sample.data_source for sample in samples], "ground_truth": truths}
        arguments |= {"prompts": prompts, "completions": completions, **_OF_TRAINER, **fixed}
        if all(sample.response_ids for sample in samples):
            arguments["completion_ids"] = [list(sample.response_ids) for sample in samples]
        missing = sorted(needed - arguments.keys())
        if missing:
            what = f"the reward function needs {', '.join(missing)}, the data has {', '.join(columns)}"
            raise ValueError(f"{what}; give a parameter a default to make it optional")
        return function(**{k: v for k, v in arguments.items() if takes_all or k in names})

    return call


def _one_per_completion(values: Any, count: int) -> list[object]:
    """The numbers that a function of lists returned; raises `ValueError` if they are not `count`."""
    is_ordered = hasattr(values, "__iter__") and not isinstance(values, str | Mapping | Set)
    found = list(values) if is_ordered else []
    if len(found) != count:
        what = f"it returned {len(found)} numbers" if found else f"it returned {repr(values)[:200]}"
        raise ValueError(f"{what} for {count} completions: it must return one number per completion")
    return found


def _reads_messages(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function that it calls, contains the constant "content": a key of messages."""
    inner = inspect.unwrap(getattr(function, "func", function))  # of functools.partial
    inner = inner if hasattr(inner, "__code__") else type(inner).__call__  # a callable object
    waiting: list[CodeType] = [inner.__code__] if hasattr(inner, "__code__") else []
    known = getattr(inner, "__globals__", {})
    seen = set()
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


if __name__ == "__main__":
    main(sys.argv[1])
