"""Compares how rows of JSONL enter training: rlctl's first and second start, and `datasets.map`.

    python benchmarks/entering.py [--rows N] [--json FILE]

Each side reads the file and renders every prompt with the same chat template, without tokenising it. rlctl
also checks columns, answers and duplicates, and keeps all columns. The second start reads the cache. Each
side runs in a process of its own on one processor, one after the other; times are those of the processor
and of the clock, without the import of the libraries. Needs `datasets`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("datasets.map", "first start", "second start")


def generate(path: Path, num_rows: int) -> None:
    """Writes questions with different numbers, their answers, and two further columns."""
    with path.open("w") as file:
        for i in range(num_rows):
            question = (
                f"Ann has {i} pens, buys {i % 97} more and gives {i % 13} of them to Bob. How many are left?"
            )
            row = {"question": question, "answer": i + i % 97 - i % 13, "level": i % 5, "topic": "pens"}
            file.write(json.dumps(row) + "\n")


def by_datasets(path: Path) -> Callable[[], int]:
    """Reads with `datasets`, and maps every row to its rendered prompt."""
    import datasets

    from rlctl.environment.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()

    def render(row: dict[str, Any]) -> dict[str, Any]:
        turns = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return {"prompt": text}

    def run() -> int:
        read = datasets.load_dataset(
            "json", data_files=str(path), cache_dir=str(path.parent / "hf"), split="train"
        )
        return len(read.map(render))

    return run


def by_rlctl(path: Path) -> Callable[[], int]:
    """Reads as training does, and renders every row."""
    from rlctl.data.prompts import Renderer
    from rlctl.environment.byte_tokenizer import byte_tokenizer
    from rlctl.prepare.data_files import read_any
    from rlctl.run_spec.rollout import RewardSpec

    renderer = Renderer(byte_tokenizer())
    return lambda: sum(bool(renderer.text(row)) for row in read_any([str(path)], reward=RewardSpec()))


def measured(run: Callable[[], int]) -> dict[str, float]:
    """Rows, and the seconds of processors and clock."""

    def used() -> float:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so that no side starts other processes
    processor, clock = used(), time.monotonic()
    num_rows = run()
    return {"rows": num_rows, "cpu_s": used() - processor, "clock_s": time.monotonic() - clock}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--input", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side = by_datasets if options.side == SIDES[0] else by_rlctl
        print(json.dumps(measured(side(options.input))))
        return
    with tempfile.TemporaryDirectory() as directory:
        path, found = Path(directory, "rows.jsonl"), {}
        generate(path, options.rows)
        environment = {**os.environ, "RLCTL_CACHE": str(Path(directory, "cache"))}
        environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--input", str(path)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            found[side] = json.loads(done.stdout.splitlines()[-1])
    for side, result in found.items():
        ratio = result["cpu_s"] / found[SIDES[0]]["cpu_s"]
        print(
            f"{side:<14} {result['cpu_s']:8.1f} s CPU, {result['clock_s']:8.1f} s, ratio of CPU {ratio:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
