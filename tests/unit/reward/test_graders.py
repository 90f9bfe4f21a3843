"""What counts as a right answer."""

import json
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.registry import GRADERS
from rlctl.reward import maths
from rlctl.reward.build import grader_for, knows_source
from rlctl.reward.graders import countdown, exact, multiple_choice
from rlctl.reward.options import chosen_option

LABELLED = Path(__file__).with_name("labelled.jsonl")
AGREEMENT = 0.985


def labelled():
    with LABELLED.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_agreement_with_the_labels():
    """Responses in the ways base and instruct models write them, each labelled by hand.

    No wrong one scores 1. Some right ones are in sentences that are not among the known forms.
    """
    cases = labelled()
    disagreeing = [
        (case["label"], case["kind"], case["response"], case["ground_truth"])
        for case in cases
        if maths.grade(case["response"], case["ground_truth"]) != case["label"]
    ]
    shown = "\n".join(map(repr, disagreeing))
    assert not any(label == 0 for label, *_ in disagreeing), shown
    assert len(disagreeing) <= (1 - AGREEMENT) * len(cases), f"{len(disagreeing)} disagree:\n{shown}"


def test_the_labelled_set_is_large_and_mixed():
    labels = Counter(case["label"] for case in labelled())
    assert labels[1] > 250
    assert labels[0] > 140


SOLUTION = (
    "She sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips in all.\n#### 72"
)
CASES = r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right."
RIGHT = [
    (SOLUTION, "72"),
    (SOLUTION.partition("####")[0], "72"),
    ("#### Step 1\n5 apples\n#### Step 2\nthus \\boxed{72}", "72"),  # Markdown headings
    ("\\boxed{5} is wrong\n#### 72", "72"),
    ("#### 72\nNext question: what is 5 + 6?", "72"),
    ("x" * 10_000 + " #### 72 " + "\n" + "y" * 10_000, "72"),
    ("Answer: " + "Some words. " * 500 + "She sold 48 + 24 = 72 clips.", "72"),
    ("#### 72", "Worked solution\n#### 72"),
    ("#### 72", "72 clips"),
    (f"Thus $\\boxed{{{CASES}}}$, which proves it.", CASES),  # `\{` opens no group
    (r"\boxed{-2 \text{ and } 2}", "-2, 2"),
    (r"\boxed{2 \text{ and } -2}", r"\pm 2"),
    ("The answer is 1.5e3 meters.", "1500"),
    (r"\boxed{1e-05}", "0.00001"),
    (r"\boxed{0.00001}", "1e-05"),
    (r"\boxed{(1.5e3, 2)}", "(1500, 2)"),
    (r"\boxed{6.02 \times 10^{23}}", "6.02e23"),
    (r"\boxed{2.5\times 10^{-19}}", "2.5e-19"),
    (r"\boxed{1.6\times 10^{-19}}", "0.00000000000000000016"),
    ("It is 5 × 10^2 = 500.", "500"),
    ("5e+02 = 500", "500"),
    (r"\boxed{2e-3}", "2e-3"),  # 2e − 3
    (r"\boxed{\textbf{(B)}\ 5}", "5"),
    (r"\boxed{\textbf{(B)}\ 5}", "B"),
    (r"\boxed{\text{(B) } 5}", "B"),
    (r"\boxed{\textbf{(B)}\ 5}", r"\textbf{(B)}\ 5"),
    (r"\boxed{\frac13}", r"0.\overline{3}"),
    (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}"),
    (r"\boxed{-\frac{137}{11}}", r"-12.\overline{45}"),
    (r"\boxed{\overline{AB}}", r"\overline{AB}"),
    (r"\boxed{\approx 5}", "5"),
    (r"\boxed{\underline{17}}", "17"),
    ("The area is 25π.", r"25\pi"),
    ("The area is 6π square inches.", r"6\pi"),
    ("The angle is π/4.", r"\frac{\pi}{4}"),
    ("The value is 2 + 3√5.", r"2 + 3\sqrt{5}"),
    ("The circumference is 10π, so r = 5", "5"),
    ("The area is 100π ≈ 314.", "314"),
    ("The side is 7 cm².", "7"),
    (r"\boxed{5√2}", r"5\sqrt{2}"),
    (r"\boxed{√(x+1)}", r"\sqrt{x+1}"),
    (r"\boxed{x²}", "x^2"),
    (r"\boxed{x¹⁰}", "x^{10}"),
    (r"\boxed{7\text{ cm}²}", "7"),
    (r"\boxed{(-∞, 3]}", r"(-\infty,3]"),
    (r"\boxed{A ∪ B}", r"A \cup B"),
    (r"\boxed{2\exp(3x)}", "2e^{3x}"),
    ("The rate is 1e-3.", "0.001"),
    (r"\boxed{\color{red}{17}}", "17"),
    (r"\boxed{\textcolor{blue}{\frac{1}{2}}}", r"\frac12"),
    ("So the area is π.", r"\pi"),
    ("The solutions are -2 and 3.", "-2, 3"),
    ("The roots are x = -2, x = 1 and x = 3.", "-2, 1, 3"),
    (r"\boxed{x < 2}", r"(-\infty, 2)"),
    (r"\boxed{x < 2 \text{ or } x > 3}", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"x < 2 \text{ or } x > 3"),
    (r"\boxed{x \ne 3}", r"(-\infty, 3) \cup (3, \infty)"),
    (r"\boxed{1 \le x < 2 \text{ or } x \ge 5}", r"[1, 2) \cup [5, \infty)"),
]
WRONG = [
    ("So the area is π.", r"2\pi"),
    ("The solutions are -2 and 3.", "-2, 4"),
    ("The solutions are -2, 3 and 5.", "-2, 3"),
    ("The value is between 2 and 3.", "2, 3"),
    (r"\boxed{x \le 2}", r"(-\infty, 2)"),
    (r"\boxed{x > 2}", r"(-\infty, 2)"),
    (r"\boxed{x < 2 \text{ or } x \ge 3}", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\boxed{x > 3}", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\boxed{2.6\times 10^{-19}}", "2.5e-19"),
    ("1.5e3", "15"),
    ("The area is 25π.", "25"),
    (r"The area is 25\pi.", "25"),
    ("The distance is √5.", "5"),
    ("The distance is 5√2.", "5"),
    ("The value is 2 + 3√5.", r"3\sqrt{5}"),
    ("The value is x√5.", r"\sqrt{5}"),
    ("The side is 7 cm².", "2"),
    (r"\boxed{0.16}", r"0.1\overline{6}"),
    (r"\boxed{\textbf{(B)}\ 5}", "6"),
    (r"\boxed{\textbf{(B)}\ 5}", "C"),
    (r"Many words come first here. \textbf{(A)} 5 is too small for the case at hand.", "A"),
    (r"\boxed{\text{(A)} \text{ and (C)}}", "A"),
    (r"\boxed{\text{(A)} and \text{(C)}}", "A"),
    (r"\boxed{6.03e23}", "6.02e23"),
    (r"\boxed{4.5e2}", r"9 \cdot e"),
    (r"\boxed{9^{1e9}}", "9"),
    ("$1/0$", "1"),
    ("#### 72\n#### 71", "72"),
    ("72 is what I thought first\n#### 71", "72"),
]


@pytest.mark.parametrize(("response", "ground_truth"), RIGHT)
def test_maths_right(response, ground_truth):
    assert maths.grade(response, ground_truth) == 1.0


@pytest.mark.parametrize(("response", "ground_truth"), WRONG)
def test_maths_wrong(response, ground_truth):
    assert maths.grade(response, ground_truth) == 0.0


NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9),
    st.decimals(-10_000, 10_000, places=2, allow_nan=False, allow_infinity=False),
)
WAYS = [
    "{0}",
    "#### {0}",
    "\\boxed{{{0}}}",
    "The answer is {0}.",
    "**Answer:** ${0}",
    "A: {0}\n\nQ: And 1 + 1?\nA: 2",
    "So 20 + 6 is what she has.\nIn total she has {0} apples.",
]


@settings(max_examples=60, deadline=None)
@given(NUMBERS, st.sampled_from(WAYS), st.booleans())
def test_a_number_is_found_however_it_is_announced(number, way, separators):
    written = f"{number:,}" if separators else str(number)
    response = way.format(written)
    assert maths.grade(response, str(number)) == 1.0
    assert maths.grade(response, str(number + 1)) == 0.0
    assert Fraction(maths.answer_of(response).removesuffix(" dollar")) == Fraction(number)


@pytest.mark.parametrize(
    "repetitive",
    [
        "\\boxed{" * 20_000,
        "\n" * 200_000 + "5",
        "Q: 1\n" * 40_000,
        "the answer is " * 15_000,
        "Answer:\n" * 25_000,
        "note\n" * 40_000 + "5",
        "5 " + "a" * 1900 + "!",
        "from " * 400 + "5 " * 300,
        "1,234," * 30_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_long_and_repetitive_responses_take_no_time(repetitive):
    """Looking for the answer must not backtrack; generous, for machines that do other things."""
    maths.grade("1", "1")
    start = time.process_time()
    maths.grade(repetitive, "7")
    assert time.process_time() - start < 2.0


def test_a_ground_truth_that_is_no_mathematics_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="ground truth '€' is not"):
        maths.grade("#### 1", "€")


def test_exact_looks_past_white_space_only():
    assert exact(" 640\n", "640") == 1.0
    assert exact("640.", "640") == 0.0
    assert exact("", "640") == 0.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b)", "B"),
        ("B. 26", "B"),
        ("The answer is (B) 26", "B"),
        ("The correct answer is **B**.", "B"),
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(D)}}", "D"),
        ("#### C", "C"),
        ("<answer>C</answer>", "C"),
        ("Final Answer: The final answer is $\\boxed{A}$", "A"),
        ("A is wrong because it is too small.\nThe answer is C", "C"),
        ("(A) 1\n(B) 2\nI choose option B.", "B"),
        ("Answer: (C)\n\nQuestion: the next one\nAnswer: D", "C"),
        ("The correct answer is B.\n\nOption A is wrong because it is too small.", "B"),
        ("The answer is (C). That is the answer I would pick.", "C"),
        ("The correct option is: **D**", "D"),
        ("The best answer choice is A", "A"),
        ("Option C", "C"),
        ("C is correct", "C"),
        ("A is not correct. (B) is the right choice, because A is too small", "B"),
        ("It must be C.", "C"),
        ("Choose D", "D"),
        ("答案是B", "B"),
        ("The answer is B and A is wrong.", "B"),
        ("The answer is A or B", None),
        ("The answer is (A) or (B).", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{A, B, C}", None),
        ("Answer: B, C, D", None),
        ("The answer is A, B, and C.", None),
        ("The answer is **A or B**", None),
        ("The answer is A or B.\n\nBoth are right.", None),
        ("The answer is B, C is wrong.", "B"),
        (r"The answer is \(B\).", "B"),
        (r"The answer is \[ \boxed{B} \]", "B"),
        ("The answer is 'B'.", "B"),
        ('{"answer": "B"}', "B"),
        ("The answer is A's", None),
        ("b", "B"),
        ("b.", "B"),
        ("A) 5\nB) 6\nC) 7\nD) 8", None),
        ("(A) red\n\n(B) green\n\n(C) blue", None),
        ("**A.** red\n**B.** green\n**C.** blue\n**D.** white\n", None),
        ("A) 5\nB) 6\nC) 7\nD) 8\n\nB) 6", "B"),
        ("(A) 1 (B) 2 (C) 3 (D) 4", None),
        ("A. a cat B. a dog C. a cow", None),
        ("A. 1 B. 2 C. 3. The answer is C.", "C"),
        ("(A) 1 is wrong\n(B) is correct\n(C) 3 is wrong", "B"),
        ("A) 5\nB) 6\nC) 7\nThe answer is B", "B"),
        ("A) 5\nB) 6\nC) 7\n\nB", "B"),
        ("A) no\nB) yes", "B"),
        ("I select the first", None),
        ("The answer is a dog.", None),
        ("A dog is an animal.", None),
        ("The answer is Apples", None),
        ("", None),
    ],
)
def test_multiple_choice_reads_the_letter(response, letter):
    assert chosen_option(response) == letter
    for option in "ABCD":
        for truth in (option, f"({option})", f"{option}. the text"):
            assert multiple_choice(response, truth) == float(letter == option)


@pytest.mark.parametrize(
    "repetitive",
    [
        "answer" + " " * 20_000 + "z",
        "####" + "*" * 20_000,
        "option\n" * 9_000,
        "A is" + " " * 20_000,
        ("choose" + " " * 50) * 400,
        "A or" + " " * 20_000,
        "answer A, B\n" * 15_000,
        "(A), " * 40_000,
    ],
)
def test_multiple_choice_is_fast_for_long_and_repetitive_responses(repetitive):
    """It runs in the trainer's own process, where nothing would end it."""
    start = time.process_time()
    assert chosen_option(repetitive) == ("A" if repetitive.startswith("(A)") else None)
    assert time.process_time() - start < 2.0


def test_multiple_choice_wants_a_letter_as_ground_truth():
    with pytest.raises(ValueError, match="'zebra' does not begin with the letter"):
        multiple_choice("B", "zebra")


TASK = '{"numbers": [25, 3, 4], "target": 88}'


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>(25 - 3) * 4</answer>", 1.0),
        ("<answer> (25-3)*4 = 88 </answer>", 1.0),
        ("\\boxed{(25-3)\\times 4 = 88}", 1.0),
        ("88 = (25-3)*4", 1.0),
        ("So we get (25-3)*4 = 22*4 = 88.", 1.0),
        ("\\boxed{4(25-3)}", 1.0),
        ("The equation is (25-3)*4 (with each number once).", 1.0),
        ("<answer>(25-3)4</answer>", 0.0),
        ("<answer>25*4-12</answer>", 0.0),  # another number
        ("<answer>25 - 3 + 4</answer>", 0.0),  # another value
        ("<answer>(25-3)*4+3-3</answer>", 0.0),  # a number used twice
        ("<answer>88</answer>", 0.0),
        ("<answer>25/(3-3)*4</answer>", 0.0),
        ("<answer>9**9**9</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "(" * 500 + "25</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_wants_each_number_once_and_the_target(response, score):
    assert countdown(response, TASK) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("(25-3)*4 = 88", 1.0),
        ("(25-3)*4 = 22*4 = 88", 1.0),
        ("Step 1: 25-3=22. Step 2: 22*4=88. Final: (25-3)*4", 1.0),
        ("25-3=22, then 22*4=88", 0.0),
        ("(25-3)*4 = 89", 0.0),
        ("88 = (25-3)*4", 1.0),
        ("(25-3)*4 or 25*3+4", 0.0),
    ],
)
def test_countdown_reads_one_true_equation(response, score):
    assert countdown(response, '{"numbers": [25, 3, 4], "target": 88}') == score


def test_countdown_computes_exactly():
    assert countdown("<answer>(1/3)*3*7</answer>", '{"numbers": [1, 3, 3, 7], "target": 7}') == 1.0
    assert countdown("<answer>8/(3-8/3)</answer>", '{"numbers": [8, 3, 8, 3], "target": 24}') == 1.0


@pytest.mark.parametrize("truth", ["24", "{}", "no", '{"numbers": "ab", "target": 1}', '{"numbers": [1]}'])
def test_countdown_refuses_other_ground_truths(truth):
    with pytest.raises(ValueError, match=r"."):
        countdown("1", truth)


@pytest.mark.parametrize(
    ("grader", "alike", "others"),
    [
        ("maths", ["0.5", "1/2", "\\boxed{\\frac{1}{2}}", "The answer is 0.50."], ["2", "50"]),
        ("maths", ["26", "#### 26.00", "26%", "The answer is twenty-six."], ["-26", "0.26"]),
        ("maths", ["\\boxed{[0,1)}", "It is $[0, 1)$."], ["\\boxed{(0,1)}"]),
        ("multiple_choice", ["B", "The answer is (B)."], ["C"]),
        ("exact", ["640", " 640\n"], ["640."]),
        ("countdown", ["<answer>1+2</answer>", "\\boxed{1 + 2 = 3}"], ["2+1"]),
    ],
)
def test_equal_answers_are_equal_text(grader, alike, others):
    answer_of = GRADERS.part(grader).answer_of
    texts = {answer_of(response) for response in alike}
    assert len(texts) == 1
    assert None not in texts
    assert texts.isdisjoint(answer_of(response) for response in others)
    assert answer_of("") is None


def test_every_grader_says_what_it_grades():
    assert set(GRADERS) >= {"exact", "maths", "multiple_choice", "countdown", "code", "model", "auto"}
    for part in GRADERS.parts():
        assert part.label
        assert part.formula
        assert (part.function.__doc__ or "").strip()


@pytest.mark.parametrize(
    ("source", "grader"),
    [
        ("embedded/addition", "exact"),
        ("openai/gsm8k", "maths"),
        ("lighteval/MATH", "maths"),
        ("DigitalLearningGmbH/MATH-lighteval", "maths"),
        ("HuggingFaceH4/MATH-500", "maths"),
        ("HuggingFaceH4/aime_2024", "maths"),
        ("math_dapo_reasoning", "maths"),
        ("numina_olympiads", "maths"),
        ("Jiayi-Pan/Countdown-Tasks-3to4", "countdown"),
        ("codecontests", "code"),
        ("deepmind/code_contests", "code"),
        ("taco", "code"),
        ("cais/mmlu", "multiple_choice"),
        ("TIGER-Lab/MMLU-Pro", "multiple_choice"),
        ("allenai/ai2_arc", "multiple_choice"),
    ],
)
def test_auto_goes_by_source(source, grader):
    assert grader_for(source) == grader
    assert knows_source(source)


@pytest.mark.parametrize("source", ["my_own", "searchR1_nq", "research", "aftermath", ""])
def test_unknown_sources_are_graded_as_mathematics(source):
    assert grader_for(source) == "maths"
    assert not knows_source(source)
