"""`--data`: benchmarks by name, prepared Parquet, and any file that `prepare-data` reads. No torch."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rlctl.data.checks import RowError
from rlctl.data.hub import HUB
from rlctl.data.layouts import RecipeName
from rlctl.data.read import load_rows
from rlctl.data.recipes import Recipe, recognise
from rlctl.data.schema import Row
from rlctl.data.sources import Source, check_splits, find_sources, read_records
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.evaluate.benchmark_table import BENCHMARKS, Benchmark
from rlctl.spec.paths import matches

#: Environment variable that names a directory of benchmark files.
BENCHMARKS_VARIABLE = "RLCTL_BENCHMARKS"
_PROBLEMS_SHOWN = 5
_FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".arrow")


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked.

    Attributes:
        rows: prompts with ground truths, in the order of `--data`.
        files: what they were read from.
        benchmarks: entries of the table with the file read and its SHA-256; JSON-able.
        notes: what the user should know.
    """

    rows: list[Row]
    files: list[str]
    benchmarks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Columns:
    """How files of other layouts than verl's are read; None: recognised by the first row.

    Attributes:
        recipe: the column layout.
        prompt_key, answer_key, data_source, instruction: as in `Recipe`.
    """

    recipe: RecipeName | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    data_source: str | None = None
    instruction: str | None = None


def load_questions(
    names: Sequence[str], columns: Columns | None = None, *, benchmarks_dir: Path | None = None
) -> Questions:
    """The questions of every name in `names`: a benchmark, or files.

    Args:
        names: as `--data` gives them. A benchmark's name wins over a file of that name; `./gsm8k` is a file.
        columns: of files that are not in verl's row schema.
        benchmarks_dir: where benchmark files lie; None: `$RLCTL_BENCHMARKS`, else the hub and its cache.

    Raises:
        UsageError: a file is missing, broken or empty, a row does not fit, or a benchmark's file is
            not the one it should be.
        EnvironmentFailure: a benchmark is neither in the directory nor on a hub that answers; says what to
            download and where to put it.
    """
    columns = columns or Columns()
    found = Questions([], [])
    for name in names:
        if name in BENCHMARKS:
            _add_benchmark(found, BENCHMARKS[name], benchmarks_dir)
        elif columns == Columns() and _is_prepared(name):
            found.rows.extend(load_rows([name]))
            found.files.append(name)
        else:
            for source in _sources(name):
                found.rows.extend(_read_rows(source, columns))
                found.files.append(str(source.path))
    return found


def find_benchmark(benchmark: Benchmark, directory: Path | None = None) -> Path:
    """The benchmark's file: in `directory` (or `$RLCTL_BENCHMARKS`), else from the hub at the pinned commit.

    Raises:
        EnvironmentFailure: it is not there; says what to download and where to put it.
    """
    if directory is None and os.environ.get(BENCHMARKS_VARIABLE):
        directory = Path(os.environ[BENCHMARKS_VARIABLE])
    if directory is not None:
        pinned = directory / benchmark.dataset / benchmark.file
        others = [directory / f"{benchmark.name}{suffix}" for suffix in _FORMATS]
        place = next((path for path in [pinned, *others] if path.is_file()), None)
        if place is None:
            what = f"the benchmark {benchmark.name} is not in the directory of benchmarks"
            raise EnvironmentFailure(what, where=str(pinned), fix=_download(benchmark, str(directory)))
        return place
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            benchmark.dataset, benchmark.file, repo_type="dataset", revision=benchmark.revision
        )
    except Exception as error:  # network, cache and hub errors of several libraries, with no common base
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EnvironmentFailure(
            f"the benchmark {benchmark.name} is not in the cache, and the hub did not give it: {reason}",
            where=f"{benchmark.dataset}@{benchmark.revision[:12]}: {benchmark.file}",
            fix=_download(benchmark, "DIR")
            + f", and pass --benchmarks-dir DIR (or set {BENCHMARKS_VARIABLE})",
        ) from error
    return Path(path)


def _download(benchmark: Benchmark, directory: str) -> str:
    return (
        f"hf download {benchmark.dataset} {benchmark.file} --repo-type dataset "
        f"--revision {benchmark.revision} --local-dir {directory}/{benchmark.dataset}"
        " (on a machine with network; copy the directory here)"
    )


def _add_benchmark(found: Questions, benchmark: Benchmark, directory: Path | None) -> None:
    path = find_benchmark(benchmark, directory)
    source = Source(path, benchmark.dataset)
    _check_columns(benchmark, source)
    recipe = Recipe(
        benchmark.recipe,
        prompt_key=benchmark.prompt_key,
        answer_key=benchmark.answer_key,
        data_source=benchmark.dataset,
        instruction=benchmark.instruction,
    ).resolve()
    rows = list(_rows(source, recipe))
    if len(rows) != benchmark.num_questions:
        raise UsageError(
            f"{benchmark.name} has {benchmark.num_questions:,} questions, this file has {len(rows):,}",
            where=str(path),
            fix=_download(benchmark, "DIR"),
        )
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if benchmark.sha256 and sha256 != benchmark.sha256:
        found.notes.append(
            f"{benchmark.name}: {path.name} is not byte for byte the file of the pinned revision; "
            f"its columns and its {len(rows):,} rows fit"
        )
    found.rows.extend(rows)
    found.files.append(str(path))
    found.benchmarks.append(asdict(benchmark) | {"sha256": sha256, "sha256_pinned": benchmark.sha256})


def _check_columns(benchmark: Benchmark, source: Source) -> None:
    first: Mapping[str, Any] = next(
        (record.values for record in islice(read_records(source), 1) if record.values), {}
    )
    missing = [name for name in benchmark.columns if name not in first]
    if missing:
        raise UsageError(
            f"not the file of {benchmark.name}: no column {', '.join(missing)} (it has {', '.join(first)})",
            where=str(source.path),
            fix=_download(benchmark, "DIR"),
        )


def _is_prepared(name: str) -> bool:
    """Whether a name stands for Parquet in verl's row schema, files or directories of them.

    Raises:
        UsageError: nothing is there.
    """
    if name.startswith(HUB):
        return False
    paths = matches(name)
    if not paths:
        close = difflib.get_close_matches(name.lower(), BENCHMARKS, n=1)
        meant = f"did you mean `{close[0]}`? Else " if close else ""
        fix = f"{meant}name a file, or a benchmark: {', '.join(BENCHMARKS)}"
        raise UsageError("no such file or directory", where=f"--data {name}", fix=fix)
    inside: list[Path] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
        check_splits(path, files)
        inside += files
    return bool(inside) and all(_has_row_schema(file) for file in inside)


def _has_row_schema(file: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix.lower() != ".parquet":
        return False
    try:
        names = pq.read_schema(file).names
    except (pa.ArrowException, OSError):
        return True  # `load_rows` says what is wrong with it
    return "reward_model" in names or {"data_source", "prompt"} <= set(names)


def _sources(name: str) -> list[Source]:
    return find_sources([name] if name.startswith(HUB) else [str(path) for path in matches(name)])


def _read_rows(source: Source, columns: Columns) -> Iterator[Row]:
    """The rows of a file of any layout.

    Raises:
        UsageError: rows do not fit; names the first few.
    """
    first = next((record.values for record in read_records(source) if record.values), {})
    recipe = Recipe(
        columns.recipe or recognise(first),
        prompt_key=columns.prompt_key,
        answer_key=columns.answer_key,
        data_source=columns.data_source,
        instruction=columns.instruction,
    )
    return _rows(source, recipe.resolve())


def _rows(source: Source, recipe: Recipe) -> Iterator[Row]:
    problems: list[str] = []
    num_bad = num_rows = 0
    for num_rows, record in enumerate(read_records(source), 1):
        try:
            if record.values is None:
                raise RowError(record.problem)
            yield replace(recipe.to_row(record.values, Path(source.name), num_rows - 1), where=record.where)
        except RowError as problem:
            num_bad += 1
            if len(problems) < _PROBLEMS_SHOWN:
                problems.append(f"{record.where}: {problem}")
    if num_bad:
        more = [f"and {num_bad - len(problems)} more"] if num_bad > len(problems) else []
        lines = "".join(f"\n  {line}" for line in [*problems, *more])
        raise UsageError(
            f"{num_bad} of {num_rows} rows cannot be used:{lines}",
            where=str(source.path),
            fix=f"they were read by the recipe {recipe.name}: pass --recipe, --prompt-key or --answer-key, "
            "or remove them (`rlctl prepare-data` sets bad rows aside)",
        )
