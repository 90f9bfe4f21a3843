"""`rlctl diagnose PATH --sampler-test`: were the tokens of a dump drawn with the log-probs reported for them?

Reads the rollouts of a run, or a Parquet file of another program with two columns of log-probs. The test is
that of `rlctl.algos.sampler_test`; the table by version, place, turn and source explains an alarm and raises
none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlctl.algos.sampler_test import Wealth, num_scored, sampler_sums, unit_mean, with_unscored
from rlctl.capabilities.sampler_test.section import guarantee_ends
from rlctl.errors import UsageError, first_line
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.open_run import open_run
from rlctl.track.rollouts import ROLLOUTS_DIR

#: Names that programs give the log-probs that the sampler reported, those of the trained policy before its
#: updates, and what marks the tokens that were sampled; the first that a file has is read.
REPORTED = (
    *("rollout_log_probs", "rollout_logprobs", "sampling_log_probs", "sampling_logps"),
    *("sampling_per_token_logps", "generation_logprobs", "inference_logprobs", "behavior_logprobs"),
)
TRAINED = (
    *("training_log_probs", "old_log_probs", "old_logprobs", "old_per_token_logps", "train_log_probs"),
    *("trainer_logprobs", "prev_logprobs", "log_probs"),
)
MASKS = ("sampled", "response_mask", "completion_mask", "loss_mask", "token_mask", "mask")
#: Upper ends of the places in a response that the table distinguishes.
_PLACES = (1, 16, 128, 1024)
#: Wealth from which the answer accuses the sampler, and |z| from which it says that the vocabulary was cut.
ALARM, CUT_Z = 1e6, 6.0
#: Difference in z from which tokens stand out.
_APART_Z = 3.0
_FIX = "name a run with rollouts (trainer.rollouts_per_step), or a Parquet file with two columns of log-probs"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one batch, in the order of their responses: all columns have one entry per token."""

    step: int
    log_ratio: np.ndarray[Any, Any]  # log π_train − log π_reported, nats
    groups: dict[str, np.ndarray[Any, Any]]  # version, place, turn, source: as text
    num_unscored: int  # further tokens that were drawn, without a log-prob of the trained policy


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
        no_guarantee: why an alarm has no guarantee; empty: it has one.
        fault: whether the sampler is accused.
    """

    num_tokens: int
    num_steps: int
    largest_log_wealth: float
    alarm_step: int | None
    mean: float
    z: float | None
    no_guarantee: str
    conclusion: str
    fault: bool
    lines: tuple[GroupLine, ...]

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def sampler_report(path: Path) -> SamplerReport:
    """Tests a run's rollouts, or the tokens of a Parquet file.

    Raises:
        UsageError: there are none, a column is missing, or the log-probs were not computed before updates.
    """
    files = sorted((path / ROLLOUTS_DIR).glob("rollouts-*.parquet")) if path.is_dir() else []
    no_guarantee = "whether all that was drawn is in the file is not known"
    first_groups = math.inf
    if files:
        spec = open_run(path).spec
        first_groups = _groups_before_updates(spec)
        no_guarantee = guarantee_ends(
            spec
        )  # which groups of a batch are kept does not depend on what was drawn
    elif path.is_file():
        files = [path]
    else:
        raise UsageError("no rollouts found", where=str(path), fix=_FIX)
    wealth, largest, alarm = Wealth(), 0.0, None
    together: dict[str, float] = {}
    grouped: dict[tuple[str, str], dict[str, float]] = {}
    steps = 0
    for tokens in _batches(files, first_groups):
        sums = _sums(tokens.log_ratio)
        wealth, steps = wealth.after(with_unscored(sums, tokens.num_unscored)), steps + 1
        largest = max(largest, wealth.log_value)
        if alarm is None and wealth.log_value > math.log(ALARM):
            alarm = tokens.step
        _add(together, sums)
        for kind, names in tokens.groups.items():
            for name in np.unique(names):
                _add(grouped.setdefault((kind, str(name)), {}), _sums(tokens.log_ratio[names == name]))
    if not steps:
        raise UsageError("no sampled token has both log-probs", where=str(path), fix=_FIX)
    gap, z = unit_mean(together)
    lines = [_line(*key, sums) for key, sums in grouped.items()]
    return SamplerReport(
        num_tokens=num_scored(together),
        num_steps=steps,
        largest_log_wealth=largest,
        alarm_step=alarm,
        mean=1.0 + gap,
        z=z,
        no_guarantee=no_guarantee,
        conclusion=_conclusion(alarm, gap, z, lines),
        fault=alarm is not None,
        lines=tuple(line for line in lines if sum(each.kind == line.kind for each in lines) > 1),
    )


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


def _batches(files: Sequence[Path], first_groups: float) -> Iterator[Tokens]:
    """The tokens of each step; of a file without steps one batch per file."""
    for file in files:
        try:
            table = pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise UsageError(f"cannot be read: {first_line(error)}", where=str(file), fix=_FIX) from error
        reported, trained = (_chosen(table.column_names, names, file) for names in (REPORTED, TRAINED))
        mask = next((name for name in MASKS if name in table.column_names), None)
        if "group_id" in table.column_names:
            table = table.filter(pa.compute.less(table["group_id"], first_groups))
        steps = table["step"].to_numpy() if "step" in table.column_names else np.zeros(len(table), np.int64)
        for step in np.unique(steps):
            rows = table.filter(pa.array(steps == step))
            tokens = _tokens(rows, int(step), reported, trained, mask, file)
            if len(tokens.log_ratio):
                yield tokens


def _chosen(columns: list[str], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in columns:
            return name
    message = f"no column of log-probs: it needs one of {', '.join(names)}; it has {', '.join(columns)}"
    raise UsageError(message, where=str(file), fix="rename a column")


def _tokens(rows: pa.Table, step: int, reported: str, trained: str, mask: str | None, file: Path) -> Tokens:
    """The sampled tokens of some rows, a list of tokens each, or one token each."""
    if not pa.types.is_list(rows.schema.field(reported).type):
        lengths = np.ones(len(rows), np.int64)
    else:
        lengths = np.array([len(value or ()) for value in rows[reported].to_pylist()], np.int64)

    def flat(name: str) -> np.ndarray[Any, Any]:
        column = rows[name].combine_chunks()
        values = column.flatten() if pa.types.is_list(column.type) else column
        numbers: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
        if len(numbers) != lengths.sum():
            message = f"{name} has {len(numbers):,} entries, {reported} has {int(lengths.sum()):,}"
            raise UsageError(message, where=f"{file}, step {step}", fix="give both one entry per token")
        return numbers

    own, theirs = (flat(name).astype(np.float64) for name in (trained, reported))
    drawn = ~np.isnan(theirs)
    if mask is not None:
        drawn &= flat(mask).astype(bool)
    chosen = drawn & ~np.isnan(own)
    row = np.repeat(np.arange(len(rows)), lengths)
    groups = {"place": _places(chosen, row)[chosen]}
    for kind, name in (("version", "versions"), ("turn", "turn")):
        if name in rows.column_names:
            groups[kind] = flat(name)[chosen].astype(str)
    if "data_source" in rows.column_names:
        groups["source"] = np.array(rows["data_source"].to_pylist(), dtype=str)[row][chosen]
    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        gap = own - theirs
    return Tokens(step, gap[chosen], groups, int(drawn.sum() - chosen.sum()))


def _places(chosen: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each token the part of its response that it is in; `row` is ascending."""
    before = np.cumsum(chosen) - chosen  # sampled tokens before it, in all rows
    place = before - before[np.searchsorted(row, row)]
    names = ["first token", *(f"to {end}" for end in _PLACES[1:]), f"after {_PLACES[-1]}"]
    parts: np.ndarray[Any, Any] = np.array(names)[np.searchsorted(_PLACES, place, side="right")]
    return parts


def _line(kind: str, name: str, sums: dict[str, float]) -> GroupLine:
    gap, z = unit_mean(sums)
    return GroupLine(kind, name, num_scored(sums), 1.0 + gap, z)


def _sums(log_ratio: np.ndarray[Any, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sampler_sums(torch.from_numpy(log_ratio)).items()}


def _add(total: dict[str, float], sums: dict[str, float]) -> None:
    for name, value in sums.items():
        total[name] = total.get(name, 0.0) + value


def _most_at(lines: Sequence[GroupLine]) -> str:
    """What stands out: of the distinction whose lines differ most in z, the line with the highest."""
    best, widest = "", _APART_Z
    for kind in {line.kind for line in lines}:
        of_kind = [line for line in lines if line.kind == kind and line.z is not None]
        scores = [line.z or 0.0 for line in of_kind]
        if len(scores) > 1 and max(scores) - min(scores) > widest:
            widest = max(scores) - min(scores)
            best = f", most at {kind} {of_kind[scores.index(max(scores))].name}"
    return best


def _conclusion(alarm: int | None, gap: float, z: float | None, lines: Sequence[GroupLine]) -> str:
    if z is None:
        return "both log-probs are equal up to rounding: nothing to test (one may be a copy of the other)"
    if alarm is not None:
        where = _most_at(lines)
        return f"the sampler did not draw its tokens with the log-probs that it reports (step {alarm}){where}"
    if z < -CUT_Z:
        cut = f"about {-gap:.1%} of the trained policy's probability"
        return f"tokens were drawn from a part of the vocabulary, without {cut}: top-p, top-k or min-p"
    return "nothing speaks against the sampler's log-probs"
