"""The three wire formats of the endpoint, by official clients: recorded tokens, streams, tools, errors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from typing import Any

import httpx
import pytest

from rlctl.environment.endpoint import FORMATS, Endpoint
from rlctl.environment.recorded_chat import RecordedChat
from tests.scripted_engine import END, ScriptedEngine
from tests.unit.environment.test_recording_endpoint import CALL, answers, check_recorded, play
from tests.unit.environment.wire_clients import CLIENTS, SCHEMA, ChatClient, MessagesClient, ResponsesClient

openai = pytest.importorskip("openai")
# Its import takes seconds, which every process that collects tests would need.
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("anthropic"), reason="anthropic is not installed"
)

KINDS = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "2+2?"}]},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 50},
        lambda answer: answer["content"][0]["text"],
    ),
    "/v1/responses": ({"input": "2+2?"}, lambda answer: answer["output"][0]["content"][0]["text"]),
}
IMAGE = "data:image/png;base64,AAAA"


def message_of(path: str, answer: httpx.Response) -> str:
    """The message of an error, whose shape must be the format's."""
    body = answer.json()
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert set(body["error"]) >= {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


async def post(endpoint: Endpoint, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        key = {"x-api-key": endpoint.api_key} if path == "/v1/messages" else {}
        key = key or {"Authorization": f"Bearer {endpoint.api_key}"}
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await client.post(endpoint.root_url + path, content=content, headers=key)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", CLIENTS)
def test_official_clients_with_tools_make_one_sequence(kind: Any, streams: bool) -> None:
    engine = answers(
        CALL, '<tool_call>{"name": "add", "arguments": {"a": -3}}</tool_call>', "It is 4.", "Bye."
    )

    async def agent(_: Any, endpoint: Endpoint) -> list[Any]:
        one, said = kind(endpoint), []
        one.user("2+2?")
        said.append(await one.ask(streams=streams))
        one.result("4")
        said.append(await one.ask(streams=streams))
        one.result("no ü")
        said.append(await one.ask(streams=streams))
        one.user("Thanks!")
        return [*said, await one.ask(streams=streams)]

    [episode], [said] = play(engine, agent)
    assert not episode.error
    assert [each[:3] for each in said] == [
        ("Let me see. ", [("add", {"a": 2})], kind.ends["tools"]),
        ("", [("add", {"a": -3})], kind.ends["tools"]),
        ("It is 4.", [], kind.ends["stop"]),
        ("Bye.", [], kind.ends["stop"]),
    ]
    assert [each[3] for each in said] == [len(request.token_ids) for request in engine.asked]
    check_recorded(engine, episode)
    assert f"{CALL}{END}\n" in engine.tokenizer.decode(episode.sequences[0].token_ids)


@pytest.mark.parametrize("kind", CLIENTS[:3])
def test_an_agent_may_use_all_formats_in_turn(kind: Any) -> None:
    """Each new conversation is a sequence; its own format continues it."""
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> None:
        clients = [kind(endpoint), *(other(endpoint) for other in CLIENTS[:3])]
        for place, one in enumerate(clients):
            one.user(f"{place}?")
        for _turn in range(2):
            for one in clients:
                assert (await one.ask(tools=[]))[0] == "ok"
                one.user("Go on.")

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode, num_sequences=4)


@pytest.mark.parametrize("kind", CLIENTS[:3])
def test_limits_of_requests_and_episodes(kind: Any) -> None:
    import anthropic

    engine = ScriptedEngine(lambda _: "a long answer")

    async def agent(_: Any, endpoint: Endpoint) -> Any:
        one = kind(endpoint)
        one.user("2+2?")
        text, _, reason, _ = await one.ask(max_tokens=4)
        one.user("more")
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await one.ask()
        return text, reason, caught.value

    [episode], [(text, reason, error)] = play(engine, agent, max_turns=1)
    assert (text, reason) == ("a lo", kind.ends["cut"])
    assert episode.stop_reason == "max_turns"
    assert "max_turns" in str(error)


def _bad() -> list[tuple[str, str, Any, str]]:
    """Format, kind of fault, body, and what its message names."""
    chat, messages, responses = KINDS
    user = {"role": "user", "content": "2+2?"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block = {"role": "user", "content": [{"type": "image", "source": source}]}
    part = {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}
    system = {"role": "system", "content": "Be brief."}
    result = {"role": "tool", "tool_call_id": "call_x", "content": "4"}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_x", "content": "4"}]}
    output = {"type": "function_call_output", "call_id": "call_x", "output": "4"}
    pictured = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": block["content"]}],
    }
    calls = {"id": "call_y", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"name": "add", "description": "a"}
    twice = {
        chat: [{"type": "function", "function": tool}] * 2,
        messages: [tool | {"input_schema": {"type": "object", "properties": {}}}] * 2,
        responses: [tool | {"type": "function"}] * 2,
    }
    with_calls = {"role": "assistant", "content": "a", "tool_calls": [calls]}
    with_call = {"role": "assistant", "content": "a", "function_call": calls["function"]}
    return [
        *((path, "a tool twice", body | {"tools": twice[path]}, "add") for path, (body, _) in KINDS.items()),
        (
            messages,
            "calls of chat completions",
            {"messages": [user, with_calls], "max_tokens": 9},
            "tool_calls",
        ),
        (responses, "calls of chat completions", {"input": [user, with_calls, user]}, "tool_calls"),
        (chat, "a call of older chat completions", {"messages": [user, with_call, user]}, "function_call"),
        (chat, "unknown field", {"messages": [user], "temprature": 0}, "temprature"),
        (messages, "unknown field", {"messages": [user], "max_tokens": 9, "max_token": 9}, "max_token"),
        (responses, "unknown field", {"input": "a", "messages": [user]}, "messages"),
        (chat, "wrong role", {"messages": [user, {"role": "critic", "content": "a"}]}, "messages[1].role"),
        (chat, "no role", {"messages": [{"content": "a"}]}, "role"),
        (messages, "wrong role", {"messages": [{"role": "tool", "content": "a"}], "max_tokens": 9}, "role"),
        (
            messages,
            "a role of another format",
            {"messages": [{"role": "developer", "content": "a"}], "max_tokens": 9},
            "role",
        ),
        (responses, "wrong role", {"input": [{"role": "critic", "content": "a"}]}, "role"),
        (chat, "result without call", {"messages": [user, result]}, "call_x"),
        (
            chat,
            "result of another call",
            {"messages": [user, {"role": "assistant", "tool_calls": [calls]}, result]},
            "call_x",
        ),
        (
            chat,
            "result after the user spoke",
            {
                "messages": [
                    user,
                    {"role": "assistant", "tool_calls": [calls]},
                    user,
                    result | {"tool_call_id": "call_y"},
                ]
            },
            "call_y",
        ),
        (
            chat,
            "two results of one call",
            {
                "messages": [
                    user,
                    {"role": "assistant", "tool_calls": [calls]},
                    *[result | {"tool_call_id": "call_y"}] * 2,
                ]
            },
            "call_y",
        ),
        (messages, "result without call", {"messages": [user, results], "max_tokens": 9}, "toolu_x"),
        (responses, "result without call", {"input": [user, output]}, "call_x"),
        (chat, "image", {"messages": [image]}, "image_url"),
        (messages, "image", {"messages": [block], "max_tokens": 9}, "image"),
        (messages, "image of a tool", {"messages": [user, pictured], "max_tokens": 9}, "image"),
        (responses, "image", {"input": [part]}, "input_image"),
        (
            messages,
            "two system prompts",
            {"system": "a", "messages": [system, user], "max_tokens": 9},
            "system prompt",
        ),
        (
            messages,
            "a system prompt later",
            {"system": "a", "messages": [user, system, user], "max_tokens": 9},
            "system prompt",
        ),
        (responses, "two system prompts", {"instructions": "a", "input": [system, user]}, "system prompt"),
        (
            responses,
            "developer and instructions",
            {"instructions": "a", "input": [user, system | {"role": "developer"}, user]},
            "system prompt",
        ),
        (chat, "no messages", {"messages": []}, "message"),
        (messages, "no messages", {"messages": [], "max_tokens": 9}, "message"),
        (responses, "no input", {}, "input"),
        (messages, "no max_tokens", {"messages": [user]}, "max_tokens"),
        (
            messages,
            "a tool of the vendor",
            {"messages": [user], "max_tokens": 9, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "bash_20250124",
        ),
        (responses, "a tool of the vendor", {"input": "a", "tools": [{"type": "web_search"}]}, "web_search"),
        (
            responses,
            "structured output",
            {"input": "a", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        (responses, "an unknown response", {"input": "a", "previous_response_id": "resp_0"}, "resp_0"),
        (
            responses,
            "an unknown item",
            {"input": [{"type": "computer_call_output", "call_id": "a"}]},
            "computer_call_output",
        ),
        (
            chat,
            "arguments that are no JSON",
            {
                "messages": [
                    user,
                    {
                        "role": "assistant",
                        "tool_calls": [calls | {"function": {"name": "add", "arguments": "{"}}],
                    },
                ]
            },
            "arguments",
        ),
        (
            messages,
            "input that is text",
            {
                "messages": [
                    user,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "add", "input": "{}"}],
                    },
                ],
                "max_tokens": 9,
            },
            "input",
        ),
        *((path, "an array", [body], "object") for path, (body, _) in KINDS.items()),
        *((path, "stream as text", body | {"stream": "yes"}, "stream") for path, (body, _) in KINDS.items()),
        *(
            (path, "NaN", json.dumps(body | {"temperature": float("nan")}).encode(), "JSON")
            for path, (body, _) in KINDS.items()
        ),
        *((path, "half a body", json.dumps(body)[:-1].encode(), "JSON") for path, (body, _) in KINDS.items()),
        *((path, "Latin-1", b'{"model": "\xfc"}', "JSON") for path in KINDS),
        *((path, "deep", b"[" * 200_000, "JSON") for path in KINDS),
        *(
            (path, "9 MiB", json.dumps(body | {"user": "x" * (9 << 20)}).encode(), "bytes")
            for path, (body, _) in KINDS.items()
        ),
    ]


BAD = _bad()


@pytest.mark.parametrize("path", KINDS)
def test_bad_requests_are_errors_in_the_formats_shape_and_the_episode_goes_on(path: str) -> None:
    engine = ScriptedEngine(lambda _: "ok")
    cases = [case for case in BAD if case[0] == path]

    async def agent(_: Any, endpoint: Endpoint) -> Any:
        refused = [await post(endpoint, path, body) for _, _, body, _ in cases]
        return refused, await post(endpoint, path, KINDS[path][0])

    [episode], [(refused, last)] = play(engine, agent)
    for (_, fault, _, named), answer in zip(cases, refused, strict=True):
        status = 413 if fault == "9 MiB" else 400
        assert (fault, answer.status_code) == (fault, status)
        assert named in message_of(path, answer), fault
    assert KINDS[path][1](last.json()) == "ok"
    assert (episode.error, len(engine.turns)) == ("", 1)
    check_recorded(engine, episode)


@pytest.mark.parametrize("path", KINDS)
def test_the_key_and_the_path_are_checked_in_the_formats_shape(path: str) -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> list[httpx.Response]:
        right = {"Authorization": f"Bearer {endpoint.api_key}"}
        asked = [
            ("POST", path, {}),
            ("POST", path, {"x-api-key": "wrong"}),
            ("POST", path, {"Authorization": endpoint.api_key}),
            ("POST", path, right | {"Origin": "http://evil.example"}),
            ("POST", path, right | {"Host": "evil.example"}),
            ("GET", path, right),
            ("POST", f"{path}/batches", right),
        ]
        async with httpx.AsyncClient(trust_env=False) as client:
            return [
                await client.request(method, endpoint.root_url + to, json=KINDS[path][0], headers=headers)
                for method, to, headers in asked
            ]

    [episode], [refused] = play(engine, agent)
    assert [answer.status_code for answer in refused] == [401, 401, 401, 403, 403, 404, 404]
    assert all(message_of(path, answer) for answer in refused)
    assert episode.num_sampled == 0


def test_clients_of_the_vendors_read_errors_as_theirs() -> None:
    import anthropic

    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> None:
        for kind in CLIENTS[:3]:
            one = kind(endpoint)
            one.user("a")
            library = anthropic if kind is MessagesClient else openai
            with pytest.raises(library.BadRequestError, match="no_such_field"):
                await one.ask(extra_body={"no_such_field": 1})
            one.client.api_key = "wrong"
            with pytest.raises(library.AuthenticationError):
                await one.ask()

    play(engine, agent)


def _short(path: str, text: str) -> Any:
    body, _ = KINDS[path]
    return body | ({"input": text} if "input" in body else {"messages": [{"role": "user", "content": text}]})


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("streams_again", [False, True])
def test_a_client_that_reconnects_in_a_stream_gets_the_same_answer(path: str, streams_again: bool) -> None:
    """What it did not read is not sampled again; what it has read is."""
    numbers = iter(range(10))
    engine = ScriptedEngine(lambda _: f"{next(numbers)}" * 150)

    async def agent(_: Any, endpoint: Endpoint) -> list[str]:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        given: dict[str, Any] = {"url": endpoint.root_url + path, "headers": headers}
        body = KINDS[path][0] | {"stream": True}
        found = []
        async with httpx.AsyncClient(trust_env=False) as client:
            async with client.stream("POST", json=body, **given) as stream:
                async for part in stream.aiter_raw():
                    found.append(part.decode())
                    break  # the connection is closed with the rest unread
            for _time in range(2):
                answer = await client.post(json=body if streams_again else KINDS[path][0], **given)
                found.append(answer.text)
        return found

    [episode], [found] = play(engine, agent)
    assert "000" in found[0]
    assert "[DONE]" not in found[0]
    assert "000" in found[1]
    assert "111" in found[2]
    assert len(engine.turns) == 2
    check_recorded(engine, episode, num_sequences=2)


@pytest.mark.parametrize("path", KINDS)
def test_nothing_is_answered_after_the_reward(path: str) -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> Endpoint:
        await post(endpoint, path, KINDS[path][0])
        return endpoint

    [episode], [endpoint] = play(engine, agent)
    with pytest.raises(httpx.TransportError):
        asyncio.run(post(endpoint, path, KINDS[path][0]))
    assert (episode.error, len(engine.turns)) == ("", 1)


@pytest.mark.parametrize("path", KINDS)
def test_the_same_question_twice_is_sampled_twice(path: str) -> None:
    """As for the best of several answers, one after the other or at once."""
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> None:
        await post(endpoint, path, KINDS[path][0])
        await asyncio.gather(*(post(endpoint, path, KINDS[path][0]) for _ in range(3)))

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode, num_sequences=4)


@pytest.mark.parametrize(
    ("kind", "more", "in_use"),
    [
        (
            ChatClient,
            {"temperature": 0, "seed": 3, "tool_choice": "required"},
            {"temperature": 0.7, "seed": None},
        ),
        (MessagesClient, {"temperature": 0, "top_k": 5}, {"temperature": 0.7, "top_k": -1}),
        (ResponsesClient, {"temperature": 0, "top_p": 0.1}, {"temperature": 0.7, "top_p": 1.0}),
    ],
)
def test_what_is_ignored_is_answered_with_the_value_in_use_and_said_once(
    kind: Any,
    more: dict[str, Any],
    in_use: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordedChat, "_told", set())
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> list[Any]:
        one, answered = kind(endpoint), []
        for streams in (False, True):
            one.user("2+2?")
            await one.ask(streams=streams, extra_body=more)
            answered.append(one.last.model_dump())
        return answered

    with caplog.at_level(logging.WARNING, "rlctl.environment.recorded_chat"):
        _, [answered] = play(engine, agent, n=1, temperature=0.7)
    for answer in answered[: 1 if kind is ChatClient else 2]:  # OpenAI's client drops them from chunks
        assert {name: answer[name] for name in in_use} == in_use
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(more)
    assert any("temperature=0" in line and "0.7" in line for line in said)


@pytest.mark.parametrize(("kind", "name"), [(ChatClient, "stop"), (MessagesClient, "stop_sequences")])
def test_stop_texts_end_the_reply_and_its_recorded_tokens(kind: Any, name: str) -> None:
    engine = answers("I add. Observation: 5 and more", "I see.")

    async def agent(_: Any, endpoint: Endpoint) -> Any:
        one = kind(endpoint)
        one.user("2+2?")
        first = await one.ask(**{name: ["more", "Observation:"]})
        one.user("Observation: 4")
        return first, await one.ask(**{name: ["Observation:"]}), one.last

    [episode], [(first, second, _)] = play(engine, agent)
    assert first[0].strip() == "I add."
    assert first[2] in ("stop", "stop_sequence")
    assert second[0] == "I see."
    [sequence] = episode.sequences
    text = engine.tokenizer.decode(sequence.token_ids)
    assert "I add. Observation:" in text
    assert "5 and more" not in text
    length = len("I add. Observation:")
    first_turn = sequence.log_probs[sequence.turns == 0]
    assert first_turn.tolist() == engine.turns[0].log_probs[:length].tolist()
    assert episode.stop_reason == "completed"


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("/v1/chat/completions", "openai.types.chat.completion_create_params", "CompletionCreateParams"),
        ("/v1/messages", "anthropic.types.message_create_params", "MessageCreateParams"),
        ("/v1/responses", "openai.types.responses.response_create_params", "ResponseCreateParams"),
    ],
)
def test_every_field_of_the_official_client_is_known(path: str, module: str, name: str) -> None:
    """A field of a newer version would be refused as unknown."""
    from importlib import import_module

    fields = FORMATS[path].FIELDS  # type: ignore[attr-defined]
    known = fields.used | fields.without_effect | fields.sampling | set(fields.refused)
    base = getattr(import_module(module), f"{name}Base")
    assert set(base.__annotations__) - known == set()
    assert "stream" in known


@pytest.mark.parametrize("kind", CLIENTS[:3])
def test_instructions_and_developer_messages_are_system_messages(kind: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok")
    field = {MessagesClient: "system", ResponsesClient: "instructions"}.get(kind)

    async def agent(_: Any, endpoint: Endpoint) -> None:
        one = kind(endpoint)
        if not field:
            one.history += [{"role": "developer", "content": "Be"}, {"role": "system", "content": "brief."}]
        one.user("2+2?")
        more = {field: "Be\n\nbrief."} if field else {}
        for _turn in range(2):
            await one.ask(tools=[], **more)
            one.user("Go on.")

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode)
    assert "system\nBe\n\nbrief.<|im_end|>\n" in engine.tokenizer.decode(episode.sequences[0].token_ids)


def test_thoughts_and_parallel_calls_of_messages() -> None:
    """Two calls in a reply, whose results come in one message with text after them."""
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    engine = answers(call % 1 + call % 2, "3")

    async def agent(_: Any, endpoint: Endpoint) -> None:
        one = MessagesClient(endpoint)
        one.user("2+2?")
        await one.ask(max_tokens=190)
        results = [
            {"type": "tool_result", "tool_use_id": number, "content": [{"type": "text", "text": "4"}]}
            for number in one.open
        ]
        one.history.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
        await one.ask()

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode)
    text = engine.tokenizer.decode(episode.sequences[0].token_ids)
    assert text.count("4<|im_end|>") == 2
    assert "user\nGo on.<|im_end|>" in text


def test_a_tool_schema_of_each_format_reads_the_same() -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> None:
        for kind in CLIENTS[:3]:
            one = kind(endpoint)
            one.user("2+2?")
            await one.ask()

    [episode], _ = play(engine, agent)
    assert len({tuple(request.token_ids) for request in engine.asked}) == 1
    assert json.dumps(SCHEMA) in engine.tokenizer.decode(engine.asked[0].token_ids)
    assert episode.error == ""
