"""Benchmarks with a name. A new one needs only an entry in the table here.

An entry pins everything that a result depends on: the data set's file at one commit of the hub, the prompt,
and the grader. `sha256` is the hash of the file at this commit, if known.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.prepare.recipe_names import RecipeName
from rlctl.prepare.recipes import BOX_INSTRUCTION, GSM8K_INSTRUCTION, LETTER_INSTRUCTION, Recipe
from rlctl.prepare.sources import HUB, Source, find_sources

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
    sha256: str | None = None  # of the file; None: not known
    split: str = "test"  # of the data set
    columns: tuple[str, ...] = ("problem", "answer")  # columns that its rows must have
    recipe: RecipeName = "generic"  # how a row becomes a row, see `rlctl.prepare.recipes`
    instruction: str = BOX_INSTRUCTION  # follows the question after a newline
    grader: str = "maths"  # grades the responses
    #: prompt_key, answer_key: columns that the recipe reads; None: its defaults
    prompt_key: str | None = "problem"
    answer_key: str | None = "answer"

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


_OWN_KEYS: dict[str, Any] = {"prompt_key": None, "answer_key": None}
_CHOICE: dict[str, Any] = _OWN_KEYS | {
    "recipe": "multiple-choice",
    "instruction": LETTER_INSTRUCTION,
    "grader": "multiple_choice",
}
_TABLE = [
    Benchmark(
        "gsm8k",
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "main/test-00000-of-00001.parquet",
        1319,
        columns=("question", "answer"),
        recipe="gsm8k",
        instruction=GSM8K_INSTRUCTION,
        **_OWN_KEYS,
    ),
    Benchmark(
        "math500",
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        "test.jsonl",
        500,
        "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    ),
    Benchmark(
        "aime24",
        "HuggingFaceH4/aime_2024",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        "data/train-00000-of-00001.parquet",
        30,
        "26139847601a5037c237d5928b195e7260ca8074cf4f264b794af42847f79ccf",
        split="train",
    ),
    Benchmark(
        "aime25",
        "math-ai/aime25",
        "563bb8404243c5f09de6ec262f2db674fe5bce9b",
        "test.jsonl",
        30,
        "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
    ),
    Benchmark(
        "amc23",
        "math-ai/amc23",
        "80815d37005feb82cd7f8fbc6901d5d3eff43057",
        "test-00000-of-00001.parquet",
        40,
        "b696e87ba47be4e879a60fd4ef1d4aa522ba78c5ae013c6aff5cc9788a397c5e",
        columns=("question", "answer"),
        prompt_key="question",
    ),
    Benchmark(
        "mmlu",
        "cais/mmlu",
        "c30699e8356da336a370243923dbaf21066bb9fe",
        "all/test-00000-of-00001.parquet",
        14042,
        "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
        columns=("question", "choices", "answer"),
        **_CHOICE,
    ),
    Benchmark(
        "mmlu-pro",
        "TIGER-Lab/MMLU-Pro",
        "b189ec765aa7ed75c8acfea42df31fdae71f97be",
        "data/test-00000-of-00001.parquet",
        12032,
        "0e24a191921c2f453518a537a8b2117bd137e7714d4ef1565e9ba06c1ecb9ad8",
        columns=("question", "options", "answer"),
        **_CHOICE,
    ),
    Benchmark(
        "arc-challenge",
        "allenai/ai2_arc",
        "210d026faf9955653af8916fad021475a3f00453",
        "ARC-Challenge/test-00000-of-00001.parquet",
        1172,
        columns=("question", "choices", "answerKey"),
        **_CHOICE,
    ),
]
BENCHMARKS = {benchmark.name: benchmark for benchmark in _TABLE}


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
            what = f"the benchmark {benchmark.name} is not in the directory of benchmarks"
            fix = benchmark.download_command(str(directory))
            raise EnvironmentFailure(what, where=str(pinned), fix=fix)
        return place
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(
            benchmark.dataset, benchmark.file, repo_type="dataset", revision=benchmark.revision
        )
    except Exception as error:  # network, cache and hub errors of several libraries: no common base class
        use = f"and set {BENCHMARKS_VARIABLE}=DIR (`rlctl evaluate` also takes --benchmarks-dir DIR)"
        what = f"the benchmark {benchmark.name} is not in the cache and could not be downloaded"
        raise EnvironmentFailure(
            f"{what}: {first_line(error)}",
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
    found = []
    for name in names:
        if benchmark := BENCHMARKS.get(name):
            source = Source(find_benchmark(benchmark), benchmark.dataset)
            found.append(NamedFile(name, source, benchmark.to_recipe()))
        elif name.startswith(HUB) or Path(name).exists():
            found += [NamedFile(str(source.path), source, None) for source in find_sources([name])]
        else:
            fix = f"name a file, or a benchmark: {', '.join(BENCHMARKS)}"
            raise UsageError("no such file or directory", where=f"--against {name}", fix=fix)
    return found
