"""One request to stop is a request; the second is an order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlctl.train.stop import catching_signals
from tests.processes import Job


def asked(*numbers_and_pauses: float) -> int:
    """Send this process the signals (negative: a pause in seconds); returns the received signals."""
    with catching_signals() as stop:
        for item in numbers_and_pauses:
            if item < 0:
                time.sleep(-item)
            else:
                os.kill(os.getpid(), int(item))
        return 128 + stop.signal_number if stop.signal_number else 0


def asked_with_nobody_reading() -> int:
    """As on a node behind ssh that was cut off."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    return asked(signal.SIGTERM)


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ((), 0),
        ((signal.SIGINT,), 130),
        ((signal.SIGTERM,), 143),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 130),  # the echo of a launcher
        ((signal.SIGINT, -1.2, signal.SIGTERM), 143),  # meant: it left at once
    ],
)
def test_heard(tmp_path: Path, plan: tuple[float, ...], code: int) -> None:
    assert Job(asked, *plan, log=tmp_path / "log").wait() == code


def test_heard_though_nobody_reads_the_answer(tmp_path: Path) -> None:
    assert Job(asked_with_nobody_reading, log=tmp_path / "log").wait() == 143


def asked_while_ranks_wait() -> int:
    with catching_signals() as stop:
        stop.at_once = True
        os.kill(os.getpid(), signal.SIGTERM)
        return 0


def test_while_ranks_wait_for_one_another_the_first_signal_ends(tmp_path: Path) -> None:
    assert Job(asked_while_ranks_wait, log=tmp_path / "log").wait() == 143


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_live_display_is_not_broken_by_a_line(is_shown: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with catching_signals() as stop:
        stop.is_shown = is_shown
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGINT
    assert ("stopping" in capfd.readouterr().err) is not is_shown


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with catching_signals():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
