"""Converts any supported input to a directory of Parquet files for training, in two passes.

    sources ─ blocks ─ transform(block) ─┬─ rows, staged on disk     ─┐
              (in worker processes)      ├─ keys of each row ─ decide ┴─ shards of train and test
                                         └─ bad rows ─ refused, or quarantine.jsonl

The first pass processes one block at a time. Decisions that need all rows (duplicates, the split, leakage)
use a few numbers per row (keys). Memory holds a few blocks, and one key of all rows at a time. The output
directory appears under its final name only when it is complete.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock

from rlctl.data.records import RowError, check_text
from rlctl.data.schema import EXTRA_COLUMNS
from rlctl.errors import UsageError
from rlctl.files import cache_failure, clear_leftovers, sha256_of, staged_directory
from rlctl.prepare.benchmarks import NamedFile, find_named
from rlctl.prepare.blocks import Block, Record, records_of
from rlctl.prepare.decide import RowStatus, decide, limit_for_fraction
from rlctl.prepare.engines import run
from rlctl.prepare.findings import (
    NO_ANSWER,
    DataFinding,
    RowFindings,
    TruthChecks,
    source_findings,
    worst_first,
)
from rlctl.prepare.lengths import PromptLengths
from rlctl.prepare.output import Manifest, check_replaceable, describe_inputs, read_manifest, write_split
from rlctl.prepare.recipes import LAYOUTS, Recipe, columns_read, names_column
from rlctl.prepare.request import PrepareRequest, PrepareSummary, Progress
from rlctl.prepare.sources import LEAVE_OUT, Source, find_sources, read_blocks, read_records
from rlctl.prepare.transform import Staging, Transformed, TransformPlan, transform
from rlctl.processes import few_collections
from rlctl.registry import DATA_RECIPES, source_sha256
from rlctl.reward.build import knows_source
from rlctl.track.run_dir import version_of

QUARANTINE = "quarantine.jsonl"
PROBLEMS_SHOWN = 5
#: Inputs up to this size are processed without worker processes.
SMALL_BYTES = 16 << 20


def prepare(request: PrepareRequest, progress: Progress | None = None) -> PrepareSummary:
    """Writes the prepared data set to `request.out`.

    Writes the Parquet files of both splits (`test` only if it has rows), `quarantine.jsonl` (if requested)
    and `manifest.json`. Larger inputs start worker processes, so a calling script needs
    `if __name__ == "__main__":`, as always with `multiprocessing`.

    Raises:
        UsageError: an input is missing or broken, rows are bad (the message gives file and row), too many
            rows are duplicates, rows leak and `leakage` is `refuse`, or the output directory contains other
            files.
        EnvironmentFailure: the output cannot be written, or an optional package is missing.
        RunFailure: a worker process died.
    """
    return _written(request, _plan(request), progress or Progress())


def prepare_cached(request: PrepareRequest, directory: Path) -> tuple[Path, PrepareSummary]:
    """As `prepare`, into a subdirectory named by the content; returns it. Processes wait for each other."""
    planned = _plan(request)
    digest = sha256(json.dumps(planned.made_from, sort_keys=True).encode()).hexdigest()[:16]
    stem = re.sub(r"\W+", "-", planned.sources[0].name)[:40]
    out = directory / f"{stem}-{digest}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{out}.lock"):
            return out, _written(replace(request, out=out), planned, Progress())
    except OSError as error:
        raise cache_failure(f"{request.sources[0]} cannot be cached", directory, error) from error


@dataclass(frozen=True, slots=True)
class _Planned:
    """A checked request: how its inputs are read, and all that its output depends on."""

    transform: TransformPlan
    sources: list[Source]
    against: list[NamedFile]
    made_from: dict[str, Any]


def _plan(request: PrepareRequest) -> _Planned:
    limit_for_fraction(request.val_fraction)
    sources = find_sources(request.sources)
    against = find_named(request.against)
    recipe = request.recipe or Recipe()
    options = (recipe.data_source, recipe.system_prompt, recipe.instruction)
    for text in [str(request.out), *(str(source.path) for source in sources), *filter(None, options)]:
        try:
            check_text(text)  # names and options are written to the output, which is UTF-8
        except RowError as error:
            raise UsageError(str(error), where=ascii(text), fix="rename it") from None
    plan = TransformPlan(recipe.resolve(sources), request.seed, _lengths(request))
    return _Planned(plan, sources, against, _made_from(request, plan, sources, against))


def _written(request: PrepareRequest, planned: _Planned, progress: Progress) -> PrepareSummary:
    plan = planned.transform
    sources = planned.sources
    against = planned.against
    recipe = plan.recipe
    made_from = planned.made_from
    clear_leftovers(request.out)
    existing = read_manifest(request.out)
    if existing and existing.made_from == made_from and existing.matches(request.out):
        return PrepareSummary(recipe.name, existing.counts, existing.report, existing.splits, unchanged=True)
    if not request.overwrite and request.out.is_dir() and any(request.out.iterdir()):
        raise UsageError(
            "the output directory is not empty, and contains other data than this run would write",
            where=str(request.out),
            fix="pass --overwrite to replace it, or choose another --out",
        )
    check_replaceable(request.out, [*sources, *(file.source for file in against)])
    with staged_directory(request.out) as stage:
        with Staging(stage) as staging, few_collections():
            placed, findings = _take_in(request, plan, sources, staging, stage, progress)
            decision = decide(request, plan.lengths, against, staging, placed, progress)
            counts = decision.counts(staging.num_records)
            columns = _columns(plan, sources, staging)
            _check_split(counts)
            sides = {"train": ~decision.is_test, "test": decision.is_test}
            shards = {
                split: write_split(request, split, staging, decision.is_kept & is_in, stage, progress)
                for split, is_in in sides.items()
            }
        reported = [
            asdict(finding) | {"examples": list(finding.examples)}
            for finding in worst_first([*decision.findings, *findings])
        ]
        outputs = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
        report = decision.report | {"columns": columns, "findings": reported}
        manifest = Manifest(
            made_from=made_from,
            counts=counts,
            report=report,
            splits=shards,
            outputs=outputs,
        )
        manifest.write(stage)
    return PrepareSummary(recipe.name, counts, manifest.report, shards, unchanged=False)


def _lengths(request: PrepareRequest) -> PromptLengths | None:
    if request.model is None:
        if request.max_prompt_length is None and request.overlong == "keep":
            return None
        raise UsageError(
            "prompts are measured with a model's tokenizer, and none is named",
            where="--max-prompt-length and --overlong",
            fix="name the model that you will train: --model",
        )
    if request.max_prompt_length is None and request.overlong != "keep":
        where = f"--overlong {request.overlong}"
        raise UsageError("no maximum length is given", where=where, fix="pass --max-prompt-length")
    return PromptLengths(
        request.model,
        trust_remote_code=request.trust_remote_code,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _made_from(
    request: PrepareRequest, plan: TransformPlan, sources: Sequence[Source], against: Sequence[NamedFile]
) -> dict[str, Any]:
    by_size = request.val_size is not None
    size = {"val_size": request.val_size} if by_size else {"val_fraction": request.val_fraction}
    policies = ("bad_rows", "duplicates", "near_duplicates", "leakage", "check_graders", "no_answer")
    packages = ["rlctl", "pyarrow", "math-verify", "rensa"]  # that the output depends on
    packages += ["transformers"] if plan.lengths else []
    name = plan.recipe.name
    sha256 = None if name in LAYOUTS else source_sha256(DATA_RECIPES[name])
    limits = {"max_prompt_length": request.max_prompt_length, "overlong": request.overlong}
    return {
        "inputs": describe_inputs(sources),
        "against": describe_inputs([file.source for file in against]),
        "recipe": asdict(plan.recipe) | ({"sha256": sha256} if sha256 else {}),
        "split": {"seed": request.seed, **size},
        "policies": {name: getattr(request, name) for name in policies},
        "lengths": plan.lengths and plan.lengths.describe() | limits,
        "rows_per_shard": request.rows_per_shard,
        "keeps_places": request.keeps_places,
        "versions": {package: version_of(package) or "unknown" for package in packages},
    }


def _check_split(counts: dict[str, int]) -> None:
    if counts["train"]:
        return
    dropped = ", ".join(
        f"{name} {count}" for name, count in counts.items() if count and name not in {"input", "test"}
    )
    if counts["test"] and not dropped:
        raise UsageError(
            f"the split leaves no training rows: all {counts['test']} went to the test split",
            fix="lower --val-fraction or --val-size",
        )
    message = f"no training rows remain: {dropped} of {counts['input']}"
    raise UsageError(message, fix="drop less, or add data")


def _take_in(
    request: PrepareRequest,
    plan: TransformPlan,
    sources: Sequence[Source],
    staging: Staging,
    stage: Path,
    progress: Progress,
) -> tuple[dict[RowStatus, list[int]], list[DataFinding]]:
    """First pass: transforms and stages all rows; refuses bad rows, or writes them to the quarantine.

    Returns the indices of staged rows that are bad or dropped, and findings about data sources without a
    grader, their ground truths that cannot be graded, and doubtful answers.
    """
    num_bytes = sum(source.num_bytes for source in sources)
    workers = request.num_workers if request.workers or num_bytes > SMALL_BYTES else 1
    findings = RowFindings()
    truths = TruthChecks()
    by_file: Counter[Path] = Counter()
    by_source: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    bad_places: list[int] = []
    dropped: list[int] = []
    missing: list[tuple[int, str]] = []  # rows without an answer, and where they are
    first_bad: list[str] = []
    progress.phase("reading", num_bytes)
    sets_aside = request.bad_rows == "quarantine"
    with (stage / QUARANTINE).open("w", encoding="utf-8") if sets_aside else nullcontext() as quarantine:
        blocks = (block for source in sources for block in read_blocks(source))
        for block, done in run(transform, plan, blocks, workers):
            failed = _grader_failures(truths, block, done, findings) if request.check_graders else {}
            bad_places += [staging.num_rows + index for index in failed]
            for bad in sorted([*done.bad, *failed.values()], key=lambda record: record.number):
                if len(first_bad) < PROBLEMS_SHOWN:
                    first_bad.append(f"{bad.where}: {bad.problem}")
                if quarantine is not None:
                    entry = {"file": str(bad.path), "row": bad.number, "reason": bad.problem, "raw": bad.raw}
                    quarantine.write(json.dumps(entry) + "\n")
            for index, placeholder in done.placeholders.items():
                row = staging.num_rows + index
                where = f"{block.path}:{done.keys['number'][index]}"
                if placeholder == NO_ANSWER:
                    missing.append((row, where))
                elif request.check_graders or request.no_answer == "drop":
                    dropped.append(row)
                    findings.add("placeholder-dropped", where, placeholder)
            staging.add(block, done)
            for number, doubts in done.doubts:
                for kind, detail in doubts:
                    findings.add(kind, f"{block.path}:{number}", detail)
            by_file[block.path] += done.num_records
            by_source.update(done.sources)
            numbers.update(done.numbers)
            progress.advance(block.num_bytes)
    staging.finish()
    empty = next((source.path for source in sources if not by_file[source.path]), None)
    if empty:
        raise UsageError("the file is empty: it has no rows", where=str(empty), fix=LEAVE_OUT)
    dropped += _without_answers(request, staging, missing, findings)
    num_bad = staging.num_records - staging.num_rows + len(bad_places)
    if num_bad + len(dropped) == staging.num_records or (num_bad and not sets_aside):
        raise _refusal(request, plan, sources, staging, first_bad, num_bad, len(dropped))
    unknown = source_findings(dict(sorted(by_source.items())), numbers)
    placed = {RowStatus.QUARANTINED: bad_places, RowStatus.PLACEHOLDERS_DROPPED: dropped}
    return placed, [*findings.findings(), *unknown]


def _without_answers(
    request: PrepareRequest, staging: Staging, missing: Sequence[tuple[int, str]], findings: RowFindings
) -> list[int]:
    """Rows to leave out because they have no answer; `missing`: index and place of all such rows.

    An input in which no row has an answer is one for rewards that read none.
    """
    if request.no_answer == "keep":
        return []
    is_without = len(missing) == staging.num_rows
    for _, where in missing:
        findings.add(
            "no-answers" if is_without else "placeholder-dropped", where, "" if is_without else NO_ANSWER
        )
    return [] if is_without else [row for row, _ in missing]


def _refusal(
    request: PrepareRequest,
    plan: TransformPlan,
    sources: Sequence[Source],
    staging: Staging,
    first_bad: Sequence[str],
    num_bad: int,
    num_dropped: int,
) -> UsageError:
    """The error for bad rows, or if no row is left."""
    fix = f"correct them, or pass --bad-rows quarantine to set them aside in {QUARANTINE}"
    if request.keeps_places:
        fix = f"correct them, or set them aside: `{_command(request)} --bad-rows quarantine`"
    is_column = not first_bad or any(map(names_column, first_bad))
    if num_bad + num_dropped == staging.num_records and is_column:
        recipe = plan.recipe
        keys = f"prompts were searched in {recipe.prompt_key!r}, answers in {recipe.answer_key!r}"
        fix = f"{keys} (recipe {recipe.name}): pass --prompt-key, --answer-key or --recipe"
        columns = next((record.values for record in read_records(sources[0]) if record.values), {})
        options = recipe.options_for(columns)
        if options:
            fix = f"{_command(request)} {options}"
    more = [f"and {num_bad - len(first_bad)} more"] if num_bad > len(first_bad) else []
    more += [f"{num_dropped} have no answer, or a placeholder"] if num_dropped else []
    shown = "".join(f"\n  {line}" for line in [*first_bad, *more])
    num_unusable = num_bad + num_dropped
    return UsageError(f"{num_unusable} of {staging.num_records} rows cannot be used:{shown}", fix=fix)


def _command(request: PrepareRequest) -> str:
    """The command that prepares the sources; the cache is no directory to name."""
    out = "DIR" if request.keeps_places else str(request.out)
    return shlex.join(["rlctl", "prepare-data", "parquet", *request.sources, "--out", out])


def _columns(plan: TransformPlan, sources: Sequence[Source], staging: Staging) -> dict[str, Any]:
    """Columns of prompt and answer in the first record, and what `extra_info` has besides: filled, empty."""
    records = (record.values for source in sources for record in read_records(source))
    prompt, answer = columns_read(plan.recipe, next(filter(None, records), {}))
    used = {*EXTRA_COLUMNS, prompt, answer}
    others = {name: has for name, has in staging.columns.items() if name not in used}
    return {
        "prompt": prompt,
        "answer": answer,
        "carried": [name for name, has in others.items() if has],
        "empty": [name for name, has in others.items() if not has],
    }


def _grader_failures(
    truths: TruthChecks, block: Block, done: Transformed, findings: RowFindings
) -> dict[int, Record]:
    """Rows of a block whose ground truth fails the check by their grader, by index among the usable rows.

    Only rows of data sources with a registered grader are bad. Other sources are checked with the mathematics
    grader, which may not be the one used in training; their failures are added to `found` instead.
    """
    asked = [(index, truth) for index, truth in enumerate(done.truths) if truth]
    reasons = truths.problems([truth for _, truth in asked])
    wrong: dict[int, tuple[int, str]] = {}  # number → place, reason
    for (index, (source, text)), reason in zip(asked, reasons, strict=True):
        number = int(done.keys["number"][index])
        missing = truths.missing(source)
        if missing:
            findings.add("answers-not-checked", f"{block.path}:{number}", package=missing.package)
        elif reason and knows_source(source):
            wrong[number] = (index, f"the ground truth cannot be graded: {reason}")
        elif reason:
            findings.add("ground-truth", f"{block.path}:{number}", f"{text[:60]!r}: {reason}")
    return {
        wrong[record.number][0]: record._replace(problem=wrong[record.number][1])
        for record in (records_of(block) if wrong else ())
        if record.number in wrong
    }
