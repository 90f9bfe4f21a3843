"""A run with the tools of the page on search and servers of tools, whose packages are of an extra."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.own_model import save_tiny_qwen2

EXAMPLES = Path(__file__).parents[2] / "examples"
CORPUS = [
    {"title": "Marie Curie", "text": "She discovered polonium and radium in 1898."},
    {"title": "Emmy Noether", "text": "She proved in 1918 that symmetries give conserved quantities."},
]


@pytest.mark.parametrize("package", ["bm25s", "mcp"])
def test_a_run_with_tools_of_an_extra(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package, reason="the extra rlctl[tools] is not installed")
    (tmp_path / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CORPUS))
    rows = [{"prompt": f"When was radium discovered? {i}", "ground_truth": "1898"} for i in range(2)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = {"bm25s": "search", "mcp": f"mcp:{sys.executable} {EXAMPLES / 'notes_server.py'}"}[package]
    run = runs.train(
        tmp_path / "run",
        f"model.path={save_tiny_qwen2(tmp_path / 'model', context=1024)}",
        f"data.train_files={tmp_path / 'questions.jsonl'}",
        f"environment.tools=[{json.dumps(tool)}]",
        f"environment.params.corpus={tmp_path / 'people.jsonl'}",
        *("reward.name=maths", "environment.context_length=1024", "environment.max_turns=2"),
        *("data.max_response_length=16", "data.max_prompt_length=900", "data.train_batch_size=2"),
        *("actor.ppo_mini_batch_size=2", "trainer.total_training_steps=1", "trainer.test_freq=-1"),
    )
    [line] = runs.metrics(run)
    assert line["episode/num_failed"] == 0.0
    assert line["episode/num_turns/mean"] >= 1.0
