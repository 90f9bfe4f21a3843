"""`rlctl diagnose --sampler-test` on dumps with planted faults, of rlctl and of other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.cli.app import run as rlctl
from rlctl.errors import UsageError
from rlctl.mismatch.sampler_report import sampler_report

VOCABULARY, LENGTH = 12, 20


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def dump(path: Path, fault: str, *, scalars: bool = False, seed: int = 0, steps: int = 6) -> Path:
    """Responses of 20 tokens; the trained policy is a little stale; `fault` says what the sampler reports."""
    draw = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        for response in range(24):
            sampler = log_softmax(2 * draw.normal(size=(LENGTH, VOCABULARY)))
            trained = log_softmax(sampler + 0.3 * draw.normal(size=sampler.shape))
            cut = np.where(sampler > np.log(0.05), sampler, -np.inf)
            used = log_softmax(cut) if fault == "cut" else sampler
            tokens = [int(draw.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum())) for row in used]
            reported = used[np.arange(LENGTH), tokens]
            if fault == "shifted":
                reported = np.roll(reported, 1)
            if fault == "other weights":
                other = log_softmax(sampler + 0.5 * draw.normal(size=sampler.shape))
                reported = other[np.arange(LENGTH), tokens]
            if fault == "one source" and response % 2:
                reported = np.roll(reported, 1)
            own = reported if fault == "copy" else trained[np.arange(LENGTH), tokens]
            rows.append((step, f"source {response % 2}", reported.tolist(), own.tolist()))
    if scalars:
        flat = [(s, source, a, b) for s, source, x, y in rows for a, b in zip(x, y, strict=True)]
        rows = flat
    columns = zip(*rows, strict=True)
    names = ("step", "data_source", "rollout_log_probs", "old_log_probs")
    pq.write_table(pa.table(dict(zip(names, map(list, columns), strict=True))), path)
    return path


@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_an_honest_sampler_is_not_accused(tmp_path: Path, scalars: bool, seed: int) -> None:
    report = sampler_report(dump(tmp_path / "a.parquet", "", scalars=scalars, seed=seed))
    assert not report.fault
    assert report.num_tokens == 6 * 24 * LENGTH
    assert report.largest_log_wealth < math.log(100)
    assert abs(report.z) < 4
    assert "nothing speaks against" in report.conclusion


@pytest.mark.parametrize("fault", ["shifted", "other weights", "one source"])
def test_wrong_log_probs_are_named(tmp_path: Path, fault: str) -> None:
    report = sampler_report(dump(tmp_path / "a.parquet", fault))
    assert report.fault
    assert report.alarm_step <= 2
    if fault == "one source":
        assert "at source source 1" in report.conclusion
        clean = next(line for line in report.lines if line.name == "source 0")
        assert abs(clean.z) < 4


def test_a_cut_vocabulary_is_named_and_is_no_fault_of_the_log_probs(tmp_path: Path) -> None:
    report = sampler_report(dump(tmp_path / "a.parquet", "cut"))
    assert not report.fault
    assert "top-p, top-k or min-p" in report.conclusion
    assert report.mean < 0.99


def test_a_copy_leaves_nothing_to_test(tmp_path: Path) -> None:
    report = sampler_report(dump(tmp_path / "a.parquet", "copy"))
    assert report.z is None
    assert "nothing to test" in report.conclusion


def test_the_command_says_it_and_fails_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dump(tmp_path / "a.parquet", "shifted")
    assert rlctl(["diagnose", str(path), "--sampler-test", "--fail-on", "critical"]) == 3
    assert "did not draw its tokens" in capsys.readouterr().out
    assert rlctl(["diagnose", str(path), "--sampler-test", "--format", "json"]) == 0
    [document] = json.loads(capsys.readouterr().out)
    assert document["fault"] is True
    assert {line["kind"] for line in document["lines"]} >= {"source"}


def test_masked_and_missing_tokens(tmp_path: Path) -> None:
    """A token outside the mask is not read; one without the trained policy's log-prob counts as drawn."""
    table = pa.table(
        {
            "rollout_log_probs": [[-1.0, -2.0, -1.5], [-1.0]],
            "old_log_probs": [[-1.1, -1.9, None], [-0.9]],
            "response_mask": [[1, 1, 1], [0]],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    report = sampler_report(tmp_path / "a.parquet")
    assert report.num_tokens == 2
    assert report.mean == pytest.approx((math.exp(-0.1) + math.exp(0.1)) / 2)
    bets = (0.003, 0.01, 0.03, 0.1, 0.3)
    factors = [
        math.prod(1 + bet * (x - 1 - 1e-4) for x in (math.exp(-0.1), math.exp(0.1), 0.0)) for bet in bets
    ]
    assert report.largest_log_wealth == max(math.log(sum(factors) / 5 / 2 + 0.5), 0.0)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"logprobs": [[0.1]]}, "no column of log-probs"),
        ({"rollout_log_probs": [[-1.0, -2.0]], "old_log_probs": [[-1.0]]}, "has 1 entries"),
        ({"rollout_log_probs": [[-1.0]], "old_log_probs": [[None]]}, "no sampled token has both"),
    ],
)
def test_files_that_cannot_be_tested(tmp_path: Path, table: dict[str, list], words: str) -> None:
    types = {name: pa.list_(pa.float64()) for name in table}
    arrays = {name: pa.array(values, types[name]) for name, values in table.items()}
    pq.write_table(pa.table(arrays), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=words):
        sampler_report(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(UsageError, match="cannot be read"):
        sampler_report(tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="no rollouts"):
        sampler_report(tmp_path / "missing")
