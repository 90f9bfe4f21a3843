"""Agents as users write them, see test_agent_function.py."""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import urllib.request
from functools import partial

QUESTION = {"role": "user", "content": "2+2?"}


def answer_to(messages, base_url, api_key):
    """The message that answers. Each test imports this file anew, and the official client in a second."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    ) as reply:
        return json.load(reply)["choices"][0]["message"]


async def asks_twice(task, base_url, api_key):
    messages = list(task["prompt"])
    for _ in range(2):
        answer = await asyncio.to_thread(answer_to, messages, base_url, api_key)
        messages += [answer, {"role": "user", "content": "Go on."}]


async def scores(task, base_url, api_key, ground_truth):
    await asks_twice(task, base_url, api_key)
    return 1.5 if (ground_truth, task["level"], task["data_source"]) == ("4", 3, "sums") else 0.0


async def blocks(task, base_url, api_key):
    """Synchronous, as many agents are."""
    return blocks_for(base_url, api_key)


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
    answer = await asyncio.to_thread(answer_to, [QUESTION], base_url, api_key)
    return json.loads(answer["content"])["score"]


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


def calls_on(task, base_url, api_key):
    """A thread of it asks on after the reward."""

    def ask():
        for _ in range(1000):
            with contextlib.suppress(Exception):
                answer_to([{"role": "user", "content": "more"}], base_url, api_key)

    blocks_for(base_url, api_key)
    threading.Thread(target=ask, daemon=True).start()
    return 1.0


async def takes_less(task):
    return 0.0


def plain(task, base_url, api_key, ground_truth):
    return blocks_for(base_url, api_key) + float(ground_truth == "4")


def blocks_for(base_url, api_key):
    answer = answer_to([QUESTION], base_url, api_key)
    time.sleep(0.3)
    return float(len(answer["content"]))


class Asks:
    """A new instance per episode."""

    def __init__(self, start=0.5):
        self.score = start

    def run(self, task, base_url, api_key):
        self.score += blocks_for(base_url, api_key)
        return self.score


class AsksAsync:
    async def run(self, task, base_url, api_key, ground_truth):
        await asks_twice(task, base_url, api_key)
        return float(ground_truth)


class AsksStatic:
    @staticmethod
    def run(task, base_url, api_key):
        return blocks_for(base_url, api_key)


class NeedsAnArgument:
    def __init__(self, client):
        self.client = client

    def run(self, task, base_url, api_key):
        return 0.0


class TakesLess:
    def run(self, task):
        return 0.0


def plain_takes_less(task):
    return 0.0


def yields(task, base_url, api_key):
    yield 0.0


async def yields_async(task, base_url, api_key):
    yield 0.0


class Callable:
    def __init__(self, start):
        self.start = start

    def __call__(self, task, base_url, api_key):
        return self.start + blocks_for(base_url, api_key)


class CallableAsync:
    async def __call__(self, task, base_url, api_key, ground_truth):
        await asks_twice(task, base_url, api_key)
        return float(ground_truth)


class CallableYields:
    def __call__(self, task, base_url, api_key):
        yield 0.0


async def with_extra(extra, task, base_url, api_key):
    await asks_twice(task, base_url, api_key)
    return extra


an_object, an_async_object = Callable(1.0), CallableAsync()
a_partial = partial(with_extra, 5.0)
a_lambda = lambda task, base_url, api_key: blocks_for(base_url, api_key)  # noqa: E731
a_bound_method = Asks(3.0).run
yielding_object = CallableYields()
partial_that_lacks = partial(with_extra, api_key="")
positional_only = lambda task, base_url, api_key, /: 0.0  # noqa: E731
a_number, a_list = 7, []
