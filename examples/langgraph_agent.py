"""An agent of LangGraph: a graph with a tool, whose model is the policy."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def agent(task: dict[str, Any], base_url: str, api_key: str, ground_truth: str) -> float:
    """1 if the last message is the right answer."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)
    graph = create_react_agent(model, [add])
    ended = await graph.ainvoke({"messages": task["prompt"]}, {"recursion_limit": 8})
    return float(str(ended["messages"][-1].content).strip() == ground_truth)
