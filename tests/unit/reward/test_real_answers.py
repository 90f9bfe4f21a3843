"""Answers in the ways real models write them, one row per cause of a wrong grade."""

import pytest

from rlctl.reward import maths
from rlctl.reward.code import program_of
from rlctl.reward.graders import countdown
from rlctl.reward.options import chosen_option

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"


@pytest.mark.parametrize(
    ("truth", "responses"),
    [
        # a name or an expression in a formula, whose value the sentence states
        (
            "34",
            [
                "The value of $x$ is 34.",
                "Hence $a+b$ is 34.",
                "The value of $x^2 + 1$ is 34.",
                "$f(3)$ equals 34.",
            ],
        ),
        ("34", ["The value of $f(5)$ is $34$.", "$2^5 = 32$, so the next even number is 34."]),
        ("34", ["There are 34 such values of $n$.", "There are $34$ ordered pairs $(a, b)$."]),
        ("34", ["The remainder when $N$ is divided by 100 is 34.", "It is 34 when $N$ is divided by 1000."]),
        ("34", [r"There are 34 integers $n$ with $1 \le n \le 200$."]),
        # a formula that only names a circumstance or a reason
        (
            "34",
            [
                "The maximum is $34$, attained at $x = 5$.",
                "The minimum is 34 when x = 5.",
                "It is $34$ for $n = 5$.",
            ],
        ),
        (
            "34",
            [
                "There are 34 solutions in [0, 50].",
                "The answer is $34$, since $5 + 7 = 12$.",
                "It is $34$, not $5$.",
            ],
        ),
        ("e^{2x}", ["Thus $f(x) = e^{2x}$ for all $x > 5$.", "The answer is $e^{2x}$, not $e^{x}$."]),
        # Chinese
        (
            "34",
            [
                "所以总共有34个苹果。",
                "最终答案是：34",
                "答：一共有34个苹果。",
                "因此,小明一共有34元。",
                "34个",
            ],
        ),
        # several boxes for several values
        ("-2, 3", [r"\boxed{-2} and \boxed{3}", r"\[x = \boxed{-2} \quad \text{or} \quad x = \boxed{3}\]"]),
        ("(1,2),(3,4)", [r"$\boxed{(1,2)}$, $\boxed{(3,4)}$"]),
        ("34", [r"\boxed{34}, \boxed{34}", "\\boxed{12}\nNo wait, it is \\boxed{34}"]),
        # numbers as programs and calculators print them
        (r"3\times10^{-8}", [r"\boxed{3e-8}", r"\boxed{3E-8}", r"\boxed{3x10^{-8}}"]),
        ("3e-8", [r"\boxed{3\times10^{-8}}", r"\boxed{0.00000003}"]),
        ("1000000", [r"\boxed{1\text{ million}}"]),
        (r"\frac{100}{3}", [r"\boxed{33.\dot{3}}"]),
        (r"1A_{16}", [r"\boxed{1a_{16}}", r"\boxed{(1A)_{16}}", r"\boxed{1A}"]),
        # complex numbers
        (r"e^{i\pi}", [r"\boxed{-1}"]),
        ("-1", [r"\boxed{e^{i\pi}}"]),
        (r"2e^{i\pi/3}", [r"\boxed{1+i\sqrt{3}}", r"\boxed{2(\cos\frac{\pi}{3}+i\sin\frac{\pi}{3})}"]),
        ("3+4i", [r"\boxed{z = 3+4i}"]),
        # notations that the parser does not know
        ("120", [r"\boxed{C(10,3)}", r"\boxed{10 \choose 3}", r"\boxed{_{10}C_3}", r"\boxed{C_{10}^3}"]),
        ("C(10,3)", [r"\boxed{120}", r"\boxed{\binom{10}{3}}"]),
        ("34", [r"\boxed{\bf 34}", r"\boxed{\large 34}", "Answer: `34`"]),
        (r"\frac{\pi}{6}", [r"Final answer: `\frac{\pi}{6}`"]),
        (MATRIX, [r"\boxed{\begin{pmatrix} 1 & 2 \\[4pt] 3 & 4 \end{pmatrix}}"]),
        (
            MATRIX,
            [
                f"The matrix is $ {MATRIX} $.",
                f"So \\[ A = {MATRIX}. \\]",
                f"The answer is\n\n$$\n{MATRIX}\n$$",
            ],
        ),
        (r"\sin x", ["The answer is\n\n$$\n\\sin x\n$$"]),
        ("[2,5)", [r"\boxed{\{x : 2 \leq x < 5\}}", r"\boxed{\{x\in\mathbb{R} \mid 2\le x<5\}}"]),
        ("x^2+2x+1", [r"\boxed{x**2+2*x+1}"]),
        ("e^{16}-1", [r"\boxed{-1 + exp(16)}"]),
        (r"1-\frac{1}{\mathrm{e}}", [r"\boxed{1-e^{-1}}"]),
        (r"\ln 2", [r"\boxed{\log_e 2}"]),
        (r"n \equiv 1 \pmod 3", [r"\boxed{n\equiv 1\pmod{3}}"]),
        (r"\infty", [r"\boxed{\text{infinity}}"]),
        # units
        (
            r"3{,}000\text{ m/s}",
            [r"\boxed{3000 \frac{\text{m}}{\text{s}}}", r"\boxed{3000 \mathrm{\,m\,s^{-1}}}"],
        ),
        ("42", ["42 sq. units", "42 °C", "The area is 42 cm$^2$.", "The angle is 42$^\\circ$."]),
        # texts
        (
            "no solution",
            [r"\boxed{\emptyset}", r"\boxed{\varnothing}", r"\boxed{\{\}}", "There is no solution."],
        ),
        (
            r"\varnothing",
            [r"\boxed{\text{no solution}}", r"\boxed{\{ \}}", r"\boxed{\text{No real solutions}}"],
        ),
        ("Tuesday", ["So it is Tuesday.", "The day of the week, 100 days later, is therefore Tuesday."]),
    ],
)
def test_right(truth: str, responses: list[str]) -> None:
    for response in responses:
        assert maths.grade(response, truth) == 1.0, response


@pytest.mark.parametrize(
    ("truth", "responses"),
    [
        # bounds and denied numbers
        (
            "72",
            [
                "at least 72",
                "At most 72",
                "no more than 72",
                "not less than 72",
                "up to 72",
                "over 72",
                "below 72",
            ],
        ),
        ("72", ["72 or more", "72 and above", r"\boxed{72 \text{ or more}}", r"\boxed{\text{at least } 72}"]),
        ("72", ["72 is incorrect.", "72 is not the answer.", "72 does not work.", "72 can't be right."]),
        ("72", ["I am not sure whether it is 72.", "I cannot tell if the answer is 72."]),
        # a part of a calculation, a circumstance
        ("12", ["12 less than 17 is 5.", "June 12", "12 less than 50"]),
        (
            "5",
            [
                "The maximum is $7$, attained at $x = 5$.",
                "The minimum is 7 when x = 5.",
                "It is $7$ for $n = 5$.",
            ],
        ),
        ("1", [r"\boxed{1\text{ million}}"]),
        # one of several values
        (
            "3",
            [
                "The roots are x=2 or x=3.",
                "We get x = 2 and x = 3.",
                "The roots are $2$ and $3$.",
                "Answers: 2; 3",
            ],
        ),
        (
            "34",
            [r"\boxed{35} or \boxed{34}", r"\boxed{35} \boxed{34}", r"$\boxed{35}\text{ and }\boxed{34}$"],
        ),
        ("-2, 3", ["\\boxed{-2}\n\\boxed{4}", r"\boxed{3}"]),
        (
            "even",
            [
                "Answer: even\nAnswer: odd",
                "The answer is even. The answer is odd.",
                r"\boxed{even}, \boxed{odd}",
            ],
        ),
        # a final box that is cut off
        ("42", ["So far \\boxed{42}.\n\nThe final answer is \\boxed{"]),
        # exact numbers that agree to six places
        (r"\frac{1}{2^{99}}", [r"\boxed{\frac{1}{2^{98}}}", r"\boxed{0}"]),
        (r"\frac{2^{2005}+1}{3\cdot2^{2006}}", [r"\boxed{\frac{1}{3\cdot2^{2006}}}"]),
        (r"e^{-30}", [r"\boxed{e^{-29}}"]),
        ("1", [r"\boxed{e^{i\pi}}", r"\boxed{i}"]),
        ("120", [r"\boxed{C(10,4)}", r"\boxed{P(10,3)}", r"\boxed{(10,3)}"]),
        (r"1A_{16}", [r"\boxed{26}", r"\boxed{1B_{16}}", r"\boxed{1A_{15}}"]),
        ("no solution", [r"\boxed{0}", r"\boxed{\{0\}}", r"\boxed{\text{one solution}}"]),
        (
            "Tuesday",
            [
                "It is not Tuesday.",
                "I do not know if it is Tuesday.",
                "It is Monday or it is Tuesday.",
                "If today is Tuesday then we get Friday.",
            ],
        ),
        # values that sympy cannot compare
        ("5", [r"\boxed{1,000\frac\infty2}"]),
        ("z = 1 + 1 = 2", [r"\boxed{z = 3+3 = 2}"]),
    ],
)
def test_wrong(truth: str, responses: list[str]) -> None:
    for response in responses:
        assert maths.grade(response, truth) == 0.0, response


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("answer: b", "B"),
        ("故选B。", "B"),
        ("所以选择B", "B"),
        ("选项A错误,答案是B", "B"),
        ("Thus B.", "B"),
        ("It's B.", "B"),
        ("Hence B is the answer.", "B"),
        ("The answer is `B`.", "B"),
        ("The answer is most likely B.", "B"),
        ("The answer seems to be B", "B"),
        ("Solution: B", "B"),
        ("**Answer: B**\nas \\boxed{E = mc^2}", "B"),
        ("Option B is incorrect.", None),
        ("I would not choose B.", None),
        ("The answer is a", None),
    ],
)
def test_options(response: str, letter: str | None) -> None:
    assert chosen_option(response) == letter


@pytest.mark.parametrize(
    "response",
    [
        "Here:\n```\ndef f():\n    return 1\n```\nDone.",
        "```python\ndef f():\n    return 1\n",
        "1. Code:\n   ```py\n   def f():\n       return 1\n   ```",
        '```python title="a.py"\r\ndef f():\r\n    return 1\r\n```\r\n',
        "~~~python\ndef f():\n    return 1\n~~~\nIt prints:\n```\n1\n```",
    ],
)
def test_programs_in_blocks_of_any_form(response: str) -> None:
    assert program_of(response) == "def f():\n    return 1\n"


def test_a_letter_as_multiplication_sign() -> None:
    assert countdown("<answer>(25 - 3) x 4</answer>", '{"numbers": [25, 3, 4], "target": 88}') == 1.0
