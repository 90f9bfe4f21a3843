"""Transforms one block of input to rows and their keys: a pure function that runs in any process."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from rlctl.data.blocks import Block, Record, records_of, to_stream
from rlctl.data.recipes import Recipe
from rlctl.data.schema import EXTRA_COLUMNS, Row, batch_of
from rlctl.prepare.duplicates import BANDS, NUM_VALUES, normalise, signatures, text_key
from rlctl.prepare.lengths import PromptLengths
from rlctl.prepare.row_checks import Doubt, answer_doubts

#: Keys of each row: name → type. Each key has a separate file, so that only one at a time is in memory.
KEYS: dict[str, Any] = {
    "number": np.uint64,  # line or row in the input file
    "split": np.uint64,  # hash of the question and the seed
    "exact": np.uint64,  # hash of the normalised question
    "answer": np.uint32,  # hash of the ground truth
    "tokens": np.int32,  # length of the rendered prompt; -1 if not measured
    "is_cut": np.bool_,  # the prompt was truncated
}
BAND_KEYS: dict[str, Any] = {f"band-{band:02}": np.uint32 for band in range(BANDS)}
SIGNATURE = "signature"
NEAR_KEYS: dict[str, Any] = BAND_KEYS | {SIGNATURE: np.dtype((np.uint8, NUM_VALUES))}


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """Settings of `transform`; sent to each worker once."""

    recipe: Recipe  # resolved
    seed: int  # of the split
    find_near: bool  # compute the keys for the near-duplicate search
    lengths: PromptLengths | None = None  # measures prompts; None: prompts are not measured

    @property
    def keys(self) -> dict[str, Any]:
        """Names and types of the keys of each row."""
        return KEYS | (NEAR_KEYS if self.find_near else {})


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    number: int  # line or row in the input file
    reason: str  # why it cannot be used
    raw: str  # its text in the input


@dataclass(frozen=True, slots=True)
class Transformed:
    """The result of one block."""

    num_records: int  # input rows of the block
    #: usable rows, as an Arrow IPC stream of one batch; an index below 0 is the position in the block (−1:
    #: its first record)
    rows: bytes
    keys: dict[str, Any]  # an array for each of `TransformPlan.keys`
    bad: list[BadRow]  # unusable rows
    truths: list[tuple[str, str]]  # distinct (data source, ground truth) of the rows graded by rule
    truth_of: Any  # (rows,) index into `truths`; −1 for rows not graded by rule
    sources: Counter[str]  # rows per data source
    doubts: list[tuple[int, list[Doubt]]]  # row number and doubts, of rows with a doubtful answer
    num_bytes: int  # size of the usable rows in memory
    has_other: bool  # some rows have fields of `extra_info` without a separate column

    @property
    def num_rows(self) -> int:
        """Number of usable rows."""
        return len(self.keys["number"])


def transform(plan: TransformPlan, block: Block) -> Transformed:
    """Converts the rows of a block with the recipe, checks and measures them, and computes their keys.

    Raises:
        UsageError: the block's file has changed since the block was created.
    """
    # Thousands of objects are created and none is garbage: collection would take a fifth of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _transform(plan, block)
    finally:
        if was_enabled:
            gc.enable()


def _transform(plan: TransformPlan, block: Block) -> Transformed:
    bad: list[BadRow] = []
    rows: list[Row] = []
    records: list[Record] = []
    num_records, name = 0, Path(block.source)
    for record in records_of(block):
        num_records += 1
        row, problem = plan.recipe.read(record, name, -num_records)
        if row is None:
            bad.append(BadRow(record.number, problem, record.raw))
        else:
            rows.append(row)
            records.append(record)
    tokens, is_cut = [-1] * len(rows), [False] * len(rows)
    if plan.lengths is not None:
        measured = list(zip(records, rows, plan.lengths.measure(rows), strict=True))
        bad += [BadRow(record.number, one.problem, record.raw) for record, _, one in measured if one.problem]
        bad.sort(key=lambda row: row.number)
        fine = [each for each in measured if not each[2].problem]
        is_cut = [one.row is not row for _, row, one in fine]
        tokens = [one.num_tokens for _, _, one in fine]
        records, rows = [record for record, _, _ in fine], [one.row for _, _, one in fine]
    texts = normalise([row.question for row in rows])
    split = (blake2b(f"{plan.seed}\n{row.question}".encode(), digest_size=8).digest() for row in rows)
    found = {
        "number": [record.number for record in records],
        "split": [int.from_bytes(digest, "big") for digest in split],
        "exact": [text_key(text) for text in texts],
        "answer": [crc32(row.ground_truth.encode()) for row in rows],
        "tokens": tokens,
        "is_cut": is_cut,
    }
    keys = {name: np.array(values, dtype=KEYS[name]) for name, values in found.items()}
    if plan.find_near:
        bands, signature = signatures(texts)
        keys |= {name: bands[:, band] for band, name in enumerate(BAND_KEYS)} | {SIGNATURE: signature}
    truths: dict[tuple[str, str], int] = {}
    truth_of = [
        truths.setdefault((row.data_source, row.ground_truth), len(truths)) if row.style == "rule" else -1
        for row in rows
    ]
    batch = batch_of(rows)
    return Transformed(
        num_records=num_records,
        rows=to_stream(batch, compression="lz4"),
        keys=keys,
        bad=bad,
        truths=list(truths),
        truth_of=np.array(truth_of, dtype=np.int32),
        sources=Counter(row.data_source for row in rows),
        doubts=[
            (record.number, doubts)
            for record, row in zip(records, rows, strict=True)
            if (doubts := answer_doubts(row))
        ],
        num_bytes=batch.nbytes,
        has_other=any(row.extra.keys() - EXTRA_COLUMNS for row in rows),
    )
