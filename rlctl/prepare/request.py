"""Request, progress callbacks and summary of `prepare`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlctl.prepare.recipes import Recipe

BadRows = Literal["refuse", "quarantine"]
Duplicates = Literal["check", "keep", "drop"]
NearDuplicates = Literal["count", "drop", "off"]
Leakage = Literal["report", "drop", "refuse", "off"]
Overlong = Literal["keep", "drop"]
NoAnswer = Literal["drop", "keep"]


class Progress:
    """Progress in phases; `show` gets what is done, all that is to do (None: not known), and the phase."""

    def __init__(self, show: Callable[..., object] = lambda *_: None) -> None:
        self._show = show

    def phase(self, name: str, total: int) -> None:
        """Starts a phase. The amounts passed to `advance` sum to `total`: bytes while reading, else rows."""
        self._name = name
        self._total = total
        self._done = 0
        self.advance(0)

    def advance(self, amount: int) -> None:
        """A part is done."""
        self._done += amount
        self._show(self._done, self._total or None, self._name)


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Input, output and options of a preparation; docs/how-to/data.md describes the options."""

    sources: tuple[str, ...]  # files, directories, or `hf:organisation/name[:split]`
    out: Path  # the directory to write
    recipe: Recipe | None = None  # how to read the rows, not resolved; None: recognised by the first row
    val_fraction: float = 0.05  # share of the rows for the test split, in [0, 1)
    val_size: int | None = None  # number of test rows; replaces `val_fraction`
    seed: int = 1  # of the split
    overwrite: bool = False  # replace an earlier output
    bad_rows: BadRows = "refuse"  # what to do with unusable rows
    duplicates: Duplicates = "check"  # with rows that repeat an earlier question
    near_duplicates: NearDuplicates = "count"  # with rows that nearly repeat one
    against: tuple[str, ...] = ()  # benchmarks by name, and files, whose questions must not be trained on
    leakage: Leakage = "report"  # with training rows that occur in the test split or in `against`
    #: model whose tokenizer and chat template measure the prompts; None: prompts are not measured
    model: str | None = None
    max_prompt_length: int | None = None  # in tokens; None: no maximum
    overlong: Overlong = "keep"  # what to do with longer prompts
    trust_remote_code: bool = False  # allow custom code of the model's tokenizer
    #: arguments of the model's chat template, as `data.chat_template_kwargs` in training
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    check_graders: bool = True  # check each ground truth with the grader of its data source
    #: rows without an answer or with a placeholder: `drop` keeps them if no row of the input has an answer
    no_answer: NoAnswer = "drop"
    #: the Parquet files have a column with the `file:row` of each row, for messages
    keeps_places: bool = False
    rows_per_shard: int = 1_000_000  # maximum rows of one output file
    workers: int | None = None  # local processes; None: one per core, none for a small input

    @property
    def num_workers(self) -> int:
        """Maximum number of local processes."""
        return self.workers if self.workers is not None else len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class PrepareSummary:
    """Result of a preparation."""

    recipe: str  # name of the recipe used, with `auto` resolved
    counts: Mapping[str, int]  # rows by status; see `decide.RowStatus` and docs/how-to/data.md
    #: `Manifest.report`: duplicates, near duplicates, leakage, lengths, findings
    report: Mapping[str, Any]
    outputs: Mapping[str, list[str]]  # names of the Parquet files, per split
    unchanged: bool  # the same output already existed and was not rewritten
