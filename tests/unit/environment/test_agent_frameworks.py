"""Agent frameworks as clients of the endpoint: each continues one sequence through its calls of a tool.

The frameworks are not installed by `make setup-dev`: `pip install smolagents openai-agents langgraph
langchain-openai langchain-anthropic` runs the tests that are otherwise skipped.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.environment.endpoint import Endpoint
from tests.scripted_engine import ScriptedEngine
from tests.unit.environment.test_recording_endpoint import answers, check_recorded, play

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents(api: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path(__file__).parent)  # another module of this name
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != here])
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    engine = answers(CALL, "It is 4.")

    async def agent(client: Any, _: Endpoint) -> Any:
        agents.set_tracing_disabled(True)
        kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
        model = kinds[api](model="policy", openai_client=client)
        tool = agents.function_tool(add)
        one = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[tool])
        if not streams:
            return (await agents.Runner.run(one, "2+2?")).final_output
        running = agents.Runner.run_streamed(one, "2+2?")
        async for _event in running.stream_events():
            pass
        return running.final_output

    [episode], [output] = play(engine, agent)
    assert output == "It is 4."
    check_recorded(engine, episode)


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("streams", [False, True])
def test_langgraph(api: str, streams: bool) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="langgraph is not installed")
    engine = answers(f"Let me see. {CALL}", "It is 4.")

    async def agent(_: Any, endpoint: Endpoint) -> str:
        if api == "anthropic":
            from langchain_anthropic import ChatAnthropic

            given = {"base_url": endpoint.root_url, "api_key": endpoint.api_key, "max_tokens": 100}
            model: Any = ChatAnthropic(model="policy", streaming=streams, **given)
        else:
            from langchain_openai import ChatOpenAI

            given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
            model = ChatOpenAI(
                model="policy", streaming=streams, use_responses_api=api == "responses", **given
            )
        graph = prebuilt.create_react_agent(model, [add], prompt="Be brief.")
        state = await graph.ainvoke({"messages": [("user", "2+2?")]})
        return str(state["messages"][-1].text)

    [episode], [output] = play(engine, agent)
    assert output == "It is 4."
    check_recorded(engine, episode)


@pytest.mark.parametrize("kind", ["tools", "code"])
def test_smolagents(kind: str) -> None:
    smolagents = pytest.importorskip("smolagents", reason="smolagents is not installed")
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "4"}}</tool_call>'
    code = "Thought: I add.\n<code>\nprint(add(a=2, b=2))\n</code>", "<code>\nfinal_answer('4')\n</code>"
    engine: ScriptedEngine = answers(*((CALL, final) if kind == "tools" else code))

    async def agent(_: Any, endpoint: Endpoint) -> str:
        given = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
        model = smolagents.OpenAIModel(model_id="policy", **given)
        agents = {"tools": smolagents.ToolCallingAgent, "code": smolagents.CodeAgent}
        one = agents[kind](tools=[smolagents.tool(add)], model=model, verbosity_level=0)
        return str(await asyncio.to_thread(one.run, "2+2?"))

    [episode], [output] = play(engine, agent, length=40_000)
    assert output == "4"
    assert episode.error == ""
    assert episode.metrics["num_turns"] == 2
    # it writes its calls of tools anew, as text
    assert episode.metrics["num_sequences"] == {"tools": 2, "code": 1}[kind]
