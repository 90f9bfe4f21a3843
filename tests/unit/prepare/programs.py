"""Rows with the columns of HumanEval, MBPP (full and sanitized), APPS and LiveCodeBench."""

import base64
import json
import pickle
import zlib

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(n: int) -> int:\n    """Returns twice n."""\n',
    "canonical_solution": "    return 2 * n\n",
    "test": "METADATA = {}\n\ndef check(f):\n    assert f(2) == 4\n    assert f(0) == 0\n",
    "entry_point": "double",
}
MBPP = {
    "task_id": 11,
    "text": "Write a python function to double a number.",
    "code": "def double(n):\r\n  return 2 * n",
    "test_list": ["assert double(2) == 4", "assert double(5) == 10"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "source_file": "Benchmark Questions.ipynb",
    "task_id": 2,
    "prompt": "Write a function to double a number.",
    "code": "def double(n):\n  return 2 * n",
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4", "assert math.isclose(double(0.5), 1)"],
}
APPS = {
    "problem_id": 1,
    "question": "Print twice the number.",
    "solutions": json.dumps(["print(2 * int(input()))"]),
    "input_output": json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}),
    "difficulty": "interview",
    "url": "https://codeforces.com/problemset/problem/1/A",
    "starter_code": "",
}
APPS_CALL = APPS | {
    "question": "Double the number.",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}),
    "starter_code": "\ndef double(n):\n\t",
}


def compressed(tests):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def live_code_bench(public, private, metadata, starter=""):
    return {
        "question_title": "Double",
        "question_content": "Double the number.",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_id": "abc301",
        "contest_date": "2023-05-13T00:00:00",
        "starter_code": starter,
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": json.dumps(metadata),
    }


STDIN = [
    {"input": "2", "output": "4", "testtype": "stdin"},
    {"input": "5", "output": "10", "testtype": "stdin"},
]
CALLS = [{"input": "2", "output": "4", "testtype": "functional"}]
LCB = live_code_bench(STDIN[:1], compressed(STDIN[1:]), {})
LCB_CALL = live_code_bench(
    CALLS,
    compressed(CALLS),
    {"func_name": "double"},
    "class Solution:\n    def double(self, n: int) -> int:\n",
)
FUNCTION, SCRIPT = "def double(n):\n    return {} * n\n", "print({} * int(input()))\n"
METHOD = "class Solution:\n    def double(self, n):\n        return {} * n\n"
#: name → (recipe, record, a right program if `2` is filled in)
PROGRAMS = {
    "humaneval": ("humaneval", HUMANEVAL, FUNCTION),
    "mbpp": ("mbpp", MBPP, FUNCTION),
    "mbpp sanitized": ("mbpp", MBPP_SANITIZED, FUNCTION),
    "apps": ("apps", APPS, SCRIPT),
    "apps call": ("apps", APPS_CALL, FUNCTION),
    "livecodebench": ("livecodebench", LCB, SCRIPT),
    "livecodebench call": ("livecodebench", LCB_CALL, METHOD),
}
