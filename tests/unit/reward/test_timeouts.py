"""A response that ends its own grading is wrong; where the grader or the gold does, it is excluded."""

import pytest

from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure
from tests.unit.reward.samples import built, episodes, pairs

#: Seconds of work for sympy, and every part of it small.
HANGS = "\\boxed{" + "+".join(f"\\frac{{x^{{{280 + i}}}-1}}{{x^{{{7 + i}}}-1}}" for i in range(12)) + "}"

GRADER = """
import ctypes, mmap, os, sys, time

def grade(response, ground_truth):
    if response == "hang":
        time.sleep(60)
    if response == "memory":
        return float(len(bytearray(8 << 30)) == 0)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "exit":
        sys.exit(3)
    if response == "raise":
        raise ValueError("no such response")
    if "broken" in ground_truth:
        time.sleep(60)
    if "crashing" in ground_truth:
        os.abort()
    return float(response == ground_truth)

def boxed(response, ground_truth):
    if response == "segfault":
        ctypes.string_at(0)
    return 1.0 if response == "\\\\boxed{%s}" % ground_truth else -1.0

def brevity(response):
    if response == "segfault":
        ctypes.string_at(0)
    return 0.5 / (1 + len(response))

def server(response, ground_truth):
    if os.path.exists(ground_truth):
        time.sleep(60)
    return float(response == ground_truth)

def once(response, ground_truth):
    if not os.path.exists(ground_truth):
        open(ground_truth, "w").close()
        os.abort()
    return float(response == ground_truth)

hoard = []

def leaks(response, ground_truth):
    try:
        hoard.append(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError from error
    return float(response == ground_truth)
"""


@pytest.fixture(scope="module")
def maths():
    """Shared: starting a process costs the import of sympy."""
    pool = GradingPool("maths", deadline_s=2.0, num_workers=2)
    yield pool
    pool.close()


@pytest.fixture
def grader(tmp_path):
    """Makes a pool of one process for a function of the file above."""
    (tmp_path / "grader.py").write_text(GRADER)
    pools = []

    def make(name, num_workers=1):
        pools.append(GradingPool(f"{tmp_path}/grader.py:{name}", deadline_s=1.0, num_workers=num_workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def scores(grades):
    """The score of each; None: excluded."""
    return [grade.score if isinstance(grade, Failure) else grade for grade in grades]


def kinds(grades):
    return [grade.kind for grade in grades if isinstance(grade, Failure)]


def test_a_response_that_takes_too_long_is_wrong(maths):
    grades = maths.grade(pairs(("\\boxed{x+1}", "x+1"), (HANGS, "x+1"), ("\\boxed{x}", "x+1")))
    assert scores(grades) == [1.0, 0.0, 0.0]
    assert grades[1].text == "the grading took longer than 2 s"
    assert grades[1].kind == "time-out"


def test_a_ground_truth_that_takes_too_long_excludes_its_responses(maths):
    gold = "\\int_0^1 x^{x^{\\sin(x)}} dx \\cdot \\int_0^1 \\frac{\\sin(x^3)}{1+e^x} dx"
    grades = maths.grade(pairs(("\\boxed{x^2+y}", gold), ("\\boxed{1}", "1")))
    if isinstance(grades[0], Failure):  # else sympy has learnt to compare with it
        assert grades[0].score is None
    assert grades[1] == 1.0


def test_an_unreadable_ground_truth_excludes_its_responses(maths):
    [grade] = maths.grade(pairs(("\\boxed{1}", "€")))
    assert (grade.kind, grade.score) == ("error", None)


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        ("hang", "time-out", "took longer than 1 s"),
        ("memory", "memory", "more than 4 GiB"),
        ("segfault", "crash", "Segmentation fault"),
        ("exit", "crash", "ended with code 3"),
    ],
)
def test_limits_and_crashes_of_a_function_are_the_responses_where_the_gold_gets_1(
    grader, response, kind, words
):
    grades = grader("grade").grade(pairs((response, "gold"), ("gold", "gold"), (response, "broken")))
    assert scores(grades) == [0.0, 1.0, None]
    assert kinds(grades) == [kind, kind]
    assert words in grades[0].text


def test_an_exception_of_a_function_is_the_functions_fault(grader):
    [grade] = grader("grade").grade(pairs(("raise", "gold")))
    assert (grade.kind, grade.score) == ("error", None)
    assert "no such response" in grade.text


def test_a_ground_truth_that_crashes_the_grader_excludes_its_responses(grader):
    grades = grader("grade").grade(pairs(("segfault", "crashing"), ("1", "crashing")))
    assert scores(grades) == [None, None]


def test_where_wrong_means_less_than_0_so_does_this(grader):
    """As in functions that return −1 or 1: 0 would be a reward for not being graded."""
    grades = grader("boxed").grade(pairs(("segfault", "7"), ("\\boxed{7}", "7"), ("8", "7")))
    assert scores(grades) == [-1.0, 1.0, -1.0]


def test_a_function_that_does_not_give_the_gold_1_says_nothing_of_its_responses(grader):
    assert scores(grader("brevity").grade(pairs(("segfault", "7")))) == [None]


def test_a_server_that_is_down_excludes_responses_until_it_is_back(grader, tmp_path):
    down = tmp_path / "down"
    pool = grader("server")
    right = pairs((str(down), str(down)))
    down.touch()
    assert scores(pool.grade(right)) == [None]
    down.unlink()
    assert scores(pool.grade(right)) == [1.0]
    down.touch()  # what was seen a minute ago does not count
    assert scores(pool.grade(right)) == [None]


def test_a_crash_that_does_not_happen_again_is_not_the_responses(grader, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    pool = grader("once")
    assert pool.grade(pairs((str(flag), str(flag)))) == [1.0]
    flag.unlink()
    assert pool.grade(pairs((str(flag), str(flag)))) == [1.0]


def test_memory_that_earlier_responses_took_is_not_the_later_ones_fault(grader):
    assert grader("leaks").grade(pairs(*[("7", "7")] * 10)) == [1.0] * 10


def test_the_gold_is_tested_once(maths, monkeypatch):
    gold, asked = "x+17", []
    worker = maths._workers[0]
    grade = worker.grade
    monkeypatch.setattr(
        worker, "grade", lambda some, read: asked.extend(one.response for one in some) or grade(some, read)
    )
    for _ in range(2):
        assert scores(maths.grade(pairs((HANGS, gold)))) == [0.0]
    assert asked == [HANGS, gold, HANGS]


def test_an_answer_that_cannot_be_read_in_time_leaves_the_score(tmp_path, monkeypatch):
    """The reply with the score comes before the answer is read."""
    (tmp_path / "sitecustomize.py").write_text(
        "from dataclasses import replace\n"
        "from rlctl.registry import GRADERS\n"
        "def slow(response):\n"
        "    while 'slow' in response: pass\n"
        "    return '7'\n"
        "GRADERS._parts['maths'] = replace(GRADERS.part('maths'), answer_of=slow)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = GradingPool("maths", deadline_s=2.0, num_workers=1)
    graded = pool.grade_and_read(pairs(("slow \\boxed{7}", "7"), ("\\boxed{7}", "7")))
    pool.close()
    assert graded == [(1.0, None), (1.0, "7")]


OURS = """
import time
from dataclasses import replace
from rlctl.registry import GRADERS
part = GRADERS.part("maths")
grade = part.function
def odd(response, ground_truth):
    if response == "raise":
        raise RecursionError("too deep for sympy")
    if response == "wait":
        time.sleep(60)
    return grade(response, ground_truth)
odd.__module__ = grade.__module__  # a grader of ours: loaded before the clock starts
GRADERS._parts["maths"] = replace(part, function=odd)
"""


def test_of_our_graders_exceptions_count_like_crashes_and_a_busy_machine_does_not(tmp_path, monkeypatch):
    """Waiting takes no CPU time, like grading on an overloaded machine."""
    (tmp_path / "sitecustomize.py").write_text(OURS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = GradingPool("maths", deadline_s=0.5, num_workers=1)
    grades = pool.grade(pairs(("raise", "7"), ("wait", "7"), ("raise", "€"), ("\\boxed{7}", "7")))
    pool.close()
    assert scores(grades) == [0.0, None, None, 1.0]
    assert kinds(grades) == ["error", "machine", "error"]


def test_a_batch_of_them_is_scored_and_counted(tmp_path):
    (tmp_path / "grader.py").write_text(GRADER)
    reward = built(terms=[{"name": f"{tmp_path}/grader.py:grade", "weight": 2.0}])
    bad = [(word, "gold", "x") for word in ("segfault", "exit", "memory")]
    result = reward.score(episodes(("gold", "gold", "x"), *bad, ("raise", "gold", "x")))
    reward.close()
    assert result.scores.tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert result.valid.tolist() == [True, True, True, True, False]
    assert result.timeouts == {"crash": 2, "memory": 1}
    assert result.errors_by_term == {"grade": 1}
    assert len(result.errors) == 1
    assert "no such response" in result.errors[0]
