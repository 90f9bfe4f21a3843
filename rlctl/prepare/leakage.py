"""Which questions occur in a benchmark or test split, word for word or nearly.

Three kinds, from sure to suspicious: `exact` (equal but for case, punctuation and white space), `masked`
(equal but for the numbers), `ngram` (13 words in a row in common, the length GPT-3's authors used: Brown et
al. 2020, appendix C).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Kind = Literal["exact", "masked", "ngram"]


class Reference:
    """The questions one must not train on, as sorted 64-bit hashes: 8 bytes per n-gram."""

    @classmethod
    def build(cls, texts: Iterable[tuple[str, str]]) -> Reference:
        """Args:
        texts: (file, question) in any order; equal file names belong together.
        """
        raise NotImplementedError

    def matches(self, questions: Sequence[str]) -> list[frozenset[tuple[Kind, str]]]:
        """Of each question, how and in which files it occurs; empty: nowhere."""
        raise NotImplementedError
