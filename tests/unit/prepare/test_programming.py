"""Data sets of programming problems: their columns become prompts, and tests that the grader runs."""

import base64
import json
import os
import pickle
import zlib

import pytest

from rlctl.data.records import RowError
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import LAYOUTS, Recipe, recognise
from rlctl.prepare.request import PrepareRequest
from rlctl.reward.code import CodeScorer
from rlctl.reward.protocol import Sample
from rlctl.run_spec.rollout import RewardSpec
from tests.unit.prepare.helpers import write_jsonl
from tests.unit.prepare.programs import APPS, APPS_CALL, HUMANEVAL, LCB, LCB_CALL, MBPP, PROGRAMS, compressed


def read(record):
    return Recipe(recognise(record)).resolve().to_row(record, "file", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_pass_the_tests_that_the_recipe_writes_and_wrong_ones_do_not(name):
    recipe, record, program = PROGRAMS[name]
    assert recognise(record) == recipe
    row = read(record)
    assert row.data_source == recipe
    answers = [f"```python\n{program.format(factor)}```" for factor in (2, 3)]
    grades = CodeScorer(RewardSpec()).grade([Sample(text, row.ground_truth) for text in answers])
    assert grades == [1.0, 0.0]


def test_prompts_of_programs():
    prompts = {name: read(record).prompt[-1].content for name, (_, record, _) in PROGRAMS.items()}
    instructions = {name: LAYOUTS[recipe].instruction for name, (recipe, *_) in PROGRAMS.items()}
    assert all(prompt.endswith(f"\n{instructions[name]}") for name, prompt in prompts.items())
    assert "in Python" in instructions["mbpp"]
    assert '"""Returns twice n."""' in prompts["humaneval"]
    assert "canonical" not in prompts["humaneval"]
    assert "assert double(2) == 4" in prompts["mbpp"], "the name of the function is only in the tests"
    assert "assert double(5) == 10" not in prompts["mbpp"], "a response could repeat all tests"
    assert "def double(n):" in prompts["apps call"]
    assert "standard input" in prompts["apps"]
    assert "standard input" not in prompts["apps call"]
    assert "class Solution:" in prompts["livecodebench call"]


def test_check_prepare_and_evaluate_accept_them(tmp_path):
    for name, (_, record, _) in PROGRAMS.items():
        source = str(write_jsonl(tmp_path / f"{name.replace(' ', '_')}.jsonl", [record]))
        assert [finding.code for finding in check(CheckRequest((source,))).findings] == []
        request = PrepareRequest((source,), tmp_path / f"out {name}", val_fraction=0.0)
        assert prepare(request).counts["train"] == 1


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-pickle",)


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (packed(Evil()), "neither JSON"),
        (packed([json.dumps([]), Evil()]), "neither JSON"),
        (packed({"input": "1"}), "neither JSON"),
        (base64.b64encode(b"not zlib").decode(), "neither JSON"),
        ("hello", "neither JSON"),
        ("[1, 2", "is not JSON"),
        (compressed([{"input": "1"}]), "not an object with input and output"),
    ],
)
def test_private_tests_are_read_without_running_anything(tmp_path, monkeypatch, tests, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RowError, match=reason):
        read(LCB | {"private_test_cases": tests})
    assert not list(tmp_path.iterdir())


def test_tests_that_expand_without_limit_are_refused(monkeypatch):
    monkeypatch.setattr("rlctl.prepare.programming.MAX_TEST_BYTES", 1000)
    with pytest.raises(RowError, match="more than"):
        read(LCB | {"private_test_cases": compressed([{"input": "0" * 5000, "output": ""}])})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (HUMANEVAL | {"entry_point": "f; import os"}, "not the name of a function"),
        (MBPP | {"test_list": "assert f(1)"}, "not a list of asserts"),
        (APPS | {"input_output": "{"}, "is not JSON"),
        (APPS | {"input_output": "[1]"}, "not an object with inputs"),
        (LCB_CALL | {"metadata": "{}"}, "no 'func_name'"),
    ],
)
def test_what_is_wrong_is_said(record, reason):
    with pytest.raises(RowError, match=reason):
        read(record)


def test_problems_without_tests_have_no_answer_and_are_dropped(tmp_path):
    rows = [
        APPS_CALL,
        *(APPS | {"input_output": given} for given in ("", "{}", '{"inputs": [], "outputs": []}')),
    ]
    rows = [row | {"question": f"{row['question']} {place}"} for place, row in enumerate(rows)]
    source = write_jsonl(tmp_path / "apps.jsonl", rows)
    counts = prepare(PrepareRequest((str(source),), tmp_path / "out", val_fraction=0.0)).counts
    assert (counts["train"], counts["placeholders_dropped"]) == (1, 3)
