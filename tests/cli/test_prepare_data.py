"""`rlctl prepare-data parquet`: exit codes, messages and the summary."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest

from rlctl.cli.app import run
from rlctl.data.read import load_rows
from tests.unit.prepare import small_models
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


def test_columns_of_other_spelling_get_the_ready_command(tmp_path, capsys):
    file, out = tmp_path / "q & a.csv", tmp_path / "out"
    file.write_text("Text,Response\nWhat is 1+1?,2\nWhat is 2+2?,4\n")
    assert prepare(file, "--out", out) == 2
    (fix,) = re.findall(r"fix  (rlctl .*)", capsys.readouterr().err)
    assert fix.endswith("--answer-key Response --prompt-key Text")
    assert run(shlex.split(fix)[1:]) == 0
    file.write_text("Frage,Antwort\nWhat is 1+1?,2\n")
    assert prepare(file, "--out", out, "--overwrite") == 2
    assert "pass --prompt-key, --answer-key or --recipe" in capsys.readouterr().err


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
            b'{"prompt": "q", "answer": "1"}\n{"answer": "1"}\n',
            ["a.jsonl:2", "no column 'prompt'"],
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


def test_an_output_never_replaces_its_own_input(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(source, "--out", out) == 0
    before = {file: file.read_bytes() for file in out.iterdir()}
    for inputs in ([out / "train.parquet"], [source, "--against", out / "test.parquet"]):
        assert prepare(*inputs, "--out", out, "--overwrite", "--seed", "2") == 2
        assert "contains this input" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in out.iterdir()} == before


def test_names_cannot_control_the_terminal(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a\x1b[31m\nb.jsonl", [{"prompt": "q", "answer": "1"}])
    assert prepare(source, "--out", tmp_path / "o\x1b[31m", "--val-size", "0") == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"a\x1b[31m\nb.jsonl:1" in printed


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
        "--no-check-graders",
    ]
    with os.fdopen(parent, "rb", buffering=0) as terminal:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        subprocess.run(command, stderr=child, stdout=subprocess.DEVNULL, env=environment, check=True)
        os.close(child)
        assert b"reading" in terminal.read(100_000)


def test_neither_help_nor_preparing_imports_torch(source, tmp_path):
    arguments = ["prepare-data", "parquet", str(source), "--out", str(tmp_path / "out"), "--no-check-graders"]
    work = f"run({arguments!r})"
    code = (
        "import sys\nfrom rlctl.cli.app import run\nrun(['prepare-data', 'parquet', '--help'])\n"
        f"assert 'pyarrow' not in sys.modules\n{work}\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_options_of_the_second_pass_arrive(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [*gsm8k_rows(copies=20), *gsm8k_rows(copies=2)])
    against = write_jsonl(tmp_path / "bench.jsonl", gsm8k_rows(copies=1))
    out = tmp_path / "out"
    options = ["--duplicates", "drop", "--leakage", "drop", "--against", against]
    more = ["--rows-per-shard", "50", "--val-fraction", "0", "--no-check-graders", "--workers", "2"]
    assert prepare(source, "--out", out, *options, *more) == 0
    printed = capsys.readouterr().out
    assert re.search(r"duplicates dropped +12\n", printed)
    assert re.search(r"leaked dropped +44\n", printed)
    assert re.search(rf"train +76  {out}/train-\*\.parquet\n", printed)
    assert sorted(file.name for file in out.iterdir()) == [
        "manifest.json",
        *(f"train-{place:05}-of-00002.parquet" for place in range(2)),
    ]


def test_the_next_command_names_every_shard(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=5))
    out = tmp_path / "out"
    assert prepare(source, "--out", out, "--rows-per-shard", "20", "--no-check-graders", "--val-size", 0) == 0
    pattern = str(out / "train-*.parquet")
    assert f"rlctl train 'data.train_files={pattern}' model.path=MODEL" in capsys.readouterr().out
    assert len(load_rows([pattern])) == 30


def test_lengths_need_a_model(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=5))
    options = ["--out", tmp_path / "out", "--no-check-graders"]
    assert prepare(source, *options, "--overlong", "drop") == 2
    assert "--model" in capsys.readouterr().err


def test_arguments_of_the_chat_template_arrive_in_all_three_commands(tmp_path, capsys):
    template = small_models.GOOD + "{% if enable_thinking is false %}[ no thinking ]{% endif %}"
    model = small_models.save_model(tmp_path / "model", template)
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=5))
    more = ["--chat-template-kwargs", "enable_thinking=false"]
    ways = {
        "parquet": ["--out", tmp_path / "out", "--no-check-graders", "--val-size", 0],
        "check": [],
        "show": ["-n", 1],
    }
    longest = {}
    for command, arguments in ways.items():
        line = ["prepare-data", command, str(source), *map(str, arguments)]
        assert run([*line, *more]) == 2
        assert "--model" in capsys.readouterr().err
        for options in (more, []):
            replaced = ["--overwrite"] if command == "parquet" else []
            assert run([*line, *replaced, "--model", model, *options, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            lengths = found["report"]["lengths"] if command == "parquet" else found["lengths"]
            longest.setdefault(command, []).append(lengths["max"])
    assert all(with_it == without + 7 for with_it, without in longest.values())
    assert longest["parquet"] == longest["check"] == longest["show"]
    assert run(["prepare-data", "show", str(source), "--model", model, *more]) == 0
    assert "[assistant][ no thinking ]" in capsys.readouterr().out
    command = [
        "prepare-data",
        "parquet",
        str(source),
        "--model",
        model,
        *more,
        "--out",
        str(tmp_path / "new"),
    ]
    assert run([*command, "--no-check-graders"]) == 0
    assert "data.chat_template_kwargs.enable_thinking=false" in capsys.readouterr().out
