"""Runs `rlctl diagnose` on logs of real runs from other projects and checks its conclusions.

    python benchmarks/real_logs.py FOLDER

`FOLDER` contains the logs and a `README.md` with a table `| file | program | truth |`. A log whose truth
begins with `healthy` must give no warning, every other log must give one. Exits with 1 if a conclusion is
different.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.errors import RlctlError

ROW = re.compile(r"^\| *([\w.]+) *\| *([^|\n]+?) *\| *(.+?) *\|$", re.MULTILINE)


def diagnosed(log: Path) -> tuple[str, str, str, str]:
    """Numbers of steps and rules of a log, the conclusion, the first events, and what they explain."""
    try:
        diagnosis = examine(read_run(log, metrics_read()))
    except RlctlError as error:
        return "—", "not read", str(error).partition("\n")[0], ""
    alarms = [one for one in diagnosis.findings if one.severity != "info"]
    firsts, explained = (
        ", ".join(
            f"{one.rule}{'!' * (one.severity == 'critical')}"
            for one in alarms
            if bool(one.because_of) == is_explained
        )
        for is_explained in (False, True)
    )
    size = f"{len(diagnosis.run.table.steps)} × {len(diagnosis.checked)}"
    return size, diagnosis.status, firsts or "—", explained


def main() -> int:
    """Prints the table; returns 1 if a conclusion differs from the truth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    rows = ROW.findall((folder / "README.md").read_text(encoding="utf-8"))
    wrong = 0
    print("| log | written by | truth | steps × rules | first events | then | right |")
    print("|---|---|---|---|---|---|---|")
    for name, program, truth in rows:
        if not (folder / name).is_file():
            continue
        size, status, firsts, explained = diagnosed(folder / name)
        is_right = (status in {"warning", "critical"}) != truth.startswith("healthy")
        wrong += not is_right
        found = f"{size} | {firsts} | {explained} | {is_right}"
        print(f"| {name} | {program} | {truth.partition(':')[0]} | {found} |")
    print(f"\n{wrong} with another result", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
