"""Rows that must not be trained on, through the whole pipeline."""

import json
from dataclasses import replace
from itertools import product

import pytest

from rlctl.data.read import load_rows
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import write_jsonl

LONG = "a farmer has a very long field and walks along all of its sides with his old dog every single day"
COST = "What do %d apples cost at the market on Monday if one costs %d francs and nobody haggles at all?"
BENCHMARK = [f"Where {LONG}, and how far is 12 km?", COST % (7, 3), "Wo ist der Hund?"]
TRAIN = [
    f"where {LONG} and how far is 12 km",
    COST % (9, 5),
    f"Then {LONG}. How old is the dog?",
    *(f"An honest question number {i}" for i in range(20)),
]
EXPECTED = {"exact": 1, "masked": 1, "ngram": 1}


@pytest.fixture
def request_(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"question": text, "answer": "#### 1"} for text in TRAIN])
    benchmark = [{"prompt": text, "answer": "1"} for text in BENCHMARK]
    write_jsonl(tmp_path / "bench.jsonl", benchmark)
    return PrepareRequest(
        (str(source),),
        tmp_path / "out",
        val_fraction=0,
        against=(str(tmp_path / "bench.jsonl"),),
        check_graders=False,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_reported_by_file_and_kind(request_, workers):
    summary = prepare(replace(request_, workers=workers))
    assert summary.counts["train"] == 23
    assert summary.report["leakage"] == {"rows": 3, "by_file": {request_.against[0]: EXPECTED}}
    codes = [finding["code"] for finding in summary.report["findings"]]
    assert codes[0] == "leak-exact"
    assert {"leak-masked", "leak-ngram"} <= set(codes)


def test_dropped(request_):
    summary = prepare(replace(request_, leakage="drop"))
    assert summary.counts["leaked_dropped"] == 3
    assert [row.index for row in load_rows([str(request_.out / "train.parquet")])] == list(range(3, 23))


def test_refused(request_):
    with pytest.raises(UsageError, match="3 rows of the training data occur") as caught:
        prepare(replace(request_, leakage="refuse"))
    assert f"{request_.sources[0]}:1" in str(caught.value)
    assert "--leakage drop" in caught.value.fix
    assert not request_.out.exists()


def test_not_looked_for(request_):
    assert "leakage" not in prepare(replace(request_, leakage="off")).report


def test_the_test_split_is_guarded_too(tmp_path):
    rows = [{"question": f"{LONG} ({word})", "answer": "#### 1"} for word in "abcdefghijklmnopqrst"]
    others = [{"question": f"An honest question number {i}", "answer": "#### 1"} for i in range(25)]
    source = write_jsonl(tmp_path / "in.jsonl", rows + others)
    options = {"val_size": 4, "check_graders": False}
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", **options))
    held_out = load_rows([str(tmp_path / "out" / "test.parquet")])
    num_left = 20 - sum(row.prompt_text.startswith(LONG) for row in held_out)
    assert num_left < 20
    assert summary.report["leakage"] == {
        "rows": num_left,
        "by_file": {"the test split": {"ngram": num_left}},
    }


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("policy", ["report", "drop"])
def test_the_test_split_is_compared_with_each_benchmark(tmp_path, workers, policy):
    rows = [{"question": f"An honest question number {i}", "answer": "#### 1"} for i in range(30)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    base = PrepareRequest((str(source),), tmp_path / "a", val_size=6, check_graders=False)
    prepare(base)
    inside = load_rows([str(tmp_path / "a" / "test.parquet")])[:2]
    known = write_jsonl(
        tmp_path / "known.jsonl", [{"prompt": row.extra["question"], "answer": "1"} for row in inside]
    )
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "Wo ist der Hund?", "answer": "1"}])
    against = (str(known), str(other))
    summary = prepare(replace(base, out=tmp_path / "b", against=against, workers=workers, leakage=policy))
    none = {"exact": 0, "masked": 0, "ngram": 0}
    assert summary.report["leakage_checks"] == [
        {"rows_of": "train", "against": "the test split", "of": 24, "rows": 0, **none},
        {"rows_of": "train", "against": str(known), "of": 24, "rows": 0, **none},
        {"rows_of": "train", "against": str(other), "of": 24, "rows": 0, **none},
        {"rows_of": "test", "against": str(known), "of": 6, "rows": 2, **none, "exact": 2},
        {"rows_of": "test", "against": str(other), "of": 6, "rows": 0, **none},
    ]
    assert summary.report == json.loads((tmp_path / "b" / "manifest.json").read_text())["report"]
    assert summary.counts["test"] == 6
    assert summary.report["leakage"]["rows"] == summary.counts["leaked_dropped"] == 0
    (finding,) = [one for one in summary.report["findings"] if one["code"].startswith("test-leak")]
    assert (finding["code"], finding["count"]) == ("test-leak-exact", 2)
    assert finding["examples"] == [f"{source}:{row.index + 1}" for row in inside]


def test_a_second_run_in_one_process_compares_with_its_own_files(request_, tmp_path):
    prepare(request_)
    write_jsonl(tmp_path / "bench.jsonl", [{"prompt": "Something else entirely", "answer": "1"}])
    assert prepare(replace(request_, overwrite=True)).report["leakage"]["rows"] == 0


def test_a_benchmark_without_questions_is_refused_by_name(request_, tmp_path):
    bench = tmp_path / "bench.jsonl"
    for number, rows in ((1, [{"stem": "q"}]), (2, [{"prompt": "q", "answer": "1"}, {"prompt": None}])):
        write_jsonl(bench, rows)
        with pytest.raises(UsageError, match="no question can be read from this row: ") as caught:
            prepare(request_)
        assert caught.value.where == f"{bench}:{number}"


@pytest.mark.parametrize("answers", [[{}, {}, {}], [{"answer": "1"}, {"answer": None}, {"answer": ""}]])
def test_questions_without_an_answer_are_compared_too(request_, tmp_path, answers):
    rows = [{"prompt": text} | answer for text, answer in zip(BENCHMARK, answers, strict=True)]
    write_jsonl(tmp_path / "bench.jsonl", rows)
    assert prepare(request_).report["leakage"]["by_file"] == {request_.against[0]: EXPECTED}
    counts = check(CheckRequest(request_.sources, against=request_.against)).leakage[0]
    assert {kind: counts[kind] for kind in EXPECTED} == EXPECTED


def test_what_was_compared_with_is_part_of_the_manifest(request_):
    prepare(request_)
    made_from = json.loads((request_.out / "manifest.json").read_text())["made_from"]
    assert [entry["name"] for entry in made_from["against"]] == ["bench.jsonl"]
    assert prepare(request_).unchanged


def test_a_kind_that_only_test_rows_have_is_no_finding_of_the_training_rows(tmp_path):
    texts = [f"What is {word} in the book of names?" for word in "abcdefghijklmnopqrst"]
    source = write_jsonl(tmp_path / "in.jsonl", [{"question": text, "answer": "1"} for text in texts])
    options = {"val_size": 4, "check_graders": False}
    request = PrepareRequest((str(source),), tmp_path / "out", **options)
    prepare(request)
    left = load_rows([str(request.out / "test.parquet")])
    held_out = [{"prompt": row.prompt[0].content, "answer": "1"} for row in left]
    bench = write_jsonl(tmp_path / "bench.jsonl", held_out)
    summary = prepare(replace(request, out=tmp_path / "again", against=(str(bench),)))
    found = {finding["code"]: finding["count"] for finding in summary.report["findings"]}
    assert found["test-leak-exact"] == 4
    assert "leak-exact" not in found


def test_where_every_training_row_leaks_the_reason_is_said(request_, tmp_path):
    write_jsonl(tmp_path / "bench.jsonl", [{"prompt": text, "answer": "1"} for text in TRAIN])
    with pytest.raises(UsageError, match="no training rows remain: leaked_dropped"):
        prepare(replace(request_, leakage="drop", val_size=3))


@pytest.fixture
def benchmark_file(tmp_path, monkeypatch):
    """The file of aime25 in a directory of benchmarks; its questions."""
    questions = [f"{LONG} Part {i}." for i in range(3)]
    place = tmp_path / "benchmarks"
    place.mkdir()
    write_jsonl(place / "aime25.jsonl", [{"problem": text, "answer": "1"} for text in questions])
    monkeypatch.setenv("RLCTL_BENCHMARKS", str(place))
    return questions


def test_a_benchmark_is_named_instead_of_its_file(tmp_path, benchmark_file):
    honest = [{"problem": f"What is {word}?", "answer": "1"} for word in ("one", "two", "three", "four")]
    rows = [{"problem": benchmark_file[0], "answer": "1"}, *honest]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    options = {"val_size": 0, "check_graders": False, "against": ("aime25",)}
    summary = prepare(PrepareRequest((str(source),), tmp_path / "out", **options))
    assert summary.report["leakage"] == {"rows": 1, "by_file": {"aime25": {"exact": 1}}}
    report = check(CheckRequest((str(source),), against=("aime25",)))
    (found,) = [finding for finding in report.findings if finding.code == "leak-exact"]
    assert found.what == "1 row asks a question of aime25"
    assert [(one["against"], one["exact"]) for one in report.leakage] == [("aime25", 1)]


def test_an_unknown_benchmark_is_refused_with_the_known_ones(request_, benchmark_file):
    for work in (prepare, lambda request: check(CheckRequest(request.sources, against=request.against))):
        with pytest.raises(UsageError, match="no such file or directory") as caught:
            work(replace(request_, against=("aime52",)))
        assert caught.value.where == "--against aime52"
        assert "gsm8k, math500" in caught.value.fix
        with pytest.raises(EnvironmentFailure, match="math500 is not in the directory") as missing:
            work(replace(request_, against=("math500",)))
        assert "hf download HuggingFaceH4/MATH-500" in missing.value.fix


def test_a_question_after_a_system_message_leaks_too(tmp_path):
    system = {"role": "system", "content": "You are careful."}
    rows = [
        {"prompt": [system, {"role": "user", "content": f"How much is {i} + 5?"}], "solution": str(i + 5)}
        for i in range(20)
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    known = [{"question": f"How much is {i} + 5?", "answer": str(i + 5)} for i in range(4)]
    against = (str(write_jsonl(tmp_path / "bench.jsonl", known)),)
    request = PrepareRequest((str(source),), tmp_path / "out", val_fraction=0, against=against)
    assert prepare(request).report["leakage"] == {"rows": 4, "by_file": {against[0]: {"exact": 4}}}
    assert check(CheckRequest((str(source),), against=against)).leakage[0]["exact"] == 4


def test_an_instruction_in_the_prompts_is_no_leak_into_a_small_file(tmp_path):
    """With at most ten questions, the file alone does not show which words are an instruction."""
    order = "\nThink about it step by step, and put the final answer in a box on the very last line of all."
    words = ["".join(letters) for letters in product("abcd", repeat=3)][:60]
    rows = [{"question": f"How old is {word}?{order}", "answer": "#### 1"} for word in words]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    known = [{"question": f"Where {LONG}, and how far is {i} km?{order}", "answer": "1"} for i in range(3)]
    against = (str(write_jsonl(tmp_path / "bench.jsonl", known)),)
    options = {"against": against, "check_graders": False}
    request = PrepareRequest((str(source),), tmp_path / "out", val_size=3, **options)
    assert prepare(request).report["leakage"] == {"rows": 0, "by_file": {}}
    assert check(CheckRequest((str(source),), against=against)).leakage[0]["rows"] == 0
    copied = write_jsonl(tmp_path / "copied.jsonl", [*rows, rows[0] | {"question": f"Again. Where {LONG}"}])
    found = prepare(replace(request, sources=(str(copied),), out=tmp_path / "other")).report["leakage"]
    assert found == {"rows": 1, "by_file": {against[0]: {"ngram": 1}}}
