"""Benchmarks with a name. A new one of rlctl needs only an entry in `benchmarks.toml`.

An installed package or a user's file adds one as a function that returns a `Benchmark`. An entry pins
everything that a result depends on: the data set's file at one commit of the hub, the prompt, and the grader.
`sha256` is the hash of the file at this commit, if known.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.prepare.recipes import LAYOUTS, Recipe
from rlctl.prepare.sources import HUB, Source, find_sources
from rlctl.registry import NAMED_BENCHMARKS
from rlctl.user_code import is_file_function

#: Environment variable that names a directory of benchmark files.
BENCHMARKS_VARIABLE = "RLCTL_BENCHMARKS"
_FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".csv", ".arrow")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark."""

    name: str  # the value for `--data` and `--against`
    dataset: str  # id of the data set on the Hugging Face hub; also the `data_source` of its rows
    revision: str  # commit of that repository
    file: str  # file with the questions, as a path in the repository
    num_questions: int  # rows of the file
    columns: tuple[str, ...]  # columns that its rows must have
    instruction: str  # follows the question after a newline
    sha256: str | None = None  # of the file; None: not known
    split: str = "test"  # of the data set
    recipe: str = "generic"  # how a record becomes a row, see `rlctl.prepare.recipes`
    grader: str = "maths"  # grades the responses
    #: prompt_key, answer_key: columns that the recipe reads; None: its defaults
    prompt_key: str | None = None
    answer_key: str | None = None

    def to_recipe(self) -> Recipe:
        """Returns the recipe that reads its rows."""
        keys = (self.prompt_key, self.answer_key)
        return Recipe(self.recipe, *keys, self.dataset, instruction=self.instruction).resolve()

    def download_command(self, directory: str) -> str:
        """Returns the command that downloads its file into a directory of benchmarks."""
        return (
            f"hf download {self.dataset} {self.file} --repo-type dataset --revision {self.revision} "
            f"--local-dir {directory}/{self.dataset} (on a machine with network; copy the directory here)"
        )


def _table() -> Iterator[tuple[str, Benchmark]]:
    text = Path(__file__).with_name("benchmarks.toml").read_text(encoding="utf-8")
    for name, entry in tomllib.loads(text).items():
        instruction = LAYOUTS[entry.get("recipe", "generic")].instruction or LAYOUTS["math"].instruction
        found = entry | {"columns": tuple(entry["columns"])}
        yield name, Benchmark(name, instruction=instruction, **found)


BENCHMARKS = dict(_table())


def all_benchmarks() -> dict[str, Benchmark]:
    """Name → benchmark: those of rlctl, and those of installed packages."""
    return {part.name: part.function() for part in NAMED_BENCHMARKS.parts()} | BENCHMARKS


def benchmark_named(name: str) -> Benchmark | None:
    """The benchmark of that name, or of a user's `file.py:function`; None: there is none.

    Raises:
        UsageError: the user's file, or the package, cannot be imported, or returns something else.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if not is_file_function(name) and name not in set(NAMED_BENCHMARKS):
        return None
    found = NAMED_BENCHMARKS[name]()
    if not isinstance(found, Benchmark):
        raise UsageError(f"it returned {type(found).__name__}, not a Benchmark", where=name)
    return found


def find_benchmark(benchmark: Benchmark, directory: Path | None = None) -> Path:
    """Returns the benchmark's file: in `directory` (or `$RLCTL_BENCHMARKS`) if given, else from the hub.

    The hub's file is the one at the pinned commit.

    Raises:
        EnvironmentFailure: the file is missing or cannot be downloaded; the message has the download command.
    """
    if directory is None and os.environ.get(BENCHMARKS_VARIABLE):
        directory = Path(os.environ[BENCHMARKS_VARIABLE])
    if directory is not None:
        pinned = directory / benchmark.dataset / benchmark.file
        others = [directory / f"{benchmark.name}{suffix}" for suffix in _FORMATS]
        place = next((path for path in [pinned, *others] if path.is_file()), None)
        if place is None:
            message = f"the benchmark {benchmark.name} is not in the directory of benchmarks"
            fix = benchmark.download_command(str(directory))
            raise EnvironmentFailure(message, where=str(pinned), fix=fix)
        return place
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            benchmark.dataset, benchmark.file, repo_type="dataset", revision=benchmark.revision
        )
    except Exception as error:  # network, cache and hub errors of several libraries: no common base class
        use = f"and set {BENCHMARKS_VARIABLE}=DIR (`rlctl evaluate` also takes --benchmarks-dir DIR)"
        message = f"the benchmark {benchmark.name} is not in the cache and could not be downloaded"
        raise EnvironmentFailure(
            f"{message}: {first_line(error)}",
            where=f"{benchmark.dataset}@{benchmark.revision[:12]}: {benchmark.file}",
            fix=f"{benchmark.download_command('DIR')}, {use}",
        ) from error
    return Path(path)


class NamedFile(NamedTuple):
    """A file to compare with: its name in reports, its source, and its recipe (None: recognised)."""

    name: str
    source: Source
    recipe: Recipe | None


def find_named(names: Sequence[str]) -> list[NamedFile]:
    """Finds the files of named benchmarks, and of names that `find_sources` accepts; `./gsm8k` is a file.

    Raises:
        UsageError, EnvironmentFailure: as `find_sources` and `find_benchmark`.
    """
    named_files = []
    for name in names:
        benchmark = benchmark_named(name)
        if benchmark:
            source = Source(find_benchmark(benchmark), benchmark.dataset)
            named_files.append(NamedFile(name, source, benchmark.to_recipe()))
        elif name.startswith(HUB) or Path(name).exists():
            named_files += [NamedFile(str(source.path), source, None) for source in find_sources([name])]
        else:
            fix = f"name a file, or a benchmark: {', '.join(all_benchmarks())}"
            raise UsageError("no such file or directory", where=f"--against {name}", fix=fix)
    return named_files
