"""Counts what grows with the ranks of a run, at 8 to 1,024 ranks, before and now, without a cluster.

    python benchmarks/thousand_ranks.py [--json FILE] [--ranks 8,64,256,1024] [--groups]

- heartbeats: the files that all ranks open per second; the ranks are objects of this process, a node has 8.
  Before: one file per rank, read by every other rank.
- resume: the bytes that a rank hashes, of a checkpoint of a 70B model under ZeRO-3 (empty files of the sizes
  of a real one). Before: all on rank 0.
- dealing: the CPU seconds in which a rank assigns 8,192 episodes to the ranks.
- servers: the requests one after another in which as many servers as nodes are asked about their sizes.
- vLLM's groups (`--groups`, needs vLLM): those that an engine in each rank forms, in a fake process group;
  with and without `VLLM_DISTRIBUTED_USE_SPLIT_GROUP=1`.
- memory: GiB per GPU of weights, gradients and optimizer of a 70B model in bf16, by the planner.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlctl.engine.checkpoint import parts_of_files
from rlctl.files import write_text
from rlctl.rollout.server_client import ServerClient
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import memory_parts
from rlctl.run_spec.model_size import model_size
from rlctl.train.deal import Dealt, assigned
from rlctl.train.open_files import files_needed
from rlctl.train.peers import Peers

PER_NODE, INTERVAL_S = 8, 2.0
#: Parameters of Llama-3.1-70B; bytes of each in the shards of ZeRO-3 (weights, fp32 copy, moments), exported.
PARAMETERS, SHARD_BYTES, EXPORT_BYTES = 70_553_706_496, 14, 2
EXPORTED_FILE = 2**30

#: Files opened below this directory, while one is set, counted by `_count`.
_counted: dict[str, Any] = {"below": None, "opens": 0}


def _count(event: str, arguments: tuple[object, ...]) -> None:
    below = _counted["below"]
    if event == "open" and below and str(arguments[0]).startswith(below):
        _counted["opens"] += 1


def opens_before(world_size: int, directory: Path) -> float:
    """Files opened per second by the earlier heartbeats: every rank writes its file and reads all others.

    Counted for eight ranks, which all do the same.
    """
    directory.mkdir()
    files = [directory / f"{rank:05d}.json" for rank in range(world_size)]
    for file in files:
        file.touch()
    _counted.update(below=str(directory), opens=0)
    for rank in range(PER_NODE):
        write_text(files[rank], "{}")
        for other, file in enumerate(files):
            if other != rank:
                file.read_text()
    _counted["below"] = None
    return float(_counted["opens"]) * world_size / PER_NODE / INTERVAL_S


def opens_now(world_size: int, directory: Path) -> float:
    """Files opened per second by all ranks of a run that goes on."""
    directory.mkdir()
    options: Any = {"per_node": PER_NODE, "interval_s": INTERVAL_S, "now": 0.0}
    peers = [Peers(rank, world_size, directory, **options) for rank in range(world_size)]
    for peer in peers:  # each opens the file of its node
        peer.exchange(1, "step 1, sampling", 0.0, 1.0)
    _counted.update(below=str(directory), opens=0)
    for peer in peers:
        peer.exchange(1, "step 1, sampling", 0.0, 1.0 + INTERVAL_S)
    _counted["below"] = None
    for peer in peers:
        peer.leave()
    return float(_counted["opens"]) / INTERVAL_S


def bytes_to_hash(world_size: int, directory: Path) -> tuple[int, int]:
    """Bytes of all files of a checkpoint, and the most that a rank hashes."""
    sizes = {f"engine/rank-{r}.pt": PARAMETERS * SHARD_BYTES // world_size for r in range(world_size)}
    exported = PARAMETERS * EXPORT_BYTES
    sizes |= {f"model/{number}": EXPORTED_FILE for number in range(exported // EXPORTED_FILE)}
    for name, num_bytes in sizes.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.truncate(num_bytes)  # takes no space
    parts = parts_of_files(directory, dict.fromkeys(sizes, ""), world_size)
    return sum(sizes.values()), max(sum(sizes[name] for name in part) for part in parts)


def seconds_to_deal(world_size: int) -> float:
    """CPU seconds in which a rank assigns 8,192 episodes of long-tailed lengths to ranks; best of five."""
    draw = np.random.default_rng(0)
    count = 8192
    tokens = (draw.random(count) ** 4 * 8192).astype(np.int64) + 512
    index, one, prompts = np.arange(count), np.ones(count, np.int64), np.full(count, 256)
    episodes = Dealt(
        mini=index // (count // 4),
        group=index // 8,
        member=index % 8,
        source=index % world_size,
        place=index // world_size,
        prompt=prompts,
        token=tokens,
        sampled=tokens - prompts,
        sequence=one,
        episode=one,
    )
    found = []
    for _ in range(5):
        start = time.process_time()
        assigned(episodes, world_size)
        found.append(time.process_time() - start)
    return min(found)


class _CountedServers(ServerClient):
    """A client of servers that all answer when no further request comes."""

    def __init__(self, count: int) -> None:
        urls = [f"http://server-{number}" for number in range(count)]
        super().__init__(urls, load_spec([], [], []).spec.rollout.server)
        self.turns, self._open = 0, 0

    async def send(self, url: str, path: str, *_: Any, **__: Any) -> httpx.Response:
        del url, path
        self.turns += self._open == 0
        self._open += 1
        await asyncio.sleep(0.2)
        self._open -= 1
        return httpx.Response(200, json={"world_size": 1})


def turns_of_requests(servers: int) -> int:
    """Groups of requests that are sent one after the other when the group for weight transfer is formed."""
    client = _CountedServers(servers)
    futures = [client.start(client.send(url, "/get_world_size")) for url in client.urls]
    for future in futures:
        future.result()
    client.close()
    return client.turns


def gib_per_gpu(world_size: int, *overrides: str) -> float:
    """GiB of a rank's weights, gradients and optimizer states of a 70B model, by the planner."""
    spec = load_spec(
        [],
        [],
        [
            "model.path=meta-llama/Llama-3.1-70B",
            "data.train_files=x",
            "engine.dtype=bf16",
            f"trainer.n_gpus_per_node={PER_NODE}",
            f"trainer.nnodes={world_size // PER_NODE}",
            "data.train_batch_size=1024",
            "actor.ppo_mini_batch_size=1024",
            *overrides,
        ],
    ).spec
    names = {"weights", "weights of a group", "gradients", "optimizer (AdamW)"}
    parts = memory_parts(spec, model_size(spec.model))
    return sum(part.num_bytes or 0.0 for part in parts if part.name in names) / 2**30


_GROUPS = """
import os, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
world = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
count, new_group = 0, dist.new_group
def counted(*args, **options):
    global count
    count += 1
    return new_group(*args, **options | {"backend": "fake"})
def split(*args, **options):
    global count
    count += 1
    return dist.distributed_c10d._get_default_group()
dist.new_group, dist.split_group = counted, split
from vllm.config import VllmConfig, set_current_vllm_config
import vllm.distributed.parallel_state as state
state.in_the_same_node_as = lambda group, source_rank=0: [True] * world
with set_current_vllm_config(VllmConfig()):
    state.init_distributed_environment(world, 0, "env://", 0, "gloo")
    state.initialize_model_parallel(1, 1, backend="gloo")
print("groups", count)
"""


def groups_of_vllm(world_size: int, *, splits: bool) -> int:
    """Groups that vLLM forms on a rank whose engine runs in the process."""
    environment = os.environ | {
        "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": str(int(splits)),
        "LOCAL_RANK": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", _GROUPS, str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return int(done.stdout.rpartition("groups ")[2])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", default="8,64,256,1024")
    parser.add_argument("--groups", action="store_true")
    given = parser.parse_args()
    worlds = [int(number) for number in given.ranks.split(",")]
    sys.addaudithook(_count)
    rows = dict[str, list[str]]()

    def row(name: str, values: list[str]) -> None:
        rows[name] = values
        print(f"| {name} | " + " | ".join(values) + " |", flush=True)

    print("| ranks | " + " | ".join(f"{world:,}" for world in worlds) + " |")
    print("|---|" + "---|" * len(worlds))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name, count in (("before", opens_before), ("now", opens_now)):
            found = [count(world, root / f"{name}-{world}") for world in worlds]
            row(f"heartbeats: opens per second of all ranks, {name}", [f"{opens:,.0f}" for opens in found])
        hashed = [bytes_to_hash(world, root / f"checkpoint-{world}") for world in worlds]
        for name, place in (("before", 0), ("now", 1)):
            values = [f"{found[place] / 2**30:,.1f}" for found in hashed]
            row(f"resume of a 70B model: GiB that one rank hashes, {name}", values)
    row(
        "dealing 8,192 episodes: CPU seconds of each rank",
        [f"{seconds_to_deal(world):.3f}" for world in worlds],
    )
    servers = [max(1, world // PER_NODE) for world in worlds]
    row("a server per node: requests in turn, before", [str(count) for count in servers])
    row("a server per node: requests in turn, now", [str(turns_of_requests(count)) for count in servers])
    if given.groups:
        for splits in (False, True):
            name = f"groups that vLLM forms on each rank{', split' if splits else ''}"
            row(name, [f"{groups_of_vllm(world, splits=splits):,}" for world in worlds])
    layouts = {
        "ZeRO-3": ("engine.zero_stage=3",),
        "ZeRO-3, shard_size 8": ("engine.zero_stage=3", "engine.shard_size=8"),
        "FSDP2": ("engine.name=fsdp",),
        "FSDP2, shard_size 8": ("engine.name=fsdp", "engine.shard_size=8"),
    }
    for name, overrides in layouts.items():
        values = [f"{gib_per_gpu(world, *overrides):,.1f}" for world in worlds]
        row(f"GiB per GPU of a 70B model: {name}", values)
    thousand = [f"trainer.nnodes={max(1, world // PER_NODE)}" for world in worlds]
    shared = ("trainer.n_gpus_per_node=8", "data.train_batch_size=1024", "actor.ppo_mini_batch_size=1024")
    specs = [load_spec([], [], [nodes, *shared, "rollout.name=vllm"]).spec for nodes in thousand]
    row("files and connections that a rank may open", [f"{files_needed(spec):,}" for spec in specs])
    if given.json:
        given.json.write_text(json.dumps({"ranks": worlds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
