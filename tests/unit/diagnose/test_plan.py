"""Predictions of the planner against event-by-event simulations of the ways to sample."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from rlctl.cli.diagnose import diagnose
from rlctl.diagnose.plan import plan
from rlctl.errors import UsageError
from tests.unit.diagnose.logs import run_log, write_run

app = typer.Typer()
app.command()(diagnose)
#: Responses per batch, seconds per decoding step of a sequence, seconds per decoding step of all sequences.
N, SYNC = 32, 0.2
Floats = NDArray[np.float64]


class Machine:
    """An engine whose decoding step takes `a` + `b` · sequences / N / replicas, and a trainer."""

    def __init__(self, a: float, b: float, rest: float, spread: float = 0.6, seed: int = 0) -> None:
        self.a, self.b, self.rest = a, b, rest
        draw = np.random.default_rng(seed)
        self.lengths = np.maximum(draw.lognormal(3.5, spread, (60, N)).astype(int), 1)
        self.rests = rest * draw.uniform(0.9, 1.1, 60)

    def sampling(self, lengths: NDArray[np.int64], replicas: int = 1) -> float:
        """Seconds until all responses of a batch are complete, decoding step by decoding step."""
        seconds = 0.0
        for step in range(int(lengths.max())):
            seconds += self.a + self.b * float((lengths > step).sum()) / N / replicas
        return seconds

    def synchronous(self, replicas: int = 1) -> Floats:
        gens = [self.sampling(lengths, replicas) for lengths in self.lengths]
        return np.array(gens) + self.rests + SYNC

    def one_batch_ahead(self, replicas: int = 1) -> float:
        """A thread samples the next batch from the start of a step on; the sync waits for its end."""
        now = sampled = self.sampling(self.lengths[0], replicas)
        start = now
        for number in range(len(self.lengths) - 1):
            sampled = now + self.sampling(self.lengths[number + 1], replicas)
            now = max(now + self.rests[number], sampled) + SYNC
        return (now - start) / (len(self.lengths) - 1)

    def in_flight(self, replicas: int = 1) -> float:
        """N sequences are always open; the trainer takes N that ended, and its sync stops the decoding."""
        lengths = iter(self.lengths.ravel().tolist())
        slots = [next(lengths) for _ in range(N)]
        clock = free_at = 0.0
        ended, steps = 0, list[float]()
        while True:
            clock += self.a + self.b / replicas
            slots = [left - 1 for left in slots]
            for place in (place for place, left in enumerate(slots) if not left):
                ended += 1
                if (following := next(lengths, None)) is None:
                    return float(np.diff(steps[2:]).mean())
                slots[place] = following
            if ended >= N and clock >= free_at:
                ended -= N
                clock += SYNC
                free_at = clock + self.rest
                steps.append(clock)

    def rows(self) -> list[dict[str, float]]:
        return [
            {
                "step": number,
                "timing_s/gen": self.sampling(lengths),
                "timing_s/step": self.sampling(lengths) + self.rests[number - 1] + SYNC,
                "timing_s/sync_weights": SYNC,
                "response_length/mean": float(lengths.mean()),
                "response_length/max": float(lengths.max()),
            }
            for number, lengths in enumerate(self.lengths, 1)
        ]


@pytest.mark.parametrize(
    ("a", "b", "rest"),
    [(0.02, 0.001, 1.0), (0.001, 0.03, 1.0), (0.02, 0.02, 0.5), (0.005, 0.005, 4.0)],
    ids=["latency", "throughput", "both", "slow trainer"],
)
def test_predictions_are_within_15_percent_of_a_simulation(a: float, b: float, rest: float) -> None:
    machine = Machine(a, b, rest)
    modes = {mode.name: mode.seconds for mode in plan(run_log(machine.rows())).modes}
    for place, replicas in enumerate((1, 2, 4)):
        assert modes["synchronous"][place] == pytest.approx(machine.synchronous(replicas).mean(), rel=0.15)
        assert modes["one batch ahead"][place] == pytest.approx(machine.one_batch_ahead(replicas), rel=0.15)
        assert modes["in flight"][place] == pytest.approx(machine.in_flight(replicas), rel=0.15)
    assert modes["synchronous"][0] == pytest.approx(machine.synchronous()[1:].mean(), rel=1e-6)


def test_what_is_missing_is_named() -> None:
    rows = Machine(0.01, 0.01, 1.0).rows()
    with pytest.raises(UsageError, match="only 3 steps after the first"):
        plan(run_log(rows[:4]))
    with pytest.raises(UsageError, match="the time that the trainer waits"):
        plan(run_log(rows, "rollout.max_staleness=1"))


@pytest.mark.parametrize("gen", [0.0, -1.0, 50.0])
def test_durations_that_are_no_parts_of_the_step_are_refused(gen: float) -> None:
    rows = [row | {"timing_s/gen": gen} for row in Machine(0.01, 0.01, 1.0).rows()]
    with pytest.raises(UsageError, match=r"s per step, timing_s/gen is .+ and timing_s/sync_weights 0.2 s"):
        plan(run_log(rows))


def test_the_command(tmp_path: Path) -> None:
    servers = ("rollout.name=vllm", "rollout.mode=server", "rollout.server.replicas=2")
    run = write_run(tmp_path / "run", Machine(0.01, 0.01, 1.0).rows(), *servers)
    said = CliRunner().invoke(app, [str(run), "--plan"])
    assert said.exit_code == 0, said.output
    assert "2 replicas" in said.stdout
    assert "rollout.in_flight=true" in said.stdout
    [document] = json.loads(CliRunner().invoke(app, [str(run), "--plan", "--format", "json"]).stdout)
    assert [mode["name"] for mode in document["modes"]] == ["synchronous", "one batch ahead", "in flight"]
