"""64-bit hashes of the words of questions, computed for a block of questions at a time in NumPy.

A word is a run of letters and digits, or one arithmetic operator; other punctuation only separates words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlctl.prepare.duplicates import text_key

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

#: Words of an n-gram; also the minimum number of words, not counting numbers, of a text compared with masked
#: numbers: shorter texts ("How much is # + #?") match by chance.
NGRAM = 13

#: Arithmetic operators; a minus counts only before a number or bracket, otherwise it is a hyphen.
_MINUS = re.compile(rb"-(?=[ \t\r\n]*[\d(])")
_SIGNS = b"+*/^=<>\x01"
_NOT_ASCII_WORD = re.compile(r"[^\W_]+|[+*/^=<>×÷−√≤≥≠]|-(?=\s*[\d(])")
#: Scripts without spaces: each character is a word.
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")

_SPACE, _LETTER, _DIGIT, _SIGN = range(4)


def mixed(values: Hashes) -> Hashes:
    """Mixes the bits so that each output bit depends on all input bits (SplitMix64, Steele et al. 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _odd(first: int, count: int) -> Hashes:
    """Fixed pseudo-random odd numbers; multiplication by an odd number is invertible modulo 2⁶⁴."""
    return mixed(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


#: Class of each byte value; bytes of non-ASCII characters are letters.
_CLASSES = np.zeros(256, dtype=np.uint8)
_CLASSES[[*b"abcdefghijklmnopqrstuvwxyz", *range(128, 256)]] = _LETTER
_CLASSES[list(b"0123456789")] = _DIGIT
_CLASSES[list(_SIGNS)] = _SIGN
_BYTE_VALUES = np.where(_CLASSES == _SPACE, np.uint64(0), _odd(1, 256))
_NUMBER, _BASE = _odd(1000, 2)


class WordKeys:
    """Hashes that identify each question of a block.

    Attributes:
        exact: (N,) hash of the word sequence.
        masked: (N,) the same with each run of words that contain digits replaced by one placeholder.
        is_masked: (N,) whether `masked` is usable: there are numbers, and at least `NGRAM` other words.
        ngrams: (M,) hashes of all n-grams of `NGRAM` words, question by question.
        ngram_of: (M,) index of the question of each n-gram.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        words, has_digit, counts = _word_hashes([_plain(question) for question in questions])
        question = np.repeat(np.arange(len(questions)), counts)
        sums = _Sums(words)
        self.exact = mixed(sums.of_runs(counts))
        for place in np.flatnonzero(counts == 0).tolist():  # a text without words, such as "?!"
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
    """Polynomial hashes Σ valueᵢ·baseⁱ modulo 2⁶⁴ of any run of values, from one cumulative sum."""

    def __init__(self, values: Hashes) -> None:
        powers, self._inverses = _powers(1 << len(values).bit_length())
        self._sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values * powers[: len(values)], out=self._sums[1:])

    def between(self, starts: Places, ends: Places) -> Hashes:
        """Hashes of the runs [start, end)."""
        return np.asarray((self._sums[ends] - self._sums[starts]) * self._inverses[starts])

    def of_runs(self, counts: Places) -> Hashes:
        """Hashes of consecutive runs of `counts` values."""
        ends = np.cumsum(counts)
        return self.between(ends - counts, ends)

    def of_windows(self, width: int) -> Hashes:
        """Hashes of all windows of `width` values."""
        starts = np.arange(max(0, len(self._sums) - width))
        return self.between(starts, starts + width)


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """baseⁱ and base⁻ⁱ modulo 2⁶⁴; the inverse exists because the base is odd."""
    both = [np.full(count, base, dtype=np.uint64) for base in (_BASE, pow(int(_BASE), -1, 1 << 64))]
    for powers in both:
        powers[0] = 1
        np.cumprod(powers, out=powers)
    return both[0], both[1]


def _plain(text: str) -> bytes:
    """The text in lower case as bytes; non-ASCII text is also NFKC-normalised and split into words."""
    if text.isascii():
        return text.lower().encode()
    text = _UNSPACED.sub(r" \1 ", unicodedata.normalize("NFKC", text)).casefold()
    return " ".join(_NOT_ASCII_WORD.findall(text)).encode()


def _word_hashes(texts: Sequence[bytes]) -> tuple[Hashes, NDArray[np.bool_], Places]:
    """Hashes of the words of all texts (W,), whether each word has a digit (W,), and words per text (N,)."""
    joined = _MINUS.sub(b"\x01", b"\x00".join(texts))  # the length does not change
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
    ends = np.append(starts[1:], len(content))  # separators have the value 0
    return mixed(_Sums(_BYTE_VALUES[content]).between(starts, ends)), has_digit, counts
