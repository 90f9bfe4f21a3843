"""What the policy reads first in an episode: environments run up to there, and nothing is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.environment.protocol import EnvironmentFault, LimitReached
from rlctl.errors import first_line
from rlctl.run_spec.base import seconds

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn
    from rlctl.environment.protocol import Environment
    from rlctl.run_spec.environment import EnvironmentSpec

#: Episodes that run at the same time, and the longest time until the first prompt of one.
_AT_ONCE, _LONGEST_S = 4, 60.0


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The first prompt of an episode.

    Attributes:
        token_ids: what the first turn reads; empty: the episode asked for no turn.
        problem: why it asked for none; empty: it asked.
    """

    token_ids: tuple[int, ...] = ()
    problem: str = ""


class _Asked(BaseException):
    """Passes through environments, which may catch any `Exception`: the first prompt is known."""


class _FirstTurn:
    """A `Sampler` that keeps what the first turn reads, and samples nothing."""

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None = None,
        shortened: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """Ends the episode."""
        self.token_ids = self.token_ids or tuple(token_ids)
        raise _Asked

    def watch(self, pid: int) -> None:
        """The time of the episode has one limit, however busy the machine is."""


def first_prompts(
    environment: Environment, tasks: Sequence[Task], spec: EnvironmentSpec
) -> list[FirstPrompt]:
    """The first prompt of an episode of each task, in the order of the tasks.

    The environment's code runs as in training, in its processes and with its limits of time.
    """
    limit_s = min(seconds(spec.episode_timeout), _LONGEST_S)

    async def one(task: Task, slots: asyncio.Semaphore) -> FirstPrompt:
        sampler = _FirstTurn()
        problem = ""
        async with slots:
            try:
                await asyncio.wait_for(environment.run(task, sampler), limit_s)
            except _Asked:
                pass
            except TimeoutError:
                problem = f"the policy was not asked within {limit_s:g} s"
            except (EnvironmentFault, LimitReached) as error:
                problem = str(error)
            except Exception as error:
                problem = f"{type(error).__name__}: {first_line(error)}"
        if sampler.token_ids:
            return FirstPrompt(sampler.token_ids)
        return FirstPrompt(problem=problem or "the episode ended without a turn of the policy")

    async def every() -> list[FirstPrompt]:
        slots = asyncio.Semaphore(min(_AT_ONCE, spec.concurrency))
        return await asyncio.gather(*(one(task, slots) for task in tasks))

    with ThreadPoolExecutor(1, "first-prompts") as thread:  # a notebook's own loop runs in this thread
        return thread.submit(asyncio.run, every()).result()
