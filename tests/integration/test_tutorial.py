"""The tutorial's commands and files, run as they stand on the page."""

import os
import re
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial" / "first-run.md"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"# (\w+\.py)\n")


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path, whole_embedded: Path, forked_commands: Path) -> None:
    environment = os.environ | {"PATH": f"{forked_commands}{os.pathsep}{os.environ['PATH']}"}
    outputs = []
    for language, content in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            name = _FILE_NAME.match(content)
            assert name, "a Python block names its file in its first line"
            (tmp_path / name[1]).write_text(content, encoding="utf-8")
            continue
        command = ["bash", "-euo", "pipefail", "-c", content]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{content}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        outputs.append(done.stdout)

    assert "with A halved where it is negative" in outputs[-1]
    assert (tmp_path / "runs" / "own-loss" / "summary.json").is_file()
    stale = outputs[1].split("CRITICAL")[1]
    assert "[policy-gap]" in stale.splitlines()[0], "the worst finding is the one the page names"
    assert "CRITICAL" not in outputs[2].split("runs/stale")[0]
    scores = pq.read_table(tmp_path / "runs" / "own" / "rollouts").column("reward").to_pylist()
    assert set(scores) > {0.0, 1.0}, "the page's own reward gave credit for single digits"
