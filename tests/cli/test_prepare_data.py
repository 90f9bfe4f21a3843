"""`rlctl prepare-data parquet`: exit codes, messages and the summary."""

import os
import pty
import re
import subprocess
import sys

import pytest

from rlctl.cli.app import run
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(copies=20))


def prepare(*arguments):
    return run(["prepare-data", "parquet", *map(str, arguments)])


def test_summary_says_what_where_and_what_next(source, tmp_path, capsys):
    out = tmp_path / "gsm8k"
    assert prepare(source, "--out", out, "--val-size", 20) == 0
    printed = capsys.readouterr()
    assert "recipe gsm8k" in printed.out
    assert f"100  {out}/train.parquet" in printed.out
    assert f"20  {out}/test.parquet" in printed.out
    assert (
        f"rlctl train data.train_files={out}/train.parquet data.val_files={out}/test.parquet" in printed.out
    )
    assert printed.err == "", "no progress bar outside a terminal"
    assert prepare(source, "--out", out, "--val-size", 20) == 0
    assert "unchanged" in capsys.readouterr().out


def test_every_option_arrives(tmp_path, capsys):
    source = tmp_path / "sums.csv"
    source.write_text("p,a\n1+1,2\n1+2,3\n,4\n2+2,4\n")
    arguments = [
        source,
        "--out",
        tmp_path / "out",
        "--recipe",
        "generic",
        "--prompt-key",
        "p",
        "--answer-key",
        "a",
    ]
    more = ["--data-source", "sums", "--system-prompt", "Sys.", "--instruction", "Go.", "--seed", "3"]
    assert prepare(*arguments, *more, "--val-fraction", "0", "--bad-rows", "quarantine") == 0
    assert re.search(r"quarantined +1 ", capsys.readouterr().out)
    from rlctl.data.read import load_rows

    first, *_ = load_rows([str(tmp_path / "out/train.parquet")])
    assert [message.content for message in first.prompt] == ["Sys.", "1+1\nGo."]
    assert first.data_source == "sums"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.jsonl",
            b'{"prompt": "q", "answer": "1"}\n{"prompt": "q"}\n',
            ["a.jsonl:2", "no column 'answer'"],
        ),
        (
            "a.jsonl",
            b'{"prompt": "q", "answer": "1"}\n{"prompt": 1, "answer": 1}\n',
            ["a.jsonl:2", "type int"],
        ),
        ("a.jsonl", b'{"prompt": null, "answer": "1"}\n', ["a.jsonl:1", "prompt is null"]),
        ("a.jsonl", b'{"prompt": "q", "answer": "1"}\n{oops\n', ["a.jsonl:2", "invalid JSON"]),
        ("a.jsonl", b'{"prompt": "q", "answer": "\xe9"}\n', ["a.jsonl:1", "UTF-8"]),
        ("a.csv", b"prompt,answer\nq,1\nq\n", ["a.csv:3", "1 fields"]),
        ("a.jsonl", b"", ["a.jsonl", "empty"]),
        ("a.parquet", b"PAR1garbagePAR1", ["a.parquet", "cannot be read"]),
        ("a.xlsx", b"?", ["a.xlsx", "format", ".jsonl"]),
        ("sub/missing.jsonl", None, ["missing.jsonl", "no such file"]),
    ],
)
def test_bad_input_exits_2_naming_file_and_row(tmp_path, capsys, name, content, words):
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    assert prepare(source, "--out", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--val-fraction", "0.1", "--val-size", "3"],
        ["--val-fraction", "1"],
        ["--val-size", "-1"],
        ["--recipe", "gsm9k"],
        ["--instruction", "\udcff"],
    ],
)
def test_wrong_options_exit_2(source, tmp_path, arguments):
    assert prepare(source, "--out", tmp_path / "out", *arguments) == 2
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_something_else_exits_2(source, tmp_path, capsys):
    assert prepare(source, "--out", source) == 2
    assert "not a directory" in capsys.readouterr().err
    assert prepare(source, "--out", tmp_path, "--overwrite") == 2  # would have removed its own input
    assert "did not write (train.jsonl)" in capsys.readouterr().err
    assert source.exists()


def test_names_with_spaces_and_dots_work(tmp_path):
    (tmp_path / "sub dir").mkdir()
    source = write_jsonl(tmp_path / "my data.v2.jsonl", gsm8k_rows())
    assert prepare(tmp_path / "sub dir" / ".." / source.name, "--out", tmp_path / "o u t [1]") == 0
    assert prepare(tmp_path / source.name, "--out", tmp_path / "o u t [1]") == 0


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    write_jsonl(type(tmp_path)(source), gsm8k_rows())
    assert prepare(source, "--out", tmp_path / "out") == 2


def test_a_terminal_gets_a_progress_bar(source, tmp_path):
    parent, child = pty.openpty()
    code = "from rlctl.cli.app import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "prepare-data",
        "parquet",
        str(source),
        "--out",
        str(tmp_path / "out"),
    ]
    with os.fdopen(parent, "rb", buffering=0) as terminal:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        subprocess.run(command, stderr=child, stdout=subprocess.DEVNULL, env=environment, check=True)
        os.close(child)
        assert b"reading" in terminal.read(100_000)


def test_neither_help_nor_preparing_imports_torch(source, tmp_path):
    work = f"run(['prepare-data', 'parquet', {str(source)!r}, '--out', {str(tmp_path / 'out')!r}])"
    code = (
        "import sys\nfrom rlctl.cli.app import run\nrun(['prepare-data', 'parquet', '--help'])\n"
        f"assert 'pyarrow' not in sys.modules\n{work}\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
