"""`rlctl prepare-data check` and `show`: formats, exit codes, and text that tries to be more than text."""

import json
import subprocess
import sys

import pytest

from rlctl.cli.app import run
from tests.unit.prepare import small_models
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl
from tests.unit.prepare.test_check import verl_rows, write

HOSTILE = "\x1b[31mred\x1b[0m [bold]x[/bold] \u202eback \x07 <img src=x>"


@pytest.fixture
def good(tmp_path):
    return write(tmp_path / "train.parquet", verl_rows())


@pytest.fixture
def bad(tmp_path):
    rows = verl_rows(4)
    rows[2]["prompt"] = None
    rows[3] = rows[0]
    return write(tmp_path / "bad.parquet", rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_models.save_model(tmp_path_factory.mktemp("model"), context=500)


def command(name, *arguments):
    return run(["prepare-data", name, *map(str, arguments)])


def test_a_clean_file_says_so(good, capsys):
    assert command("check", good, "--fail-on", "warning") == 0
    printed = capsys.readouterr()
    assert "6 rows, read as verl (openai/gsm8k 6)" in printed.out
    assert "nothing found" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(("level", "code"), [("never", 0), ("error", 3), ("warning", 3)])
def test_findings_are_shown_worst_first_and_decide_the_exit_code(bad, capsys, level, code):
    assert command("check", bad, "--fail-on", level) == code
    printed = capsys.readouterr().out
    assert printed.index("error: 1 row cannot be used: the prompt is null") < printed.index("warning: 1 row")
    assert f"{bad}:3" in printed
    assert f"{bad}:4: as row 1" in printed
    assert "--duplicates drop" in printed
    assert "1 error, 1 warning" in printed


def test_a_warning_does_not_reach_error(tmp_path, capsys):
    rows = verl_rows(3)
    path = write(tmp_path / "twice.parquet", [*rows, rows[1]])
    assert command("check", path, "--fail-on", "error") == 0
    assert command("check", path, "--fail-on", "warning") == 3


def test_json(bad, model, capsys):
    assert command("check", bad, "--json", "--model", model) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"][0]["rows"] == 4
    assert [finding["code"] for finding in report["findings"]] == ["bad-rows", "duplicates"]
    assert (report["lengths"]["unit"], report["lengths"].keys() >= {"min", "p99", "max"}) == ("tokens", True)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"PAR1garbagePAR1", "cannot be read"), (None, "no such file"), (b"", "cannot be read")],
)
def test_what_cannot_be_read_exits_2(tmp_path, capsys, content, words):
    path = tmp_path / "a.parquet"
    if content is not None:
        path.write_bytes(content)
    for name in ("check", "show"):
        assert command(name, path) == 2
        message = capsys.readouterr().err
        assert words in message
        assert "a.parquet" in message
        assert "Traceback" not in message


def test_hostile_text_stays_text(tmp_path, capsys):
    rows = verl_rows(2, source=f"src {HOSTILE}")
    rows[0]["prompt"][0]["content"] = HOSTILE
    rows[0]["reward_model"]["ground_truth"] = HOSTILE
    path = write(tmp_path / "a.parquet", rows)
    for arguments in (
        ["show", path],
        ["check", path],
        ["check", path, "--json"],
    ):
        assert command(*arguments) == 0
        printed = capsys.readouterr().out
        assert not {"\x1b", "\u202e", "\x07"} & set(printed)
        assert "bold" in printed
    assert command("show", path) == 0
    assert "\\x1b[31mred\\x1b[0m [bold]x[/bold] \\u202eback \\x07 <img src=x>" in capsys.readouterr().out


def test_show_renders_what_the_model_reads(good, model, capsys):
    assert command("show", good, "--model", model, "-n", 2, "--row", 3, "--ids") == 0
    printed = capsys.readouterr().out
    assert "<s>[user]How much is 2 plus train 2?" in printed
    assert '"####".[assistant]' in printed
    assert "How much is 3 plus" in printed
    assert "How much is 4 plus" not in printed
    assert "ground truth  4" in printed
    assert "prompt lengths in tokens" in printed
    from rlctl.prepare.lengths import PromptLengths, show_rows

    lengths = PromptLengths(model)
    [shown], _ = show_rows(good, lengths, first=3, count=1)
    assert " ".join(map(str, shown.ids)) in printed
    assert ("<s>", True) in shown.pieces
    assert "".join(text for text, _ in shown.pieces) == lengths.renderer.text(shown.row)
    assert shown.ids == lengths.renderer.tokenizer.encode(lengths.renderer.text(shown.row))


def test_show_without_a_model_and_of_raw_files(tmp_path, capsys):
    source = write_jsonl(tmp_path / "raw.jsonl", [row | {"level": 3} for row in gsm8k_rows()])
    assert command("show", source, "-n", 1) == 0
    printed = capsys.readouterr().out
    assert f"── {source}:1\n" in printed
    assert 'extra_info    {"level": 3}' in printed
    assert max(map(len, printed.splitlines())) < 300, "no line is filled up to the width of the console"
    assert "user: Ann has 3 pens" in printed
    assert "prompt lengths in characters" in printed


def test_show_says_what_it_cannot_show(bad, tmp_path, capsys):
    assert command("show", bad) == 0
    assert "cannot be used: the prompt is null" in capsys.readouterr().out
    assert command("show", bad, "--row", 9) == 2
    assert "no row 9: it has 4" in capsys.readouterr().err
    assert command("show", bad, "--ids") == 2
    refusing = small_models.save_model(tmp_path / "refusing", "{{ raise_exception('not me') }}")
    assert command("show", bad, "--model", refusing) == 0
    assert "not me" in capsys.readouterr().out


def test_help_teaches_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom rlctl.cli.app import run\n"
        "run(['prepare-data', 'check', '--help'])\nrun(['prepare-data', 'show', '--help'])\n"
        "assert not {'pyarrow', 'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--fail-on" in done.stdout
    assert "--ids" in done.stdout


def test_leakage_is_reported_where_there_is_none(good, tmp_path, capsys):
    benchmark = write_jsonl(tmp_path / "bench.jsonl", [{"prompt": "Wo ist der Hund?", "answer": "1"}])
    line = f"leakage: 0 of 6 rows of {good} occur in {benchmark}"
    assert command("check", good, "--against", benchmark) == 0
    assert line in capsys.readouterr().out
    assert command("check", good, "--against", benchmark, "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)["leakage"]
    sides = {"rows_of": str(good), "against": str(benchmark), "of": 6}
    assert entry == {**sides, "rows": 0, "exact": 0, "masked": 0, "ngram": 0}
    assert command("check", good, "--against", benchmark) == 0
    assert "leakage: 0 of 6 rows" in capsys.readouterr().out
    source = write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=5))
    options = ("--out", tmp_path / "out", "--val-size", 3, "--against", benchmark)
    assert command("parquet", source, *options) == 0
    printed = capsys.readouterr().out
    assert f"leakage: 0 of 3 rows of test occur in {benchmark}" in printed
    assert f"leakage: 0 of 27 rows of train occur in {benchmark}" in printed


def test_everything_can_be_printed_as_json(good, model, tmp_path, capsys):
    assert command("check", good, "--json") == 0
    assert json.loads(capsys.readouterr().out)["files"][0]["rows"] == 6
    assert command("show", good, "--json", "--model", model, "--ids", "-n", "1") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["where"] == f"{good}:1"
    assert len(row["ids"]) == row["tokens"]
    assert command("parquet", good, "--out", tmp_path / "out", "--val-size", "2", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["counts"]["train"], summary["outputs"]["train"]) == (4, ["train.parquet"])
