"""The table `layouts.toml`: built-in data recipes and their instructions, which the command line lists."""

import tomllib
from pathlib import Path
from typing import Any

LAYOUT_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
