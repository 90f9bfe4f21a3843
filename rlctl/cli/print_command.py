"""`rlctl train --print-command`: shell commands that start the ranks of a spec, for up to three launchers.

Every process that a launcher starts is `rlctl train` with the same arguments; it reads its rank from the
environment.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from rlctl.cli.command import echo
from rlctl.errors import UsageError
from rlctl.spec.run_spec import RunSpec

_MODULE = "rlctl"
_PORT = "${MASTER_PORT:-29500}"
_ADDRESS = f'--master-addr "${{MASTER_ADDR:?the address of node 0}}" --master-port "{_PORT}"'

_PORTS = """\
# Node 0 listens on all its interfaces at MASTER_PORT; ranks and vLLM servers listen at further ports of the
# interface on the route to MASTER_ADDR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another one. Use a
# network that only this run's users can reach. SECURITY.md lists who can use what.
"""


class Launch(NamedTuple):
    """One way to start a run."""

    launcher: str  # `torchrun`, `deepspeed` or `srun`
    where: str  # where to run the commands, in words
    commands: tuple[str, ...]  # shell commands in order; for torchrun, one per node


def launches(spec: RunSpec, arguments: list[str]) -> list[Launch]:
    """The commands that start `spec.trainer.nnodes` × `n_gpus_per_node` ranks of `rlctl train ARGUMENTS`.

    Raises:
        UsageError: the run directory would be named after the time, which ranks cannot agree on.
    """
    if "--resume" not in arguments and not spec.trainer.run_dir:
        raise UsageError(
            "ranks on several machines cannot agree on a run directory named after the time",
            where="trainer.run_dir",
            fix="set trainer.run_dir=…, a directory that every node can access",
        )
    nodes, gpus = spec.trainer.nnodes, spec.trainer.n_gpus_per_node
    train = f"{_MODULE} {shlex.join(['train', *arguments])}"
    shape = f"--nnodes {nodes} --nproc-per-node {gpus}"
    # torchrun gives each rank one thread, too few for an optimizer that is computed on the host.
    threads = f'OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( ($(nproc) + {gpus - 1}) / {gpus} ))}}" '
    torchrun = [
        f"{threads}torchrun {shape} --node-rank {node} {_ADDRESS} -m {train}" for node in range(nodes)
    ]
    servers = spec.rollout.server
    is_beside = spec.has_rollout_servers and not (servers.urls or servers.is_placed_by_ray)
    taken = gpus + is_beside * servers.replicas * spec.rollout.tensor_model_parallel_size
    # Not torchrun's c10d rendezvous, which unpickles what anyone can store at its port.
    each = (
        f'{threads}torchrun {shape} --node-rank "$SLURM_NODEID" --master-addr "$HEAD" --master-port "{_PORT}"'
    )
    # Without a number of CPUs, srun binds the task, and so all ranks, to one.
    slurm = f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {taken} --kill-on-bad-exit "
    slurm += '--cpus-per-task "${SLURM_JOB_CPUS_PER_NODE%%[(,]*}" '
    slurm += f"bash -c {shlex.quote(f'{each} -m {train}')}"
    found = [
        Launch(
            "torchrun",
            "run it on every node, MASTER_ADDR set to node 0; training starts when all nodes have joined",
            tuple(torchrun),
        ),
        Launch(
            "deepspeed",
            f"on one node, which reaches the others by ssh; hostfile: a line `<host> slots={gpus}` per node",
            (_deepspeed(nodes, gpus, arguments),),
        ),
        Launch(
            "srun",
            "in a batch script, or after salloc",
            ('export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', slurm),
        ),
    ]
    # DeepSpeed's launcher hides all GPUs except one per rank, so servers on the same nodes would have none.
    return [each for each in found if not (is_beside and each.launcher == "deepspeed")]


def _deepspeed(nodes: int, gpus: int, arguments: list[str]) -> str:
    """The command of DeepSpeed's launcher; for several nodes it uses pdsh, so arguments are quoted for it."""
    options = f"--hostfile hostfile --num_nodes {nodes} --num_gpus {gpus} --no_local_rank"
    options += f' --master_addr "${{MASTER_ADDR:-}}" --master_port "{_PORT}"'
    if nodes > 1:
        options += " --force_multi"
        arguments = [_for_pdsh(argument) for argument in arguments]
    return f"deepspeed {options} --module {_MODULE} {shlex.join(['train', *arguments])}"


def _for_pdsh(argument: str) -> str:
    """Quotes `argument` so that DeepSpeed's launcher passes it unchanged to the ranks of another node.

    pdsh replaces %h, %n and %u, and %% by %. Then the node's shell parses the line, in which DeepSpeed has
    put arguments that contain a space in double quotes, with escapes, and has not quoted the others.
    """
    argument = argument.replace("%", "%%")
    return re.sub(r"[\\$`]", r"\\\g<0>", argument) if " " in argument else shlex.quote(argument)


def print_commands(spec: RunSpec, arguments: list[str]) -> None:
    """Prints the commands of all launchers to stdout."""
    if spec.trainer.nnodes > 1:
        echo(_PORTS)
    for launch in launches(spec, arguments):
        echo("\n".join([f"# {launch.launcher}: {launch.where}", *launch.commands, ""]))
