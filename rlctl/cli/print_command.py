"""`rlctl train --print-command`: shell commands that start the ranks of a spec, also by torchrun or Slurm.

On one machine `rlctl train` starts all ranks itself. On several, every process that a launcher starts is
`rlctl train` with the same arguments; it reads its rank from the environment.
"""

from __future__ import annotations

import shlex

from rlctl.cli.command import echo
from rlctl.errors import UsageError
from rlctl.run_spec.run_spec import RunSpec

_PORTS = """\
# Node 0 listens on all its interfaces at MASTER_PORT; ranks and vLLM servers listen at further ports of the
# interface on the route to MASTER_ADDR; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another one. Use a
# network that only this run's users can reach. SECURITY.md lists who can use what.
"""


def launches(spec: RunSpec, arguments: list[str]) -> dict[str, list[str]]:
    """Launcher and where to run it → commands: `nnodes` × `n_gpus_per_node` ranks of `rlctl train ARGUMENTS`.

    For torchrun, which only several nodes need, there is one command per node, in order.

    Raises:
        UsageError: the run directory would be named after the time, which ranks on several nodes cannot agree
            on.
    """
    nodes = spec.trainer.nnodes
    gpus = spec.trainer.n_gpus_per_node
    servers = spec.rollout.server
    is_beside = spec.has_rollout_servers and not (servers.urls or servers.is_placed_by_ray)
    taken = gpus + is_beside * servers.replicas * spec.rollout.tensor_model_parallel_size
    # Without a number of CPUs, srun binds the task, and so all ranks, to one.
    srun = f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {taken} --kill-on-bad-exit "
    srun += '--cpus-per-task "${SLURM_JOB_CPUS_PER_NODE%%[(,]*}" '
    if nodes == 1:
        command = f"rlctl {shlex.join(['train', *arguments])}"
        starts = f"it starts the {gpus} ranks" if gpus > 1 else "it is the only rank"
        return {
            f"on the machine: {starts}": [command],
            f"srun: in a batch script with --nodes 1 --gpus-per-node {taken}, or after salloc": [
                srun + command
            ],
        }
    if "--resume" not in arguments and not spec.trainer.run_dir:
        raise UsageError(
            "ranks on several machines cannot agree on a run directory named after the time",
            where="trainer.run_dir",
            fix="set trainer.run_dir=…, a directory that every node can access",
        )

    def torchrun(node: str, address: str) -> str:
        # `-m rlctl` would import from the working directory, which may be someone else's.
        # torchrun gives each rank one thread, too few for an optimizer that is computed on the host. Its
        # c10d rendezvous, not used here, unpickles what anyone can store at its port.
        threads = f'OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(( ($(nproc) + {gpus - 1}) / {gpus} ))}}"'
        ranks = f"--nnodes {nodes} --nproc-per-node {gpus} --node-rank {node}"
        first = f'--master-addr {address} --master-port "${{MASTER_PORT:-29500}}"'
        return f"{threads} torchrun {ranks} {first} --no-python rlctl {shlex.join(['train', *arguments])}"

    srun += "bash -c " + shlex.quote(torchrun('"$SLURM_NODEID"', '"$HEAD"'))
    address = '"${MASTER_ADDR:?the address of node 0}"'
    return {
        "torchrun: run it on every node, MASTER_ADDR set to node 0; training starts when all have joined": [
            torchrun(str(node), address) for node in range(nodes)
        ],
        "srun: in a batch script, or after salloc": [
            'export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            srun,
        ],
    }


def print_commands(spec: RunSpec, arguments: list[str]) -> None:
    """Prints the commands of both launchers to stdout."""
    if spec.trainer.nnodes > 1:
        echo(_PORTS)
    for title, commands in launches(spec, arguments).items():
        echo("\n".join([f"# {title}", *commands, ""]))
