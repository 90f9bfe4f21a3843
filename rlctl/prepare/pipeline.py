"""From any supported input to a directory of Parquet that training reads, in two passes.

    sources ─ blocks ─ transform(block) ─┬─ rows, staged on disk     ─┐
              (in workers, or on Ray)    ├─ keys of each row ─ decide ┴─ shards of train and test
                                         └─ bad rows ─ refused, or quarantine.jsonl

The first pass needs one block at a time; what needs all rows (duplicates, the split, leakage) is decided
over a few numbers per row. So memory holds some blocks, and one such number of every row at a time. Nothing
appears under the output's name before all of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlctl.data.benchmarks import find_named
from rlctl.data.recipes import Recipe, recognise
from rlctl.data.records import RowError, check_text
from rlctl.data.sources import Source, find_sources, read_records
from rlctl.data.write import clear_leftovers, staged_directory
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.decide import Decision, decide, limit_for_fraction
from rlctl.prepare.intake import take_in
from rlctl.prepare.leakage import find_leaks
from rlctl.prepare.lengths import PromptLengths, template_findings
from rlctl.prepare.manifest import (
    Manifest,
    check_replaceable,
    describe_inputs,
    describe_versions,
    read_manifest,
    sha256_of,
)
from rlctl.prepare.output import write_split
from rlctl.prepare.request import PrepareRequest, PrepareSummary, Progress
from rlctl.prepare.staging import Staging
from rlctl.prepare.transform import TransformPlan


def prepare(request: PrepareRequest, progress: Progress | None = None) -> PrepareSummary:
    """Write the Parquet files of both splits (`test` only where it has rows), `quarantine.jsonl` (if asked
    for) and `manifest.json` to `request.out`.

    Args:
        request: what to prepare.
        progress: receives phases and amounts.

    Larger inputs start processes of their own: a script that calls this needs
    `if __name__ == "__main__":`, as everywhere with `multiprocessing`.

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
    name = request.recipe
    if name == "auto":
        records = (record.values for source in sources for record in read_records(source))
        name = recognise(next((values for values in records if values), {}))
    keys = ("prompt_key", "answer_key", "data_source", "system_prompt", "instruction", "source_key")
    recipe = Recipe(name, **{key: getattr(request, key) for key in keys}).resolve()
    plan = TransformPlan(recipe, request.seed, request.near_duplicates != "off", _lengths(request))
    made_from = _made_from(request, plan, sources)
    clear_leftovers(request.out)
    existing = read_manifest(request.out)
    if existing and existing.made_from == made_from and existing.matches(request.out):
        return _summary(recipe, existing, unchanged=True)
    if not request.overwrite and request.out.is_dir() and any(request.out.iterdir()):
        raise UsageError(
            "the output directory is not empty, and holds other data than this run would write",
            where=str(request.out),
            fix="pass --overwrite to replace it, or choose another --out",
        )
    check_replaceable(request.out)
    with staged_directory(request.out) as stage:
        with Staging(stage, plan.keys) as staging:
            intake = take_in(request, plan, sources, staging, stage, progress)
            decision = decide(request, staging, intake.bad_places, progress)
            decision.findings += [*intake.findings, *_template_findings(plan, staging, decision)]
            if request.leakage != "off":
                find_leaks(request, staging, decision, progress)
            counts = decision.counts(staging.num_records, intake.num_bad)
            _check_split(counts)
            sides = {"train": ~decision.is_test, "test": decision.is_test}
            shards = {
                split: write_split(request, split, staging, decision.is_kept & is_in, stage, progress)
                for split, is_in in sides.items()
            }
        found = [finding.to_json() for finding in findings.worst_first(decision.findings)]
        outputs = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
        manifest = Manifest(made_from, counts, decision.report | {"findings": found}, shards, outputs)
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


def _lengths(request: PrepareRequest) -> PromptLengths | None:
    if request.model is not None:
        return PromptLengths(
            request.model,
            trust_remote_code=request.trust_remote_code,
            max_prompt_length=request.max_prompt_length,
            overlong=request.overlong,
        )
    if request.max_prompt_length is not None or request.overlong != "keep":
        raise UsageError(
            "prompts are measured with a model's tokenizer, and none is named",
            where="--max-prompt-length and --overlong",
            fix="name the model you will train with --model",
        )
    return None


def _made_from(request: PrepareRequest, plan: TransformPlan, sources: Sequence[Source]) -> dict[str, Any]:
    by_size = request.val_size is not None
    size = {"val_size": request.val_size} if by_size else {"val_fraction": request.val_fraction}
    policies = ("bad_rows", "duplicates", "near_duplicates", "leakage", "check_graders")
    limits = {"max_prompt_length": request.max_prompt_length, "overlong": request.overlong}
    return {
        "inputs": describe_inputs([source.path for source in sources]),
        "against": describe_inputs([file.source.path for file in find_named(request.against)]),
        "recipe": asdict(plan.recipe),
        "split": {"seed": request.seed, **size},
        "policies": {name: getattr(request, name) for name in policies},
        "lengths": plan.lengths and plan.lengths.describe() | limits,
        "output": {"to": request.to, "rows_per_shard": request.rows_per_shard},
        "versions": describe_versions(),
    }


def _template_findings(
    plan: TransformPlan, staging: Staging, decision: Decision
) -> list[findings.DataFinding]:
    if plan.lengths is None:
        return []
    found = template_findings(plan.lengths.renderer)
    if context := plan.lengths.context:
        beyond = np.flatnonzero(decision.is_kept & (staging.key("tokens") >= context))
        places = staging.places(beyond)
        found += findings.row_finding("beyond-context", len(beyond), places, context=context)
    return found


def _check_split(counts: dict[str, int]) -> None:
    if counts["train"]:
        return
    dropped = ", ".join(
        f"{name} {count}" for name, count in counts.items() if count and name not in {"input", "test"}
    )
    if counts["test"] and not dropped:
        raise UsageError(
            f"the split leaves no row to train on: all {counts['test']} went to the test split",
            fix="lower --val-fraction or --val-size",
        )
    what = f"no row is left to train on: {dropped} of {counts['input']}"
    raise UsageError(what, fix="drop less, or add data")


def _summary(recipe: Recipe, manifest: Manifest, *, unchanged: bool) -> PrepareSummary:
    return PrepareSummary(recipe.name, manifest.counts, manifest.report, manifest.splits, unchanged)
