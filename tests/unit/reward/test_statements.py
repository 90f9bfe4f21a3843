"""Prose counts only if the sentence around its value is a known form, and what follows changes nothing."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rlctl.registry import GRADERS
from rlctl.reward.continuations import is_harmless
from rlctl.reward.statements import is_announcement, is_statement

PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("statements.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_a_pair_has_its_score(kind):
    wrong = [
        pair
        for pair in PAIRS
        if pair["kind"] == kind
        and GRADERS[pair["grader"]](pair["response"], pair["ground_truth"]) != pair["score"]
    ]
    assert not wrong


def test_the_pairs_are_many_and_mixed():
    scores = Counter(pair["score"] for pair in PAIRS)
    assert min(scores[0], scores[1]) > 100
    assert len(PAIRS) > 250


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("She has ", " red marbles left."),
        ("It took Leo ", " minutes to finish the race."),
        ("In total, ", " people attended the party."),
        ("Since 3 * 9 = 27, the answer is ", ", not 28."),
        ("Die Antwort lautet ", "."),
        ("Всего осталось ", " яблок."),
    ],
)
def test_a_statement(before, after):
    assert is_statement(before, "27", after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("She zorbed ", "."),  # an unknown verb without a unit
        ("Page ", "."),
        ("She has ", " marbles zorb."),
        ("Without the discount it is ", "."),
        ("Were there no tax, it would be ", "."),
        ("She has ", " dollars short."),
        ("Fast ", " Euro."),
        ("Почти ", "."),
    ],
)
def test_an_unknown_form_is_no_statement(before, after):
    assert not is_statement(before, "27", after)


def test_announcements_and_later_sentences():
    assert is_announcement("So the final answer to the question is ")
    assert not is_announcement("The textbook's answer is ")
    assert is_harmless(" I hope this helps! Check: 3 * 9 = 27. ✓", "27")
    for later in (" Double it.", " This is absurd.", " No.", " So the total is 28.", " My key has 28."):
        assert not is_harmless(later, "27"), later
