"""What is written in any format is read back equal."""

import contextlib
import csv
import gzip
import io
import os
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.diagnose.readers.detect import read_run
from rlctl.errors import UsageError
from tests.unit.diagnose import formats

NAMES = ("actor/grad_norm", "actor/entropy", "critic/score/mean", "val/my/data set/reward_mean")
VALUES = st.none() | st.floats(width=32) | st.integers(-(10**9), 10**9).map(float)


@st.composite
def tables(draw):
    """Rows with ascending steps and gaps; the first row has everything, so that the log is known."""
    steps = sorted(draw(st.sets(st.integers(0, 10**9), min_size=1, max_size=12)))
    rows = [{"step": step, **{name: draw(VALUES) for name in NAMES}} for step in steps]
    return [{**rows[0], **dict.fromkeys(NAMES, 1.5)}, *rows[1:]]


@pytest.mark.parametrize("write", formats.ALL, ids=lambda write: write.__name__)
@given(rows=tables())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_format_reads_back_equal(tmp_path, write, rows):
    path = tmp_path / "log"
    write(rows, path)
    table = read_run(path, NAMES).table
    for name in NAMES:
        expected = [(row["step"], row[name]) for row in rows if formats.is_finite(row[name])]
        series = table.series(name)
        assert series.steps.tolist() == [step for step, _ in expected]
        values = [value for _, value in expected]
        if write in formats.IS_SINGLE:
            values = np.float32(values).tolist()
        assert series.values.tolist() == values
        bad = [r["step"] for r in rows if r[name] is not None and not formats.is_finite(r[name])]
        assert table.nonfinite.get(name, np.empty(0)).tolist() == bad


def test_several_runs_in_one_table_give_the_first_and_a_note(tmp_path):
    path = tmp_path / "export.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", "a - actor/entropy", "b - actor/entropy"])
        writer.writerows([[1, 0.5, 0.1], [2, 0.6, 0.1]])
    run = read_run(path, NAMES)
    assert run.table.series("actor/entropy").values.tolist() == [0.5, 0.6]
    assert run.notes == ("2 runs in one table: a was read",)


@pytest.mark.parametrize("write", [formats.comma_separated, formats.parquet])
def test_rows_without_a_step_are_skipped_with_a_note(tmp_path, write):
    rows = [{"step": step, "actor/entropy": 0.5, "actor/lr": 1.0} for step in (1, None, None, 2)]
    write(rows, tmp_path / "log")
    run = read_run(tmp_path / "log", NAMES)
    assert run.table.steps.tolist() == [1, 2]
    [note] = run.notes
    assert note.startswith("2 row(s) without a step")


def test_decimal_commas_of_a_spreadsheet(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text("step;actor/entropy;actor/grad_norm\r\n1;0,125;1,5\r\n2;-0,003;1.250\r\n")
    table = read_run(path, NAMES).table
    assert table.series("actor/entropy").values.tolist() == [0.125, -0.003]
    assert table.series("actor/grad_norm").values.tolist() == [1.5, 1.25]
    path.write_text("step\tactor/entropy\tactor/grad_norm\n1\t0,125\t1,250\n")
    table = read_run(path, NAMES).table
    assert len(table.series("actor/entropy")) == 0
    assert table.series("actor/grad_norm").values.tolist() == [1250.0]


@pytest.mark.parametrize("write", [formats.flat_jsonl, formats.tensorboard, formats.parquet, formats.gzipped])
def test_standard_input(tmp_path, monkeypatch, write):
    write([{"step": 3, "actor/entropy": 0.5, "actor/lr": 1.0}], tmp_path / "log")
    content = (tmp_path / "log").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    run = read_run(Path("-"), NAMES)
    assert run.table.series("actor/entropy").steps.tolist() == [3]
    assert str(run.path) == "-"


def test_files_that_end_early_are_read_as_far_as_they_go(tmp_path):
    rows = [{"step": step, "actor/entropy": float(step), "actor/lr": 1.0} for step in range(200)]
    for write in (formats.tensorboard, formats.wandb_file, formats.gzipped):
        path = tmp_path / write.__name__
        write(rows, path)
        path.write_bytes(path.read_bytes()[:-20])
        run = read_run(path, NAMES)
        steps = run.table.series("actor/entropy").steps.tolist()
        assert steps == list(range(len(steps)))
        assert len(steps) > 100
        assert any("ends" in note for note in run.notes)


def test_several_event_files_are_one_log_and_a_restart_counts_anew(tmp_path):
    def rows(first, last, value):
        return [{"step": step, "actor/entropy": value, "actor/lr": 1.0} for step in range(first, last)]

    formats.tensorboard(rows(1, 8, 0.5), tmp_path / "events.out.tfevents.100.host")
    formats.tensorboard(rows(5, 7, 2.0), tmp_path / "events.out.tfevents.200.host")
    series = read_run(tmp_path, NAMES).table.series("actor/entropy")
    assert series.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert series.values.tolist() == [0.5] * 4 + [2.0] * 2


def test_scalars_as_tensors_and_training_arguments_beside_them(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_text("args", '{"num_generations": 8, "beta": 0.04, "learning_rate": 1e-6}')
    for step in range(5):
        writer.add_scalar("train/reward", 0.25 * step, step, new_style=step % 2 == 0)
        writer.add_scalar("train/completions/mean_length", 10.0, step)
    writer.close()
    run = read_run(tmp_path, ("critic/score/mean",))
    assert run.framework == "trl"
    assert run.facts.group_size == 8
    assert run.facts.kl_coef == 0.04
    assert run.table.series("critic/score/mean").values.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.slow
def test_a_real_offline_run_of_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = {"algorithm": {"rollout_correction": {"rollout_is": "sequence", "bypass_mode": True}},
              "actor_rollout_ref": {"actor": {"ppo_epochs": 2, "ppo_mini_batch_size": 4}},
              "data": {"train_batch_size": 8}}  # fmt: skip
    run = wandb.init(
        dir=tmp_path, config=config, settings=wandb.Settings(console="off", x_disable_stats=True)
    )
    for step in range(1, 6):
        norm = float("nan") if step == 4 else 0.5
        run.log({"actor/grad_norm": norm, "val-core/gsm8k/acc/mean@1": 0.1 * step}, step=step)
    run.finish()
    [file] = tmp_path.rglob("*.wandb")
    keys = ("actor/grad_norm", "val/<data_source>/reward_mean")
    for _ in range(100):  # W&B writes it from a process of its own, which may lag behind
        with contextlib.suppress(UsageError):
            log = read_run(file, keys)
            if len(log.table.steps) == 5:
                break
        time.sleep(0.1)
    assert log.framework == "verl"
    assert log.facts.updates_per_batch == 4
    assert (log.facts.rollout_is, log.facts.bypass_mode) == ("sequence", True)
    assert log.table.series("actor/grad_norm").steps.tolist() == [1, 2, 3, 5]
    assert log.table.nonfinite["actor/grad_norm"].tolist() == [4]
    assert log.table.series("val/gsm8k/reward_mean").values.tolist() == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )


@pytest.mark.skipif("RLCTL_LONG_LOGS" not in os.environ, reason="a million rows: set RLCTL_LONG_LOGS")
def test_a_million_rows(tmp_path):
    names = [f"rollout_corr/other_{i}" for i in range(20)] + ["actor/grad_norm", "actor/entropy"]
    cells = ", ".join(f'"{name}": 0.12345678901' for name in names)
    with (tmp_path / "log").open("w") as file:
        file.writelines(f'{{"step": {step}, {cells}}}\n' for step in range(1_000_000))
    tracemalloc.start()
    start = time.process_time()
    table = read_run(tmp_path / "log", NAMES).table
    print(f"{time.process_time() - start:.1f} s, {tracemalloc.get_traced_memory()[1] / 2**20:.0f} MiB")
    assert len(table.steps) == 1_000_000


def test_memory_grows_with_what_is_wanted_only(tmp_path):
    def peak(extra):
        cells = "".join(f', "other/{i}": 0.12345678901' for i in range(extra))
        lines = (f'{{"step": {step}, "actor/entropy": 0.5{cells}}}\n' for step in range(4_000))
        with gzip.open(tmp_path / "log.gz", "wt", compresslevel=1) as file:
            file.writelines(lines)
        tracemalloc.start()
        read_run(tmp_path / "log.gz", NAMES)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    read_run_once = peak(0)  # imports and caches
    assert peak(60) < peak(0) * 1.5 + (1 << 19)
    assert peak(0) <= read_run_once * 1.1
    assert peak(0) < 1 << 20
