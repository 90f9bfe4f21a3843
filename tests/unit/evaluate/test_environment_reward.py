"""The reward of the environment itself is stored with a response, and graded again without sampling."""

from __future__ import annotations

from pathlib import Path

from rlctl.data.schema import Message, Row
from rlctl.evaluate.evaluation import grade
from rlctl.evaluate.samples import Response, as_samples, read_samples, write_samples
from rlctl.evaluate.store import ResponseStore
from rlctl.reward.build import Reward
from rlctl.run_spec.rollout import OverlongSpec

ROWS = [Row("game", (Message("user", "go"),), "")]
RESPONSES = {(0, 0): Response("a", False, 3, 0.5), (0, 1): Response("b", True, 4)}


def test_stored_responses_keep_it(tmp_path: Path) -> None:
    keys = {("hash", 0, sample, 1): (0, sample) for sample in range(2)}
    with ResponseStore(tmp_path, {}) as store:
        store.add({key: RESPONSES[pair] for key, pair in keys.items()})
        assert store.find(keys) == RESPONSES


def test_it_is_the_score_where_no_grader_is_asked(tmp_path: Path) -> None:
    samples = as_samples(ROWS, ["go"], RESPONSES)
    write_samples(tmp_path / "samples.parquet", samples)
    read = read_samples(tmp_path / "samples.parquet")
    graded = grade(Reward({}, OverlongSpec(), 10), read, lambda *_: None)
    assert [sample.reward for sample in graded.samples] == [0.5, None]
    assert len(graded.errors) == 1
