"""What the policy reads of a conversation, as tokens: its chat template, turn by turn.

A sampled token is never decoded and encoded again. The next turn reads all tokens so far, followed by what
the template adds for the new messages: the difference of two renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlctl.chat_template import rendered
from rlctl.environment.single_turn import LEFT_OUT
from rlctl.errors import UsageError, first_line

Message = dict[str, Any]

#: First of the private characters that stand for special tokens.
_PRIVATE = 0x100000

_INSTRUCTIONS = """You may call these tools:
{schemas}
To call one, write its name and arguments as JSON:
<tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>"""


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A reply as it was sampled.

    Attributes:
        content: its text, without the token that ended it.
        end: text of the token that ended it; empty: it was cut.
        last_token: its last token; None: it has none.
    """

    content: str
    end: str = ""
    last_token: int | None = None


class ChatRenderer:
    """Renders conversations for one tokenizer.

    Text of special tokens in a message is data: it never becomes a control token. In rendered text a
    private character stands for it until it is encoded.

    Args:
        kwargs: further arguments of the chat template; those that are None are omitted.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._kwargs = {name: value for name, value in (kwargs or {}).items() if value is not None}
        self._template = str(tokenizer.chat_template or "")
        self._reads_tools = re.search(r"\btools\b", self._template) is not None
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._special = {text: chr(_PRIVATE + i) for i, text in enumerate(sorted(filter(None, special)))}
        # longest first; a character that would stand for a token in rendered text is replaced
        texts = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._any_special = re.compile(f"{texts or '(?!)'}|[{chr(_PRIVATE)}-{chr(_PRIVATE + 0xFFFD)}]")
        #: those that decoding a reply leaves out; others may be part of what the policy wrote
        self._left_out = {getattr(tokenizer, f"{name}_token", None) for name in LEFT_OUT}
        #: whether the template shows the calls of a message's `tool_calls`
        self.shows_calls = "tool_calls" in self._template

    @cached_property
    def tool_role(self) -> str:
        """Role of a tool's output: `tool`, or `user` if the template does not show messages of tools."""
        return "tool" if self._template and self._shows("user", "assistant", "tool") else "user"

    @cached_property
    def _takes_system(self) -> bool:
        return not self._template or self._shows("system", "user")

    @cached_property
    def takes_later_system(self) -> bool:
        """Whether the template shows a system message that follows other messages."""
        return not self._template or self._shows("system", "user", "assistant", "system")

    def _shows(self, *roles: str) -> bool:
        """Whether the template shows messages of these roles, in this order."""
        try:
            text = self.text([{"role": role, "content": f"({role})"} for role in roles])
        except UsageError:
            return False
        return all(f"({role})" in text for role in roles)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as text, with the beginning of the policy's next turn.

        If it ends with a message of the assistant, the next turn continues this message.

        Raises:
            UsageError: the template refuses it.
        """
        shown = [self._safe(message) for message in messages]
        arguments = dict(self._kwargs)
        if tools and self._reads_tools:
            arguments["tools"] = list(tools)
        elif tools:
            schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            shown = self._with_instructions(shown, _INSTRUCTIONS.format(schemas=schemas))
        if not self._template:
            return self._start + "".join(map(_untemplated, [None, *shown], shown))
        continues = bool(shown) and shown[-1]["role"] == "assistant"
        arguments |= {"add_generation_prompt": not continues, "continue_final_message": continues}
        try:
            found = rendered(self.tokenizer, shown, **arguments)
        except Exception as error:  # Jinja's own errors and whatever the template raises
            what = f"the model's chat template refuses this conversation: {first_line(error)}"
            raise UsageError(what, where="environment", fix="use roles that the template supports") from error
        return found

    @cached_property
    def _start(self) -> str:
        """The start token, if the tokenizer adds it to plain text."""
        added = self.tokenizer("")["input_ids"]
        return str(self.tokenizer.bos_token) if added and added[0] == self.tokenizer.bos_token_id else ""

    def _safe(self, message: Message) -> Message:
        """The message with private characters for the special tokens that its text must not become."""
        is_written = message["role"] == "assistant"
        return {
            key: self._hidden(value, is_written=is_written) if isinstance(value, str) else value
            for key, value in message.items()
        }

    def _hidden(self, text: str, *, is_written: bool) -> str:
        def one(found: re.Match[str]) -> str:
            may_be_sampled = is_written and found[0] not in self._left_out
            return found[0] if may_be_sampled else self._special.get(found[0], "\ufffd")

        return self._any_special.sub(one, text)

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """The tokens of rendered text.

        Args:
            after: a token that it follows, which may change its first tokens (white space, word starts).
        """
        if after is not None:
            ids = self.encode(self.tokenizer.decode([after]) + text)
            return ids[1:] if ids[:1] == [after] else self.encode(text)
        ids = []
        plain = {private: special for special, private in self._special.items()}
        for part in filter(None, re.split(f"([{chr(_PRIVATE)}-{chr(_PRIVATE + 0xFFFD)}])", text)):
            split = {"split_special_tokens": True} if part in plain else {}
            found = self.tokenizer(plain.get(part, part), add_special_tokens=False, verbose=False, **split)
            ids += found["input_ids"]
        return ids

    def addition(
        self,
        before: Sequence[Message],
        reply: WrittenReply,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """The tokens that follow a sampled reply, so that the policy reads `messages` and speaks again.

        White space that the template changes around the reply's words does not matter.

        Args:
            before: the conversation that the reply answered.
            messages: the conversation now: `before`, the reply as a message, and new messages.

        Returns:
            None if the template does not keep what was read and sampled as it was.
        """
        start = self.text(before, tools)
        now = self.text(messages, tools)
        if not now.startswith(start):
            return None
        rest = now[len(start) :]
        content = self._hidden(reply.content, is_written=True)
        length = len(content) if rest.startswith(content) else _length_in(rest, content)
        if length is None:
            return None
        rest = rest[length:]
        if reply.end and rest.lstrip().startswith(reply.end):
            rest = rest.partition(reply.end)[2]
        elif reply.end and (other := self._any_special.match(rest.lstrip())) and other[0] in self._special:
            return None  # the template ends the turn with another token
        return self.encode(rest, reply.last_token)

    def _with_instructions(self, messages: list[Message], text: str) -> list[Message]:
        """The messages with this text at the end of the system message, or before the first one."""
        first = messages[0] if messages else {"role": "", "content": ""}
        if first["role"] == "system":
            return [first | {"content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        if self._takes_system or first["role"] != "user":
            return [{"role": "system", "content": text}, *messages]
        return [first | {"content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _untemplated(previous: Message | None, message: Message) -> str:
    """A message without a chat template: a blank line before it, but not beside what the policy wrote."""
    is_apart = previous is not None and "assistant" not in (previous["role"], message["role"])
    return ("\n\n" if is_apart else "") + str(message["content"])


def _length_in(text: str, start: str) -> int | None:
    """Length of the beginning of a text that is `start` but for white space; None if it is not."""
    at = 0
    for char in "".join(start.split()):
        while text[at : at + 1].isspace():
            at += 1
        if text[at : at + 1] != char:
            return None
        at += 1
    return at
