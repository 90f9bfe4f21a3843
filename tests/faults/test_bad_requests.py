"""Invalid requests end with an exit code and one message, without a traceback, and leave no files."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import hooks, runs
from tests.own_model import save_tiny_qwen2
from tests.processes import Job

pytestmark = pytest.mark.usefixtures("embedded")
RUN = ("-p", "rloo-seq-is", "trainer.total_training_steps=2")
OWN = ("engine.dtype=fp32", "data.max_prompt_length=64", "data.max_response_length=8")


def refused(job: Job, code: int, *said: str) -> str:
    assert job.wait() == code, job.output[-4000:]
    for words in said:
        assert words in " ".join(job.output.split()), job.output[-4000:]
    assert "Traceback" not in job.output
    assert "bug in rlctl" not in job.output
    return job.output


@pytest.fixture(scope="module")
def done(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, never written to."""
    where = tmp_path_factory.mktemp("done") / "run"
    return runs.train(where, *RUN, env={"RLCTL_CACHE": str(embedded_cache)})


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


# --- the run directory ----------------------------------------------------------------------------


def test_second_run_in_a_directory_in_use(tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = ("-p", "rloo-seq-is", "trainer.total_training_steps=100000")
    first = runs.start_train(run, *long, before=hooks.pauses)
    try:
        first.wait_for(lambda: len(runs.metrics(run)) >= 1)
        second = runs.start("train", f"trainer.run_dir={run}", log=tmp_path / "second")
        refused(second, 2, "another run is using this directory", str(first.pid))
        third = runs.start("train", "--resume", str(run), log=tmp_path / "third")
        refused(third, 2, "another run is using this directory")
        assert first.family()
    finally:
        first.end()


def test_new_run_in_a_finished_ones_directory(copy: Path) -> None:
    before = (copy / "metrics.jsonl").read_bytes()
    refused(runs.start_train(copy, *RUN), 2, "not empty", "--resume")
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("what", ["missing", "empty", "other files"])
def test_resume_of_what_is_no_run(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    if what != "missing":
        run.mkdir()
    if what == "other files":
        (run / "notes.txt").write_text("mine")
    refused(runs.resume(run), 2, "not a run directory")
    assert run.exists() == (what != "missing")


def test_resume_without_a_checkpoint(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    refused(runs.resume(copy), 2, "ended before its first checkpoint", "nothing to resume", "spec.yaml")
    assert (copy / "metrics.jsonl").exists()


@pytest.mark.parametrize("again", ["the same command", "its recorded spec"])
def test_a_run_that_failed_before_its_first_checkpoint_is_started_again(tmp_path: Path, again: str) -> None:
    """In the same directory, as its messages say; nothing of the first one is lost."""
    run = tmp_path / "run"
    three = (*RUN, "trainer.total_training_steps=3", "trainer.save_freq=3")
    job = runs.start_train(run, *three, before=partial(hooks.failing_sync_at, 2))
    assert job.wait() == 1
    said = " ".join(job.output.split())
    assert "no checkpoint was written yet (trainer.save_freq = 3)" in said
    assert "the directory can be used again" in said
    assert "--resume" not in said
    assert "--resume" not in (run / "failure.json").read_text()
    refused(runs.resume(run), 2, "ended before its first checkpoint")
    before = (run / "environment.json").read_bytes()
    if again == "the same command":
        job = runs.start_train(run, *three)
    else:
        job = runs.start("train", str(run / "spec.yaml"), f"trainer.run_dir={run}", log=tmp_path / "again")
    assert job.wait() == 0, job.output[-4000:]
    assert "its files are in earlier-1/" in " ".join(job.output.split())
    assert [line["step"] for line in runs.metrics(run)] == [1, 2, 3]
    assert runs.checkpoints(run) == ["step_000003"]
    assert (run / "earlier-1" / "environment.json").read_bytes() == before
    assert (run / "earlier-1" / "failure.json").exists()
    assert not (run / "failure.json").exists()
    refused(runs.start_train(run, *RUN), 2, "not empty", "--resume")


def test_an_attempt_that_fails_at_once_keeps_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    three = (*RUN, "trainer.total_training_steps=3", "trainer.save_freq=3")
    first = runs.start_train(run, *three, before=partial(hooks.failing_sync_at, 2))
    assert first.wait() == 1
    second = runs.start_train(run, *three, before=partial(hooks.failing_sync_at, 1))  # no step is logged
    assert second.wait() == 1
    assert [path.name for path in run.iterdir() if not path.name.startswith(".")] == ["earlier-1"]
    assert runs.start_train(run, *RUN).wait() == 0
    assert (run / "earlier-1" / "failure.json").exists()


def test_resume_with_every_checkpoint_damaged(copy: Path) -> None:
    for weights in copy.rglob("*.safetensors"):
        weights.write_bytes(b"rubbish")
    refused(runs.resume(copy), 2, "no complete checkpoint")
    assert len(runs.metrics(copy)) == 2


def test_resume_with_another_learning_rate(copy: Path) -> None:
    before = (copy / "spec.yaml").read_bytes()
    refused(runs.resume(copy, "actor.lr=1e-3"), 2, "actor.lr", "was 0.0005", "0.001")
    assert (copy / "spec.yaml").read_bytes() == before


def test_resume_with_more_steps(copy: Path) -> None:
    job = runs.resume(copy, "trainer.total_training_steps=4")
    assert job.wait() == 0, job.output
    assert "trainer.total_training_steps: 2 → 4" in " ".join(job.output.split())
    assert [line["step"] for line in runs.metrics(copy)] == [1, 2, 3, 4]


def test_resume_with_a_preset(copy: Path) -> None:
    refused(runs.resume(copy, "-p", "rloo-seq-is"), 2, "its own spec")


def test_resume_with_other_ranks_and_batches_sampled_ahead(tmp_path: Path) -> None:
    run = runs.train_on_ranks(tmp_path / "run", 2, *RUN, "rollout.staleness=1")
    said = ("sampled ahead are those of 2 ranks", "trainer.n_gpus_per_node=2")
    refused(runs.resume(run, "trainer.n_gpus_per_node=1", "trainer.total_training_steps=3"), 2, *said)
    assert len(runs.metrics(run)) == 2


def test_read_only_parent(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    refused(
        runs.start("train", f"trainer.run_dir={blocker / 'run'}", log=tmp_path / "log"),
        2,
        "cannot be written",
    )


def test_a_resume_with_other_rows(copy: Path) -> None:
    kept = copy / "inputs.json"
    content = json.loads(kept.read_text())
    assert list(content["rows"]) == ["data.train_files", "data.val_files"]
    changed = content["rows"] | {"data.train_files": "0" * 64}
    kept.write_text(json.dumps(content | {"rows": changed}))
    lines = runs.metrics(copy)
    job = runs.resume(copy, "trainer.total_training_steps=3")
    refused(job, 2, "not as at the start of the run: data.train_files", "trainer.accept_changed_inputs=true")
    assert runs.metrics(copy) == lines
    job = runs.resume(copy, "trainer.total_training_steps=3", "trainer.accept_changed_inputs=true")
    assert job.wait() == 0
    assert "data.train_files has changed since the run began" in " ".join(job.output.split())
    assert json.loads(kept.read_text()) == content
    assert "accept_changed_inputs: false" in (copy / "spec.yaml").read_text()


# --- data and model ---------------------------------------------------------------------------------


@pytest.fixture
def few(embedded: Path, tmp_path: Path) -> Path:
    """Eight rows of the embedded task."""
    path = tmp_path / "few.parquet"
    pq.write_table(pq.read_table(next(embedded.glob("embedded/*/train.parquet"))).slice(0, 8), path)
    return path


def test_data_smaller_than_a_batch(few: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, f"data.train_files={few}", "data.train_batch_size=16")
    refused(job, 2, "a batch takes 16 prompts, the data has 8")
    assert not run.exists()


def test_broken_parquet(few: Path, tmp_path: Path) -> None:
    content = few.read_bytes()
    few.write_bytes(content[: len(content) // 2])
    run = tmp_path / "run"
    refused(runs.start_train(run, *RUN, f"data.train_files={few}"), 2, str(few))
    assert not run.exists()


def test_data_file_missing(tmp_path: Path) -> None:
    refused(
        runs.start_train(tmp_path / "run", *RUN, "data.train_files=nowhere.parquet"), 2, "nowhere.parquet"
    )


def test_model_path_missing(few: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, *OWN, "model.path=./nowhere", f"data.train_files={few}")
    refused(job, 2, "no such directory", "./nowhere")
    assert not run.exists()


def test_hub_cannot_be_reached(few: Path, tmp_path: Path) -> None:
    job = runs.start_train(
        tmp_path / "run", *RUN, *OWN, "model.path=nobody/nothing", f"data.train_files={few}"
    )
    refused(job, 4, "nobody/nothing", "HF_HUB_OFFLINE")


def test_model_that_is_no_model(few: Path, tmp_path: Path) -> None:
    model = save_tiny_qwen2(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"rubbish")
    job = runs.start_train(tmp_path / "run", *RUN, *OWN, f"model.path={model}", f"data.train_files={few}")
    refused(job, 2, str(model))


def test_tokenizer_larger_than_the_model(few: Path, tmp_path: Path) -> None:
    model = save_tiny_qwen2(tmp_path / "model", extra_tokens=3)
    job = runs.start_train(tmp_path / "run", *RUN, *OWN, f"model.path={model}", f"data.train_files={few}")
    refused(job, 2, "the tokenizer has 260 tokens", "257")


def test_prompt_and_response_longer_than_the_context(few: Path, tmp_path: Path) -> None:
    model = save_tiny_qwen2(tmp_path / "model", context=64)
    job = runs.start_train(tmp_path / "run", *RUN, *OWN, f"model.path={model}", f"data.train_files={few}")
    refused(job, 2, "may have 72 tokens together", "64")


def test_prompt_longer_than_allowed(few: Path, tmp_path: Path) -> None:
    model = save_tiny_qwen2(tmp_path / "model")
    shared = (*RUN, *OWN, f"model.path={model}", f"data.train_files={few}", "data.max_prompt_length=10")
    refused(runs.start_train(tmp_path / "a", *shared), 2, "no prompt remains")
    refused(
        runs.start_train(tmp_path / "b", *shared, "data.filter_overlong_prompts=false"),
        2,
        "the prompt has",
        "few.parquet",
    )


def test_error_on_a_rank_is_the_launchers(tmp_path: Path, few: Path) -> None:
    """torch's long output would hide the second rank's error; rlctl reports this error with its exit code."""
    run = tmp_path / "run"
    two = ("trainer.n_gpus_per_node=2", f"data.train_files={few}", "data.max_prompt_length=1")
    job = runs.start_train(run, *RUN, *two, before=hooks.forked_ranks)
    refused(job, 2, "no prompt remains", "(rank ")
    assert job.orphans() == []
    assert not run.exists()


# --- while it runs ------------------------------------------------------------------------------------


def test_some_bad_numbers_cost_their_sequences(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, before=partial(hooks.nan_rollouts_at, 1, 1))
    assert job.wait() == 0, job.output
    lines = runs.metrics(run)
    assert [line["rollout_corr/nonfinite_sequences"] for line in lines] == [1.0, 0.0]
    assert all(isinstance(value, float | int) for key, value in lines[0].items() if key != "timestamp")
    assert "NaN or infinite log-probs" in job.output


def test_many_bad_numbers_stop_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = partial(hooks.nan_rollouts_at, 2, 16)
    job = runs.start_train(run, *RUN, "trainer.save_freq=1", before=before)
    refused(job, 1, "16 of 16 sequences have NaN or infinite log-probs", "max_nonfinite_fraction")
    assert len(runs.metrics(run)) == 1
    more = runs.resume(run)
    assert more.wait() == 0, more.output


def test_everything_rejected_goes_on_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(
        run,
        *RUN,
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2",
        before=hooks.far_rollouts,
    )
    assert job.wait() == 0, job.output
    lines = runs.metrics(run)
    assert [line["rollout_corr/skipped_updates"] for line in lines] == [2.0, 2.0]
    assert [line["rollout_corr/rollout_rs_masked_fraction"] for line in lines] == [1.0, 1.0]
    assert "rejected" in job.output


def test_grader_that_fails_now_and_then(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *RUN, before=partial(hooks.failing_grader, 16))
    assert job.wait() == 0, job.output
    assert [line["reward/num_errors"] for line in runs.metrics(run)] == [2.0, 2.0]
    assert sum(row["reward"] is None for row in runs.rollouts(run)) == 4


def test_grader_that_fails_often(tmp_path: Path) -> None:
    job = runs.start_train(tmp_path / "run", *RUN, before=partial(hooks.failing_grader, 2))
    assert job.wait() == 1
    assert "the grader failed on 16 of 32 responses" in job.output
    assert "the grader choked" in job.output
    assert "bug in rlctl" not in job.output


ENDS_ITS_GRADING = """
import os, zlib

def grade(response, ground_truth):
    if response != ground_truth and zlib.crc32(response.encode()) % 2:
        os.abort()
    return 1.0 if response == ground_truth else 0.25
"""


def test_responses_that_crash_the_grader_are_wrong_and_do_not_stop_the_run(tmp_path: Path) -> None:
    run, function = tmp_path / "run", tmp_path / "grader.py"
    function.write_text(ENDS_ITS_GRADING)
    job = runs.start_train(run, *RUN, f"reward.name={function}:grade")
    assert job.wait() == 0, job.output
    lines, rows = runs.metrics(run), runs.rollouts(run)
    assert [line["reward/num_errors"] for line in lines] == [0.0, 0.0]
    assert all(row["reward"] is not None for row in rows)
    crashed = sum(row["reward"] == 0.0 for row in rows)
    assert sum(line["reward/num_timeouts"] for line in lines) == crashed > 0.1 * len(rows)
    assert all(line["critic/score/min"] == 0.0 for line in lines)  # of those that are valid
    assert "made their grading fail (on this rank crash: " in job.output


def test_weights_lost_on_the_way_to_the_rollout(tmp_path: Path) -> None:
    job = runs.start_train(tmp_path / "run", *RUN, before=partial(hooks.failing_sync_at, 1))
    refused(job, 1, "weight sync", "missing")
