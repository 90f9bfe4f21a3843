"""Runs of other kinds that are killed: FSDP2, PPO with a critic, two ranks; each resumes bit for bit."""

from __future__ import annotations

import signal
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest

from tests import hooks, runs
from tests.faults.test_killed_and_resumed import finish

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded")]
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=2")
#: Kind of run → its arguments, and its number of ranks.
KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "FSDP2": (("-p", "rloo-seq-is", "engine.name=fsdp"), 1),
    "PPO with a critic and old log-probs": (
        ("-p", "ppo-seq-is-token-rs", "algorithm.rollout_correction.bypass_mode=false"),
        1,
    ),
    "two ranks": (("-p", "rloo-seq-is"), 2),
}
CASES = list(product(KINDS, ("between checkpoints", "before", "writing", "after")))


def kill(moment: str, ranks: int) -> None:
    """Kills the main rank in the save of step 4, or after the metrics of step 3."""
    if ranks > 1:
        hooks.forked_ranks()
    if moment == "between checkpoints":
        hooks.kill_after_logging(3)
    else:
        hooks.kill_in_save(4, moment)


def arguments(kind: str) -> tuple[str, ...]:
    settings, ranks = KINDS[kind]
    return (*settings, *STEPS, f"trainer.n_gpus_per_node={ranks}")


@pytest.fixture(scope="module")
def whole(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory):
    """Kind → a run of it that was not stopped."""

    @cache
    def run(kind: str) -> Path:
        env = {"RLCTL_CACHE": str(embedded_cache)}
        before = hooks.forked_ranks if KINDS[kind][1] > 1 else None
        directory = tmp_path_factory.mktemp("whole") / "run"
        job = runs.start_train(directory, *arguments(kind), before=before, env=env)
        assert job.wait() == 0, job.output[-4000:]
        return directory

    return run


def check(kind: str, moment: str, run: Path, whole: Path) -> None:
    ranks = KINDS[kind][1]
    job = runs.start_train(run, *arguments(kind), before=partial(kill, moment, ranks))
    assert job.wait() in (-signal.SIGKILL, 1), job.output[-4000:]
    assert job.orphans() == []
    assert "Traceback" not in job.output
    said = finish(run, before=hooks.forked_ranks if ranks > 1 else None)
    assert f"resuming after step {4 if moment == 'after' else 2}" in said
    assert [line["step"] for line in runs.metrics(run)] == [1, 2, 3, 4]
    assert runs.reproducible(run) == runs.reproducible(whole)
    assert runs.rollouts(run) == runs.rollouts(whole)
    files = sorted(path.name for path in (whole / "checkpoints/step_000004/model").iterdir())
    for name in files:
        model = Path("checkpoints/step_000004/model") / name
        assert (run / model).read_bytes() == (whole / model).read_bytes(), name


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_killed_and_resumed_bit_for_bit(tmp_path: Path, whole, kind: str, moment: str) -> None:
    check(kind, moment, tmp_path / "run", whole(kind))
