"""A run's log as one table: step × metric, under the names of `rlctl.metric_names`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.metric_names import key_pattern

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

#: Note of a log whose rows have no step.
COUNTED = "the printed lines have no step: they are counted from 1"
_LOSS = "actor/pg_loss"
#: Metrics that training without reinforcement learning has, too.
_OF_ANY_TRAINING = frozenset({_LOSS, "actor/grad_norm", "actor/lr", "actor/entropy", "timing_s/step"})
#: Stands for standard input.
STDIN = Path("-")
Framework = str  # as a reader's file names it, or `unknown`


@dataclass(frozen=True, slots=True)
class Series:
    """The finite values of one metric and their steps (both (M,), steps ascending)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def bucket_starts(self, buckets: int) -> NDArray[np.int64]:
        """Start indices of at most `buckets` parts of nearly equal size."""
        count = min(buckets, len(self))
        return np.unique(np.linspace(0, len(self), count, endpoint=False).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Table:
    """The logged metrics, step by step."""

    steps: NDArray[np.int64]  # (N,) strictly ascending
    #: metric → (N,) values, NaN where the step did not log it or logged no finite number
    columns: Mapping[str, NDArray[np.float64]]
    #: metric → the steps at which NaN or an infinity was logged
    nonfinite: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, float]], wanted: Callable[[str], bool]) -> Table:
        """The wanted metrics of logged steps, each of which has its number as `step`."""
        steps = np.array([row["step"] for row in rows], dtype=np.int64)
        columns = {}
        nonfinite = {}
        for key in filter(wanted, set().union(*rows)):
            values = np.array([row.get(key, np.nan) for row in rows])
            is_finite = np.isfinite(values)
            columns[key] = np.where(is_finite, values, np.nan)
            bad = [index for index in np.flatnonzero(~is_finite) if key in rows[index]]
            if bad:
                nonfinite[key] = steps[bad]
        return cls(steps, columns, nonfinite)

    def series(self, key: str) -> Series:
        """The metric's finite values; empty if it was never logged."""
        values = self.columns.get(key)
        if values is None:
            return Series(self.steps[:0], np.empty(0))
        logged = np.isfinite(values)
        return Series(self.steps[logged], values[logged])

    def aligned(self, *keys: str) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Steps at which all of the metrics are finite, and the values of each at these steps."""
        columns = [self.columns.get(key, np.full(len(self.steps), np.nan)) for key in keys]
        logged = np.logical_and.reduce([np.isfinite(column) for column in columns])
        return self.steps[logged], [column[logged] for column in columns]

    def matching(self, key: str) -> tuple[str, ...]:
        """Names of the columns that match a key; `<…>` in the key stands for any text."""
        if "<" not in key:
            return (key,) if key in self.columns else ()
        return tuple(sorted(filter(key_pattern(key).fullmatch, self.columns)))

    def most_logged(self, keys: tuple[str, ...]) -> str:
        """The metric with the most finite values; the first of several with equally many."""
        return max(keys, key=lambda key: len(self.series(key)))


@dataclass(frozen=True, slots=True)
class MetricOrigin:
    """Origin of a column."""

    name: str  # its name in the log
    #: definition of the figure where it differs from rlctl's, one sentence; empty where it is the same
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Known settings of a run, independent of the framework; None where unknown.

    They come from the run's spec, from configuration, settings or names in the log, from what holds for every
    run of the framework, or are inferred from the figures.
    """

    #: π_old is the rollout policy, so logged gaps compare the rollout policy with the current π_θ
    bypass_mode: bool | None = None
    #: samples may be older than the policy at the start of a batch's updates
    is_async: bool | None = None
    updates_per_batch: int | None = None  # optimizer steps on one batch
    ppo_epochs: int | None = None  # passes over one batch
    rollout_is: str | None = None  # the importance weight, as the spec names it, or `off`
    rollout_is_threshold: float | None = None  # upper bound of a weight
    rollout_rs: str | None = None  # rejection criteria, comma separated, or `off`
    batch_size: int | None = None  # responses per step
    group_size: int | None = None  # responses per prompt
    has_critic: bool | None = None  # a value function is trained
    max_response_length: int | None = None  # tokens
    kl_coef: float | None = None  # of the KL penalty to the reference, in loss or reward; 0.0 without one
    dtype: str | None = None  # of the trainer's forward pass: `bf16`, `fp16`, `fp32`
    lr: float | None = None  # the policy's peak learning rate
    temperature: float | None = None  # of the sampling in training
    ess_length_weighted: bool | None = None  # the logged one counts a sequence's weight once per token
    logs_correction: bool | None = None  # weights and rejection are logged whenever they are configured
    naming: Literal["rlctl", "verl"] | None = None  # what names and bounds of `rollout_rs` follow


@dataclass(frozen=True, slots=True)
class LoggedException:
    """The exception that a log ends with: no row follows it."""

    text: str  # type and message as printed, one line: `ValueError: …`
    where: str  # the innermost frame: `trainer.py, line 338, in fit`; empty if the log has none
    line: int  # its line in the log, from 1
    is_stop: bool = False  # the run was stopped from outside, by a signal or from the keyboard


@dataclass(frozen=True, slots=True)
class RewardNoise:
    """Rewards of equal responses to a prompt: all tokens of the episodes are equal, prompt included.

    Attributes:
        num_repeats: episodes that repeat an earlier one of the same step and prompt.
        num_prompts: prompts of a step with such episodes.
        num_differing: of these, prompts with equal episodes that have different rewards.
        share: variance of the rewards among equal episodes, over that among all episodes of these prompts;
            0: the reward is a function of the response, 1: it does not depend on the response.
        low, high: 95 % interval of the share, over prompts.
        first_step: the first step on which rewards of equal episodes differ; None: none differ.
        term: of a reward with several terms the one whose scores differ most among equal episodes; or empty.
        shift: rewards are those of the episode so many rows later (negative: earlier), which are a function
            of the response; 0: no such shift is known.
    """

    num_repeats: int
    num_prompts: int
    num_differing: int
    share: float
    low: float
    high: float
    first_step: int | None = None
    term: str = ""
    shift: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The optimizer's state in a checkpoint.

    Attributes:
        step: of the checkpoint.
        remembered: updates that the moments are averages of.
        made: updates of the policy up to there.
    """

    step: int
    remembered: int
    made: int


@dataclass(frozen=True, slots=True)
class DumpEvidence:
    """What a run's dumped rollouts and its checkpoints show."""

    #: of the test of the sampler's log-probs: its conclusion, empty where it was not possible; whether it
    #: accuses the sampler; the first step that does; why an alarm has no guarantee, or empty
    sampler: str = ""
    accuses_sampler: bool = False
    alarm_step: int | None = None
    no_guarantee: str = ""
    num_tokens: int = 0
    #: of the comparison with the kept weights: its conclusion, empty where it was not possible; the fault
    #: (`never delivered`, `late`, `base`, `unknown`) or empty; what to do
    who_sampled: str = ""
    wrong_sampler: str = ""
    fix: str = ""
    #: of equal responses to a prompt; None: no response was sampled twice
    reward_noise: RewardNoise | None = None
    optimizer: OptimizerState | None = None  # None: not read, or it does not count updates


class LoggedWarning(NamedTuple):
    """A line that warns of something that will end the run."""

    text: str
    line: int  # in the log, from 1


@dataclass(frozen=True, slots=True)
class RunLog:
    """The log of one run, as the rules read it."""

    path: Path  # the log file
    table: Table  # its content: `table.series("actor/lr")` has `steps` and `values`
    spec: RunSpec | None = None  # spec of the run, if its `spec.yaml` is next to the log
    notes: tuple[str, ...] = ()  # problems of the log that were tolerated when reading
    framework: Framework = "rlctl"  # the framework that wrote the log
    #: canonical metric → its name and definition in the log, for every column
    origins: Mapping[str, MetricOrigin] = field(default_factory=dict)
    #: known settings of the run; rules read these and the columns, never the framework's name
    facts: Facts = Facts()
    #: fact → where it comes from, one clause: `the configuration in the log`, …; for every known fact
    fact_origins: Mapping[str, str] = field(default_factory=dict)
    exception: LoggedException | None = None  # the exception at the end of the log
    warnings: tuple[LoggedWarning, ...] = ()  # lines that warn of a disk that is nearly full
    dumps: DumpEvidence | None = None  # None: no rollouts, or they were not read
    unread: tuple[str, ...] = ()  # names in the log that match no known metric, sorted

    @property
    def gap_is_mismatch(self) -> bool:
        """Whether only the two implementations can cause the logged gap between the policies.

        In bypass mode the gap includes the policy's changes during the updates on a batch. With stale samples
        it includes the changes since the older weights that sampled them.
        """
        ages = [age for key in th.STALENESS if len(age := self.table.series(key).values)]
        if any(age.max() > 0.0 for age in ages) or (self.facts.is_async and not ages):
            return False
        return self.facts.bypass_mode is False or self.facts.updates_per_batch == 1

    @property
    def is_supervised(self) -> bool:
        """Whether the log has a loss and nothing of reinforcement learning: of supervised fine-tuning."""
        name = self.origins[_LOSS].name if _LOSS in self.origins else ""
        is_plain = name.rpartition("/")[2] in {"loss", "train_loss"}
        return is_plain and self.table.columns.keys() <= _OF_ANY_TRAINING

    @property
    def has_first_step(self) -> bool:
        """Whether the log begins with the run's first step; unknown where the rows have no step."""
        return (
            len(self.table.steps) > 0 and self.table.steps[0] <= th.FIRST_STEP and COUNTED not in self.notes
        )

    @property
    def reward_span(self) -> tuple[float, float] | None:
        """The worst and the best single reward of the run; None where they are not logged, or equal."""
        best, worst = (self.table.series(key).values for key in (th.BEST, th.WORST))
        if len(best) == 0 or len(worst) == 0 or best.max() <= worst.min():
            return None
        return float(worst.min()), float(best.max())

    @property
    def likely_span(self) -> tuple[float, float] | None:
        """`reward_span`, or where it is not logged 0 to 1, if all mean rewards are; None where unknown."""
        score = self.table.series(th.SCORE).values
        in_unit = len(score) > 0 and score.min() >= 0.0 and score.max() <= 1.0
        return self.reward_span or ((0.0, 1.0) if in_unit else None)

    def reward_position(self, score: float | None) -> float | None:
        """Position of a mean reward in the likely span, from 0 (worst) to 1 (best); None where unknown."""
        span = self.likely_span
        return None if score is None or span is None else (score - span[0]) / (span[1] - span[0])

    @property
    def has_learned(self) -> bool:
        """Whether the newest mean rewards are near the best single reward."""
        score = self.table.series(th.SCORE).values
        position = self.reward_position(float(np.median(score[-th.WINDOW :])) if len(score) else None)
        return position is not None and position >= th.LEARNED

    @property
    def has_gained(self) -> bool:
        """Whether the mean reward rose over the run by at least `FLAT_REWARD` of its range."""
        score = self.table.series(th.SCORE).values
        if len(score) < 2 * th.MIN_STEPS:
            return False
        before, after = map(self.reward_position, ends(score, min(th.WINDOW, len(score) // 2)))
        return before is not None and after is not None and after - before >= th.FLAT_REWARD

    @property
    def validation(self) -> Series:
        """The mean over data sources of the validation score, at the steps where all were validated."""
        if not self.table.matching(th.VALIDATION):
            return self.table.series(th.VALIDATION)
        steps, columns = self.table.aligned(*self.table.matching(th.VALIDATION))
        return Series(steps, np.mean(columns, axis=0))


def ends(values: NDArray[np.float64], width: int = 0) -> tuple[float, float]:
    """Medians of the first and of the last `width` values; by default of a tenth, at least a window."""
    width = width or max(th.WINDOW, len(values) // 10)
    return float(np.median(values[:width])), float(np.median(values[-width:]))
