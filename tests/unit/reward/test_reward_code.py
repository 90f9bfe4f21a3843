"""Programs graded by their tests: right, wrong, without tests; a program cannot change its own grade."""

import json
import re

import pytest

from rlctl.errors import EnvironmentFailure
from rlctl.reward.code import CodeScorer, _same_text, parse_tests, program_of
from rlctl.reward.protocol import Failure, Sample
from rlctl.reward.sandbox import run_program
from rlctl.reward.sandbox.jail import same
from rlctl.reward.sandbox.run_program import Limits
from rlctl.run_spec.rollout import CodeSpec, RewardSpec

pytestmark = pytest.mark.processes  # one for each program
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
    ("print(int(open('/dev/stdin').read()) * 2)", DOUBLE),
    ("print(sum([0.1] * int(input())))", '{"inputs": ["3", "10"], "outputs": ["0.3", "1"]}'),
    (
        "```python\ndef f(a, b):\n    return b, a\n```\nUse it:\n```python\nprint(f(1, 2))\n```",
        '{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[2, 1]]}',
    ),
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
    # as in APPS: lists of lines, and every value in a list of its own
    ("print(int(input()) + int(input()))", '{"inputs": [["1", "2"]], "outputs": [["3"]]}'),
    ("def f(a, b): return a + b", '{"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}'),
    ("def f(a, b): return [a + b]", '{"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}'),
    # as in LiveCodeBench: one line of JSON per argument
    ("def f(a, b): return a + b", r'{"fn_name": "f", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]}'),
    ("<think>\n```python\nraise\n```\n</think>\nprint(2 * int(input()))", DOUBLE),
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
    ("def f(a, b): return a + b", '{"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [8]]}'),
    ("def f(a, b): return 3", '{"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 3]}'),
    ("def f(x): return x[0]", '{"fn_name": "f", "inputs": [[[1]]], "outputs": [[1, 2]]}'),
    ("<think>\n```python\nprint(2 * int(input()))\n```", DOUBLE),
    (RIGHT_F.replace("0.5", "0.6"), ASSERTS),
]
#: What programs do to their own grading, to pass without a solution or to end it without a grade, after
#: `IMPORTS`.
ATTACKS = {
    "exit": "os._exit(0)",
    "exit like a script": "sys.exit(0)",
    "exit at exit": "atexit.register(os._exit, 0)\nraise ValueError",
    "exit in a thread": "threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(0.2)",
    "exit with a printed reply": "print('PASSED', '{\"passed\": true}', flush=True)\nos._exit(0)",
    "truncated files": "for fd in range(3, 64): quiet(os.ftruncate, fd, 0)",
    "truncated standard streams": "for fd in 0, 1, 2: quiet(os.ftruncate, fd, 0), quiet(os.lseek, fd, 9, 0)",
    "closed descriptors": "os.closerange(0, 4096)",
    "replaced descriptors": "null = os.open('/dev/null', 2)\nfor fd in range(64): quiet(os.dup2, null, fd)",
    "pipes for descriptors": "end = os.pipe()[1]\nfor fd in range(end): quiet(os.dup2, end, fd)",
    "shut sockets": "for fd in range(64): quiet(lambda: socket.socket(fileno=fd).shutdown(2))",
    "read sockets": "for fd in range(64): quiet(os.set_blocking, fd, False), quiet(os.read, fd, 1 << 20)",
    "reopened descriptors": "for fd in range(64): quiet(os.open, f'/proc/self/fd/{fd}', 2 | os.O_TRUNC)",
    "out-of-band data": "for fd in range(64): quiet(lambda: socket.socket(fileno=fd).send(b'x', 1))",
    "garbage": "write(os.urandom(1000))",
    "half a line": "write(b'{')\nos._exit(0)",
    "a forged refusal": 'write(b\'{"refused": "forged"}\\n\')\nos._exit(1)',
    "a forged start": 'write(b\'{"ready": true}\\n{"passed": true}\\n\')',
    "a forged reply": "write(b'{\"passed\": true}\\n')",
    "forged values": 'write(b\'{"value": 3}\\n\')\nwrite(b\'{"value": ["dict", 5]}\\n{"value": [[[\\n\')',
    "deep values": "write(b'[' * 100000 + b'\\n')",
    "huge numbers": "write(b'{\"value\": ' + b'9' * 5000 + b'}\\n')",
    "not a number": "write(b'{\"value\": NaN}\\n')",
    "a flood of replies": "while True: write(b'{\"value\": 1}\\n' * 10000)",
    "a flood without lines": "while True: write(bytes(100000))",
    "a flood of output": "while True: print('x' * 100000)",
    "memory": "x = []\nwhile True: x.append(bytearray(32 << 20))",
    "a segmentation fault": "ctypes.string_at(1)",
    "abort": "os.abort()",
    "a signal to itself": "quiet(signal.raise_signal, signal.SIGKILL), quiet(os.kill, os.getpid(), 9)",
    "stopped": "quiet(signal.raise_signal, signal.SIGSTOP), quiet(os.kill, 0, signal.SIGTSTP)",
    "an alarm": "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(5)",
    "system calls of 32 bits": """
if platform.machine() == "x86_64":  # getpid by `int 0x80`
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex("b814000000cd80c3"))
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
    "lower limits": """
for name in ("FSIZE", "NOFILE", "AS", "STACK", "DATA", "CPU"):
    quiet(resource.setrlimit, getattr(resource, "RLIMIT_" + name), (0, 0))
""",
    "a busy thread that stays": "threading.Thread(target=any, args=(iter(int, 1),), daemon=True).start()",
    "children": "for _ in range(10): quiet(os.fork)",
    "files": "for i in range(10**6): open(str(i), 'w')",
    "the working directory": "os.chdir('/')\nquiet(os.symlink, '/', 'x'), quiet(os.link, '/etc/passwd', 'x')",
    "files beside it": """
for name in ("../stdout", "../stdin", "../../tests/stdout", "/proc/self/fd/1"):
    quiet(os.remove, name), quiet(os.rename, name, "mine"), quiet(os.truncate, name, 0)
""",
    "the memory of others": """
for pid in (os.getppid(), *range(os.getpid() - 3, os.getpid() + 4)):
    for name in ("mem", "maps", "environ", "fd/0", "fd/3"):
        quiet(lambda: open(f"/proc/{pid}/{name}", "rb+").write(b"x"))
    quiet(os.kill, pid, 9), quiet(resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
    libc.ptrace(16, pid, 0, 0)
""",
    "a signal by a pipe": """
ours, theirs = os.pipe()
for command, value in ((8, os.getppid()), (10, 9), (4, 0x2000)):
    quiet(fcntl.fcntl, ours, command, value)
os.write(theirs, b"x")
""",
    "its own scheduling": "quiet(os.nice, 19), quiet(os.sched_setaffinity, 0, {0}), libc.personality(1)",
    "patched modules": """
for module in ("json", "builtins", "os", "__main__", "math"):
    for name in ("dumps", "loads", "write", "encode", "same", "isclose", "AssertionError", "eval"):
        setattr(sys.modules[module], name, lambda *_, **__: b"{}")
""",
    "patched frames": """
frame = sys._getframe()
while frame:
    for value in dict(frame.f_locals).values():
        if isinstance(value, dict):
            quiet(value.__setitem__, "role", "tests"), quiet(value.__setitem__, "steps", [])
    frame = frame.f_back
""",
    "objects that equal everything": """
class Same(int):
    ndim, item = 0, lambda self: self
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
f = Same
""",
    "values that cannot be sent": "x = []\nx.append(x)\nf = lambda *_: x",
    "values that raise": "class Bad:\n    @property\n    def ndim(self): os._exit(0)\nf = Bad",
    "values that are too large": "f = lambda *_: 10**5000",
    "numbers beyond floats": "f = lambda *_: 10**400",
    "text that is no text": "f = lambda *_: '\\ud800' * 9",
    "nothing to print to": "sys.stdout = sys.stderr = None\nos.close(1)",
    "no more audit": "sys.addaudithook(lambda *_: os._exit(0))\nopen('/dev/null')",
    "trace": "sys.settrace(lambda *_: os._exit(0))\n(lambda: 0)()",
    "collected": "gc.get_objects()\nfor one in gc.get_objects():\n    if type(one) is dict: quiet(one.clear)",
}
#: Attacks that end at the time limit, so they are tried in one way only.
SLOW_ATTACKS = {
    "recursion": "sys.setrecursionlimit(10**9)\ng = lambda: g()\ng()",
    "higher limits": "quiet(resource.setrlimit, resource.RLIMIT_CPU, (999, 999))\nwhile True: pass",
    "sleep": "time.sleep(600)",
    "threads that stay": "for _ in range(20): threading.Thread(target=time.sleep, args=(600,)).start()",
}
#: Attacks by what the program returns: the others do not depend on what the tests do with a value.
RETURNED = {name: attack for name, attack in ATTACKS.items() if re.search("^f = ", attack, re.MULTILINE)}
IMPORTS = """
import atexit, ctypes, fcntl, gc, mmap, os, platform, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None)
def quiet(function, *arguments):
    try: function(*arguments)
    except Exception: pass
def write(data):
    for fd in range(3, 64): quiet(os.write, fd, data)
def f(*_): return 0
"""


@pytest.mark.parametrize(
    ("tests", "attacks"),
    [
        ('{"inputs": ["1"], "outputs": ["2.5"]}', ATTACKS | SLOW_ATTACKS),
        ("assert f(1) == 2.5", ATTACKS),
        ("assert f(1) - 2.5 == 0", RETURNED),
    ],
)
def test_whatever_a_program_does_to_its_grading_is_wrong(tests, attacks):
    """Never excluded, whose share can stop a run, and never right."""
    scorer = CodeScorer(RewardSpec(code=CodeSpec(timeout_s=1.0, memory_mb=512)))
    assert grade(scorer, IMPORTS + "def f(*_): return 2.5\nprint(2.5)", tests) == 1.0
    for attack in attacks.values():
        compile(attack, "attack", "exec")
    graded = scorer.grade([Sample(IMPORTS + attack, tests) for attack in attacks.values()])
    assert {name: one for name, one in zip(attacks, graded, strict=True) if one != 0.0} == {}


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("{work}\nprint(int(input()) * 2)", DOUBLE),
        ("def f(a, b):\n    {work}\n    return b, a", CALLS),
    ],
)
def test_each_input_has_the_whole_time_limit(program, tests):
    """Processor time, so load of the machine does not count."""
    scorer = CodeScorer(RewardSpec(code=CodeSpec(timeout_s=0.5)))
    work = "import time; end = time.thread_time() + {}; all(iter(lambda: time.thread_time() < end, False))"
    assert grade(scorer, program.format(work=work.format(0.3)), tests) == 1.0
    assert grade(scorer, program.format(work=work.format(9)), tests) == 0.0


@pytest.mark.parametrize(("program", "tests"), RIGHT)
def test_right(scorer, program, tests):
    assert grade(scorer, program, tests) == 1.0


@pytest.mark.parametrize(("program", "tests"), WRONG)
def test_wrong(scorer, program, tests):
    assert grade(scorer, program, tests) == 0.0


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
        ("42", "it contains no assert"),
    ],
)
def test_a_ground_truth_without_tests_is_a_failure(scorer, tests, why):
    graded = grade(scorer, "print(1)", tests)
    assert isinstance(graded, Failure)
    with pytest.raises(ValueError, match=why):
        parse_tests(tests)


@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    assert candidate(1) == 2",  # nothing calls it
        "if __name__ == '__main__':\n    assert f(1) == 2",
        "try:\n    assert f(1) == 2\nexcept Exception:\n    pass",
        "assert sorted([2, 1]) == [1, 2]",
        '{"inputs": ["1"], "outputs": [""]}',
    ],
)
def test_tests_that_pass_without_a_program_give_no_score(scorer, tests):
    for program in ("", "def f(x): return 5"):
        graded = grade(scorer, program, tests)
        assert isinstance(graded, Failure)
        assert "pass without a program" in graded.text
    assert grade(scorer, "print(1)\nraise", tests) != 1.0


def test_expected_values_of_calls_never_reach_the_program():
    tests = parse_tests("import math\nassert f(1) == 2\nassert [2, {3}] == Solution().f(2, n=-1), 'hint'\n")
    assert tests.steps == (("exec", "import math"), ("eval", "f(1)"), ("eval", "Solution().f(2, n=-1)"))
    assert tests.values == (2, ["list", 2, ["set", 3]])


#: Test code that does more than compare calls with literals, and programs that pass it.
TEST_CODE = {
    "a list changed in place": (
        "def f(x):\n    x.sort()\n    return x",
        "a = [3, 1]\nb = f(a)\nassert a == [1, 3]\nassert b is a",
    ),
    "a function that checks": (
        "def f(x): return x / 3",
        "def check(candidate):\n    assert abs(candidate(1) - 0.333) < 1e-3\ncheck(f)",
    ),
    "rounding": ("def f(x): return 0.1 * x", "x = 3\nassert f(x) == 0.3"),
    "a function as argument": ("def f(g, x): return g(g(x))", "assert f(lambda x: x + 1, 1) == 3"),
    "objects": (
        """
class Node:
    def __init__(self, v):
        self.v = v
        self.left = None
def depth(n): return 0 if n is None else 1 + depth(n.left)
""",
        """
root = Node(1)
root.left = Node(2)
assert depth(root) == 2
assert root.left.v == 2
assert isinstance(root, Node)
assert root.left.left is None
""",
    ),
    "operators": (
        """
class V:
    def __init__(self, *v): self.v = v
    def __add__(self, other): return V(*map(sum, zip(self.v, other.v)))
    def __eq__(self, other): return self.v == other.v
    def __len__(self): return len(self.v)
""",
        "assert V(1, 2) + V(3, 4) == V(4, 6)\nassert len(V(1, 2)) == 2\nassert V(1) != V(2)",
    ),
    "exceptions": (
        """
class Bad(ValueError): pass
def f(x):
    if x < 0: raise Bad('negative')
    return int('x')
""",
        """
try:
    f(-1)
    assert False
except Bad as error:
    assert 'neg' in str(error)
try:
    f(1)
    assert False
except ValueError:
    pass
""",
    ),
    "types": (
        """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction
import math
P = namedtuple('P', 'x y')
class Word(str): pass
def f():
    plain = Counter('aab'), deque([1]), Fraction(1, 3), P(1, 2), {(1, 2): {3}}, 1j, range(3), True, None
    return *plain, Word('a'), frozenset({1}), defaultdict(int, a=1), OrderedDict(b=2)
""",
        """
from fractions import Fraction
x = f()
assert x[0]['a'] == 2 and list(x[1]) == [1]
assert x[2] == Fraction(1, 3) and x[3] == (1, 2) and x[4] == {(1, 2): {3}}
assert x[5] == 1j and list(x[6]) == [0, 1, 2] and x[7] is True and x[8] is None
assert x[9] == 'a' and x[10] == {1} and x[11] == {'a': 1} and list(x[12].items()) == [('b', 2)]
assert math.isclose(math.pi, 3.14159, rel_tol=1e-3)
""",
    ),
    "scalars of NumPy": (
        "import numpy as np\ndef f(): return np.int64(3), np.float32(0.5), np.complex128(1j), np.bool_(True)",
        "x = f()\nassert x == (3, 0.5, 1j, True) and x[3] is True",
    ),
    "generators": (
        "def f(n):\n    for i in range(n): yield i",
        "assert list(f(3)) == [0, 1, 2]\nassert sum(f(4)) == 6",
    ),
    "a built-in name": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "objects of the tests": (
        "def f(node): return node.value + f(node.next) if node else 0",
        """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
assert f(Node(1, Node(2))) == 3
""",
    ),
}


@pytest.mark.parametrize(("program", "tests"), TEST_CODE.values(), ids=TEST_CODE)
def test_test_code_uses_the_program_from_its_own_process(program, tests):
    scorer = CodeScorer(RewardSpec(code=CodeSpec(timeout_s=60.0)))
    assert grade(scorer, program, tests) == 1.0
    assert grade(scorer, "raise SystemExit\n" + program, tests) == 0.0
    assert grade(scorer, "", tests) == 0.0


#: Programs that try to pass test code without solving anything.
CHEATS = {
    "objects that equal everything": """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0.0
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __abs__(self): return self
    def __bool__(self): return True
def f(*_): return Same()
""",
    "built-in functions redefined": """
def abs(x): return 0
def all(x): return True
def isinstance(*_): return True
def f(*_): return 10**9
""",
    "code in a value": """
import os
class Evil:
    def __reduce_ex__(self, _): return (os.system, ('true',))
def f(*_): return [Evil()]
""",
    "a message that changes a class": r"""
import os, struct
data = b'\x80\x04\x8c\x09fractions\x8c\x08Fraction\x93N}\x8c\x06__eq__\x8c\x03boos\x86b.'
for fd in range(3, 4096):  # the worker may have many files open: the reply is then a high number
    try: os.write(fd, struct.pack('=I', len(data)) + data)
    except OSError: pass
""",
    "built-in functions in the first message": """
import sys
class Line(sys.modules["peer"].Peer):
    def send(self, message):
        if isinstance(message[0], dict):
            message[1]["__builtins__"] = {"all": f, "range": range}
        super().send(message)
sys.modules["peer"].Peer = Line
def f(*_): return True
""",
    "functions of the process of the tests": r"""
import gc
code = '''import os
for fd in range(3, 4096):
    try: os.write(fd, b'{"passed": true}\\n')
    except OSError: pass
os._exit(0)'''
def f(*_):
    line = next(one for one in gc.get_objects() if type(one).__name__ == "Peer")
    line.ask("getattribute", "__builtins__")["exec"](code)
""",
    "names of the tests": """
import builtins
builtins.AssertionError = Exception
_rlctl_same = lambda *_: True
__name__ = 'tests'
def f(*_): raise StopIteration
""",
}
CHECKS = [
    "def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\n    assert candidate(2) == 3\ncheck(f)",
    "x = 1\nassert f(x) == 2",
    "from fractions import Fraction\nassert Fraction(f(1)) == Fraction(1, 2) and f(2) > 1",
    "assert all(f(i) == i + 1 for i in range(3))",
    "try:\n    assert f(1) == 2\nexcept ValueError:\n    pass",
]


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_program_cannot_pass_test_code_by_what_it_does_to_its_process(scorer, program):
    assert scorer.grade([Sample(program, tests) for tests in CHECKS]) == [0.0] * len(CHECKS)


def test_a_message_that_sets_attributes_is_refused():
    """For example, of a class that the tests use. Messages name only built-in types."""
    import pickle
    import socket
    import struct
    from fractions import Fraction

    from rlctl.reward.sandbox import peer

    class SetsAttribute:
        def __reduce__(self):
            return Fraction, ("1/2",), (None, {"numerator": 7})

    class Calls:
        def __reduce__(self):
            return print, ("called",)

    for message in (SetsAttribute(), Calls()):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            data = pickle.dumps(message, protocol=4)
            theirs.sendall(struct.pack("=I", len(data)) + data)
            end = peer.Peer(ours.fileno(), guards_names=True)
            with pytest.raises(peer.PeerGone):
                end.receive()
            assert end.is_lost


def test_a_flood_of_replies_is_not_read():
    """16 MiB of them took many seconds."""
    flood = """
import os
for fd in range(3, 4096):  # the worker may have many files open: the reply is then a high number
    try:
        while True: os.write(fd, b'{"value": 1}\\n' * 100000)
    except OSError: pass
def f(x): return 2
"""
    assert run_program.run_program(flood, Limits(20.0, 512), steps=[("eval", "f(1)")]).values == []
    printed = run_program.run_program("while True: print('x y ' * 100000)", Limits(20.0, 512))
    assert len(printed.stdout) <= run_program.MAX_OUTPUT_BYTES


def test_the_last_block_is_the_program():
    assert program_of("```python\na\n```\n```py3\nb\n```\n```\nc\n```") == "b\n"
    assert program_of("a = 1") == "a = 1"


SOLUTION = "def solve(x):\n    return 2 * x\n"


@pytest.mark.parametrize("language", ["", "python"])
@pytest.mark.parametrize(
    "example",
    [
        "print(solve(2))",
        "# Example\nfrom solution import solve\nassert solve(2) == 4",
        "import solution\nx = [solve (i) for i in range(3)]",
        ">>> solve(2)\n4",
        "def test_solve():\n    assert solve(2) == 4\ntest_solve()",
        "if __name__ == '__main__':\n    print(solve(int(input())))",
    ],
)
def test_an_example_after_the_program_does_not_replace_it(language, example):
    blocks = f"```{language}\n{SOLUTION}```\nFor example:\n```{language}\n{example}\n```\n"
    assert program_of(blocks) == SOLUTION
    assert program_of(blocks + blocks.removesuffix("```\n")) == SOLUTION
    assert program_of(f"```{language}\n{example}\n```") == example + "\n"


def test_an_output_after_the_program_does_not_replace_it():
    assert program_of(f"```\n{SOLUTION}```\nIt prints\n```\n4\n```") == SOLUTION
    assert program_of("```\n4\n```") == "4\n"


@pytest.mark.parametrize(
    "better",
    [
        "def solve(x):\n    return x + x\n",  # its own
        "class Solution:\n    def run(self, x):\n        return x << 1  # like solve(x)\n",
        "seen = set()\nseen.solve(3)\n",  # a method of something else
        "solve = lambda x: x * 2\nprint(int(input()))\n",
    ],
)
def test_a_second_program_replaces_the_first(better):
    assert program_of(f"```python\n{SOLUTION}```\nBetter:\n```python\n{better}```") == better
    assert program_of(f"```python\n{SOLUTION}```\nBetter:\n```python\n{better}") == better  # cut off


@pytest.mark.parametrize(
    ("printed", "wanted", "is_right"),
    [
        ("0.30000000000000004", "0.3", True),
        ("2.0", "2", True),
        ("2", "2.0", True),
        ("1e5", "100000", True),
        ("-0.0", "0", True),
        ("0.9999999999", "1", True),
        (".5 1.", "0.5 1", True),
        ("x=0.30000000000000004", "x=0.3", False),  # not a number
        ("0.3001", "0.3", False),
        ("1000000007.5", "1000000007", False),  # relative tolerance is for floats only
        ("9007199254740992.0", "9007199254740993", False),
        ("123456789.123456789", "123456789.123456788", True),
        ("12345678901234567891", "12345678901234567890", False),
        ("011", "11", False),
        ("1_0.0", "10.0", False),
        ("nan", "nan", True),
        ("nan", "0.0", False),
        ("inf", "1e400", False),
        ("1e999", "7", False),
        ("1.0 2.0", "1.0\n2.0", False),
        ("1.0", "1.0 2.0", False),
        ("9" * 5000 + ".0", "9" * 5000, False),  # longer than Python reads
        ("1" * 10**6 + "x", "1" * 10**6 + ".0", False),
    ],
)
def test_floats_on_standard_output_are_numbers(printed, wanted, is_right):
    assert _same_text(f"a {printed}\n", f"a {wanted}\n\n") is is_right


@pytest.mark.parametrize(
    ("found", "wanted", "is_right"),
    [
        (2.0, 2, True),
        (1000000007.5, 1000000007, False),
        (float(2**53), 2**53 + 1, False),
        (10**400, 0.5, False),  # beyond the range of floats
        (float("inf"), 3, False),
        (float("nan"), 3, False),
        (True, 1, True),
        ("2.0", 2, False),
    ],
)
def test_values_are_compared_within_the_tolerance(found, wanted, is_right):
    assert same(found, wanted) is is_right
    assert same([found], [wanted]) is is_right


def test_a_sandbox_that_cannot_be_set_up_is_said(monkeypatch):
    with pytest.raises(EnvironmentFailure, match="a small program ended with code"):
        CodeScorer(RewardSpec.model_construct(code=CodeSpec.model_construct(timeout_s=5.0, memory_mb=1)))
    scorer = CodeScorer(LIMITS)
    monkeypatch.setattr(
        run_program, "_filter", lambda **_: bytes(8).hex()
    )  # not a filter: the kernel refuses
    with pytest.raises(EnvironmentFailure, match=r"safely here: .*prctl\(PR_SET_SECCOMP\): Invalid argument"):
        CodeScorer(LIMITS)
    graded = grade(scorer, "print(1)", DOUBLE)
    assert isinstance(graded, Failure)
    assert (graded.kind, graded.score) == ("machine", None)
