"""Several nodes: the commands that `--print-command` prints, really run on one machine's loopback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.cli.app import run
from tests import runs
from tests.processes import TIMEOUT_S, free_port

STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The commands, without the comments."""
    assert run(["train", *arguments, "--print-command"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_two_nodes_are_one_run(tmp_path: Path, embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = tmp_path / "two nodes"  # a space, which must survive the shell
    shape = ("trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"trainer.run_dir={where}")
    commands = printed(capsys, *runs.SMALL, *STEPS, *shape)[:2]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | address | {"PATH": path, "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"node{node}.log" for node in range(2)]
    nodes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as file:
            nodes.append(
                subprocess.Popen(["bash", "-c", command], env=env, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        codes = [node.wait(TIMEOUT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    runs.assert_close(where, runs.train_on_ranks(tmp_path / "one", 2, *STEPS))


def test_every_launcher_starts_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--preset", "rloo-seq-is", "trainer.run_dir=/shared/it's mine", "trainer.logger=[console]"]
    shape = ["trainer.nnodes=3", "trainer.n_gpus_per_node=4", "data.train_batch_size=12"]
    shape.append("actor.ppo_mini_batch_size=12")
    commands = printed(capsys, *given, *shape)
    torchruns = [shlex.split(line) for line in commands if line.startswith("torchrun")]
    assert [words[words.index("--node-rank") + 1] for words in torchruns] == ["0", "1", "2"]
    [deepspeed] = [shlex.split(line) for line in commands if line.startswith("deepspeed")]
    [srun] = [shlex.split(line) for line in commands if line.startswith("srun")]
    for words in [*torchruns, deepspeed, srun]:
        assert words[-len(given + shape) :] == [*given, *shape]
    for words in [*torchruns, srun]:
        assert words[words.index("--nnodes") + 1] == "3"
        assert words[words.index("--nproc-per-node") + 1] == "4"
    assert deepspeed[deepspeed.index("--num_nodes") + 1] == "3"
    assert deepspeed[deepspeed.index("--num_gpus") + 1] == "4"


def test_a_run_directory_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "trainer.nnodes=2", "--print-command"]) == 2
    assert "trainer.run_dir" in capsys.readouterr().err
