"""`rlctl report`: one page about a run, from files that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.cli.app import run
from rlctl.report.run_page import _sample, sample_steps, spec_rows
from rlctl.spec.load import dump_spec, load_spec
from rlctl.track.open_run import open_run
from rlctl.track.rollouts import SCHEMA
from rlctl.track.texts import pieces
from tests.dumps import conversation, dumped, write

HOSTILE = "</script><script>alert(1)</script>\x1b[2J"


def a_run(path: Path, *overrides: str, reward: float = 0.5, source: str = "own") -> Path:
    (path / "rollouts").mkdir(parents=True)
    spec = load_spec(["rloo-seq-is"], [], overrides).spec
    (path / "spec.yaml").write_text(dump_spec(spec))
    (path / "environment.json").write_text(json.dumps({"command": ["rlctl", "train", "-p", "rloo-seq-is"]}))
    lines = [
        {"step": step, "critic/score/mean": reward, "actor/entropy": 1.0, "val/own/reward_mean": step / 8}
        for step in range(1, 7)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = dumped(
        [1, 2], [-1.0, -2.0], [-1.0, -2.6], prompt_ids=[3], step=3, data_source=source, prompt=HOSTILE,
        response=HOSTILE, ground_truth="7", rollout_is_weights=[1.0, 0.5], keep_mask=[True, False],
    )  # fmt: skip
    write(path / "rollouts/rollouts-000003-000003.parquet", [row])
    return path


def test_one_page_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    first = a_run(tmp_path / "a", "actor.lr=7e-5")
    assert run(["report", str(first)]) == 0
    page = (first / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(first / "report.html")
    assert "<script>alert" not in page
    assert "\x1b" not in page
    for shown in ("actor.lr", "7e-05", "0.75 (step 6)", "step 3", "log ρ -0.6000"):
        assert shown in page, shown
    assert "http://" not in page.partition("plotly")[0]
    second = a_run(tmp_path / "b", reward=0.9)
    both = tmp_path / "both.html"
    assert run(["report", str(first), str(second), "--out", str(both)]) == 0
    assert both.read_text().count("run-details") >= 2


def test_equal_responses_are_shown_once(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    (file,) = (path / "rollouts").iterdir()
    [row] = pq.read_table(file).to_pylist()
    rows = [row] * 4 + [row | {"response": f"other {number}"} for number in range(6)] + [row] * 2
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    [step] = sample_steps(open_run(path))
    assert [sample["times"] for sample in step["samples"]] == [6, 1, 1, 1]


def test_the_spec_is_compared_with_its_preset_for_the_same_model(tmp_path: Path) -> None:
    """A preset alone is no complete spec; the defaults are those of the run's model."""
    path = a_run(tmp_path / "a", "model.path=org/m", "data.train_files=x.parquet", "actor.lr=2e-6")
    changed = [("data.train_files", "[]", "['x.parquet']"), ("actor.lr", "1e-06", "2e-06")]
    assert spec_rows(open_run(path)) == ("rloo-seq-is", changed)
    (path / "environment.json").write_text(json.dumps({"command": ["rlctl", "train", "-p", "gone.yaml"]}))
    than, rows = spec_rows(open_run(path))
    assert than == "the defaults"
    assert ("algorithm.rollout_correction.loss_type", "ppo_clip", "reinforce") in rows
    assert changed[1] in rows


def test_responses_of_the_built_in_task_are_explained_without_a_validation_too(tmp_path: Path) -> None:
    path = a_run(tmp_path / "a", source="embedded/addition")
    assert run(["report", str(path)]) == 0
    assert "71+63= → 431 means 134" in (path / "report.html").read_text()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_pieces_of_a_text_whose_characters_span_tokens() -> None:
    text = "aé😀 b" * 20
    data = text.encode()
    found = pieces(range(len(data)), lambda ids: bytes(data[i] for i in ids).decode("utf-8", "replace"))
    assert "".join(found) == text
    assert len(found) == len(data)


def test_turns_are_labelled_and_what_was_not_sampled_is_dimmed() -> None:
    row = conversation(keep_mask=[True, False, True, True])
    shown = _sample(row, lambda ids: "".join(chr(ord("a") + number) for number in ids))
    assert [(token.text, token.shade) for token in shown["tokens"]] == [
        ("turn 1", "turn"), ("f", "n3"), ("g", "n3 out"), ("observation", "turn"), ("h", "unsampled"),
        ("turn 2", "turn"), ("i", "n3"),
    ]  # fmt: skip
    assert (shown["num_tokens"], shown["num_turns"], shown["log_ratio"]) == (3, 2, "-1.5000")


def test_an_episode_that_was_not_trained_on_is_shown() -> None:
    row = dumped([5], [-1.0], [None], reward=None, rollout_is_weights=[None], keep_mask=[False])
    shown = _sample(row, lambda ids: "x" * len(ids))
    assert [(token.shade, token.about) for token in shown["tokens"]] == [
        ("", "rollout log-prob -1.000, not trained on")
    ]
