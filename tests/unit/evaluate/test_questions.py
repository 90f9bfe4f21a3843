"""`--data`: benchmarks from a local mirror in their own columns, and files as `prepare-data` reads them."""

import csv
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.evaluate.questions import load_questions
from rlctl.prepare.benchmarks import BENCHMARKS, all_benchmarks, find_benchmark
from rlctl.prepare.recipes import Recipe
from rlctl.registry import GRADERS
from rlctl.reward.build import grader_for
from rlctl.tiny.embedded import write_parquet
from tests.packages import install_package

#: One row of each benchmark in the data set's own columns, the ground truth, and a response that is right.
ROWS = {
    "gsm8k": (
        {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"},
        "1005",
        "So it is\n#### 1005",
    ),
    "math500": (
        {
            "problem": "Half of 3?",
            "solution": r"It is \boxed{\frac{3}{2}}.",
            "answer": r"\frac{3}{2}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        r"\frac{3}{2}",
        r"\boxed{\frac32}",
    ),
    "aime24": (
        {
            "id": 60,
            "problem": "How many?",
            "solution": "There are 33, then 34.",
            "answer": "033",
            "url": "https://example.org",
            "year": "2024",
        },
        "033",
        r"\boxed{33}",
    ),
    "aime25": ({"problem": "How many?", "answer": "70", "id": "0"}, "70", r"\boxed{70}"),
    "amc23": (
        {"id": 0, "question": "How far?", "answer": "27.0", "url": "https://example.org"},
        "27.0",
        r"\boxed{27}",
    ),
    "mmlu": (
        {"question": "Which?", "subject": "anatomy", "choices": ["p", "q", "r", "s"], "answer": 2},
        "C",
        "Answer: C",
    ),
    "mmlu-pro": (
        {
            "question_id": 70,
            "question": "Which?",
            "options": ["p", "q", "r", "s", "t", "u", "v"],
            "answer": "F",
            "answer_index": 5,
            "cot_content": "",
            "category": "business",
            "src": "x",
        },
        "F",
        "Answer: F",
    ),
    "arc-challenge": (
        {
            "id": "Mercury_1",
            "question": "Which?",
            "choices": {"text": ["p", "q", "r", "s"], "label": ["1", "2", "3", "4"]},
            "answerKey": "2",
        },
        "B",
        "Answer: B",
    ),
}


def write_mirror(directory, name, count=None, suffix=""):
    """A benchmark's file with `count` rows; `suffix`: `NAME.suffix` instead of the pinned path."""
    benchmark = BENCHMARKS[name]
    path = directory / (f"{name}.{suffix}" if suffix else f"{benchmark.dataset}/{benchmark.file}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [ROWS[name][0]] * (benchmark.num_questions if count is None else count)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_benchmark_has_a_row_here_and_its_name():
    assert ROWS.keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_is_read_from_a_mirror_in_its_own_columns(name, tmp_path):
    path = write_mirror(tmp_path, name)
    benchmark, (_, truth, right) = BENCHMARKS[name], ROWS[name]
    found = load_questions([name], benchmarks_dir=tmp_path)
    assert len(found.rows) == benchmark.num_questions
    row = found.rows[-1]
    assert row.ground_truth == truth
    assert row.prompt[-1].content.endswith("\n" + benchmark.instruction)
    assert row.data_source == benchmark.dataset
    assert grader_for(row.data_source) == benchmark.grader  # what `auto` takes is what the table pins
    assert GRADERS[benchmark.grader](right, truth) == 1.0
    assert found.files == [str(path)]
    [told] = found.benchmarks
    assert (told["revision"], told["num_questions"]) == (benchmark.revision, benchmark.num_questions)
    assert len(told["sha256"]) == 64
    if benchmark.sha256:
        assert told["sha256"] != benchmark.sha256
        assert "not byte for byte" in found.notes[0]


def test_a_package_adds_a_benchmark(tmp_path, monkeypatch):
    code = (
        "from rlctl.prepare.benchmarks import Benchmark\n\n\n"
        "def trivia():\n"
        "    names = ('question', 'answer')\n"
        "    return Benchmark('trivia', 'us/trivia', '0' * 40, 'test.jsonl', 2, names, 'Be brief.')\n"
    )
    install_package(tmp_path, "our-trivia", code, "[rlctl.benchmarks]\ntrivia = our_trivia:trivia\n")
    monkeypatch.syspath_prepend(tmp_path)
    place = tmp_path / "us/trivia/test.jsonl"
    place.parent.mkdir(parents=True)
    place.write_text('{"question": "2 + 2?", "answer": "4"}\n' * 2)
    for name in ("trivia", f"{tmp_path}/our_trivia.py:trivia"):
        found = load_questions([name], benchmarks_dir=tmp_path)
        assert [row.ground_truth for row in found.rows] == ["4", "4"]
        assert found.rows[0].prompt[-1].content == "2 + 2?\nBe brief."
        assert found.benchmarks[0]["name"] == "trivia"
    assert "trivia" in all_benchmarks()
    with pytest.raises(UsageError) as refused:
        load_questions(["trivias"], benchmarks_dir=tmp_path)
    assert "did you mean `trivia`" in refused.value.fix


def test_a_file_of_the_benchmarks_name_is_found_too(tmp_path, monkeypatch):
    write_mirror(tmp_path, "aime25", suffix="csv")
    monkeypatch.setenv("RLCTL_BENCHMARKS", str(tmp_path))
    assert load_questions(["aime25"]).rows[0].ground_truth == "70"


def test_the_pinned_file_itself_needs_no_note(tmp_path, monkeypatch):
    import hashlib

    path = write_mirror(tmp_path, "aime25")
    pinned = replace(BENCHMARKS["aime25"], sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setitem(BENCHMARKS, "aime25", pinned)
    assert load_questions(["aime25"], benchmarks_dir=tmp_path).notes == []


def test_a_file_with_other_rows_or_columns_is_refused(tmp_path):
    path = write_mirror(tmp_path, "aime25", count=29)
    with pytest.raises(UsageError, match="has 30 questions, this file has 29"):
        load_questions(["aime25"], benchmarks_dir=tmp_path)
    path.write_text('{"Problem": "1?", "Answer": "1"}\n')
    with pytest.raises(UsageError, match="no column problem, answer"):
        load_questions(["aime25"], benchmarks_dir=tmp_path)


def test_what_is_missing_is_named_with_what_to_download_and_where_to_put_it(tmp_path, monkeypatch):
    with pytest.raises(EnvironmentFailure) as told:
        load_questions(["gsm8k"], benchmarks_dir=tmp_path)
    assert told.value.where == str(tmp_path / "openai/gsm8k/main/test-00000-of-00001.parquet")
    benchmark = BENCHMARKS["gsm8k"]
    for words in (benchmark.dataset, benchmark.file, benchmark.revision, f"{tmp_path}/openai/gsm8k"):
        assert words in told.value.fix
    monkeypatch.delenv("RLCTL_BENCHMARKS", raising=False)

    def offline(*_, **options):
        assert options["revision"] == benchmark.revision
        raise OSError("offline mode is enabled")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(EnvironmentFailure, match="offline mode is enabled") as told:
        find_benchmark(benchmark)
    assert "--benchmarks-dir DIR" in told.value.fix


def test_json_lines_and_csv_are_read_by_the_recipes_of_prepare_data(tmp_path):
    lines = tmp_path / "sums.jsonl"
    asked = {"1+1?": "two\n#### 2", "2+2?": "#### 4"}
    lines.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in asked.items()))
    table = tmp_path / "capitals.csv"
    table.write_text("prompt,answer\nCapital of France?,Paris\n")
    found = load_questions([str(lines), str(table)])
    assert [row.ground_truth for row in found.rows] == ["2", "4", "Paris"]
    assert [row.data_source for row in found.rows] == ["openai/gsm8k", "openai/gsm8k", "capitals"]
    assert "####" in found.rows[0].prompt[-1].content.splitlines()[-1]
    assert found.rows[1].where == f"{lines}:2"
    assert found.files == [str(lines), str(table)]


def test_columns_may_be_named(tmp_path):
    table = tmp_path / "sums.csv"
    table.write_text("q,a\n1+1?,2\n")
    columns = Recipe(prompt_key="q", answer_key="a", data_source="my/math", instruction="Be brief.")
    [row] = load_questions([str(table)], columns).rows
    assert (row.prompt[0].content, row.ground_truth, row.data_source) == ("1+1?\nBe brief.", "2", "my/math")


def test_prepared_parquet_is_read_as_it_is_and_other_parquet_by_recipe(tmp_path):
    write_parquet([("12+34=", "640")], "test", tmp_path / "prepared.parquet")
    pq.write_table(pa.Table.from_pylist([ROWS["gsm8k"][0]]), tmp_path / "raw.parquet")
    found = load_questions([str(tmp_path / "prepared.parquet"), str(tmp_path / "raw.parquet")])
    assert [row.prompt[0].content.splitlines()[0] for row in found.rows] == ["12+34=", "2 + 3?"]


def test_bad_rows_are_named(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"}\nnot json\n')
    with pytest.raises(UsageError, match=r"2 of 3 rows cannot be used(?s:.*)sums.jsonl:2(?s:.*)sums.jsonl:3"):
        load_questions([str(path)])
