from rlctl.spec.model import PROMPT_LENGTH, RESPONSE_LENGTH
from rlctl.tiny.task import problem, split


def test_problem_is_the_reversed_sum() -> None:
    assert problem(12, 34) == ("12+34=", "640")
    assert problem(99, 99) == ("99+99=", "891")
    assert problem(10, 10) == ("10+10=", "020")


def test_split_is_disjoint_complete_and_always_the_same() -> None:
    train, val = split(512)
    assert len(val) == 512
    assert len({prompt for prompt, _ in train + val}) == 90 * 90 == len(train) + len(val)
    assert split(512) == (train, val)
    assert split(10)[1] == val[:10]
    # Pinned: a change of the order changes what everyone's validation figures mean.
    assert val[:2] == [("71+63=", "431"), ("46+48=", "490")]


def test_answers_read_backwards_are_the_sums() -> None:
    for prompt, answer in split(0)[0]:
        a, b = prompt.rstrip("=").split("+")
        assert int(answer[::-1]) == int(a) + int(b)
        assert len(prompt) == PROMPT_LENGTH
        assert len(answer) + 1 == RESPONSE_LENGTH
