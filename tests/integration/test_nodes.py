"""Several nodes: the commands that `--print-command` prints, really run on one machine's loopback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.processes import free_port
from tests import runs
from tests.clusters import slurm_nodes
from tests.processes import TIMEOUT_S

STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1")
TWO_NODES = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The commands, without the comments."""
    assert run(["train", *arguments, "--print-command"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def one_node(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one node with two ranks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(embedded_cache))
        return runs.train_on_ranks(tmp_path_factory.mktemp("one") / "run", 2, *STEPS)


@pytest.fixture
def tools(forked_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python` and `torchrun` that are found first."""
    monkeypatch.setenv("PATH", str(forked_commands), prepend=os.pathsep)


def shell(command: str, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A line of shell in `log`'s directory."""
    port = {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        return subprocess.Popen(
            ["bash", "-c", command],
            env=os.environ | port | env,
            cwd=log.parent,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def assert_ends_well(logs: dict[Path, subprocess.Popen[bytes]]) -> None:
    try:
        codes = [node.wait(TIMEOUT_S) for node in logs.values()]
    finally:
        for node in logs.values():
            node.kill()
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)


@pytest.mark.usefixtures("tools")
def test_torchrun(tmp_path: Path, one_node: Path, embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "two nodes"  # a space, which must survive the shell
    commands = printed(capsys, *runs.SMALL, *runs.CORRECTED, *STEPS, *TWO_NODES, f"trainer.run_dir={where}")[
        :2
    ]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [tmp_path / f"node{node}.log" for node in range(2)]
    assert_ends_well({log: shell(command, log, address) for command, log in zip(commands, logs, strict=True)})
    runs.assert_close(where, one_node)


@pytest.mark.usefixtures("tools")
def test_slurm(tmp_path: Path, one_node: Path, embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / 'its\' $HOME 100% %h `id` \\ "mine"'  # two shells read it
    commands = printed(capsys, *runs.SMALL, *runs.CORRECTED, *STEPS, *TWO_NODES, f"trainer.run_dir={where}")[
        2:
    ]
    job = shlex.join(["salloc", "--nodes", "2", "--gpus-per-node", "1", "bash", "-ec", "\n".join(commands)])
    (tmp_path / "slurm").mkdir()
    with slurm_nodes(tmp_path / "slurm") as env:
        log = tmp_path / "log"
        assert_ends_well({log: shell(job, log, env)})
    runs.assert_close(where, one_node)


def test_a_lost_rank_is_named_as_the_cause(tmp_path: Path, embedded: Path) -> None:
    run = tmp_path / "run"
    first, second = runs.start_ranks(run, 2, "trainer.total_training_steps=1000", "trainer.save_freq=-1")
    first.wait_for(lambda: len(runs.metrics(run)) >= 2)
    second.signal(signal.SIGKILL)
    assert first.wait() == 1
    assert "another rank has ended" in first.output
    assert "This is a bug" not in first.output


def test_too_few_ranks(tmp_path: Path, embedded: Path) -> None:
    [alone] = runs.start_ranks(tmp_path / "run", 1, "trainer.nnodes=2")
    assert alone.wait() == 2
    assert "ranks started: 1, ranks of the spec: 2" in alone.output


def test_every_launcher_starts_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--preset", "rloo-seq-is", "trainer.run_dir=/shared/it's mine", "trainer.logger=[console]"]
    shape = ["trainer.nnodes=3", "trainer.n_gpus_per_node=4", "data.train_batch_size=12"]
    shape.append("actor.ppo_mini_batch_size=12")
    commands = printed(capsys, *given, *shape)
    torchruns = [shlex.split(line) for line in commands if " torchrun " in line and "srun" not in line]
    assert [words[words.index("--node-rank") + 1] for words in torchruns] == ["0", "1", "2"]
    [srun] = [shlex.split(shlex.split(line)[-1]) for line in commands if line.startswith("srun")]
    for words in [*torchruns, srun]:
        assert words[-len(given + shape) :] == [*given, *shape]
    for words in [*torchruns, srun]:
        assert words[words.index("--nnodes") + 1] == "3"
        assert words[words.index("--nproc-per-node") + 1] == "4"


def test_a_run_directory_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "trainer.nnodes=2", "--print-command"]) == 2
    assert "trainer.run_dir" in capsys.readouterr().err
