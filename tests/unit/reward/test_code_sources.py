"""Programs as data sets of code expect them: names known without import, memory, deep recursion, blocks."""

import json

import pytest

from rlctl.reward.code import CodeScorer, program_of
from rlctl.reward.code_sources import MEMORY_MB, PLAIN, code_source
from rlctl.reward.protocol import Sample
from rlctl.run_spec.rollout import CodeSpec, RewardSpec

DOUBLES = '{"inputs": ["21\\n"], "outputs": ["42\\n"]}'


@pytest.fixture(scope="module")
def scorer():
    return CodeScorer(RewardSpec(code=CodeSpec(timeout_s=20.0)))


def calls(*pairs, name="f"):
    inputs, outputs = zip(*pairs, strict=True)
    return json.dumps({"fn_name": name, "inputs": inputs, "outputs": outputs})


#: What harnesses provide: name → (data source, program, tests).
WITHOUT_IMPORTS = {
    "lcb-stdin": (
        "livecodebench",
        "heap = [int(x) for x in sys.stdin.read().split()]\nheapify(heap)\nprint(2 * heappop(heap))",
        DOUBLES,
    ),
    "lcb-names": (
        "livecodebench",
        "@lru_cache(None)\ndef f(n):\n    return comb(n, 2) + bisect_left([1, 5], n)\n"
        "print(f(9) + Counter('aab')['a'] + gcd(4, 6))",
        '{"inputs": [""], "outputs": ["42"]}',
    ),
    "leetcode": (
        "greengerong/leetcode",
        "class Solution:\n    def f(self, a: List[int], k: Optional[int] = None) -> int:\n"
        "        d = defaultdict(int)\n        for x in a: d[x] += 1\n"
        "        return max(d.values()) + sum(accumulate(a)) + functools.reduce(max, a) if a else math.inf",
        calls(([[1, 1, 2]], 11)),
    ),
    "solution-of-unknown-source": (
        "mine",
        "class Solution:\n    def f(self, a: List[int]) -> Dict[str, int]:\n        q = deque(a)\n"
        "        return {'a': q.popleft() + string.ascii_lowercase.index('c')}",
        calls(([[1, 1, 2]], {"a": 3})),
    ),
    "sorted-containers": (
        "leetcode",
        "class Solution:\n    def f(self, a: List[int]) -> int:\n        s, d = SortedList(a), SortedDict()\n"
        "        for x in SortedSet(a): d[x] = s.bisect_left(x)\n        return d.peekitem(-1)[1]",
        calls(([[3, 1, 2, 3]], 2)),
    ),
    "humaneval": (
        "openai_humaneval",
        "def f(a: List[float], b: Optional[Tuple[int, int]] = None) -> Any:\n    return math.floor(sum(a))",
        "def check(candidate):\n    assert candidate([1.5, 2.0]) == 3\n"
        "    assert math.sqrt(candidate([4])) == 2\ncheck(f)",
    ),
    "mbpp": (
        "mbpp",
        "def f(a):\n    return re.findall('a', a) + heapq.nlargest(1, [3])",
        "assert f('ab') == ['a', 3]",
    ),
    "apps": (
        "codeparrot/apps",
        "import sys\nn = int(input())\nprint(floor(sqrt(n * n)) + len(list(permutations('abcd'))) - 3)",
        DOUBLES,
    ),
    "taco": ("taco", "n = int(input())\nd = OrderedDict(a=n)\nprint(np.int64(d['a']) * 2)", DOUBLES),
    "names-in-input": (
        "livecodebench",
        "print(eval(input()))",
        '{"inputs": ["floor(sqrt(1764))"], "outputs": ["42"]}',
    ),
    "future-import": (
        "livecodebench",
        "from __future__ import annotations\nn: list[Nowhere] = []\nprint(int(input()) + comb(7, 1) * 3)",
        DOUBLES,
    ),
}


@pytest.mark.parametrize("case", WITHOUT_IMPORTS)
def test_names_that_the_harness_of_the_source_provides(scorer, case):
    source, program, tests = WITHOUT_IMPORTS[case]
    assert scorer.grade([Sample(f"```python\n{program}\n```", tests, data_source=source)]) == [1.0]


def test_other_sources_provide_nothing(scorer):
    program = "```python\nprint(2 * int(sys.stdin.read()))\n```"
    assert scorer.grade([Sample(program, DOUBLES, data_source="mine")]) == [0.0]
    assert code_source("mine", DOUBLES) is PLAIN
    assert code_source("appstore").memory_mb == MEMORY_MB  # no part of the name is `apps`


def test_a_program_may_replace_what_is_provided(scorer):
    own = "def gcd(a, b):\n    return 7\ndef f(a):\n    return gcd(a, a)"
    asked = [
        Sample(
            f"```python\n{own}\n```",
            "assert f(3) == 7\nassert gcd(8, 4) == 7\nx = gcd(1, 2)",
            data_source="mbpp",
        ),
        Sample(f"```python\n{own}\n```", calls(([3], 7)), data_source="leetcode"),
    ]
    assert scorer.grade(asked) == [1.0, 1.0]


@pytest.mark.parametrize(
    "program",
    [
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nassert f(40_000) == 40_000",
        "from functools import cache\n@cache\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nf(20_000)",
        "x = int('9' * 9000)\nassert len(str(x)) == 9000",
        "import threading\nthreading.stack_size(512 << 20)\nt = threading.Thread(target=int)\nt.start()",
        "from threading import Thread, stack_size\nstack_size(1 << 30)\nt = Thread(target=int)\nt.start()",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, [resource.RLIM_INFINITY] * 2)",
    ],
)
def test_what_programs_set_or_need_deep_inside(scorer, program):
    lines = f"```python\n{program}\nprint(2 * int(input()))\n```"
    assert scorer.grade([Sample(lines, DOUBLES)]) == [1.0]


def test_values_of_many_digits(scorer):
    tests = calls(([1], "N")).replace('"N"', "1" + "0" * 5000)
    programs = ["def f(x): return x * 10**5000", "def f(x): return x * 10**5000 + 1"]
    assert scorer.grade([Sample(program, tests) for program in programs]) == [1.0, 0.0]


def test_memory_is_that_of_the_source():
    program = "x = bytearray(700 << 20)\nprint(2 * int(input()))"
    asked = [Sample(program, DOUBLES, data_source=source) for source in ("livecodebench", "apps")]
    assert CodeScorer(RewardSpec()).grade(asked) == [1.0, 0.0]
    limited = RewardSpec(code=CodeSpec(memory_mb=256))
    assert CodeScorer(limited).grade(asked) == [0.0, 0.0]


BLOCKS = {
    "text before": "Here is the code: ```python\nprint(1)\n```",
    "four backticks": "````python\nprint(1)\n````",
    "four around three": '````python\ns = """\n```\n"""\nprint(1)\n````',
    "list item": "- Solution: ```py\n  print(1)\n  ```",
    "closing at the end of a line": "```python\nprint(1)```\nDone.",
    "one line": "Use ```print(1)```",
    "one line with language": "Use ```python print(1)``` here",
    "begin": "[BEGIN]\nprint(1)\n[DONE]\n\nNext task: write f.\n[BEGIN]\nprint(2)\n[DONE]",
    "begin opened by the prompt": "print(1)\n[DONE]\n\nYou are an expert Python programmer",
    "python tags": "[PYTHON]\nprint(1)\n[/PYTHON]\n[TESTS]\nassert f(1)\n[/TESTS]",
    "answer tags": "<answer>\nprint(1)\n</answer>",
    "fence in tags": "[BEGIN]\n```python\nprint(1)\n```\n[DONE]",
    "not closed": "```python\nprint(1)\n",
    "not closed before another": "```python\nprint(2)\n```python\nprint(1)\n```",
    "text around": "Text\n\n```Python3\nprint(1)\n```\n\nIt prints `1`.",
    "tildes in code": "```python\nprint(1)  # ~~~ not a fence\n```",
    "info string": "```python title='a.py' {1}\nprint(1)\n```",
    "ipython": "```ipython3\nprint(1)\n```\nThe output is\n```\nprint(2)\n```",
    "quoted": "> ```python\n> a = 2\n>\n> if a > 1:\n>     a = 0\n> print(1)\n> ```\n\nThat is all.",
    "quoted without spaces": ">```\n>a = 2\n>print(1)\n>```",
    "code element": "The program:\n<code>\na = 2\nprint(1)\n</code>\nIt uses <code>print(2)</code>.",
    "code element after text": "Program: <code>\nprint(1)\n</code>",
    "code element in a line": "<code>print(1)</code>",
    "pre": '<pre><code class="language-python">\na = "<b>"\nprint(1)\n</code></pre>',
    "answer element after prose": "It prints one.\n<answer>\nprint(1)\n</answer>\nThat is all.",
    "solution element": "<solution>\nprint(1)\n</solution>",
    "element in an element": "<answer><code>\nprint(1)\n</code></answer>",
    "fence in an element": "<solution>\n```\nprint(1)\n```\n</solution>",
    "python element": "<python>\nprint(1)\n</python>",
    "element beside a fence": "<code>\nprint(2)\n</code>\n```py\nprint(1)\n```\n<code>\nprint(3)\n</code>",
    "element beside a sample": "```\n4 5\n```\n<code>\nprint(1)\n</code>\n```\n20\n```",
    "a program that prints an element": "a = '<code>'\nprint('<code>x</code>')\nprint(1)",
}


@pytest.mark.parametrize("case", BLOCKS)
def test_the_program_in_a_response(case):
    assert program_of(BLOCKS[case]).strip().splitlines()[-1].startswith("print(1)")


def test_a_list_of_asserts_must_pass_as_a_whole(scorer):
    tests = json.dumps(["assert f(1) == 2", "assert f(2) == 3"])
    programs = ["def f(x): return x + 1", "def f(x): return 2"]
    assert scorer.grade([Sample(program, tests) for program in programs]) == [1.0, 0.0]


def block(code):
    return f"```python\n{code}\n```\n"


#: Responses whose program is in several blocks, with tests, and whether they pass.
IN_PARTS = {
    "definitions, then input": (
        block("def f(x):\n    return 2 * x") + "Main:\n" + block("print(f(int(input())))"),
        DOUBLES,
        1.0,
    ),
    "solve, then its call": (
        block("import sys\nlimit = 5\ndef solve():\n    print(int(input()) * 2)")
        + block("if __name__ == '__main__':\n    solve()")
        + block("# check\nsolve()"),
        DOUBLES,
        1.0,
    ),
    "a script, then an example": (
        block("def f(x): return 2 * x\nprint(f(int(input())))") + block("print(f(3))"),
        DOUBLES,
        1.0,
    ),
    "definitions, then a fixed example": (
        block("def f(x): return 2 * x") + block("print(f(3))"),
        DOUBLES,
        0.0,
    ),
    "a class that another uses": (
        block("class Node:\n    def __init__(self, v): self.v = v")
        + block("class Solution:\n    def f(self, x): return Node(x).v + 1"),
        calls(([1], 2)),
        1.0,
    ),
    "a helper, then the function": (
        block("def twice(x): return 2 * x") + block("def f(x): return twice(x) + 1"),
        "assert f(1) == 3",
        1.0,
    ),
    "a function, then its test": (
        block("def f(x): return x + 1") + block("def test():\n    assert f(1) == 3\ntest()"),
        "assert f(1) == 2",
        1.0,
    ),
    "a wrong function, then one that calls it": (
        block("def f(x): return 0") + block("def g(x): return f(x) or x + 1"),
        "assert f(1) == 2",
        0.0,
    ),
}


@pytest.mark.parametrize("case", IN_PARTS)
def test_blocks_that_the_tests_need_belong_to_the_program(scorer, case):
    response, tests, passes = IN_PARTS[case]
    assert scorer.grade([Sample(response, tests)]) == [passes]
