"""Agents as users write them, see test_agent_function.py."""

import asyncio
import json
import os
import sys
import time

from openai import AsyncOpenAI, OpenAI

QUESTION = {"role": "user", "content": "2+2?"}


async def asks_twice(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["prompt"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]


async def scores(task, base_url, api_key, ground_truth):
    await asks_twice(task, base_url, api_key)
    return 1.5 if (ground_truth, task["level"], task["data_source"]) == ("4", 3, "sums") else 0.0


async def blocks(task, base_url, api_key):
    """Synchronous, as many agents are."""
    answer = OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(
        model="policy", messages=[QUESTION]
    )
    time.sleep(0.3)
    return float(len(answer.choices[0].message.content))


PROGRAM = """
import json, os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "2+2?"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def starts_a_program(task, base_url, api_key):
    variables = os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, env=variables, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await started.communicate()
    return float(output == b"ok\n")


async def sees_the_secret(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    return float("AGENT_TEST_SECRET" in os.environ) + 2.0 * (os.environ.get("AGENT_TEST_KEY") == "k")


async def raises_at_once(task, base_url, api_key):
    raise ConnectionRefusedError("no search server")


async def reads_json(task, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    answer = await client.chat.completions.create(model="policy", messages=[QUESTION])
    return json.loads(answer.choices[0].message.content)["score"]


async def reads_its_own_json(task, base_url, api_key):
    json.loads("no JSON")


async def raises_later(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    raise ConnectionRefusedError("no search server")


async def ends_its_process(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    os._exit(3)


async def returns_text(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    return "good"


async def returns_nan(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    return float("nan")


async def never_asks(task, base_url, api_key):
    return 1.0


async def hangs(task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    time.sleep(1000)


async def goes_on(task, base_url, api_key):
    """Until a limit refuses it; does not catch that."""
    for _ in range(100):
        await asks_twice(task, base_url, api_key)


async def takes_less(task):
    return 0.0


def is_no_coroutine(task, base_url, api_key):
    return 0.0
