"""`rlctl reward`: every kind of mistake shows, with its place, before training."""

import json

import pytest

from rlctl.cli.app import run
from rlctl.data.schema import Message, Row, write_rows

MINE = """
def equal(response, ground_truth, extra_info):
    if extra_info["n"] == 2:
        raise KeyError("no such thing")
    return float(response == ground_truth)

def generous(response): return 1.0
"""


@pytest.fixture
def data(tmp_path):
    def write(*rows):
        write_rows(tmp_path / "data.parquet", "train", rows)
        return str(tmp_path / "data.parquet")

    return write


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def row(number, truth, source="openai/gsm8k"):
    return Row(source, (Message("user", f"question {number}"),), truth, index=number, extra={"n": number})


def document(capsys, *arguments):
    assert run(["reward", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def tally(document, kind, source="openai/gsm8k"):
    (found,) = [t for t in document["counts"] if (t["kind"], t["data_source"]) == (kind, source)]
    return found["num"], found["num_compared"], found["num_agreeing"], found["num_errors"]


def test_sources_are_tried_by_their_own_graders(data, capsys):
    path = data(
        row(0, "72"),
        row(1, "€"),
        row(2, "B", "cais/mmlu"),
        row(3, "assert f(1) == 2", "codecontests"),
        row(4, '{"numbers": [1, 2], "target": 3}', "countdown"),
    )
    found = document(capsys, "auto", "--data", path)
    assert tally(found, "ground truth") == (2, 1, 1, 1)
    assert tally(found, "empty answer") == (2, 1, 1, 1)
    assert tally(found, "number changed") == (1, 1, 1, 0)
    assert tally(found, "ground truth", "cais/mmlu") == (1, 1, 1, 0)
    assert tally(found, "empty answer", "codecontests") == (1, 1, 1, 0)
    assert tally(found, "empty answer", "countdown") == (1, 1, 1, 0)
    assert {t["data_source"] for t in found["counts"] if t["kind"] == "ground truth"} == {
        "openai/gsm8k",
        "cais/mmlu",
    }
    assert "'€' is not a mathematical expression" in found["errors"][0]
    times = found["seconds_per_call"]
    assert 0 < times["p50"] <= times["p99"] <= times["max"]
    assert times["num"] == 9


def test_a_function_gets_extra_info_and_its_errors_show(data, mine, capsys):
    path = data(row(0, "72"), row(2, "3"))
    arguments = ["reward", f"{mine}:equal", "--data", path]
    assert run([*arguments, "--fail-on", "disagreement"]) == 3
    assert run([*arguments, "--fail-on", "error"]) == 3
    assert run([*arguments, "--limit", "1", "--fail-on", "error"]) == 0
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "KeyError: 'no such thing'" in shown
    assert "data.parquet:2" in shown
    assert "ms per call: mean" in shown


def test_an_example_of_each_kind_is_shown(data, capsys):
    path = data(row(0, "72"), row(1, "5"))
    found = document(capsys, "maths", "--data", path)
    kinds = ["ground truth", "number changed", "empty answer"]
    assert [(one["kind"], one["expected"], one["got"]) for one in found["examples"]] == [
        (kind, float(kind == kinds[0]), float(kind == kinds[0])) for kind in kinds
    ]
    assert run(["reward", "maths", "--data", path, "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", as expected  maths, ") == 3
    assert "response ends '\\\\boxed{72}'" in shown


def test_a_reward_for_nothing_disagrees(data, mine, capsys):
    path = data(row(0, "72"))
    assert run(["reward", f"{mine}:generous", "--data", path, "--fail-on", "error"]) == 0
    assert run(["reward", f"{mine}:generous", "--data", path, "--fail-on", "disagreement"]) == 3
    assert "expected 0, got 1" in capsys.readouterr().out


def test_a_response_that_a_function_does_not_grade_is_no_error(data, tmp_path, capsys):
    (tmp_path / "trl.py").write_text("def some(completions, **kwargs): return [None for _ in completions]\n")
    found = document(capsys, f"{tmp_path}/trl.py:some", "--data", data(row(0, "72")))
    assert found["num_errors"] == 0
    assert found["counts"] == []


def test_terms_are_tried_one_by_one(data, mine, tmp_path, capsys):
    spec = tmp_path / "run.yaml"
    terms = f"[{{name: exact, weight: 2.0}}, {{name: '{mine}:equal', weight: 0.5}}]"
    spec.write_text(f"reward:\n  terms: {terms}\n")
    found = document(capsys, str(spec), "--data", data(row(0, "72")))
    by_term = {(t["term"], t["kind"]): (t["num_compared"], t["num_agreeing"]) for t in found["counts"]}
    assert by_term["exact", "ground truth"] == by_term["equal", "ground truth"] == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nothing", "--data", "DATA"], "neither a spec nor a grader"),
        (["model", "--data", "DATA"], "the reward model has no path"),
        (["maths", "--data", "gone.parquet"], "no such file"),
        (["gone.py:f", "--data", "DATA"], "no such file"),
        (["maths", "--data", "BROKEN"], "cannot be read as Parquet"),
    ],
)
def test_mistakes_are_named_without_a_traceback(data, tmp_path, capsys, arguments, what):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no footer")
    places = {"DATA": data(row(0, "72")), "BROKEN": str(tmp_path / "broken.parquet")}
    assert run(["reward", *(places.get(argument, argument) for argument in arguments)]) == 2
    shown = capsys.readouterr().err
    assert what in shown
    assert "Traceback" not in shown


def test_a_preset_of_a_model_names_no_training_data(data, capsys):
    rows = data(Row("own", (Message("user", "1+1="),), "2"))
    assert run(["reward", "qwen3-0.6b", "--data", rows, "--fail-on", "disagreement"]) == 0
    assert "ms per call" in capsys.readouterr().out
