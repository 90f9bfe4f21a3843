"""Dealing to ranks: every episode once, equal numbers of tokens, the update of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.train.deal import LARGEST, Dealt, assigned
from tests.episodes import same
from tests.processes import on_ranks_each
from tests.sweeps import asked_for, swept
from tests.unit.train import deal_jobs
from tests.unit.train.deal_jobs import GROUPS, LAYOUTS, MEMBERS, PER_MINI, sampled_batch

COUNT = GROUPS * MEMBERS


#: Mini-batch, group, member, tokens, and tokens of the prompt.
Described = tuple[int, int, int, int, int]


def dealt_of(episodes: list[Described]) -> Dealt:
    table = np.array(episodes, dtype=np.int64).reshape(-1, 5)
    mini, group, member, token, prompt = table.T
    ones = np.ones_like(mini)
    return Dealt(mini, group, member, 0 * ones, member, prompt, token, token - prompt, ones, ones)


def parts_of(episodes: list[Described], parts: int) -> dict[tuple[int, int], int]:
    keys = [(group, member) for _, group, member, *_ in episodes]
    return dict(zip(keys, assigned(dealt_of(episodes), parts).tolist(), strict=True))


def slowly_assigned(episodes: list[Described], num_parts: int) -> dict[tuple[int, int], int]:
    """The same, one episode at a time: the largest goes to the part with the fewest tokens so far."""
    assigned_to: dict[tuple[int, int], int] = {}
    totals = [0] * num_parts
    for mini in sorted({episode[0] for episode in episodes}):
        some = sorted(episode for episode in episodes if episode[0] == mini)
        by_group: dict[int, list[Described]] = {}
        for episode in some:
            by_group.setdefault(episode[1], []).append(episode)
        for units in ([*by_group.values()], [[episode] for episode in some]):
            loads = [0] * num_parts
            chosen: dict[tuple[int, int], int] = {}
            costs = [sum(e[3] for e in unit) - sum(e[4] for e in unit[1:]) for unit in units]
            for _, place in sorted((-cost, place) for place, cost in enumerate(costs)):
                part = min(range(num_parts), key=lambda part: (loads[part], totals[part], part))
                loads[part] += costs[place]
                chosen |= {(e[1], e[2]): part for e in units[place]}
            if max(loads) * num_parts <= LARGEST * sum(loads):
                break
        assigned_to |= chosen
        totals = [sum(pair) for pair in zip(totals, loads, strict=True)]
    return assigned_to


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 90), min_size=1, max_size=5)), max_size=12
    ),
    st.integers(1, 4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_every_rank_computes_the_same_assignment(
    groups: list[tuple[int, list[int]]], per_mini: int, parts: int, draw
) -> None:
    """Whoever sampled the episodes; and greedy dealing is within one episode of equal."""
    every: list[Described] = [
        (group // per_mini, group, member, prompt + length, prompt)
        for group, (prompt, lengths) in enumerate(groups)
        for member, length in enumerate(lengths)
    ]
    part_of = parts_of(every, parts)
    assert parts_of(draw.sample(every, len(every)), parts) == part_of == slowly_assigned(every, parts)
    assert set(part_of.values()) <= set(range(parts))
    for number in {mini for mini, *_ in every}:
        some = [episode for episode in every if episode[0] == number]
        loads = [sum(e[3] for e in some if part_of[e[1], e[2]] == part) for part in range(parts)]
        sizes = {e[1]: 0 for e in some}
        for _, group, _, tokens, _ in some:
            sizes[group] += tokens
        assert max(loads) - min(loads) <= max(sizes.values())


PLAN = {2: [(layout, size) for layout in LAYOUTS for size in (1, 2)]}
PLAN[4] = [(layout, size) for layout in LAYOUTS for size in (1, 2, 4)]
CASES = [(count, *case) for count, cases in PLAN.items() for case in cases]


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("deal")
    return {n: on_ranks_each(n, deal_jobs.dealt, plan, where=where) for n, plan in PLAN.items()}


@pytest.mark.parametrize(("count", "layout", "group_size"), CASES)
def test_every_episode_is_trained_on_once(dealt, count: int, layout: str, group_size: int) -> None:
    """With all of its columns; ranks of a sequence-parallel group get the same."""
    whole, parts = sampled_batch(), dealt[count][layout, group_size]
    for rank, part in enumerate(parts):
        assert same(part, parts[rank - rank % group_size])
        keys = list(zip(part.group_ids.tolist(), part.members.tolist(), strict=True))
        assert keys == sorted(keys)
        assert same(part, whole.pick([group * MEMBERS + member for group, member in keys]))
    found = [
        int(g) * MEMBERS + int(m)
        for p in parts[::group_size]
        for g, m in zip(p.group_ids, p.members, strict=True)
    ]
    assert sorted(found) == list(range(COUNT))


@pytest.mark.parametrize(("count", "layout", "group_size"), CASES)
def test_ranks_have_equal_numbers_of_tokens(dealt, count: int, layout: str, group_size: int) -> None:
    """In every mini-batch of at least 16 episodes a rank, though lengths go by prompt."""
    parts = dealt[count][layout, group_size][::group_size]
    per_mini = PER_MINI * MEMBERS
    for mini in range(COUNT // per_mini if per_mini >= 8 * len(parts) else 0):
        loads = []
        for part in parts:
            chosen = (part.group_ids // PER_MINI == mini).nonzero().squeeze(1)
            loads.append(int(part.pick(chosen).lengths.sum()))
        assert max(loads) / (sum(loads) / len(loads)) < (LARGEST if len(parts) < 4 else 1.1)


# --- the update ----------------------------------------------------------------------------------------

#: Case, size of a micro-batch, prompts per mini-batch, ZeRO stage, kept sets, layout, dealt or as it lies.
UPDATES = [
    ("decoupled clip", 4, 8, 0, True, "blocks", True),
    ("survivors", "30 tokens", 8, 2, True, "one rank", True),
    ("centered weights", 3, 8, 0, False, "one rank", True),
    # Mini-batches of one episode, which the ranks take in turns: the others have none of it.
    ("decoupled clip", 4, 1, 0, False, "blocks", True),
    ("no settling", 4, 1, 3, False, "blocks", True),
    # One rank makes all passes, the others idle ones.
    ("survivors, all terms", 4, 16, 0, False, "one rank", False),
    ("survivors, all terms", "30 tokens", 16, 2, True, "one rank", False),
    ("survivors, all terms", "30 tokens", 16, 3, True, "one rank", False),
    ("centered weights, all terms", 3, 8, 0, False, "one rank", False),
    ("zero advantages, two steps", 2, 8, 3, False, "one rank", False),
]


#: Both layouts, dealt and as it lies, mini-batches of one episode, every stage, kept sets, listed tokens.
SAMPLE = [(2, UPDATES[place]) for place in (0, 4, 6, 8)] + [(4, UPDATES[1])]


@pytest.fixture(scope="module")
def updates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("updates")
    asked = asked_for(request, "count", "case")
    plans = {n: [case for case in UPDATES if (n, case) in asked] for n in (2, 4)}
    plans[1] = [case for case in UPDATES if any(case in plan for plan in plans.values())]
    return {n: on_ranks_each(n, deal_jobs.updated, plan, where=where) for n, plan in plans.items() if plan}


@pytest.mark.parametrize(
    ("count", "case"),
    swept([(2, case) for case in UPDATES] + [(4, case) for case in UPDATES[:2]], SAMPLE),
)
def test_the_update_is_that_of_one_rank(updates, count: int, case: tuple) -> None:
    [alone], results = updates[1][case], updates[count][case]
    assert sorted(place for found in results for place in found["episodes"]) == alone["episodes"]
    sizes = [len(found["episodes"]) for found in results]
    assert (min(sizes) > 0) == case[-1]
    assert alone["metrics"]["num_updates"] > 0
    for found in results:
        assert found["metrics"].keys() == alone["metrics"].keys()
        for key, value in alone["metrics"].items():
            assert found["metrics"][key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=1e-4)
