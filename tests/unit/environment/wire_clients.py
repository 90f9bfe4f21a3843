"""Official clients of both vendors behind one interface, each with its history in its own format."""

from __future__ import annotations

import json
from typing import Any

from rlctl.environment.endpoint import Endpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
Said = tuple[str, list[tuple[str, dict[str, Any]]], str, int]


class _Client:
    """A client and its conversation."""

    def __init__(self, client: Any, tools: list[dict[str, Any]]) -> None:
        self.client, self.tools = client, tools
        self.history: list[Any] = []
        self.open: list[str] = []  # ids of calls without a result

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})


def _openai(endpoint: Endpoint) -> Any:
    import openai

    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


class ChatClient(_Client):
    """Chat completions."""

    path, ends = "/v1/chat/completions", {"stop": "stop", "tools": "tool_calls", "cut": "length"}

    def __init__(self, endpoint: Endpoint, **_: Any) -> None:
        tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
        super().__init__(_openai(endpoint), tools)

    def result(self, text: str) -> None:
        self.history.append({"role": "tool", "tool_call_id": self.open.pop(0), "content": text})

    async def ask(self, *, streams: bool = False, max_tokens: int = 100, **more: Any) -> Said:
        given = {
            "model": "policy",
            "messages": self.history,
            "tools": self.tools,
            "max_tokens": max_tokens,
        } | more
        if streams:
            given["stream_options"] = {"include_usage": True}
            async with self.client.chat.completions.stream(**given) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_completion()
        else:
            answer = await self.client.chat.completions.create(**given)
        self.last = answer
        [choice] = answer.choices
        self.history.append(choice.message)
        calls = choice.message.tool_calls or []
        self.open = [call.id for call in calls]
        found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        return choice.message.content or "", found, choice.finish_reason, answer.usage.prompt_tokens


class MessagesClient(_Client):
    """Anthropic's Messages."""

    path, ends = "/v1/messages", {"stop": "end_turn", "tools": "tool_use", "cut": "max_tokens"}

    def __init__(self, endpoint: Endpoint, **_: Any) -> None:
        import anthropic

        client = anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)
        super().__init__(client, [{"name": "add", "input_schema": SCHEMA}])

    def result(self, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": self.open.pop(0), "content": text}
        self.history.append({"role": "user", "content": [block]})

    async def ask(self, *, streams: bool = False, max_tokens: int = 100, **more: Any) -> Said:
        given = {
            "model": "policy",
            "messages": self.history,
            "tools": self.tools,
            "max_tokens": max_tokens,
        } | more
        if streams:
            async with self.client.messages.stream(**given) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await self.client.messages.create(**given)
        self.last = answer
        self.history.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        self.open = [call.id for call in calls]
        text = "".join(block.text for block in answer.content if block.type == "text")
        return (
            text,
            [(call.name, call.input) for call in calls],
            answer.stop_reason,
            answer.usage.input_tokens,
        )


class ResponsesClient(_Client):
    """OpenAI's Responses; with `keeps` the endpoint keeps the history."""

    path, ends = "/v1/responses", {"stop": "completed", "tools": "completed", "cut": "incomplete"}

    def __init__(self, endpoint: Endpoint, *, keeps: bool = False) -> None:
        tools = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
        super().__init__(_openai(endpoint), tools)
        self.keeps, self.previous = keeps, None

    def result(self, text: str) -> None:
        self.history.append({"type": "function_call_output", "call_id": self.open.pop(0), "output": text})

    async def ask(self, *, streams: bool = False, max_tokens: int = 100, **more: Any) -> Said:
        given = {
            "model": "policy",
            "input": self.history,
            "tools": self.tools,
            "max_output_tokens": max_tokens,
        }
        given |= more
        if self.previous:
            given["previous_response_id"] = self.previous
        if streams:
            async with self.client.responses.stream(**given) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_response()
        else:
            answer = await self.client.responses.create(**given)
        self.last = answer
        if self.keeps:
            self.history, self.previous = [], answer.id
        else:
            self.history += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        self.open = [call.call_id for call in calls]
        found = [(call.name, json.loads(call.arguments)) for call in calls]
        return answer.output_text, found, answer.status, answer.usage.input_tokens


class KeptResponsesClient(ResponsesClient):
    """By `previous_response_id`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, keeps=True)


CLIENTS = (ChatClient, MessagesClient, ResponsesClient, KeptResponsesClient)
