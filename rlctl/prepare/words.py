"""Questions as 64-bit hashes of their words, a block of them at a time in numpy.

A word is a run of letters and digits, or one sign of arithmetic; all other punctuation only separates.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rlctl.prepare.duplicates import text_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]
    Places = NDArray[np.int64]

#: Words of an n-gram; also the fewest words, numbers not counted, of a text compared without its numbers:
#: shorter ones ("How much is # + #?") are alike without being known.
NGRAM = 13

#: Signs of arithmetic; a minus only where a number or bracket follows: the others are hyphens.
_MINUS = re.compile(rb"-(?=[ \t\r\n]*[\d(])")
_SIGNS = b"+*/^=<>\x01"
_NOT_ASCII_WORD = re.compile(r"[^\W_]+|[+*/^=<>×÷−√≤≥≠]|-(?=\s*[\d(])")
#: Writing without spaces: each character is a word.
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")

_SPACE, _LETTER, _DIGIT, _SIGN = range(4)


def mixed(values: Hashes) -> Hashes:
    """Every bit of the input reaches every bit of the output (SplitMix64, Steele et al. 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _odd(first: int, count: int) -> Hashes:
    """Fixed pseudo-random numbers; odd, so that multiplication by them is invertible."""
    return mixed(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


#: Of each byte, what it is; the bytes of characters beyond ASCII are letters.
_CLASSES = np.zeros(256, dtype=np.uint8)
_CLASSES[[*b"abcdefghijklmnopqrstuvwxyz", *range(128, 256)]] = _LETTER
_CLASSES[list(b"0123456789")] = _DIGIT
_CLASSES[list(_SIGNS)] = _SIGN
_BYTE_VALUES = np.where(_CLASSES == _SPACE, np.uint64(0), _odd(1, 256))
_NUMBER, _BASE = _odd(1000, 2)


class WordKeys:
    """What identifies each of a block of questions.

    Attributes:
        exact: (N,) hash of the words in their order.
        masked: (N,) the same with every run of words with digits taken for one and the same word.
        is_masked: (N,) whether `masked` says more: there are numbers, and at least `NGRAM` other words.
        ngrams: (M,) hashes of all `NGRAM` words in a row, question by question.
        ngram_of: (M,) the question each is of.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        words, has_digit, counts = _word_hashes([_plain(question) for question in questions])
        question = np.repeat(np.arange(len(questions)), counts)
        sums = _Sums(words)
        self.exact = mixed(sums.of_runs(counts))
        for place in np.flatnonzero(counts == 0).tolist():  # a text such as "?!" is compared as it is
            self.exact[place] = text_key(questions[place].strip())
        is_kept = np.ones(len(words), dtype=np.bool_)  # not the second or a later number of a run
        is_kept[1:] = ~(has_digit[1:] & has_digit[:-1] & (question[1:] == question[:-1]))
        num_kept = np.bincount(question[is_kept], minlength=len(questions))
        self.masked = mixed(_Sums(np.where(has_digit, _NUMBER, words)[is_kept]).of_runs(num_kept))
        num_numbers = np.bincount(question[has_digit], minlength=len(questions))
        self.is_masked = (num_numbers > 0) & (counts - num_numbers >= NGRAM)
        windows = sums.of_windows(NGRAM)
        inside = question[: len(windows)] == question[NGRAM - 1 :][: len(windows)]
        self.ngrams: Hashes = windows[inside]
        self.ngram_of: Places = question[: len(windows)][inside]


class _Sums:
    """Polynomials Σ valueᵢ·baseⁱ of any run of values, from one cumulative sum modulo 2⁶⁴."""

    def __init__(self, values: Hashes) -> None:
        powers, self._inverses = _powers(1 << len(values).bit_length())
        self._sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values * powers[: len(values)], out=self._sums[1:])

    def between(self, starts: Places, ends: Places) -> Hashes:
        """Of the values from each start up to before its end."""
        return np.asarray((self._sums[ends] - self._sums[starts]) * self._inverses[starts])

    def of_runs(self, counts: Places) -> Hashes:
        """Of runs of so many values, one after the other."""
        ends = np.cumsum(counts)
        return self.between(ends - counts, ends)

    def of_windows(self, width: int) -> Hashes:
        """Of every `width` values in a row."""
        starts = np.arange(max(0, len(self._sums) - width))
        return self.between(starts, starts + width)


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """baseⁱ and base⁻ⁱ modulo 2⁶⁴: an odd base has an inverse."""
    both = [np.full(count, base, dtype=np.uint64) for base in (_BASE, pow(int(_BASE), -1, 1 << 64))]
    for powers in both:
        powers[0] = 1
        np.cumprod(powers, out=powers)
    return both[0], both[1]


def _plain(text: str) -> bytes:
    """Lower case; where it is not ASCII also NFKC, with its words already found."""
    if text.isascii():
        return text.lower().encode()
    text = _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text)).casefold()
    return " ".join(_NOT_ASCII_WORD.findall(text)).encode()


def _word_hashes(texts: Sequence[bytes]) -> tuple[Hashes, NDArray[np.bool_], Places]:
    """The words of all texts (W,), whether each has a digit (W,), and the number of words per text."""
    joined = _MINUS.sub(b"\x01", b"\x00".join(texts))  # as long as before
    content = np.frombuffer(joined, dtype=np.uint8)
    classes = _CLASSES[content]
    is_word = classes != _SPACE
    is_sign = classes == _SIGN
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1] | is_sign[1:] | is_sign[:-1]
    starts = np.flatnonzero(is_start)
    text_ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    counts = np.diff(np.searchsorted(starts, text_ends), prepend=0)
    has_digit = np.zeros(len(starts), dtype=np.bool_)
    has_digit[np.searchsorted(starts, np.flatnonzero(classes == _DIGIT), side="right") - 1] = True
    ends = np.append(starts[1:], len(content))  # what separates words has the value 0
    return mixed(_Sums(_BYTE_VALUES[content]).between(starts, ends)), has_digit, counts
