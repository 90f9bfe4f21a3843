"""The recording endpoint, by the real client of OpenAI's API: what it answers, refuses and records."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rlctl.batch import Episode, Task
from rlctl.environment.endpoint import Endpoint
from rlctl.environment.protocol import Outcome, Sampler
from rlctl.environment.recorded_chat import RecordedChat
from rlctl.environment.renderer import ChatRenderer
from rlctl.environment.run_episodes import run_episodes
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted_engine import END, ScriptedEngine
from tests.unit.environment.scripted import ADD

openai = pytest.importorskip("openai")

SAMPLING = Sampling(max_response_length=200)
QUESTION = [{"role": "user", "content": "2+2?"}]
CALL = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
Program = Callable[[Any, Endpoint], Awaitable[Any]]


def _calling(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]


class Programs:
    """An environment whose episode is a coroutine with a client."""

    def __init__(self, engine: ScriptedEngine, program: Program, sampling: Sampling) -> None:
        self._renderer, self._program = ChatRenderer(engine.tokenizer), program
        self._sampling = sampling
        self.returned: list[Any] = []

    async def run(self, task: Task, sampler: Sampler) -> Outcome:
        chat = RecordedChat(self._renderer, sampler, task, self._sampling)
        async with Endpoint(chat) as endpoint:
            given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0}
            async with openai.AsyncOpenAI(**given) as client:
                running = asyncio.ensure_future(self._program(client, endpoint))
                await asyncio.wait({running, chat.failed}, return_when=asyncio.FIRST_COMPLETED)
                if chat.failed.done():
                    running.cancel()
                    chat.failed.result()
                self.returned.append(running.result())
        return Outcome("", messages=chat.messages, stop_reason=chat.limit or "completed", metrics=chat.counts)

    def close(self) -> None:
        """Nothing to end."""


def play(
    engine: Any,
    program: Program,
    n: int = 1,
    temperature: float = 1.0,
    length: int = 4000,
    **spec: Any,
) -> tuple[list[Episode], list[Any]]:
    """Episodes of `QUESTION`, and what their programs returned."""
    sampling = replace(SAMPLING, temperature=temperature)
    renderer = ChatRenderer(engine.tokenizer)
    ids = renderer.encode(renderer.text(QUESTION))
    environment = Programs(engine, program, sampling)
    members = [(Task(ids, "", messages=tuple(QUESTION)), member) for member in range(n)]
    spec = {"name": "single_turn", "max_turns": 8} | spec
    episodes = run_episodes(environment, engine, members, sampling, 1, EnvironmentSpec(**spec), length)
    return episodes, environment.returned


def answers(*texts: str) -> ScriptedEngine:
    """An engine that gives these answers in turn."""
    left = list(texts)
    return ScriptedEngine(lambda _: left.pop(0))


async def ask(client: Any, messages: list[Any], **more: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **more)


async def ask_in_parts(client: Any, messages: list[Any], **more: Any) -> tuple[dict[str, Any], str, Any]:
    """A streamed answer: the message that its parts make, its finish reason and usage."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    reason, usage = "", None
    options = {"stream_options": {"include_usage": True}}
    async for part in await ask(client, messages, stream=True, **options, **more):
        usage = part.usage or usage
        for choice in part.choices:
            reason = choice.finish_reason or reason
            if choice.delta.content:
                message["content"] = (message["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or []:
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
    return message, reason, usage


def check_recorded(engine: ScriptedEngine, episode: Episode, num_sequences: int = 1) -> None:
    """Every sampled token is recorded once, with its log-prob; sequences are what the engine read."""
    assert len(episode.sequences) == num_sequences
    turns = [turn for sequence in episode.sequences for turn in sorted(set(sequence.turns.tolist()))]
    assert sorted(turns) == list(range(len(engine.turns)))
    for sequence in episode.sequences:
        ids = sequence.token_ids.tolist()
        for number in set(sequence.turns.tolist()):
            request, turn = engine.asked[number], engine.turns[number]
            read = list(request.token_ids)
            assert ids[: len(read) + len(turn.token_ids)] == read + turn.token_ids.tolist()
            assert sequence.sampled[len(read) : len(read) + len(turn.token_ids)].all()
            assert sequence.log_probs[sequence.turns == number].tolist() == turn.log_probs.tolist()
        assert int(sequence.sampled.sum()) == len(sequence.log_probs)


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_tools_is_one_sequence(streams: bool) -> None:
    engine = answers(CALL, "It is 4.", "You are welcome.")

    async def agent(client: Any, _: Endpoint) -> list[Any]:
        messages: list[Any] = list(QUESTION)
        found = []
        for say in ({"role": "tool", "content": "4"}, {"role": "user", "content": "Thanks!"}, None):
            if streams:
                message, reason, usage = await ask_in_parts(client, messages, tools=[ADD])
                messages.append(message)
                calls = message.get("tool_calls", [])
            else:
                answer = await ask(client, messages, tools=[ADD])
                message, reason, usage = (
                    answer.choices[0].message,
                    answer.choices[0].finish_reason,
                    answer.usage,
                )
                messages.append(message)  # verbatim
                calls = [call.model_dump() for call in message.tool_calls or []]
                message = message.model_dump()
            found.append((message["content"], [c["function"] for c in calls], reason, usage.prompt_tokens))
            if say:
                messages.append(say | ({"tool_call_id": calls[0]["id"]} if calls else {}))
        return found

    [episode], [found] = play(engine, agent)
    assert not episode.error
    call = {"name": "add", "arguments": '{"a": 2}'}
    assert [one[:3] for one in found] == [
        ("Let me see. ", [call], "tool_calls"),
        ("It is 4.", [], "stop"),
        ("You are welcome.", [], "stop"),
    ]
    assert [one[3] for one in found] == [len(request.token_ids) for request in engine.asked]
    check_recorded(engine, episode)
    text = engine.tokenizer.decode(episode.sequences[0].token_ids)
    assert f"{CALL}{END}\n" in text  # as it was sampled
    assert episode.metrics["num_tool_calls"] == 1


def test_messages_written_in_other_words_of_the_api_continue_the_sequence() -> None:
    """Content as parts, `developer` for `system`, null for no text, arguments with other spaces."""
    engine = answers('<tool_call>{"name": "add", "arguments": {"a": 2, "b": "ü"}}</tool_call>', "4")

    async def agent(client: Any, _: Endpoint) -> None:
        start = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *QUESTION]
        answer = await ask(client, start, tools=[ADD])
        [call] = [call.model_dump() for call in answer.choices[0].message.tool_calls]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        start[0] = {"role": "system", "content": "Be brief."}
        said = {"role": "assistant", "tool_calls": [call], "content": None, "refusal": None}
        result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "4"}]}
        await ask(client, [*start, said, result], tools=[ADD])

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said | {"content": "Something else."},
        lambda said: (
            said | {"tool_calls": [{**said["tool_calls"][0], "function": {"name": "add", "arguments": "{}"}}]}
        ),
        lambda said: {"role": "assistant", "content": said["content"]},
    ],
)
def test_a_changed_reply_begins_a_new_sequence(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    engine = answers(CALL, "4")

    async def agent(client: Any, _: Endpoint) -> None:
        answer = await ask(client, QUESTION, tools=[ADD])
        said = change(answer.choices[0].message.model_dump())
        await ask(client, [*QUESTION, said, {"role": "user", "content": "So?"}], tools=[ADD])

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode, num_sequences=2)


def test_two_conversations_by_turns_are_two_sequences() -> None:
    """As of an agent with a helper; the second has another system message."""
    engine = ScriptedEngine(lambda text: "ok" if "helper" in text else "yes")

    async def agent(client: Any, _: Endpoint) -> None:
        ours, helpers = list(QUESTION), [{"role": "system", "content": "You are a helper."}, *QUESTION]
        for _turn in range(3):
            for messages in (ours, helpers):
                messages.append((await ask(client, messages)).choices[0].message)
                messages.append({"role": "user", "content": "Go on."})

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode, num_sequences=2)
    assert [sorted(set(s.turns.tolist())) for s in episode.sequences] == [[0, 2, 4], [1, 3, 5]]


def test_a_branch_continues_from_the_tokens_that_were_sampled() -> None:
    """Two continuations of one reply: its tokens are trained on once, and read twice as they were."""
    engine = answers("one", "two", "three")

    async def agent(client: Any, _: Endpoint) -> None:
        start = [*QUESTION, (await ask(client, QUESTION)).choices[0].message]
        for text in ("a", "b"):
            await ask(client, [*start, {"role": "user", "content": text}])

    [episode], _ = play(engine, agent)
    check_recorded(engine, episode, num_sequences=2)
    shared = [*engine.asked[0].token_ids, *engine.turns[0].token_ids.tolist()]
    assert all(s.token_ids[: len(shared)].tolist() == shared for s in episode.sequences)
    assert episode.num_sampled == sum(len(turn.token_ids) for turn in engine.turns)


def test_requests_of_one_episode_are_answered_one_after_the_other() -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(client: Any, _: Endpoint) -> None:
        await asyncio.gather(*(ask(client, [{"role": "user", "content": str(i)}]) for i in range(4)))

    [episode], _ = play(engine, agent)
    assert engine.batches == [1, 1, 1, 1]
    check_recorded(engine, episode, num_sequences=4)


def test_many_episodes_at_once_share_batches() -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(client: Any, _: Endpoint) -> None:
        messages: list[Any] = list(QUESTION)
        for _turn in range(2):
            messages.append((await ask(client, messages)).choices[0].message)
            messages.append({"role": "user", "content": "Go on."})

    episodes, _ = play(engine, agent, n=64, lockstep=True)
    assert engine.batches == [64, 64]
    assert [(len(e.sequences), e.metrics["num_turns"], e.error) for e in episodes] == [(1, 2.0, "")] * 64


@pytest.mark.parametrize(
    ("limits", "length", "code"),
    [
        ({"max_turns": 1}, 1, "max_turns"),
        ({"max_episode_tokens": 3}, 1, "max_tokens"),
        ({}, 5000, "context_length_exceeded"),
    ],
)
def test_a_limit_is_an_error_that_the_client_reads(limits: dict[str, int], length: int, code: str) -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(client: Any, _: Endpoint) -> Any:
        said = (await ask(client, QUESTION)).choices[0].message
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [*QUESTION, said, {"role": "user", "content": "x" * length}])
        return caught.value

    [episode], [error] = play(engine, agent, **limits)
    assert (error.status_code, error.code, error.type) == (400, code, "invalid_request_error")
    assert episode.stop_reason == {"context_length_exceeded": "context_overflow"}.get(code, code)
    assert len(engine.asked) == 1


def test_a_request_limits_its_own_tokens() -> None:
    engine = ScriptedEngine(lambda _: "a long answer")

    async def agent(client: Any, _: Endpoint) -> Any:
        return (await ask(client, QUESTION, max_tokens=4)).choices[0]

    [episode], [choice] = play(engine, agent)
    assert (choice.message.content, choice.finish_reason, episode.num_sampled) == ("a lo", "length", 4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"n": 2}, "n=2"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": "2+2?"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "message"),
        ({"messages": [{"content": "no role"}]}, "role"),
        ({"messages": [7]}, "message"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tools": [{"function": {}}]}, "tools"),
        ({"tools": [{"function": "add"}]}, "tools"),
        ({"stream": True, "stream_options": [True]}, "stream_options"),
        ({"messages": [{"role": "assistant", "tool_calls": _calling("[" * 100_000)}]}, "message"),
    ],
)
def test_what_cannot_be_recorded_is_refused(more: dict[str, Any], named: str) -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": QUESTION} | more
            return await client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)

    [episode], [answer] = play(engine, agent)
    assert (answer.status_code, engine.asked, episode.num_sampled) == (400, [], 0)
    assert named in answer.json()["error"]["message"]


def test_lone_surrogates_that_the_policy_wrote_do_not_exclude_the_episode() -> None:
    """No tokenizer takes them; an agent may send them, in the call and in a tool that repeats its input."""
    engine = answers('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "It is 4.")

    async def agent(_: Any, endpoint: Endpoint) -> list[int]:
        messages: list[Any] = list(QUESTION)
        found = []
        async with httpx.AsyncClient(trust_env=False) as client:
            for say in ({"role": "tool", "content": "no \ud83d"}, {"role": "user", "content": "\udc00"}):
                answer = await client.post(
                    f"{endpoint.base_url}/chat/completions",
                    content=json.dumps({"messages": messages, "tools": [ADD]}),
                    headers={"Authorization": f"Bearer {endpoint.api_key}"},
                )
                found.append(answer.status_code)
                messages += [answer.json()["choices"][0]["message"], say]
        return found

    [episode], [found] = play(engine, agent)
    assert (episode.error, found) == ("", [200, 200])
    check_recorded(engine, episode)
    json.dumps(episode.messages, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"headers": {"Authorization": "Bearer wrong"}}, 401),
        ({"headers": {"Authorization": "Bearer ü".encode()}}, 401),
        ({"headers": {"Authorization": ""}}, 401),
        ({"headers": {"Host": "evil.example"}}, 403),
        ({"headers": {"Origin": "http://evil.example"}}, 403),
        ({"method": "GET"}, 404),
        ({"path": "/models"}, 404),
        ({"path": "/chat/completions/../../../etc/passwd"}, 404),
        ({"content": b"{"}, 400),
        ({"content": b"[" * 100_000}, 400),
        ({"content": b"x" * (9 << 20)}, 413),
    ],
)
def test_requests_that_are_not_an_agents_are_refused(change: dict[str, Any], status: int) -> None:
    engine = ScriptedEngine(lambda _: "ok")

    async def agent(_: Any, endpoint: Endpoint) -> httpx.Response:
        given = {"method": "POST", "path": "/chat/completions", "content": json.dumps({"messages": QUESTION})}
        given |= change
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} | given.pop("headers", {})
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.request(
                given["method"],
                endpoint.base_url + given["path"],
                content=given["content"],
                headers=headers,
            )

    [episode], [answer] = play(engine, agent)
    assert (answer.status_code, engine.asked, episode.num_sampled) == (status, [], 0)
    assert answer.json()["error"]["code"]


def test_keys_differ_and_end_with_their_episode() -> None:
    engine = ScriptedEngine(lambda _: "ok")
    seen: list[Endpoint] = []

    async def agent(client: Any, endpoint: Endpoint) -> None:
        seen.append(endpoint)
        await ask(client, QUESTION)
        for other in seen[:-1]:
            given = {"base_url": endpoint.base_url, "api_key": other.api_key, "max_retries": 0}
            async with openai.AsyncOpenAI(**given) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await ask(stranger, QUESTION)
            given["base_url"] = other.base_url
            async with openai.AsyncOpenAI(**given) as late:
                with pytest.raises((openai.APIConnectionError, openai.AuthenticationError)):
                    await ask(late, QUESTION)

    episodes, _ = play(engine, agent, n=3, concurrency=1)
    assert [episode.error for episode in episodes] == ["", "", ""]
    assert len({endpoint.api_key for endpoint in seen}) == len(seen) == 3
    assert all(len(endpoint.api_key) >= 40 for endpoint in seen)


def test_an_answer_that_did_not_arrive_is_not_sampled_again() -> None:
    """A client with a short time limit asks again: no turn that it never read is trained on."""
    gave_up = threading.Event()

    def answer(_: str) -> str:
        assert gave_up.wait(60)
        return "ok"

    engine = ScriptedEngine(answer)

    async def agent(client: Any, _: Endpoint) -> Any:
        with pytest.raises(openai.APITimeoutError):
            await ask(client, QUESTION, timeout=0.1)
        asyncio.get_running_loop().call_later(0.1, gave_up.set)
        return (await ask(client, QUESTION)).choices[0].message.content

    [episode], [content] = play(engine, agent)
    assert (content, len(engine.turns)) == ("ok", 1)
    check_recorded(engine, episode)


def test_a_failing_engine_ends_the_run_not_the_agent() -> None:
    """The agent would take a failing engine for a refusal, and score it."""

    def broken(_: str) -> str:
        raise RunFailure("the engine is gone")

    async def agent(client: Any, _: Endpoint) -> None:
        while True:
            try:
                await ask(client, QUESTION)
            except openai.APIError:
                await asyncio.sleep(0.01)

    with pytest.raises(RunFailure, match="the engine is gone"):
        play(ScriptedEngine(broken), agent, n=3)
