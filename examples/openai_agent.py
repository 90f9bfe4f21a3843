"""A function as an agent: it talks to the policy as to OpenAI's API, and returns the reward."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def agent(task: dict[str, Any], base_url: str, api_key: str, ground_truth: str) -> float:
    """Asks up to three times: 1 for the right answer at once, less for a later one, 0 for none."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(task["prompt"])
        for attempt in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            reply = answer.choices[0].message
            if (reply.content or "").strip() == ground_truth:
                return 1.0 - attempt / 3
            messages += [reply, {"role": "user", "content": "That is not right. Try again."}]
    return 0.0
