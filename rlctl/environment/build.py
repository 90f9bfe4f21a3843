"""Environments by name, and the episodes that a spec's environments make.

A user's environment is `path/to/file.py:Name`: a factory decorated with `ENVIRONMENTS.register`, or a class
or function as it is; or `command:LINE`. Does not import torch, because the spec reads names.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from rlctl.errors import UsageError
from rlctl.registry import ENVIRONMENTS
from rlctl.run_spec.environment import is_agent

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.first_prompt import FirstPrompt
    from rlctl.environment.protocol import Environment, EnvironmentContext
    from rlctl.environment.renderer import ChatRenderer
    from rlctl.episodes import Episodes
    from rlctl.rollout.protocol import ResponseSampler, Sampling
    from rlctl.run_spec.environment import EnvironmentSpec
    from rlctl.run_spec.run_spec import RunSpec

SINGLE_TURN, TOOLS = "single_turn", "tools"


@ENVIRONMENTS.register(label="One question, one answer, one grade")
def single_turn(context: EnvironmentContext) -> Environment:
    """See `rlctl.environment.single_turn`, which samples a whole batch by one call of the engine."""
    raise AssertionError("EpisodeSource samples single turns itself")


class TasksetParams(BaseModel):
    """Parameters of the environment `verifiers`."""

    taskset: str = Field(examples=["wiki_search"])
    """Name of an installed taskset."""
    config: dict[str, Any] = {}
    """Further fields of its configuration."""


@ENVIRONMENTS.register(label="A taskset of the package verifiers, if it is installed", params=TasksetParams)
def verifiers(context: EnvironmentContext) -> Environment:
    """See `rlctl.environment.verifiers`."""
    if not find_spec("verifiers"):
        fix = "pip install 'rlctl[verifiers]'"
        raise UsageError("the package verifiers is not installed", where="environment.name", fix=fix)
    from rlctl.environment.verifiers import Taskset

    return Taskset(context.params.taskset, context.params.config, context)


class CommandParams(BaseModel):
    """Parameters of the environment `command:`."""

    ground_truth: bool = False
    """The task that the program reads has the ground truth."""


@ENVIRONMENTS.register("command:", label="A command line that is an agent", params=CommandParams)
def command(context: EnvironmentContext) -> Environment:
    """See `rlctl.environment.agent_function.CommandAgent`."""
    from rlctl.environment.agent_function import CommandAgent

    return CommandAgent(context.argument, shows_truth=context.params.ground_truth, context=context)


class ToolParams(BaseModel):
    """Parameters of the environment `tools`."""

    corpus: str = Field(default="", examples=["wiki.jsonl"])
    """File that the tool `search` reads: JSON lines or Parquet with the column `text`, or text."""
    num_results: int = Field(default=3, ge=1)
    """Passages that `search` returns."""
    memory_mb: int = Field(default=1024, ge=64)
    """MiB of memory of the tool `python`."""


@ENVIRONMENTS.register(label="A conversation with the tools of environment.tools", params=ToolParams)
def tools(context: EnvironmentContext) -> Environment:
    """See `rlctl.environment.tools`."""
    from rlctl.environment.tools import ToolEnvironment

    return ToolEnvironment(context)


def build_environment(name: str, context: EnvironmentContext) -> Environment:
    """The environment of this name.

    Raises:
        UsageError: it cannot be built.
    """
    from rlctl.run_spec.base import params_of

    part = ENVIRONMENTS.part(name)
    if part.is_decorated:
        argument = name.partition(":")[2]
        given = replace(context, params=params_of(part, context.spec.params), argument=argument)
        found: Environment = part.function(given)
        return found
    if is_agent(part.function):
        from rlctl.environment.agent_function import AgentFunction

        return AgentFunction(part.name, part.function, context)
    if inspect.isclass(part.function):
        from rlctl.environment.user_class import UserClass

        return UserClass(part.name, part.function, context)
    what = "is neither a class, a function, a command nor a registered environment"
    raise UsageError(what, where=f"environment.name: {name}", fix="see docs/how-to/environments.md")


def _tools_of(name: str) -> list[dict[str, Any]]:
    """Schemas of the tools of a user's class; none of other environments, which describe their own."""
    from rlctl.environment.user_class import tool_schemas

    part = None if name == SINGLE_TURN else ENVIRONMENTS.part(name)
    if part is None or part.is_decorated or is_agent(part.function) or not inspect.isclass(part.function):
        return []
    return tool_schemas(part.function)


class EpisodeSource:
    """Makes the episodes of training, validation and evaluation in the environments that a spec names.

    Args:
        context_length: most tokens of a sequence.
        chat_template_kwargs: further arguments of the chat template.
        max_prompt_length: most tokens that the first turn of an episode reads; None: what the context leaves.

    Attributes:
        is_multi_turn: whether an episode may have several turns.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        tokenizer: Any,
        context_length: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_length: int | None = None,
    ) -> None:
        self.spec = spec
        self._tokenizer = tokenizer
        self._context_length = context_length
        self.is_multi_turn = spec.is_multi_turn
        self._max_prompt_length = max_prompt_length
        self._template_kwargs = chat_template_kwargs or {}
        self._built: dict[str, Environment] = {}
        self._tools: dict[str, list[dict[str, Any]]] = {}
        self._running, self._changed = 0, threading.Condition()  # episodes of environments, in all threads

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Any) -> EpisodeSource:
        """The environments of a run's spec."""
        data = spec.data
        limits = (data.chat_template_kwargs, data.max_prompt_length)
        return cls(spec.environment, tokenizer, spec.max_length, *limits)

    def sample(
        self,
        engine: ResponseSampler,
        members: Sequence[tuple[Task, int]],
        sampling: Sampling,
        step_seed: int,
    ) -> Episodes:
        """The episodes with these tasks and indices within their groups, in that order.

        An episode depends only on `step_seed`, its task's `group_id` and its index within the group, if its
        environment is deterministic.

        Raises:
            RunFailure: the engine failed.
            UsageError: a row names an environment that the spec does not.
        """
        from rlctl.environment.run_episodes import run_episodes
        from rlctl.environment.single_turn import sample_members
        from rlctl.episodes import Episodes

        rows_of = {task.environment: task for task, _ in members}
        names = {chosen: self._name_of(task) for chosen, task in rows_of.items()}
        wanted = [names[task.environment] for task, _ in members]
        places = {
            name: [row for row, own in enumerate(wanted) if own == name] for name in dict.fromkeys(wanted)
        }
        parts: list[Episodes] = []
        for name, rows in places.items():
            some = [members[row] for row in rows]
            if name == SINGLE_TURN:
                parts.append(sample_members(engine, some, sampling, step_seed, self._tokenizer))
                continue
            with self._changed:
                environment = self._environment(name, sampling)
            inputs = (environment, engine, some, sampling, step_seed, self.spec)
            with self._permitted(len(some)):
                played = run_episodes(*inputs, self._context_length, self._max_prompt_length)
            parts.append(Episodes.of(played))
        if len(parts) == 1:
            return parts[0]
        order = [place for rows in places.values() for place in rows]
        return Episodes.joined(parts).pick(sorted(range(len(order)), key=order.__getitem__))

    @contextmanager
    def _permitted(self, count: int) -> Iterator[None]:
        """Waits until so many episodes may run, `environment.concurrency` at most, beside other threads'."""
        count = min(count, self.spec.concurrency)
        with self._changed:
            self._changed.wait_for(lambda: self._running + count <= self.spec.concurrency)
            self._running += count
        try:
            yield
        finally:
            with self._changed:
                self._running -= count
                self._changed.notify_all()

    def groups(
        self, engine: ResponseSampler, tasks: Sequence[Task], n: int, sampling: Sampling, step_seed: int
    ) -> Episodes:
        """Groups of n episodes, in the order of the tasks.

        A group of which faults of the environment left fewer than `environment.min_group` is sampled again,
        at most `environment.max_retries` times; then all of its episodes are excluded. A prompt that is too
        long is not sampled again.
        """
        from rlctl.environment.protocol import PROMPT_OVERLONG
        from rlctl.episodes import Episodes
        from rlctl.rollout.seeds import derived_seed

        sampled = Episodes.of([])
        starts = [0] * len(tasks)  # place of each group's first episode
        few = list[int]()
        missing = list(range(len(tasks)))
        needed = min(self.spec.min_group, n)
        for attempt in range(self.spec.max_retries + 1):
            seed = derived_seed(step_seed, "again", attempt) if attempt else step_seed
            members = [(tasks[number], member) for number in missing for member in range(n)]
            episodes = self.sample(engine, members, sampling, seed)
            if attempt:
                retries = [{**metrics, "retries": float(attempt)} for metrics in episodes.metrics]
                episodes = replace(episodes, metrics=retries)
            for place, number in enumerate(missing):
                starts[number] = len(sampled) + place * n
            sampled = Episodes.joined([sampled, episodes])
            if not any(sampled.errors):
                return sampled
            left = [sampled.errors[start : start + n].count("") for start in starts]
            few = [number for number in range(len(tasks)) if left[number] < needed]
            reasons = [sampled.stop_reasons[start : start + n] for start in starts]
            missing = [number for number in few if PROMPT_OVERLONG not in reasons[number]]
            if not missing:
                break
        episodes = sampled.pick([start + member for start in starts for member in range(n)])
        if not few:
            return episodes
        why = f"fewer than environment.min_group = {needed} episodes of its group are left"
        errors = list(episodes.errors)
        for number in few:
            errors[number * n : number * n + n] = [
                error or why for error in errors[number * n : number * n + n]
            ]
        return replace(episodes, errors=errors)

    def first_prompts(self, tasks: Sequence[Task], sampling: Sampling) -> list[FirstPrompt]:
        """What the first turns of the tasks' episodes read; nothing is sampled.

        Raises:
            UsageError: a row names an environment that the spec does not, or one cannot be built.
        """
        from rlctl.environment.first_prompt import FirstPrompt, first_prompts

        names = [self._name_of(task) for task in tasks]
        found = {place: FirstPrompt(tuple(task.prompt_ids)) for place, task in enumerate(tasks)}
        for name in set(names) - {SINGLE_TURN}:
            places = [place for place, own in enumerate(names) if own == name]
            environment = self._environment(name, sampling)
            played = first_prompts(environment, [tasks[place] for place in places], self.spec)
            found.update(zip(places, played, strict=True))
        return list(found.values())

    def check(self, tasks: Iterable[Task]) -> None:
        """Checks the environments that rows choose, before anything is sampled.

        Raises:
            UsageError: a row names an environment that the spec does not.
        """
        for task in tasks:
            self._name_of(task)

    def close(self) -> None:
        """Ends what the environments started."""
        while self._built:
            self._built.popitem()[1].close()

    def first_length(self, task: Task) -> int:
        """Tokens that the first turn reads, as far as the row tells: with the tools of a user's class, but
        without what `reset` says.
        """
        name = self._name_of(task)
        if name not in self._tools:
            self._tools[name] = self._tools_of(name)
        tools = self._tools[name]
        if not tools:
            return len(task.prompt_ids)
        messages = [dict(message) for message in task.messages]
        return len(self._renderer.encode(self._renderer.text(messages, tools)))

    def _tools_of(self, name: str) -> list[dict[str, Any]]:
        if name != TOOLS:
            return _tools_of(name)
        from rlctl.environment.tools import described_tools

        return described_tools(self.spec)

    @cached_property
    def _renderer(self) -> ChatRenderer:
        from rlctl.environment.renderer import ChatRenderer

        return ChatRenderer(self._tokenizer, self._template_kwargs)

    def _name_of(self, task: Task) -> str:
        """The environment that the row chooses, by its name in the spec or the name behind the file's."""
        listed = (self.spec.name, *self.spec.others)
        if not task.environment or listed == (SINGLE_TURN,):  # else the column says something else
            return self.spec.name
        known = {name.rpartition(":")[2]: name for name in listed} | {name: name for name in listed}
        if task.environment not in known:
            what = f"row {task.row} of the data chooses the environment {task.environment!r}"
            fix = f"add it to environment.others, if this data may run it: [{', '.join(self.spec.others)}, …]"
            raise UsageError(what, where="environment.others", fix=fix)
        return known[task.environment]

    def _environment(self, name: str, sampling: Sampling) -> Environment:
        from rlctl.environment.protocol import EnvironmentContext

        if name not in self._built:
            given = (self.spec, self._tokenizer, sampling, self._context_length)
            context = EnvironmentContext(*given, chat_template_kwargs=self._template_kwargs)
            self._built[name] = build_environment(name, context)
        return self._built[name]
