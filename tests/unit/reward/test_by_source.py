"""`reward.by_source` names the grader of a data source; rows without an answer are graded only by it."""

import pytest
import torch

from rlctl.reward.build import SourceScorer, named_grader
from rlctl.reward.protocol import Failure, Sample
from rlctl.run_spec.rollout import RewardSpec


def grades(by_source, *samples):
    scorer = SourceScorer(RewardSpec(by_source=by_source), torch.device("cpu"))
    try:
        return [
            grade.kind if isinstance(grade, Failure) else grade for grade, _ in scorer.grade_and_read(samples)
        ]
    finally:
        scorer.close()


def test_the_named_grader_comes_before_the_sources_own():
    letters = Sample(r"\boxed{B}", "B", data_source="embedded/addition")  # usually `exact`
    other = Sample("7", "7", data_source="embedded/addition2")
    assert grades({}, letters) == [0.0]
    assert grades({"embedded/addition": "multiple_choice"}, letters, other) == [1.0, 1.0]


def test_a_row_without_an_answer_is_graded_only_by_name(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def long(response): return len(response)\n")
    rows = [Sample("12345", "", data_source=source) for source in ("a", "b")]
    assert grades({}, *rows) == ["inapplicable", "inapplicable"]
    assert grades({"b.csv": f"{file}:long"}, *rows) == ["inapplicable", 5.0]


@pytest.mark.parametrize(
    ("source", "grader"),
    [("a", "maths"), ("b", "exact"), ("org/c", "code"), ("d", None), ("c", "code"), ("train", "countdown")],
)
def test_sources_by_their_names_and_files(source, grader):
    named = {"a": "maths", "data/b.csv": "exact", "org/c": "code", "sums/train.parquet": "countdown"}
    assert named_grader(named, source) == grader
