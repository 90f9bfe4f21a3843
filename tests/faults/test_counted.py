"""The page's table of faults has the number of cases that the tests try."""

from __future__ import annotations

import re

from tests.faults.counted import PAGE, counted, in_page


def test_every_row_has_as_many_cases_as_the_page_says() -> None:
    numbers, said = counted(), dict(in_page())
    assert len(numbers) == len(said)
    for row, number in numbers.items():
        [of_page] = [other for fault, other in said.items() if fault.startswith(row)]
        assert of_page == number, row


def test_the_sum_is_that_of_the_rows() -> None:
    [total] = re.findall(r"(\d+) cases of tests", PAGE.read_text(encoding="utf-8"))
    assert int(total) == sum(counted().values()) >= 120
