"""Spec section `environment`: what turns a task into an episode, and its limits."""

from __future__ import annotations

import inspect
from typing import Annotated

from pydantic import Field

from rlctl.registry import ENVIRONMENTS
from rlctl.spec.base import Duration, NullWord, OpenMapping, Registered, Section


class EnvironmentSpec(Section):
    """What turns a row of the data into an episode. `single_turn`: one question, one answer, one grade."""

    name: Annotated[str, Registered(ENVIRONMENTS)] = "single_turn"
    """Environment: `single_turn`, or `file.py:Name`: a class with `reset` and tools, or an agent function."""
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

    @property
    def has_episodes(self) -> bool:
        """Whether episodes may have several turns."""
        return self.name != "single_turn" or bool(self.others)


def environments_without_reward(spec: EnvironmentSpec) -> list[str]:
    """Those of the spec's environments that are known to give no reward of their own."""
    parts = [ENVIRONMENTS.part(name) for name in (spec.name, *spec.others)]
    return [
        part.name
        for part in parts
        if part.name == "single_turn"
        or (inspect.isclass(part.function) and not hasattr(part.function, "get_reward"))
    ]
