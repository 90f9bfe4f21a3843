"""Finds exact and near duplicates of earlier questions.

Exact: equal after `compatible` and case folding, ignoring white space and the punctuation that ends
sentences. Other punctuation is kept because it is significant in mathematics.

Near: Jaccard similarity of at least `SIMILARITY` between the sets of 8-byte shingles of the normalised
texts, estimated by MinHash (Broder 1997) with banding (Leskovec et al., Mining of Massive Datasets, 3.4): two
texts of similarity s agree in at least one of b bands of r values with probability 1 − (1 − s^r)^b: 0.998 at
0.8, 0.40 at 0.5. Texts that agree in a band are compared by their signatures, the lowest 8 bits of each value
(Li & König 2010), which estimate s with a standard deviation of at most 0.05.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BANDS, BAND_VALUES = 16, 5
NUM_VALUES = BANDS * BAND_VALUES
SIMILARITY = 0.8
SHINGLE_BYTES = 8
#: Rows sorted, pairs compared and rows read at a time; they bound the memory.
SORTED_ROWS = 1 << 22
COMPARED_PAIRS = 1 << 19
READ_ROWS = 1 << 16
#: Marks a row without a near duplicate.
NONE = np.uint32(0xFFFFFFFF)

#: Marks before white space; the first condition makes long runs of marks take linear time.
_SENTENCE_MARKS = re.compile(r"(?<![.,;:?])[.,;:?]++(?!\S)")

Pairs = tuple["NDArray[np.uint32]", "NDArray[np.uint32]"]


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


def repeated(keys: NDArray[np.uint64]) -> Pairs:
    """Returns the indices of repeated keys, ascending, and for each the index of its first occurrence.

    Keys are (N,) hashes, uniformly distributed.
    """
    num_parts = np.uint64(1 + len(keys) // SORTED_ROWS)
    found: list[Pairs] = []
    for part in range(int(num_parts)):
        places = np.flatnonzero(keys % num_parts == part).astype(np.uint32)
        places = places[np.argsort(keys[places], kind="stable")]
        values = keys[places]
        is_new = np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]
        first = places[np.flatnonzero(is_new)[np.cumsum(is_new) - 1]]
        found.append((places[~is_new], first[~is_new]))
    later, first = (np.concatenate(side) for side in zip(*found, strict=True))
    order = np.argsort(later)
    return later[order], first[order]


def signatures(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """MinHash of texts: a hash per band (N, BANDS), and the lowest 8 bits of each value (N, NUM_VALUES)."""
    from rensa import RMinHash

    shingles, offsets = _shingles(texts)
    rows = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, NUM_VALUES, 1).to_rows()
    flat = np.fromiter(chain.from_iterable(rows), np.uint32, len(texts) * NUM_VALUES)
    values = flat.reshape(-1, NUM_VALUES)
    mixed = np.zeros((len(texts), BANDS), dtype=np.uint32)
    for place in range(BAND_VALUES):  # FNV-1a, value by value
        mixed = (mixed ^ values[:, place::BAND_VALUES]) * np.uint32(16777619)
    return mixed ^ mixed >> np.uint32(15), values.astype(np.uint8)


def _shingles(texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Hashes of all 8-byte windows of all texts, and the offset of the first hash of each text (N + 1,)."""
    width = SHINGLE_BYTES
    encoded = [text.encode().ljust(width, b"\0") for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    counts = lengths - width + 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    skipped = np.repeat(np.arange(len(texts)) * (width - 1), counts)
    content = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(content, width) if len(content) else content
    hashes = windows[np.arange(offsets[-1]) + skipped].view("<u8").ravel()
    hashes *= np.uint64(0x9E3779B97F4A7C15)  # text bytes use few bits: spread them over all 64
    hashes ^= hashes >> np.uint64(32)
    return hashes, offsets.astype(np.uint64)


def nearly_repeated(bands: Sequence[Path], signature: Path, is_left: NDArray[np.bool_]) -> Pairs:
    """Returns the near duplicates of earlier rows, ascending, and for each the earlier row.

    Among the rows with the same band hash, a row is compared only with the first and the previous one: 1,000
    similar rows take a few thousand comparisons, not a million. `bands` has a file per band, (N,) uint32; the
    file `signature` is (N, NUM_VALUES) uint8; `is_left` (N,) are the rows to compare.
    """
    rows = np.flatnonzero(is_left).astype(np.uint64)
    like = np.full(len(is_left), NONE, dtype=np.uint32)
    for band in bands:
        keys = np.fromfile(band, dtype=np.uint32)[is_left].astype(np.uint64)
        keys <<= np.uint64(32)
        keys |= rows
        keys.sort()
        for later, earlier in _candidates(keys, like):
            equal = (_read_rows(signature, later) == _read_rows(signature, earlier)).mean(axis=1)
            # Of the 8 bits of two values, 1 in 256 are equal by chance.
            alike = (equal - 1 / 256) / (1 - 1 / 256) >= SIMILARITY
            like[later[alike]] = earlier[alike]
    found = np.flatnonzero(like != NONE).astype(np.uint32)
    return found, like[found]


def _candidates(keys: NDArray[np.uint64], like: NDArray[np.uint32]) -> Iterator[Pairs]:
    """Yields pairs (later, earlier) of rows with the same band hash, for later rows without a match so far.

    `keys` combine band hash (high 32 bits) and row (low 32 bits), ascending. `like` is the match found for
    each row so far; the caller updates it between pairs.
    """
    group_start = 0
    for start in range(0, len(keys), COMPARED_PAIRS):
        part = keys[start : start + COMPARED_PAIRS]
        before = keys[max(0, start - 1) : start + len(part) - 1] >> np.uint64(32)
        is_new = np.ones(len(part), dtype=np.bool_)
        is_new[len(part) - len(before) :] = part[len(part) - len(before) :] >> np.uint64(32) != before
        places = np.arange(start, start + len(part))
        firsts = np.maximum.accumulate(np.where(is_new, places, group_start))
        group_start = int(firsts[-1])
        later = part.astype(np.uint32)
        for others in (firsts, np.maximum(firsts, places - 1)):
            open_ = ~is_new & (like[later] == NONE)
            if others is not firsts:
                open_ &= others != firsts
            if open_.any():
                yield later[open_], keys[others[open_]].astype(np.uint32)


def _read_rows(signature: Path, rows: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Reads some rows of the file, sequentially: the pages of a memory-mapped file would count as memory."""
    order = np.argsort(rows)
    wanted = rows[order]
    found = np.empty((len(rows), NUM_VALUES), dtype=np.uint8)
    with signature.open("rb") as file:
        for start in range(0, signature.stat().st_size // NUM_VALUES, READ_ROWS):
            low, high = np.searchsorted(wanted, [start, start + READ_ROWS])
            if low < high:
                file.seek(start * NUM_VALUES)
                part = np.fromfile(file, dtype=np.uint8, count=READ_ROWS * NUM_VALUES).reshape(-1, NUM_VALUES)
                found[order[low:high]] = part[wanted[low:high] - start]
    return found
