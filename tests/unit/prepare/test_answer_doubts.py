"""Prompts that ask for no answer the grader can find, and golds that are placeholders."""

import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import Message, Row, write_rows
from rlctl.errors import UsageError
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.findings import (
    CHECKED_PER_FORM,
    TruthChecks,
    placeholder,
    placeholder_notes,
    specifies_answer_form,
)
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.recipes import Recipe
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import write_jsonl


def found_by_both(tmp_path, rows, name="aime24.jsonl", **options):
    """Code → (severity, count, examples), the same by `check` and `parquet`."""
    source = write_jsonl(tmp_path / name, rows)
    out = tmp_path / "out"
    summary = prepare(PrepareRequest((str(source),), out, val_size=1, **options))
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


@pytest.mark.parametrize(
    ("answers", "severity", "forms"),
    [
        (["7", "-1,200", "3/4", "$ 5.50", "12 %"], "info", 5),
        (["Paris", "Rome", "Oslo", "Bern", "Lima"], "warning", 0),
        (["Paris", "1914", "Oslo", "7 dwarfs", "\\pi"], "warning", 3),
    ],
)
def test_remarks_about_mathematics_are_for_answers_that_may_be_mathematics(
    tmp_path, answers, severity, forms
):
    rows = [{"question": f"What is thing {i}?", "answer": answer} for i, answer in enumerate(answers)]
    _, written, seen = found_by_both(tmp_path, rows, "rows.jsonl")
    assert written["no-grader"][:2] == seen["no-grader"][:2] == (severity, 5)
    assert [found.get("no-answer-form", ("", 0))[1] for found in (written, seen)] == [forms, forms]


@pytest.mark.parametrize("name", ["image", "images", "video", "videos", "audio", "audios"])
def test_rows_with_pictures_and_sound_that_nobody_reads_are_bad_rows(tmp_path, name):
    rows = [{"prompt": f"<image>What is angle {i}?", "answer": str(i), name: []} for i in range(10)]
    rows[3][name] = [{"bytes": "iVBORw0KGgo=", "path": None}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    with pytest.raises(UsageError, match=f"in.jsonl:4: column '{name}' has pictures"):
        prepare(PrepareRequest((str(source),), tmp_path / "out"))
    (finding,) = (one for one in check(CheckRequest((str(source),))).findings if one.code == "bad-rows")
    assert (finding.severity, finding.count) == ("error", 1)


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
        ("Reply with the number only.", True),
        ("Respond with one integer.", True),
        ("Answer with a single number.", True),
        ("Give only the number.", True),
        ("Just the final integer, please.", True),
        ("Number only!", True),
        ("Ann replied to 3 letters. How many only she wrote?", False),
        ("The only way to 7 is just up.", False),
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


PLACEHOLDERS = [
    *(
        "proof",
        "Proof.",
        "notfound",
        "not found",
        "NotFound",
        r"\text{proof}",
        r"\boxed{notfound}",
        "N/A",
        "null",
    ),
    *("nan", "None", "no answer", "See solution", "?", "...", "[missing]", "-"),
]
ANSWERS = [
    "7",
    "none",
    "no solution",
    "undefined",
    "{}",
    r"\emptyset",
    "(2, 3)",
    "A",
    r"\text{yes}",
    "0",
    "-1",
    "no",
]


@pytest.mark.parametrize("text", [*PLACEHOLDERS, "", "  "])
def test_a_placeholder_is_no_answer(text):
    row = Row("numina_math", (Message("user", "Prove it."),), text)
    assert placeholder(row)
    other = Row("countdown", row.prompt, text)
    assert bool(placeholder(other)) == (not text.strip()), "elsewhere the text may be the answer"


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_is_no_placeholder(text):
    assert not placeholder(Row("numina_math", (Message("user", "What is it?"),), text))


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path):
    answers = ["12", "proof", "notfound", "", None, "13"]
    rows = [
        {"problem": f"Find ${place}$.", "solution": "…", "answer": answer}
        for place, answer in enumerate(answers)
    ]
    source = write_jsonl(tmp_path / "numina_math.jsonl", rows)
    request = PrepareRequest((str(source),), tmp_path / "out", val_fraction=0.0)
    summary = prepare(request)
    assert (summary.counts["train"], summary.counts["placeholders_dropped"]) == (2, 4)
    assert summary.counts["quarantined"] == 0
    (found,) = (one for one in summary.report["findings"] if one["code"] == "placeholder")
    assert (found["severity"], found["count"]) == ("warning", 4)
    assert found["examples"][:3] == [
        f"{source}:2: 'proof'",
        f"{source}:3: 'notfound'",
        f"{source}:4: no answer",
    ]
    train = [str(tmp_path / "out" / "train.parquet")]
    assert [row.ground_truth for row in load_rows(train)] == ["12", "13"]
    assert not placeholder_notes({"data.train_files": load_rows(train)})

    path = str(tmp_path / "own.parquet")
    own = [Row("math", (Message("user", f"Find {n}."),), n) for n in ("12", "proof", "13")]
    write_rows(tmp_path / "own.parquet", "train", own)
    (seen,) = (one for one in check(CheckRequest((path,))).findings if one.code == "placeholder")
    assert (seen.severity, seen.count) == ("error", 1)
    (note,) = placeholder_notes({"data.train_files": load_rows([path])})
    assert "data.train_files: in 1 row" in note
    assert f"{path}:2: 'proof'" in note


def test_an_input_without_any_answer_is_written_for_rewards_that_read_none(tmp_path):
    rows = [{"problem": f"Find {i}.", "answer": None} for i in range(3)]
    source = write_jsonl(tmp_path / "math.jsonl", rows)
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", recipe=Recipe("generic")))
    assert summary.counts["train"] + summary.counts["test"] == 3
    (finding,) = (one for one in summary.report["findings"] if one["code"] == "no-answers")
    assert (finding["count"], "--answer-key" in finding["fix"]) == (3, True)


def test_numbers_of_one_form_are_checked_only_at_first(monkeypatch):
    asked = []

    def check_all(pairs):
        asked.extend(pairs)
        return ["bad" if truth in {"==", "1/0"} or truth.endswith("?x") else "" for _, truth in pairs]

    monkeypatch.setattr("rlctl.reward.trial.check_ground_truths", check_all)
    numbers = [("gsm8k", str(number)) for number in range(1, 1001)]
    numbers += [("gsm8k", f"({number}, -0.5]") for number in range(2, 1001)]
    numbers += [("gsm8k", rf"\frac{{{number}}}{{7}}") for number in range(2, 1001)]
    alone = (
        "==",
        "1/0",
        "007",
        "1,000",
        "10^6",
        "x",
        "1" * 16,
        "5!",
        "2^{30}",
        *(f"{n}^n" * 20 for n in "23"),
    )
    others = [("gsm8k", text) for text in alone]
    of_others = [("countdown", str(number)) for number in range(1, 301)]
    checks = TruthChecks()
    problems = checks.problems([*others, *numbers, *of_others]) + checks.problems([("gsm8k", "5000")])
    assert problems[:2] == ["bad", "bad"]
    assert not any(problems[2:])
    assert len([pair for pair in asked if pair in numbers]) == 3 * CHECKED_PER_FORM
    assert set(others + of_others) <= set(asked)
    assert ("gsm8k", "5000") not in asked
    assert len(asked) == len(set(asked))
    failing = [("gsm8k", f"{number}?x") for number in range(1, 501)]
    assert checks.problems(failing) == 500 * ["bad"], "all of a form that cannot be graded are checked"
