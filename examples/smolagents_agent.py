"""An agent of smolagents: a plain function, which runs in a process of its own."""

from __future__ import annotations

from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Policy(OpenAIServerModel):
    """The policy; its replies end by themselves, so that all sampled tokens are known."""

    def generate(self, messages: list[Any], stop_sequences: object = None, **options: Any) -> Any:
        """A reply, without words at which it would be cut."""
        return super().generate(messages, **options)


def agent(task: dict[str, Any], base_url: str, api_key: str, ground_truth: str) -> float:
    """1 if the agent's final answer is right."""
    model = Policy(model_id="policy", api_base=base_url, api_key=api_key, tool_choice="auto")
    program = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
    answer = program.run(task["prompt"][-1]["content"])
    return float(str(answer).strip() == ground_truth)
