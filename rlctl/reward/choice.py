"""Multiple choice: the letter of the option a response settles on."""

from __future__ import annotations

import re

from rlctl.reward.answer import own_part

#: `B`, `(B)`, `B. 26`, `b) 26`: an option as a ground truth or a whole line shows it.
_OPTION = re.compile(r"[\s*_({\[]*(?:([A-J])|([a-j])(?=[).]))(?:[\s)\]}.:*_,]+|$)")
#: Possessive throughout: after "answer" and a thousand blanks, trying every split would take for ever.
_LETTER = (
    r"[\s*_\"'({\[$]*+(?:\\(?:text\w*|math\w+)\s*\{)?[\s*_(]*+"
    r"(?:(?!I\s+[a-z])([A-J])(?![\w'])|([a-j])\))"  # "the answer I choose" names none
)
_IS = r"[\s*_\"']*+(?:(?i:is|was|would be|should be|must be)\b[\s*_\"']*+[:=]?|[:=])"
#: Marks that name the option, as good as each other: the last one counts.
_MARKED = re.compile(
    rf"(?:\\(?:boxed|fbox)\s*\{{|####+|<answer>|\b(?i:(?:answers?|choice|option)\b{_IS}|answers?\b)"
    rf"[\s*_\"']*+(?i:option|choice|letter)?){_LETTER}"
)
#: An option that is spoken of: a weaker mark, "option A is wrong" may follow the answer.
_SPOKEN_OF = re.compile(rf"\b(?i:choice|option)\b{_LETTER}")
_LINE = re.compile(r"^[ \t*_(\[]*(?:([A-J])[ \t*_]*(?:[).:\]]|$)|([a-j])\))", re.MULTILINE)
_CAPITAL = re.compile(r"\b[A-J]\b")
_BRACKETED = re.compile(r"\(([A-J])\)")


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response settles on the ground truth's option, else 0.0.

    Args:
        response: of a model.
        ground_truth: a letter, or an option that begins with one ("B. 26").

    Raises:
        ValueError: the ground truth begins with no letter from A to J.
    """
    option = _OPTION.match(ground_truth)
    if option is None:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} begins with no letter of an option")
    return float(answer_of(response) == (option[1] or option[2]).upper())


def answer_of(response: str) -> str | None:
    """The option's letter; None when the response names none.

    A boxed, `####` or announced option ("the answer is (B)") comes first, then one that is spoken of
    ("option B"), then a line that begins with one, then one in brackets; of several the last.
    """
    text = own_part(response, evidence=_CAPITAL)
    for pattern in (_MARKED, _SPOKEN_OF, _LINE, _BRACKETED):
        found = [next(filter(None, match.groups())) for match in pattern.finditer(text)]
        if found:
            return str(found[-1]).upper()
    return None
