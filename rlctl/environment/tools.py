"""The environment of `environment.tools`: the policy may call tools, and no class is needed."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlctl.environment.instances import Instances, TimedOut
from rlctl.environment.protocol import EnvironmentContext, EnvironmentFault, Outcome
from rlctl.environment.renderer import ChatRenderer
from rlctl.environment.tool_arguments import arguments_of
from rlctl.environment.toolbox import (
    MCP,
    PYTHON,
    SEARCH,
    TOOLBOX,
    ToolSettings,
    served_tools,
    texts_of,
    toolbox_class,
)
from rlctl.environment.user_class import OWN_METHODS, PlayedEpisode, UserClass, tool_schemas
from rlctl.errors import UsageError, first_line
from rlctl.extras import require
from rlctl.processes import is_this_machine
from rlctl.run_spec.base import seconds
from rlctl.user_code import absolute_name, command_words, is_file_function

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.protocol import Sampler
    from rlctl.run_spec.environment import EnvironmentSpec

_KEY = "environment.tools"
#: Share of `environment.tool_timeout` that a call of `python` may take, so that the process outlives it.
_SHARE = 0.5
#: Seconds in which the tools of an episode end themselves.
_CLOSE_S = 5.0


class ToolEnvironment(UserClass):
    """An `Environment` without a class: the reply without a tool call ends the episode, and graders score it.

    Raises:
        UsageError: a tool cannot be imported, has no schema, or there are two of one name.
        EnvironmentFailure: a package is missing, or this machine cannot confine programs.
    """

    def __init__(self, context: EnvironmentContext) -> None:
        self._spec = context.spec
        settings = _settings(context)
        _check_names(settings)
        self.tools = _schemas(settings)
        kind = toolbox_class(settings, loads=False)
        of_servers = {name for tools in settings.of_servers.values() for name in tools}
        self._arguments = {
            name: None if name in of_servers else arguments_of(getattr(kind, name))
            for name in (tool["function"]["name"] for tool in self.tools)
        }
        self._responds = self._rewards = False
        self._wanted = inspect.Signature().parameters
        self._renderer = ChatRenderer(context.tokenizer, context.chat_template_kwargs)
        self._instances: Instances = Instances(
            TOOLBOX,
            settings.as_text(),
            context.spec.variables,
            is_fresh=context.spec.fresh_process,
        )

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """See `Environment.run`."""
        async with self._instances.instance() as instance:
            sampler.watch(instance.pid)
            try:
                return await PlayedEpisode(self, instance, sampler).run(task)
            finally:
                if instance.is_alive:
                    with contextlib.suppress(EnvironmentFault, TimedOut):
                        await instance.call("_close", {}, timeout_s=_CLOSE_S, most=1000)


def described_tools(spec: EnvironmentSpec) -> list[dict[str, Any]]:
    """The schemas that prompts show."""
    names = [name for name in spec.tools if name.startswith(MCP)]
    return _schemas(ToolSettings(spec.tools, dict.fromkeys(names, ())))


def _settings(context: EnvironmentContext) -> ToolSettings:
    """What the tools need; checks what calls would miss.

    Raises:
        UsageError: a name is none of a tool, or the corpus cannot be read.
    """
    spec = context.spec
    params = context.params
    if not spec.tools:
        fix = "environment.tools=[tools.py:search, python]"
        raise UsageError("the environment `tools` has no tools", where=_KEY, fix=fix)
    of_servers: dict[str, list[str]] = {}
    for name in spec.tools:
        if name.startswith(MCP):
            of_servers[name] = [tool["function"]["name"] for tool in _served(name)]
        elif name == PYTHON:
            _check_python(params.memory_mb)
        elif name == SEARCH:
            _check_corpus(params.corpus)
        elif not is_file_function(name):
            fix = (
                f"write file.py:function, {PYTHON}, {SEARCH}, or mcp:COMMAND or mcp:http://127.0.0.1:PORT/mcp"
            )
            raise UsageError(f"there is no tool {name}", where=_KEY, fix=fix)
    return ToolSettings(
        names=[absolute_name(name) for name in spec.tools],
        of_servers=of_servers,
        corpus=str(Path(params.corpus).absolute()) if params.corpus else "",
        num_results=params.num_results,
        timeout_s=_SHARE * seconds(spec.tool_timeout),
        memory_mb=params.memory_mb,
        max_output=spec.max_tool_output,
    )


def _check_python(memory_mb: int) -> None:
    from rlctl.reward.sandbox.run_program import Limits, check_sandbox

    check_sandbox(Limits(10.0, memory_mb))


def _check_corpus(corpus: str) -> None:
    where = "environment.params.corpus"
    fix = "a file of JSON lines or Parquet with the column `text`, or of text"
    require("bm25s")
    if not corpus or not Path(corpus).is_file():
        raise UsageError(
            f"the tool `search` needs a corpus: {corpus or 'none'} is no file", where=where, fix=fix
        )
    try:
        texts_of(Path(corpus))
    except (ValueError, OSError) as error:
        raise UsageError(f"the corpus cannot be read: {first_line(error)}", where=where, fix=fix) from error


@cache
def _served(name: str) -> list[dict[str, Any]]:
    """The schemas of a server of tools.

    Raises:
        UsageError: it is on another machine, is no program, or does not answer.
    """
    require("mcp")
    target = name.removeprefix(MCP)
    fix = "write mcp:COMMAND, as mcp:python server.py, or mcp:http://127.0.0.1:PORT/mcp"
    if "://" in target.split(" ")[0]:
        address = urlsplit(target)
        if address.scheme != "http" or not is_this_machine(address.hostname or ""):
            raise UsageError("a server of tools must be on this machine", where=f"{_KEY}: {name}", fix=fix)
    else:
        command_words(target, where=f"{_KEY}: {name}", fix=fix)
    try:
        tools = served_tools(name)
    except ConnectionError as error:
        what = f"the server of tools does not answer: {first_line(error)}"
        raise UsageError(what, where=f"{_KEY}: {name}", fix=fix) from error
    if not tools:
        raise UsageError("the server has no tools", where=f"{_KEY}: {name}", fix=fix)
    return tools


def _schemas(settings: ToolSettings) -> list[dict[str, Any]]:
    functions = toolbox_class(ToolSettings(settings.names), loads=False)
    own = tool_schemas(functions)
    for name in settings.names:
        if is_file_function(name) and not inspect.isfunction(getattr(functions, name.rpartition(":")[2])):
            raise UsageError(
                "a tool is a function", where=f"{_KEY}: {name}", fix="write `def` or `async def`"
            )
    return own + [schema for server in settings.of_servers for schema in _served(server)]


def _check_names(settings: ToolSettings) -> None:
    names = [name.rpartition(":")[2] for name in settings.names if not name.startswith(MCP)]
    names += [tool for tools in settings.of_servers.values() for tool in tools]
    for name, count in Counter(names).items():
        if count > 1 or name in (*OWN_METHODS, "done", "reward") or name.startswith("_"):
            what = f"{count} tools are called {name}" if count > 1 else f"a tool cannot be called {name}"
            raise UsageError(what, where=_KEY, fix="rename it")
