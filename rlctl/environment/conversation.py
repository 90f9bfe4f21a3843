"""A conversation between policy and environment, by messages; its tokens are recorded by the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlctl.environment.renderer import Message, Renderer, ToolCall, parse_calls

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn
    from rlctl.environment.protocol import Sampler


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said in one turn.

    Attributes:
        content: its text, without the token that ended it.
        calls: the tool calls in it; empty: none.
        problem: what is wrong with a tool call that cannot be read, for the policy; empty: nothing.
        is_cut: the turn reached its limit of tokens.
    """

    content: str
    calls: list[ToolCall]
    problem: str
    is_cut: bool


class Conversation:
    """The messages of one episode.

    Args:
        tools: schemas of the tools, as chat completions take them.
        more: text appended to the task's last message.

    Attributes:
        messages: the task's messages, replies, and what `add` appended.
    """

    def __init__(
        self,
        renderer: Renderer,
        sampler: Sampler,
        task: Task,
        tools: Sequence[Mapping[str, Any]] = (),
        more: str = "",
    ) -> None:
        self._renderer, self._sampler, self._tools = renderer, sampler, tools
        self.messages: list[Message] = [dict(message) for message in task.messages]
        if more:
            last = self.messages[-1]
            self.messages[-1] = last | {"content": f"{last['content']}{more}"}
        is_as_given = not tools and not more
        self._next = (
            list(task.prompt_ids) if is_as_given else renderer.encode(renderer.text(self.messages, tools))
        )
        #: the last turn: the messages and tokens that it read, and its own tokens
        self._last: tuple[list[Message], list[int], list[int]] | None = None

    async def reply(self) -> Reply:
        """The policy's next turn, which becomes a message.

        Raises:
            LimitReached: a limit of the episode allows no further turn.
        """
        before, read = list(self.messages), self._context()
        turn = await self._sampler.sample(read)
        sampled = turn.token_ids.tolist()
        self._last = (before, read, sampled)
        content = self._text(turn, sampled)
        calls, problem = parse_calls(content) if self._tools else ([], "")
        # As it was written: a template that renders calls anew would not keep the sampled tokens.
        self.messages.append({"role": "assistant", "content": content})
        return Reply(content, calls, problem, turn.finish_reason == "length")

    def add(self, role: str, content: str, **more: Any) -> None:
        """Appends a message that the policy reads before its next turn."""
        self.messages.append({"role": role, "content": content, **more})

    def _context(self) -> list[int]:
        """The tokens that the next turn reads: those so far and what follows them, or a new rendering."""
        if self._last is None:
            return self._next
        before, read, sampled = self._last
        more = self._renderer.addition(before, sampled, self.messages, self._tools)
        if more is not None:
            return [*read, *sampled, *more]
        return self._renderer.encode(self._renderer.text(self.messages, self._tools))

    def _text(self, turn: Turn, sampled: list[int]) -> str:
        from rlctl.environment.single_turn import decode

        ids = sampled[:-1] if turn.finish_reason == "stop" else sampled
        return decode(self._renderer.tokenizer, [ids])[0]
