"""`rlctl diagnose PATH --sampler-test`: were the tokens of a dump drawn with the log-probs reported for them?

Reads the rollouts of a run, or files of another program with two columns of log-probs. The test is that of
`rlctl.algos.sampler_test`; the table by version, place, turn, replica and source explains an alarm and raises
none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rlctl.algos.sampler_test import (
    UnitMean,
    Wealth,
    num_scored,
    sampler_sums,
    unit_mean,
    with_unscored,
)
from rlctl.capabilities.sampler_test.section import guarantee_ends
from rlctl.errors import UsageError, steps_in_words
from rlctl.mismatch.token_columns import ENDINGS, FIX, tokens_of
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.open_run import RunRecord, open_run
from rlctl.track.rollouts import ROLLOUTS_DIR

#: Wealth from which the answer accuses the sampler.
ALARM = 1e6
#: Difference in z from which tokens stand out.
_APART_Z = 3.0


@dataclass(frozen=True, slots=True)
class GroupLine:
    """Tokens that have something in common."""

    kind: str
    name: str
    num_tokens: int
    mean: float  # of ρ
    z: float | None


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """The answer.

    Attributes:
        largest_log_wealth: natural log, over all steps.
        alarm_step: first step with a wealth above `ALARM`; None: there is none.
        mean, z: of ρ over all tokens; z None: every ratio is 1.
        is_cut: whether the mean is below 1 beyond the simulated critical value, see `UnitMean.is_cut`.
        no_guarantee: why an alarm has no guarantee; empty: it has one.
        severity: `critical`: an alarm with a guarantee; `warning`: one without, or a cut of the vocabulary;
            None: the sampler is not accused.
        notes: what the answer does not cover.
    """

    num_tokens: int
    num_steps: int
    largest_log_wealth: float
    alarm_step: int | None
    mean: float
    z: float | None
    is_cut: bool
    no_guarantee: str
    conclusion: str
    severity: Literal["critical", "warning"] | None
    notes: tuple[str, ...]
    lines: tuple[GroupLine, ...]

    @property
    def fault(self) -> bool:
        """Whether the sampler is accused."""
        return self.severity is not None

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fault": self.fault}


@dataclass(frozen=True, slots=True)
class _Source:
    """Files of tokens, and what is known of them.

    Attributes:
        first_groups: number of groups of a batch that are read.
    """

    files: list[Path]
    no_guarantee: str
    notes: tuple[str, ...] = ()
    first_groups: float = math.inf


def sampler_report(path: Path) -> SamplerReport:
    """Tests a run's rollouts, or the tokens of a file, or of all files in a directory.

    Raises:
        UsageError: there are none, a column is missing, or the log-probs were not computed before updates.
    """
    source = _source(path)
    wealth = Wealth()
    largest = 0.0
    alarm = None
    together: dict[str, float] = {}
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    steps = 0
    for tokens in tokens_of(source.files, source.first_groups):
        sums = _sums(tokens.log_ratio)
        wealth = wealth.after(with_unscored(sums, tokens.num_unscored))
        steps += 1
        largest = max(largest, wealth.log_value)
        if alarm is None and wealth.log_value > math.log(ALARM):
            alarm = tokens.step
        _add(together, sums)
        for kind, names in tokens.groups.items():
            for name in np.unique(names):
                _add(grouped.setdefault((kind, str(name)), {}), _sums(tokens.log_ratio[names == name]))
    if not steps:
        raise UsageError("no sampled token has both log-probs", where=str(path), fix=FIX)
    found = unit_mean(together)
    lines = [_line(*key, sums) for key, sums in grouped.items()]
    is_cut = alarm is None and found.is_cut
    severity: Literal["critical", "warning"] | None = None
    if alarm is not None:
        severity = "warning" if source.no_guarantee else "critical"
    elif is_cut:
        severity = "warning"
    return SamplerReport(
        num_tokens=num_scored(together),
        num_steps=steps,
        largest_log_wealth=largest,
        alarm_step=alarm,
        mean=1.0 + found.gap,
        z=found.z,
        is_cut=is_cut,
        no_guarantee=source.no_guarantee,
        conclusion=_conclusion(alarm, found, is_cut, source, lines),
        severity=severity,
        notes=source.notes,
        lines=tuple(line for line in lines if sum(each.kind == line.kind for each in lines) > 1),
    )


def _source(path: Path) -> _Source:
    if path.is_dir() and (files := sorted((path / ROLLOUTS_DIR).glob("rollouts-*.parquet"))):
        record = open_run(path)
        spec = record.spec
        first_groups = _groups_before_updates(spec)
        notes = tuple(_not_covered(record, first_groups))
        return _Source(files, _no_guarantee(record), notes, first_groups)
    files = [path] if path.is_file() else [file for end in ENDINGS for file in sorted(path.glob(f"*{end}"))]
    if not files:
        raise UsageError("no rollouts found", where=str(path), fix=FIX)
    return _Source(files, "whether all that was drawn is in the file is not known")


def _no_guarantee(record: RunRecord) -> str:
    """Why an alarm from a run's dump has no guarantee; empty: it has one."""
    why = guarantee_ends(record.spec)
    if why:
        return why
    try:
        rows = record.rows()
    except UsageError:
        return "the run's log cannot be read, so that failed episodes are not known"
    for row in rows:
        if row.get("rollout_corr/log_wealth_guaranteed") == 0.0:
            why = "episodes failed or were started again"
            return f"{why}, step {row['step']}: what was kept depends on what was drawn"
    if not any("rollout_corr/log_wealth_guaranteed" in row for row in rows):
        return "the run logged no test of its sampler, so that failed episodes are not known"
    return ""


def _not_covered(record: RunRecord, first_groups: float) -> list[str]:
    """What of a run's batches the test of its dump does not read."""
    spec = record.spec
    notes = []
    limit = spec.trainer.rollouts_per_step
    groups = spec.data.train_batch_size
    kept = groups if limit < 0 else min(max(limit // spec.rollout.n, 1), groups)
    if kept < groups:
        what = f"the dump holds the first {kept} of {groups} groups of each step"
        why = f"trainer.rollouts_per_step={limit}"
        notes.append(f"{what} ({why}): a fault in the others is not seen; -1 keeps all")
    if first_groups < kept:
        what = f"of {kept} groups the first {first_groups:g} were scored before an update on their batch"
        notes.append(f"{what}, and only these are read")
    steps = record.rollout_steps()
    missing = sorted(set(range(1, max(steps) + 1)) - set(steps))
    if missing:
        notes.append(f"the dump has no responses of {steps_in_words(missing)}")
    return notes


def _groups_before_updates(spec: RunSpec) -> float:
    """Number of groups of a batch whose dumped log-probs are those before any update on the batch.

    Raises:
        UsageError: there are none.
    """
    if not spec.algorithm.rollout_correction.bypass_mode:
        return math.inf
    if spec.actor.ppo_epochs > 1:
        raise UsageError(
            "in bypass mode with several epochs the dumped log-probs are of the policy after updates",
            where="actor.ppo_epochs",
            fix="read rollout_corr/log_wealth, which a run logs from the log-probs before them",
        )
    return spec.ppo_mini_batch_size


def _line(kind: str, name: str, sums: dict[str, float]) -> GroupLine:
    found = unit_mean(sums)
    return GroupLine(
        kind=kind,
        name=name,
        num_tokens=num_scored(sums),
        mean=1.0 + found.gap,
        z=found.z,
    )


def _sums(log_ratio: np.ndarray[Any, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sampler_sums(torch.from_numpy(log_ratio)).items()}


def _add(total: dict[str, float], sums: dict[str, float]) -> None:
    for name, value in sums.items():
        total[name] = total.get(name, 0.0) + value


def _most_at(lines: Sequence[GroupLine]) -> str:
    """What stands out: of the distinction whose lines differ most in z, the line with the highest."""
    best = ""
    widest = _APART_Z
    for kind in sorted({line.kind for line in lines}):
        of_kind = [line for line in lines if line.kind == kind and line.z is not None]
        scores = [line.z or 0.0 for line in of_kind]
        if len(scores) > 1 and max(scores) - min(scores) > widest:
            widest = max(scores) - min(scores)
            best = f", most at {kind} {of_kind[scores.index(max(scores))].name}"
    return best


def _conclusion(
    alarm: int | None, found: UnitMean, is_cut: bool, source: _Source, lines: Sequence[GroupLine]
) -> str:
    if found.z is None:
        return "both log-probs are equal up to rounding: nothing to test (one may be a copy of the other)"
    if alarm is not None:
        where = _most_at(lines)
        words = "the sampler did not draw its tokens with the log-probs that it reports"
        return f"{words} (step {alarm}){where}" + (", without guarantee" if source.no_guarantee else "")
    if is_cut:
        part = f"about {-found.gap:.1%} of the trained policy's probability"
        return (
            f"tokens were drawn from a part of the vocabulary, without {part}: "
            "top-p, top-k or min-p that the log-probs do not contain, or log-probs that are cut off below"
        )
    return "nothing speaks against the sampler's log-probs"
