"""Test clusters of two nodes on this machine: real daemons on loopback, with all files in one directory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlctl.processes import free_port

_MARK = "RLCTL_TEST_CLUSTER"
_READY_S = 120.0


@contextmanager
def slurm_nodes(where: Path) -> Iterator[dict[str, str]]:
    """A Slurm cluster of two nodes, each with a GPU whose device file is /dev/null; all files are in `where`.

    Yields:
        Environment variables for users of this cluster.
    """
    munged, slurmctld, slurmd, sinfo, *_ = needed("munged", "slurmctld", "slurmd", "sinfo", "salloc", "srun")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    host = socket.gethostname().partition(".")[0]  # must be resolvable: the ranks connect to a node's name
    (where / "state").mkdir()
    (where / "munge.key").write_bytes(secrets.token_bytes(64))
    (where / "munge.key").chmod(0o600)
    (where / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    conf = where / "slurm.conf"
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={free_port()}\nSlurmUser=root\n"
        f"AuthType=auth/munge\nAuthInfo=socket={where}/munge.socket\nCryptoType=crypto/munge\nMailProg=/bin/true\n"
        f"StateSaveLocation={where}/state\nSlurmdSpoolDir={where}/%n\n"
        f"SlurmctldPidFile={where}/ctld.pid\nSlurmdPidFile={where}/%n.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\nMpiDefault=none\n"
        "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nGresTypes=gpu\n"
        f"NodeName={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 Gres=gpu:1\n"
        f"NodeName={host}-b NodeAddr=127.0.0.2 Port={free_port()} CPUs=1 Gres=gpu:1\n"
        "PartitionName=all Nodes=ALL Default=YES\n"
    )
    munge = [
        munged,
        "--foreground",
        "--force",
        f"--key-file={where}/munge.key",
        f"--pid-file={where}/munge.pid",
    ]
    munge += [f"--socket={where}/munge.socket", f"--seed-file={where}/munge.seed"]
    nodes = [[slurmd, "-D", "-N", name] for name in (host, f"{host}-b")]
    env = {"SLURM_CONF": str(conf), _MARK: str(where)}
    with daemons(where, [munge], env):
        wait_for((where / "munge.socket").exists, where)
        with daemons(where, [[slurmctld, "-D"], *nodes], env):
            wait_for(lambda: succeeds([sinfo, "-h", "-o", "%D%t"], env, says="2idle"), where)
            yield env


@contextmanager
def daemons(where: Path, commands: list[list[str]], env: dict[str, str]) -> Iterator[None]:
    """Starts daemons; at the end, stops them and all processes that they or their users started."""
    started = []
    try:
        for command in commands:
            with (where / f"{Path(command[0]).name}.log").open("ab") as log:
                started.append(
                    subprocess.Popen(command, env=os.environ | env, cwd=where, stdout=log, stderr=log)
                )
        yield
    finally:
        for daemon in started:
            daemon.terminate()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                # Slurm's step daemon overwrites its environment, but keeps its working directory.
                if process.environ().get(_MARK) == str(where) or process.cwd() == str(where):
                    process.kill()
        for daemon in started:
            daemon.wait()


def needed(*programs: str) -> list[str]:
    """Paths of these programs; skips the test if one is not installed."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    found = {program: shutil.which(program, path=path) for program in programs}
    if missing := [program for program, at in found.items() if at is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return [at for at in found.values() if at is not None]


def succeeds(command: list[str], env: dict[str, str], says: str = "") -> bool:
    """Whether the command exits with 0 and prints exactly `says`."""
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == says


def wait_for(condition: Callable[[], bool], where: Path) -> None:
    """Waits until the condition holds; after a timeout, fails with the ends of the logs in `where`."""
    deadline = time.monotonic() + _READY_S
    while not condition():
        if time.monotonic() > deadline:
            logs = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in where.glob("*.log")]
            pytest.fail("\n".join([f"the cluster is not ready within {_READY_S:g} s", *logs]))
        time.sleep(0.1)
