"""`rlctl diagnose RUN --plan`: seconds per step for other ways of sampling, from a run's logged durations.

Sampling of a batch takes a · (longest response) + b · (mean response): a per step of the batch's longest
sequence, b per token of the batch, both fitted over the run's steps. With more replicas b falls, a does not.

    synchronous       sampling, then everything else
    one batch ahead   the longer of sampling and everything else, and the sync that waits for both
    in flight         the longer of both, where sampling never waits for the longest response: (a + b) · mean

Sampling and training must not share processors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.table import RunLog
from rlctl.errors import UsageError

GEN, STEP, SYNC = "timing_s/gen", "timing_s/step", "timing_s/sync_weights"
MEAN, MAX = "response_length/mean", "response_length/max"
#: Metrics that a plan reads.
NEEDED = frozenset({GEN, STEP, SYNC, MEAN, MAX})
#: Factors of the run's own number of replicas.
REPLICAS = (1, 2, 4, 8)
#: Steps without which nothing is planned, and steps left out at the start, which include compilation.
_FEWEST, _WARM_UP = 4, 1


@dataclass(frozen=True, slots=True)
class PlannedMode:
    """Seconds per step of one way of sampling, for each of `REPLICAS`."""

    name: str
    settings: tuple[str, ...]  # of the spec
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the run's durations predict."""

    num_steps: int
    replicas: int  # of the run
    measured: float  # mean seconds per step
    sampling: float  # of these, sampling
    by_longest: float  # share of sampling that falls with no number of replicas
    modes: tuple[PlannedMode, ...]
    notes: tuple[str, ...]

    def as_document(self) -> dict[str, Any]:
        """The plan as values for JSON."""
        return asdict(self)


def plan(run: RunLog) -> RunPlan:
    """Predicts seconds per step.

    Raises:
        UsageError: the log lacks the durations of synchronous steps.
    """
    is_ahead = run.spec is not None and bool(run.spec.rollout.max_staleness)
    if is_ahead or run.facts.is_async:
        message = (
            f"{GEN} of a run that samples ahead is the time that the trainer waits, not that of sampling"
        )
        raise UsageError(message, where=str(run.path), fix="plan from a synchronous run, a few steps long")
    _, columns = run.table.aligned(GEN, STEP, MEAN, MAX)
    gen, step, mean, longest = (column[_WARM_UP:] for column in columns)
    if len(gen) < _FEWEST:
        message = f"only {len(gen)} steps after the first have {GEN}, {STEP}, {MEAN} and {MAX}"
        raise UsageError(
            message, where=str(run.path), fix=f"name a run of at least {_FEWEST + _WARM_UP} steps"
        )
    syncs = run.table.series(SYNC).values
    sync = float(syncs[_WARM_UP:].mean()) if len(syncs) > _WARM_UP else 0.0
    if not 0.0 < gen.mean() <= 1.01 * step.mean() - sync:
        message = f"of {step.mean():.3g} s per step, {GEN} is {gen.mean():.3g} s and {SYNC} {sync:.3g} s"
        raise UsageError(message, where=str(run.path), fix=f"name a log in which they are parts of {STEP}")
    a, b = fitted(gen, longest, mean)
    error = gen - a * longest - b * mean  # what the lengths do not explain stays as it was
    rest = np.maximum(step - gen - sync, 0.0)
    modes = {"synchronous": ["rollout.max_staleness=0"], "one batch ahead": ["rollout.max_staleness=1"]}
    modes["in flight"] = ["rollout.max_staleness=1", "rollout.in_flight=true"]
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for factor in REPLICAS:
        sampling = a * longest + b * mean / factor + error / factor
        flowing = float((a * mean + b * mean / factor + error / factor).mean())
        seconds["synchronous"].append(float((sampling + rest).mean()) + sync)
        seconds["one batch ahead"].append(float(np.maximum(sampling, np.roll(rest, 1)).mean()) + sync)
        seconds["in flight"].append(max(flowing, float(rest.mean())) + sync)
    replicas = 1
    notes = []
    if run.spec is not None:
        server = run.spec.rollout.server
        replicas = len(server.urls) or server.replicas
        if run.spec.rollout.mode != "server":
            replicas = 1
            where = "with the engine on processors of its own, as fast as now (rollout.mode=server)"
            notes.append(f"the run's engine shares the trainer's processors: predictions are {where}")
    if np.ptp(longest) < 0.05 * longest.mean() and np.ptp(mean) < 0.05 * mean.mean():
        notes.append("lengths hardly vary: how sampling scales with replicas is uncertain")
    return RunPlan(
        num_steps=len(gen),
        replicas=replicas,
        measured=float(step.mean()),
        sampling=float(gen.mean()),
        by_longest=float((a * longest).mean() / gen.mean()),
        modes=tuple(PlannedMode(name, tuple(given), tuple(seconds[name])) for name, given in modes.items()),
        notes=tuple(notes),
    )


def fitted(
    gen: NDArray[np.float64], longest: NDArray[np.float64], mean: NDArray[np.float64]
) -> tuple[float, float]:
    """Seconds per token of the longest response and of the mean one: non-negative least squares."""
    from scipy.optimize import nnls

    (a, b), _ = nnls(np.stack([longest, mean], 1), gen)
    return float(a), float(b)
