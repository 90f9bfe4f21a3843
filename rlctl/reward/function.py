"""Loads graders and passes their parameters by name. No torch, because grading processes import this."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from rlctl.errors import UsageError, in_words
from rlctl.registry import GRADERS
from rlctl.reward.protocol import Sample

#: Parameters of a function of one response: fields of `Sample`, and verl's name of the response.
_KNOWN = ("response", "solution_str", "ground_truth", "prompt", "data_source", "extra_info", "messages")
#: Parameters of TRL's reward functions that are not columns of the data; logged values are discarded.
_OF_TRAINER = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}
#: Parameters that get the ground truth if the data has no column of that name.
_GROUND_TRUTHS = ("solution", "answer")

#: Samples → one value per sample.
Call = Callable[[Sequence[Sample]], Sequence[object]]


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
    function, values = part.function, None
    if params and part.params is None:
        raise UsageError(f"{name} takes no parameters", where="reward.params", fix="leave them out")
    if part.params is not None:
        from pydantic import ValidationError

        try:
            values = part.params.model_validate(params or {})
        except ValidationError as error:
            known = f"the parameters of {name} are {', '.join(part.params.model_fields)}"
            [first, *_] = error.errors()
            where = ".".join(["reward.params", *map(str, first["loc"])])
            raise UsageError(in_words(first), where=where, fix=known) from error
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        fix = "wrap it in a function of yours"
        raise UsageError("its parameters cannot be read", where=name, fix=fix) from None
    if "completions" in parameters:
        return LoadedGrader(_of_lists(function, list(parameters.values())), True, part.answer_of)
    call = _bound(function, list(parameters.values()), name, {"params": values} if part.params else {})
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
        elif parameter.name in _KNOWN:
            (positional if parameter.kind is parameter.POSITIONAL_ONLY else named).append(parameter.name)
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"rlctl has no value for the parameter `{parameter.name}`",
                where=name,
                fix=f"give it a default, or use {', '.join(_KNOWN)}",
            )

    def call(sample: Sample) -> object:
        given = {known: getattr(sample, known.replace("solution_str", "response")) for known in _KNOWN}
        values = [given[known] for known in positional]
        return _result(function(*values, **{known: given[known] for known in named}, **fixed))

    return call


def _of_lists(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Call:
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
        given |= {"prompts": prompts, "completions": completions, **_OF_TRAINER}
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
    return asyncio.run(value) if inspect.iscoroutine(value) else value
