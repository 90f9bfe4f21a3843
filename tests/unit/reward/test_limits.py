"""Expressions too large to compute are found from their text, and nothing else is."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.reward import limits, maths
from rlctl.reward.limits import is_too_large

LABELLED = Path(__file__).with_name("labelled.jsonl")

TOO_LARGE = [
    "9^{9^{9}}",
    "9^9^9",
    "9**9**9",
    "(((9^9)^9)^9)^9",
    "2^{-100000}",
    "-(10^{10})^{10^4}",
    "10^{10^{10}} - 10^{10^{10}}",
    "\\frac{1}{7^{77777}}",
    "(10^9)!",
    "5!!!",
    "((5!)!)!",
    "\\Gamma(10^8)",
    "\\operatorname{gamma}(10^8)",
    "\\binom{10^6}{500000}",
    "\\binom{\\binom{100}{50}}{\\binom{100}{49}}",
    "{1000000 \\choose 500000}",
    "\\prod_{k=1}^{10^7} (k+1)",
    "\\sum_{i=1}^{1000}\\sum_{j=1}^{1000}\\frac{1}{i+j}",
    "\\sum_{k=1}^{2000} \\frac{1}{k^k}",
    "\\int\\int\\int x^y dx dy dz",
    "\\sum_{k=1}^{2000} \\sin(k)",
    "\\sum_{k=1}^{\\infty} \\frac{\\sin(k^3)}{k}",
    "\\sum_{k=1}^{100} \\frac{1}{\\sqrt{k}+1}",
    "(x+1)^{100000}",
    "(a+b+c+d+e)^{60}",
    "\\frac{x^{100000}-1}{x-1}",
    "\\sqrt{2^{3^{20}}}",
    "\\text{big: } 9^{9^{9}}",
    "1,000,000,000!",
    "7" * 4001,
    "0." + "3" * 4001,
    "{" * 30 + "1" + "}" * 30,
    "(" * 30 + "1" + ")" * 30,
    "\\sqrt{1+" * 40 + "1" + "}" * 40,
    "1" + "^{1" * 30 + "}" * 30,
    "+".join(["x"] * 400),
    "x" * 2001,
    "\\cup".join(f"({i},{i + 1})" for i in range(0, 60, 2)),
]
SMALL = [
    "42",
    "2^{100}",
    "3^{2^{10}}",
    "2^{2^{10}}",
    "10^{1000}",
    "2^{-1000}",
    "(-1)^{10^{100}}",
    "1^{10^{10}}",
    "0^{10^{400}}x",
    "(0)**(((6)**(15))**(26))",
    "20!",
    "1000!",
    "\\frac{100!}{98!}",
    "\\binom{100}{50}",
    "\\binom{2024}{3}",
    "\\dbinom{10^{6}}{2}",
    "{10 \\choose 3}",
    "\\frac{3^{2024}-1}{2}",
    "\\frac{1}{2^{2024}}",
    "n!",
    "2^{n!}",
    "10^{10^{n}}",
    "x^{2023}",
    "x^{2023}+x+1",
    "(x+1)^{100}",
    "(x+y)^{10}",
    "(x-1)(x-2)(x-3)(x-4)(x-5)(x-6)(x-7)(x-8)(x-9)(x-10)(x-11)(x-12)(x-13)",
    "\\sum_{k=1}^{2023} k",
    "\\sum_{k=0}^{n} \\binom{n}{k} x^k",
    "\\prod_{k=1}^{100} k",
    "\\sum_{k=1}^{\\infty} \\frac{1}{k^2}",
    "\\sum_{k=1}^{10} \\sin(kx)",
    "\\prod_{k=1}^{n} \\cos\\frac{x}{2^k}",
    "\\lim_{n\\to\\infty} \\left(1+\\frac{1}{n}\\right)^n",
    "\\int_0^1 x^2 \\, dx",
    "\\sqrt[3]{10^{300}+7}",
    "\\sqrt{2+\\sqrt{2+\\sqrt{2+\\sqrt{2}}}}",
    "\\cfrac{1}{1+\\cfrac{1}{1+\\cfrac{1}{1+\\cfrac{1}{1+x}}}}",
    "e^{-x^2/2}",
    "6.02 \\times 10^{23}",
    "\\$1{,}234{,}567.89",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{10}",
    "(-\\infty, -3] \\cup [2, 5) \\cup \\{7\\}",
    "\\{" + ",".join(map(str, range(1, 60))) + "\\}",
    "3." + "1415926535" * 10,
    "9^99",
    "\\text{June 20}",
    "",
]


@pytest.mark.parametrize("formula", TOO_LARGE)
def test_too_large(formula):
    assert is_too_large(formula)


@pytest.mark.parametrize("formula", SMALL)
def test_not_too_large(formula):
    assert not is_too_large(formula)


def test_nothing_labelled_is_too_large():
    with LABELLED.open(encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert [c["ground_truth"] for c in cases if is_too_large(c["ground_truth"])] == []


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789x+-*/^!_(){}[]|,.=\\ $&%", max_size=300))
def test_any_text_has_an_answer(text):
    assert is_too_large(text) in {True, False}


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.integers(0, 30).map(str),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from("+-*"), inner).map("({0[0]}{0[1]}{0[2]})".format),
            st.tuples(inner, inner).map("({0[0]})**({0[1]})".format),
        ),
        max_leaves=6,
    )
)
def test_what_passes_has_few_digits(expression):
    """The estimate is an upper bound: exact arithmetic never finds more digits than the limit."""
    if is_too_large(expression):
        return
    try:
        value = eval(expression)
    except ZeroDivisionError:
        return
    if isinstance(value, int):
        assert abs(value) < 10 ** (limits.MAX_DIGITS + 1)


@pytest.mark.parametrize(
    "forms",
    [
        ("\\boxed{9^{9^{9}}}", "\\boxed{ 9^{9^9} }", "$9^{9^9}$"),
        ("\\boxed{3\\cdot 10^{10^{10}}}", "\\boxed{3 * 10^{10^{10}}}", "\\(3\\times10^{10^{10}}\\)"),
        ("\\boxed{\\left(10^9\\right)!}", "\\boxed{(10^9)!}"),
        ("\\boxed{\\dfrac{1}{9^{9^9}}}", "\\boxed{\\frac{1}{9^{9^9}}}"),
    ],
)
def test_their_answers_are_equal_whatever_they_look_like(forms):
    answers = {maths.answer_of(form) for form in forms}
    assert len(answers) == 1
    assert None not in answers


HUGE = "9^{9^{9}}"


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        (f"\\boxed{{{HUGE}}}", "7", 0.0),
        (f"It is \\boxed{{{HUGE}}}, or about 7", "7", 0.0),
        (f"\\boxed{{{HUGE}}}", HUGE, 1.0),
        ("\\boxed{ 9^{9^9} }", f"${HUGE}$", 1.0),
        ("\\boxed{9^{9^8}}", HUGE, 0.0),
        ("\\boxed{7}", HUGE, 0.0),
        ("\\boxed{2^{10}}", "1024", 1.0),
        ("\\boxed{\\binom{100}{50}}", "\\frac{100!}{50!50!}", 1.0),
    ],
)
def test_the_maths_grader_compares_them_as_text(response, gold, score):
    assert maths.grade(response, gold) == score


def test_their_answer_is_their_text():
    assert maths.answer_of(f"\\boxed{{{HUGE}}}") == maths.answer_of("\\boxed{9 ^ {9^9}}") == "9^{9^9}"
