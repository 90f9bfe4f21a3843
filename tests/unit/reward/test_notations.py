"""Notations are replaced as if every expression was tried, though most are skipped."""

import random
import re

import pytest

from rlctl.reward import expressions, numbers
from rlctl.reward.numbers import replaced, replacements

#: Pieces of notation, separated by blanks.
TOKENS = re.findall(
    r"\S+",
    r"3 12 1,234 12.5 -5 x R plus Plus times squared cubed factorial and half pi PI {,} (13) _4 _{5} \implies"
    r" => ratio to Ratio $ ^ {3} \circ infinity \text{ } \frac dfrac {1}{2} 1/2 - – \text{cm} \times \div"
    r" \approx \degree degrees C F Celsius \$ \% \left( \quad \, ** * ` ~~ dollars cents dollar :00 ∴ minus"
    r" negative over divided by",
)


@pytest.mark.parametrize("key", ["in_words", "plain"])
def test_a_skipped_expression_would_have_changed_nothing(key):
    draw = random.Random(key)
    by = replacements(key, re.IGNORECASE if key == "in_words" else 0)
    everything = [(pattern, shown, "") for pattern, shown, _ in by]
    assert any(needed for *_, needed in by)
    changed = 0
    for _ in range(4_000):
        text = "".join(draw.choice(TOKENS) + draw.choice(["", " "]) for _ in range(draw.randint(1, 8)))
        assert replaced(text, by) == replaced(text, everything)
        changed += replaced(text, by) != text
    assert changed > 400


def test_the_lists_are_those_that_are_used():
    assert [len(one) for one in (numbers._IN_WORDS, numbers._PLAIN, expressions._NOTATIONS)] == [
        len(replacements(key)) for key in ("in_words", "plain", "of_parser")
    ]
