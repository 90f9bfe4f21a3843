"""A conversation between policy and environment, by messages; its tokens are recorded by the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.environment.renderer import ChatRenderer, Message, WrittenReply
from rlctl.tool_calls import ToolCall, encodable, parse_calls

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn

#: Tokens before a reply that show whether the template opened thoughts.
_LAST_TOKENS = 64


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


class TurnSampler(Protocol):
    """What a conversation needs of a `Sampler`."""

    async def sample(self, token_ids: Sequence[int]) -> Turn:
        """See `Sampler.sample`."""


class Conversation:
    """The messages of one episode.

    Args:
        tools: schemas of the tools, as chat completions take them.
        more: text appended to the task's last message of the user.

    Attributes:
        messages: the task's messages, replies, and what `add` appended.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        sampler: TurnSampler,
        task: Task,
        tools: Sequence[Mapping[str, Any]] = (),
        more: str = "",
    ) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._tools = tools
        self.messages: list[Message] = [dict(message) for message in task.messages]
        if more:
            self._append_to_user(more)
        is_as_given = not tools and not more
        self._next = (
            list(task.prompt_ids) if is_as_given else renderer.encode(renderer.text(self.messages, tools))
        )
        #: the last turn: the messages that it answered, the tokens so far, its own among them, and the reply
        self._last: tuple[list[Message], list[int], WrittenReply] | None = None

    async def reply(self) -> Reply:
        """The policy's next turn, which becomes a message.

        Raises:
            LimitReached: a limit of the episode allows no further turn.
        """
        before = list(self.messages)
        read = self._context()
        turn = await self._sampler.sample(read)
        sampled = turn.token_ids.tolist()
        written = self._written(turn, sampled)
        self._last = (before, [*read, *sampled], written)
        # As it was written: a template that renders calls anew would not keep the sampled tokens.
        message = {"role": "assistant", "content": written.content}
        if before and before[-1]["role"] == "assistant":  # the reply continues it
            message = {**before[-1], "content": f"{before[-1]['content']}{written.content}"}
            self.messages.pop()
        self.messages.append(message)
        calls, problem = self._calls(read, written.content) if self._tools else ([], "")
        return Reply(written.content, calls, problem, turn.finish_reason == "length")

    def add(self, role: str, content: str, **more: Any) -> None:
        """Appends a message that the policy reads before its next turn.

        Two messages of the user become one, because many templates refuse them.
        """
        message = encodable({"role": role, "content": content, **more})
        if role == "user" and self.messages and self.messages[-1]["role"] == "user":
            last = self.messages.pop()
            message = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        self.messages.append(message)

    def _append_to_user(self, more: str) -> None:
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            self.add("user", more)
            return
        last = self.messages[places[-1]]
        self.messages[places[-1]] = {**last, "content": f"{last['content']}{encodable(more)}"}

    def _context(self) -> list[int]:
        """The tokens that the next turn reads: those so far and what follows them, or a new rendering."""
        if self._last is None:
            return self._next
        before, so_far, written = self._last
        more = self._renderer.addition(before, written, self.messages, self._tools)
        if more is not None:
            return [*so_far, *more]
        return self._renderer.encode(self._renderer.text(self.messages, self._tools))

    def _written(self, turn: Turn, sampled: list[int]) -> WrittenReply:
        from rlctl.environment.single_turn import decode

        tokenizer = self._renderer.tokenizer
        has_end = turn.finish_reason == "stop" and bool(sampled)
        content = decode(tokenizer, [sampled[:-1] if has_end else sampled])[0]
        end = tokenizer.decode(sampled[-1:]) if has_end else ""
        return WrittenReply(content, end, sampled[-1] if sampled else None)

    def _calls(self, read: list[int], content: str) -> tuple[list[ToolCall], str]:
        """The calls after the reply's thoughts, which the template may have opened."""
        from rlctl.reward.thoughts import without_thoughts

        asked = self._renderer.tokenizer.decode(read[-_LAST_TOKENS:])
        return parse_calls(without_thoughts(content, asked), self._tools)
