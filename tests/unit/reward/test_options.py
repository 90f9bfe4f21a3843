"""Which option a response chooses: forms of one option, and hedges between several."""

import itertools
from pathlib import Path

import pytest

from rlctl.reward.options import chosen_option


def forms(section: str) -> list[str]:
    """The forms of a section of options.txt; ‹X› is chosen, offered or denied, ‹Y› and ‹Z› are others."""
    text = Path(__file__).with_name("options.txt").read_text(encoding="utf-8")
    of_section = text.partition(f"[{section}]\n")[2].partition("\n[")[0]
    return [form.replace("\\n", "\n") for form in of_section.splitlines()]


def written(form: str, letters: str) -> str:
    for mark, letter in zip("XYZ", letters, strict=False):
        form = form.replace(f"‹{mark}›", letter)
    return form


@pytest.mark.parametrize("form", forms("chooses"))
def test_one_option_is_read(form: str) -> None:
    for letters in map("".join, itertools.permutations("ABC", 3)):
        assert chosen_option(written(form, letters)) == letters[0], letters


@pytest.mark.parametrize("form", forms("hedges"))
def test_two_options_are_a_hedge(form: str) -> None:
    for letters in map("".join, itertools.permutations("ABD", 2)):
        assert chosen_option(written(form, letters)) is None, letters


@pytest.mark.parametrize("form", forms("denies"))
def test_a_denied_option_is_not_chosen(form: str) -> None:
    for letter in "ABCD":
        assert chosen_option(written(form, letter)) != letter
