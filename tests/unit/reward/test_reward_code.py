"""Programs graded by their tests: right, wrong, unjudgeable; nothing a program says of itself counts."""

import json

import pytest

from rlctl.errors import EnvironmentFailure
from rlctl.reward.code import CodeScorer, parse_tests, program_of
from rlctl.reward.protocol import Failure, Sample
from rlctl.reward.sandbox import run
from rlctl.spec.reward import CodeSpec, RewardSpec

LIMITS = RewardSpec(code=CodeSpec(timeout_s=5.0, memory_mb=512))
DOUBLE = json.dumps({"inputs": ["2\n", "-1\n"], "outputs": ["4\n", "-2"]})
CALLS = json.dumps({"fn_name": "f", "inputs": [[1, 2], [[], "a"]], "outputs": [[2, 1], ["a", []]]})
ASSERTS = "import math\nassert f(1) == 2\nassert [2, {3}] == f(2), 'hint'\nassert math.isclose(f(4), 0.5)\n"
RIGHT_F = "def f(x): return {1: 2, 2: [2, {3}], 4: 0.5}[x]"


@pytest.fixture(scope="module")
def scorer():
    return CodeScorer(LIMITS)


def grade(scorer, program, tests):
    return scorer.grade([Sample(program, tests)])[0]


RIGHT = [
    ("print(int(input()) * 2)", DOUBLE),
    ("import sys\nfor line in sys.stdin:\n    print(' ', 2 * int(line), ' \\n')\nsys.exit(0)", DOUBLE),
    ("if __name__ == '__main__':\n    print(int(input()) * 2)", DOUBLE),
    ("Think.\n```python\nraise\n```\nBetter:\n```python\nprint(int(input()) * 2)\n```\nDone.", DOUBLE),
    ("  1. So\n   ```py\nprint(int(input()) * 2)\n   ```", DOUBLE),
    ("def f(a, b): return b, a", CALLS),  # JSON has no tuples
    ("class Solution:\n    def f(self, a, b): return [b, a]", CALLS),
    ("def f(a, b): return [b, a]\nif __name__ == '__main__':\n    input()", CALLS),
    ("def f(): return {1: 0.1 + 0.2}", '{"fn_name": "f", "inputs": [[]], "outputs": [{"1": 0.3}]}'),
    (RIGHT_F, ASSERTS),
    ("import numpy as np\ndef f(x): return np.int64(x)", "assert f(1) == 1"),
    ("def f(x):\n    raise ValueError", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"),
    ("def f(x): return x", "def check(g):\n    assert g(1) == 1\ncheck(f)"),
]
WRONG = [
    ("print(2 * 2)", DOUBLE),  # right for the first input
    ("print(int(input()) * 2)\nraise SystemExit(1)", DOUBLE),
    ("print(4, 5)", DOUBLE),
    ("```python\nprint(int(input()) * 2", DOUBLE),  # cut off
    ("", DOUBLE),
    ("\x00\ud800", DOUBLE),
    ("def f(a, b): return a, b", CALLS),
    ("def g(a, b): return b, a", CALLS),
    ("def f(x): return 2", "assert f(1) == 2\nassert f(2) == 3"),
    ("def f(x): return [1, 2]", "assert f(1) == (1, 2)"),
    ("def f(x): return 1", "assert f(1) != 1"),
    (RIGHT_F.replace("0.5", "0.6"), ASSERTS),
]
#: Programs that would rather not be tested.
FORGERIES = [
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "import os\nprint('PASSED', '1.0', '{\"finished\": true}', flush=True)\nos._exit(0)",
    "class Same:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    "def f(*_): return Same()",
    "import os, json\nfor fd in range(1, 64):\n    try:\n"
    '        os.write(fd, b\'{"token": ""}\\n{"value": 2}\\n{"value": ["dict", 5]}\\n{"value": [[[\')\n'
    "    except OSError: pass\ndef f(*_): return 0",
    "import os, atexit\natexit.register(lambda: os._exit(0))\nraise ValueError",
    "import os\nwith open('/dev/null', 'w') as f: os.dup2(f.fileno(), 2)\nos.close(1)\nos._exit(0)",
]


@pytest.mark.parametrize(("program", "tests"), RIGHT)
def test_right(scorer, program, tests):
    assert grade(scorer, program, tests) == 1.0


@pytest.mark.parametrize(("program", "tests"), WRONG)
def test_wrong(scorer, program, tests):
    assert grade(scorer, program, tests) == 0.0


def test_forged_verdicts_are_wrong(scorer):
    asserts = ("assert f(1) == 2", "assert f(1) + 0 == 2", "assert f(1, 2) == 3\nassert not f(1)")
    samples = [Sample(program, tests) for program in FORGERIES for tests in (DOUBLE, CALLS, *asserts[:2])]
    assert scorer.grade(samples) == [0.0] * len(samples)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("{broken", "it starts like JSON"),
        ('{"inputs": ["1"]}', "must be lists"),
        ('{"inputs": [], "outputs": []}', "0 inputs and 0 outputs"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs and 1 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "text of standard input"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "list of arguments"),
        ('{"fn_name": "f()", "inputs": [[1]], "outputs": [1]}', "`fn_name` is 'f\\(\\)'"),
        ("assert f(1) ==", "neither JSON nor Python"),
        ("42", "no assert in it"),
    ],
)
def test_a_ground_truth_without_tests_is_a_failure(scorer, tests, why):
    verdict = grade(scorer, "print(1)", tests)
    assert isinstance(verdict, Failure)
    with pytest.raises(ValueError, match=why):
        parse_tests(tests)


def test_the_expected_values_of_equations_never_reach_the_program():
    tests = parse_tests(ASSERTS)
    assert [kind for kind, _ in tests.steps] == ["exec", "eval", "eval", "exec"]
    assert tests.values == (2, ["list", 2, ["set", 3]])


def test_the_last_block_is_the_program():
    assert program_of("```python\na\n```\n```py3\nb\n```\n```\nc\n```") == "b\n"
    assert program_of("a = 1") == "a = 1"


def test_a_sandbox_that_cannot_be_set_up_is_said(monkeypatch):
    with pytest.raises(EnvironmentFailure, match="a small program ended with code"):
        CodeScorer(RewardSpec.model_construct(code=CodeSpec.model_construct(timeout_s=5.0, memory_mb=1)))
    monkeypatch.setattr(run, "_read_reply", lambda reply, token: {"refused": "prctl: not permitted"})
    with pytest.raises(EnvironmentFailure, match="safely here: prctl: not permitted"):
        CodeScorer(LIMITS)
