"""From any supported input to a directory of Parquet that training reads.

    sources ─ records ─ recipe ─ rows ─┬─ train.parquet
                   │                   └─ test.parquet
                   └ bad rows ─ refused, or quarantine.jsonl

Memory holds one batch of rows. Nothing appears under the output's name before all of it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rlctl.data.checks import RowError, check_text
from rlctl.data.schema import Row
from rlctl.data.write import RowWriter, clear_leftovers, staged_directory
from rlctl.errors import UsageError
from rlctl.prepare.manifest import (
    Manifest,
    check_replaceable,
    describe_inputs,
    describe_versions,
    read_manifest,
    sha256_of,
)
from rlctl.prepare.recipes import Recipe, RecipeName, recognise
from rlctl.prepare.sources import Advance, Record, find_sources, read_records
from rlctl.prepare.split import limit_for_fraction, limit_for_size, row_hash

TRAIN, TEST, QUARANTINE = "train.parquet", "test.parquet", "quarantine.jsonl"
PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """What to prepare; the recipe's fields are explained at `Recipe`.

    Attributes:
        sources: files or directories.
        out: the directory to write.
        val_fraction: share of the rows that goes to the test split, in [0, 1).
        val_size: number of test rows instead.
        seed: of the split.
        overwrite: replace an earlier output.
        bad_rows: `refuse` the whole input, or `quarantine` the rows and go on.
    """

    sources: tuple[str, ...]
    out: Path
    recipe: Literal["auto", "gsm8k", "generic"] = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None
    data_source: str | None = None
    system_prompt: str | None = None
    instruction: str | None = None
    val_fraction: float = 0.05
    val_size: int | None = None
    seed: int = 1
    overwrite: bool = False
    bad_rows: Literal["refuse", "quarantine"] = "refuse"


@dataclass(frozen=True, slots=True)
class PrepareSummary:
    """What was done.

    Attributes:
        recipe: the one used, after `auto`.
        counts: `input`, `train`, `test`, `quarantined` rows.
        unchanged: the output was already there, byte for byte, and was left alone.
    """

    recipe: RecipeName
    counts: dict[str, int]
    unchanged: bool


class BadRows:
    """Counts rows that cannot be used, remembers the first few, and sets all aside where asked to."""

    def __init__(self, quarantine: IO[str] | None = None) -> None:
        self._quarantine = quarantine
        self.count = 0
        self.first: list[str] = []

    def add(self, record: Record, reason: str) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < PROBLEMS_SHOWN:
            self.first.append(f"{record.where}: {reason}")
        if self._quarantine is not None:
            raw = record.raw or json.dumps(record.values, default=str)
            entry = {"file": str(record.path), "row": record.number, "reason": reason, "raw": raw}
            self._quarantine.write(json.dumps(entry) + "\n")

    def error(self, num_rows: int, fix: str) -> UsageError:
        """All of it as one error."""
        more = [f"and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        lines = "".join(f"\n  {line}" for line in [*self.first, *more])
        return UsageError(f"{self.count} of {num_rows} rows cannot be used:{lines}", fix=fix)


def prepare(request: PrepareRequest, advance: Advance = lambda _: None) -> PrepareSummary:
    """Write `train.parquet`, `test.parquet` (where it has rows), `quarantine.jsonl` (if asked for) and
    `manifest.json` to `request.out`.

    Args:
        request: what to prepare.
        advance: told how many bytes of input have been read since it was last called.

    Raises:
        UsageError: an input is missing or broken, rows are bad (file and row are named), or the output
            directory holds something else.
        EnvironmentFailure: the output cannot be written.
    """
    paths = find_sources(request.sources)
    _check_names(request, paths)
    recipe = _recipe(request, paths)
    made_from = _made_from(request, recipe, paths)
    clear_leftovers(request.out)
    existing = read_manifest(request.out)
    if existing and existing.made_from == made_from and existing.matches(request.out):
        return PrepareSummary(recipe.name, dict(existing.counts), unchanged=True)
    _check_output(request)
    limit = _test_limit(request, recipe, paths, advance)
    with staged_directory(request.out) as stage:
        counts = _write_splits(request, recipe, paths, limit, stage, advance)
        outputs = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
        Manifest(made_from, counts, outputs).write(stage)
    return PrepareSummary(recipe.name, counts, unchanged=False)


def bytes_to_read(request: PrepareRequest) -> int:
    """What `prepare` will tell `advance` in all: a test split of a given size takes a second pass."""
    total = sum(path.stat().st_size for path in find_sources(request.sources))
    return total if request.val_size is None else 2 * total


def _check_names(request: PrepareRequest, paths: Sequence[Path]) -> None:
    """Names and options end up in the output, which is UTF-8."""
    options = (request.data_source, request.system_prompt, request.instruction)
    for text in [*map(str, (request.out, *paths)), *filter(None, options)]:
        try:
            check_text(text)
        except RowError as error:
            raise UsageError(str(error), where=ascii(text), fix="rename it") from None


def _recipe(request: PrepareRequest, paths: Sequence[Path]) -> Recipe:
    name = request.recipe
    if name == "auto":
        records = (record.values for path in paths for record in read_records(path))
        name = recognise(next((values for values in records if values), {}))
    return Recipe(
        name,
        request.prompt_key,
        request.answer_key,
        request.data_source,
        request.system_prompt,
        request.instruction,
    ).resolve()


def _made_from(request: PrepareRequest, recipe: Recipe, paths: Sequence[Path]) -> dict[str, Any]:
    by_size = request.val_size is not None
    size = {"val_size": request.val_size} if by_size else {"val_fraction": request.val_fraction}
    return {
        "inputs": describe_inputs(paths),
        "recipe": asdict(recipe),
        "split": {"seed": request.seed, **size},
        "bad_rows": request.bad_rows,
        "versions": describe_versions(),
    }


def _check_output(request: PrepareRequest) -> None:
    out = request.out
    if not request.overwrite and out.is_dir() and any(out.iterdir()):
        raise UsageError(
            "the output directory is not empty, and holds other data than this run would write",
            where=str(out),
            fix="pass --overwrite to replace it, or choose another --out",
        )
    check_replaceable(out)


def _rows(recipe: Recipe, paths: Sequence[Path], bad: BadRows, advance: Advance) -> Iterator[Row]:
    index = -1
    for path in paths:
        for record in read_records(path, advance):
            index += 1
            if record.values is None:
                bad.add(record, record.problem)
                continue
            try:
                yield recipe.to_row(record.values, path, index)
            except RowError as error:
                bad.add(record, str(error))


def _test_limit(request: PrepareRequest, recipe: Recipe, paths: Sequence[Path], advance: Advance) -> int:
    if request.val_size is None:
        return limit_for_fraction(request.val_fraction)
    rows = _rows(recipe, paths, BadRows(), advance)
    return limit_for_size((row_hash(row.question, request.seed) for row in rows), request.val_size)


def _write_splits(
    request: PrepareRequest, recipe: Recipe, paths: Sequence[Path], limit: int, stage: Path, advance: Advance
) -> dict[str, int]:
    with ExitStack() as stack:
        quarantine: IO[str] | None = None
        if request.bad_rows == "quarantine":
            quarantine = stack.enter_context((stage / QUARANTINE).open("w", encoding="utf-8"))
        bad = BadRows(quarantine)
        train = stack.enter_context(RowWriter(stage / TRAIN, "train"))
        test = stack.enter_context(RowWriter(stage / TEST, "test"))
        for row in _rows(recipe, paths, bad, advance):
            (test if row_hash(row.question, request.seed) < limit else train).add(row)
        num_rows = train.num_rows + test.num_rows + bad.count
        all_bad = bad.count == num_rows
        if all_bad or (bad.count and quarantine is None):
            raise bad.error(num_rows, _fix_for(recipe, all_bad=all_bad))
    if train.num_rows == 0:
        raise UsageError(
            f"the split leaves no row to train on: all {test.num_rows} went to the test split",
            fix="lower --val-fraction or --val-size",
        )
    return {"input": num_rows, "train": train.num_rows, "test": test.num_rows, "quarantined": bad.count}


def _fix_for(recipe: Recipe, *, all_bad: bool) -> str:
    if all_bad:
        keys = f"prompts were looked for in {recipe.prompt_key!r}, answers in {recipe.answer_key!r}"
        return f"{keys} (recipe {recipe.name}): say --prompt-key, --answer-key or --recipe"
    return f"mend them, or pass --bad-rows quarantine to set them aside in {QUARANTINE}"
