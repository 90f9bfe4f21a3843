"""`rlctl diagnose RUN --what-if`: other corrections, tried on the rollouts the run dumped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.cli.diagnose_output import DiagnosisFormat


def what_if(paths: Sequence[Path], output_format: DiagnosisFormat, out: Path | None) -> None:
    """Replay every run's dumped rollouts under a grid of corrections, and write what each would do.

    Args:
        paths: run directories or dumped rollouts.
        output_format: text, JSON, or a page with the picture.
        out: a file; None: standard output.

    Raises:
        UsageError: there is nothing to replay, `out` cannot be written, or a replay has no such format.
    """
    from rlctl.cli.diagnose_output import DiagnosisFormat, as_json, check_out, text_console, write_out

    if output_format is DiagnosisFormat.MARKDOWN:
        raise UsageError("--what-if writes text, json or html", where=f"--format {output_format.value}")
    check_out(paths, out, is_page=output_format is DiagnosisFormat.HTML)
    from rich.console import Console
    from rich.text import Text

    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.what_if.what_if_run import what_if as replayed

    found = []
    for path in paths:
        title = visible(str(path))
        with Console(stderr=True).status(Text(f"replaying {title}")):  # on terminals only
            found.append((title, replayed(path)))
    if output_format is DiagnosisFormat.JSON:
        write_out(as_json([tradeoff.as_document() for _, tradeoff in found]), out)
    elif output_format is DiagnosisFormat.HTML:
        from rlctl.what_if.page import page

        write_out(page(found), out)
    else:
        from rlctl.what_if.what_if_report import print_tradeoff

        with text_console(out) as console:
            for title, tradeoff in found:
                print_tradeoff(console, title, tradeoff)
