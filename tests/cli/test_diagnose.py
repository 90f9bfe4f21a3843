import json

import pytest

from rlctl.cli.app import run
from tests.unit.diagnose.logs import CORR, healthy_rows, write_run


@pytest.fixture
def healthy(tmp_path):
    return write_run(tmp_path / "healthy", healthy_rows())


@pytest.fixture
def sick(tmp_path):
    rows = [row | {f"{CORR}kl": 0.2, "response_length/clip_ratio": 0.2} for row in healthy_rows()]
    return write_run(tmp_path / "sick", rows)


@pytest.fixture(autouse=True)
def _wide_plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_healthy_run_is_told_so_with_what_was_checked(healthy, capsys):
    assert run(["diagnose", str(healthy), "--fail-on", "warning"]) == 0
    out = capsys.readouterr().out
    assert "no warnings" in out
    assert "ok   gradient-norm" in out
    assert "n/a  probability-gap" in out


def test_what_could_not_be_checked_is_told_with_the_key(tmp_path, capsys):
    rows = healthy_rows()
    for row in rows:
        del row["actor/entropy"]
    run_dir = write_run(tmp_path / "run", rows, has_spec=False)
    assert run(["diagnose", str(run_dir / "metrics.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "SKIPPED  entropy" in out
    assert "actor/entropy" in out
    assert "spec.yaml" in out


@pytest.mark.parametrize(("fail_on", "code"), [(None, 0), ("warning", 3), ("critical", 3)])
def test_exit_code_follows_fail_on(sick, fail_on, code, capsys):
    assert run(["diagnose", str(sick), *(["--fail-on", fail_on] if fail_on else [])]) == code
    out = capsys.readouterr().out
    assert "CRITICAL  trained and sampling policy are 0.2 nats per token apart in steps 1–60" in out
    assert "WARNING" in out
    assert "1 critical, 1 warning" in out
    assert "try     data.max_response_length=" in out


def test_a_warning_is_not_critical(tmp_path):
    rows = [row | {"response_length/clip_ratio": 0.2} for row in healthy_rows()]
    run_dir = write_run(tmp_path / "run", rows)
    assert run(["diagnose", str(run_dir), "--fail-on", "critical"]) == 0
    assert run(["diagnose", str(run_dir), "--fail-on", "warning"]) == 3


def test_json_holds_the_same_for_several_runs(healthy, sick, capsys):
    assert run(["diagnose", str(healthy), str(sick), "--format", "json", "--fail-on", "warning"]) == 3
    document = json.loads(capsys.readouterr().out)
    first, second = document["runs"]
    assert first["findings"] == []
    assert first["steps"] == {"first": 1, "last": 60, "count": 60}
    assert [finding["rule"] for finding in second["findings"]] == ["policy-gap", "truncated"]
    evidence = second["findings"][0]["evidence"][0]
    assert evidence["metric"] == f"{CORR}kl"
    assert (evidence["first_step"], evidence["last_step"]) == (1, 60)


def test_hostile_names_print_as_they_are(tmp_path, capsys):
    run_dir = write_run(tmp_path / "[red]x[nope]", healthy_rows())
    assert run(["diagnose", str(run_dir)]) == 0
    assert "[red]x[nope]" in capsys.readouterr().out


def test_mistakes_exit_2(tmp_path, healthy, capsys):
    other = tmp_path / "notes.txt"
    other.write_text("not a log\n")
    for path, words in ((tmp_path / "nowhere", "no such file"), (other, "not a log that is known")):
        assert run(["diagnose", str(healthy), str(path)]) == 2
        assert words in capsys.readouterr().err
    assert run(["diagnose", str(healthy), "--fail-on", "info"]) == 2
