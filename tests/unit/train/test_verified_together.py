"""A run resumes from a checkpoint that all of its ranks have verified, each its part."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.engine import checkpoint
from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.files import sha256_of
from rlctl.train.saving import verified_together
from tests.processes import on_ranks

WORLD = 64


class Threads:
    """Collectives of ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.size, self._held = world_size, [None] * world_size
        self._barrier = threading.Barrier(world_size)

    def ranks(self, number: int) -> Ranks:
        return ThreadRanks(number, self.size, torch.device("cpu"), self)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._held[rank] = value
        self._barrier.wait(60)
        gathered = list(self._held)
        self._barrier.wait(60)
        return gathered

    def run(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What the work returns or raises on each rank."""
        results: list[Any] = [None] * self.size

        def run_one(number: int) -> None:
            try:
                results[number] = work(self.ranks(number))
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=run_one, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadRanks(Ranks):
    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def exchange(self, values: list[Any]) -> list[Any]:
        return [value for part in self.group.gather(self.rank, values) for value in part]

    def from_main(self, value: Any) -> Any:
        return self.group.gather(self.rank, value)[0]


def write(root: Path, step: int) -> Path:
    """A checkpoint like that of `WORLD` ranks: a shard of each, and the model in three files."""
    partial = begin(root, step)
    for rank in range(WORLD):
        (partial / f"engine/rank_{rank:02d}.pt").write_bytes(os.urandom(10_000))
    for number in range(3):
        (partial / f"model/part-{number}").write_bytes(os.urandom(50_000))
    return publish(root, partial, TrainerState(step, step, WORLD), keep=None).path


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_each_rank_hashes_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = write(tmp_path, 3)
    hashed: Counter[str] = Counter()

    def counted(path: Path) -> str:
        hashed[threading.current_thread().name] += path.stat().st_size
        return sha256_of(path)

    monkeypatch.setattr(checkpoint, "sha256_of", counted)
    found = Threads(WORLD).run(lambda ranks: verified_together(ranks, tmp_path))
    assert found[0][0].path == newest
    assert found[1:] == [(None, [])] * (WORLD - 1)
    total = WORLD * 10_000 + 3 * 50_000
    assert sum(hashed.values()) == total
    assert max(hashed.values()) <= 50_000  # one file of the model, or shards


@pytest.mark.parametrize("rank", [0, 17, WORLD - 1])
def test_a_damaged_file_of_any_rank_is_named_and_the_one_before_is_used(tmp_path: Path, rank: int) -> None:
    before, newest = write(tmp_path, 2), write(tmp_path, 3)
    damage(newest / f"engine/rank_{rank:02d}.pt")
    [(found, notes), *_] = Threads(WORLD).run(lambda ranks: verified_together(ranks, tmp_path))
    assert found is not None
    assert found.path == before
    said = f"set aside step_000003: engine/rank_{rank:02d}.pt differs from its checksum"
    assert notes == [f"{said}; step_000002 is used instead"]
    assert (tmp_path / "damaged-step_000003").is_dir()


def test_a_file_that_only_another_rank_cannot_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that not all nodes share: rank 0, which sets checkpoints aside, finds nothing wrong."""
    newest, mains = write(tmp_path, 3), []

    def other_view(path: Path) -> str:
        return "0" * 64 if "40" in path.name and threading.current_thread() not in mains else sha256_of(path)

    def work(ranks: Ranks) -> Any:
        if ranks.is_main:
            mains.append(threading.current_thread())
        return verified_together(ranks, tmp_path)

    monkeypatch.setattr(checkpoint, "sha256_of", other_view)
    results = Threads(WORLD).run(work)
    assert all(isinstance(result, RunFailure) for result in results)
    assert "reads other files than rank 0: engine/rank_40.pt differs" in results[0].what
    assert newest.is_dir()


def _verified(ranks: Ranks, run_dir: str) -> tuple[str, list[str]]:
    found, notes = verified_together(ranks, Path(run_dir) / CHECKPOINTS)
    return found.path.name if found else "", notes


def test_ranks_of_a_real_process_group_agree(tmp_path: Path) -> None:
    root = tmp_path / "run" / CHECKPOINTS
    write(root, 2)
    damage(write(root, 3) / "engine/rank_05.pt")
    first, *others = on_ranks(3, _verified, str(tmp_path / "run"), where=tmp_path)
    assert first[0] == "step_000002"
    assert "engine/rank_05.pt differs from its checksum" in first[1][0]
    assert others == [("", [])] * 2
