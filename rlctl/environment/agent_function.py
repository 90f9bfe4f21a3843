"""An environment that is an agent: any program that speaks with the policy as with OpenAI's API.

    async def agent(task, base_url, api_key) -> float | None:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        …                                    # any SDK or command-line agent, tools, several conversations
        return score                         # None: the graders score the last reply

`task` holds the row's columns, with its messages as `prompt`. A further parameter `ground_truth` receives the
row's ground truth. Each episode's function runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlctl.environment.chat_completions import RecordedChat
from rlctl.environment.endpoint import Endpoint
from rlctl.environment.instances import Instances
from rlctl.environment.protocol import EnvironmentContext, EnvironmentFault, Outcome
from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError
from rlctl.user_code import call_problem

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.protocol import Sampler


class AgentFunction:
    """An `Environment` that runs an agent function per episode.

    Raises:
        UsageError: the function takes other arguments.
    """

    def __init__(self, name: str, function: Callable[..., Any], context: EnvironmentContext) -> None:
        file, _, function_name = name.rpartition(":")
        self._wants_truth = "ground_truth" in inspect.signature(function).parameters
        given = dict.fromkeys(["task", "base_url", "api_key", *["ground_truth"] * self._wants_truth])
        if problem := call_problem(function, **given):
            fix = f"async def {function_name}(task, base_url, api_key) -> float | None"
            raise UsageError(f"an agent is called with three arguments: {problem}", where=name, fix=fix)
        self._renderer = ChatRenderer(context.tokenizer, context.chat_template_kwargs)
        self._instances = Instances(file, function_name, context.spec.variables)

    def close(self) -> None:
        """Ends all processes."""
        self._instances.close()

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """See `Environment.run`.

        What the function raises is a fault, unless a limit was reached before, or it is an error of values
        after the policy spoke (`ValueError`, `LookupError`, as on text that it cannot read).
        """
        chat = RecordedChat(self._renderer, sampler, task)
        async with self._instances.instance() as instance, Endpoint(chat) as endpoint:
            row = {**task.extra_info, "prompt": list(task.messages), "data_source": task.data_source}
            given = {"task": row, "base_url": endpoint.base_url, "api_key": endpoint.api_key}
            if self._wants_truth:
                given["ground_truth"] = task.ground_truth
            call = instance.call("__call__", given, timeout_s=None, most=1000)
            returned = await chat.result_of(asyncio.ensure_future(call))
        return _outcome(chat, returned)


def _outcome(chat: RecordedChat, returned: dict[str, Any]) -> Outcome:
    """The outcome of an agent that has ended."""
    reward, ended_by = returned.get("number"), chat.limit
    if "error" in returned and not ended_by:
        if not chat.reply or "of_values" not in returned:
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
