"""The request to `prepare`, its progress and its summary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlctl.data.recipes import RecipeName


class Progress:
    """Receives the progress of a preparation; this one ignores it."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins. `advance` will add up to `total`."""

    def advance(self, amount: int, rows: int = 0) -> None:
        """Part of the phase is done.

        In bytes of input while reading, which held so many rows; in rows in the other phases.
        """


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What to prepare; the recipe's fields are explained at `Recipe`."""

    sources: tuple[str, ...]  # files, directories, or `hf:organisation/name[:split]`
    out: Path  # the directory to write
    recipe: RecipeName | Literal["auto"] = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None
    data_source: str | None = None
    system_prompt: str | None = None
    instruction: str | None = None
    source_key: str | None = None
    val_fraction: float = 0.05  # share of the rows that goes to the test split, in [0, 1)
    val_size: int | None = None  # number of test rows instead
    seed: int = 1  # of the split
    overwrite: bool = False  # replace an earlier output
    #: `refuse` the whole input, or `quarantine` the rows and go on
    bad_rows: Literal["refuse", "quarantine"] = "refuse"
    #: rows that ask what an earlier row asked: `check` counts them, and refuses more than
    #: `decide.MAX_DUPLICATES` of the rows; `keep` counts them; `drop` leaves them out
    duplicates: Literal["check", "keep", "drop"] = "check"
    #: rows much like an earlier row: `count`, `drop`, or `off` (not looked for)
    near_duplicates: Literal["count", "drop", "off"] = "count"
    #: benchmarks by name, and files of any readable format, that must not be trained on
    against: tuple[str, ...] = ()
    #: training rows that occur in the test split or in `against`: `report` counts them, `drop` leaves them
    #: out, `refuse` refuses the input, `off` does not look for them
    leakage: Literal["report", "drop", "refuse", "off"] = "report"
    #: whose tokenizer and chat template measure the prompts; None: they are not measured
    model: str | None = None
    max_prompt_length: int | None = None  # tokens a prompt may have; None: any number
    #: longer prompts: `keep`, `drop`, or cut tokens of the question on the `left` or `right`
    overlong: Literal["keep", "drop", "cut-left", "cut-right"] = "keep"
    trust_remote_code: bool = False  # the model's tokenizer may run code of its own
    check_graders: bool = True  # each ground truth must be graded right by its own grader, or the row is bad
    rows_per_shard: int = 1_000_000  # rows of one output file
    to: Literal["verl", "trl", "openrlhf"] = "verl"  # columns of the output, for this framework
    #: `local` processes, or `ray` (Ray Data, on one machine or many)
    engine: Literal["local", "ray"] = "local"
    #: local processes; None: as many as there are cores, none at all for a small input
    workers: int | None = None

    @property
    def num_workers(self) -> int:
        """Processes it may use."""
        return self.workers if self.workers is not None else len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class PrepareSummary:
    """What was done."""

    recipe: RecipeName  # the one used, after `auto`
    counts: Mapping[str, int]  # rows by status; see `decide.RowStatus` and docs/how-to/data.md
    #: the rest of what the manifest says: near duplicates, leakage, lengths, findings
    report: Mapping[str, Any]
    outputs: Mapping[str, list[str]]  # names of the Parquet files, per split
    unchanged: bool  # the output was already there, byte for byte, and was left alone
