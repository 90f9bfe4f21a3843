"""Finds rows that repeat an earlier one, exactly or with nearly the same question.

Exactly: the other columns are the same, and the questions equal after `compatible` and case folding, ignoring
white space and the punctuation that ends sentences. Other punctuation is kept because it is significant in
mathematics.

Nearly: the sets of their substrings of `SHINGLE` characters have a Jaccard similarity of at least
`SIMILARITY`, estimated by MinHash (Broder 1997) with locality-sensitive hashing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.data.schema import json_text
from rlctl.extras import require

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


#: Columns that name a row, and do not make two rows different if they are unique.
ID_COLUMNS = ("id", "index", "idx", "uuid")
_ID_OF = {name: name for name in ID_COLUMNS} | {"original_index": "index"}
#: Fields of `extra_info` that repeat the row, or say where it was.
_NOT_COMPARED = frozenset({"split", "original_split", "question", "answer"})


def column_keys(extra: Mapping[str, Any], answer_column: str | None) -> tuple[int, dict[str, int]]:
    """64-bit hash of a row's columns besides prompt and answer, and of each of `ID_COLUMNS`; 0 without any.

    Args:
        extra: its `extra_info`.
        answer_column: the field that is the answer.
    """
    compared: dict[str, Any] = {}
    ids = dict.fromkeys(ID_COLUMNS, 0)
    for name, value in extra.items():
        if name in _NOT_COMPARED or name == answer_column or value is None:
            continue
        identifier = _ID_OF.get(name.lower())
        if identifier:
            ids[identifier] = text_key(json_text(value))
        else:
            compared[name] = value
    return text_key(json_text(compared)) if compared else 0, ids


def row_keys(
    prompts: NDArray[np.uint64], columns: NDArray[np.uint64], ids: Sequence[NDArray[np.uint64]]
) -> NDArray[np.uint64]:
    """Keys (N,) that are equal for rows with equal prompts and columns, answers aside.

    Columns of `ids` that are unique do not count, unless all prompts are the same: then they name the tasks.
    """
    combined = _combined(prompts, columns)
    is_one_prompt = len(prompts) > 0 and bool((prompts == prompts[0]).all())
    for values in ids:
        is_unique = len(np.unique(values)) == len(values)
        if is_one_prompt or not is_unique:
            combined = _combined(combined, values)
    return combined


def with_answers(keys: NDArray[np.uint64], answers: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Keys (N,) of whole rows, from `row_keys` and hashes of their ground truths."""
    return _combined(keys, answers.astype(np.uint64))


def _combined(keys: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes of pairs (splitmix64)."""
    mixed = keys * np.uint64(0x9E3779B97F4A7C15) + others
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


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

    Raises:
        MissingPackage: rensa is not installed.
    """
    require("rensa")
    from rensa import RMinHash, RMinHashDeduplicator

    seen = RMinHashDeduplicator(SIMILARITY, _NUM_VALUES, True, _NUM_BANDS, _SEED)
    later = []
    first = []
    for row, text in questions:
        signature = RMinHash(_NUM_VALUES, _SEED)
        signature.update([text[at : at + SHINGLE] for at in range(max(1, len(text) - SHINGLE + 1))])
        like = seen.get_duplicates(signature)
        if like:
            later.append(row)
            first.append(min(map(int, like)))
        else:
            seen.add(str(row), signature)
    return later, first
