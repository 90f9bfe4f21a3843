"""The examples on the page of grading conventions score as its tables say."""

import re
from pathlib import Path

import pytest

from rlctl.reward import maths
from rlctl.reward.thoughts import without_thoughts

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "grading.md"


def rows():
    """Cells of each row, by the header of its table."""
    header = None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<![<a-z])\|(?!>|[a-z])", line)[1:-1]]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif not set(line) <= set("|-: "):
            yield header, cells


def spans(cell):
    return re.findall("`([^`]+)`", cell)


def examples():
    for header, cells in rows():
        values = dict(zip(header, cells, strict=True))
        if "response" in values:
            [response] = spans(values["response"])
            prompt = "".join(spans(values["prompt ends with"]))
            yield without_thoughts(response, f"<|assistant|>\n{prompt}\n"), "12", float(values["`12` scores"])
            continue
        [truth] = spans(values["ground truth"])
        for score in (1, 0):
            for response in spans(values[f"scores {score}"]):
                yield response, truth, float(score)


EXAMPLES = list(examples())


def test_all_tables_are_read():
    assert len(EXAMPLES) > 150
    assert {score for _, _, score in EXAMPLES} == {0.0, 1.0}


@pytest.mark.parametrize(("response", "truth", "score"), EXAMPLES)
def test_an_example_scores_as_the_page_says(response, truth, score):
    assert maths.grade(response, truth) == score
