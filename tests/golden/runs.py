"""Golden figures of whole runs on stored responses, to rewrite the core number by number.

    python -m tests.golden.runs [--only WORD] [--jobs 1]              # writes runs.json anew, or some cases
    python -m tests.golden.runs --compare [--only WORD] [--rel 1e-6]  # prints the largest difference per case

Recorded per step: every metric that does not depend on the clock, and how the weights changed (norm, three
projections on random signs); of some cases also the weight of every token, and whether it was kept, from the
dump. The model is random and fixed by its seed, see `first_updates.py`; the responses are stored, see
`stored.py`.

On one machine the figures repeat exactly, elsewhere to a tolerance, see `tolerance.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rlctl.cli.app import run
from rlctl.processes import free_port
from rlctl.reward.protocol import Failure, Grade, GradeAndAnswer, Sample, Scorer
from rlctl.track.run_dir import SUMMARY_FILE
from tests import runs
from tests.golden import graders
from tests.golden.cases import BASE, PLAIN, Case, cases
from tests.golden.tolerance import COMMITS, Figure, distance
from tests.processes import Job

FILE = Path(__file__).with_suffix(".json")
#: Case → one record per step: metric → figure.
Figures = dict[str, list[dict[str, Figure]]]
CHANGES = ("norm", "a", "b", "c")


def write_models(where: Path) -> None:
    """Writes the models and the prompts."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from rlctl.data.schema import Message, Row, write_rows
    from tests.golden.stored import FILE as STORED
    from tests.models import tiny_model
    from tests.unit.engine.sequence_jobs import a_model

    letters = {letter: place for place, letter in enumerate(["<pad>", "<end>", *"abcdefghijklmnopqrstu"])}
    backend = Tokenizer(models.BPE(letters, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    ref = tiny_model()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in ref.parameters():
            weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.02)
    saved = {"tiny": tiny_model(), "ref": ref, "gemma2": tiny_model("gemma2"), "heads": a_model()}
    for name, model in saved.items():
        model.save_pretrained(where / name)
        tokenizer.save_pretrained(where / name)
    names = list(letters)
    prompts = ["".join(names[token] for token in entry["prompt"]) for entry in json.loads(STORED.read_text())]
    asked = [(Message("user", prompt),) for prompt in prompts]
    rows = [
        Row("golden", messages, "fghijkl"[place % 7], index=place) for place, messages in enumerate(asked)
    ]
    write_rows(where / "train.parquet", "train", rows)


def figures(names: Iterable[str], jobs: int = 1) -> Figures:
    """Runs cases: those of one rank in `jobs` processes, each of which is a fork, then the others.

    A run that fails is left out, and the end of its process's output is printed.
    """
    chosen = {name: cases()[name] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        write_models(where / "models")
        alone = [name for name, case in chosen.items() if case.ranks == 1]
        parts = [alone[start::jobs] for start in range(jobs)]
        _finish([Job(_run, part, directory, log=where / f"log{i}") for i, part in enumerate(parts)])
        for name in (name for name in chosen if name not in alone):
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            envs = [shared | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(2)]
            log = where / f"{name}.log"
            _finish([Job(_run, [name], directory, log=log, env=env) for env in envs])
        done = [name for name in chosen if (where / name / SUMMARY_FILE).exists()]
        return {name: _recorded(where / name, chosen[name]) for name in done}


#: Modules that start grading processes: to grade, and to ask what a grader reads of a row.
STARTERS = ("rlctl.reward.build", "rlctl.prepare.needs")


class InProcess(Scorer):
    """Grades in place of the grading processes, whose start takes longer than the training."""

    asks: tuple[str, ...] = ()

    def __init__(self, name: str, params: object, threads: int = 1, num_workers: int = 1) -> None:
        self._function = getattr(graders, name.rpartition(":")[2])

    def check(self) -> None:
        """Nothing needs to be started."""

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades without answers."""
        return [(self._grade(sample), None) for sample in samples]

    def _grade(self, sample: Sample) -> Grade:
        try:
            return float(self._function(sample.response, sample.ground_truth))
        except ValueError as error:
            return Failure(str(error))


def _finish(jobs: list[Job]) -> None:
    for job, code in [(job, job.wait(timeout=3600)) for job in jobs]:
        if code:
            print(job.output[-4000:])


def _run(names: list[str], directory: str) -> int:
    """Trains; returns the number of runs that failed."""
    failed = []
    for name in names:
        case = cases()[name]
        places = {"models": f"{directory}/models", "here": FILE.parent}
        words = (BASE + case.settings).format(**places).split()
        settings = [re.sub(r"^rc\.", "algorithm.rollout_correction.", word) for word in words]
        presets = [word for preset in dict.fromkeys((PLAIN, case.preset)) for word in ("--preset", preset)]
        own = [f"trainer.run_dir={directory}/{name}", f"trainer.n_gpus_per_node={case.ranks}"]
        try:
            with contextlib.ExitStack() as stack:
                for module in STARTERS:
                    stack.enter_context(mock.patch(f"{module}.GradingPool", InProcess))
                # The stored log-probs are others plus noise, at some tokens above 0.
                stack.enter_context(mock.patch("rlctl.rollout.turn_checks.LARGEST_LOG_PROB", math.inf))
                for function, value in case.patches.items():
                    stack.enter_context(mock.patch(function, lambda *_, value=value: value))
                if run(["train", *presets, *settings, *own]):
                    failed.append(name)
        except Exception:  # a function to patch is no more, for example
            traceback.print_exc()
            failed.append(name)
    print(f"failed: {failed}")
    return len(failed)


def _recorded(run_dir: Path, case: Case) -> list[dict[str, Figure]]:
    """Metrics, dumps and changes of a run; the change of the first sync stands at step 1, and so on."""
    found: list[dict[str, Figure]] = [{**metrics} for metrics in runs.reproducible(run_dir)]
    changes = [json.loads(line) for line in (run_dir / "change.jsonl").read_text().splitlines()]
    for number, change in enumerate(changes):
        found[number] |= {f"change/{name}": value for name, value in zip(CHANGES, change, strict=True)}
    rows: list[Any] = runs.rollouts(run_dir) if case.dumps else []
    rows.sort(key=lambda row: (row["step"], row["group_id"], row["token_ids"]))
    for metrics in found if rows else ():
        mine = [row for row in rows if row["step"] == metrics["step"]]
        for name in ("rollout_is_weights", "keep_mask"):
            pairs = [pair for row in mine for pair in zip(row[name], row["sampled"], strict=True)]
            metrics[f"dump/{name}"] = [float(value) for value, sampled in pairs if sampled]
    return found


def difference(now: Figures, golden: Figures, name: str) -> tuple[float, str]:
    """The largest relative difference of a case, and where it is; a metric that is new is no difference."""
    worst = (0.0, "")
    if name not in now:
        return math.inf, "the run failed"
    if len(now[name]) != len(golden[name]):
        return math.inf, "number of steps"
    for step, (ours, theirs) in enumerate(zip(now[name], golden[name], strict=True), 1):
        for key, value in theirs.items():
            worst = max(worst, (distance(ours.get(key), value, key), f"step {step}, {key}"))
    return worst


def read() -> Figures:
    """The figures of the file."""
    stored = json.loads(FILE.read_text())
    names = stored["names"]
    return {
        case: [
            {names[place]: value for place, value in zip(places, step, strict=True) if value is not None}
            for step in steps
        ]
        for case, (places, *steps) in stored["cases"].items()
    }


def write(found: Figures) -> None:
    """Writes figures to nine digits: per case the places of its metrics' names, and the values by step."""
    names = list(dict.fromkeys(key for steps in found.values() for step in steps for key in step))
    lines = []
    for case, steps in found.items():
        own = [name for name in names if any(name in step for step in steps)]
        values = [[step.get(name) for name in own] for step in steps]
        lines.append(f"{json.dumps(case)}:{_compact([[names.index(name) for name in own], *values])}")
    FILE.write_text(f'{{"names":{_compact(names)},\n"cases":{{\n' + ",\n".join(lines) + "\n}}\n")


def _compact(value: object) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    nine = float(f"{value:.9g}")
    return int(nine) if nine.is_integer() else nine


def main() -> None:
    """The command line, see above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names contain it")
    parser.add_argument("--compare", action="store_true", help="write nothing")
    parser.add_argument("--rel", type=float, default=COMMITS, help="largest relative difference allowed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    given = parser.parse_args()
    chosen = [name for name in cases() if given.only in name]
    now = figures(chosen, given.jobs)
    golden = read() if FILE.exists() else {}
    if not given.compare:
        merged = {name: now.get(name) or golden[name] for name in cases() if name in now or name in golden}
        write(merged)
        print(f"wrote {len(now)} cases of {len(merged)} to {FILE}")
        return
    worst = {name: difference(now, golden, name) for name in chosen}
    for name, (found, where) in sorted(worst.items(), key=lambda item: item[1]):
        print(f"{found:9.1e}  {'differs' if found > given.rel else 'equal  '}  {name}  ({where})")
    sys.exit(any(found > given.rel for found, _ in worst.values()))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    main()
