import json
import math
import subprocess
import sys

import numpy as np
import pytest

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rules import METRICS_READ, examine
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
    assert "actor/lr" in table.names
    assert "actor/lr" not in table.columns
    assert len(table.series("never")) == 0


def test_half_a_last_line_and_bytes_that_are_no_text_are_passed_over(tmp_path):
    content = line(1, grad_norm=1.0).encode() + b"\xff\xfe garbage\n\n" + line(2, grad_norm=2.0).encode()
    run = read(tmp_path, content + b'{"step": 3, "actor/grad_no')
    assert run.table.steps.tolist() == [1, 2]
    assert run.notes == ("2 unreadable line(s) passed over",)


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
        (b"hello\nworld\n", "not a log that is known"),
        (b'{"actor/grad_norm": 1.0}\n', "not a log that is known"),
        (b'{"step": 1.5, "actor/grad_norm": 1.0}\n', "not a log that is known"),
        (b'{"step": 99999999999999999999999, "actor/grad_norm": 1.0}\n', "not a log that is known"),
        (b"[" * 100_000, "not a log that is known"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    with pytest.raises(UsageError, match=words):
        read(tmp_path, content)


def test_a_directory_without_a_log_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no metrics\.jsonl"):
        read_run(tmp_path, KEYS)
    with pytest.raises(UsageError, match="no such file"):
        read_run(tmp_path / "nowhere", KEYS)


def test_a_broken_spec_is_noted_and_the_log_judged_without_it(tmp_path):
    run_dir = write_run(tmp_path / "run", healthy_rows(20))
    (run_dir / "spec.yaml").write_text("actor:\n  lr: fast\n")
    run = read_run(run_dir, METRICS_READ)
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
    assert examine(read_run(tmp_path / "long.jsonl", METRICS_READ)).findings == ()


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
