"""An agent with the official client, see test_agent_function.py."""

from openai import AsyncOpenAI


async def asks_twice(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["prompt"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
