import io
import json
import re
from pathlib import Path

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
    assert out.splitlines()[0] == "nothing to change"
    assert "no warnings" in out
    assert "ok  " not in out
    assert run(["diagnose", str(healthy), "--all"]) == 0
    out = capsys.readouterr().out
    assert "ok       gradient-norm" in out
    assert re.search("n/a +probability-gap", out)


def test_what_could_not_be_checked_is_told_with_the_key(tmp_path, capsys):
    rows = healthy_rows()
    for row in rows:
        del row["actor/entropy"]
    run_dir = write_run(tmp_path / "run", rows, has_spec=False)
    assert run(["diagnose", str(run_dir / "metrics.jsonl")]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"\d+ rules SKIPPED: the log lacks their metrics. 8 of them would run with: spec.yaml", out
    )
    assert run(["diagnose", str(run_dir / "metrics.jsonl"), "--format", "json"]) == 0
    [document] = json.loads(capsys.readouterr().out)["runs"]
    assert {one["rule"]: one["missing"] for one in document["skipped"]}["entropy"] == ["actor/entropy"]


def test_the_thing_to_do_is_on_the_first_line(sick, capsys):
    assert run(["diagnose", str(sick)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "set actor.ppo_mini_batch_size=null — because trained and sampling policy are 0.2"
    )


def test_twelve_runs_are_a_table_with_the_sick_ones_first_and_only_these_are_reported(tmp_path, capsys):
    sick = {4: "kl", 7: "clip", 11: "kl"}
    for number in range(12):
        more = {"kl": {f"{CORR}kl": 0.2}, "clip": {"response_length/clip_ratio": 0.2}}.get(
            sick.get(number), {}
        )
        write_run(tmp_path / f"run-{number:02}", [row | more for row in healthy_rows(60, number)])
    assert run(["diagnose", str(tmp_path)]) == 0
    first, _, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"3 of 12 runs are sick; begin with {tmp_path}/run-04/metrics.jsonl: set actor.")
    statuses = [re.search("critical|no warnings|warning", line)[0] for line in lines[:12]]
    assert statuses == ["critical"] * 2 + ["warning"] + ["no warnings"] * 9
    assert [re.search(r"run-(\d+)", line)[1] for line in lines[:3]] == ["04", "11", "07"]
    rest = "\n".join(lines[12:])
    assert sorted(set(re.findall(r"run-(\d+)/metrics", rest))) == ["04", "07", "11"]
    assert run(["diagnose", str(tmp_path), "--all"]) == 0
    assert "run-10/metrics.jsonl: steps 1–60" in capsys.readouterr().out


@pytest.mark.parametrize(("fail_on", "code"), [(None, 0), ("warning", 3), ("critical", 3)])
def test_exit_code_follows_fail_on(sick, fail_on, code, capsys):
    assert run(["diagnose", str(sick), *(["--fail-on", fail_on] if fail_on else [])]) == code
    out = capsys.readouterr().out
    assert "CRITICAL  trained and sampling policy are 0.2 nats per token apart in steps 1–60" in out
    assert "1 critical, 1 warning" in out
    assert "then        warning 20.0% of the responses are cut off" in out
    assert "try         actor.ppo_mini_batch_size=null" in out
    assert "data.max_response_length" not in out  # it is a consequence


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
    for path, words in ((tmp_path / "nowhere", "no such file"), (other, "not a known log format")):
        assert run(["diagnose", str(healthy), str(path)]) == 2
        assert words in capsys.readouterr().err
    assert run(["diagnose", str(healthy), "--fail-on", "info"]) == 2
    assert run(["diagnose", "-", "-"]) == 2
    assert "given twice" in capsys.readouterr().err


def test_every_format_goes_to_a_file_or_to_standard_output(sick, tmp_path, capsys):
    for name, words in (
        ("text", "CRITICAL"),
        ("json", '"severity": "critical"'),
        ("markdown", "### CRITICAL"),
    ):
        out = tmp_path / f"report.{name}"
        assert run(["diagnose", str(sick), "--format", name, "--out", str(out)]) == 0
        assert words in out.read_text(encoding="utf-8")
        assert capsys.readouterr().out == ""
        assert run(["diagnose", str(sick), "--format", name]) == 0
        assert words in capsys.readouterr().out


def test_a_page_is_written(sick, healthy, tmp_path):
    out = tmp_path / "report.html"
    write_run(sick, [row | {"perf/throughput": 9.0} for row in healthy_rows()])
    assert run(["diagnose", str(sick), str(healthy), "--format", "html", "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert '"key":"perf/throughput"' in page  # no rule reads it


def test_the_fixed_spec_can_be_trained_with(sick, tmp_path, capsys):
    fixed = tmp_path / "fixed.yaml"
    assert run(["diagnose", str(sick), "--fix", str(fixed), "--format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "applied  actor.ppo_mini_batch_size=null" in captured.err
    assert "truncated: a consequence of policy-gap" in captured.err
    assert run(["train", str(fixed), "--dry-run"]) == 0
    assert run(["diagnose", str(sick), "--fix", str(fixed)]) == 2
    assert "does not overwrite" in capsys.readouterr().err


def test_a_log_of_another_framework_gives_an_overlay(tmp_path, capsys):
    rows = [{"step": row["step"], "actor/pg_loss": 0.1, "critic/score/mean": 0.5} for row in healthy_rows()]
    for row in rows:
        row |= {"response_length/clip_ratio": 0.2, "response_length/max": 512.0, "actor/lr": 1e-6}
        row |= {f"{CORR}rollout_is_eff_sample_size": 0.2, f"{CORR}rollout_is_mean": 1.0}
    lines = (f"step:{row.pop('step')} - " + " - ".join(f"{k}:{v}" for k, v in row.items()) for row in rows)
    log = tmp_path / "verl.log"
    log.write_text("\n".join(lines))
    fixed = tmp_path / "fixed.yaml"
    assert run(["diagnose", str(log), "--fix", str(fixed)]) == 0
    captured = capsys.readouterr()
    assert "logged by verl" in captured.out
    assert "contains only the changed keys" in captured.err
    assert run(["train", "-p", "rloo-seq-is", "--spec", str(fixed), "--dry-run"]) == 0


def test_a_healthy_run_needs_no_fix(healthy, tmp_path, capsys):
    fixed = tmp_path / "fixed.yaml"
    assert run(["diagnose", str(healthy), "--fix", str(fixed)]) == 0
    assert "nothing was written" in capsys.readouterr().err
    assert not fixed.exists()


def test_standard_input_is_read(sick, monkeypatch, capsys):
    log = (sick / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log)))
    assert run(["diagnose", "-", "--fail-on", "critical"]) == 3
    assert "standard input: steps 1–60" in capsys.readouterr().out


def test_piped_tables_keep_each_row_on_one_line(healthy, sick, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    command = ["diagnose", str(healthy), str(sick)]
    assert run(command) == 0
    piped = capsys.readouterr().out
    assert re.search(r"\n\S+ +rlctl +60 +critical +trained and sampling policy are \S+ nats .*\n", piped)
    assert max(map(len, piped.splitlines())) < 400
    assert run([*command, "--out", str(tmp_path / "compared.txt")]) == 0
    assert (tmp_path / "compared.txt").read_text() == piped


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "{log}"], "an input of the command"),
        (["--out", "{dir}"], "a directory"),
        (["--out", "{dir}/no/report.txt"], "no such directory"),
        (["--fix", "{dir}/no/fixed.yaml"], "no such directory"),
        (["{dir}", "--fix", "{dir}/fixed.yaml"], "one run"),
        (["--what-if", "--fix", "{dir}/fixed.yaml"], "--fix applies to findings"),
        (["--what-if", "--format", "markdown"], "what-if writes"),
        (["--what-if", "--plan"], "give one of --what-if, --plan"),
        (["--who-sampled", "--plan", "--what-if"], "give one of --what-if, --who-sampled, --plan"),
        (["--plan", "--fail-on", "critical"], "--fail-on applies to findings, and --plan computes none"),
        (["--format", "pdf"], "pdf"),
    ],
)
def test_requests_that_cannot_work_are_refused(sick, arguments, words, capsys):
    log = sick / "metrics.jsonl"
    before = log.read_bytes()
    filled = [argument.format(log=log, dir=sick) for argument in arguments]
    assert run(["diagnose", str(log), *filled]) == 2
    assert words in capsys.readouterr().err
    assert log.read_bytes() == before


RULE = Path(__file__).parents[2] / "examples" / "custom_rule.py"
OTHERS = """

def plain(run):
    "Nothing."


def broken(run):
    return 1 / 0
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RULE.read_text(encoding="utf-8") + OTHERS, encoding="utf-8")
    return path


def test_a_users_own_rule_is_applied(mine, tmp_path, capsys):
    rows = [row | {"response_length/mean": 9.0} for row in healthy_rows()]
    short = write_run(tmp_path / "short", rows)
    own = ["--all", "--rules", f"{mine}:short_answers", "--rules", f"{mine}:plain"]
    assert run(["diagnose", str(short), "--fail-on", "warning", *own]) == 3
    out = capsys.readouterr().out
    assert "WARNING  responses have 9 tokens  [short-answers]" in out
    assert "try         ask for the steps in the prompt" in out
    assert "ok       plain" in out
    assert run(["diagnose", str(short), "--fail-on", "warning"]) == 0  # not without being asked for


@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "division by zero"), ("absent", "no such function"), ("short.py", "no such file")],
)
def test_a_faulty_rule_is_an_error_with_its_place(healthy, mine, capsys, name, words):
    path = f"{mine.parent}/{name}:short_answers" if name.endswith(".py") else f"{mine}:{name}"
    assert run(["diagnose", str(healthy), "--rules", path]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert path.partition(":")[0] in err


def test_a_rule_cannot_take_a_built_in_rules_name(healthy, mine, capsys):
    mine.write_text(mine.read_text(encoding="utf-8").replace("short-answers", "truncated"), encoding="utf-8")
    assert run(["diagnose", str(healthy), "--rules", f"{mine}:short_answers"]) == 2
    assert "truncated" in capsys.readouterr().err


def _missing(tmp_path):
    return tmp_path / "missing.jsonl"


def _empty(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    return tmp_path / "empty.jsonl"


def _no_log(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing of a run\n", encoding="utf-8")
    return tmp_path / "notes.txt"


@pytest.mark.parametrize("bad", [_missing, _empty, _no_log])
@pytest.mark.parametrize("place", [0, 1])
def test_the_other_runs_are_read_if_one_path_is_bad(healthy, sick, tmp_path, bad, place, capsys):
    paths = [str(healthy), str(sick)]
    paths.insert(place, str(bad(tmp_path)))
    assert run(["diagnose", *paths]) == 2
    seen = capsys.readouterr()
    assert "trained and sampling policy are 0.2 nats" in seen.out
    assert str(healthy) in seen.out
    assert paths[place] in seen.err
    assert run(["diagnose", *paths, "--fail-on", "critical"]) == 3


def test_a_log_of_a_directory_that_cannot_be_read_does_not_hide_the_others(healthy, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    code = run(["diagnose", str(tmp_path)])
    seen = capsys.readouterr()
    assert str(healthy) in seen.out
    assert (code, "broken" in seen.err) in {(2, True), (0, False)}  # or it was no run at all


def test_every_bad_path_is_named_if_none_can_be_read(tmp_path, capsys):
    assert run(["diagnose", str(_missing(tmp_path)), str(_empty(tmp_path))]) == 2
    seen = capsys.readouterr()
    assert "missing.jsonl" in seen.err
    assert "empty.jsonl" in seen.err
    assert seen.out == ""
