"""`check`: files that are fine say nothing, and each fault is found with its place, all at once."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.data.read import load_rows
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.check import CheckRequest, check
from rlctl.prepare.findings import reaches
from rlctl.prepare.lengths import LengthQuantiles
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare import small_models
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl


def verl_rows(count=6, split="train", source="openai/gsm8k"):
    """As verl's own script for GSM8K writes them."""
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"How much is {i} plus {split} {i}? {instruction}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {
                "split": split,
                "index": i,
                "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}",
                "question": f"How much is {i} plus {split} {i}?",
            },
        }
        for i in range(count)
    ]


def write(path, rows, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def codes(*files, **options):
    return [finding.code for finding in check(CheckRequest(tuple(map(str, files)), **options)).findings]


def the(code, *files, **options):
    found = check(CheckRequest(tuple(map(str, files)), **options)).findings
    [finding] = [finding for finding in found if finding.code == code]
    return finding


def test_verls_own_files_pass_clean(tmp_path):
    train = write(tmp_path / "train.parquet", verl_rows())
    test = write(tmp_path / "test.parquet", verl_rows(split="test"))
    report = check(CheckRequest((train, test)))
    assert report.findings == []
    first = report.files[0]
    assert (first.recipe, first.rows, first.data_sources) == ("verl", 6, {"openai/gsm8k": 6})
    assert first.columns["prompt"].startswith("list<")
    assert report.lengths.total == 12


def test_what_prepare_writes_passes_clean(tmp_path):
    from rlctl.prepare.pipeline import prepare
    from rlctl.prepare.request import PrepareRequest

    source = write_jsonl(tmp_path / "gsm8k.jsonl", gsm8k_rows(copies=3))
    prepare(PrepareRequest((str(source),), tmp_path / "out", val_size=4))
    assert codes(tmp_path / "out/train.parquet", tmp_path / "out/test.parquet") == []
    assert codes(source) == []


def test_bad_rows_are_grouped_by_complaint(tmp_path):
    rows = verl_rows(8)
    rows[1]["prompt"] = None
    rows[3]["prompt"] = []
    rows[4]["prompt"] = rows[5]["prompt"] = [{"role": "assistant", "content": "x"}]
    rows[6]["prompt"][0]["content"] = "  "
    path = write(tmp_path / "a.parquet", rows)
    found = check(CheckRequest((path,))).findings
    assert {finding.code for finding in found} == {"bad-rows"}
    assert sorted((finding.count, finding.examples[0].partition(": ")[0]) for finding in found) == [
        (1, f"{path}:2"),
        (1, f"{path}:4"),
        (1, f"{path}:7"),
        (2, f"{path}:5"),
    ]
    assert reaches(found, "error")


def test_what_the_recipe_reads_training_reads_too(tmp_path):
    rows = verl_rows(3)
    for row in rows:
        row["reward_model"]["ground_truth"] = [row["reward_model"]["ground_truth"]]
    path = write(tmp_path / "a.parquet", rows)
    assert codes(path) == codes(write_jsonl(tmp_path / "a.jsonl", rows)) == []
    assert [row.ground_truth for row in load_rows([path])] == [
        row["reward_model"]["ground_truth"][0] for row in rows
    ]
    for place, row in enumerate(rows):
        row |= {"data_source": "countdown", "prompt": "Put the equation in <answer> </answer>."}
        row["reward_model"]["ground_truth"] = {"numbers": [1, 2, place], "target": 3 + place}
    path = write(tmp_path / "countdown.parquet", rows)  # as verl writes them; training reads them as JSON
    assert len(load_rows([path])) == len(rows)


def test_mixed_types_and_broken_lines_in_raw_input(tmp_path):
    path = tmp_path / "raw.jsonl"
    lines = [json.dumps({"prompt": "a", "answer": 1}), "{oops", json.dumps({"prompt": 3, "answer": 1}), "[]"]
    path.write_text("\n".join(lines) + "\n")
    report = check(CheckRequest((str(path),)))
    bad = [finding for finding in report.findings if finding.code == "bad-rows"]
    assert sorted(finding.examples[0].split(":")[1] for finding in bad) == ["2", "3", "4"]
    assert report.files[0].rows == 4
    assert report.files[0].columns == {"prompt": "str", "answer": "int"}


def test_missing_columns(tmp_path):
    rows = [{**row, "difficulty": 3} for row in verl_rows()]
    for row in rows:
        del row["reward_model"]
    path = write(tmp_path / "a.parquet", rows)
    assert set(codes(path)) == {"missing-columns"}
    assert "reward_model" in the("missing-columns", path).what


def test_duplicates_and_conflicting_answers(tmp_path):
    rows = verl_rows(6)
    rows[4] = rows[1]
    rows[5] = {**rows[1], "reward_model": {"style": "rule", "ground_truth": "77"}}
    path = write(tmp_path / "a.parquet", rows)
    finding = the("duplicates", path)
    assert (finding.count, finding.examples) == (1, (f"{path}:5: as row 2",))
    assert the("conflicting-answers", path).examples == (f"{path}:6: as row 2",)


def test_questions_shared_between_splits(tmp_path):
    train = write(tmp_path / "train.parquet", verl_rows())
    rows = verl_rows(3, split="test")
    rows[2]["extra_info"]["question"] = verl_rows()[5]["extra_info"]["question"]
    finding = the("shared-questions", train, write(tmp_path / "test.parquet", rows))
    assert (finding.severity, finding.count) == ("error", 1)
    assert finding.examples == (f"{tmp_path / 'test.parquet'}:3",)


def test_leaks_from_a_benchmark_of_another_format(tmp_path):
    train = write(tmp_path / "train.parquet", verl_rows())
    benchmark = write_jsonl(
        tmp_path / "bench.jsonl", [{"question": "how much is 3 plus TRAIN 3", "answer": "#### 6"}]
    )
    finding = the("leak-exact", train, against=(str(benchmark),))
    assert (finding.severity, finding.examples) == ("error", (f"{train}:4",))
    assert "bench.jsonl" in finding.what


def test_sources_without_a_grader_and_truths_no_grader_reads(tmp_path):
    rows = verl_rows(3) + verl_rows(2, source="my/riddles")
    rows[1]["reward_model"]["ground_truth"] = "no number at all, sorry"
    path = write(tmp_path / "a.parquet", rows)
    assert "'my/riddles'" in the("no-grader", path).what
    finding = the("ground-truth", path)
    assert finding.count == 1
    assert finding.examples[0].startswith(f"{path}:2: 'no number")


@pytest.mark.parametrize(
    ("style", "is_graded"), [("rule", True), ("rule-lighteval/MATH_v2", True), ("model", False)]
)
def test_ground_truths_of_every_style_that_a_rule_grades_are_checked(tmp_path, style, is_graded):
    rows = verl_rows(30, source="math_dapo")  # with a style as in DAPO-Math-17k
    for row in rows:
        row["reward_model"]["style"] = style
    rows[1]["reward_model"]["ground_truth"] = "=="
    path = write(tmp_path / "train.parquet", rows)
    assert ("ground-truth" in codes(path)) == is_graded
    request = PrepareRequest((path,), tmp_path / "out", bad_rows="quarantine")
    assert prepare(request).counts["quarantined"] == is_graded


def test_characters(tmp_path):
    rows = verl_rows(6)
    rows[3]["prompt"][0]["content"] += "\x00"
    rows[4]["reward_model"]["ground_truth"] = "8\ufffd"
    path = write(tmp_path / "a.parquet", rows)
    found = set(codes(path))
    expected = {"control-characters", "lost-characters"}
    assert expected <= found <= expected | {"ground-truth"}
    assert the("control-characters", path).examples == (f"{path}:4: U+0000",)


def test_lengths_template_and_context(tmp_path):
    model = small_models.save_model(tmp_path / "model", small_models.NO_GENERATION_PROMPT, context=60)
    rows = verl_rows(5)
    rows[3]["prompt"][0]["content"] = "word " * 30
    rows[4]["prompt"][0]["content"] = "word " * 10
    path = write(tmp_path / "a.parquet", rows)
    report = check(CheckRequest((path,), model=model, max_prompt_length=40))
    assert {finding.code for finding in report.findings} == {
        "no-answer-form",
        "no-generation-prompt",
        "overlong",
        "beyond-context",
    }
    assert the("beyond-context", path, model=model).examples == (f"{path}:4: 64 tokens",)
    assert report.lengths.unit == "tokens"
    assert report.lengths.summary()["max"] == 64
    assert report.model["context"] == 60
    assert json.loads(json.dumps(report.to_json()))["lengths"]["max"] == 64


def test_rows_the_template_refuses_are_bad_rows(tmp_path):
    model = small_models.save_model(tmp_path / "model", small_models.NO_SYSTEM)
    rows = verl_rows(3)
    rows[1]["prompt"].insert(0, {"role": "system", "content": "Be kind."})
    path = write(tmp_path / "a.parquet", rows)
    assert the("bad-rows", path, model=model).examples[0].startswith(f"{path}:2: the model's chat template")


@pytest.mark.parametrize("content", [b"", b"PAR1garbagePAR1"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read"):
        check(CheckRequest((str(tmp_path / "a.parquet"),)))


def test_one_row_has_and_two_rows_have():
    assert [
        findings.agree(1, verb) for verb in ("ask", "share 13 words", "have x", "were cut", "cannot be")
    ] == [
        "asks",
        "shares 13 words",
        "has x",
        "was cut",
        "cannot be",
    ]
    assert findings.agree(2, "have x") == "have x"
    assert findings.row_finding("beyond-context", 1, context=64)[0].what.startswith("1 row has prompts")
    assert (
        findings.row_finding("leak-ngram", 1, file="f")[0].what
        == "1 row shares 13 words in a row with a question of f"
    )


def test_histogram_against_sorted_lengths():
    lengths = [3, 9, 9, 10, 14, 50, 51, 51, 90, 200]
    measured = LengthQuantiles("tokens")
    measured.add(lengths[:4])
    measured.add(lengths[4:])
    assert measured.summary() == {"min": 3, "p50": 14, "p90": 90, "p99": 200, "max": 200}
    assert set(LengthQuantiles("tokens").summary().values()) == {0}


def test_a_limit_that_no_prompt_exceeds_is_no_finding(tmp_path):
    path = write(tmp_path / "a.parquet", verl_rows(3))
    found = check(CheckRequest((path,), max_prompt_length=10_000)).findings
    assert not reaches(found, "warning"), found
    assert "overlong" not in [finding.code for finding in found]
