"""`rlctl diagnose RUN --plan`: seconds per step for other ways of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from rlctl.diagnose.plan import RunPlan
    from rlctl.diagnose.table import RunLog
    from rlctl.terminal import Console


def write_plans(
    read: Callable[[frozenset[str]], Iterable[RunLog]],
    paths: Sequence[Path],
    output_format: str,
    out: Path | None,
) -> None:
    """Writes what the durations of the runs predict; `read` reads these metrics of the runs."""
    from rlctl.cli.output import check_out, write_report
    from rlctl.diagnose.plan import NEEDED, plan

    if output_format not in {"text", "json"}:
        raise UsageError("--plan writes text or json", where=f"--format {output_format}")
    check_out(paths, out, is_page=False)
    found = [(str(run.path), plan(run)) for run in read(NEEDED)]
    documents = [{"run": path} | one.as_document() for path, one in found]
    write_report(output_format, out, partial(_print, found=found), lambda: documents)


def _print(console: Console, found: list[tuple[str, RunPlan]]) -> None:
    from rich.text import Text

    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.diagnose.plan import REPLICAS
    from rlctl.text_table import print_table

    for path, one in found:
        console.print(Text(f"Plan — {visible(path)}", style="bold"))
        console.print(
            f"{one.num_steps} steps of {one.measured:.3g} s, of which sampling {one.sampling:.3g} s "
            f"({one.by_longest:.0%} of it waits for the longest response). Seconds per step with …"
        )
        counts = [one.replicas * factor for factor in REPLICAS]
        headings = ("", *(f"{count} replica{'s' * (count > 1)}" for count in counts), "settings")
        rows = [
            (mode.name, *(f"{seconds:.3g}" for seconds in mode.seconds), " ".join(mode.settings))
            for mode in one.modes
        ]
        print_table(console, headings, rows, right=range(1, 1 + len(counts)), whole={0})
        for note in one.notes:
            console.print(Text(f"note  {note}", style="dim"))
