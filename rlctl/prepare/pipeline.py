"""From any supported input to a directory of Parquet that training reads, in two passes.

    sources ─ blocks ─ transform(block) ─┬─ rows, staged on disk     ─┐
              (in workers, or on Ray)    ├─ keys of each row ─ decide ┴─ shards of train and test
                                         └─ bad rows ─ refused, or quarantine.jsonl

The first pass never needs to know more than a block; what needs to know all rows (duplicates, the split,
leakage) is decided over a few numbers per row. So memory holds some blocks, and one such number of every
row at a time. Nothing appears under the output's name before all of it is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlctl.data.checks import RowError, check_text
from rlctl.data.write import clear_leftovers, staged_directory
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.blocks import Block, records_of
from rlctl.prepare.decide import Decision, decide
from rlctl.prepare.engines import run
from rlctl.prepare.leaks import find_leaks
from rlctl.prepare.manifest import (
    Manifest,
    check_replaceable,
    describe_inputs,
    describe_versions,
    read_manifest,
    sha256_of,
)
from rlctl.prepare.output import write_split
from rlctl.prepare.progress import Progress
from rlctl.prepare.recipes import Recipe, recognise
from rlctl.prepare.request import PrepareRequest, PrepareSummary
from rlctl.prepare.sources import Source, find_sources, read_blocks, read_records
from rlctl.prepare.split import limit_for_fraction
from rlctl.prepare.staging import Staging
from rlctl.prepare.transform import BadRow, Plan, Transformed, transform

QUARANTINE = "quarantine.jsonl"
PROBLEMS_SHOWN = 5
#: Inputs up to this size are not worth processes of their own.
SMALL_BYTES = 16 << 20


class BadRows:
    """Counts rows that cannot be used, remembers the first few, and sets all aside where asked to."""

    def __init__(self, quarantine: IO[str] | None = None) -> None:
        self._quarantine = quarantine
        self.count = 0
        self.first: list[str] = []

    def add(self, path: Path, row: BadRow) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < PROBLEMS_SHOWN:
            self.first.append(f"{path}:{row.number}: {row.reason}")
        if self._quarantine is not None:
            entry = {"file": str(path), "row": row.number, "reason": row.reason, "raw": row.raw}
            self._quarantine.write(json.dumps(entry) + "\n")

    def error(self, num_rows: int, fix: str) -> UsageError:
        """All of it as one error."""
        more = [f"and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        lines = "".join(f"\n  {line}" for line in [*self.first, *more])
        return UsageError(f"{self.count} of {num_rows} rows cannot be used:{lines}", fix=fix)


def prepare(request: PrepareRequest, progress: Progress | None = None) -> PrepareSummary:
    """Write the Parquet files of both splits (`test` only where it has rows), `quarantine.jsonl` (if asked
    for) and `manifest.json` to `request.out`.

    Args:
        request: what to prepare.
        progress: told of what is going on.

    Raises:
        UsageError: an input is missing or broken, rows are bad (file and row are named), too many are
            duplicates or leak, or the output directory holds something else.
        EnvironmentFailure: the output cannot be written, or an optional package is missing.
        RunFailure: a worker process died.
    """
    progress = progress or Progress()
    limit_for_fraction(request.val_fraction)
    sources = find_sources(request.sources)
    _check_names(request, sources)
    recipe = _recipe(request, sources)
    plan = Plan(recipe, request.seed, request.near_duplicates != "off", _lengths(request))
    made_from = _made_from(request, plan, sources)
    clear_leftovers(request.out)
    existing = read_manifest(request.out)
    if existing and existing.made_from == made_from and existing.matches(request.out):
        return _summary(recipe, existing, unchanged=True)
    _check_output(request)
    with staged_directory(request.out) as stage:
        with Staging(stage, plan.keys) as staging:
            bad, spoiled, sources_seen = _transform_all(request, plan, sources, staging, stage, progress)
            decision = decide(request, staging, spoiled, progress)
            decision.findings += _source_findings(sources_seen) + _template_findings(plan, staging, decision)
            if request.leakage != "off":
                find_leaks(request, staging, decision, progress)
            counts = decision.counts(staging.num_records, bad.count - len(spoiled))
            _check_split(counts)
            shards = _write(request, staging, decision, stage, progress)
        manifest = _manifest(made_from, counts, decision, shards, stage)
        manifest.write(stage)
    return _summary(recipe, manifest, unchanged=False)


def _check_names(request: PrepareRequest, sources: Sequence[Source]) -> None:
    """Names and options end up in the output, which is UTF-8."""
    options = (request.data_source, request.system_prompt, request.instruction)
    for text in [str(request.out), *(str(source.path) for source in sources), *filter(None, options)]:
        try:
            check_text(text)
        except RowError as error:
            raise UsageError(str(error), where=ascii(text), fix="rename it") from None


def _recipe(request: PrepareRequest, sources: Sequence[Source]) -> Recipe:
    name = request.recipe
    if name == "auto":
        records = (record.values for source in sources for record in read_records(source))
        name = recognise(next((values for values in records if values), {}))
    return Recipe(
        name,
        request.prompt_key,
        request.answer_key,
        request.data_source,
        request.system_prompt,
        request.instruction,
        request.source_key,
    ).resolve()


def _lengths(request: PrepareRequest) -> Any:
    if request.model is None:
        if request.max_prompt_length is not None or request.overlong != "keep":
            raise UsageError(
                "prompts are measured with a model's tokenizer, and none is named",
                where="--max-prompt-length and --overlong",
                fix="name the model you will train with --model",
            )
        return None
    from rlctl.prepare.lengths import PromptLengths

    return PromptLengths(
        request.model,
        trust_remote_code=request.trust_remote_code,
        max_prompt_length=request.max_prompt_length,
        overlong=request.overlong,
    )


def _made_from(request: PrepareRequest, plan: Plan, sources: Sequence[Source]) -> dict[str, Any]:
    by_size = request.val_size is not None
    size = {"val_size": request.val_size} if by_size else {"val_fraction": request.val_fraction}
    policies = ("bad_rows", "duplicates", "near_duplicates", "leakage", "check_graders")
    return {
        "inputs": describe_inputs([source.path for source in sources]),
        "against": describe_inputs([source.path for source in find_sources(request.against)]),
        "recipe": asdict(plan.recipe),
        "split": {"seed": request.seed, **size},
        "policies": {name: getattr(request, name) for name in policies},
        "lengths": plan.lengths
        and {
            **plan.lengths.describe(),
            "max_prompt_length": request.max_prompt_length,
            "overlong": request.overlong,
        },
        "output": {"to": request.to, "rows_per_shard": request.rows_per_shard},
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


def _transform_all(
    request: PrepareRequest,
    plan: Plan,
    sources: Sequence[Source],
    staging: Staging,
    stage: Path,
    progress: Progress,
) -> tuple[BadRows, list[int], Counter[str]]:
    """The first pass.

    Returns:
        The bad rows, places of staged rows that are among them, and rows per data source.
    """
    num_bytes = sum(source.path.stat().st_size for source in sources)
    workers = request.num_workers if request.workers or num_bytes > SMALL_BYTES else 1
    spoiled: list[int] = []
    by_source: Counter[str] = Counter()
    by_file: Counter[Path] = Counter()
    progress.phase("reading", num_bytes)
    with ExitStack() as stack:
        quarantine: IO[str] | None = None
        if request.bad_rows == "quarantine":
            quarantine = stack.enter_context((stage / QUARANTINE).open("w", encoding="utf-8"))
        bad = BadRows(quarantine)
        blocks = (block for source in sources for block in read_blocks(source))
        for block, done in run(request.engine, transform, plan, blocks, workers):
            failed = _ungradable(block, done) if request.check_graders else {}
            spoiled += [staging.num_rows + place for place in failed]
            for row in sorted([*done.bad, *failed.values()], key=lambda row: row.number):
                bad.add(block.path, row)
            staging.add(block, done)
            by_source.update(done.sources)
            by_file[block.path] += done.num_records
            progress.advance(block.num_bytes, done.num_records)
    staging.finish()
    empty = next((source.path for source in sources if not by_file[source.path]), None)
    if empty:
        raise UsageError("the file is empty: it has no rows", where=str(empty))
    all_bad = bad.count == staging.num_records
    if all_bad or (bad.count and quarantine is None):
        raise bad.error(staging.num_records, _fix_for(plan.recipe, all_bad=all_bad))
    return bad, spoiled, by_source


def _ungradable(block: Block, done: Transformed) -> dict[int, BadRow]:
    """Rows whose own grader does not give their ground truth 1: place among the rows → the bad row."""
    from rlctl.reward.round_trip import check_ground_truths

    reasons = check_ground_truths(done.truths)
    wrong = [place for place, truth in enumerate(done.truth_of) if truth >= 0 and reasons[truth]]
    if not wrong:
        return {}
    numbers = done.keys["number"]
    places = {int(numbers[place]): place for place in wrong}
    return {
        places[record.number]: BadRow(
            record.number,
            f"grader(ground truth) is not 1: {reasons[done.truth_of[places[record.number]]]}",
            record.raw,
        )
        for record in records_of(block)
        if record.number in places
    }


def _fix_for(recipe: Recipe, *, all_bad: bool) -> str:
    if all_bad:
        keys = f"prompts were looked for in {recipe.prompt_key!r}, answers in {recipe.answer_key!r}"
        return f"{keys} (recipe {recipe.name}): say --prompt-key, --answer-key or --recipe"
    return f"mend them, or pass --bad-rows quarantine to set them aside in {QUARANTINE}"


def _source_findings(by_source: Counter[str]) -> list[findings.Finding]:
    from rlctl.reward.graders import knows_source

    return [
        findings.unknown_source(name, count)
        for name, count in sorted(by_source.items())
        if not knows_source(name)
    ]


def _template_findings(plan: Plan, staging: Staging, decision: Decision) -> list[findings.Finding]:
    if plan.lengths is None:
        return []
    from rlctl.prepare.tokenizer import template_findings

    found = template_findings(plan.lengths.renderer)
    context = plan.lengths.context
    if context is not None:
        beyond = np.flatnonzero(decision.is_kept & (staging.key("tokens") >= context))
        places = [staging.where(int(row)) for row in beyond[: findings.EXAMPLES_SHOWN]]
        found += findings.beyond_context(len(beyond), context, places)
    return found


def _check_split(counts: dict[str, int]) -> None:
    if counts["train"]:
        return
    if counts["test"]:
        raise UsageError(
            f"the split leaves no row to train on: all {counts['test']} went to the test split",
            fix="lower --val-fraction or --val-size",
        )
    dropped = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    raise UsageError(f"no row is left: {dropped}", fix="drop less")


def _write(
    request: PrepareRequest, staging: Staging, decision: Decision, stage: Path, progress: Progress
) -> dict[str, list[str]]:
    sides = {"train": ~decision.is_test, "test": decision.is_test}
    return {
        split: write_split(
            split,
            staging,
            decision.is_kept & is_in,
            stage,
            to=request.to,
            rows_per_shard=request.rows_per_shard,
            workers=request.num_workers,
            progress=progress,
        )
        for split, is_in in sides.items()
    }


def _manifest(
    made_from: dict[str, Any],
    counts: dict[str, int],
    decision: Decision,
    shards: dict[str, list[str]],
    stage: Path,
) -> Manifest:
    report = decision.report | {
        "findings": [finding.to_json() for finding in findings.worst_first(decision.findings)]
    }
    outputs = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
    return Manifest(made_from, counts, report, shards, outputs)


def _summary(recipe: Recipe, manifest: Manifest, *, unchanged: bool) -> PrepareSummary:
    return PrepareSummary(recipe.name, manifest.counts, manifest.report, manifest.splits, unchanged)
