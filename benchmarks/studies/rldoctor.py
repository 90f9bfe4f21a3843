"""Compares `rlctl diagnose` with rldoctor on the same runs: found and missed faults, false alarms, time.

    pip install rldoctor        # into a separate environment
    python benchmarks/studies/rldoctor.py --rldoctor PATH/TO/bin/rldoctor [--seeds 1] [--directory DIR]

The runs are those of `pathologies.py` beside it. Both tools run as commands, one log at a time. rldoctor
does not read console output, so it gets verl's log as one JSON object per step, with verl's names.

rldoctor has found a fault if any matching detector reports a warning or worse; `COUNTERPARTS` lists the
matching detectors generously. Every alarm on a healthy run is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.studies.pathologies import FORMATS, Log, add_arguments, logged, logs
from tests.simulated_logs.writers import VERL, jsonl, renamed

_ROOT = Path(__file__).parents[2]
_GAP = ("kl_drift", "clip_saturation")
#: Rule → detectors of rldoctor that can report the same fault.
COUNTERPARTS = {
    **dict.fromkeys(
        ("policy-gap", "probability-gap", "stale-weights", "hidden-tail", "sampled-otherwise"), _GAP
    ),
    "large-updates": _GAP,
    "reward-fell": ("reward_collapse", "plateau"),
    "staleness": _GAP,
    "zero-reward": ("advantage_collapse", "plateau"),
    "zero-spread-groups": ("advantage_collapse", "plateau"),
    "no-gradient": ("gradient_pathology", "advantage_collapse"),
    "gradient-norm": ("gradient_pathology",),
    "reward-hacking": ("reward_hacking",),
    "truncated": ("length_pathology",),
    "entropy": ("entropy_collapse",),
    "reference-drift": ("kl_drift",),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a tool for a log.

    Attributes:
        alarms: rules or detectors that report a warning or worse.
        seconds: CPU time of the command, including its start.
    """

    alarms: frozenset[str]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--rldoctor", default="rldoctor", help="its command")
    options = parser.parse_args()
    every = logs(options.directory, options.seeds, healthy=True)
    answers = {}
    for log in every:
        answers[log] = (_ours(log), _theirs(log, options.rldoctor))
        print(f"{log.run.name}, {log.form}, seed {log.seed}", file=sys.stderr)
    print(summary(answers), "", by_run(answers), sep="\n")


def _ours(log: Log) -> Answer:
    command = [sys.executable, "-m", "rlctl"]
    answer, seconds = _run([*command, "diagnose", str(log.path), "--format", "json"])
    findings = json.loads(answer)["runs"][0]["findings"]
    return Answer(frozenset(one["rule"] for one in findings if one["severity"] != "info"), seconds)


def _theirs(log: Log, command: str) -> Answer:
    path = log.path
    if log.form == "verl":
        path = log.path.with_name("history.jsonl")
        rows = renamed(logged(path.parents[1]), VERL, lambda source: f"val-core/{source}/reward/mean@1")
        path.write_text(jsonl(rows))
    answer, seconds = _run([command, "diagnose", str(path), "-f", "json"])
    findings = json.loads(answer)["findings"]
    alarms = frozenset(one["detector"] for one in findings if one["severity"] in {"WARNING", "CRITICAL"})
    return Answer(alarms, seconds)


def _run(command: list[str]) -> tuple[str, float]:
    """Runs a command; returns its output and CPU seconds, which depend little on the machine's load."""
    before = os.times()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(_ROOT)}
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, spent


def found(log: Log, which: int, answer: Answer) -> bool:
    """Whether the tool (`which`: 0 rlctl, 1 rldoctor) reports the planted fault."""
    meant = log.run.rules if which == 0 else {d for r in log.run.rules for d in COUNTERPARTS.get(r, ())}
    return bool(answer.alarms & meant)


def summary(answers: dict[Log, tuple[Answer, Answer]]) -> str:
    """Per format and tool: number of faults found, number of healthy logs with alarms, median CPU seconds."""
    lines = ["| logs | | rlctl | rldoctor |", "|---|---|---|---|"]
    for form in FORMATS:
        here = {log: both for log, both in answers.items() if log.form == form}
        sick, well = ([log for log in here if bool(log.run.rules) is bad] for bad in (True, False))
        hits = [sum(found(log, which, here[log][which]) for log in sick) for which in (0, 1)]
        alarmed = [sum(bool(here[log][which].alarms) for log in well) for which in (0, 1)]
        times = [statistics.median(both[which].seconds for both in here.values()) for which in (0, 1)]
        lines += [
            f"| {form} | faults found | {hits[0]} of {len(sick)} | {hits[1]} of {len(sick)} |",
            f"| {form} | healthy logs alarmed | {alarmed[0]} of {len(well)} | {alarmed[1]} of {len(well)} |",
            f"| {form} | CPU seconds, median | {times[0]:.2f} | {times[1]:.2f} |",
        ]
    return "\n".join(lines)


def by_run(answers: dict[Log, tuple[Answer, Answer]]) -> str:
    """One line per run and format of the first seed: the alarms of each tool."""
    lines = ["| run | log | rlctl | rldoctor |", "|---|---|---|---|"]
    first = min(log.seed for log in answers)
    for log, both in answers.items():
        if log.seed == first:
            cells = (_cell(log, which, answer) for which, answer in enumerate(both))
            lines.append(f"| {log.run.name} | {log.form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(log: Log, which: int, answer: Answer) -> str:
    said = ", ".join(sorted(answer.alarms))
    if not log.run.rules:
        return f"**false alarm**: {said}" if said else "quiet"
    return f"found: {said}" if found(log, which, answer) else f"missed{said and f' (says {said})'}"


if __name__ == "__main__":
    main()
