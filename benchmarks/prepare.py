"""Compares `prepare-data` with the same job in `datasets.map`: time, memory, and the cost of each check.

    python benchmarks/prepare.py [--scales 1 10 50] [--input FILE] [--repeats N] [--workers N] [--dir DIR]
    [--json FILE]

The input is generated in the format of GSM8K (about 100 MB at scale 1, about 5 GB at scale 50), with
different answers, or it is `--input`, a JSONL file of that format. Each side runs in a separate process, one
after the other; with `--repeats`, all sides alternate that many times, and the results are medians. Ratios
are those of `datasets.map` to each side: above 1 the side is faster. Peak memory is that of the
whole process tree, with shared pages counted once (PSS), sampled ten times a second, without unmapped pages
of the page cache. Needs `datasets`; scale 50 needs about 25 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
BYTES_PER_SCALE = 100_000_000
SAMPLE_S = 0.1
#: Size of the pool of random words and sentences; with a small pool, rows would be duplicates.
NUM_WORDS, NUM_SENTENCES = 4000, 100_000


def sentences(chance: random.Random) -> list[str]:
    """Random sentences of eight to twelve words, with two placeholders for numbers."""
    parts = ["ba", "do", "fi", "gu", "ka", "le", "mo", "nu", "pe", "ri", "sa", "tu", "ve", "wo", "xi", "za"]
    words = ["".join(chance.choices(parts, k=chance.randint(1, 4))) for _ in range(NUM_WORDS)]
    made = []
    for _ in range(NUM_SENTENCES):
        text = chance.choices(words, k=chance.randint(8, 12))
        text[2], text[6] = "%d", "%d"
        made.append(" ".join(text).capitalize() + ".")
    return made


def rows(num_bytes: int) -> Iterator[str]:
    """Yields JSON lines: a question of about 230 characters and a solution that ends in `#### number`."""
    chance = random.Random(0)
    pool = sentences(chance)
    written = 0
    while written < num_bytes:
        a, b = chance.randrange(1, 10**6), chance.randrange(1, 10**6)  # the answers differ from each other
        question = " ".join(chance.choices(pool, k=4)) % (a, b, b, a, a + b, a, b, 2 * b)
        steps = chance.choices(pool, k=2)
        answer = (
            f"{steps[0] % (a, b)} {a}+{b} = <<{a}+{b}={a + b}>>{a + b}\n{steps[1] % (b, a)}\n#### {a + b}"
        )
        line = json.dumps({"question": question, "answer": answer}) + "\n"
        written += len(line)
        yield line


def generate(path: Path, scale: float) -> int:
    """Writes the input; returns its number of rows."""
    count = 0
    with path.open("w") as file:
        for line in rows(int(scale * BYTES_PER_SCALE)):
            file.write(line)
            count += 1
    return count


#: Check → its options in a request. Duplicates are always counted.
CHECKS: dict[str, dict[str, object]] = {
    "leakage": {"leakage": "report"},
    "ground truths": {"check_graders": True},
}


def run_ours(source: Path, out: Path, workers: int, checks: Sequence[str]) -> None:
    from rlctl.prepare.pipeline import prepare
    from rlctl.prepare.request import PrepareRequest

    options: dict[str, object] = {"leakage": "off", "check_graders": False}
    for check in checks:
        options |= CHECKS[check]
    prepare(PrepareRequest((str(source),), out, workers=workers, **options))


def run_theirs(source: Path, out: Path, workers: int) -> None:
    """A typical preparation script with `datasets`."""
    import datasets

    instruction = 'Think step by step, and put the final number on a last line after "####".'

    def to_row(example: dict[str, str], index: int) -> dict[str, object]:
        question, answer = example["question"], example["answer"]
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question}\n{instruction}"}],
            "ability": "math",
            "reward_model": {
                "style": "rule",
                "ground_truth": answer.split("####")[1].strip().replace(",", ""),
            },
            "extra_info": {"split": "train", "index": index, "question": question, "answer": answer},
        }

    several = {"num_proc": workers} if workers > 1 else {}
    data = datasets.load_dataset("json", data_files=str(source), split="train")
    data = data.map(to_row, with_indices=True, remove_columns=data.column_names, **several)
    data = data.filter(lambda row: row["reward_model"]["ground_truth"] != "", **several)
    # Without shuffling: `datasets` takes several times as long to write a shuffled split.
    parts = data.train_test_split(test_size=0.05, shuffle=False)
    out.mkdir()
    parts["train"].to_parquet(str(out / "train.parquet"))
    parts["test"].to_parquet(str(out / "test.parquet"))


def measured(side: str, source: Path, work: Path, workers: int) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of one side in a separate process."""
    out, cache = work / "out", work / "cache"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(cache),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TMPDIR": str(work),
    }
    command = [sys.executable, __file__, "--side", side, str(source), str(out), str(workers)]
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    peak, cpu = 0, dict[int, float]()
    while process.poll() is None:
        pss, seconds = tree_of(process.pid)
        peak = max(peak, pss)
        cpu |= seconds
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in out.glob("*.parquet")) if out.exists() else 0
    for left in (out, cache):
        shutil.rmtree(left, ignore_errors=True)
    if process.returncode:
        raise SystemExit(f"{side} failed with exit code {process.returncode}")
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(sum(cpu.values()), 2),
        "peak_mib": round(peak / 2**20),
        "output_mb": round(size / 1e6),
    }


def tree_of(pid: int) -> tuple[int, dict[int, float]]:
    """PSS in bytes of a process and all its descendants, and CPU seconds per process id."""
    pss, cpu = 0, {}
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, {}
    for process in tree:
        try:
            pss += process.memory_full_info().pss
            used = process.cpu_times()
            cpu[process.pid] = used.user + used.system
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return pss, cpu


SIDES = {
    "datasets.map": lambda source, out, _: run_theirs(source, out, 1),
    "datasets.map, num_proc": run_theirs,
    "rlctl, the same job": partial(run_ours, checks=()),
    **{f"rlctl, only {check}": partial(run_ours, checks=(check,)) for check in CHECKS},
    "rlctl, all checks": partial(run_ours, checks=tuple(CHECKS)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scales", type=float, nargs="+", default=[1, 10, 50])
    parser.add_argument("--input", type=Path, help="a JSONL file instead of generated ones")
    parser.add_argument("--repeats", type=int, default=1, help="turns of all sides; medians are reported")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a JSON line each")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, source, out, workers = options.side
        SIDES[side](Path(source), Path(out), int(workers))
        return
    names = ("scale", "rows", "side", "s", "CPU s", "rows/s", "ratio", "CPU ratio", "peak MiB", "output MB")
    print(" | ".join(names), flush=True)
    for scale in (
        options.scales if options.input is None else [options.input.stat().st_size / BYTES_PER_SCALE]
    ):
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            work = Path(name)
            source = options.input or work / "input.jsonl"
            num_rows = (
                generate(source, scale) if options.input is None else len(source.open("rb").readlines())
            )
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
            for _ in range(options.repeats):
                for side, done in runs.items():
                    done.append(measured(side, source, work, options.workers))
            theirs: list[dict[str, float]] = []
            for side, done in runs.items():
                figures = {key: statistics.median(one[key] for one in done) for key in done[0]}
                figures["rows_per_s"] = round(num_rows / figures["seconds"])
                if side.startswith("datasets"):
                    theirs.append(figures)
                report(scale, num_rows, side, figures, theirs)
                if options.json:
                    line = {"scale": scale, "rows": num_rows, "side": side, "workers": options.workers}
                    with options.json.open("a") as file:
                        file.write(json.dumps(line | figures) + "\n")


def report(
    scale: float, rows: int, side: str, figures: dict[str, float], theirs: list[dict[str, float]]
) -> None:
    """Prints a line of the table; ratios are relative to the best `datasets` side so far."""
    ratios = [
        f"{min(other[key] for other in theirs) / figures[key]:.1f}" if theirs else ""
        for key in ("seconds", "cpu_s")
    ]
    seconds, cpu, rate = figures["seconds"], figures["cpu_s"], figures["rows_per_s"]
    values = (f"{scale:g}", f"{rows:,}", side, f"{seconds:.1f}", f"{cpu:.1f}", f"{rate:,}", *ratios)
    print(" | ".join(values), f"| {figures['peak_mib']:,} | {figures['output_mb']:,}", flush=True)


if __name__ == "__main__":
    main()
