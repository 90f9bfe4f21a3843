"""Rows that ask what an earlier row asked: exactly, or nearly.

Exact: equal after NFKC, case folding, and white space and the marks that end sentences left out of
account. Other punctuation stays: in mathematics it is the question.

Near: Jaccard similarity of at least `SIMILARITY` between the sets of 8-byte pieces of the normalised
texts, estimated by MinHash (Broder 1997) in bands (Leskovec et al., Mining of Massive Datasets, 3.4): two
texts of similarity s agree in one of b bands of r values with probability 1 − (1 − s^r)^b: 0.998 at 0.8,
0.40 at 0.5. Those that agree are compared by their signatures, of each value the lowest 8 bits (Li & König
2010), which estimates s with a standard deviation of at most 0.05.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BANDS, BAND_VALUES = 16, 5
NUM_VALUES = BANDS * BAND_VALUES
SIMILARITY = 0.8
SHINGLE_BYTES = 8
#: Rows sorted at a time, and pairs compared at a time: what bounds the memory.
SORTED_ROWS = 1 << 22
COMPARED_PAIRS = 1 << 19
READ_ROWS = 1 << 16
#: Like no other row.
NONE = np.uint32(0xFFFFFFFF)

SENTENCE_MARKS = ".,;:?"

Pairs = tuple["NDArray[np.uint32]", "NDArray[np.uint32]"]


def normalise(texts: Sequence[str]) -> list[str]:
    """What counts of each question when two are compared; done on all in one string, which is faster."""
    if not texts:
        return []
    plain = [text if text.isascii() else unicodedata.normalize("NFKC", text) for text in texts]
    joined = " \0 ".join([text.replace("\0", " ") for text in plain]).casefold()
    joined = f" {' '.join(joined.split())} "
    for mark in SENTENCE_MARKS:
        joined = joined.replace(f"{mark} ", " ")
    while "  " in joined:
        joined = joined.replace("  ", " ")
    return [text.strip() for text in joined.split("\0")]


def text_key(text: str) -> int:
    """64 bits of a hash."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def repeated(keys: NDArray[np.uint64]) -> Pairs:
    """Places whose key occurred before, ascending, and the place of each one's first occurrence.

    Keys are (N,) hashes, evenly spread.
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
    """MinHash of texts: a hash per band (N, BANDS), and the values' lowest bits (N, NUM_VALUES)."""
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
    """Every 8 bytes of each text, scrambled, one text after the other; and where each one's begin."""
    width = SHINGLE_BYTES
    encoded = [text.encode().ljust(width, b"\0") for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    counts = lengths - width + 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    skipped = np.repeat(np.arange(len(texts)) * (width - 1), counts)
    content = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(content, width) if len(content) else content
    hashes = windows[np.arange(offsets[-1]) + skipped].view("<u8").ravel()
    hashes *= np.uint64(0x9E3779B97F4A7C15)  # the values are text: spread them over all 64 bits
    hashes ^= hashes >> np.uint64(32)
    return hashes, offsets.astype(np.uint64)


def nearly_repeated(bands: Sequence[Path], signature: Path, is_left: NDArray[np.bool_]) -> Pairs:
    """Rows much like an earlier one, ascending, and for each of them one that it is like.

    A row is compared with the first and the previous row of each band it shares, so that a thousand alike
    take a few thousand comparisons, not a million.

    A band's file holds (N,) uint32, the signatures' (N, NUM_VALUES) uint8; (N,) `is_left` says which rows to
    compare.
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
    """Pairs (later, earlier) of rows whose band is equal, where nothing is known of the later one.

    Keys are band and row in one number, ascending; `like`: what each row was found to be like.
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
    """Some rows of the file, read from its beginning to its end: a mapped file would count as memory."""
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
