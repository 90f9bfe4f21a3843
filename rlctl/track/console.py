"""Progress on the terminal: start-up phases, then a live panel; plain lines if it is not a terminal."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Self, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlctl.capabilities.sections import sections
from rlctl.errors import visible
from rlctl.metric_names import validation_rewards
from rlctl.terminal import Console

#: Redraws of the panel per second, in a separate thread; logging a step only passes its values.
REFRESH_PER_SECOND = 4
#: Minimum seconds between plain lines.
PLAIN_INTERVAL = 2.0
#: Number of recent steps from which the remaining time is estimated.
WINDOW = 32
#: Characters of the reward sparkline, which always spans the whole run.
SPARK_WIDTH = 48

REWARD = "critic/score/mean"
ESS = "rollout_corr/rollout_is_eff_sample_size"
RAW_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"
MASKED = "rollout_corr/rollout_rs_masked_fraction"
KL = "rollout_corr/kl"
LENGTH = "response_length/mean"
TOKENS, SECONDS = "perf/total_num_tokens", "perf/time_per_step"

_BARS = "▁▂▃▄▅▆▇█"

#: Phase of `timing_s/<phase>` of every run → name of the activity in the panel.
_PHASES = {
    "gen": "sampling",
    "gen_max": "sampling",
    "reward": "grading",
    "old_log_prob": "scoring",
    "ref": "scoring",
    "values": "scoring",
    "adv": "scoring",
    "update_critic": "updating",
    "update_actor": "updating",
    "sync_weights": "syncing",
    "testing": "validating",
    "save_checkpoint": "saving",
}
#: Limits for red, then yellow values in the panel: lower limits of raw and applied ESS, upper limits of the
#: masked fraction.
_LOW_ESS = (0.1, 0.5)
_HIGH_MASKED = (0.5, 0.2)
_STOPPING = "stopping after this step; press Ctrl-C again to stop now"


@cache
def activities() -> dict[str, str]:
    """Phase of `timing_s/<phase>` → name of the activity in the panel, for runs with any capability."""
    phases = dict(_PHASES)
    for section in sections().values():
        phases |= dict.fromkeys(section.scoring_phases, "scoring")
    return phases


@dataclass(frozen=True, slots=True)
class _State:
    """The displayed state. Replaced as a whole, so that the drawing thread never reads a partial update."""

    step: int
    metrics: Mapping[str, float]
    times: tuple[float, ...] = ()  # end times of the last steps, on the monotonic clock


class ConsoleSink:
    """Shows the progress of a run.

    Args:
        title: text on the panel's border.
        stream: output stream; a terminal gets the live panel, other streams plain lines without colour codes.
        is_stopping: returns whether a stop was requested; shown in the panel's title.
        plain: plain lines on a terminal too, like `RLCTL_PLAIN=1`.
        began_ago: seconds since the run began, for a run in another process.
        phase: what that run does now, in words.
    """

    name = "console"

    def __init__(
        self,
        title: str,
        total_steps: int | None,
        start_step: int = 0,
        stream: TextIO | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        plain: bool = False,
        began_ago: float = 0.0,
        phase: str = "",
    ) -> None:
        self._title = title
        self._is_stopping = is_stopping
        self._phase = visible(phase, keep="")
        self._total = total_steps or math.inf  # not known
        self._clock = time.monotonic
        self._start = self._clock() - began_ago
        self._stream = stream or sys.stdout
        self._rewards: list[float] = []
        self._state = _State(step=start_step, metrics={}, times=(self._start,))
        self._last_plain = -math.inf
        self._printed_step: int | None = None
        self._live: Live | None = None
        console = Console(file=self._stream)
        self._sparks = (console.encoding or "").lower().startswith("utf")
        if _can_draw(console) and not plain:
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=REFRESH_PER_SECOND
            )
            self._live.start(refresh=True)
        else:
            self._phase = ""  # `show_phase` prints it

    def log(self, step: int, metrics: Mapping[str, float], *, ago: float = 0.0) -> None:
        """Shows a step that ended `ago` seconds ago. Takes microseconds, because another thread draws."""
        now = self._clock() - ago
        old = self._state
        if REWARD in metrics:
            self._rewards.append(float(metrics[REWARD]))
        trained = step > old.step  # step 0 contains only validation and is not used for the pace
        self._state = _State(
            step=step,
            metrics={**old.metrics, **metrics},
            times=(*old.times, now)[-WINDOW:] if trained else (now,),
        )
        validated = validation_rewards(metrics)
        waited = self._clock() - self._last_plain >= PLAIN_INTERVAL
        if self._live is None and (waited or validated or step >= self._total):
            self._print_plain(validated)

    @property
    def is_live(self) -> bool:
        """Whether the live panel is shown."""
        return self._live is not None

    def begin_phase(self, phase: str) -> None:
        """Shows the current phase; phases that `activities` does not name are ignored."""
        self._phase = activities().get(phase, self._phase)

    def show_phase(self, text: str) -> None:
        """Shows the phase of a run in another process, in words; plain lines only before its first step."""
        if text != self._phase and self._live is None and not self._state.metrics:
            self._write(visible(text, keep=""))
        self._phase = visible(text, keep="")

    def note(self, text: str) -> None:
        """Prints a line above the panel."""
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            self._write(text)

    def close(self, status: str) -> None:
        """Draws the last state and restores the terminal."""
        if status == "watched":  # stop the clock at the last step
            self._phase = ""
            last = self._state.times[-1]
            self._clock = lambda: last
        if self._live is not None:
            self._live.stop()
            self._live = None
            # Later notes are plain lines below the panel.
            self._printed_step = self._state.step
        elif self._printed_step != self._state.step and self._state.metrics:
            self._print_plain({})

    def _print_plain(self, validated: Mapping[str, float]) -> None:
        self._last_plain = now = self._clock()
        self._printed_step = self._state.step
        line = plain_line(self._state.step, self._total, self._state.metrics, self._seconds_left(now))
        for source, value in validated.items():
            line += f" validation {visible(source)} {_show(value, '.3f')}"
        self._write(line)

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _seconds_left(self, now: float) -> float | None:
        """Remaining seconds at the pace of the last steps; None before the first step or without an end."""
        times = self._state.times
        if len(times) < 2 or self._total == math.inf:
            return None
        pace = (times[-1] - times[0]) / (len(times) - 1)
        left = (self._total - self._state.step) * pace
        return max(left - (now - times[-1]), 0.0)

    def _render(self) -> RenderableType:
        state = self._state
        now = self._clock()
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(justify="left")
        head.add_column(ratio=1)
        head.add_column(justify="right")
        left = self._seconds_left(now)
        finished = state.step >= self._total
        remaining = "" if finished else f" · left {clock(left) if left is not None else '-:--'}"
        head.add_row(
            Text(f"step {_of(state.step, self._total)}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=state.step),
            Text(f"elapsed {clock(now - self._start)}{remaining}"),
        )
        numbers = (self._reward_line(state), _numbers(state.metrics)) if state.metrics else ()
        parts = [head, *numbers, self._phase_line(state.metrics)]
        if self._is_stopping() and not finished:
            parts.append(Text(_STOPPING, style="bold yellow"))
        body = Group(*(part for part in parts if part is not None))
        return Panel(body, title=Text(self._title), title_align="left", padding=(0, 1))

    def _phase_line(self, metrics: Mapping[str, float]) -> Text | None:
        """The current phase, the last step's share of time per phase, and the last validation."""
        seconds: dict[str, float] = {}
        for phase, name in activities().items():
            seconds[name] = seconds.get(name, 0.0) + metrics.get(f"timing_s/{phase}", 0.0)
        total = sum(seconds.values())
        shares = [
            f"{name} {value / total:.0%}"
            for name, value in seconds.items()
            if total and value / total >= 0.01
        ]
        line = Text()
        if self._phase:
            line.append("now ", "dim").append(f"{self._phase:<10}", "bold")
        if shares:
            line.append("  time ", "dim").append(", ".join(shares))
        for source, value in validation_rewards(metrics).items():
            line.append(f"\nvalidation {visible(source)} ", "dim").append(f"{value:.3f}", "bold")
        return line if line.plain else None

    def _reward_line(self, state: _State) -> Text:
        line = Text.assemble(("reward  ", "dim"), (_show(state.metrics.get(REWARD), ".3f"), "bold"))
        if self._sparks:
            line.append(f"  {sparkline(condensed(self._rewards, SPARK_WIDTH))}", style="green")
        line.no_wrap = True
        line.overflow = "crop"
        return line


def _numbers(metrics: Mapping[str, float]) -> Table:
    """Names and values in three columns, 66 characters wide."""

    def show(key: str, form: str) -> str:
        return _show(metrics.get(key), form)

    def coloured(key: str, form: str, levels: tuple[float, float]) -> Text:
        return Text(show(key, form), _colour(metrics.get(key), levels))

    cells: tuple[tuple[str, str | Text], ...] = (
        ("ESS", Text.assemble(coloured(ESS, ".3f", _LOW_ESS), ", raw ", coloured(RAW_ESS, ".3f", _LOW_ESS))),
        ("masked", coloured(MASKED, ".1%", _HIGH_MASKED)),
        ("KL", show(KL, ".2e")),
        ("tokens/s", _show(tokens_per_second(metrics), ",.0f")),
        ("grad norm", show("actor/grad_norm", ".3g")),
        ("lr", show("actor/lr", ".2e")),
        ("length", f"{show(LENGTH, ',.1f')} tokens"),
        ("entropy", show("actor/entropy", ".3f")),
    )
    grid = Table.grid(padding=(0, 2), pad_edge=False)
    for _ in range(3):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
    for row in range(0, len(cells), 3):
        grid.add_row(*(text for cell in cells[row : row + 3] for text in cell))
    return grid


def _colour(value: float | None, levels: tuple[float, float]) -> str:
    """Red beyond the first level, yellow beyond the second, else green. Ascending levels are lower limits."""
    if value is None or not math.isfinite(value):
        return ""
    bad, doubtful = levels
    sign = 1.0 if bad < doubtful else -1.0
    if sign * value < sign * bad:
        return "red"
    return "yellow" if sign * value < sign * doubtful else "green"


def _of(step: int, total: float) -> str:
    return f"{step}/{total if total < math.inf else '?'}"


def plain_line(step: int, total: float, metrics: Mapping[str, float], seconds_left: float | None) -> str:
    """For example `step 12/240 reward 0.41 ess 0.93 masked 0.00 kl 0.0012 tok/s 15,300 left 0:31`.

    Metrics that were not logged are omitted.
    """
    parts = [f"step {_of(step, total)}"]
    for name, value, form in (
        ("reward", metrics.get(REWARD), ".2f"),
        ("ess", metrics.get(ESS), ".2f"),
        ("masked", metrics.get(MASKED), ".2f"),
        ("kl", metrics.get(KL), "z.4f"),
        ("tok/s", tokens_per_second(metrics), ",.0f"),
    ):
        if value is not None:
            parts.append(f"{name} {_show(value, form)}")
    if seconds_left is not None and step < total:
        parts.append(f"left {clock(seconds_left)}")
    return " ".join(parts)


def tokens_per_second(metrics: Mapping[str, float]) -> float | None:
    """Prompt and response tokens of all ranks per second of the step (`perf/throughput` is per rank)."""
    tokens = metrics.get(TOKENS)
    seconds = metrics.get(SECONDS)
    return tokens / seconds if tokens is not None and seconds else None


def clock(seconds: float) -> str:
    """Formats seconds as `0:31`, `12:05` or `3:00:59`."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def condensed(values: Sequence[float], width: int) -> list[float]:
    """Reduces values to at most `width` means over intervals of equal length, oldest first."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float]) -> str:
    """Block characters scaled from the smallest to the largest value; NaN and infinities are gaps."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low = min(finite)
    span = max(finite) - min(finite)

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1) if span else 0]

    return "".join(bar(value) for value in values)


def _show(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return format(float(value), form) if math.isfinite(value) else str(float(value))


class Startup:
    """Shows one phase after another on stderr; a context manager that clears the spinner.

    Args:
        is_shown: False on ranks other than 0.
        also: called with every phase, on every rank.
    """

    def __init__(self, *, is_shown: bool, also: Callable[[str], None] = lambda _: None) -> None:
        self._is_shown = is_shown
        self._also = also
        console = Console(stderr=True)
        self._progress: Progress | None = None
        if is_shown and _can_draw(console):
            columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("")

    def phase(self, text: str) -> None:
        """Shows the start of a phase."""
        self._also(text)
        if self._progress:
            self._progress.update(self._task, description=text)
            self._progress.start()
        elif self._is_shown:
            sys.stderr.write(f"{visible(text)}\n")

    def stop(self) -> None:
        """Clears the spinner; can be called twice."""
        if self._progress:
            self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _can_draw(console: Console) -> bool:
    """Whether this is a terminal that can be redrawn, and `RLCTL_PLAIN` does not request plain lines."""
    is_terminal = console.is_interactive and console.file.isatty()
    return is_terminal and os.environ.get("RLCTL_PLAIN", "0") in {"", "0"}
