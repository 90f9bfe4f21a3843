"""Finds questions that repeat an earlier one, exactly or nearly.

Exactly: equal after `compatible` and case folding, ignoring white space and the punctuation that ends
sentences. Other punctuation is kept because it is significant in mathematics.

Nearly: the sets of their substrings of `SHINGLE` characters have a Jaccard similarity of at least
`SIMILARITY`, estimated by MinHash (Broder 1997) with locality-sensitive hashing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

SIMILARITY, SHINGLE = 0.8, 8
_NUM_VALUES, _NUM_BANDS, _SEED = 128, 16, 42
#: Marks before white space; the first condition makes long runs of marks take linear time.
_SENTENCE_MARKS = re.compile(r"(?<![.,;:?])[.,;:?]++(?!\S)")

_SIGNS = str.maketrans("×÷−⁄", "*/-/")
_MIXED_NUMBER = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_POWER = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")


def compatible(text: str) -> str:
    """The text after NFKC, with arithmetic as in ASCII: 2³ × 1½ is 2^3 * 1 1/2; NFKC alone: 23 × 11⁄2."""
    if text.isascii():
        return text
    text = _POWER.sub(r"^\g<0>", _MIXED_NUMBER.sub(" ", text))
    return unicodedata.normalize("NFKC", text).translate(_SIGNS)


def normalise(text: str) -> str:
    """The form of a question in which equal questions are the same text."""
    return " ".join(_SENTENCE_MARKS.sub("", compatible(text).casefold()).split())


def text_key(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def repeated(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of repeated keys (N,), ascending, and for each the index of its first occurrence."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first_of_each = first[inverse]
    later = np.flatnonzero(first_of_each != np.arange(len(keys)))
    return later, first_of_each[later]


def nearly_repeated(questions: Iterable[tuple[int, str]]) -> tuple[list[int], list[int]]:
    """Rows that are similar to an earlier one which is not itself such a row; and that row, the first.

    Args:
        questions: row and normalised question, in order.
    """
    from rensa import RMinHash, RMinHashDeduplicator

    seen = RMinHashDeduplicator(SIMILARITY, _NUM_VALUES, True, _NUM_BANDS, _SEED)
    later, first = [], []
    for row, text in questions:
        signature = RMinHash(_NUM_VALUES, _SEED)
        signature.update([text[at : at + SHINGLE] for at in range(max(1, len(text) - SHINGLE + 1))])
        if like := seen.get_duplicates(signature):
            later.append(row)
            first.append(min(map(int, like)))
        else:
            seen.add(str(row), signature)
    return later, first
