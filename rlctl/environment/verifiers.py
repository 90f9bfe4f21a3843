"""Environments of the package verifiers 0.4: its taskset, conversation and rewards; our policy and tokens.

Everything runs in this process: each model call of an episode goes to `RecordedChat`, and nothing is started
or fetched. The tasksets themselves are installed packages.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
from verifiers.v1 import AgentConfig, Harness, HarnessConfig
from verifiers.v1.clients import Client, EvalClientConfig, ModelContext
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import env_config_type, load_environment

from rlctl.environment.formats import chat_completions
from rlctl.environment.formats.protocol import Refused
from rlctl.environment.protocol import EnvironmentContext, EnvironmentFault, Outcome
from rlctl.environment.recorded_chat import RecordedChat
from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError, first_line, typed_line
from rlctl.tool_calls import encodable

if TYPE_CHECKING:
    from rlctl.batch import Task
    from rlctl.environment.protocol import Sampler

__all__ = ["ChatHarness"]  # verifiers finds a harness by the one that a module exports
_HARNESS = "rlctl_chat"
sys.modules[_HARNESS] = sys.modules[__name__]  # its loader takes names without dots


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """One reply per segment of the conversation; no tools, no program."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> ProgramResult:
        """See `Harness.launch`."""
        del trace, runtime, mcp_urls
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return ProgramResult(0 if answer.is_success else 1, "", answer.text)


class _RecordedClient(Client):  # type: ignore[misc]  # verifiers is an extra
    def __init__(self, chat: RecordedChat) -> None:
        self._chat = chat

    async def get_response(self, dialect: Any, body: Any, *_: Any, **__: Any) -> Any:
        try:
            request = chat_completions.read(encodable(body), self._chat.conversation_before)
            said = await self._chat.answered(request, lambda: False)
        except Refused as refused:
            raise ProviderError(str(refused), status_code=refused.status) from refused
        answer = chat_completions.written(request, said.reply)
        response = dialect.parse_response(dialect.validate_response(answer))
        response.raw = answer
        return response


class _Server(InterceptionServer):  # type: ignore[misc]  # verifiers is an extra
    """Gives every session the client of one episode."""

    def __init__(self, chat: RecordedChat) -> None:
        super().__init__()
        self._recorded = _RecordedClient(chat)

    def register(self, session: Any) -> Any:
        found = super().register(session)
        session.client = self._recorded
        return found


class Taskset:
    """An `Environment` that plays the tasks of an installed taskset.

    Args:
        config: further fields of the taskset's configuration.

    Raises:
        UsageError: the taskset is not installed, or needs several agents.
    """

    def __init__(self, name: str, config: Mapping[str, Any], context: EnvironmentContext) -> None:
        where = f"environment.params.taskset: {name}"
        try:
            kind = env_config_type(name)
            roles = [key for key, f in kind.model_fields.items() if isinstance(f.default, AgentConfig)]
            agent = {
                "harness": {"id": _HARNESS},
                "runtime": {"type": "subprocess"},
                "model": "policy",
                "max_turns": context.spec.max_turns,
            }
            given = {"taskset": {"id": name, **config}} | dict.fromkeys(roles, agent)
            self._env = load_environment(kind.model_validate(given))
        except Exception as error:  # of verifiers, of Pydantic, and of importing the package
            fix = "install the package of the taskset; its settings are in environment.params.config"
            raise UsageError(f"verifiers: {typed_line(error)}", where=where, fix=fix) from error
        if len(roles) != 1:
            fix = "choose a taskset of one agent"
            raise UsageError(f"it has {len(roles)} agents: {', '.join(roles)}", where=where, fix=fix)
        self._renderer = ChatRenderer(context.tokenizer, context.chat_template_kwargs)
        self._rows = iter(self._env.taskset)
        self._read = list[Any]()

    def close(self) -> None:
        """Nothing to end."""

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        """See `Environment.run`; plays the taskset's task with the row's column `idx`."""
        chat = RecordedChat(self._renderer, sampler, task)
        env = copy.copy(self._env)
        async with _Server(chat) as env._interception:
            context = ModelContext(model="policy", client=EvalClientConfig())
            playing = env.run_episode(self._task(task), context)
            episode = await chat.result_of(asyncio.ensure_future(playing))
        response = chat.reply.content if chat.reply else ""
        if chat.limit:
            return Outcome(
                response=response,
                reward=0.0,
                turn_rewards=(),
                stop_reason=chat.limit,
                messages=chat.messages,
                metrics=chat.counts,
            )
        [trace] = episode.traces if len(episode.traces) == 1 else [None]
        # A time-out of scoring leaves an episode that is `ok`, with a reward of 0.
        if not episode.ok or trace is None or trace.is_timeout or None in trace.rewards.values():
            errors = [*episode.errors, *(e for one in episode.traces for e in one.errors)]
            cause = first_line(Exception(errors[-1].message)) if errors else "it was not scored"
            raise EnvironmentFault(f"verifiers: {cause}")
        stop_reason = "max_turns" if trace.stop_condition == "max_turns" else "completed"
        return Outcome(
            response=response,
            reward=float(trace.reward),
            turn_rewards=(),
            stop_reason=stop_reason,
            messages=chat.messages,
            metrics=chat.counts,
        )

    def _task(self, task: Task) -> Any:
        index = task.extra_info.get("idx")
        if not isinstance(index, int) or index < 0:
            raise UsageError("a row has no column `idx`, the task's number", where="environment.name")
        self._read += islice(self._rows, max(0, index + 1 - len(self._read)))
        if index >= len(self._read):
            message = f"the taskset has {len(self._read)} tasks, a row asks for idx={index}"
            raise UsageError(message, where="environment.name")
        return self._read[index]
