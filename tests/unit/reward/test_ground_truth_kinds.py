"""Ground truths of every kind: credited are they themselves, and nothing of another kind or number."""

import logging
import re
import signal

import math_verify
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlctl.reward import maths
from rlctl.reward.trial import known_responses

pytestmark = pytest.mark.slow
PROPERTY = settings(max_examples=3, deadline=None)

N = st.integers(2, 60).map(str)
SIGNED = st.integers(-60, 60).filter(lambda n: abs(n) > 1).map(str)
LARGE = st.integers(100, 999).map(str)
FRACTION = st.tuples(N, st.sampled_from(["7", "11", "13"])).map(r"\frac{{{0[0]}}}{{{0[1]}}}".format)
VALUE = st.one_of(SIGNED, LARGE, FRACTION)
LETTER = st.sampled_from("xyzt")
OPEN, CLOSE = st.sampled_from("(["), st.sampled_from(")]")
UNIT = st.sampled_from(["cm", "inches", "degrees", "miles per hour", "m", "apples"])
MONTH = st.sampled_from(["June", "July", "March"])


def built(pattern, *parts):
    """Texts of a pattern whose `@` are drawn from `parts`, in order."""

    def fill(drawn):
        rest = iter(drawn)
        return re.sub("@", lambda _: next(rest), pattern)

    return st.tuples(*parts).map(fill)


def increasing(pattern):
    pairs = st.tuples(st.integers(-50, 400), st.integers(1, 400)).map(lambda p: (p[0], p[0] + p[1]))
    return pairs.map(lambda p: pattern.replace("@", str(p[0]), 1).replace("@", str(p[1]), 1))


#: Kinds that are no single number: nothing of them may be credited by a number in them.
WHOLE = {
    "matrix": st.one_of(
        built(r"\begin{pmatrix}@&@\\@&@\end{pmatrix}", *[VALUE] * 4),
        built(r"\begin{bmatrix} @ \\ @ \\ @ \end{bmatrix}", *[VALUE] * 3),
    ),
    "interval": st.one_of(*(increasing(p) for p in ("[@,@]", "(@,@)", "[@, @)", r"\left(@,@\right]"))),
    "half line": st.one_of(built(r"(-\infty,@]", VALUE), built(r"[@,\infty)", VALUE)),
    "union": st.tuples(st.integers(-50, 40), st.integers(1, 50)).map(
        lambda p: rf"(-\infty,{p[0]})\cup ({p[0] + p[1]},\infty)"
    ),
    "point": st.one_of(built("(@,@)", VALUE, LARGE), built("(@, @, @)", VALUE, VALUE, VALUE)),
    "list": st.lists(st.integers(-300, 300), min_size=2, max_size=4, unique=True).map(
        lambda values: ", ".join(map(str, values))
    ),
    "set": st.lists(st.integers(-300, 300), min_size=2, max_size=4, unique=True).map(
        lambda values: r"\{" + ",".join(map(str, values)) + r"\}"
    ),
    "equation": st.one_of(
        built("@^{2}-@=0", LETTER, LARGE),
        built("@x-@y+@z+@=0", *[N] * 4),
        built("y=@x+@", N, N),
        built("@x^2+y^2=@", N, LARGE),
    ),
    "inequality": st.one_of(
        built(r"@ \ge @", LETTER, SIGNED), built("x<@", VALUE), increasing(r"@ < x \le @")
    ),
    "expression": st.one_of(
        built("@@^@", N, LETTER, N),
        built("@x^2+@x-@", N, N, N),
        built(r"\frac{@}{@ m}", N, st.sampled_from(["7", "11"])),
        built(r"@+@\sqrt{@}x", N, N, st.sampled_from("2357")),
        built(r"@n\pi", N),
        built("@t", LARGE),
        built("e^{@x}+C", N),
        built(r"\log_{@} x", N),
    ),
    "two solutions": st.one_of(
        built(r"@ \pm \sqrt{@}", SIGNED, st.sampled_from("2357")),
        st.integers(-60, 60).map(lambda n: rf"x={n} \text{{ or }} x={n + 7}"),
    ),
    "complex": built("@+@i", SIGNED, N),
    "text": st.one_of(
        built(r"\text{@ @}", MONTH, N), built(r"\text{@ @, 2001}", MONTH, N), built(r"\text{Room @}", LARGE)
    ),
    "time": st.one_of(built(r"@:45 \text{ p.m.}", N), built("@:30", N)),
    "congruence": built(r"a \equiv @ \pmod{61}", N),
}
#: Kinds that are one number, with everything around it that is read.
NUMBERS = {
    "integer": st.one_of(SIGNED, LARGE),
    "separators": st.integers(1000, 10**9).map("{:,}".format),
    "fraction": FRACTION,
    "decimal": st.decimals(-999, 999, places=2, allow_nan=False).filter(lambda d: d % 1).map(str),
    "mixed": st.tuples(N, st.integers(1, 6)).map(lambda p: rf"{p[0]}\frac{{{p[1]}}}{{7}}"),
    "percent": built(r"@\%", N),
    "money": built(r"\$@.50", N),
    "unit": st.one_of(
        built(r"@\text{ @}", LARGE, UNIT), built(r"@ \mbox{ inches}^2", LARGE), built("@ apples", LARGE)
    ),
    "fraction with unit": built(r"@\text{ @}", FRACTION, UNIT),
    "degrees": built(r"@^\circ", N),
    "root": built(r"@\sqrt{@}", N, st.sampled_from("2357")),
    "of pi": st.one_of(built(r"@\pi", N), built(r"\frac{@\pi}{7}", N)),
    "power": built(r"@\times 10^{@}", N, N),
    "ratio": built("@:7", N),
    "binomial": st.integers(9, 30).map(lambda n: rf"\binom{{{n}}}{{3}}"),
    "factorial": st.integers(3, 20).map("{}!".format),
    "base": built("@1_8", N),
}
ANY = {**WHOLE, **NUMBERS}


@pytest.mark.parametrize("kind", ANY)
@PROPERTY
@given(st.data())
def test_a_ground_truth_is_right_in_a_box_and_bare_and_with_a_number_changed_wrong(kind, data):
    truth = data.draw(ANY[kind])
    right, other = known_responses("maths", truth)
    assert maths.grade(right, truth) == 1.0
    assert maths.grade(f"Thus the answer is ${truth}$.", truth) == 1.0
    assert maths.grade(truth, truth) == 1.0
    assert other != right
    assert maths.grade(other, truth) == 0.0
    assert maths.grade(right, other) == 0.0
    assert maths.grade("", truth) == 0.0


@pytest.mark.parametrize("kind", WHOLE)
@PROPERTY
@given(st.data())
def test_a_part_of_a_ground_truth_is_wrong(kind, data):
    truth = data.draw(WHOLE[kind])
    numbers = re.findall(r"\d+", truth)
    for part in {numbers[0], numbers[-1], f"-{numbers[-1]}", "".join(numbers), "0"}:
        for response in (f"\\boxed{{{part}}}", f"The answer is {part}.", f"#### {part}"):
            assert maths.grade(response, truth) == 0.0
        assert maths.grade(f"\\boxed{{{truth}}}", part) == 0.0


@pytest.mark.parametrize("kind", WHOLE)
@PROPERTY
@given(st.data())
def test_another_kind_is_wrong(kind, data):
    truth = data.draw(WHOLE[kind])
    other_kind = data.draw(st.sampled_from(sorted(set(ANY) - {kind})))
    alike = [{"interval", "point", "half line"}, {"list", "set", "point", "interval", "two solutions"}]
    assume(not any({kind, other_kind} <= kinds for kinds in alike))
    assert maths.grade(f"\\boxed{{{data.draw(ANY[other_kind])}}}", truth) == 0.0


def raw(truth, answer):
    """Result of math-verify alone for the unmodified ground truth and the answer in `\boxed{}`."""
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
    return math_verify.verify(*parsed, timeout_seconds=None)


@pytest.mark.parametrize("kind", sorted(set(WHOLE) - {"text", "time", "congruence"}))
@settings(max_examples=5, deadline=None)
@given(st.data())
def test_no_more_credit_than_math_verify_gives(kind, data):
    truth, other = data.draw(WHOLE[kind]), data.draw(st.one_of(*ANY.values(), WHOLE[kind]))
    logging.disable()  # math-verify logs what it cannot read
    try:
        if maths.grade(f"\\boxed{{{other}}}", truth):
            assert raw(truth, other)
    finally:
        logging.disable(logging.NOTSET)  # for the other tests of this process


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        (r"\log_{49} x", "12!", 0.0),
        (r"\log_{40} x", r"56\times 10^{9}", 0.0),
        (r"\log_7 8", "479001600", 0.0),
        (r"20000 \log 7", "20001", 0.0),
        (r"x > \log_7 8", "x > 479001600", 0.0),
        (r"\{\log_7 8, 1\}", r"\{479001600, 1\}", 0.0),
        (r"20000 \log 7", r"20000 \cdot \log 7", 1.0),
        (r"20000 \log x + 1", r"1 + 20000 \log x", 1.0),
        (r"\log_7 8", r"\frac{\log 8}{\log 7}", 1.0),
    ],
)
def test_logarithms_and_large_numbers_are_compared_quickly(truth: str, answer: str, score: float) -> None:
    """49 to the power of 12! would have 800 million digits."""

    def late(*_: object) -> None:
        raise AssertionError("comparing took longer than 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        assert maths.grade(f"\\boxed{{{answer}}}", truth) == score
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("42", r"\begin{cases}1\\42\end{cases}"),
        ("0", "y-3=0"),
        ("0", "x^{2}-7=0"),
        ("10", "2x=10"),
        ("5", ">5"),
        ("5", r"\ge 5"),
        ("5", "5xy"),
        ("3250", "(3,250)"),
        ("100", "[0,100]"),
        ("20", r"\text{June 20}"),
        ("42", "41 and 42"),
        ("12", "1 2"),
        (r"50\%", r"0.5\%"),
        (r"\text{even}", r"\text{neve}"),
        (r"\{1,2\}", "(1,2)"),
        ("(1,2)", r"\{1,2\}"),
        ("x^2+1=0", "x^2+2=0"),  # math-verify: both have no solutions
        (r"\frac{dy}{dx}=3x^2", r"\frac{dy}{dx}=4x^2"),  # math-verify: dy/dx is 0
        ("0.0000001", "0.0000002"),  # math-verify: both are 0 to six places
        ("y'", "y"),
        ("5'6''", "56"),
        ("6:30", r"\frac{1}{5}"),
        ("3-5", "7-9"),
        ("2516_8", "2516_7"),
        (r"\langle 1,2\rangle", "1.2"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
        (r"\frac{1}{2}", r"\frac{1}{0}"),
        (r"\frac{1}{2}", r"-\frac{1}{2}"),
        ("5", "5!"),
        ("-7", "|-7|"),
        ("x^2+y^2=239", "239"),
        ("m+n=7", "7"),
        ("2<a<3", r"\{2,3\}"),
        ("(2,5)", "2,5"),
        ("(1,2),(3,4)", "(2,1),(4,3)"),
        (r"1,3,\ldots,99", "1,3,99"),
        (r"2:00 \text{ PM}", "2:00 AM"),
        (r"2:00 \text{ PM}", "2"),
        ("(x,y)=(1,2)", r"\{1,2\}"),
        ("x=1,y=2", "2,1"),
        ("x=1,y=2", "1,2"),
        ("R", "r"),
        (r"2\pi r", r"2\pi R"),
        (r"5\text{ cm}", r"5\text{ m}"),
        (r"60\text{ mph}", r"60\text{ km/h}"),
        (r"12 \mathrm{~cm}", r"12 \mathrm{~mm}"),
        (r"90^\circ", r"90\text{ radians}"),
        (r"\frac{-3 \pm \sqrt{17}}{4}", r"\frac{-3 + \sqrt{17}}{4}"),
        (r"\frac{-3 \pm \sqrt{17}}{4}", r"\frac{-3 \pm \sqrt{18}}{4}"),
        ("1:2:3", "1:3:2"),  # both are 1/6 if `:` is a division
        ("a:b:c = 1:2:3", "1:3:2"),
        (r"30^\circ", r"\frac{\pi}{3}"),
        (r"\frac{\pi}{6}", r"60^\circ"),
        (r"\frac{\pi}{6}", "30"),
        ("30", r"\frac{\pi}{6}"),
        (r"\cos 40^\circ", r"\cos 50^\circ"),
        (r"\ln 2", r"\log_{10} 2"),
        (r"\ln 2", r"\log_2 2"),
        (r"\ln 2", r"\lg 2"),
        (r"\ln 2", r"\log 3"),
        ("7", "3(4)"),  # math-verify reads a product of two numbers as a mixed fraction
        ("7", "(3)(4)"),
        ("7", "3 4"),
        ("7", r"3\quad 4"),
        ("7", r"3~4"),
        ("7", r"3\left(4\right)"),
        (r"1\frac{1}{2}\pi", r"\frac{\pi}{2}"),
        (r"2\frac{3}{4}x", r"\frac{3}{2}x"),
        ("7x", "3 4x"),
        (r"\ln 2", r"\infty"),
        (r"\log_2 3", r"-\infty"),
        (r"\infty", r"\ln 2"),
        ("4210_5", "555"),
        ("5k", "5"),
        ("5", "5k"),
        ("5000", "5"),
        (r"\text{no solution}", r"\text{one solution}"),
        ("3", "negative 3"),
        ("3", "negative three"),
        ("72", "72 and a half"),
        ("72", "half of 72"),
        ("72", "twice 72"),
        ("72", "three times 72"),
        ("72", "72 squared"),
        ("72", "100 minus 72"),
        ("72", "3 plus 72"),
        ("72", "72 divided by 2"),
        ("72", "72 over 5"),
        ("72", "the square root of 72"),
        ("72", "72 factorial"),
        ("72", "more than 72"),
        ("72", "less than 72"),
    ],
)
def test_wrong(truth, answer):
    for response in (f"\\boxed{{{answer}}}", f"The answer is ${answer}$.", f"#### {answer}"):
        assert maths.grade(response, truth) == 0.0, response


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        (r"\frac{1}{2}", ["0.5", "1/2", r"\dfrac12", r"x = \frac{1}{2}", r"50\%", r"\frac{1}{2} \text{ cm}"]),
        (r"864 \mbox{ inches}^2", ["864", r"864 \text{ in}^2", "864 square inches"]),
        (r"\frac{270}7\text{ degrees}", [r"\frac{270}{7}", r"\frac{270}{7}^\circ", r"38\frac{4}{7}"]),
        (r"\text{June 20}", ["June 20", "June 20th", r"\text{June }20"]),
        (r"\text{(A)}", ["A", "(A)", r"\textbf{(A)}", r"\text{A}"]),
        ("12", ["3(4)", "(3)(4)", r"3\left(4\right)", "1(3)(4)", r"24(\frac12)", "24(1/2)"]),
        (r"1\frac{1}{2}\pi", [r"\frac{3\pi}{2}", r"1.5\pi", r"1 \frac{1}{2} \pi"]),
        (r"-2\frac{3}{4}x", [r"-\frac{11}{4}x"]),
        (r"\left(1\frac12, 2\right)", [r"\left(\frac{3}{2}, 2\right)", "(1 1/2, 2)"]),
        ("1234567", ["1.234.567", "1,234,567", "1 234 567", "1.234.567,00"]),
        ("n", ["n + 0", r"\frac{2(n)}{2}", "n + x - x", "1(n)"]),
        ("n + x - x", ["n"]),
        (r"\frac 1 2 x", [r"\frac{x}{2}"]),
        (r"\log_2(8)", ["3", r"\log_{2}(8)"]),
        (r"3\cdot4(5)", ["60", r"(3)(4)\left(5\right)"]),
        (r"2\sin^2(3)", [r"2(\sin(3))^2"]),
        ("no solution", [r"\text{No solution}", "No solution.", "no solutions"]),
        (r"\text{no real solutions}", ["no real solution"]),
        (r"30^\circ", [r"\frac{\pi}{6}", r"\pi/6\text{ radians}", "30", "30 degrees"]),
        (r"\frac{2\pi}{3}", [r"120^\circ", "120°", "120 degrees", r"120\text{ degrees}"]),
        (r"45^\circ, 135^\circ", [r"\frac{\pi}{4}, \frac{3\pi}{4}", "45, 135"]),
        (r"\cos 40^\circ", [r"\sin 50^\circ", r"\cos(40^{\circ})"]),
        (r"\frac12", [r"\sin 30^\circ"]),
        (r"\ln 2", [r"\log 2", r"\log(2)", r"\frac{1}{2}\log 4"]),
        (r"\log 2", [r"\ln 2", r"\log_{10} 2", r"\lg 2"]),
        (r"x\log x - x + C", [r"x \ln x - x + C"]),
        (r"2\pi", ["2pi", "2*pi", "2 pi"]),
        ("1:2:3", ["1 : 2 : 3"]),
        ("-3", ["negative 3", "minus 3", "negative three"]),
        ("72.5", ["72 and a half", "145 divided by 2"]),
        (r"36\pi", [r"$36\pi \text{ cubic cm}$"]),
        ("7", ["m+n=7", "f(3)=7", r"\text{Area} = 7", "x = 7", "3 + 4 = 7", "seven"]),
        ("[0,100]", [r"x \in [0, 100]", r"\left[0,100\right]"]),
        ("x>5", [r"(5,\infty)", "5<x"]),
        ("1 < x < 2", ["(1,2)"]),
        ("1,2,3", ["3, 2, 1", r"\{1,2,3\}"]),
        (r"x=1 \text{ or } x=2", ["1, 2", r"x=2 \text{ or } x=1"]),
        ("x^2-7=0", ["x^2=7", "x^{2} - 7 = 0"]),
        ("y=2x+3", ["2x+3", "y = 3 + 2x"]),
        (r"\frac{dy}{dx}=3x^2", [r"\frac{dy}{dx} = x^2 \cdot 3"]),
        (r"2\sqrt{3}", [r"\sqrt{12}", r"2\sqrt{3} \text{ cm}", r"2\sqrt{3} units"]),
        (r"3 \times 10^8", ["300000000", "300,000,000", r"3\cdot 10^{8}"]),
        ("6+9i", ["9i + 6", "6 + 9 i"]),
        ("5m", [r"5\text{ m}", "5 m"]),
        ("3:4", [r"\frac{3}{4}", "3 : 4"]),
        ("2516_8", ["2516_{8}", "2516"]),
        (r"2\text{ hours } 30 \text{ minutes}", ["2 hours 30 minutes"]),
        (r"\binom{5}{2}", ["10"]),
        (r"\log_2 8", ["3"]),
        (r"12.5\%", ["12.5", "0.125", r"\frac{1}{8}"]),
        ("32{,}768", ["32768", "32,768", "2^{15}"]),
        (r"5\text{ cm}", ["5", "5 cm", r"5\text{ centimetres}", "5 apples"]),
        (r"60\text{ mph}", [r"60 \text{ miles per hour}", "60"]),
        (r"100\text{ cm}^3", [r"100\text{ cubic centimeters}", "100"]),
        ("AB=5", ["5"]),
        ("1, 2, 3", ["1, 2 and 3"]),
        ("(1,2),(3,4)", [r"\{(1,2),(3,4)\}", "(3,4), (1,2)"]),
        (r"1,3,\ldots,99", [r"1, 3, \dots, 99"]),
        (r"2:00 \text{ PM}", ["2:00 p.m.", "2:00 pm"]),
        (r"\emptyset", [r"\varnothing"]),
        (r"-40^\circ \text{C}", ["-40", r"-40^\circ"]),
        ("f(x)=x^2+1", ["x^2+1"]),
        ("f^{-1}(x)=2x", ["2x"]),
        ("(x,y)=(1,2)", ["(1,2)"]),
        (r"\ln|x|+C", [r"\ln|x| + c"]),
        (r"\frac{\pi}{6}", [r"\frac\pi6", r"\dfrac\pi{6}"]),
        (
            r"\frac{-3 \pm \sqrt{17}}{4}",
            [r"\frac{-3+\sqrt{17}}{4}, \frac{-3-\sqrt{17}}{4}", r"x = \frac{-3 \pm \sqrt{17}}{4}"],
        ),
    ],
)
def test_right(truth, answers):
    for answer in answers:
        assert maths.grade(f"\\boxed{{{answer}}}", truth) == 1.0, answer


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("The answer is 41 and 42", "42"),
        ("The answer is 41 apples and 42 oranges", "42"),
        ("The answer isn't 5", "5"),
        ("The answer is not equal to 5.", "5"),
        ("So $x > 5$.", "5"),
        ("So x - 3 = 0.", "0"),
        ("So it is $-\\frac{1}{2}$.", "1/2"),
        ("Therefore x - 3 = 0.", "0"),
        ("Therefore we get 2x = 10.", "10"),
        ("So it is $|-7|$.", "-7"),
        ("It is 5 m in all.", "5 cm"),
        ("\\boxed{\\text{none}}\nAnd 5 is no answer.", "5"),
        ("The answer is $72!$ ways.", "72"),
        ("Tom has 72k dollars.", "72"),
        ("Tom has sqrt(72) apples.", "72"),
        ("It is log 72.", "72"),
        ("Tom has 72.000.000 apples.", "72"),
    ],
)
def test_prose_that_does_not_say_the_number(response, truth):
    assert maths.grade(response, truth) == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("It is 5.", "5"),
        ("So it is 5 cm long.", "5"),
        ("So it is 5 cm long.", "5 cm"),
        ("So it is $-\\frac{1}{2}$.", "-1/2"),
        ("It is $60$ minus $5$, which is 55.", "55"),
        ("As $5 < 6$ the answer is 2.", "2"),
        ("The answer is $5!$ ways.", "120"),
        ("The answer is \\( 5! \\)", "120"),
        ("That gives 72! Well done.", "72"),
        ("He baked 40 x 20 = 800.\nSo, 800 - 10 = 790 cakes were left.", "790"),
        ("Three times 24 is 72.", "72"),
        ("It takes at least 72 days.", "72"),
        ("He has 12 more than 60, which is 72.", "72"),
        ("She has 72 more than Tom.", "72"),
        ("It is minus 72 degrees.", "-72"),
        ("**Final Answer:** $36\\pi \\text{ cubic cm}$", "36\\pi"),
    ],
)
def test_prose_that_says_the_number(response, truth):
    assert maths.grade(response, truth) == 1.0
