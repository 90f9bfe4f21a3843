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
        """A phase begins.

        Args:
            name: of the phase.
            total: what `advance` will add up to.
        """

    def advance(self, amount: int, rows: int = 0) -> None:
        """Part of the phase is done.

        Args:
            amount: bytes of input while reading, rows in the other phases.
            rows: rows among it, where `amount` is bytes.
        """


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What to prepare; the recipe's fields are explained at `Recipe`.

    Attributes:
        sources: files, directories, or `hf:organisation/name[:split]`.
        out: the directory to write.
        val_fraction: share of the rows that goes to the test split, in [0, 1).
        val_size: number of test rows instead.
        seed: of the split.
        overwrite: replace an earlier output.
        bad_rows: `refuse` the whole input, or `quarantine` the rows and go on.
        duplicates: rows that ask what an earlier row asked: `check` counts them, and refuses more than
            `decide.MAX_DUPLICATES` of the rows; `keep` counts them; `drop` leaves them out.
        near_duplicates: rows much like an earlier row: `count`, `drop`, or `off` (not looked for).
        against: benchmarks by name, and files of any readable format, that must not be trained on.
        leakage: training rows that occur in the test split or in `against`: `report` counts them, `drop`
            leaves them out, `refuse` refuses the input, `off` does not look for them.
        model: whose tokenizer and chat template measure the prompts; None: they are not measured.
        max_prompt_length: tokens a prompt may have; None: any number.
        overlong: longer prompts: `keep`, `drop`, or cut tokens of the question on the `left` or `right`.
        trust_remote_code: the model's tokenizer may run code of its own.
        check_graders: each ground truth must be graded right by its own grader, or the row is bad.
        rows_per_shard: rows of one output file.
        to: columns of the output, for this framework.
        engine: `local` processes, or `ray` (Ray Data, on one machine or many).
        workers: local processes; None: as many as there are cores, none at all for a small input.
    """

    sources: tuple[str, ...]
    out: Path
    recipe: RecipeName | Literal["auto"] = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None
    data_source: str | None = None
    system_prompt: str | None = None
    instruction: str | None = None
    source_key: str | None = None
    val_fraction: float = 0.05
    val_size: int | None = None
    seed: int = 1
    overwrite: bool = False
    bad_rows: Literal["refuse", "quarantine"] = "refuse"
    duplicates: Literal["check", "keep", "drop"] = "check"
    near_duplicates: Literal["count", "drop", "off"] = "count"
    against: tuple[str, ...] = ()
    leakage: Literal["report", "drop", "refuse", "off"] = "report"
    model: str | None = None
    max_prompt_length: int | None = None
    overlong: Literal["keep", "drop", "cut-left", "cut-right"] = "keep"
    trust_remote_code: bool = False
    check_graders: bool = True
    rows_per_shard: int = 1_000_000
    to: Literal["verl", "trl", "openrlhf"] = "verl"
    engine: Literal["local", "ray"] = "local"
    workers: int | None = None

    @property
    def num_workers(self) -> int:
        """Processes it may use."""
        return self.workers if self.workers is not None else len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class PrepareSummary:
    """What was done.

    Attributes:
        recipe: the one used, after `auto`.
        counts: rows by status; see `decide.RowStatus` and docs/how-to/data.md.
        report: the rest of what the manifest says: near duplicates, leakage, lengths, findings.
        outputs: names of the Parquet files, per split.
        unchanged: the output was already there, byte for byte, and was left alone.
    """

    recipe: RecipeName
    counts: Mapping[str, int]
    report: Mapping[str, Any]
    outputs: Mapping[str, list[str]]
    unchanged: bool
