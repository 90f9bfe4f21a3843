"""prepare-data on broken input, and killed: refused or set aside by file and row, never lost."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlctl.cli.app import run
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl

GOOD = [{"prompt": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(200)]
LINES = "".join(json.dumps(row) + "\n" for row in GOOD).encode()


def parquet_bytes(tmp_path, table=None):
    path = tmp_path / "made.parquet"
    pq.write_table(pa.Table.from_pylist(GOOD) if table is None else table, path)
    return path.read_bytes()


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def empty_parquet(tmp_path):
    columns = {name: pa.array([], pa.string()) for name in ("prompt", "answer")}
    return parquet_bytes(tmp_path, pa.table(columns))


BROKEN = {
    "footer.parquet": lambda at: parquet_bytes(at)[:-8] + b"\0" * 8,
    "truncated.parquet": lambda at: parquet_bytes(at)[:-500],
    "not-parquet.parquet": lambda at: LINES,
    "no-rows.parquet": empty_parquet,
    "empty.jsonl": lambda at: b"",
    "blank.jsonl": lambda at: b"\n \n\r\n",
    "empty.csv": lambda at: b"",
    "truncated.jsonl.gz": lambda at: gzip.compress(LINES)[:-30],
    "flipped.jsonl.gz": lambda at: gzip.compress(LINES)[:-6] + b"\0" * 6,
    "truncated.jsonl.zst": lambda at: zstd(LINES)[:-30],
    "not-zstd.jsonl.zst": lambda at: LINES,
    "cut.json": lambda at: json.dumps(GOOD).encode()[:-10],
    "latin.json": lambda at: b'[{"prompt": "caf\xe9", "answer": "1"}]',
    "stream.arrow": lambda at: b"ARROW1\0\0" + LINES,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path, capfd, name):
    source = tmp_path / name
    source.write_bytes(BROKEN[name](tmp_path))
    command = ["prepare-data", "parquet", str(source), "--out", str(tmp_path / "out")]
    assert run([*command, "--bad-rows", "quarantine"]) == 2
    message = capfd.readouterr().err
    assert name in message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


BAD_ROWS = {
    "null-prompt": (b'{"prompt": null, "answer": "1"}', "the prompt is null"),
    "mixed-types": (b'{"prompt": {"text": "q"}, "answer": "1"}', "the prompt is of type dict"),
    "list-answer": (b'{"prompt": "q", "answer": [[1], 2]}', "of type list"),
    "not-utf8": (b'{"prompt": "caf\xe9", "answer": "1"}', "not valid UTF-8 at byte 16"),
    "half-a-pair": (rb'{"prompt": "\ud83d", "answer": "1"}', "not valid UTF-8"),
    "cut-off": (b'{"prompt": "q", "ans', "invalid JSON"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "no-object": (b"42", "not a JSON object"),
    "no-column": (b'{"words": "q"}', "no column"),
    "nan-answer": (b'{"prompt": "q", "answer": NaN}', "is nan, not a number"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_when_refused_and_kept_when_set_aside(tmp_path, capfd, name):
    raw, reason = BAD_ROWS[name]
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINES + raw + b"\n" + b'{"prompt": "What is 900 plus 1?", "answer": 901}\n')
    command = ["prepare-data", "parquet", str(source), "--no-check-graders", "--out", str(tmp_path / "out")]
    assert run(command) == 2
    message = capfd.readouterr().err
    assert "in.jsonl:201: " in message
    assert reason in message
    assert "Traceback" not in message
    assert run([*command, "--bad-rows", "quarantine"]) == 0
    (entry,) = map(json.loads, (tmp_path / "out/quarantine.jsonl").read_text().splitlines())
    assert entry["row"] == 201
    assert reason in entry["reason"]
    assert entry["raw"] == raw.decode(errors="backslashreplace")
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    assert counts["input"] == 202
    assert counts["train"] + counts["test"] == 201


@pytest.mark.parametrize("answer", ["null", '""', '"proof"'])
def test_a_row_without_an_answer_is_dropped_and_counted(tmp_path, capfd, answer):
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINES + b'{"prompt": "q", "answer": %s}\n' % answer.encode())
    command = ["prepare-data", "parquet", str(source), "--no-check-graders", "--out", str(tmp_path / "out")]
    assert run(command) == 0
    assert "in.jsonl:201" in capfd.readouterr().out
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    assert counts["input"] == 201
    assert counts["train"] + counts["test"] == 200


def test_a_column_that_changes_its_type_midway(tmp_path, capfd):
    source = tmp_path / "in.jsonl"
    mixed = [
        *GOOD,
        *({"prompt": f"q {i}", "answer": i + 0.5} for i in range(5)),
        {"prompt": 7, "answer": "8"},
    ]
    write_jsonl(source, mixed)
    command = ["prepare-data", "parquet", str(source), "--no-check-graders", "--out", str(tmp_path / "out")]
    assert run([*command, "--bad-rows", "quarantine"]) == 0
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    assert (counts["input"], counts["quarantined"]) == (206, 1)


def test_windows_line_ends_a_byte_order_mark_and_a_million_characters(tmp_path):
    source = tmp_path / "in.jsonl"
    long = json.dumps({"prompt": "word " * 200_000, "answer": "1"}).encode()
    source.write_bytes(b"\xef\xbb\xbf" + (LINES + long + b"\n").replace(b"\n", b"\r\n"))
    command = ["prepare-data", "parquet", str(source), "--no-check-graders", "--out", str(tmp_path / "out")]
    assert run(command) == 0
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["counts"]
    assert counts["train"] + counts["test"] == counts["input"] == 201


def test_ground_truths_no_grader_accepts_are_bad_rows(tmp_path, capfd):
    rows = [*gsm8k_rows(), {"question": "q", "answer": "#### 5"}]
    good = write_jsonl(tmp_path / "in.jsonl", rows)
    command = ["prepare-data", "parquet", str(good), "--val-size", "0", "--out", str(tmp_path / "out")]
    assert run(command) == 0
    rows[3] = {"prompt": "Which?", "answer": ";"}
    wrong = [{"prompt": row.get("question", "Which?"), "answer": row["answer"][-1]} for row in rows]
    source = write_jsonl(tmp_path / "wrong.jsonl", wrong)
    command = ["prepare-data", "parquet", str(source), "--val-size", "0", "--out", str(tmp_path / "wrong")]
    assert run([*command, "--data-source", "openai/gsm8k"]) == 2
    message = capfd.readouterr().err
    assert "wrong.jsonl:4: the ground truth cannot be graded" in message


def heeding_ctrl_c():
    """The parent process may have set the tests to ignore this signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def working(tmp_path):
    """A preparation of 40 MB in two processes, at work in a session of its own."""
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=50_000))
    command = [
        sys.executable,
        "-c",
        "from rlctl.cli.app import main; main()",
        *("prepare-data", "parquet", str(source), "--out", str(tmp_path / "out"), "--workers", "2"),
        *("--no-check-graders", "--duplicates", "keep"),
    ]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeding_ctrl_c,  # noqa: PLW1509 - no threads here
    )
    wait_for(lambda: any(rows.stat().st_size for rows in tmp_path.glob(".out.partial-*/.work/rows")), 60)
    yield process
    for left in in_session(process.pid):
        left.kill()
    process.wait()


def in_session(session):
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def workers_of(process):
    """The processes with the least descendants of their own: the pool's."""
    return [child for child in psutil.Process(process.pid).children(recursive=True) if not child.children()]


def test_a_worker_that_is_killed_ends_the_run_with_a_reason(working, tmp_path):
    busy = max(workers_of(working), key=lambda child: child.cpu_times().user)
    busy.send_signal(signal.SIGKILL)
    _, message = working.communicate(timeout=60)
    assert working.returncode == 1
    assert "a worker process died" in message
    assert "Traceback" not in message
    wait_for(lambda: not in_session(working.pid), 20)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_ctrl_c_leaves_nothing(working, tmp_path):
    os.killpg(working.pid, signal.SIGINT)
    _, message = working.communicate(timeout=60)
    assert working.returncode == 130
    assert "Traceback" not in message
    wait_for(lambda: not in_session(working.pid), 20)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_killed_run_takes_its_workers_with_it(working, tmp_path):
    working.send_signal(signal.SIGKILL)
    wait_for(lambda: not in_session(working.pid), 20)
    assert not (tmp_path / "out").exists()
