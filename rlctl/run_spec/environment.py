"""Spec section `environment`: what turns a task into an episode, and its limits."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlctl.registry import ENVIRONMENTS
from rlctl.run_spec.base import Duration, NullWord, OpenMapping, Registered, Section, StrList


class EnvironmentSpec(Section):
    """What turns a row of the data into an episode. `single_turn`: one question, one answer, one grade."""

    name: Annotated[str, Registered(ENVIRONMENTS)] = "single_turn"
    """Environment: `single_turn`, `file.py:Name`: a class with `reset` and tools, or an agent; or
    `command:LINE`: a program that is an agent."""
    tools: StrList = Field(default=[])
    """Tools without a class, with which the environment is `tools`: `file.py:function`, `python`, `search`,
    `mcp:COMMAND`, or `mcp:URL` of a server on this machine."""
    params: OpenMapping = Field(default={})
    """Parameters that the environment declares: `environment.params.NAME=VALUE`."""
    others: list[str] = Field(default=[])
    """Further environments that rows may choose by their column `environment`; others are refused."""
    max_turns: int = Field(default=8, ge=1)
    """Most turns of the policy in an episode."""
    max_tool_calls: int = Field(default=32, ge=0)
    """Most tool calls in an episode."""
    max_episode_tokens: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Most tokens that the policy samples in an episode; null: `max_turns` times `data.max_response_length`,
    which limits one turn."""
    context_length: Annotated[int | None, NullWord] = Field(default=None, ge=2)
    """Most tokens of a sequence, prompt included; null: `data.max_prompt_length` plus
    `data.max_response_length`, which is short for several turns."""
    max_tool_output: int = Field(default=4096, ge=1)
    """Longest output of a tool that the policy reads, in characters; longer ones are cut."""
    tool_timeout: Duration = "10s"
    """Longest time of a tool call; after it the call ends, and the policy reads that it timed out."""
    episode_timeout: Duration = "10min"
    """Longest time of an episode without the policy's own; after it the episode ends."""
    fresh_process: bool = False
    """Start a new process for every episode. false: a process plays one episode after the other, each with a
    new instance; what a class keeps outside of it (in the module, on the class) stays."""
    episodes_per_process: int = Field(default=1, ge=1)
    """Episodes that share a process, each with its own instance, if all methods are `async`. When one of them
    ends the process, the others are sampled again, alone."""
    concurrency: int = Field(default=256, ge=1)
    """Episodes of one rank that run at the same time."""
    variables: list[str] = Field(default=[])
    """Names of environment variables that a user's class may read, such as keys of services; others are
    withheld. Their values appear in no log."""
    lockstep: bool = False
    """Wait until all episodes wait for the policy, and sample their turns in a fixed order: with a
    deterministic environment a resumed run is then bitwise the same. false: slow episodes do not hold the
    others."""
    min_group: int = Field(default=2, ge=1)
    """A group with fewer episodes, because others failed by faults of the environment, is sampled again."""
    max_retries: int = Field(default=2, ge=0)
    """How often such a group is sampled again; after this its episodes are excluded."""
    max_failed_fraction: float = Field(default=0.5, ge=0, le=1)
    """Largest fraction of a batch's episodes that may fail by faults of the environment; above it a run
    stops. If faults depend on what the policy does, leaving these episodes out is a bias."""

    @model_validator(mode="before")
    @classmethod
    def _with_tools(cls, given: Any) -> Any:
        """Tools choose their environment."""
        if isinstance(given, dict) and given.get("tools") and given.get("name") in (None, "single_turn"):
            return {**given, "name": "tools"}
        return given

    @property
    def code_names(self) -> tuple[str, ...]:
        """Names that may be of users' code."""
        return (self.name, *self.others, *self.tools)

    @property
    def is_multi_turn(self) -> bool:
        """Whether episodes may have several turns."""
        return self.name != "single_turn" or bool(self.others)


def is_agent(function: Any) -> bool:
    """Whether a user's part is an agent: a class with `run` and no `reset`, or what else can be called."""
    if inspect.isclass(function):
        return callable(getattr(function, "run", None)) and not hasattr(function, "reset")
    return callable(function)


def environments_without_reward(spec: EnvironmentSpec) -> list[str]:
    """Those of the spec's environments that are known to give no reward of their own."""
    parts = [ENVIRONMENTS.part(name) for name in (spec.name, *spec.others)]
    return [
        environment.name
        for environment in parts
        if environment.name in ("single_turn", "tools")
        or (
            inspect.isclass(environment.function)
            and not is_agent(environment.function)
            and not may_give_reward(environment.function)
        )
    ]


def may_give_reward(kind: Any) -> bool:
    """Whether a class has `get_reward`, or an attribute `reward`, also if only its methods set it."""
    if hasattr(kind, "get_reward"):
        return True
    own = inspect.getattr_static(kind, "reward", None)
    if own is not None:
        return not callable(own)  # a tool of this name
    members = [member for part in getattr(kind, "__mro__", ()) for member in vars(part).values()]
    codes = [getattr(member, "__code__", None) for member in members]
    return any("reward" in code.co_names for code in codes if code is not None)
