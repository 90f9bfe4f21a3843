"""Decides which rows to keep or drop, and the split, from the keys and questions of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.extras import install_line, is_installed
from rlctl.prepare.benchmarks import NamedFile
from rlctl.prepare.duplicates import (
    ID_COLUMNS,
    nearly_repeated,
    normalise,
    repeated,
    row_keys,
    with_answers,
)
from rlctl.prepare.engines import run
from rlctl.prepare.findings import DataFinding, agree, lines, row_finding, rows, share
from rlctl.prepare.leakage import KINDS, Found, Reference, leakage_comparison, questions_of, scan
from rlctl.prepare.lengths import LengthQuantiles, PromptLengths, template_findings
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.transform import Staging

#: Share of rows that may repeat earlier ones before `--duplicates check` refuses the input.
MAX_DUPLICATES = 0.05
TEST = "the test split"
#: Up to this many rows are compared with held-out questions in this process.
LOCAL_ROWS = 20_000
#: Blocks, spread evenly, whose training questions show the instructions.
SAMPLED_BLOCKS = 8


class RowStatus(IntEnum):
    """Whether a staged row is kept, or why not. The manifest counts dropped rows under these names."""

    KEPT = 0
    QUARANTINED = 1
    OVERLONG_DROPPED = 2
    DUPLICATES_DROPPED = 3
    NEAR_DUPLICATES_DROPPED = 4
    LEAKED_DROPPED = 5
    PLACEHOLDERS_DROPPED = 6


@dataclass(slots=True)
class Decision:
    """Decisions about all staged rows; later steps update it in place."""

    status: NDArray[np.uint8]  # (rows,) `RowStatus` of each row
    is_test: NDArray[np.bool_]  # (rows,) rows of the test split
    is_split_by_row: bool = False  # all prompts are the same: rows are split, and not compared by prompts
    report: dict[str, Any] = field(default_factory=dict)  # statistics for the manifest
    findings: list[DataFinding] = field(default_factory=list)  # findings to report to the user

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """(rows,) rows not dropped or quarantined so far."""
        return np.asarray(self.status == RowStatus.KEPT)

    def counts(self, num_records: int) -> dict[str, int]:
        """Number of rows per status; input rows that were not staged are bad."""
        of = np.bincount(self.status, minlength=len(RowStatus))
        num_test = int((self.is_kept & self.is_test).sum())
        counts = {
            "input": num_records,
            "train": int(of[RowStatus.KEPT]) - num_test,
            "test": num_test,
            "quarantined": num_records - len(self.status) + int(of[RowStatus.QUARANTINED]),
        }
        return counts | {status.name.lower(): int(of[status]) for status in RowStatus if status > 1}


def decide(
    request: PrepareRequest,
    lengths: PromptLengths | None,
    against: Sequence[NamedFile],
    staging: Staging,
    placed: Mapping[RowStatus, Sequence[int]],
    progress: Progress,
) -> Decision:
    """Decides on lengths, duplicates, the split, and rows that occur in held-out data.

    `placed`: rows with a known status. `lengths` measured the prompts; the files of `against` contain
    held-out questions.

    Raises:
        UsageError: too many duplicates, a file of `against` cannot be read, or rows leak and
            `request.leakage` is `refuse`.
    """
    decision = Decision(np.zeros(staging.num_rows, np.uint8), np.zeros(staging.num_rows, np.bool_))
    for status, of_status in placed.items():
        decision.status[list(of_status)] = status
    if lengths is not None:
        _lengths(request, staging, decision)
    progress.phase("duplicates", 0)
    _duplicates(request, staging, decision)
    if request.near_duplicates == "count" and not is_installed("rensa"):
        decision.findings.append(_not_searched(decision))
    elif request.near_duplicates != "off":
        progress.phase("near duplicates", 0)
        _near_duplicates(request, staging, decision)
    prompts = staging.key("split")[decision.is_kept]
    decision.is_split_by_row = len(prompts) > 1 and bool((prompts == prompts[0]).all())
    _split(request, staging, decision)
    if request.leakage != "off":
        _leaks(request, against, staging, decision, progress)
    if lengths is not None:
        measured = LengthQuantiles("tokens")
        tokens = staging.key("tokens")
        measured.add(tokens[decision.is_kept].tolist())
        decision.report["lengths"] |= measured.to_json()
        decision.findings += template_findings(lengths.renderer)
        context = lengths.context
        if context:
            beyond = np.flatnonzero(decision.is_kept & (tokens >= context))
            places = staging.places(beyond)
            decision.findings += row_finding("beyond-context", len(beyond), places, context=context)
    return decision


def _split(request: PrepareRequest, staging: Staging, decision: Decision) -> None:
    """Assigns rows to the test split by hashes of their prompts, so that no prompt is in both splits.

    Where all prompts are the same, by hashes of the rows.
    """
    keys = staging.key("split")
    if decision.is_split_by_row:
        keys = _row_keys(staging, np.arange(len(keys)))
    if request.val_size is None:
        limit = limit_for_fraction(request.val_fraction)
        decision.is_test = keys < np.uint64(limit)
        return
    here = np.flatnonzero(decision.is_kept)
    is_test = nearest_groups(keys[here], request.val_size)
    decision.is_test[here[is_test]] = True
    count = int(is_test.sum())
    if count != min(request.val_size, len(here)):
        decision.findings += row_finding("split-size", count or len(here), wanted=request.val_size)


def nearest_groups(keys: NDArray[np.uint64], size: int) -> NDArray[np.bool_]:
    """Chooses whole groups of equal keys (N,), as near to `size` rows as the order of the keys allows.

    Groups are taken in ascending order of their keys if they fit. If rows are still missing, the smallest
    group left is taken where that is nearer. So without repeated keys the `size` lowest ones are chosen.
    """
    _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    num_whole = int(np.searchsorted(ends, size, side="right"))  # the first groups that fit together
    is_chosen = np.zeros(len(counts), np.bool_)
    is_chosen[:num_whole] = True
    missing = size - (int(ends[num_whole - 1]) if num_whole else 0)
    for index in range(num_whole, len(counts)):
        if not missing:
            break
        if counts[index] <= missing:
            is_chosen[index] = True
            missing -= int(counts[index])
    left = np.flatnonzero(~is_chosen)
    if missing and len(left):
        smallest = left[np.argmin(counts[left])]
        is_nearer = counts[smallest] - missing < missing
        is_none = not is_chosen.any() and len(counts) > 1  # a test split was asked for
        is_chosen[smallest] = is_nearer or is_none
    return np.asarray(is_chosen[group])


def _row_keys(staging: Staging, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys of these rows, see `duplicates.row_keys`."""
    ids = [staging.key(name)[rows] for name in ID_COLUMNS]
    return row_keys(staging.key("exact")[rows], staging.key("columns")[rows], ids)


def _lengths(request: PrepareRequest, staging: Staging, decision: Decision) -> None:
    tokens = staging.key("tokens")
    limit = request.max_prompt_length
    over = np.flatnonzero(decision.is_kept & (tokens > (np.inf if limit is None else limit)))
    kind = "overlong"
    if request.overlong == "drop":
        decision.status[over] = RowStatus.OVERLONG_DROPPED
        kind = "overlong-dropped"
    decision.findings += row_finding(kind, len(over), staging.places(over), limit=limit, unit="tokens")
    decision.report["lengths"] = {"overlong": len(over)}


def _duplicates(request: PrepareRequest, staging: Staging, decision: Decision) -> None:
    here = np.flatnonzero(decision.is_kept)
    split = staging.key("split")
    answers = staging.key("answer")
    keys = _row_keys(staging, here)
    of_question = repeated(keys)
    is_other = answers[here[of_question[0]]] != answers[here[of_question[1]]]
    disputing, disputed_rows = (here[rows][is_other] for rows in of_question)
    num_disputed = int(is_other.sum())
    pairs = repeated(with_answers(keys, answers[here]))
    later = here[pairs[0]]
    first = here[pairs[1]]
    decision.report["duplicates"] = {
        "rows": len(later),
        "word_for_word": int((split[later] == split[first]).sum()),
        "conflicting": num_disputed,
    }
    examples = _pair_examples(staging, later, first, "repeats")
    if request.duplicates == "check" and len(later) > MAX_DUPLICATES * len(here):
        raise UsageError(
            f"{share(len(later), len(here), 'repeat')} an earlier row, more than {MAX_DUPLICATES:.0%}:"
            + "".join(f"\n  {line}" for line in examples),
            fix="pass --duplicates drop to keep the first of each, or --duplicates keep to keep them all",
        )
    disputed = _pair_examples(staging, disputing, disputed_rows, "and")
    decision.findings += row_finding("conflicting-answers", num_disputed, disputed)
    if request.duplicates == "drop":
        decision.status[later] = RowStatus.DUPLICATES_DROPPED
    else:
        decision.findings += row_finding("duplicates", len(later), examples, total=len(here))


def _near_duplicates(request: PrepareRequest, staging: Staging, decision: Decision) -> None:
    is_left = decision.is_kept
    num_rows = int(is_left.sum())
    here = np.flatnonzero(is_left)
    is_left[here[repeated(staging.key("exact")[here])[0]]] = False  # exact repetitions are counted elsewhere
    later, first = nearly_repeated(
        (block.first_row + int(place), normalise(question))
        for block in staging.blocks
        for place, question in zip(
            np.flatnonzero(is_left[block.rows]), block.questions(is_left[block.rows]), strict=True
        )
    )
    decision.report["near_duplicates"] = {"rows": len(later)}
    if request.near_duplicates == "drop":
        decision.status[later] = RowStatus.NEAR_DUPLICATES_DROPPED
    else:
        examples = _pair_examples(staging, later, first, "is like")
        decision.findings += row_finding("near-duplicates", len(later), examples, total=num_rows)


def _not_searched(decision: Decision) -> DataFinding:
    """What the report says where the package that finds near duplicates is missing."""
    message = "near duplicates were not searched: the package rensa is not installed"
    count = int(decision.is_kept.sum())
    return DataFinding("near-duplicates-not-searched", "info", message, count, fix=install_line("formats"))


def _pair_examples(staging: Staging, later: Any, earlier: Any, words: str) -> list[str]:
    pairs = zip(staging.places(later), staging.places(earlier), strict=True)
    return [f"{row} {words} {other}" for row, other in pairs]


def limit_for_fraction(fraction: float) -> int:
    """Upper limit of the split hash of test rows; rows whose hash is below it are test rows.

    Raises:
        UsageError: the fraction is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        message = f"{fraction:g} is not a fraction of the rows"
        raise UsageError(message, where="--val-fraction", fix="use at least 0 and less than 1")
    return int(fraction * (1 << 64))


def _leaks(
    request: PrepareRequest,
    against: Sequence[NamedFile],
    staging: Staging,
    decision: Decision,
    progress: Progress,
) -> None:
    """Compares training rows with the test split and `against`; reports, drops or refuses matches.

    Test rows are also compared with `against`, but matches are only reported because test rows are
    not used for training.
    """
    splits = {"train": decision.is_kept & ~decision.is_test, "test": decision.is_kept & decision.is_test}
    is_compared = decision.is_kept if against else splits["train"]
    progress.phase("leakage", int(is_compared.sum()))
    benchmarks = [(file.name, questions_of(file)) for file in against]
    sampled = np.zeros_like(is_compared)
    for block in staging.blocks[:: 1 + len(staging.blocks) // SAMPLED_BLOCKS]:
        sampled[block.rows] = splits["train"][block.rows]
    own_test = [] if decision.is_split_by_row else [(TEST, staging.questions(splits["test"]))]
    held_out = [*own_test, *benchmarks]
    reference = Reference(held_out, staging.questions(sampled))
    tasks = ((block, is_compared[block.rows]) for block in staging.blocks if is_compared[block.rows].any())
    workers = request.num_workers if request.workers or is_compared.sum() > LOCAL_ROWS else 1
    leaks = dict[str, Found](train={}, test={})
    for (block, wanted), matches in run(scan, reference, tasks, workers):
        for (file, kind), places in matches.items():
            rows_found = block.first_row + np.array(places)
            for split, is_in in splits.items():
                if (split, file) != ("test", TEST):
                    rows_in = rows_found[is_in[rows_found]].tolist()
                    leaks[split].setdefault((file, kind), []).extend(rows_in)
        progress.advance(int(wanted.sum()))
    leaked = np.unique(np.array([row for rows_in in leaks["train"].values() for row in rows_in], np.int64))
    by_file: dict[str, dict[str, int]] = {}
    for (file, kind), rows_in in sorted(leaks["train"].items()):
        if rows_in:
            by_file.setdefault(file, {})[kind] = len(rows_in)
    decision.report["leakage"] = {"rows": len(leaked), "by_file": by_file}
    decision.report["leakage_checks"] = [
        leakage_comparison(
            split, file, int(is_in.sum()), {kind: len(leaks[split].get((file, kind), ())) for kind in KINDS}
        )
        for split, is_in in splits.items()
        for file in reference.names
        if is_in.any() and (split, file) != ("test", TEST)
    ]
    decision.findings += _leak_findings(staging, leaks["test"], "test-leak")
    reported = _leak_findings(staging, leaks["train"], "leak")
    if len(leaked) and request.leakage == "refuse":
        message = f"{rows(len(leaked))} of the training data {agree(len(leaked), 'occur')} in held-out data:"
        shown = "".join(f"\n  {line}" for line in lines(reported))
        raise UsageError(f"{message}{shown}", fix="pass --leakage drop to leave them out")
    if request.leakage == "drop":
        decision.status[leaked] = RowStatus.LEAKED_DROPPED
    else:
        decision.findings += reported


def _leak_findings(staging: Staging, found: Found, code: str) -> list[DataFinding]:
    result = []
    for (file, kind), places in sorted(found.items(), key=lambda item: KINDS.index(item[0][1])):
        examples = staging.places(sorted(places))
        result += row_finding(f"{code}-{kind}", len(places), examples, file=file)
    return result
