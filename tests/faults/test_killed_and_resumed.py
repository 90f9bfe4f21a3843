"""Runs that die, and what the next one makes of what they left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from rlctl.track.heartbeats import Beat, beats_of_node
from tests import hooks, runs, two_tries
from tests.listeners import assert_on_loopback
from tests.processes import Job

pytestmark = pytest.mark.usefixtures("embedded")
RUN = ("-p", "rloo-seq-is", "trainer.total_training_steps=6", "trainer.save_freq=2")


@pytest.fixture(scope="module")
def whole(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without any fault."""
    return runs.train(
        tmp_path_factory.mktemp("whole") / "run", *RUN, env={"RLCTL_CACHE": str(embedded_cache)}
    )


def assert_same_run(run: Path, whole: Path) -> None:
    """Bit for bit: metrics, rollouts, and the trained weights."""
    assert [line["step"] for line in runs.metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert runs.reproducible(run) == runs.reproducible(whole)
    assert runs.rollouts(run) == runs.rollouts(whole)
    weights = "checkpoints/step_000006/model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()


def finish(run: Path, before: Callable[[], None] | None = None) -> str:
    job = runs.resume(run, before=before)
    assert job.wait() == 0, job.output[-4000:]
    return job.output


def killed(run: Path, before: partial, env: dict[str, str] | None = None) -> None:
    job = runs.start_train(run, *RUN, before=before, env=env)
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    assert job.orphans() == []


@pytest.fixture(scope="module")
def killed_after_5(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed after step 5, checkpoints of steps 2 and 4; never written to."""
    run = tmp_path_factory.mktemp("killed") / "run"
    killed(run, partial(hooks.kill_after_logging, 5), env={"RLCTL_CACHE": str(embedded_cache)})
    assert runs.checkpoints(run) == ["step_000002", "step_000004"]
    return run


@pytest.fixture
def half_done(killed_after_5: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(killed_after_5, tmp_path / "run"))


def test_killed_between_checkpoints(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    killed(run, partial(hooks.kill_after_logging, 5))
    assert "resuming after step 4" in finish(run)
    assert_same_run(run, whole)
    discarded = (run / "metrics.discarded.jsonl").read_text().splitlines()
    assert len(discarded) == 1


@pytest.mark.parametrize(("moment", "from_step"), [("writing", 2), ("before", 2), ("after", 4)])
def test_killed_while_saving(tmp_path: Path, whole: Path, moment: str, from_step: int) -> None:
    run = tmp_path / "run"
    killed(run, partial(hooks.kill_in_save, 4, moment))
    said = finish(run)
    assert f"resuming after step {from_step}" in said
    assert ("set aside" in said) == (moment != "after")
    assert_same_run(run, whole)


IN_BACKGROUND = "trainer.save_in_background=true"


@pytest.mark.thorough
def test_killed_while_a_thread_writes_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    """The one before is used; a run whose checkpoints are written during training is the same run."""
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, IN_BACKGROUND, before=partial(hooks.kill_in_background, 4))
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    assert job.orphans() == []
    assert [line["step"] for line in runs.metrics(run)][:5] == [1, 2, 3, 4, 5]
    assert runs.checkpoints(run) == [".partial-000004", "step_000002"]
    said = finish(run)
    assert "resuming after step 2" in said
    assert "set aside .partial-000004" in said
    assert_same_run(run, whole)


@pytest.mark.thorough
def test_two_ranks_resume_from_a_checkpoint_that_was_written_in_the_background(
    tmp_path: Path, embedded: Path
) -> None:
    waited, during = tmp_path / "waited", tmp_path / "during"
    for run, way in ((waited, "false"), (during, "true")):
        job = runs.start_train(run, *SHARED, f"trainer.save_in_background={way}", before=hooks.forked_ranks)
        assert job.wait() == 0, job.output[-4000:]
        assert runs.checkpoints(run) == ["step_000001", "step_000002"]
    assert runs.reproducible(during) == runs.reproducible(waited)
    shutil.rmtree(during / "checkpoints/step_000002")
    assert "resuming after step 1" in finish(during, before=hooks.forked_ranks)
    assert runs.reproducible(during) == runs.reproducible(waited)
    for file in (waited / "checkpoints/step_000002/model").iterdir():
        assert (during / "checkpoints/step_000002/model" / file.name).read_bytes() == file.read_bytes()


# --- an export that the ranks write together -----------------------------------------------------------

SHARED = (
    "-p",
    "rloo-seq-is",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module")
def exported(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of the model after two steps on two ranks, none of which was killed."""
    run = tmp_path_factory.mktemp("exported") / "run"
    env = {"RLCTL_CACHE": str(embedded_cache)}
    job = runs.start_train(run, *SHARED, before=hooks.share_exports, env=env)
    assert job.wait() == 0, job.output[-4000:]
    files = files_of_model(run)
    assert sum(name.endswith(".safetensors") for name in files) == 2
    return files


def files_of_model(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "checkpoints/step_000002/model").iterdir()}


def models_in(run: Path) -> list[Path]:
    """Directories with a config and all weights that a loader looks for."""
    found = []
    for config in run.rglob("config.json"):
        at = config.parent
        indices = list(at.glob("*.index*.json"))
        shards = {name for index in indices for name in json.loads(index.read_text())["weight_map"].values()}
        has_all = bool(shards) and all((at / name).exists() for name in shards)
        if has_all or (at / "model.safetensors").exists():
            found.append(at)
    return found


@pytest.mark.parametrize("whom", ["main", "other", "all", "joining"])
def test_killed_while_ranks_write_an_export_together(
    tmp_path: Path, embedded: Path, exported: dict[str, bytes], whom: str
) -> None:
    """Nothing half-written looks complete, the run names the rank, and the next one writes the same bytes."""
    run = tmp_path / "run"
    job = runs.start_train(run, *SHARED, before=partial(hooks.share_exports, 2, whom))
    code = job.wait(120)
    assert job.orphans() == []
    if whom == "all":
        assert code == -signal.SIGKILL
    else:
        assert code == 1
        assert f"rank {int(whom == 'other')} ended without an error message" in job.output
        assert "resume with --resume" in job.output
        assert "free space" not in job.output
        assert "Traceback" not in job.output
    assert models_in(run) == [run / "checkpoints/step_000001/model"]
    assert runs.checkpoints(run) == [".partial-000002", "step_000001"]
    said = finish(run, before=hooks.share_exports)
    assert "set aside .partial-000002" in said
    assert "resuming after step 1" in said
    assert files_of_model(run) == exported
    assert runs.checkpoints(run) == ["damaged-partial-000002", "step_000001", "step_000002"]
    assert set(models_in(run)) == {run / f"checkpoints/step_00000{step}/model" for step in (1, 2)}


def test_the_rank_that_must_not_write_is_named(tmp_path: Path, embedded: Path) -> None:
    """Not one that fails because of it; then the incomplete checkpoint is removed."""
    run = tmp_path / "run"
    job = runs.start_train(run, *SHARED, before=partial(hooks.refuse_export, 2))
    assert job.wait(120) == 1
    assert "the checkpoint of step 2 could not be written: Permission denied (rank 1)" in job.output
    assert "No such file" not in job.output
    assert runs.checkpoints(run) == ["step_000001"]


def test_killed_during_a_validation(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, "trainer.test_freq=3", before=partial(hooks.kill_in_validation, 3))
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    assert "resuming after step 2" in finish(run)
    lines = [line for line in runs.reproducible(run) if line["step"] > 0]
    assert [line["step"] for line in lines if any(key.startswith("val/") for key in line)] == [3, 6]
    trained = [{key: value for key, value in line.items() if not key.startswith("val/")} for line in lines]
    assert trained == runs.reproducible(whole)
    assert all((run / f"evaluations/step_{step:06d}/samples.parquet").exists() for step in (3, 6))


def test_killed_right_after_the_metrics_of_a_saved_step(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    killed(run, partial(hooks.kill_after_logging, 4))
    finish(run)
    assert_same_run(run, whole)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest"])
def test_damaged_checkpoint_falls_back_one(half_done: Path, whole: Path, damage: str) -> None:
    run = half_done
    newest = run / "checkpoints/step_000004"
    victim = newest / "model/model.safetensors"
    content = bytearray(victim.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "truncated":
        victim.write_bytes(content[:-100])
    elif damage == "missing":
        victim.unlink()
    else:
        (newest / "manifest.json").write_text('{"state": ')
    said = finish(run)
    assert "set aside step_000004" in said
    assert "resuming after step 2" in said
    assert_same_run(run, whole)
    assert "damaged-step_000004" in runs.checkpoints(run)


def test_half_a_last_line_of_metrics(half_done: Path, whole: Path) -> None:
    run = half_done
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6, "timesta')
    finish(run)
    assert_same_run(run, whole)


def test_full_disk_keeps_earlier_checkpoints(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, before=partial(hooks.no_large_files_after, 3))
    assert job.wait() == 1
    assert "earlier checkpoints are intact" in job.output
    assert "bug" not in job.output
    assert runs.checkpoints(run) == ["step_000002"]
    finish(run)
    assert_same_run(run, whole)


def test_the_clock_jumps(tmp_path: Path, whole: Path) -> None:
    """An hour back, then a year ahead: steps, metrics and checkpoints are those of any other run."""
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, before=partial(hooks.clock_jumps, -3600.0, 3.2e7))
    assert job.wait() == 0, job.output[-4000:]
    assert_same_run(run, whole)
    assert all(line["timing_s/step"] < 600 for line in runs.metrics(run))


def test_moved_run_directory_resumes(half_done: Path, killed_after_5: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in killed_after_5.rglob("*")}
    finish(half_done)
    assert_same_run(half_done, whole)
    assert {path: path.stat().st_mtime_ns for path in killed_after_5.rglob("*")} == before


def test_finished_run_has_nothing_left_to_do(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    finish(run)
    assert_same_run(run, whole)


@pytest.mark.slow
def test_killed_at_any_time_in_an_environment_in_lockstep(tmp_path: Path) -> None:
    """Four of four runs, and no process of the environment outlives its run."""
    given, file = (*RUN, *two_tries.options(tmp_path)), tmp_path / "tries.py"
    whole = runs.train(tmp_path / "whole", *given)
    after_saving = sum(line["timing_s/step"] for line in runs.metrics(whole)[2:])
    drawn, kills = random.Random(1), 0
    while kills < 4:
        run = tmp_path / f"run-{kills}"
        job = runs.start_train(run, *given)
        job.wait_for((run / "checkpoints/step_000002").is_dir)
        time.sleep(drawn.uniform(0.0, 0.8) * after_saving)
        with contextlib.suppress(ProcessLookupError):
            job.signal(signal.SIGKILL)
        was_killed = job.wait() == -signal.SIGKILL  # else it had ended already
        assert job.orphans() == []
        left = [p for p in psutil.process_iter(["cmdline"]) if str(file) in " ".join(p.info["cmdline"] or ())]
        assert psutil.wait_procs(left, timeout=30)[1] == []
        if was_killed:
            kills += 1
            finish(run)
            assert two_tries.reproducible(run) == two_tries.reproducible(whole)
            weights = "checkpoints/step_000006/model/model.safetensors"
            assert (run / weights).read_bytes() == (whole / weights).read_bytes()
        shutil.rmtree(run)


# --- signals ------------------------------------------------------------------------------------------

LONG = ("-p", "rloo-seq-is", "trainer.total_training_steps=100000", "trainer.logger=[]")


def running(run: Path, *arguments: str) -> Job:
    """A long run that has made a few steps."""
    job = runs.start_train(run, *LONG, *arguments, before=hooks.pauses)
    job.wait_for(lambda: len(runs.metrics(run)) >= 3)
    assert_on_loopback(job)
    return job


def pid_of_rank(run: Path, job: Job, rank: int) -> int:
    """Waits for a few heartbeats: the first one that the others read may be of an earlier process."""

    def beat() -> Beat | None:
        return beats_of_node(run, 0, size=rank + 1).get(rank)

    job.wait_for(lambda: (last := beat()) is not None and last.number >= 6)
    last = beat()
    assert last is not None
    return last.pid


def assert_resumable_where_it_stopped(run: Path) -> str:
    """Returns the output of the resumed run."""
    last = runs.metrics(run)[-1]["step"]
    assert runs.checkpoints(run)[-1] == f"step_{last:06d}"
    # On one rank, whatever it was.
    more = runs.resume(run, f"trainer.total_training_steps={last + 2}", "trainer.n_gpus_per_node=1")
    assert more.wait() == 0, more.output[-4000:]
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, last + 3))
    return more.output


@pytest.mark.parametrize(
    ("number", "code", "sync_every"), [(signal.SIGTERM, 143, 1000), (signal.SIGINT, 130, 1)]
)
def test_asked_once_it_saves_and_leaves(tmp_path: Path, number: int, code: int, sync_every: int) -> None:
    run = tmp_path / "run"
    job = running(run, f"rollout.sync_every={sync_every}")
    job.signal(number)
    assert job.wait() == code
    assert "interrupted" in job.output
    assert "--resume" in job.output
    assert job.orphans() == []
    output = assert_resumable_where_it_stopped(run)
    assert ("stopped between two weight syncs" in output) == (sync_every > 1)


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_reaches_every_process_of_the_terminal(tmp_path: Path, count: int) -> None:
    run = tmp_path / "run"
    job = running(run, f"trainer.n_gpus_per_node={count}")
    job.signal_group(signal.SIGINT)
    assert job.wait() == 130
    assert job.orphans() == []
    assert_resumable_where_it_stopped(run)


def test_preempted_on_two_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = running(run, "trainer.n_gpus_per_node=2")
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert job.orphans() == []
    assert_resumable_where_it_stopped(run)


def test_every_rank_reports_a_signal_to_one(tmp_path: Path, embedded: Path) -> None:
    run = tmp_path / "run"
    main, other = runs.start_ranks(run, 2, "trainer.total_training_steps=100000", "trainer.save_every=null")
    main.wait_for(lambda: len(runs.metrics(run)) >= 2)
    other.signal(signal.SIGTERM)
    assert [main.wait(), other.wait()] == [143, 143]


def test_asked_twice_it_leaves_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *LONG, before=hooks.slow_steps)
    job.wait_for(lambda: len(runs.metrics(run)) >= 2)
    job.signal(signal.SIGINT)
    time.sleep(1.5)
    job.wait_for(lambda: True)  # it is in the middle of a step of a minute
    job.signal(signal.SIGINT)
    assert job.wait(30) == 130
    assert job.orphans() == []


def test_killed_rank_takes_the_others_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = running(run, "trainer.n_gpus_per_node=2")
    os.kill(pid_of_rank(run, job, 1), signal.SIGKILL)
    assert job.wait(120) == 1  # seconds on a quiet machine, far more on a busy one
    assert "rank" in job.output
    assert "ended without an error message" in job.output
    assert "Traceback" not in job.output
    assert job.orphans() == []


def test_a_stopped_rank_is_named_and_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = running(run, "trainer.n_gpus_per_node=2", "trainer.hang_timeout=20s")
    pid = pid_of_rank(run, job, 1)
    os.kill(pid, signal.SIGSTOP)
    assert job.wait(170) == 1
    assert "no progress for" in job.output
    assert f"waiting for rank 1 (pid {pid} on " in job.output
    assert "stopped or cannot be reached" in job.output
    assert "Thread 0x" in (run / "stacks-rank0.txt").read_text()
    assert "Traceback" not in job.output
    assert job.orphans() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_asked_to_stop_while_starting_it_leaves_at_once_and_leaves_nothing(
    tmp_path: Path, embedded: Path, ranks: int
) -> None:
    job = runs.start_train(tmp_path / "run", f"trainer.n_gpus_per_node={ranks}")
    job.wait_for(lambda: "importing torch" in job.output)
    assert (tmp_path / "run").is_dir()
    job.signal_group(signal.SIGTERM)
    assert job.wait() == 143
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in job.output


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_ranks_end_with_their_launcher(tmp_path: Path, embedded: Path, moment: str) -> None:
    run = tmp_path / "run"
    two = "trainer.n_gpus_per_node=2"
    if moment == "running":
        job = running(run, two)
    else:
        job = runs.start_train(run, two)
        job.wait_for(lambda: "importing torch" in job.output)
    assert len(job.family()) >= 3
    job.signal(signal.SIGKILL)
    job.wait()
    assert job.orphans() == []


def test_a_run_whose_launcher_was_killed_can_be_resumed_at_once(tmp_path: Path, embedded: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, "trainer.n_gpus_per_node=2", before=hooks.forked_ranks)
    job.wait_for((run / "checkpoints/step_000002").is_dir)
    job.signal(signal.SIGKILL)
    finish(run, before=hooks.forked_ranks)  # its ranks may still be at work
    assert [row["step"] for row in runs.metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert runs.checkpoints(run)[-1] == "step_000006"
    assert job.orphans() == []
