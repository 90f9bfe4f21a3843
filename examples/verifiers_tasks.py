"""Writes the rows of a taskset of verifiers: python examples/verifiers_tasks.py COUNT FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    rows = [{"prompt": "-", "idx": number} for number in range(int(sys.argv[1]))]
    Path(sys.argv[2]).write_text("".join(json.dumps(row) + "\n" for row in rows))
