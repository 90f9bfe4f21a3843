"""`rlctl diagnose --sampler-test` on dumps with planted faults, of rlctl and of other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.cli.app import run as rlctl
from rlctl.errors import UsageError
from rlctl.mismatch.sampler_report import sampler_report
from rlctl.run_spec.load import dump_spec, load_spec

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


def test_a_cut_vocabulary_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dump(tmp_path / "a.parquet", "cut")
    report = sampler_report(path)
    assert report.is_cut
    assert report.severity == "warning"
    assert "top-p, top-k or min-p" in report.conclusion
    assert report.mean < 0.99
    command = ["diagnose", str(path), "--sampler-test", "--fail-on"]
    assert rlctl([*command, "warning"]) == 3
    assert rlctl([*command, "critical"]) == 0
    assert "without about" in capsys.readouterr().out


def test_a_copy_leaves_nothing_to_test(tmp_path: Path) -> None:
    report = sampler_report(dump(tmp_path / "a.parquet", "copy"))
    assert report.z is None
    assert "nothing to test" in report.conclusion


def test_the_command_says_it_and_fails_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dump(tmp_path / "a.parquet", "shifted")
    assert rlctl(["diagnose", str(path), "--sampler-test", "--fail-on", "warning"]) == 3
    assert "did not draw its tokens" in capsys.readouterr().out
    # What was left out of a file may depend on what was drawn: an alarm without guarantee is no proof.
    assert rlctl(["diagnose", str(path), "--sampler-test", "--fail-on", "critical"]) == 0
    assert "without guarantee" in capsys.readouterr().out
    assert rlctl(["diagnose", str(path), "--sampler-test", "--format", "json"]) == 0
    [document] = json.loads(capsys.readouterr().out)
    assert document["fault"] is True
    assert document["severity"] == "warning"
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


def run_with(
    tmp_path: Path, fault: str, *overrides: str, rows: list[dict] | None = None, groups: int = 12
) -> Path:
    """A run directory with a dump of `groups` groups of two responses per step."""
    spec = load_spec([], [], ["data.train_batch_size=12", "rollout.n=2", *overrides]).spec
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "spec.yaml").write_text(dump_spec(spec))
    guaranteed = {"rollout_corr/log_wealth": 0.0, "rollout_corr/log_wealth_guaranteed": 1.0}
    rows = [{"step": step, **guaranteed} for step in range(1, 7)] if rows is None else rows
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pq.read_table(dump(tmp_path / "all.parquet", fault))
    table = table.append_column("group_id", pa.array([place // 2 for place in range(24)] * 6))
    table = table.filter(pa.compute.less(table["group_id"], groups))
    pq.write_table(table, run / "rollouts" / "rollouts-000001-000006.parquet")
    return run


DECOUPLED = "algorithm.rollout_correction.bypass_mode=false"


def test_an_alarm_of_a_run_is_critical_while_its_guarantee_holds(tmp_path: Path) -> None:
    report = sampler_report(run_with(tmp_path, "shifted", DECOUPLED, "trainer.rollouts_per_step=-1"))
    assert (report.severity, report.no_guarantee, report.notes) == ("critical", "", ())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"step": 1, "rollout_corr/log_wealth_guaranteed": 0.0}], "failed or were started again, step 1"),
        ([{"step": 1, "critic/score/mean": 0.0}], "logged no test"),
    ],
)
def test_a_dump_has_no_guarantee_where_its_run_had_none(tmp_path: Path, rows: list[dict], words: str) -> None:
    """Failed episodes are not in the dump; which failed may depend on what was drawn."""
    report = sampler_report(run_with(tmp_path, "shifted", DECOUPLED, rows=rows))
    assert words in report.no_guarantee
    assert report.severity == "warning"


def test_a_dump_of_some_groups_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path, "", DECOUPLED, "trainer.rollouts_per_step=8", groups=4)
    [note] = sampler_report(run).notes
    assert note.startswith("the dump holds the first 4 of 12 groups of each step")
    assert rlctl(["diagnose", str(run), "--sampler-test"]) == 0
    assert "first 4 of 12 groups" in " ".join(capsys.readouterr().out.split())


def test_in_bypass_mode_only_the_first_mini_batch_is_read_and_that_is_said(tmp_path: Path) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    run = run_with(tmp_path, "", bypass, "actor.ppo_mini_batch_size=6", "trainer.rollouts_per_step=-1")
    report = sampler_report(run)
    assert report.num_tokens == 6 * 6 * 2 * LENGTH
    assert "the first 6 were scored before an update" in report.notes[0]


def test_the_table_names_a_sick_replica(tmp_path: Path) -> None:
    table = pq.read_table(dump(tmp_path / "a.parquet", "one source"))
    names = [f"http://engine-{source[-1]}" for source in table["data_source"].to_pylist()]
    table = table.drop_columns("data_source").append_column("replica", pa.array(names))
    pq.write_table(table, tmp_path / "b.parquet")
    report = sampler_report(tmp_path / "b.parquet")
    assert "most at replica http://engine-1" in report.conclusion


def test_files_of_other_programs(tmp_path: Path) -> None:
    """The same tokens as JSON lines under TRL's names, and as slime's training dump: the same answer."""
    columns = pq.read_table(dump(tmp_path / "a.parquet", "shifted")).to_pydict()
    wanted = sampler_report(tmp_path / "a.parquet")
    pairs = list(zip(columns["step"], columns["rollout_log_probs"], columns["old_log_probs"], strict=True))
    lines = [
        json.dumps({"step": s, "sampling_per_token_logps": a, "old_per_token_logps": b}) for s, a, b in pairs
    ]
    (tmp_path / "trl.jsonl").write_text("\n".join(lines))
    of_json = sampler_report(tmp_path / "trl.jsonl")
    (tmp_path / "slime").mkdir()
    for step in range(1, 7):
        samples = [
            {
                "rollout_log_probs": torch.tensor(a),
                "log_probs": torch.tensor(b),
                "loss_masks": torch.ones(LENGTH),
            }
            for own, a, b in pairs
            if own == step
        ]
        stored = {"format_version": 2, "rollout_id": step, "samples": samples}
        torch.save(stored, tmp_path / "slime" / f"{step}.pt")
    of_torch = sampler_report(tmp_path / "slime")
    for found in (of_json, of_torch):
        assert (found.num_tokens, found.alarm_step) == (wanted.num_tokens, wanted.alarm_step)
        assert found.largest_log_wealth == pytest.approx(wanted.largest_log_wealth, rel=1e-3)


def test_a_torch_file_that_is_no_dump_is_refused(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="no `samples`"):
        sampler_report(tmp_path / "a.pt")


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
