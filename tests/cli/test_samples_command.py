"""`rlctl samples`: responses of a run as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.cli.samples import shared_start
from tests.cli.test_report_command import a_run
from tests.dumps import dumped, write

SYSTEM = "system\nAnswer with one number and nothing else, please, and do not explain it.\nuser\n"


@pytest.mark.parametrize(
    ("prompts", "start"),
    [
        ([SYSTEM + "1+1?", SYSTEM + "1+2?"], SYSTEM),  # not "1+", which is part of a line
        ([SYSTEM + "1+1?"] * 3, SYSTEM + "1+1?"),
        ([SYSTEM + "1+1?"], ""),
        (["short\na", "short\nb"], ""),
        ([SYSTEM, "another"], ""),
        ([], ""),
    ],
)
def test_what_all_prompts_begin_with(prompts: list[str], start: str) -> None:
    assert shared_start(prompts) == start


def test_a_system_prompt_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_run(tmp_path / "a")
    rows = [
        dumped(
            [1], [-1.0], [-1.0], step=6, prompt=f"{SYSTEM}{a}+1?", terms=[("length", 0.5)], response=f"r{a}"
        )
        for a in range(3)
    ]
    write(path / "rollouts/rollouts-000006-000006.parquet", rows)
    assert run(["samples", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("one number and nothing else") == 1
    for a in range(3):
        assert f"… {a}+1?" in shown
        assert f"r{a}" in shown
    assert shown.count("(length 0.5)") == 3
    line = next(line for line in shown.splitlines() if "one number" in line)
    assert line == " " * 15 + SYSTEM.splitlines()[1]  # below the first line of the prompt
    assert run(["samples", str(path), "--format", "json"]) == 0
    assert capsys.readouterr().out.count("one number and nothing else") == 3
