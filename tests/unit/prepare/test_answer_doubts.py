"""Prompts that ask for no answer the grader can find, and golds that contradict their worked solution."""

import json

import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import Message, Row
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.findings import contradiction, specifies_answer_form
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import Recipe
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import write_jsonl


def found_by_both(tmp_path, rows, name="aime24.jsonl", **options):
    """Code → (severity, count, examples), the same by `check` and `parquet`."""
    source = write_jsonl(tmp_path / name, rows)
    out = tmp_path / "out"
    summary = prepare(PrepareRequest((str(source),), out, val_size=1, near_duplicates="off", **options))
    written = {
        f["code"]: (f["severity"], f["count"], tuple(f["examples"])) for f in summary.report["findings"]
    }
    seen = {f.code: (f.severity, f.count, f.examples) for f in check(CheckRequest((str(source),))).findings}
    return source, written, seen


def test_a_problem_and_its_answer_get_an_instruction(tmp_path):
    rows = [{"problem": f"Find $m+n$ where $m={i}$.", "answer": i} for i in range(10)]
    _, written, seen = found_by_both(tmp_path, rows)
    assert "no-answer-form" not in {**written, **seen}
    row = load_rows([str(tmp_path / "out" / "train.parquet")])[0]
    assert row.prompt[-1].content.endswith(r"put the final answer in \boxed{}.")
    assert row.ability == "math"


@pytest.mark.parametrize("keys", [("question", "answer"), ("prompt", "solution"), ("input", "label")])
@pytest.mark.parametrize(("name", "severity"), [("amc23.jsonl", "warning"), ("rows.jsonl", "info")])
def test_prompts_without_a_form_are_a_finding(tmp_path, keys, name, severity):
    rows = [dict(zip(keys, (f"What is {i} + 1?", str(i + 1)), strict=True)) for i in range(10)]
    source, written, seen = found_by_both(tmp_path, rows, name)
    places = tuple(f"{source}:{i}" for i in range(1, 6))
    assert written["no-answer-form"] == seen["no-answer-form"] == (severity, 10, places)
    options = {"recipe": Recipe(instruction=r"Give the result in \boxed{}."), "overwrite": True}
    assert "no-answer-form" not in found_by_both(tmp_path, rows, name, **options)[1]


@pytest.mark.parametrize("name", ["image", "images", "video", "videos", "audio", "audios"])
def test_pictures_and_sound_that_nobody_reads_are_a_finding(tmp_path, name):
    rows = [{"prompt": f"<image>What is angle {i}?", "answer": str(i), name: []} for i in range(10)]
    rows[3][name] = [{"bytes": "iVBORw0KGgo=", "path": None}]
    source, written, seen = found_by_both(tmp_path, rows)
    assert written["media"] == seen["media"] == ("error", 1, (f"{source}:4: {name}",))


def test_an_instruction_turned_off_is_a_finding(tmp_path):
    rows = [{"problem": f"Find {i}.", "answer": i} for i in range(10)]
    assert found_by_both(tmp_path, rows, recipe=Recipe(instruction=""))[1]["no-answer-form"][:2] == (
        "warning",
        10,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"Put it within \boxed{}.", True),
        ("Put it after ####.", True),
        ("The last line should be Answer: $Answer", True),
        ("Return the final answer in <answer> </answer> tags.", True),
        ("Write your answer as a single integer.", True),
        ("How many balls are in the box?", False),
        ("Ann answers 3 of 5 letters. How many are left?", False),
        ("Find $m+n$.", False),
    ],
)
def test_what_asks_for_a_form(text, expected):
    for messages in ((Message("user", text),), (Message("system", text), Message("user", "2+2?"))):
        row = Row("aime", messages, "4", question=messages[-1].content)
        assert specifies_answer_form(row) == expected
    row = Row("aime", (Message("user", f"2+2?\n{text}"),), "4", question="2+2?")
    assert specifies_answer_form(row) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("3+4=<<3+4=7>>7\n#### 7", "7", False),
        ("3+4=<<3+4=7>>7\n#### 8", "8", True),
        ("<<1+1=3>>, then <<3+4=7>>7", "7", False),
        ("<<3+4=7>>, then <<1+1=2>>", "7", True),
        ("<<2*600=1200>>", "1200", False),
        ("<<2*600=1,200.00>>", "1200", False),
        ("<<.5*2=1.0>>", "1", False),
        ("<<10/4=2.5>>", "2.5", False),
        ("<<10/4=2.5>>", "3", False),  # rounded
        ("<<10/3=3.333>>", "3.33", False),
        ("<<10/4=2.5>>", "4", True),
        ("<<0-5=-5>>", "5", True),
        ("<<0.50-.25=0.25>>", "25", False),  # in cents
        ("<<50-25=25>>", "0.25", False),
        ("<<3+4=7>>7. Twice that is 14.00 in all.\n#### 14", "14", False),
        ("<<3+4=7>>7. Twice that is 14.00 in all.\n#### 15", "15", True),
        ("<<5>>", "6", False),
        ("no calculation", "6", False),
        ("<<3+4=seven>>", "8", False),
        ("<<3+4=7>>", "apple", False),
        ("<<3+4=7>>", "NaN", False),
        ("<<1/3=0.33>>", "0." + 31 * "3", False),  # too many digits to round to
        ("<<3+4=7>>", "1e-9999999", False),
    ],
)
def test_a_gold_against_the_last_calculation(answer, gold, expected):
    assert bool(contradiction(Row("gsm8k", (Message("user", "?"),), gold, answer=answer))) == expected


def test_a_contradicted_gold_is_a_finding_with_its_place(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + (i != 4)}"} for i in range(9)]
    source, written, seen = found_by_both(tmp_path, rows)
    expected = ("warning", 1, (f"{source}:5: <<4+1=5>> and 4",))
    assert written["contradicted-answer"] == seen["contradicted-answer"] == expected
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "contradicted-answer" in {finding["code"] for finding in manifest["report"]["findings"]}
