"""Pages of the ways into training: their code is a file of `examples/`, and their rows are played."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.generate import outdated
from rlctl.environment.build import EpisodeSource
from rlctl.prepare.data_files import read_any
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted import SAMPLING, TOKENIZER, ScriptedEngine, asked, one_after_the_other

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "how-to" / "agents").glob("*.md"))
ROWS = re.compile(r"^cat > ([\w-]+\.jsonl) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"environment\.name=(examples/\w+\.py:\w+)")
SHOWN = re.compile(r"^<!-- generated: (examples/\w+\.py) -->$", re.MULTILINE)
LONGEST = 90


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_a_screen_around_one_file_that_its_command_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    [file] = SHOWN.findall(text)
    assert (ROOT / file).is_file()
    assert file in SHOWN.sub("", text), "a command or a sentence names it"
    assert len(text.splitlines()) <= LONGEST
    assert page not in outdated(), "python docs/generate.py writes the file into the page"
    named = {name.partition(":")[0] for name in NAME.findall(text)}
    assert all((ROOT / name).is_file() for name in named)


def test_every_page_but_that_of_verifiers_shows_rows() -> None:
    without = [page.stem for page in PAGES if not ROWS.search(page.read_text(encoding="utf-8"))]
    assert len(PAGES) >= 7
    assert set(without) <= {"verifiers", "command-line", "tools", "search-and-mcp"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_rows_of_a_page_are_played(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, rows in ROWS.findall(text):
        if f"train_files={file}" not in text:
            continue
        (tmp_path / file).write_text(rows, encoding="utf-8")
        read = list(read_any([str(tmp_path / file)]))
        assert len(read) == len(rows.splitlines())
        assert [row.ground_truth for row in read] == [
            json.loads(line).get("ground_truth", "") for line in rows.splitlines()
        ]
        name = next(iter(NAME.findall(text)), "agent")
        if "agent" in name:  # those of packages are trained in tests/integration/test_agent_examples.py
            continue
        tasks = [
            asked(place, row.prompt[-1].content, extra_info=row.extra, ground_truth=row.ground_truth)
            for place, row in enumerate(read)
        ]
        source = EpisodeSource(EnvironmentSpec(name=f"{ROOT}/{name}", max_turns=2), TOKENIZER, 4000)
        try:
            members = [(task, 0) for task in tasks]
            engine = ScriptedEngine(one_after_the_other("done"))
            episodes = source.sample(engine, members, SAMPLING, 1)
        finally:
            source.close()
        assert [episode.error for episode in episodes] == [""] * len(tasks)
        assert [episode.reward for episode in episodes] == [0.0] * len(tasks)
