"""Environments by name, and the episodes that a spec's environments make.

A user's environment is `path/to/file.py:Name`: a factory decorated with `ENVIRONMENTS.register`, or a class
or function as it is. Does not import torch, because the spec reads names.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from rlctl.errors import UsageError
from rlctl.registry import ENVIRONMENTS

if TYPE_CHECKING:
    from rlctl.batch import Episode, Group, Task
    from rlctl.environment.protocol import Environment, EnvironmentContext
    from rlctl.rollout.protocol import ResponseSampler, Sampling
    from rlctl.spec.environment import EnvironmentSpec
    from rlctl.spec.run_spec import RunSpec

SINGLE_TURN = "single_turn"


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


def build_environment(name: str, context: EnvironmentContext) -> Environment:
    """The environment of this name.

    Raises:
        UsageError: it cannot be built.
    """
    from rlctl.spec.base import params_of

    part = ENVIRONMENTS.part(name)
    if part.is_decorated:
        found: Environment = part.function(replace(context, params=params_of(part, context.spec.params)))
        return found
    if inspect.isclass(part.function):
        from rlctl.environment.user_class import UserClass

        return UserClass(part.name, part.function, context)
    if inspect.iscoroutinefunction(part.function):
        from rlctl.environment.agent_function import AgentFunction

        return AgentFunction(part.name, part.function, context)
    what = "is neither a class, an async function nor a registered environment"
    raise UsageError(what, where=f"environment.name: {name}", fix="see docs/how-to/environments.md")


def _counted(group: Group, attempt: int) -> Group:
    """The group, with how often it was sampled again."""
    return tuple(replace(e, metrics={**e.metrics, "retries": float(attempt)}) for e in group)


class EpisodeSource:
    """Makes the episodes of training, validation and evaluation in the environments that a spec names.

    Args:
        context_length: most tokens of a sequence.
        chat_template_kwargs: further arguments of the chat template.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        tokenizer: Any,
        context_length: int,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec, self._tokenizer, self._context_length = spec, tokenizer, context_length
        self._template_kwargs = chat_template_kwargs or {}
        self._built: dict[str, Environment] = {}
        self._running, self._changed = 0, threading.Condition()  # episodes of environments, in all threads

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Any) -> EpisodeSource:
        """The environments of a run's spec."""
        return cls(spec.environment, tokenizer, spec.max_length, spec.data.chat_template_kwargs)

    def sample(
        self,
        engine: ResponseSampler,
        members: Sequence[tuple[Task, int]],
        sampling: Sampling,
        step_seed: int,
    ) -> list[Episode]:
        """The episodes with these tasks and indices within their groups, in that order.

        An episode depends only on `step_seed`, its task's `group_id` and its index within the group, if its
        environment is deterministic.

        Raises:
            RunFailure: the engine failed.
            UsageError: a row names an environment that the spec does not.
        """
        from rlctl.environment.run_episodes import run_episodes
        from rlctl.environment.single_turn import sample_members

        places: dict[str, list[int]] = {}
        for place, (task, _) in enumerate(members):
            places.setdefault(self._name_of(task), []).append(place)
        found: dict[int, Episode] = {}
        for name, rows in places.items():
            some = [members[row] for row in rows]
            if name == SINGLE_TURN:
                episodes = sample_members(engine, some, sampling, step_seed, self._tokenizer)
            else:
                with self._changed:
                    environment = self._environment(name, sampling)
                given = (environment, engine, some, sampling, step_seed, self.spec, self._context_length)
                with self._room_for(len(some)):
                    episodes = run_episodes(*given)
            found |= zip(rows, episodes, strict=True)
        return [found[place] for place in range(len(members))]

    @contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
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
    ) -> list[Group]:
        """Groups of n episodes, in the order of the tasks.

        A group of which faults of the environment left fewer than `environment.min_group` is sampled again,
        at most `environment.max_retries` times; then all of its episodes are excluded.
        """
        from rlctl.rollout.protocol import derived_seed

        found: dict[int, Group] = {}
        missing, needed = list(tasks), min(self.spec.min_group, n)
        for attempt in range(self.spec.max_retries + 1):
            seed = derived_seed(step_seed, "again", attempt) if attempt else step_seed
            members = [(task, member) for task in missing for member in range(n)]
            episodes = self.sample(engine, members, sampling, seed)
            for start, task in zip(range(0, len(episodes), n), missing, strict=True):
                group = tuple(episodes[start : start + n])
                found[task.group_id] = _counted(group, attempt) if attempt else group
            missing = [t for t in missing if sum(not e.error for e in found[t.group_id]) < needed]
            if not missing:
                break
        for task in missing:
            why = f"fewer than environment.min_group = {needed} episodes of its group are left"
            found[task.group_id] = tuple(replace(e, error=e.error or why) for e in found[task.group_id])
        return [found[task.group_id] for task in tasks]

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
