"""One run per directory, refused early, recorded without secrets."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from rlctl.track.run_dir import (
    claim_default_path,
    environment_record,
    note_in_environment,
    open_run_dir,
)
from rlctl.train.start import start_run

HOLD = """
import sys
from pathlib import Path
from rlctl.track.run_dir import open_run_dir
with open_run_dir(Path(sys.argv[1]), resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    path = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    yield path, child
    child.kill()
    child.communicate()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_process_is_refused(holder, resume: bool, monkeypatch) -> None:
    monkeypatch.setattr("rlctl.track.run_dir._LOCK_WAIT_S", 0.1)
    path, child = holder
    (path / "metrics.jsonl").touch()
    with pytest.raises(
        UsageError, match=rf"another run is using this directory \(pid {child.pid} "
    ) as caught:
        open_run_dir(path, resume=resume)
    assert caught.value.exit_code == 2
    assert caught.value.fix


def test_a_killed_holder_lets_go(holder) -> None:
    path, child = holder
    (path / "metrics.jsonl").touch()
    child.kill()
    child.wait()
    with open_run_dir(path, resume=True) as run:
        assert run.path == path


def test_a_holder_that_is_about_to_end_is_waited_for(holder) -> None:
    path, child = holder
    (path / "metrics.jsonl").touch()
    timer = threading.Timer(0.5, child.kill)  # as a rank whose launcher was killed
    timer.start()
    with open_run_dir(path, resume=True) as run:
        assert run.path == path
    timer.join()


def test_released_means_free(tmp_path: Path) -> None:
    for _ in range(2):
        with open_run_dir(tmp_path / "a" / "b", resume=False):
            pass


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"not empty \(it holds thesis\.tex\)") as caught:
        open_run_dir(tmp_path, resume=False)
    assert caught.value.fix == "choose another with trainer.run_dir=…"  # not --resume: this is no run
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "spec.yaml").touch()
    with pytest.raises(UsageError) as caught:
        open_run_dir(tmp_path, resume=False)
    assert f"--resume {tmp_path}" in (caught.value.fix or "")


def test_nothing_to_resume(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="no run to resume"):
            open_run_dir(path, resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        open_run_dir(tmp_path / "file", resume=False)
    with pytest.raises(UsageError, match="cannot be written"):
        open_run_dir(tmp_path / "file" / "below", resume=False)


def test_an_unwritable_place_is_refused() -> None:
    # /proc refuses even root, whom permission bits do not stop
    with pytest.raises(UsageError, match="cannot be written"):
        open_run_dir(Path("/proc/rlctl-run"), resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        open_run_dir(tmp_path, resume=False)


def test_default_paths_do_not_collide(tmp_path: Path) -> None:
    paths = {claim_default_path("proj", "exp", root=tmp_path) for _ in range(4)}
    assert len(paths) == 4
    assert all(path.parent == tmp_path / "proj" and path.name.startswith("exp-2") for path in paths)
    for path in paths:
        with open_run_dir(path, resume=False):
            pass


def test_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "e" * 40)
    with open_run_dir(tmp_path / "run", resume=False) as run:
        run.write_spec(
            {"model": {"path": "embedded", "hub_token": "abc"}, "algorithm": {"rollout_rs": "token_k1"}}
        )
        run.write_environment(["rlctl", "train", "--wandb-api-key", "f" * 40, "model.path=m", "x.token=t1"])
    assert (tmp_path / "run" / "spec.yaml").read_text() == (
        "model:\n  path: embedded\n  hub_token: '***'\nalgorithm:\n  rollout_rs: token_k1\n"
    )
    text = (tmp_path / "run" / "environment.json").read_text()
    record = json.loads(text)
    assert record["command"] == ["rlctl", "train", "--wandb-api-key", "***", "model.path=m", "x.token=***"]
    assert record["packages"]["torch"]
    assert record["num_cpus"] >= 1
    assert "e" * 40 not in text


def test_resumes_keep_what_the_run_ran_on_before(tmp_path: Path) -> None:
    for attempt in range(3):
        with open_run_dir(tmp_path / "run", resume=attempt > 0) as run:
            run.write_environment(["rlctl", f"attempt-{attempt}"])
            note_in_environment(run.path, rollout_engine=f"engine {attempt}")
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert record["command"] == ["rlctl", "attempt-2"]
    assert [(was["command"][1], was["rollout_engine"]) for was in record["history"]] == [
        ("attempt-0", "engine 0"),
        ("attempt-1", "engine 1"),
    ]
    assert all("history" not in was for was in record["history"])


def test_the_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment_record([])["git_commit"] is None
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    for name in ("first", "second"):
        head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        assert environment_record([])["git_commit"] == head.stdout.strip()
        Path("below").mkdir()
        monkeypatch.chdir("below")
        assert environment_record([])["git_commit"] == head.stdout.strip()
        subprocess.run(["git", "worktree", "add", "-q", "-b", name, str(tmp_path / name)], check=True)
        monkeypatch.chdir(tmp_path / name)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", name], check=True)
        subprocess.run(["git", "pack-refs", "--all"], check=True)
    assert len(environment_record([])["git_commit"]) == 40
    subprocess.run(["git", "checkout", "-q", "--detach"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert environment_record([])["git_commit"] == head.stdout.strip()


def test_a_downloaded_repository_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / ".gitattributes").write_text("* filter=f\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    (tmp_path / "file.txt").write_text("edited")
    hook = f"touch {tmp_path}/executed; false"
    for key in ("core.fsmonitor", "filter.f.clean", "filter.f.process", "core.pager", "diff.external"):
        subprocess.run(["git", "config", key, hook], check=True)
    assert environment_record([])["git_commit"]
    assert not (tmp_path / "executed").exists()
    (tmp_path / ".git/HEAD").write_text("ref: refs/../../file.txt")
    assert environment_record([])["git_commit"] is None


def test_a_failure_that_cannot_be_recorded_is_not_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_run_dir(tmp_path / "run", resume=False) as run:
        monkeypatch.setattr("rlctl.track.run_dir.write_text", full)
        run.write_failure(ValueError("the first"))
    assert not (tmp_path / "run" / "failure.json").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path, resume: bool, monkeypatch) -> None:
    """As a name in Latin-1 is read from the file system; also that of the working directory."""
    odd = tmp_path / "caf\udce9"
    odd.mkdir()
    for path in (odd, odd / "run"):
        with pytest.raises(UsageError, match="not UTF-8"):
            open_run_dir(path, resume=resume)
    monkeypatch.chdir(odd)
    with pytest.raises(UsageError, match="not UTF-8"):
        open_run_dir(Path("run"), resume=resume)
    assert not list(odd.iterdir())


@pytest.mark.parametrize(
    "override", ["trainer.run_dir={}", "data.train_files=[{}/a.parquet]", "reward.name={}/a.py:score"]
)
def test_a_spec_that_is_not_utf8_is_refused_at_the_start(tmp_path: Path, override: str) -> None:
    odd = tmp_path / "caf\udce9"
    spec = load_spec([], [], {"model.path": "embedded"}).spec
    key, value = override.format(odd).split("=")
    section, name = key.split(".")
    given = [value.strip("[]")] if value.startswith("[") else value
    changed = getattr(spec, section).model_copy(update={name: given})
    spec = spec.model_copy(update={section: changed})
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        start_run(spec, resume=None, note=lambda _: None)
    assert caught.value.where == key
