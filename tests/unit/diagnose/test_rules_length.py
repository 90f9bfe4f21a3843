"""Lengths that collapse, grow without a gain, or are nearly zero."""

import numpy as np
import pytest

from rlctl.diagnose.thresholds import LENGTH, SCORE
from tests.unit.diagnose.test_rules_judged import advice, diagnosis_of, found, noisy

RIGHT, FORMAT = "reward/answer/mean", "reward/format/mean"


def falling(count, start=200.0, end=2.2, rows=1):
    return noisy([start] * rows + [end] * (count - rows), 0.1)


@pytest.mark.parametrize(("count", "rows"), [(49, 1), (49, 2), (12, 1), (60, 25)])
def test_a_collapse_comes_first_and_names_what_paid(count, rows):
    diagnosis = diagnosis_of(**{
        LENGTH: falling(count, rows=rows),
        SCORE: noisy([1.7] * rows + [2.4] * (count - rows), 0.05),
        RIGHT: noisy([0.5] * rows + [0.9] * (count - rows), 0.01),
        FORMAT: [0.15] * rows + [0.0] * (count - rows),
        "reward/zero_spread_groups": [0.3] * rows + [1.0] * (count - rows),
        "actor/grad_norm": [40.0] * rows + [0.0] * (count - rows),
    })  # fmt: skip
    first = diagnosis.findings[0]
    assert (first.rule, first.severity) == ("length-collapse", "critical")
    assert "lose format" in first.what
    assert "answer pays for it" in first.what
    assert "filter" not in advice(first)
    assert all(
        one.because_of == "length-collapse" for one in diagnosis.findings[1:] if one.severity != "info"
    )


def test_nearly_empty_responses_are_critical():
    diagnosis = diagnosis_of(**{LENGTH: noisy([1.4] * 20, 0.02), SCORE: noisy([0.1] * 20)})
    assert found(diagnosis)["length-collapse"].severity == "critical"


@pytest.mark.parametrize(
    "lengths",
    [
        noisy(np.linspace(300, 120, 60)),  # learns to be brief
        noisy([200.0] * 60, 0.5),
        [900.0, *noisy([200.0] * 40)],  # one long row
        noisy([3.0] * 40, 0.1),  # a task of short answers
        [200.0] * 59 + [2.0],  # the newest row alone
    ],
)
def test_lengths_that_do_not_collapse_are_quiet(lengths):
    columns = {LENGTH: lengths, SCORE: noisy(np.linspace(0.2, 0.8, len(lengths)), 0.02)}
    assert not {"length-collapse", "length-growth"} & found(diagnosis_of(**columns)).keys()


def test_short_answers_that_the_policy_has_learned_are_no_fault():
    columns = {LENGTH: [1.5] * 20, SCORE: [0.97] * 20, "critic/score/max": [1.0] * 20}
    assert "length-collapse" not in found(diagnosis_of(**columns, **{"critic/score/min": [0.0] * 20}))


@pytest.mark.parametrize(("end", "is_warned"), [(0.3, True), (0.8, False)])
def test_a_growth_warns_unless_the_reward_gains(end, is_warned):
    columns = {LENGTH: noisy(np.linspace(200, 900, 60), 0.05), SCORE: noisy(np.linspace(0.3, end, 60), 0.03)}
    assert ("length-growth" in found(diagnosis_of(**columns))) is is_warned
