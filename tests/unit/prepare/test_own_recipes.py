"""Data recipes of users' files and of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.data.read import load_rows
from rlctl.evaluate.questions import load_questions
from rlctl.prepare.recipes import Recipe, layout_named
from rlctl.registry import DATA_RECIPES
from tests.packages import install_package
from tests.unit.prepare.helpers import write_jsonl

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_recipe.py"
QUIZ = f"{EXAMPLE}:quiz"
ROWS = [
    {"ask": f"Which is larger than {number}?", "choices": [str(number), str(number + 1)], "right": 2}
    for number in range(20)
]
MINE = """
from rlctl.data.schema import Row
from rlctl.prepare.recipes import Layout

def recipe():
    return Layout(read, "question", "answer")

def read(values, prompt_key, answer_key):
    return {returned}
"""


@pytest.fixture
def prepare(tmp_path, capsys):
    """Prepares rows in the form of MINE with a recipe; returns the exit code and what was printed."""

    def prepare(recipe, *options, rows=({"question": "1 + 1?", "answer": 2},)):
        source = write_jsonl(tmp_path / "rows.jsonl", rows)
        code = run(
            ["prepare-data", "parquet", str(source), "--out", f"{tmp_path}/out", "--recipe", recipe, *options]
        )
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return prepare


def test_a_recipe_of_a_file_reads_rows_and_states_its_instruction(prepare, tmp_path):
    code, printed = prepare(QUIZ, "--workers", "2", "--val-size", "0", rows=ROWS)
    assert code == 0, printed
    rows = load_rows([f"{tmp_path}/out/train.parquet"])
    assert [row.ground_truth for row in rows] == ["B"] * 20
    assert rows[3].prompt[-1].content.splitlines() == [
        *("Which is larger than 3?", "A. 3", "B. 4"),
        'End with "Answer: X", where X is the letter of the right choice.',
    ]
    assert (rows[0].data_source, rows[0].extra["topic"]) == ("multiple_choice", "")


def test_options_of_the_other_recipes_apply(prepare, tmp_path):
    rows = [row | {"frage": "Was ist größer?"} for row in ROWS[:1]]
    options = ("--prompt-key", "frage", "--instruction", "", "--data-source", "mmlu", "--val-size", "0")
    assert prepare(QUIZ, *options, rows=rows)[0] == 0
    (row,) = load_rows([f"{tmp_path}/out/train.parquet"])
    assert (row.prompt[-1].content, row.data_source) == ("Was ist größer?\nA. 0\nB. 1", "mmlu")


def test_an_edited_recipe_is_another_input(prepare, tmp_path):
    file, printed = tmp_path / "mine.py", []
    for answer in ("1", "1", "2"):
        file.write_text(MINE.format(returned=f'Row("", values["question"], "{answer}")'))
        printed.append(prepare(f"{file}:recipe", "--val-size", "0")[1])
        layout_named.cache_clear()  # as in a new process
        part = DATA_RECIPES._parts.pop(f"{file}:recipe")
        del sys.modules[part.function.__module__]
    words = ("wrote ", "unchanged ", "contains other data than this run would write")
    assert all(word in text for word, text in zip(words, printed, strict=True)), printed


def test_what_a_recipe_returns_becomes_data(prepare, tmp_path):
    (tmp_path / "mine.py").write_text(
        MINE.format(returned='Row("sums", [{"role": "user", "content": "1 + 1?"}], values["answer"])')
    )
    code, printed = prepare(f"{tmp_path}/mine.py:recipe", "--val-size", "0")
    assert code == 0, printed
    (row,) = load_rows([f"{tmp_path}/out/train.parquet"])
    assert (row.prompt_text, row.ground_truth, row.data_source) == ("1 + 1?", "2", "sums")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ('values["Question"]', ["rows.jsonl:1", "KeyError: 'Question'", "mine.py:9, in read"]),
        ("None", ["rows.jsonl:1", "the recipe returned null, not a Row"]),
        ('Row("", 3, "2")', ["the prompt is of type int"]),
        ('Row("", [], "2")', ["the prompt has no messages"]),
        ('Row("", "1 + 1?", {})', ["the ground truth is of type dict"]),
        ('Row("", "1 + 1?", "2", extra=[])', ["extra is of type list, not a mapping"]),
        ('Row("", "1 + 1? \\ud800", "2")', ["not valid UTF-8"]),
    ],
)
def test_a_recipe_that_fails_on_a_row_names_the_row_and_its_line(prepare, tmp_path, returned, words):
    (tmp_path / "mine.py").write_text(MINE.format(returned=returned))
    code, printed = prepare(f"{tmp_path}/mine.py:recipe")
    assert code == 2
    assert all(word in printed for word in words), printed


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("gsm9k", ["no data recipe `gsm9k`", "at   --recipe", "gsm8k, dapo-math"]),
        ("missing.py:f", ["no such file", "--recipe"]),
        ("mine.py:absent", ["no such function"]),
        ("mine.py:text", ["it returned str, not a Layout"]),
        ("mine.py:of_number", ["answer_key of its Layout is of type int, not text"]),
        ("mine.py:of_one", ["prompt_key and answer_key", "def read(values, prompt_key, answer_key)"]),
        ("mine.py:grader", ["registered as a grader, not as a data recipe"]),
    ],
)
def test_what_is_no_recipe_is_refused(prepare, tmp_path, monkeypatch, recipe, words):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from rlctl.prepare.recipes import Layout\nfrom rlctl.registry import GRADERS\n\n"
        "def text(): return 'question'\n\n"
        "def of_number(): return Layout(lambda values, prompt, answer: None, 'question', 1)\n\n"
        "def of_one(): return Layout(lambda values: None, 'question', 'answer')\n\n"
        "@GRADERS.register()\ndef grader(response, ground_truth): return 1.0\n"
    )
    code, printed = prepare(recipe)
    assert code == 2
    assert all(word in printed for word in words), printed


def test_a_package_adds_a_recipe(prepare, tmp_path, monkeypatch):
    entry_point = "[rlctl.data_recipes]\nquiz = quiz_recipes:quiz\ngsm8k = quiz_recipes:quiz\n"
    install_package(tmp_path, "quiz-recipes", EXAMPLE.read_text(), entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    code, printed = prepare("quiz", "--val-size", "0", rows=ROWS)
    assert code == 0, printed
    assert "recipe quiz" in printed
    assert layout_named("gsm8k").prompt_key == "question", "the name is taken"
    wrong = [*ROWS, ROWS[0] | {"right": 3}]
    assert "rows.jsonl:21: right is 3, of 2 choices" in prepare("quiz", "--overwrite", rows=wrong)[1]


def test_an_evaluation_reads_with_it(tmp_path):
    source = write_jsonl(tmp_path / "quiz.jsonl", ROWS[:2])
    found = load_questions([str(source)], Recipe(QUIZ))
    assert [row.ground_truth for row in found.rows] == ["B", "B"]
