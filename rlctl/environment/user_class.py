"""An environment that is a class in a user's file, as TRL's `environment_factory` takes it.

    class Calculator:
        def reset(self, expression: str) -> str | None: …      # columns of the row, by name
        def compute(self, expression: str) -> str: …           # every other public method is a tool
        def get_reward(self) -> float: …                       # optional, added to the graders' score; or an
                                                               # attribute `reward`, as in TRL's examples

Two names are rlctl's own: `respond(text) -> str | None` speaks as the user after a reply without a tool
call (None ends the episode), and the attribute `done` ends it after a tool call. Methods may be async.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlctl.environment.conversation import Conversation
from rlctl.environment.instances import (
    Instance,
    Instances,
    LocalInstance,
    LocalInstances,
    SharedInstance,
    TimedOut,
)
from rlctl.environment.protocol import EnvironmentContext, EnvironmentFault, LimitReached, Outcome
from rlctl.environment.renderer import ChatRenderer
from rlctl.environment.tool_arguments import arguments_of, problem_of
from rlctl.errors import UsageError, first_line
from rlctl.registry import is_builtin
from rlctl.run_spec.base import seconds
from rlctl.tool_calls import ToolCall

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.protocol import Sampler
    from rlctl.run_spec.environment import EnvironmentSpec

#: Public methods that are not tools.
OWN_METHODS = ("reset", "get_reward", "respond")
_GONE = "the environment does not answer any more: its process was ended by an earlier call"


def tool_schemas(kind: type) -> list[dict[str, Any]]:
    """Schemas of a class's tools: its public functions, inherited and static ones too.

    Raises:
        UsageError: a tool lacks a type hint, or a description of an argument.
    """
    from transformers.utils import get_json_schema

    found = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in OWN_METHODS:
            continue
        try:
            schema = get_json_schema(method)
        except Exception as error:  # its own errors, and those of reading annotations
            message = f"tool {name} has no schema: {first_line(error)}"
            fix = "give it type hints and a docstring with an `Args:` section that describes every argument"
            raise UsageError(message, where=f"{kind.__name__}.{name}", fix=fix) from error
        schema["function"]["parameters"]["properties"].pop("self", None)
        found.append(schema)
    return found


def sharing_of(part: Any, spec: EnvironmentSpec) -> int:
    """Episodes that share a process: `environment.episodes_per_process`.

    Raises:
        UsageError: more than one, and a method (or the agent) is not `async`, and would hold the others.
    """
    if spec.episodes_per_process == 1:
        return 1
    methods = {"the agent": part if inspect.isroutine(part) else type(part).__call__}
    if inspect.isclass(part):
        members = inspect.getmembers(part, inspect.isfunction)
        methods = {name: method for name, method in members if not name.startswith("_")}
    plain = [name for name, method in methods.items() if not inspect.iscoroutinefunction(method)]
    if plain:
        what = f"episodes can share a process only if all methods are async, and {', '.join(plain)} is not"
        fix = "make it `async`, or leave environment.episodes_per_process at 1"
        raise UsageError(what, where="environment.episodes_per_process", fix=fix)
    return spec.episodes_per_process


def is_alone(sampler: Sampler) -> bool:
    """Whether the episode shall share no process, because one that it shared has ended."""
    return bool(getattr(sampler, "is_alone", False))


class UserClass:
    """An `Environment` whose instances live alone in worker processes.

    Attributes:
        tools: schemas of the tools.

    Raises:
        UsageError: the class has no `reset`, or a tool has no schema.
    """

    def __init__(self, name: str, kind: type, context: EnvironmentContext) -> None:
        if not callable(getattr(kind, "reset", None)):
            fix = "define `def reset(self, **row) -> str | None`"
            raise UsageError("the class has no method `reset`", where=name, fix=fix)
        self._spec = context.spec
        self.tools = tool_schemas(kind)
        self._arguments = {
            name: arguments_of(getattr(kind, name))
            for name in (tool["function"]["name"] for tool in self.tools)
        }
        self._responds, self._rewards = (callable(getattr(kind, x, None)) for x in ("respond", "get_reward"))
        self._wanted = inspect.signature(kind.reset).parameters  # type: ignore[attr-defined]
        self._renderer = ChatRenderer(context.tokenizer, context.chat_template_kwargs)
        if is_builtin(kind):
            self._instances: Instances | LocalInstances = LocalInstances(kind)
        else:
            file, _, class_name = name.rpartition(":")
            if not file:  # of an installed package
                file = inspect.getfile(kind)
                class_name = kind.__qualname__
            given = (file, class_name, context.spec.variables)
            sharing = sharing_of(kind, context.spec)
            self._instances = Instances(*given, is_fresh=context.spec.fresh_process, num_sharing=sharing)

    def close(self) -> None:
        """Ends all processes."""
        self._instances.close()

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """See `Environment.run`."""
        async with self._instances.instance(is_alone=is_alone(sampler)) as instance:
            if instance.pid:
                sampler.watch(instance.pid)
            return await PlayedEpisode(self, instance, sampler).run(task)

    def row_of(self, task: Task) -> dict[str, Any]:
        """The columns that `reset` names; with `**row` all but the ground truth."""
        row = {**task.extra_info, "prompt": list(task.messages), "data_source": task.data_source}
        takes_all = any(one.kind is one.VAR_KEYWORD for one in self._wanted.values())
        chosen = {key: value for key, value in row.items() if takes_all or key in self._wanted}
        if "ground_truth" in self._wanted:
            chosen["ground_truth"] = task.ground_truth
        return chosen


class PlayedEpisode:
    """One conversation with one instance."""

    def __init__(
        self,
        environment: UserClass,
        instance: Instance | SharedInstance | LocalInstance,
        sampler: Sampler,
    ) -> None:
        self._of = environment
        self._instance = instance
        self._sampler = sampler
        self._num_calls = self._num_errors = 0

    async def run(self, task: Task) -> Outcome:
        """See `Environment.run`."""
        started = await self._called("reset", self._of.row_of(task))
        if "error" in started:  # the policy has not spoken yet
            raise EnvironmentFault(f"reset raised {started['error']}")
        more = started.get("text") or ""
        self._conversation = Conversation(self._of._renderer, self._sampler, task, self._of.tools, more)
        stop_reason = await self._spoken()
        reward = await self._reward()
        messages = self._conversation.messages
        last = [message["content"] for message in messages if message["role"] == "assistant"]
        counts = {"num_tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        counts["seconds/environment"] = self._instance.own_s
        return Outcome(
            response=last[-1] if last else "",
            reward=reward,
            turn_rewards=(),
            stop_reason=stop_reason,
            messages=tuple(messages),
            metrics=counts,
        )

    async def _spoken(self) -> str:
        """Speaks in turn until the episode ends; returns its stop reason."""
        while True:
            try:
                reply = await self._conversation.reply()
            except LimitReached as limit:
                return limit.reason
            if reply.problem:
                self._num_errors += 1
                self._answer(json.dumps({"error": reply.problem}), "")
                continue
            if not reply.calls:
                if reply.is_cut:
                    return "max_tokens"
                text = await self._response(reply.content)
                if not text:
                    return "completed"
                self._conversation.add("user", text)
                continue
            for call in reply.calls:
                if self._num_calls >= self._of._spec.max_tool_calls:
                    return "max_tool_calls"
                self._num_calls += 1
                if await self._call(call):
                    return "tool_stopped"

    async def _reward(self) -> float | None:
        """What `get_reward` returns; without such a method the attribute `reward`, if there is one."""
        if not self._instance.is_alive:  # a call of the policy hung
            return 0.0
        method = "get_reward" if self._of._rewards else ".reward"
        found = await self._called(method, {})
        number = found.get("number")
        if number is None and (self._of._rewards or "error" in found):
            raise EnvironmentFault(f"{method}: {found.get('error') or 'it returned no number'}")
        return None if number is None else float(number)

    async def _called(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        spec = self._of._spec
        timeout_s = seconds(spec.tool_timeout)
        most = spec.max_tool_output
        try:
            return await self._instance.call(method, arguments, timeout_s=timeout_s, most=most)
        except TimedOut:
            if method == "reset":
                raise EnvironmentFault(f"reset took longer than {spec.tool_timeout}") from None
            return {"error": f"timed out after {spec.tool_timeout}", "done": False}

    async def _response(self, text: str) -> str:
        """What the environment says as the user; empty: nothing, the episode ends."""
        if not self._of._responds:
            return ""
        found = await self._asked("respond", {"text": text})
        return _shown(found) if self._instance.is_alive and not found["done"] else ""

    async def _call(self, call: ToolCall) -> bool:
        """Calls a tool, and shows its result; whether the environment is done."""
        known = self._of._arguments
        if call.name in known and (problem := problem_of(known[call.name], call.arguments)):
            self._num_errors += 1
            found: dict[str, Any] = {"error": problem, "done": False}
        elif call.name in known:
            found = await self._asked(call.name, call.arguments)
        else:
            self._num_errors += 1
            names = ", ".join(sorted(known))
            found = {"error": f"there is no tool {call.name}, but {names}", "done": False}
        self._answer(_shown(found), call.name)
        return bool(found["done"])

    async def _asked(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a method that got what the policy wrote: an error is text for the policy."""
        found: dict[str, Any] = {"error": _GONE, "done": False}
        if self._instance.is_alive:
            try:
                found = await self._called(method, arguments)
            except EnvironmentFault as fault:  # the policy's arguments may have ended the process
                found["error"] = str(fault)
        self._num_errors += "error" in found
        return found

    def _answer(self, text: str, name: str) -> None:
        """Shows the policy the output of a tool."""
        role = self._of._renderer.tool_role
        self._conversation.add(role, text, **({"name": name} if role == "tool" and name else {}))


def _shown(found: Mapping[str, Any]) -> str:
    """The text that the policy reads of a result."""
    return json.dumps({"error": found["error"]}) if "error" in found else str(found.get("text") or "")
