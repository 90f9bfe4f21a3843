"""Leaks against a slow search that compares words, and what must not count as one."""

import random
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.prepare.leakage import COMMON_QUESTIONS, Reference

SIGNS = {"×": "*", "÷": "/", "−": "-", "⁄": "/", "²": "^2"}
TWENTY = (
    "a farmer keeps hens and sells the eggs at the market each day how much does she earn with them today"
)


def slow_words(text):
    """Reads character by character."""
    text = "".join(SIGNS.get(char, char) for char in text)
    text = "".join(SIGNS.get(char, char) for char in unicodedata.normalize("NFKC", text).casefold())
    words, is_open = [], False
    for place, char in enumerate(text):
        rest = text[place + 1 :].lstrip()[:1]
        is_minus = char == "-" and (rest == "(" or rest.isdecimal())
        if char in "+*/^=<>" or is_minus or (not char.isascii() and unicodedata.category(char) == "Sm"):
            words.append(char)
            is_open = False
        elif char.isalnum() or unicodedata.category(char).startswith("M"):
            digit = str(unicodedata.decimal(char, char))
            words = [*words[:-1], words[-1] + digit] if is_open else [*words, digit]
            is_open = True
        elif unicodedata.category(char) != "Cf":
            is_open = False
    return words


def slow_mask(words):
    masked = ["#" if any(c in "0123456789" for c in word) else word for word in words]
    return [word for i, word in enumerate(masked) if word != "#" or i == 0 or masked[i - 1] != "#"]


def slow_match(question, known):
    """The surest kind, by comparing with each known question in turn."""
    words = slow_words(question)
    others = [slow_words(text) for text in known]
    if words in others:
        return "exact"
    mask = slow_mask(words)
    num_numbers = sum(any(c in "0123456789" for c in word) for word in words)
    if (
        num_numbers
        and len(words) - num_numbers >= 13
        and mask in [slow_mask(other) for other in others if slow_mask(other) != other]
    ):
        return "masked"
    grams = {tuple(words[i : i + 13]) for i in range(len(words) - 12)}
    if any(tuple(other[i : i + 13]) in grams for other in others for i in range(len(other) - 12)):
        return "ngram"
    return None


def kinds(question, *known):
    found = Reference([("bench", known)]).matches(question)
    assert all(file == "bench" for _, file in found)
    assert len(found) <= 1
    return next((kind for kind, _ in found), None)


def some_texts(count, seed):
    """Texts of few words, so that they share long runs, with numbers, signs, case and accents."""
    draw = random.Random(seed)
    pieces = [
        "hen",
        "Egg",
        "sold",
        "3",
        "1,200",
        "2nd",
        "+",
        "-",
        "- 4",
        "x-ray",
        "é",
        "’",
        "- (",
        "− 4",
        "× 7",
        "∪",
        "x₁",
        "४२",
        "की कि",
        "co\u00adop",
        "ＡＢ",
        "\n",
        "the",
        "?",
        "²",
    ]
    texts = []
    for _ in range(count):
        if texts and draw.random() < 0.6:  # a variation of an earlier one
            text = draw.choice(texts)
            change = draw.choice(["7", "19 20", "cow", "HEN", ""])
            text = re.sub(r"\d+", change, text, count=1) if draw.random() < 0.5 else f"{change} {text}."
        else:
            text = " ".join(draw.choices(pieces, k=draw.randint(0, 40)))
        texts.append(text)
    return texts


def test_it_finds_what_a_slow_search_finds():
    seen = set()
    for seed in range(16):
        texts = some_texts(60, seed)
        known = [text for text in texts[:10] if slow_words(text)]
        reference = Reference([("bench", known)])
        asked = [text for text in texts[10:] if slow_words(text)]
        expected = [slow_match(text, known) for text in asked]
        found = [next((kind for kind, _ in ways), None) for ways in map(reference.matches, asked)]
        assert found == expected
        seen |= set(expected)
    assert seen == {None, "exact", "masked", "ngram"}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=8), st.lists(st.text(max_size=60), max_size=8))
def test_any_text_whatever(known, asked):
    known, asked = ([text.encode(errors="ignore").decode() for text in texts] for texts in (known, asked))
    found = list(map(Reference([("f", known)]).matches, asked + known))
    assert len(found) == len(asked) + len(known)
    assert all(("exact", "f") in ways for ways in found[len(asked) :])


def test_case_punctuation_and_width_do_not_count():
    assert kinds("Ann, has TWO cats!", "ann has two  cats") == "exact"
    assert kinds("Ａｎｎ has “two” cats", "Ann has two cats") == "exact"
    assert kinds("a well-known thing", "a well known thing") == "exact"


def test_arithmetic_counts():
    assert kinds("What is 2 + 3?", "What is 2 * 3?") is None
    assert kinds("What is 5 - 3?", "What is 5 3?") is None
    assert kinds("What is 5-3?", "What is 5 - 3?") == "exact"
    assert kinds("x = 1", "x < 1") is None
    assert kinds("2 × 3", "2 ÷ 3") is None
    assert kinds("A ∪ B", "A ∩ B") is None
    assert kinds("What is 2³?", "What is 23?") is None
    assert kinds("2½ cups", "21/2 cups") is None


def test_typography_of_arithmetic_does_not_count():
    assert kinds("Ann’s 5 - (x + 1)", "Ann's 5 - (x + 1)") == "exact"
    assert kinds("2³ × 1½ − 3", "2^3 * 1 1/2 - 3") == "exact"


def test_vowels_that_are_marks_belong_to_their_words():
    assert kinds("पानी पी", "पानी पि") is None
    assert kinds("คำ", "คา") is None
    seven = "किताब में कितने पन्ने हैं मित्र बताओ"  # 7 words, and more fragments between the vowels
    assert kinds(f"{seven} एक", f"{seven} दो") is None
    assert kinds(f"{seven} {seven} १२", f"{seven} {seven} ३४") == "masked"


def test_other_numbers_are_masked_in_long_questions_only():
    assert kinds(f"{TWENTY} from 12 hens", f"{TWENTY} from 1,500 hens") == "masked"
    assert kinds("How much is 12 and 7?", "How much is 3 and 4?") is None


def test_thirteen_words_in_a_row_are_suspicious_twelve_are_not():
    words = TWENTY.split()
    assert kinds("Once " + " ".join(words[:13]), f"{TWENTY} exactly") == "ngram"
    assert kinds("Once " + " ".join(words[:12]), f"{TWENTY} exactly") is None
    assert kinds(" ".join(words[:8]) + " x " + " ".join(words[8:20]), TWENTY) is None


def test_chinese_has_words_too():
    text = "一个农民养了很多母鸡每天在市场上卖鸡蛋"
    assert kinds(f"{text}她赚多少钱", f"请问{text}吗") == "ngram"
    assert kinds("母鸡", "鸡母") is None


def test_a_phrase_of_every_prompt_is_no_leak():
    phrase = "Think about the following riddle for as long as you like and then answer it"
    known = [f"{phrase}: number {i} of {i * i}" for i in range(COMMON_QUESTIONS + 1)]
    assert kinds(f"{phrase}: what am I", *known) is None
    assert kinds(f"{phrase}: what am I", *known[:-1]) == "ngram"
    assert kinds(f"{phrase}: what am I", *([known[0]] * 50)) == "ngram", "repeats are one question"


def test_files_are_told_apart():
    texts = {file: [f"{file} {i} {TWENTY} {i}" for i in range(1500)] for file in ("a", "b")}
    reference = Reference(texts.items())
    asked = (f"b 1499 {TWENTY} 1499", "nothing", f"a 0 {TWENTY} 0", f"c {TWENTY}")
    found = list(map(reference.matches, asked))
    assert ("exact", "b") in found[0]
    assert ("exact", "a") in found[2]
    assert not found[1]
    assert Reference([]).matches("x") == []


def test_words_that_one_question_repeats_belong_to_it():
    """An n-gram is common if many questions contain it, not if one question repeats it."""
    once = "every one of these thirteen words is said again and again in it "
    assert kinds(f"now {once}", once * (COMMON_QUESTIONS + 5), "another question") == "ngram"
