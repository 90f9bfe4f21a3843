"""The benchmarks that `--data` knows by name: one entry each, and nothing else to edit for a new one.

An entry pins what a figure depends on: the data set's file at one commit of the hub, the prompt, and the
grader. The SHA-256 is that of the file at this commit, where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.data.layouts import RecipeName
from rlctl.reward.sources import SourceGrader

_BOXED = r"Think step by step, and put the final answer in \boxed{}."
_LETTER = 'Think step by step, and end with "Answer: X", where X is the letter of the right choice.'


@dataclass(frozen=True, slots=True)
class Benchmark:
    r"""One benchmark.

    Attributes:
        name: what `--data` calls it.
        dataset: id of the data set on the Hugging Face hub; also the `data_source` of its rows.
        revision: commit of that repository.
        file: of the repository, with the questions.
        split: of the data set.
        num_questions: rows of the file.
        columns: which its rows must have.
        recipe: how a row becomes a prompt and a ground truth, see `rlctl.data.layouts`.
        instruction: follows the question after a newline.
        grader: grades the responses.
        prompt_key, answer_key: columns the recipe reads; None: its own.
        sha256: of the file; None: not known.
    """

    name: str
    dataset: str
    revision: str
    file: str
    split: str
    num_questions: int
    columns: tuple[str, ...]
    recipe: RecipeName
    instruction: str
    grader: SourceGrader
    prompt_key: str | None = None
    answer_key: str | None = None
    sha256: str | None = None


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="gsm8k",
            dataset="openai/gsm8k",
            revision="740312add88f781978c0658806c59bc2815b9866",
            file="main/test-00000-of-00001.parquet",
            split="test",
            num_questions=1319,
            columns=("question", "answer"),
            recipe="gsm8k",
            instruction='Think step by step, and put the final number on a last line after "####".',
            grader="maths",
        ),
        Benchmark(
            name="math500",
            dataset="HuggingFaceH4/MATH-500",
            revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            file="test.jsonl",
            split="test",
            num_questions=500,
            columns=("problem", "answer"),
            recipe="generic",
            prompt_key="problem",
            answer_key="answer",
            instruction=_BOXED,
            grader="maths",
            sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        ),
        Benchmark(
            name="aime24",
            dataset="HuggingFaceH4/aime_2024",
            revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
            file="data/train-00000-of-00001.parquet",
            split="train",
            num_questions=30,
            columns=("problem", "answer"),
            recipe="generic",
            prompt_key="problem",
            answer_key="answer",
            instruction=_BOXED,
            grader="maths",
            sha256="26139847601a5037c237d5928b195e7260ca8074cf4f264b794af42847f79ccf",
        ),
        Benchmark(
            name="aime25",
            dataset="math-ai/aime25",
            revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
            file="test.jsonl",
            split="test",
            num_questions=30,
            columns=("problem", "answer"),
            recipe="generic",
            prompt_key="problem",
            answer_key="answer",
            instruction=_BOXED,
            grader="maths",
            sha256="b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        ),
        Benchmark(
            name="amc23",
            dataset="math-ai/amc23",
            revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
            file="test-00000-of-00001.parquet",
            split="test",
            num_questions=40,
            columns=("question", "answer"),
            recipe="generic",
            prompt_key="question",
            answer_key="answer",
            instruction=_BOXED,
            grader="maths",
            sha256="b696e87ba47be4e879a60fd4ef1d4aa522ba78c5ae013c6aff5cc9788a397c5e",
        ),
        Benchmark(
            name="mmlu",
            dataset="cais/mmlu",
            revision="c30699e8356da336a370243923dbaf21066bb9fe",
            file="all/test-00000-of-00001.parquet",
            split="test",
            num_questions=14042,
            columns=("question", "choices", "answer"),
            recipe="multiple-choice",
            instruction=_LETTER,
            grader="multiple_choice",
            sha256="74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
        ),
        Benchmark(
            name="mmlu-pro",
            dataset="TIGER-Lab/MMLU-Pro",
            revision="b189ec765aa7ed75c8acfea42df31fdae71f97be",
            file="data/test-00000-of-00001.parquet",
            split="test",
            num_questions=12032,
            columns=("question", "options", "answer"),
            recipe="multiple-choice",
            instruction=_LETTER,
            grader="multiple_choice",
            sha256="0e24a191921c2f453518a537a8b2117bd137e7714d4ef1565e9ba06c1ecb9ad8",
        ),
        Benchmark(
            name="arc-challenge",
            dataset="allenai/ai2_arc",
            revision="210d026faf9955653af8916fad021475a3f00453",
            file="ARC-Challenge/test-00000-of-00001.parquet",
            split="test",
            num_questions=1172,
            columns=("question", "choices", "answerKey"),
            recipe="multiple-choice",
            instruction=_LETTER,
            grader="multiple_choice",
        ),
    )
}
