"""Distributes the metrics of each step to all sinks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from rlctl.errors import UsageError, missing_steps, steps_in_words, typed_line, visible
from rlctl.registry import TRACKERS
from rlctl.track.jsonl import METRICS_FILE, JsonlSink, truncate_after
from rlctl.track.redaction import redact, redact_tree
from rlctl.track.sink import BackgroundSink, Sink, SinkInputs, name_of
from rlctl.user_code import missing_methods

Status = Literal["finished", "failed", "interrupted"]
_log = logging.getLogger(__name__)


class Tracker:
    """Distributes metrics to sinks; without sinks (ranks other than 0) it does nothing.

    A context manager: on exit it closes all sinks, also after an exception.

    Args:
        record: the log that must not fail, or None.
        extras: sinks that are removed with one warning if they fail; training continues.
        last_step: last step already logged (of a resumed run), None at the start.
        show: prints a note to the user; default: a line on stderr.
    """

    def __init__(
        self,
        record: JsonlSink | None = None,
        extras: Sequence[Sink] = (),
        *,
        last_step: int | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._record = record
        self._extras = list(extras)
        self._last_step = last_step
        self._show = show
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs all metrics of one step at once, including validation; keys are those of `rlctl.metric_names`.

        Steps are numbers of batches trained on; 0 is before the first batch.

        Raises:
            ValueError: the step is not greater than the last one.
            RunFailure: `metrics.jsonl` cannot be written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}: one line per step, in order")
        self._last_step = step
        if self._record:
            self._record.log(step, metrics)
        for sink in tuple(self._extras):
            try:
                sink.log(step, dict(metrics))  # a tracker may change what it gets
            except Exception as error:
                self._drop(sink, error)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Gives the trackers that show texts a table of responses, before the metrics of the same step."""
        for sink in tuple(self._extras):
            try:
                if hasattr(sink, "log_samples"):
                    sink.log_samples(step, rows)
            except Exception as error:
                self._drop(sink, error)

    def add(self, sink: Sink) -> None:
        """Adds a sink."""
        self._extras.append(sink)

    def note(self, text: str) -> None:
        """Shows a line to the user, above the live display if there is one; never raises."""
        text = visible(text)
        try:
            if self._show:
                self._show(text)
            elif self._record:
                sys.stderr.write(visible(text) + "\n")
        except Exception as error:  # also of a closed terminal or pipe
            _log.debug("note not shown: %s", text, exc_info=error)

    @property
    def has_panel(self) -> bool:
        """Whether a live panel is shown on the terminal."""
        return any(getattr(sink, "is_live", False) for sink in self._extras)

    def begin_phase(self, phase: str) -> None:
        """Shows the current phase of the run, a phase of `timing_s/*`."""
        for sink in tuple(self._extras):
            try:
                if hasattr(sink, "begin_phase"):
                    sink.begin_phase(phase)
            except Exception as error:
                self._drop(sink, error)

    def close(self, status: Status = "finished") -> None:
        """Closes all sinks; can be called twice. The display is closed first, which restores the terminal."""
        if self._closed:
            return
        self._closed = True
        for sink in reversed(self._extras):
            try:
                sink.close(status)
            except Exception as error:
                self.note(f"warning: {name_of(sink)} did not close cleanly: {_brief(error)}")
        if self._record:
            self._record.close(status)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._extras.remove(sink)
        _log.debug("sink %s dropped", name_of(sink), exc_info=error)
        try:
            sink.close("failed")
        except Exception as closing:
            _log.debug("closing %s failed", name_of(sink), exc_info=closing)
        self.note(_dropped(name_of(sink), error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close("finished")
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")


def build_tracker(loggers: Sequence[str], inputs: SinkInputs) -> Tracker:
    """Builds the tracker of a run: always `metrics.jsonl`, and the selected loggers.

    Steps after `inputs.start_step` in `metrics.jsonl` (of a run that died after its last checkpoint) move to
    `metrics.discarded.jsonl`, so that a resumed run does not repeat them.

    Args:
        loggers: names in `rlctl.registry.TRACKERS`, or `file.py:function`.
        inputs: of the loggers; secrets are redacted here.

    Raises:
        UsageError: a logger is unknown.
        RunFailure: `metrics.jsonl` cannot be written.
    """
    inputs = replace(inputs, config=redact_tree(inputs.config))
    file = inputs.run_dir / METRICS_FILE
    logged = truncate_after(file, inputs.start_step)
    record = JsonlSink(file)
    extras: list[Sink] = []
    warnings: list[str] = []
    missing = missing_steps((range(step, step + 1) for step in logged), inputs.start_step)
    if missing:
        message = (
            f"{METRICS_FILE} has no readable line of {steps_in_words(missing)}, which this run has trained"
        )
        warnings.append(f"warning: {message}; summary and guardrails continue without them")
    # The console starts last, so that the start-up output of other sinks stays above the live display.
    for name in sorted(loggers, key=lambda name: name == "console"):
        try:
            sink: Sink = TRACKERS[name](inputs)
            message = missing_methods(sink, "log", "close")
            if message:
                raise TypeError(message)
            extras.append(sink)
        except UsageError:
            raise
        except Exception as error:
            _log.debug("sink %s failed to start", name, exc_info=error)
            warnings.append(_dropped(name, error))
    show = next((sink.note for sink in extras if hasattr(sink, "note")), None)
    tracker = Tracker(record, extras, last_step=max(logged, default=None), show=show)
    for warning in warnings:
        tracker.note(warning)
    return tracker


@TRACKERS.register(label="live display on the terminal")
def console(inputs: SinkInputs) -> Sink:
    """Progress, reward, ESS and masked fraction while the run continues."""
    from rlctl.track.console import ConsoleSink

    title = f"{inputs.project}/{inputs.experiment}"
    return ConsoleSink(title, inputs.total_steps, inputs.start_step, is_stopping=inputs.is_stopping)


@TRACKERS.register(label="Weights & Biases", needs={"wandb"})
def wandb(inputs: SinkInputs) -> Sink:
    """A W&B run, online or offline depending on `WANDB_MODE`."""
    from rlctl.track.wandb import WandbSink

    return BackgroundSink(WandbSink(inputs))


@TRACKERS.register(label="trackio, if it is installed", needs={"trackio"})
def trackio(inputs: SinkInputs) -> Sink:
    """A local dashboard, `trackio show`; the run is named after its directory."""
    from rlctl.track.trackio import TrackioSink

    return BackgroundSink(TrackioSink(inputs))


@TRACKERS.register(label="MLflow, if it is installed", needs={"mlflow"})
def mlflow(inputs: SinkInputs) -> Sink:
    """A run in the MLflow experiment with the project's name, on the server in `MLFLOW_TRACKING_URI`."""
    from rlctl.track.mlflow import MlflowSink

    return BackgroundSink(MlflowSink(inputs))


@TRACKERS.register(label="TensorBoard", needs={"tensorboard"})
def tensorboard(inputs: SinkInputs) -> Sink:
    """Event files in `tensorboard/` of the run directory."""
    from rlctl.track.tensorboard import TensorboardSink

    return TensorboardSink(inputs)


def _dropped(name: str, error: Exception) -> str:
    message = f"{name} failed and is disabled, training continues"
    return f"warning: {message} ({_brief(error)}); metrics.jsonl has all metrics"


def _brief(error: Exception) -> str:
    """First line of the error, without secrets, because some libraries quote the given key."""
    return redact(typed_line(error))[:200]
