"""Ranks that share an engine, in real processes; the engine is a stub that returns its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.batch import Task, Turn
from rlctl.engine.ranks import Ranks, missing_ranks
from rlctl.environment.protocol import Outcome, Sampler
from rlctl.environment.run_episodes import run_episodes
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.tensor_parallel import TensorParallelGroup
from rlctl.run_spec.environment import EnvironmentSpec
from tests.episodes import task_of
from tests.processes import on_ranks, on_ranks_each

#: Rank → how many requests it has in each of its calls.
CALLS = {0: [1, 2], 1: [], 2: [3], 3: [1, 0, 1]}


def output(*tokens: int) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(tokens))])


def request(rank: int, call: int, place: int) -> tuple[list[int], dict[str, Any]]:
    return [rank, call, place], {"seed": 100 * rank + place}


def unequal(ranks: Ranks) -> dict[str, Any]:
    group, asked_here = TensorParallelGroup(2), []

    def answer(asked):
        asked_here.append(asked)
        return [output(*ids, options["seed"]) for ids, options in asked]

    found = []
    for call, count in enumerate(CALLS[ranks.rank]):
        mine = [request(ranks.rank, call, place) for place in range(count)]
        outputs = group.ask(mine, answer, version=7)
        found.append([each.outputs[0].token_ids for each in outputs])
    group.finish(answer, version=7)
    group.finish(answer, version=7)  # of nothing
    return {"found": found, "asked": asked_here}


def test_each_rank_gets_its_own_answers_however_often_it_asks(tmp_path: Path) -> None:
    by_rank = on_ranks(4, unequal, where=tmp_path)
    for rank, calls in CALLS.items():
        expected = [
            [[rank, call, place, 100 * rank + place] for place in range(count)]
            for call, count in enumerate(calls)
        ]
        assert by_rank[rank]["found"] == expected
    for first in (0, 2):  # the engines of a group get the same requests in the same order
        assert by_rank[first]["asked"] == by_rank[first + 1]["asked"]
    assert [len(asked) for asked in by_rank[0]["asked"]] == [1, 2]
    assert [len(asked) for asked in by_rank[2]["asked"]] == [4, 0, 1]
    assert by_rank[2]["asked"][0] == [request(2, 0, 0), request(2, 0, 1), request(2, 0, 2), request(3, 0, 0)]


def refused(ranks: Ranks, case: str) -> str:
    group = TensorParallelGroup(2)
    try:
        if case == "versions":
            group.ask([request(0, 0, 0)], lambda asked: pytest.fail("asked"), version=ranks.rank)
        group.ask([request(0, 0, 0)], lambda asked: [output(ranks.rank)] * len(asked), version=1)
    except RunFailure as error:
        return str(error)
    return ""


def test_what_is_no_single_engine_is_refused_on_every_rank(tmp_path: Path) -> None:
    found = on_ranks_each(2, refused, [("versions",), ("tokens",)], where=tmp_path)
    assert all("different versions" in error for error in found[("versions",)])
    assert all("different tokens" in error for error in found[("tokens",)])


def lost(ranks: Ranks, where: str) -> str:
    group = TensorParallelGroup(2)

    def answer(asked):
        if ranks.rank == 1 and where == "in the engine":
            raise RunFailure("no memory")
        return [output(1)] * len(asked)

    try:
        if ranks.rank == 1 and where == "before it asks":
            raise RunFailure("no prompts")
        with missing_ranks():
            group.ask([request(0, 0, 0)], answer, version=1)
    except RunFailure as error:
        return f"{type(error).__name__}: {error.what}"  # and this process ends
    return ""


@pytest.mark.parametrize("where", ["in the engine", "before it asks"])
def test_a_rank_that_fails_keeps_no_other_waiting(where: str, tmp_path: Path) -> None:
    waiting, failed = on_ranks(2, lost, where, where=tmp_path)
    assert failed.startswith("RunFailure: no ")
    assert waiting.startswith("LostRank: another rank has ended")


def play_episodes(ranks: Ranks) -> dict[str, Any]:
    """Rank 0 plays one episode of four turns, rank 1 five of one turn, some of them late."""
    group, sizes = TensorParallelGroup(2), []

    def answer(asked: list[Any]) -> list[Any]:
        sizes.append(len(asked))
        return [output(*ids[-1:], len(ids)) for ids, _ in asked]

    class Shared:
        @staticmethod
        def sample(requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
            found = group.ask([(list(one.token_ids), {}) for one in requests], answer, version=0)
            ids = [torch.tensor(one.outputs[0].token_ids) for one in found]
            return [Turn(one, -torch.ones(2), torch.zeros(2, dtype=torch.int64), "stop") for one in ids]

    class Talk:
        @staticmethod
        async def run(task: Task, sampler: Sampler) -> Outcome:
            context = [7, task.group_id]
            for _ in range((4, 1)[ranks.rank]):
                await asyncio.sleep(0.02 * task.group_id)
                context += (await sampler.sample(context)).token_ids.tolist()
            return Outcome("", reward=0.0)

    members = [(task_of(place), 0) for place in range((1, 5)[ranks.rank])]
    spec = EnvironmentSpec(max_turns=4)
    found = run_episodes(Talk(), Shared(), members, Sampling(max_response_length=4), 1, spec, 64)
    group.finish(answer, version=0)
    return {"tokens": [[s.token_ids.tolist() for s in e.sequences] for e in found], "sizes": sizes}


def test_episodes_of_unequal_turns_share_an_engine(tmp_path: Path) -> None:
    first, second = on_ranks(2, play_episodes, where=tmp_path)
    assert first["tokens"] == [[[7, 0, 0, 2, 2, 4, 4, 6, 6, 8]]]
    assert second["tokens"] == [[[7, place, place, 2]] for place in range(5)]
    assert first["sizes"] == second["sizes"]
    assert sum(first["sizes"]) == 4 + 5
