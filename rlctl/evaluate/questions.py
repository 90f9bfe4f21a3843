"""`--data`: benchmarks by name, prepared Parquet, and any file that `prepare-data` reads. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlctl.data.read import load_rows
from rlctl.data.schema import Row
from rlctl.errors import UsageError
from rlctl.files import matches, sha256_of
from rlctl.prepare.benchmarks import Benchmark, all_benchmarks, benchmark_named, find_benchmark
from rlctl.prepare.data_files import hub_name, is_prepared
from rlctl.prepare.findings import placeholder_notes
from rlctl.prepare.recipes import Recipe, names_column, read_rows
from rlctl.prepare.sources import Source, find_sources, read_records
from rlctl.run_spec.keys import closest

_PROBLEMS_SHOWN = 5
AUTO = Recipe()


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of an evaluation."""

    rows: list[Row]  # prompts with ground truths, in the order of `--data`
    files: list[str]  # the files read
    #: the `Benchmark` fields of each benchmark and the SHA-256 of its file; JSON-serializable
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages for the user


def load_questions(
    names: Sequence[str],
    columns: Recipe = AUTO,
    *,
    benchmarks_dir: Path | None = None,
    continue_final_message: bool = False,
) -> Questions:
    """Loads the questions of benchmarks and files.

    Args:
        names: values of `--data`. A benchmark name takes precedence over a file of that name; `./gsm8k` is a
            file.
        columns: how to read files that are not in verl's row schema.
        benchmarks_dir: directory of benchmark files; None: `$RLCTL_BENCHMARKS`, else the hub and its cache.
        continue_final_message: as `data.continue_final_message` of a run.

    Raises:
        UsageError: a file is missing, broken or empty, a row cannot be used, or the file of a benchmark does
            not have the expected columns or number of rows.
        EnvironmentFailure: a benchmark is not in the directory, and the hub cannot be reached; the fix names
            the file to download and where to put it.
    """
    questions = Questions([], [])
    for name in names:
        benchmark = benchmark_named(name)
        if benchmark:
            _add_benchmark(questions, benchmark, benchmarks_dir)
        elif columns == AUTO and hub_name(name) is None and _is_prepared(name):
            questions.rows.extend(load_rows([name], continue_final_message=continue_final_message))
            questions.files.append(name)
        else:
            hub = hub_name(name)
            for source in find_sources([hub] if hub else list(map(str, matches(name)))):
                recipe = replace(columns.resolve([source]), continue_final_message=continue_final_message)
                questions.rows.extend(_rows(source, recipe))
                questions.files.append(str(source.path))
    questions.notes.extend(placeholder_notes({"the data": questions.rows}))
    return questions


def _add_benchmark(questions: Questions, benchmark: Benchmark, directory: Path | None) -> None:
    path = find_benchmark(benchmark, directory)
    source = Source(path, benchmark.dataset)
    first = next(read_records(source)).values or {}
    fix = benchmark.download_command("DIR")
    missing = [name for name in benchmark.columns if name not in first]
    if missing:
        message = f"no column {', '.join(missing)} (it has {', '.join(first)})"
        raise UsageError(f"not the file of {benchmark.name}: {message}", where=str(path), fix=fix)
    rows = _rows(source, benchmark.to_recipe())
    if len(rows) != benchmark.num_questions:
        message = f"{benchmark.name} has {benchmark.num_questions:,} questions, this file has {len(rows):,}"
        raise UsageError(message, where=str(path), fix=fix)
    sha256 = sha256_of(path)
    if benchmark.sha256 and sha256 != benchmark.sha256:
        questions.notes.append(
            f"{benchmark.name}: {path.name} is not byte for byte the file of the pinned revision; "
            f"its columns and its {len(rows):,} rows fit"
        )
    questions.rows.extend(rows)
    questions.files.append(str(path))
    questions.benchmarks.append(asdict(benchmark) | {"sha256": sha256, "sha256_pinned": benchmark.sha256})


def _is_prepared(name: str) -> bool:
    """Whether a name refers only to Parquet files in verl's row schema, or directories of them."""
    paths = matches(name)
    if not paths:
        nearest = closest(name.lower(), all_benchmarks())
        meant = f"did you mean `{nearest}`? Else " if nearest else ""
        fix = f"{meant}name a file, or a benchmark: {', '.join(all_benchmarks())}"
        raise UsageError("no such file or directory", where=f"--data {name}", fix=fix)
    return all(map(is_prepared, paths))


def _rows(source: Source, recipe: Recipe) -> list[Row]:
    """Reads the rows of a file with a recipe; raises a UsageError if any row cannot be used."""
    read = list(read_rows(source, recipe))
    problems = [f"{record.where}: {problem}" for record, row, problem in read if row is None]
    if problems:
        shown = problems[:_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        lines = "".join(f"\n  {line}" for line in shown)
        by_recipe = (
            f"they were read by the recipe {recipe.name}: pass --recipe, --prompt-key or --answer-key, or "
        )
        fix = "remove them (`rlctl prepare-data` can quarantine bad rows)"
        raise UsageError(
            f"{len(problems)} of {len(read)} rows cannot be used:{lines}",
            where=str(source.path),
            fix=f"{by_recipe}or {fix}" if any(map(names_column, problems)) else fix,
        )
    return [replace(row, extra=row.stored_extra) for _, row, _ in read if row is not None]
