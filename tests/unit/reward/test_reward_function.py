"""The user's own reward: loaded or refused with a reason, called with the arguments it names, never scored 0
without a message."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.registry import GRADERS
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample
from tests.unit.reward.samples import built, episodes

SAMPLE = Sample(
    response="r",
    ground_truth="g",
    prompt="p",
    data_source="d",
    extra_info={"index": 7, "difficulty": 0.5, "tags": ["a", "b"], "split": None},
    messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
    response_ids=(4, 2),
)

MINE = """
import sys, time
from dataclasses import dataclass
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
def ids(response, response_ids): return response_ids == [4, 2]
def scalar():
    import numpy as np
    return np.float32(0.25)
def truth():
    import numpy as np
    return np.bool_(True)
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


def graded(name, deadline_s=5.0):
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
        ("ids", 1.0),
        ("scalar", 0.25),
        ("truth", 1.0),
        ("chatty", 3.0),
        ("asked", 1.0),
        ("scores", 0.75),
    ],
)
def test_parameters_are_filled_by_name(mine, function, score):
    assert graded(f"{mine}:{function}") == score


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
    grade = graded(f"{mine}:{function}")
    assert isinstance(grade, Failure)
    assert text in grade.text


def test_a_function_that_hangs_is_a_failure(mine):
    assert graded(f"{mine}:hangs", deadline_s=0.5) == Failure(
        "the grading took longer than 0.5 s", kind="time-out"
    )


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("missing", "no such function"),
        ("VALUE", "VALUE is not a function"),
        ("unknown", "no value for the parameter `temperature`"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(mine, function, what):
    with pytest.raises(UsageError, match=what) as caught:
        graded(f"{mine}:{function}")
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
        graded(f"{file}:f")
    assert caught.value.where == f"{file}:{line}"
    assert "Traceback" not in caught.value.what


def test_a_file_that_is_missing_or_ends_the_process_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.py: no such file"):
        graded(f"{tmp_path}/gone.py:f")
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(UsageError, match="importing it failed: the grading process ended with code 7"):
        graded(f"{tmp_path}/dies.py:f")


def test_a_grader_of_this_process_only_is_refused() -> None:
    GRADERS.register("of_a_notebook")(lambda response: 1.0)
    with pytest.raises(UsageError, match=r"no grader `of_a_notebook` \(other processes grade: name it as "):
        graded("of_a_notebook")
    del GRADERS._parts["of_a_notebook"]


UNRULY = """
import os, pathlib, signal, subprocess, sys, threading, time

def note(name, pid):
    pathlib.Path(__file__).with_name(name).write_text(str(pid))

def cancels_alarms(response):
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(60)

def has_its_own_alarm(response):
    def end(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        time.sleep(60)
    except TimeoutError:
        return 0.25

def ignores_signals(response):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(60)

def stops_itself(response):
    os.kill(os.getpid(), signal.SIGSTOP)

def forks(response):
    if os.fork() == 0:
        return 0.0
    time.sleep(0.2)
    return 1.0

def forks_and_raises(response):
    if os.fork() == 0:
        raise ValueError("in the copy")
    os.wait()
    return 1.0

def leaves_a_process(response):
    note("child", subprocess.Popen(["sleep", "600"]).pid)
    return 1.0

def leaves_a_daemon(response):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note("child", os.getpid())
            time.sleep(600)
        os._exit(0)
    os.wait()
    time.sleep(0.3)
    return 1.0

def hangs_after_a_daemon(response):
    leaves_a_daemon(response)
    time.sleep(60)

def reads_input(response):
    return float(len(sys.stdin.read()))

def floods(response):
    def write(fd):
        while True:
            os.write(fd, b'{"number": 0, "grades": [{"score": 1.0}]}\\n' * 1000)
    for fd in range(1, 20):
        threading.Thread(target=write, args=(fd,), daemon=True).start()
    time.sleep(60)

def escapes(response):
    raise ValueError("\\x1b[2J\\x1b]0;title\\x07 gone\\u202e")
"""


@pytest.fixture(scope="module")
def unruly(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unruly")
    (folder / "unruly.py").write_text(UNRULY)
    return folder / "unruly.py"


@pytest.mark.parametrize("function", ["cancels_alarms", "ignores_signals", "stops_itself"])
def test_a_deadline_does_not_depend_on_the_function(unruly, function):
    grade = graded(f"{unruly}:{function}", deadline_s=0.5)
    assert grade == Failure("the grading took longer than 0.5 s", kind="time-out")


@pytest.mark.parametrize(
    ("function", "score"),
    [("has_its_own_alarm", 0.25), ("forks", 1.0), ("forks_and_raises", 1.0), ("reads_input", 0.0)],
)
def test_what_a_function_does_with_signals_forks_and_input_is_its_own(unruly, function, score):
    """A forked copy of the process sends no reply, neither in this grading nor in the next one."""
    pool = GradingPool(f"{unruly}:{function}", deadline_s=10.0, num_workers=1)
    try:
        assert pool.grade([SAMPLE] * 3) == [score] * 3
    finally:
        pool.close()


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("function", ["leaves_a_process", "leaves_a_daemon", "hangs_after_a_daemon"])
def test_no_process_outlives_the_pool(unruly, function):
    child = unruly.with_name("child")
    child.unlink(missing_ok=True)
    graded(f"{unruly}:{function}", deadline_s=1.0)
    assert not is_alive(int(child.read_text()))


def test_no_process_outlives_a_killed_trainer(unruly):
    child = unruly.with_name("child")
    child.unlink(missing_ok=True)
    code = (
        "from rlctl.reward.pool import GradingPool\nfrom rlctl.reward.protocol import Sample\n"
        f"GradingPool('{unruly}:hangs_after_a_daemon', num_workers=1).grade([Sample('r', 'g')])"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as trainer:
        while not (child.exists() and child.read_text()):
            time.sleep(0.05)
        trainer.kill()
    pid = int(child.read_text())
    for _ in range(200):
        if not is_alive(pid):
            return
        time.sleep(0.05)
    pytest.fail("it is still running")


def test_a_flood_of_replies_is_cut_off(unruly):
    grade = graded(f"{unruly}:floods", deadline_s=20.0)
    assert grade == Failure("the grading process replied with more than 1 MiB", kind="crash")


def test_control_characters_in_an_error_are_shown_not_sent(unruly):
    grade = graded(f"{unruly}:escapes")
    assert "\\x1b[2J\\x1b]0;title\\x07 gone\\u202e" in grade.text
    assert "\x1b" not in grade.text


def test_control_characters_in_an_import_error_are_shown_not_sent(tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('\\x1b[2J')\n")
    with pytest.raises(UsageError) as caught:
        graded(f"{tmp_path}/bad.py:f")
    assert "\\x1b[2J" in caught.value.what


def test_files_named_like_the_standard_library_are_left_alone(tmp_path, monkeypatch):
    """In the working directory, and next to the function's file."""
    for name in ("html", "json", "signal", "secrets", "statistics"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a stray file')\n")
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    (tmp_path / "mine.py").write_text(
        "def f(response):\n    import html, statistics, helper\n    return helper.VALUE\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":/nowhere")  # an empty entry means the working directory
    assert graded("mine.py:f") == 0.5


TRL = """
import asyncio

def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def columns(prompts, completions, difficulty, solution, **kwargs):
    assert kwargs["data_source"] == ["d"] * len(prompts) and kwargs["trainer_state"] is None
    kwargs["log_metric"]("name", 1.0)
    return [d + (p == "p") + (s == "g") for p, d, s in zip(prompts, difficulty, solution)]

def chat(completions, **kwargs):
    return [float(completion[0]["content"] == "r") for completion in completions]

def text_of(completion):
    return completion[-1]["content"]

def chat_by_a_helper(prompts, completions, **kwargs):
    try:
        return [float(text_of(c) == "r" and p[0]["role"] == "system") for p, c in zip(prompts, completions)]
    except Exception:
        return [0.0] * len(completions)

def chat_by_annotation(completions: list[list[dict[str, str]]]) -> list[float]:
    return [float(isinstance(completion, list)) for completion in completions]

async def asynchronous(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.25] * len(completions)

def siblings(completions, **kwargs):
    return [float(len(completions))] * len(completions)

def tokens(completion_ids: list[list[int]], completions=None):
    return [float(sum(ids)) for ids in completion_ids]

def one_bad(completions, **kwargs):
    if "bad" in completions:
        raise KeyError("bad")
    return [1.0] * len(completions)

def some(completions, **kwargs):
    return [None if completion == "skip" else 1.0 for completion in completions]

def too_many(completions, **kwargs):
    return [1.0, 1.0]

def needs(completions, level): return [1.0]

def forgets_empty(completions, **kwargs):
    kept = [completion for completion in completions if completion]
    return [len(completion) / 3 for completion in kept]

def always_one(completions, **kwargs):
    return [1.0]

def by_number(completions, **kwargs):
    return {number: 1.0 for number in range(len(completions))}

def as_set(completions, **kwargs):
    return {0.5 * len(one) for one in completions}

def one_more(completions, **kwargs):
    return [1.0] * (len(completions) + 1)

def ranks(completions, **kwargs):
    special = {"none": None, "nan": float("nan")}
    ranked = {text: rank / 4 for rank, text in enumerate(("-", "a", "cc", "-", "bbb"))}
    return [special.get(text, ranked.get(text)) for text in completions]

def limits(completions, **kwargs):
    import os, time
    if "hang" in completions:
        time.sleep(60)
    if "exit" in completions:
        os._exit(3)
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def trl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    (folder / "trl_rewards.py").write_text(TRL)
    return folder / "trl_rewards.py"


@pytest.mark.parametrize(
    ("function", "score"),
    [
        ("lengths", 1.0),
        ("columns", 2.5),
        ("chat", 1.0),
        ("chat_by_a_helper", 1.0),
        ("chat_by_annotation", 1.0),
        ("asynchronous", 0.25),
        ("tokens", 12.0),
    ],
)
def test_functions_written_for_trl_work_as_they_are(trl, function, score):
    pool = GradingPool(f"{trl}:{function}", num_workers=1)
    try:
        assert pool.grade([replace(SAMPLE, response_ids=(5, 7))]) == [score]
    finally:
        pool.close()


def test_responses_to_one_prompt_are_graded_in_one_call(trl):
    samples = [Sample(str(i), str(truth)) for truth, count in ((1, 3), (2, 2)) for i in range(count)]
    pool = GradingPool(f"{trl}:siblings", num_workers=2)
    try:
        assert pool.grade(samples) == [3.0, 3.0, 3.0, 2.0, 2.0]
    finally:
        pool.close()


def grades_of(name, *responses, deadline_s=5.0):
    pool = GradingPool(name, num_workers=1, deadline_s=deadline_s)
    try:
        return pool.grade([Sample(response, "1") for response in responses])
    finally:
        pool.close()


def test_of_a_call_that_fails_no_response_is_graded_alone(trl):
    """A function of a group may compare its responses: alone each would have another score."""
    for grade in grades_of(f"{trl}:one_bad", "a", "bad", "c"):
        assert "KeyError: 'bad'" in grade.text
        assert grade.score is None
    for name, given in (("forgets_empty", 3), ("always_one", 1), ("one_more", 5)):
        for grade in grades_of(f"{trl}:{name}", "a", "aaa", "", "aa"):
            assert f"{given} numbers for 4 completions" in grade.text
            assert grade.score is None


@pytest.mark.parametrize("name", ["by_number", "as_set"])
def test_what_has_no_order_is_no_list_of_scores(trl, name):
    """The keys of a mapping were taken for scores."""
    for grade in grades_of(f"{trl}:{name}", "a", "aa"):
        assert "it must return one number per completion" in grade.text
        assert grade.score is None


def test_what_is_no_number_is_no_grade_of_that_response_only(trl):
    ranks = grades_of(f"{trl}:ranks", "a", "none", "bbb", "nan", "cc")
    assert [grade for grade in ranks if isinstance(grade, float)] == [0.25, 1.0, 0.5]
    assert [grade.kind for grade in ranks if isinstance(grade, Failure)] == ["inapplicable", "error"]


@pytest.mark.parametrize("kind", ["hang", "exit"])
def test_of_a_call_that_reaches_a_limit_only_the_cause_is_wrong(trl, kind):
    first, cause, last = grades_of(f"{trl}:limits", "a", kind, "c", deadline_s=0.5)
    assert (first.kind, first.score) == (last.kind, last.score) == ("error", None)
    assert (cause.kind, cause.score) == ({"hang": "time-out", "exit": "crash"}[kind], 0.0)


def test_what_does_not_fit_trls_form_is_said(trl):
    assert "needs level, the data has" in graded(f"{trl}:needs").text
    assert "one number per completion" in graded(f"{trl}:too_many").text


def test_none_of_one_term_leaves_the_others(trl):
    terms = [{"name": f"{trl}:some", "weight": 2.0}, {"name": "exact", "weight": 1.0}]
    reward = built(terms=terms)
    result = reward.score(episodes(("skip", "skip", "x"), ("a", "a", "x")))
    reward.close()
    assert result.scores.tolist() == [1.0, 3.0]
    assert result.valid.all()
    assert result.parts["some"].isnan().tolist() == [True, False]
    alone = built(name=f"{trl}:some")
    result = alone.score(episodes(("skip", "skip", "x"), ("a", "a", "x")))
    alone.close()
    assert result.valid.tolist() == [False, True]


REGISTERED = """
from pydantic import BaseModel, Field
from rlctl.registry import GRADERS

class Params(BaseModel):  # by default, Pydantic ignores unknown names
    limit: int = Field(default=3, gt=0)

@GRADERS.register(label="short", params=Params, answer_of=lambda response: response.upper())
def short(response, params):
    return float(len(response) <= params.limit)

@GRADERS.register(params=Params)
def shorts(completions, params):
    return [short(one, params) for one in completions]
"""


def test_a_registered_function_has_parameters_and_reads_answers(tmp_path):
    name = f"{tmp_path}/short.py:short"
    (tmp_path / "short.py").write_text(REGISTERED)
    reward = built(name=name, params={"limit": 2})
    batch = episodes(("abc", "", "x"), ("ab", "", "x"))
    result = reward.score(batch, read_answers=True)
    reward.close()
    assert result.scores.tolist() == [0.0, 1.0]
    assert result.answers == ["ABC", "AB"]
    reward = built(name=f"{tmp_path}/short.py:shorts", params={"limit": 2})
    assert reward.score(batch).scores.tolist() == [0.0, 1.0]
    reward.close()
    for params, words in (({"limit": 0}, "greater than 0"), ({"size": 1}, "size")):
        with pytest.raises(UsageError, match=words):
            built(name=name, params=params)


def test_the_example_of_the_docs_works():
    reward = built(name="examples/custom_grader.py:brevity", params={"scale": 2})
    result = reward.score(episodes(("abcd", "", "x"), ("ab", "", "x")))
    reward.close()
    assert result.scores.tolist() == [0.5, 1.0]


def test_a_users_function_is_called_for_each_of_equal_responses(tmp_path: Path) -> None:
    code = "calls = []\ndef score(response, ground_truth):\n    calls.append(1)\n    return len(calls)\n"
    (tmp_path / "counts.py").write_text(code)
    pool = GradingPool(f"{tmp_path}/counts.py:score", num_workers=1)
    try:
        assert sorted(pool.grade([Sample("a", "b")] * 3)) == [1.0, 2.0, 3.0]
    finally:
        pool.close()
