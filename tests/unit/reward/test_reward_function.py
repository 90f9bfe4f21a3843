"""The user's own reward: found or refused with the reason, called with what it names, never a silent 0."""

import pytest

from rlctl.errors import UsageError
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample

SAMPLE = Sample(
    response="r",
    ground_truth="g",
    prompt="p",
    data_source="d",
    extra_info={"index": 7, "difficulty": 0.5, "tags": ["a", "b"], "split": None},
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
)

MINE = """
import sys, time
from dataclasses import dataclass
import numpy as np
from helper import DOUBLE

@dataclass
class Needs:  # looks its module up by name
    module: "sys.ModuleType"

def plain(response, ground_truth): return float(response == "r" and ground_truth == "g")
def verl(data_source, solution_str, ground_truth, extra_info=None):
    rest = {"index": 7, "difficulty": 0.5, "tags": ["a", "b"], "split": None}
    return (data_source, solution_str, ground_truth, extra_info) == ("d", "r", "g", rest)
def asked(messages): return [turn["content"] for turn in messages] == ["s", "u"]
def scores(response): return {"score": 0.75, "acc": True, "pred": "26"}
def scoreless(): return {"acc": 1.0}
def only(prompt, /, *, response): return DOUBLE * (prompt == "p" and response == "r")
ALL = ["data_source", "extra_info", "ground_truth", "messages", "prompt", "response"]
def anything(**row): return sorted(row) == ALL
def scalar(): return np.float32(0.25)
def truth(): return np.bool_(True)
def chatty(): print("score: 1"); return 3
def raises(): raise RuntimeError("my own mistake")
def surrogate(): raise ValueError("half a pair: " + chr(0xD800))
def hangs(): time.sleep(60)
def leaves(): sys.exit(3)
def nan(): return float("nan")
def text(): return "1.0"
def nothing(): pass
def hog(): return len(bytearray(8 << 30))
def unknown(response, temperature): return 0.0
VALUE = 1
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "helper.py").write_text("DOUBLE = 2")
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


def judged(name, deadline_s=5.0):
    pool = GradingPool(name, deadline_s=deadline_s, num_workers=1)
    try:
        pool.check()
        return pool.grade([SAMPLE])[0]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("function", "score"),
    [
        ("plain", 1.0),
        ("verl", 1.0),
        ("only", 2.0),
        ("anything", 1.0),
        ("scalar", 0.25),
        ("truth", 1.0),
        ("chatty", 3.0),
        ("asked", 1.0),
        ("scores", 0.75),
    ],
)
def test_parameters_are_filled_by_name(mine, function, score):
    assert judged(f"{mine}:{function}") == score


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("raises", "RuntimeError: my own mistake"),
        ("surrogate", "half a pair: \\ud800"),
        ("leaves", "the grading process ended with code 3"),
        ("nan", "the grader returned nan"),
        ("text", "returned '1.0' of type str, not a number"),
        ("nothing", "returned None of type NoneType, not a number"),
        ("hog", "more than 4 GiB"),
        ("scoreless", "a dict without `score`"),
    ],
)
def test_what_is_no_score_is_a_failure(mine, function, text):
    verdict = judged(f"{mine}:{function}")
    assert isinstance(verdict, Failure)
    assert text in verdict.text


def test_a_function_that_hangs_is_a_failure(mine):
    assert judged(f"{mine}:hangs", deadline_s=0.5) == Failure(
        "the grading took longer than 0.5 s", kind="time-out"
    )


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("missing", "no such function"),
        ("VALUE", "VALUE is not a function"),
        ("unknown", "nothing is known to fill the parameter `temperature` with"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(mine, function, what):
    with pytest.raises(UsageError, match=what) as caught:
        judged(f"{mine}:{function}")
    assert caught.value.where == f"{mine}:{function}"


@pytest.mark.parametrize(
    ("source", "what", "line"),
    [
        (
            "import json\nimport no_such_library\n",
            "ModuleNotFoundError: No module named 'no_such_library'",
            2,
        ),
        ("def f(:\n", "SyntaxError", 1),
        ("x = 1\n\n\nraise SystemExit(4)\n", "SystemExit: 4", 4),
    ],
)
def test_an_error_on_import_names_file_and_line(tmp_path, source, what, line):
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(UsageError, match=what) as caught:
        judged(f"{file}:f")
    assert caught.value.where == f"{file}:{line}"
    assert "Traceback" not in caught.value.what


def test_a_file_that_is_missing_or_ends_the_process_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.py: no such file"):
        judged(f"{tmp_path}/gone.py:f")
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(UsageError, match="importing it ends the process with code 7"):
        judged(f"{tmp_path}/dies.py:f")
