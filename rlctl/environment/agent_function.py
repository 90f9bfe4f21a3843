"""An environment that is an agent: any program that speaks with the policy as with OpenAI's API.

    async def agent(task, base_url, api_key) -> float | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        …                                    # any SDK or command-line agent, tools, several conversations
        return score                         # None: the graders score the last reply

It may also be a plain `def`, another object that can be called, the method `run` of a class that is created
without arguments, or a command line.
`task` holds the row's columns, with its messages as `prompt`. A further parameter `ground_truth` receives the
row's ground truth. Each episode's function runs alone in a worker process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlctl.environment import command_agent
from rlctl.environment.endpoint import Endpoint
from rlctl.environment.instances import Instances
from rlctl.environment.protocol import EnvironmentContext, EnvironmentFault, Outcome
from rlctl.environment.recorded_chat import RecordedChat
from rlctl.environment.renderer import ChatRenderer
from rlctl.environment.user_class import is_alone, sharing_of
from rlctl.errors import UsageError
from rlctl.user_code import call_problem, command_words

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.protocol import Sampler


class _Agent:
    """An `Environment` that runs an agent per episode, in a worker process.

    Args:
        file, name: what the worker process imports.
        num_sharing: episodes that share a process.
    """

    def __init__(self, file: str, name: str, context: EnvironmentContext, num_sharing: int = 1) -> None:
        self._sampling = context.sampling
        self._renderer = ChatRenderer(context.tokenizer, context.chat_template_kwargs)
        variables = context.spec.variables
        is_fresh = context.spec.fresh_process
        self._instances = Instances(file, name, variables, is_fresh=is_fresh, num_sharing=num_sharing)

    def close(self) -> None:
        """Ends all processes."""
        self._instances.close()

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """See `Environment.run`.

        What the agent raises is a fault, unless a limit was reached before, or it is an error of values
        after the policy spoke (`ValueError`, `LookupError`, as on text that it cannot read).
        """
        chat = RecordedChat(self._renderer, sampler, task, self._sampling)
        started = self._instances.instance(is_alone=is_alone(sampler))
        async with started as instance, Endpoint(chat) as endpoint:
            sampler.watch(instance.pid)
            row = {**task.extra_info, "prompt": list(task.messages), "data_source": task.data_source}
            arguments = self._arguments(row, task.ground_truth, endpoint)
            call = instance.call(self._method, arguments, timeout_s=None, most=1000)
            returned = await chat.result_of(asyncio.ensure_future(call))
            return _outcome(chat, returned)  # a fault ends the process

    _method = "__call__"

    def _arguments(self, row: dict[str, Any], ground_truth: str, endpoint: Endpoint) -> dict[str, Any]:
        """What the agent is called with."""
        raise NotImplementedError


class AgentFunction(_Agent):
    """An agent that is a function, another object that can be called, or a class with `run`: a new instance.

    Raises:
        UsageError: the agent takes other arguments, yields values, or its class needs arguments.
    """

    def __init__(self, name: str, agent: Callable[..., Any], context: EnvironmentContext) -> None:
        file, _, function_name = name.rpartition(":")
        function = agent
        self._method = "__call__"
        if inspect.isclass(agent):
            problem = call_problem(agent)
            if problem:
                fix = "give the arguments of its constructor defaults"
                raise UsageError(
                    f"an agent's class is created without arguments: {problem}", where=name, fix=fix
                )
            function = _bound_run(agent)
            function_name = "run"
            self._method = "run"
        code = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
        if any(map(inspect.isgeneratorfunction, (function, code))) or inspect.isasyncgenfunction(code):
            raise UsageError(
                "an agent returns its reward, and does not yield", where=name, fix="use `return`"
            )
        self._wants_truth = "ground_truth" in inspect.signature(function).parameters
        given = dict.fromkeys(["task", "base_url", "api_key", *["ground_truth"] * self._wants_truth])
        problem = call_problem(function, **given)
        if problem:
            fix = f"def {function_name}(task, base_url, api_key) -> float | None, or with async"
            raise UsageError(f"an agent is called with three arguments: {problem}", where=name, fix=fix)
        super().__init__(file, name.rpartition(":")[2], context, sharing_of(agent, context.spec))

    def _arguments(self, row: dict[str, Any], ground_truth: str, endpoint: Endpoint) -> dict[str, Any]:
        arguments = {"task": row, "base_url": endpoint.base_url, "api_key": endpoint.api_key}
        return arguments | ({"ground_truth": ground_truth} if self._wants_truth else {})


class CommandAgent(_Agent):
    """An agent that is a command line, see `rlctl.environment.command_agent`.

    Args:
        line: the program and its arguments, as a shell would split them; no shell runs.
        shows_truth: the task has the ground truth.

    Raises:
        UsageError: there is no such program.
    """

    def __init__(self, line: str, *, shows_truth: bool, context: EnvironmentContext) -> None:
        fix = "write command:PROGRAM ARGUMENTS, as command:./agent.sh or command:python agent.py"
        self._command = command_words(line, where="environment.name", fix=fix)
        self._shows_truth = shows_truth
        super().__init__(command_agent.__file__, "run", context)

    def _arguments(self, row: dict[str, Any], ground_truth: str, endpoint: Endpoint) -> dict[str, Any]:
        return {
            "task": row | ({"ground_truth": ground_truth} if self._shows_truth else {}),
            "base_url": endpoint.base_url,
            "root_url": endpoint.root_url,
            "api_key": endpoint.api_key,
            "command": self._command,
        }


def _bound_run(kind: type) -> Callable[..., Any]:
    """The class's `run` with the signature that it has on an instance, without creating one."""
    run = inspect.getattr_static(kind, "run")
    if isinstance(run, staticmethod | classmethod):
        return kind.run  # type: ignore[attr-defined, no-any-return]
    return run.__get__(object())  # type: ignore[no-any-return]


def _outcome(chat: RecordedChat, returned: dict[str, Any]) -> Outcome:
    """The outcome of an agent that has ended."""
    reward = returned.get("number")
    ended_by = chat.limit
    if "error" in returned and not ended_by:
        if not chat.reply or chat.is_refused or "of_values" not in returned:
            raise EnvironmentFault(f"the agent raised {returned['error']}")
        ended_by = "parse_error"  # what the policy wrote must not exclude the episode
    if "text" in returned and (reward is None or not math.isfinite(reward)):
        raise EnvironmentFault(f"the agent returned {returned['text']}, neither a finite number nor None")
    is_cut = chat.reply is not None and chat.reply.is_cut
    return Outcome(
        response=chat.reply.content if chat.reply else "",
        reward=0.0 if "error" in returned else reward,
        stop_reason=ended_by or ("max_tokens" if is_cut else "completed"),
        messages=chat.messages,
        metrics=chat.counts,
    )
