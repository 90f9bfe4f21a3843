"""Two threads, one engine: never both at once, and the trainer is let in next."""

from __future__ import annotations

import threading
import time

from rlctl.rollout.engine_lock import EngineLock


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
