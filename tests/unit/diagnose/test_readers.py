import contextlib
import json
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.diagnose.readers.collect import Collector
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.errors import UsageError
from tests.unit.diagnose.logs import healthy_rows, write_run

KEYS = ("actor/grad_norm", "actor/entropy")


def line(step, **values):
    return json.dumps({"step": step, **{f"actor/{key}": value for key, value in values.items()}}) + "\n"


def read(tmp_path, content, keys=KEYS):
    path = tmp_path / "some.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_run(path, keys)


def test_gaps_names_for_nan_and_metrics_that_come_later(tmp_path):
    run = read(
        tmp_path,
        line(0, lr=1.0)
        + line(2, grad_norm=0.5)
        + line(5, grad_norm="NaN", entropy=1.5)
        + line(6, grad_norm="-Infinity")
        + line(7, grad_norm="text", entropy=True)
        + line(9, grad_norm=3),
    )
    table = run.table
    assert table.steps.tolist() == [0, 2, 5, 6, 7, 9]
    series = table.series("actor/grad_norm")
    assert series.steps.tolist() == [2, 9]
    assert series.values.tolist() == [0.5, 3.0]
    assert table.nonfinite["actor/grad_norm"].tolist() == [5, 6]
    assert table.series("actor/entropy").steps.tolist() == [5, 7]
    assert "actor/lr" not in table.columns
    assert len(table.series("never")) == 0


def test_half_a_last_line_and_bytes_that_are_no_text_are_passed_over(tmp_path):
    content = line(1, grad_norm=1.0).encode() + b"\xff\xfe garbage\n\n" + line(2, grad_norm=2.0).encode()
    run = read(tmp_path, content + b'{"step": 3, "actor/grad_no')
    assert run.table.steps.tolist() == [1, 2]
    assert run.notes == ("2 unreadable line(s) skipped",)


def test_when_steps_go_back_the_later_rows_count(tmp_path):
    steps = [1, 2, 3, 4, 2, 3, 5]
    run = read(tmp_path, "".join(line(step, grad_norm=10 * i) for i, step in enumerate(steps)))
    assert run.table.steps.tolist() == [1, 2, 3, 5]
    assert run.table.series("actor/grad_norm").values.tolist() == [0, 40, 50, 60]
    assert "3 row(s)" in run.notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"hello\nworld\n", "not a known log format"),
        (b'{"actor/grad_norm": 1.0}\n', "not a known log format"),
        (b'{"step": 99999999999999999999999, "actor/grad_norm": 1.0}\n', "not a known log format"),
        (b"[" * 100_000, "not a known log format"),
        (b"{" * 100_000, "not a known log format"),
        (
            b"It was a dark and stormy night, step by step.\nThen it rained.\n" * 50,
            "no line or row with a step",
        ),
        (bytes(range(256)) * 100, "binary"),
        (b"\x1f\x8b\x08\x00garbage that is no gzip", "nothing in this compressed file"),
        (b"a,b\n1,2\n", "no line or row with a step"),
        (b"step,colour,size\n1,red,2\n", "it has no known metric, only colour, size, step"),
        (b'{"step": 1, "words": "many"}\n', "it has no known metric, only step, words"),
        (b'{"a": {"b": [1, 2]}}', "not a known log format"),
        (b"PAR1 but not Parquet", "a Parquet file that cannot be read"),
        (b":W&B\xe1\xbe\x00" + b"x" * 50, "no line or row with a step"),
        (
            b"\x18" + b"\0" * 7 + b"crc." + b"\x1a\x0dbrain.Event:2" + b"\xff" * 40,
            "no line or row with a step",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    with pytest.raises(UsageError, match=words):
        read(tmp_path, content)


def test_a_directory_without_a_log_is_refused(tmp_path):
    (tmp_path / "README.txt").write_text("prose")
    with pytest.raises(UsageError, match=r"holds no metrics\.jsonl"):
        read_run(tmp_path, KEYS)
    with pytest.raises(UsageError, match="no such file"):
        read_run(tmp_path / "nowhere", KEYS)


def test_a_parquet_table_without_steps_is_refused(tmp_path):
    pq.write_table(pa.table({"reward": [0.5]}), tmp_path / "data.parquet")
    with pytest.raises(UsageError, match="without a step column") as refused:
        read_run(tmp_path / "data.parquet", KEYS)
    assert "step column" in refused.value.what
    assert "metrics.jsonl" in refused.value.fix


def test_strange_numbers(tmp_path):
    run = read(
        tmp_path,
        line(1, grad_norm=10**400, entropy=1)
        + '{"step": 2, "actor/grad_norm": NaN, "actor/entropy": -Infinity}\n'
        + '{"step": 3, "actor/grad_norm": 1, "actor/grad_norm": 2}\n'
        + '{"step": 4.0, "actor/grad_norm": "4.5", "actor/entropy": null}\n'
        + '{"step": 5, "actor/grad_norm": [1, 2], "actor/entropy": {"a": 1}}\n'
        + '{"step": "6", "actor/grad_norm": 6}\n'
        + '{"step": true, "actor/grad_norm": 7}\n',
    )
    series = run.table.series("actor/grad_norm")
    assert series.steps.tolist() == [3, 4, 6]
    assert series.values.tolist() == [2.0, 4.5, 6.0]
    assert run.table.nonfinite["actor/grad_norm"].tolist() == [1, 2]
    assert run.table.nonfinite["actor/entropy"].tolist() == [2]


def test_an_object_where_earlier_rows_have_null_is_read(tmp_path):
    rows = [
        {"step": step, "actor/lr": 1.0, "actor": {"entropy": 0.5} if step == 3 else None} for step in range(5)
    ]
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), (*KEYS, "actor/lr"))
    assert run.table.series("actor/entropy").steps.tolist() == [3]
    assert run.table.series("actor/lr").steps.tolist() == [0, 1, 2, 3, 4]


def test_rows_of_one_step_are_put_together(tmp_path):
    run = read(tmp_path, line(1, grad_norm=1.0) + line(1, entropy=2.0) + line(2, grad_norm=3.0, entropy=4.0))
    assert run.table.steps.tolist() == [1, 2]
    assert run.table.series("actor/grad_norm").values.tolist() == [1.0, 3.0]
    assert run.table.series("actor/entropy").values.tolist() == [2.0, 4.0]
    assert run.notes == ()


def test_late_evaluations_are_no_restart_but_a_restart_overtakes_evaluations(tmp_path):
    def evaluation(step, reward):
        return json.dumps({"step": step, "val/x/reward_mean": reward}) + "\n"

    keys = (*KEYS, "val/<data_source>/reward_mean")
    late = "".join(line(step, entropy=1.0) for step in (1, 2, 3)) + evaluation(2, 0.5) + line(4, entropy=1.0)
    table = read(tmp_path, late, keys).table
    assert table.steps.tolist() == [1, 2, 3, 4]
    assert table.series("val/x/reward_mean").steps.tolist() == [2]

    again = "".join(line(step, entropy=2.0) for step in (2, 3))
    table = read(tmp_path, late + evaluation(4, 0.9) + again, keys).table
    assert table.series("val/x/reward_mean").steps.tolist() == [2]
    assert table.series("actor/entropy").values.tolist() == [1.0, 2.0, 2.0]


def test_shuffled_rows_are_sorted(tmp_path):
    steps = [5, 3, 9, 1, 7, 2, 8, 4, 6, 10]
    run = read(tmp_path, "".join(line(step, grad_norm=step / 10) for step in steps))
    assert run.table.steps.tolist() == list(range(1, 11))
    assert run.table.series("actor/grad_norm").values.tolist() == [step / 10 for step in range(1, 11)]
    assert run.notes == ("the rows are out of order: they are sorted by step",)


def test_writers_that_take_turns_are_put_together(tmp_path):
    """Three steps of one, then the same three of the other: no restart."""
    steps = (1, 2, 3)
    content = "".join(line(step, grad_norm=step) for step in steps)
    run = read(tmp_path, content + "".join(line(step, entropy=-step) for step in steps))
    assert run.table.series("actor/grad_norm").values.tolist() == [1, 2, 3]
    assert run.table.series("actor/entropy").values.tolist() == [-1, -2, -3]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["entropy", "grad_norm"])), min_size=1, max_size=25)
)
@settings(max_examples=200, deadline=None)
def test_restarts_and_shared_steps_against_the_plain_way(rows):
    """Reads the log in order; a restart at a step discards the values at and after that step.

    A log that goes back to a step or metric that is new is out of order; there the last value counts.
    """
    collector = Collector(lambda name: True)
    expected: dict[int, dict[str, float]] = {}
    last, seen, restarts = None, set(), True
    for step, key in rows:
        restarts &= last is None or step >= last or (step, key) in seen
        seen.add((step, key))
        last = step
    last = None
    for number, (step, key) in enumerate(rows):
        collector.add({"step": step, key: float(number)})
        if restarts and step != last:
            expected = {s: values for s, values in expected.items() if s < step}
        expected.setdefault(step, {})[key] = float(number)
        last = step
    found = collector.finish()
    assert found.steps.tolist() == sorted(expected)
    for key, column in found.columns.items():
        wanted = [expected[step].get(key, math.nan) for step in sorted(expected)]
        np.testing.assert_array_equal(column, wanted)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path, content):
    starts = [
        *(b"", line(1, entropy=1.0).encode(), b"step:1 - actor/entropy:", b"{'a': ", b"step,loss\n", b"PAR1"),
        *(b":W&B\xe1\xbe\x00", b"\x1f\x8b\x08\0", b"\x18" + b"\0" * 7 + b"crc.\x1a\x0dbrain.Event:2"),
    ]
    for start in starts:
        with contextlib.suppress(UsageError):
            read(tmp_path, start + content)


def test_the_log_that_says_most_is_chosen_and_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text("step,loss\n1,0.5\n")
    (tmp_path / "a" / "run.log").write_text(
        "".join(f"step:{step} - actor/entropy:0.5 - actor/grad_norm:1.0 - actor/lr:1\n" for step in (1, 2))
    )
    summary = {"_step": 900, "actor/entropy": 0.5, "actor/grad_norm": 1.0, "actor/lr": 1.0}
    (tmp_path / "a" / "wandb-summary.json").write_text(json.dumps(summary))
    (tmp_path / "a" / "data.jsonl").write_text('{"question": "2 + 2?"}\n')
    run = read_run(tmp_path, KEYS)
    assert run.path == tmp_path / "a" / "run.log"
    assert run.framework == "verl"
    assert run.notes == (f"2 logs of this run: {run.path} was read; to read another one, name it",)


def test_the_newest_checkpoints_history_is_chosen(tmp_path):
    for last in (5, 20, 10):
        folder = tmp_path / f"checkpoint-{last}"
        folder.mkdir()
        history = [
            {"step": step, "reward": 0.5, "completions/mean_length": 3.0} for step in range(1, last + 1)
        ]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    run = read_run(tmp_path, ("critic/score/mean",))
    assert run.path.parent.name == "checkpoint-20"
    assert run.table.steps[-1] == 20


def test_facts_come_from_the_spec(tmp_path):
    run_dir = write_run(tmp_path / "run", healthy_rows(20), "actor.ppo_epochs=2", "rollout.n=4",
                        "algorithm.rollout_correction.rollout_is=sequence")  # fmt: skip
    run = read_run(run_dir, metrics_read())
    assert run.framework == "rlctl"
    assert run.notes == ()
    spec, facts = run.spec, run.facts
    assert (facts.ppo_epochs, facts.group_size, facts.rollout_is) == (2, 4, "sequence")
    assert facts.updates_per_batch is not None
    assert facts.updates_per_batch == 2 * spec.data.train_batch_size // spec.ppo_mini_batch_size
    assert facts.batch_size == 4 * spec.data.train_batch_size


def test_a_broken_spec_is_noted_and_the_log_judged_without_it(tmp_path):
    run_dir = write_run(tmp_path / "run", healthy_rows(20))
    (run_dir / "spec.yaml").write_text("actor:\n  lr: fast\n")
    run = read_run(run_dir, metrics_read())
    assert run.spec is None
    assert "actor.lr" in run.notes[0]


def test_a_long_log_takes_memory_for_what_is_wanted_only(tmp_path):
    row = {"step": 0, **{f"actor/other_{i}": math.pi for i in range(20)}, "actor/entropy": 0.5}
    with (tmp_path / "long.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps(row | {"step": step}) + "\n")
    table = read_run(tmp_path / "long.jsonl", KEYS).table
    assert list(table.columns) == ["actor/entropy"]
    assert np.all(table.columns["actor/entropy"] == 0.5)
    assert examine(read_run(tmp_path / "long.jsonl", metrics_read())).findings == ()


def test_diagnosis_imports_no_torch(tmp_path):
    run_dir = write_run(tmp_path / "run", healthy_rows())
    code = (
        "import sys; from rlctl.cli.app import run; "
        f"code = run(['diagnose', {str(run_dir)!r}]); "
        "heavy = {'torch', 'transformers', 'deepspeed', 'pyarrow', 'wandb'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no warnings" in done.stdout


def test_a_byte_order_mark_costs_no_row(tmp_path):
    rows = [line(step, grad_norm=1.0) for step in (1, 2, 3)]
    for content in ("".join(rows), f"[{','.join(rows)}]"):
        run = read(tmp_path, b"\xef\xbb\xbf" + content.encode())
        assert (run.table.steps.tolist(), run.notes) == ([1, 2, 3], ())


@pytest.mark.filterwarnings("error")
def test_a_number_that_only_an_overflow_gives_is_not_finite(tmp_path):
    content = "".join(line(step, grad_norm=1e308 if step > 5 else 1.0, pg_loss=-1e308) for step in range(30))
    run = read(tmp_path, content, metrics_read())
    assert run.table.nonfinite["actor/grad_norm"].tolist() == list(range(6, 30))
    assert run.table.series("actor/grad_norm").values.tolist() == [1.0] * 6
    assert {finding.rule for finding in examine(run).findings} == {"not-finite"}


def test_a_pipe_is_read_like_a_file(tmp_path):
    """As a shell's `<(zcat log.gz)` gives it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = "".join(line(step, grad_norm=1.0) for step in range(20_000)).encode()
    writer = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writer.start()
    assert len(read_run(pipe, KEYS).table.steps) == 20_000
