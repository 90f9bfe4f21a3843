"""Two threads, one engine: never both at once, and the trainer is let in next."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlctl.batch import TokenLists, Turn
from rlctl.episodes import Turns
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.shared_engine import EngineLock, LockedRollout
from tests.episodes import same


def test_one_at_a_time_and_the_trainer_waits_for_one_batch_at_most() -> None:
    lock, order, inside = EngineLock(), list[str](), list[int]()
    stop, sampling = threading.Event(), threading.Event()

    def sample_on_and_on() -> None:
        while not stop.is_set():
            with lock.held(first=False):
                inside.append(1)
                assert len(inside) == 1
                order.append("batch")
                sampling.set()
                time.sleep(0.005)
                inside.pop()

    thread = threading.Thread(target=sample_on_and_on)
    thread.start()
    for _ in range(20):
        sampling.clear()
        sampling.wait(60)
        before = len(order)
        with lock.held(first=True):
            inside.append(1)
            assert len(inside) == 1
            # At most the batch being sampled, and one begun before this thread came to wait.
            assert len(order) - before <= 1
            order.append("trainer")
            inside.pop()
    stop.set()
    thread.join()
    assert order.count("trainer") == 20


def test_whoever_fails_lets_the_next_one_in() -> None:
    lock = EngineLock()
    for first in (True, False):
        try:
            with lock.held(first=first):
                raise ValueError
        except ValueError:
            pass
    with lock.held(first=True):
        pass


TURN = Turn(torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), torch.tensor([3, 3]), "stop")


def sampled(turns: object, sampling: Sampling) -> Turns:
    """What an engine that returns this seems to return."""
    engine = SimpleNamespace(sample=lambda _requests, _sampling: turns)
    return LockedRollout(engine, EngineLock(), first=True).sample([Request([1], 0)], sampling)


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        ([TURN] * 2, "list of 2 instead of a list of 1 turns"),
        ((TURN,), "tuple instead of a list of 1 turns"),
        ([{"token_ids": [5]}], "dict instead of turn 1"),
        ([replace(TURN, log_probs=torch.zeros(3))], r"log_probs of turn 1 of shape \(3,\)"),
        ([replace(TURN, log_probs=torch.zeros(2).double())], "torch.float64"),
        ([replace(TURN, versions=torch.zeros(2))], "versions of turn 1"),
        ([replace(TURN, finish_reason="eos")], "finish_reason 'eos'"),
        ([replace(TURN, token_ids=[5, 6])], "token_ids of turn 1 of type list"),
        ([replace(TURN, token_ids=torch.tensor([5, -6]))], "the token -6"),
        ([replace(TURN, log_probs=torch.tensor([0.5, -1.0]))], "a log-prob of 0.5, above 0"),
        (
            [Turn(torch.zeros(4).long(), -torch.ones(4), torch.zeros(4).long(), "stop")],
            "4 tokens of turn 1, of at most 3",
        ),
    ],
)
def test_what_an_engine_returns_is_checked(turns: object, what: str) -> None:
    assert same([*sampled([TURN], Sampling(3))], [TURN])
    with pytest.raises(RunFailure, match=what):
        sampled(turns, Sampling(3))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"lengths": torch.tensor([1, 1])}, r"lengths of shape \(2,\)"),
        ({"lengths": torch.tensor([2]).int()}, "lengths of shape"),
        ({"kept": TokenLists(torch.tensor([1, 2]).int(), torch.tensor([5, 6]).int())}, "2 ids in kept"),
        ({"log_probs": torch.zeros(2).double()}, "torch.float64"),
        ({"versions": torch.zeros(2)}, "versions of shape"),
        ({"finish_reasons": ["eos"]}, "finish_reason 'eos'"),
        ({"kept": TokenLists(torch.zeros(1).int(), torch.zeros(0).int())}, "2 tokens in kept"),
    ],
)
def test_columns_that_an_engine_returns_are_checked(change: dict[str, object], what: str) -> None:
    lists = TokenLists(torch.tensor([1, 2]).int(), torch.tensor([5, 6, 7]).int())
    turns, sampling = replace(Turns.of([TURN]), kept=lists), Sampling(3, with_kept=True)
    assert sampled(turns, sampling) is turns
    with pytest.raises(RunFailure, match=what):
        sampled(replace(turns, **change), sampling)


def test_log_probs_of_most_likely_tokens_must_be_there() -> None:
    lists = TokenLists(torch.tensor([1, 1]).int(), torch.tensor([5, 6]).int())
    sampling = Sampling(3, num_most_likely=1)
    with pytest.raises(RunFailure, match="no log-prob for each of the 2 tokens in most_likely"):
        sampled(replace(Turns.of([TURN]), most_likely=lists), sampling)
    assert sampled([replace(TURN, most_likely=replace(lists, log_probs=-torch.ones(2)))], sampling)


def test_a_log_prob_that_is_missing_is_the_trainers_to_name() -> None:
    turn = replace(TURN, log_probs=torch.tensor([float("nan"), -1.0]))
    assert sampled([turn], Sampling(3)).log_probs.isnan().any()


@pytest.mark.parametrize("count", [None, 0, 1, 2, 7])
def test_experts_must_be_those_of_every_token_that_was_read(count: int | None) -> None:
    """At least all tokens of the turn but the last; those of an aborted turn are not used."""
    experts = None if count is None else torch.zeros(count, 3, 2, dtype=torch.int16)
    turn, sampling = replace(TURN, experts=experts), Sampling(3, with_experts=True)
    assert sampled([replace(turn, finish_reason="abort")], sampling)
    if count:
        assert same([*sampled([turn], sampling)], [turn])
    else:
        with pytest.raises(RunFailure, match="in experts of turn 1"):
            sampled([turn], sampling)
