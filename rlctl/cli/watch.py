"""`rlctl watch`: the live panel of a run that was started elsewhere."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from rlctl.cli.command import Plain, RunDirectory, echo

#: Seconds between two reads of a watched log.
_POLL_S = 0.5


def watch(
    run_dir: RunDirectory,
    plain: Plain = False,
) -> None:
    """Show the live panel of a run that was started elsewhere.

    It names the phase, also while the run starts, and ends with the run. Ctrl-C does not affect the run.

    rlctl watch runs/rlctl/rloo-seq-is-20260101-120000

    rlctl watch runs/rlctl/rloo-seq-is-20260101-120000 --plain
    """
    from rlctl.track.console import ConsoleSink
    from rlctl.track.jsonl import METRICS_FILE
    from rlctl.track.open_run import is_running, open_run, phase_of, read_state

    record = open_run(run_dir)
    log = run_dir / METRICS_FILE
    state = read_state(run_dir)
    began = _seconds_since(state.started)
    phase = phase_of(run_dir) if state.state == "running" else ""
    sink = ConsoleSink(str(run_dir), state.total_steps, plain=plain, began_ago=began, phase=phase)
    num_rows = num_bytes = 0
    try:
        while True:
            running = is_running(run_dir)  # checked before the rows are read, so that none is missed
            size = log.stat().st_size if log.exists() else 0
            rows = record.rows()[num_rows:] if size != num_bytes else []
            for row in rows:
                ago = _seconds_since(row.pop("timestamp", None))
                sink.log(int(row.pop("step")), {k: float(v) for k, v in row.items()}, ago=ago)
            num_rows = num_rows + len(rows)
            num_bytes = size
            if not running:
                break
            sink.show_phase(phase_of(run_dir))
            time.sleep(_POLL_S)
    finally:
        sink.close("watched")
    state = read_state(run_dir)
    echo(f"{state.state} after step {state.step}" + (f": {state.reason}" if state.reason else ""))


def _seconds_since(moment: str | None) -> float:
    """Seconds since an ISO 8601 time (UTC if it has no time zone); 0 if it is missing or invalid."""
    try:
        then = datetime.fromisoformat(moment or "")
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds())
