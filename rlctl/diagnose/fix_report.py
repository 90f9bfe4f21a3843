"""What `--fix` did, on the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.diagnose.wording import visible

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.diagnose.fix import Fix


def print_fix(console: Console, found: Fix, path: Path | None) -> None:
    """What was changed for which finding, what was not and why; `path` is None where nothing was written."""
    from rich.text import Text

    for applied in found.applied:
        line = Text.assemble(("applied  ", "green"), " ".join(applied.remedy.spec))
        console.print(line.append(f"  for {applied.finding.rule}", style="dim"), soft_wrap=True)
    for left in found.not_applied:
        line = Text.assemble(("left     ", "yellow"), left.finding.rule)
        console.print(line.append(visible(f": {left.why}"), style="dim"), soft_wrap=True)
    if path is None:
        console.print("No finding has a setting to change: nothing was written.")
        return
    name = shlex.quote(visible(str(path)))
    if found.spec is not None:
        console.print(Text(f"{name} written; run it with: rlctl train --spec {name}"), soft_wrap=True)
    else:
        why = "holds only the changed keys, because the log comes without a spec of rlctl"
        console.print(Text(f"{name} written; it {why}."), soft_wrap=True)
        console.print(Text(f"Layer it over yours: rlctl train --spec YOURS --spec {name}"), soft_wrap=True)
