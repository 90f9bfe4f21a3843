"""`rlctl diagnose RUN --who-sampled`: which weights sampled a run's dumped rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.mismatch.who_sampled import WhoSampled
    from rlctl.terminal import Console


def who_sampled(paths: Sequence[Path], output_format: str, out: Path | None) -> bool:
    """Writes the likeliest sampler of each step of the runs; returns whether a run's record is wrong."""
    from rlctl.cli.output import check_out, write_report
    from rlctl.mismatch.who_sampled import who_sampled as examine

    if output_format not in {"text", "json"}:
        raise UsageError("--who-sampled writes text or json", where=f"--format {output_format}")
    check_out(paths, out, is_page=False)
    found = [(str(path), examine(path)) for path in paths]
    documents = [{"run": path} | one.as_document() for path, one in found]
    write_report(output_format, out, partial(_print, found=found), lambda: documents)
    return any(one.fault for _, one in found)


def _print(console: Console, found: list[tuple[str, WhoSampled]]) -> None:
    from rich.text import Text

    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.text_table import print_table

    for path, one in found:
        console.print(Text(f"Who sampled — {visible(path)}", style="bold"))
        console.print(Text(one.conclusion, style="yellow" if one.fault else ""))
        if one.fix:
            console.print(Text(f"  fix   {one.fix}", style="cyan"))
        rows = [
            (
                str(step.step),
                str(step.recorded),
                step.likeliest if step.version is None else f"{step.version} ({step.likeliest})",
                "> 1e6 : 1" if step.odds > 1e6 else f"{step.odds:.3g} : 1",
                f"{step.gap:.2g}",
            )
            for step in one.steps
        ]
        headings = ("step", "version recorded", "likeliest of the kept", "odds", "mean |r|, nats")
        print_table(console, headings, rows, right={0, 1, 3, 4})
        if one.split:
            split = one.split
            about = (
                f"{split.num_tokens} tokens whose weights were kept, mean |log-ratio| {split.size:.2g} nats"
            )
            console.print(Text(f"\nlog-ratio of the trained policy to the sampling one: {about}"))
            shares = [
                (p.name, f"{p.share:.0%}", f"{p.low:.0%} to {p.high:.0%}", f"{p.size:.2g}", f"{p.mean:.2g}")
                for p in split.parts
            ]
            print_table(console, ("part", "share", "95 %", "mean |part|", "mean"), shares, right=range(1, 5))
            console.print(Text(f"  fix   {split.fix}", style="cyan"))
        for note in one.notes:
            console.print(Text(f"note  {note}", style="dim"))
