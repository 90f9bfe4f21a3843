"""Ground truths that their grader cannot read are found before anything is trained on them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.reward import maths, trial
from rlctl.reward.build import LocalScorer
from rlctl.reward.protocol import Sample
from rlctl.reward.trial import check_ground_truths, known_responses, try_reward
from tests.packages import install_package

GOOD = [
    ("openai/gsm8k", "72"),
    ("openai/gsm8k", "-1.5"),
    ("openai/gsm8k", "$1,234.00"),
    ("lighteval/MATH", "\\frac{1}{2}"),
    ("lighteval/MATH", "x^2 + 1"),
    ("lighteval/MATH", "[0, 1)"),
    ("lighteval/MATH", "\\text{Tuesday}"),
    ("lighteval/MATH", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("lighteval/MATH", "864 \\mbox{ inches}^2"),
    ("lighteval/MATH", "\\text{June 20}"),
    ("lighteval/MATH", "50\\%"),
    ("embedded/addition", "any text"),
    ("cais/mmlu", "B. the text"),
    ("codecontests", "assert f(1) == 2"),
    ("countdown", '{"numbers": [1, 2], "target": 3}'),
]
BAD = [
    ("openai/gsm8k", "€", "not a mathematical expression"),
    ("cais/mmlu", "zebra", "does not begin with the letter"),
    ("codecontests", "print(1)", "no assert"),
    ("countdown", "24", "the ground truth is not"),
]


def test_each_gets_its_reason_or_none():
    pairs = [*GOOD, *[(source, truth) for source, truth, _ in BAD], *GOOD[:2]]
    reasons = check_ground_truths(pairs)
    assert reasons[: len(GOOD)] == [""] * len(GOOD)
    for (_, _, wanted), reason in zip(BAD, reasons[len(GOOD) :], strict=False):
        assert wanted in reason
        assert "\n" not in reason
    assert reasons[-2:] == ["", ""]
    assert check_ground_truths(pairs) == reasons


PLAIN = st.from_regex(r"-?[0-9]{1,15}(\.[0-9]{1,6})?", fullmatch=True)


@settings(max_examples=150, deadline=None)
@given(PLAIN)
def test_every_plain_number_can_be_graded(number):
    right, wrong = known_responses("maths", number)
    assert maths.grade(right, number) == 1.0
    assert maths.grade(wrong, number) == 0.0
    assert maths.grade("", number) == 0.0


@pytest.mark.parametrize(
    ("grader", "truth", "right", "wrong"),
    [
        ("maths", "72", "\\boxed{72}", "\\boxed{73}"),
        ("maths", "Worked out: 3\n#### 0.5", "\\boxed{0.5}", "\\boxed{1.5}"),
        ("maths", "x_1 = 9", "\\boxed{x_1 = 9}", "\\boxed{x_1 = 10}"),
        ("maths", "x_{12}", "\\boxed{x_{12}}", "\\boxed{x_{13}}"),
        ("maths", "\\text{even}", "\\boxed{\\text{even}}", None),
        ("exact", "007", "007", "008"),
        ("multiple_choice", "B. 26", "B. 26", None),
        ("code", "assert f(1) == 2", None, None),
        ("countdown", '{"numbers": [1, 2], "target": 3}', None, None),
    ],
)
def test_the_right_and_the_wrong_response(grader, truth, right, wrong):
    assert known_responses(grader, truth) == (right, wrong)


def test_responses_made_of_ground_truths_are_no_thoughts() -> None:
    """The prompt opens thoughts, which nothing closes."""
    rows = {"row 1": Sample("", "B", "<|assistant|>\n<think>\n")}
    names = {"multiple_choice": "multiple_choice"}
    trial = try_reward({"multiple_choice": LocalScorer("multiple_choice")}, names, rows, lambda *_: None)
    assert (trial.num_disagreements, sum(counts.num_compared for counts in trial.all_counts)) == (0, 2)


PACKAGE = """
import json
from rlctl.registry import GRADERS

def task(ground_truth):
    if json.loads(ground_truth)["length"] < 1:
        raise ValueError("`length` must be at least 1")
    return None, None

@GRADERS.register(data_sources="lengths", known_responses=task)
def length(response, ground_truth):
    return float(len(response) == json.loads(ground_truth)["length"])

@GRADERS.register(data_sources="overlaps", known_responses=lambda ground_truth: None)
def overlap(response, ground_truth):
    return 0.1 + 0.4 * len(set(response) & set(ground_truth)) / len(set(ground_truth))

@GRADERS.register(data_sources="marked", known_responses=lambda truth: (f"answer: {truth}", f"no {truth}"))
def marked(response, ground_truth):
    return float(response == f"answer: {ground_truth}")

@GRADERS.register(data_sources="careless")
def careless(response, ground_truth):
    return float(response == ground_truth or response.startswith("7"))
"""
SCRIPT = """
import json, sys
from rlctl.cli.app import run
from rlctl.data.schema import Message, Row
from rlctl.data.schema import write_rows
from rlctl.reward.trial import check_ground_truths

if __name__ == "__main__":
    pairs = json.loads(sys.argv[1])
    print(json.dumps(check_ground_truths(pairs)))
    rows = [Row(source, (Message("user", "q"),), truth, index=i) for i, (source, truth) in enumerate(pairs)]
    write_rows(sys.argv[2], "train", rows)
    sys.exit(run(["reward", "test", "auto", "--data", sys.argv[2], "--format", "json"]))
"""


def test_a_packages_grader_says_which_responses_have_known_scores(tmp_path):
    """`prepare-data` and `reward` ask the grader: neither expects its ground truths to score 1."""
    graders = "".join(
        f"{name} = their_graders:{name}\n" for name in ("length", "overlap", "marked", "careless")
    )
    install_package(tmp_path, "their-graders", PACKAGE, f"[rlctl.graders]\n{graders}")
    (tmp_path / "script.py").write_text(SCRIPT)
    pairs = [
        ("lengths", '{"length": 3}'),
        ("lengths", '{"length": 0}'),
        ("overlaps", "36"),
        ("marked", "yes"),
        ("careless", "71"),
    ]
    command = [sys.executable, "script.py", json.dumps(pairs), str(tmp_path / "data.parquet")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    problems, _, report = done.stdout.partition("\n")
    assert json.loads(problems) == [
        "",
        "`length` must be at least 1",
        "",
        "",
        "the grader gives '72' 1, not 0",
    ]
    trial = json.loads(report)
    counts = {
        (one["data_source"], one["kind"]): (one["num"], one["num_compared"], one["num_agreeing"])
        for one in trial["counts"]
    }
    assert counts["lengths", "empty answer"] == (2, 2, 1)  # the empty text has the unreadable length, 0
    assert counts["overlaps", "ground truth"] == counts["overlaps", "empty answer"] == (1, 0, 0)
    assert counts["marked", "ground truth"] == counts["marked", "number changed"] == (1, 1, 1)
    assert counts["careless", "number changed"] == (1, 1, 0)
    assert ("lengths", "ground truth") not in counts
    assert ("overlaps", "number changed") not in counts
    assert {one["data_source"] for one in trial["disagreements"]} == {"lengths", "careless"}


def test_a_grader_that_credits_another_number_is_found(monkeypatch):
    """As if the grader took the last number of everything: each pair is named with what it was given."""
    pairs = [("lighteval/MATH", "[3,4]"), ("lighteval/MATH", "x=4"), ("lighteval/MATH", "(4,x)")]
    pool = SimpleNamespace(grade=lambda samples: [float("4" in sample.response) for sample in samples])
    monkeypatch.setattr(trial, "_pool", lambda grader, pid: pool)
    monkeypatch.setattr(trial, "_known", {})
    reasons = check_ground_truths(pairs)
    assert reasons[0] == "the grader gives '\\\\boxed{[4,4]}' 1, not 0"
    assert reasons[1] == ""
    assert reasons[2] == ""
