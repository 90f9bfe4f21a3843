"""Interface of environments: a task becomes an episode.

An environment is one file: `environment.name=path/to/file.py:Name`. What is registered is a factory
`(context: EnvironmentContext) -> Environment`; a class with `reset` and tools, and an agent function, are
wrapped (`rlctl.environment.build`). Imports no torch, because the spec loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.errors import RlctlError

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn
    from rlctl.rollout.protocol import Sampling
    from rlctl.run_spec.environment import EnvironmentSpec

#: The first prompt of an episode does not fit; nothing was sampled.
PROMPT_OVERLONG = "prompt_overlong"
#: Why an episode ended. `aborted` (by the engine), `environment_error` and `PROMPT_OVERLONG` exclude it from
#: training.
STOP_REASONS = (
    *("completed", "tool_stopped", "max_turns", "max_tokens", "context_overflow", "max_tool_calls"),
    *("parse_error", "timeout", "environment_error", "aborted", PROMPT_OVERLONG),
)


class EnvironmentFault(RlctlError):
    """A fault that the policy did not cause, such as a refused connection: the episode is excluded.

    Whatever the policy's text or arguments can cause must not raise this, or the policy would learn to
    exclude its failures.
    """


class Sampler(Protocol):
    """Samples the turns of one episode, and records their tokens; created by `run_episodes`."""

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None = None,
        shortened: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """The next turn after these tokens, of at most `max_tokens` and what is left of the episode's limits.

        `shortened` returns the first tokens of a turn, which are recorded; which ones may depend on nothing
        that was sampled after them.

        Tokens in, tokens out: where `token_ids` begins with all tokens of the episode so far, the sequence
        continues; otherwise, as after a summary of the context, a new sequence of the episode begins.

        Raises:
            LimitReached: a limit of the episode allows no further turn.
        """

    def watch(self, pid: int) -> None:
        """Names a process of the episode: while it or its descendants wait for a processor, because the
        machine is busy, the time of the episode stands still."""


class LimitReached(Exception):
    """A limit of the spec ends the episode; `reason` is one of `STOP_REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment says of an episode; its tokens are recorded by the sampler.

    Attributes:
        response: text that graders read.
        reward: of the environment itself, added to the graders'; None: it gives none.
        turn_rewards: one per turn, at its last token; empty: none. Their sum is part of the score.
        stop_reason: one of `STOP_REASONS`.
        messages: the conversation, for display.
        metrics: numbers of the episode, logged as means `episode/NAME`.
    """

    response: str
    reward: float | None = None
    turn_rewards: Sequence[float] = ()
    stop_reason: str = "completed"
    messages: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Turns tasks into episodes; several run at once in one thread, as coroutines."""

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """One episode. `LimitReached` may pass through: the episode then has no response and reward 0.

        Raises:
            EnvironmentFault: see there.
        """

    def close(self) -> None:
        """Ends processes and connections."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """Inputs from which an environment is built, on one rank.

    Attributes:
        tokenizer: of the policy.
        sampling: distribution of the turns; its `max_response_length` limits the tokens of a turn.
        context_length: most tokens of a sequence.
        argument: what follows the colon in the environment's name.
        params: `environment.params`, validated by the environment's parameter class; None: it has none.
        chat_template_kwargs: further arguments of the chat template.
    """

    spec: EnvironmentSpec
    tokenizer: Any
    sampling: Sampling
    context_length: int
    params: Any = None
    argument: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
