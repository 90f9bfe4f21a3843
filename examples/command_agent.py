"""A program as an agent: whatever can send HTTP. It asks the policy, and once more if the answer is wrong."""

import json
import os
import sys
import urllib.request

task = json.load(sys.stdin)  # the row's columns, its messages as `prompt`


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The policy's reply: OpenAI's chat completions; /responses and Anthropic's /v1/messages work as well."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer)["choices"][0]["message"])


messages = list(task["prompt"])
reward = 0.0
for value in (1.0, 0.5):
    reply = ask(messages)
    if reply["content"].strip() == task["ground_truth"]:
        reward = value
        break
    messages += [reply, {"role": "user", "content": "That is wrong. Try again: "}]
print(reward)  # the last line
