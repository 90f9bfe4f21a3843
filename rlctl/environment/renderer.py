"""What the policy reads of a conversation, as tokens: its chat template, turn by turn.

A sampled token is never decoded and encoded again. The next turn reads all tokens so far, followed by what
the template adds for the new messages: the difference of two renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlctl.errors import UsageError, first_line

Message = dict[str, Any]

_INSTRUCTIONS = """You may call these tools:
{schemas}
To call one, write its name and arguments as JSON:
<tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def as_message(self, number: int) -> Message:
        """In the form of chat completions."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{number}", "type": "function", "function": function}


class Renderer:
    """Renders conversations for one tokenizer.

    Args:
        kwargs: further arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self._kwargs = tokenizer, dict(kwargs or {})
        self._template = str(tokenizer.chat_template or "")
        self._reads_tools = re.search(r"\btools\b", self._template) is not None
        #: whether the template shows the calls of a message's `tool_calls`
        self.shows_calls = "tool_calls" in self._template

    @cached_property
    def tool_role(self) -> str:
        """Role of a tool's output: `tool`, or `user` if the template does not show messages of tools."""
        shown = [{"role": role, "content": f"<{role}>"} for role in ("user", "assistant", "tool")]
        try:
            return "tool" if self._template and "<tool>" in self.text(shown) else "user"
        except UsageError:
            return "user"

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The conversation as text, with the beginning of the policy's next turn.

        Raises:
            UsageError: the template refuses it.
        """
        shown, given = list(messages), dict(self._kwargs)
        if tools and self._reads_tools:
            given["tools"] = list(tools)
        elif tools:
            schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            shown = _with_system(shown, _INSTRUCTIONS.format(schemas=schemas))
        if not self._template:
            return "\n\n".join(str(message["content"]) for message in shown) + (
                "\n\n" if len(shown) > 1 else ""
            )
        try:
            found: str = self.tokenizer.apply_chat_template(
                shown, tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:  # Jinja's own errors and whatever the template raises
            what = f"the model's chat template refuses this conversation: {first_line(error)}"
            raise UsageError(what, where="environment", fix="use roles that the template supports") from error
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of rendered text."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def addition(
        self,
        before: Sequence[Message],
        reply: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """The tokens that follow a sampled reply, so that the policy reads `messages` and speaks again.

        Args:
            before: the conversation that the reply answered.
            reply: its sampled tokens, end of sequence included if it was sampled.
            messages: the conversation now: `before`, the reply as a message, and new messages.

        Returns:
            None if the template does not keep what was read and sampled as it was.
        """
        kept = self.text(before, tools) + self.tokenizer.decode(reply)
        now = self.text(messages, tools)  # with the end of the turn, if it was not sampled
        return self.encode(now[len(kept) :]) if now.startswith(kept) else None


def _with_system(messages: list[Message], text: str) -> list[Message]:
    """The messages with this text at the end of the system message."""
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)


def parse_calls(text: str) -> tuple[list[ToolCall], str]:
    """The tool calls that a reply contains, and what is wrong with one that cannot be read, for the policy.

    Formats: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), the same with
    `<function=…><parameter=…>` (Qwen3-Coder), `[TOOL_CALLS][{…}]` (Mistral), and a reply that is one JSON
    object with `name` and `parameters` or `arguments` (Llama 3).
    """
    calls: list[ToolCall] = []
    blocks = _HERMES.findall(text)
    if "[TOOL_CALLS]" in text:
        blocks = [text.partition("[TOOL_CALLS]")[2]]
    elif not blocks and re.match(r"\s*(?:<\|python_tag\|>)?\s*\{.*\}\s*\Z", text, re.DOTALL):
        found = _json(text.replace("<|python_tag|>", ""))
        if (
            not isinstance(found, dict)
            or "name" not in found
            or not found.keys() & {"parameters", "arguments"}
        ):
            return [], ""  # an answer in JSON
        blocks = [text.replace("<|python_tag|>", "")]
    for block in blocks:
        if functions := _FUNCTION.findall(block):
            calls += [
                ToolCall(name, {key: _json(value, value) for key, value in _PARAMETER.findall(body)})
                for name, body in functions
            ]
            continue
        found = _json(block)
        for one in found if isinstance(found, list) else [found]:
            arguments = one.get("arguments", one.get("parameters", {})) if isinstance(one, dict) else None
            arguments = _json(arguments, arguments) if isinstance(arguments, str) else arguments
            if (
                not isinstance(one, dict)
                or not isinstance(one.get("name"), str)
                or not isinstance(arguments, dict)
            ):
                return calls, 'a tool call must be JSON: {"name": "…", "arguments": {…}}'
            calls.append(ToolCall(one["name"], arguments))
    return calls, ""


def _json(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise
