"""The detection matrix: whole and clean, and red as soon as a rule or a reader is not what it was."""

import itertools

import numpy as np
import pytest

from rlctl.cli.app import run as rlctl
from rlctl.diagnose import thresholds
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import all_rules, metrics_read
from rlctl.diagnose.thresholds import TRUNCATED, Levels
from tests.simulated_logs import matrix
from tests.simulated_logs.faults import FAULTS
from tests.simulated_logs.healthy import KINDS
from tests.simulated_logs.simulate import healthy_rows, interrupted
from tests.simulated_logs.writers import FORMATS, NEMO_RL, TRL, VERL, write_log

#: Rules of exact values and of long runs need no simulation: `test_rules.py` tries them.
EXACT = {"exception", "zero-advantages", "missing-log-probs", "entropy-rise", "flat-reward", "large-updates"}
EXACT |= {
    "sampler-log-probs",
    "who-sampled",
    "unsteady-reward",
    "optimizer-state",
    "random-tokens",
    "no-format",
    "critic",
    "disk-full",
    "small-updates",
    "strong-penalty",
    "constant-reward",
    "length-collapse",
    "length-growth",
    "reward-terms",
    "temperature",
    "frozen",
}
SIMULATED = {rule.name for rule in all_rules()} - EXACT


def of(*rules):
    return tuple(fault for fault in FAULTS if fault.rule in rules)


def small(monkeypatch, *rules, kinds=()):
    monkeypatch.setattr(matrix, "FAULTS", of(*rules))
    monkeypatch.setattr(matrix, "KINDS", tuple(kind for kind in KINDS if kind.name in kinds))


@pytest.mark.slow
def test_every_rule_finds_its_faults_in_one_format():
    found = matrix.run(1, lambda *counts: None, sample=True)
    assert found.failures == ()
    for rule in SIMULATED:
        own = [trial for trial in found.trials if trial.rule == rule]
        assert {trial.kind for trial in own if trial.wanted != "skipped"} == {"mild", "severe"}
    assert {trial.kind for trial in found.trials if not trial.rule} == {kind.name for kind in KINDS}
    assert {trial.form for trial in found.trials} == set(FORMATS)
    assert {trial.wanted for trial in found.trials} == {"skipped", "quiet", "info", "warning", "critical"}


@pytest.mark.thorough
def test_every_rule_finds_its_faults_and_healthy_runs_are_quiet():
    done = []
    found = matrix.run(1, lambda *counts: done.append(counts))
    assert found.failures == ()
    assert done[-1] == (len(found.trials), len(found.trials))
    for rule in SIMULATED:
        own = [trial for trial in found.trials if trial.rule == rule]
        assert {trial.kind for trial in own if trial.wanted != "skipped"} == {"mild", "severe"}
        assert any(trial.delay is not None and trial.delay >= 0 for trial in own)
        # Every format is tested, or the result states that the fault cannot be detected in it.
        assert {trial.form for trial in own} >= {"rlctl", "verl", "trl"}
    quiet = [trial for trial in found.trials if not trial.rule]
    assert len(quiet) == 3 * len(KINDS)


def test_a_rule_that_goes_blind_is_seen(monkeypatch):
    small(monkeypatch, "truncated", "rejected")
    monkeypatch.setattr(thresholds, "TRUNCATED", Levels(TRUNCATED.key, (("warning", 0.4),)))
    failures = matrix.run(2, lambda *counts: None).failures
    assert {(trial.rule, trial.kind) for trial in failures} == {
        ("truncated", "mild"),
        ("truncated", "severe"),
    }
    assert {trial.problem.partition(":")[0] for trial in failures} == {"nothing found", "only warning"}


def test_a_rule_that_cries_wolf_is_seen(monkeypatch):
    small(monkeypatch, kinds=("long reasoning",))
    monkeypatch.setattr(thresholds, "TRUNCATED", Levels(TRUNCATED.key, (("warning", 1e-3),)))
    found = matrix.run(1, lambda *counts: None)
    assert [trial.form for trial in found.failures] == ["rlctl", "verl", "trl"]
    assert "[truncated]" in found.failures[0].problem
    assert "3 alarms in 3 healthy logs" in found.summary()


def test_a_reader_that_forgets_a_name_is_seen(monkeypatch):
    small(monkeypatch, "truncated")
    renamed = {**TRL, "response_length/clip_ratio": "completions/cut_off"}
    monkeypatch.setattr("tests.simulated_logs.writers.TRL", renamed)
    assert {trial.form for trial in matrix.run(1, lambda *counts: None).failures} == {"trl"}


def test_a_rule_that_judges_without_its_metrics_is_seen(monkeypatch):
    small(monkeypatch, "zero-spread-groups")
    named = {**VERL, "reward/zero_spread_groups": "reward/zero_spread_groups"}
    monkeypatch.setattr("tests.simulated_logs.writers.VERL", named)
    [failure] = matrix.run(1, lambda *counts: None).failures
    assert (failure.form, failure.wanted) == ("verl", "skipped")


def test_without_a_log_it_says_so(capsys):
    assert rlctl(["diagnose"]) == 2
    assert "no log is given" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMATS)
def test_logs_are_recognised_and_hold_what_was_written(tmp_path, form):
    names = {"rlctl": {key: key for key in metrics_read()}, "verl": VERL, "trl": TRL, "nemo-rl": NEMO_RL}[
        form
    ]
    rows = healthy_rows(30)
    run = read_run(write_log(form, rows, matrix.spec_of(()), tmp_path), metrics_read())
    assert run.framework == form
    assert len(run.table.steps) == 30
    written = (metrics_read() & names.keys() & rows[0].keys()) - {"training/staleness_max"}
    assert written <= run.table.columns.keys()
    for key in written:
        np.testing.assert_allclose(run.table.columns[key], [row[key] for row in rows])


def test_a_printed_configuration_tells_the_facts_of_the_run(tmp_path):
    spec = matrix.spec_of(("actor.ppo_mini_batch_size=null", "actor.lr=3e-6"))
    facts = read_run(write_log("verl", healthy_rows(10), spec, tmp_path), metrics_read()).facts
    assert (facts.updates_per_batch, facts.bypass_mode, facts.lr) == (1, True, 3e-6)


def test_an_interrupted_log_steps_back_and_lacks_rows():
    steps = [row["step"] for row in interrupted(healthy_rows(100), seed=3)]
    assert sum(b < a for a, b in itertools.pairwise(steps)) == 1
    assert 0 < len(set(range(1, 101)) - set(steps)) <= 3


def test_a_run_as_it_was_knows_nothing_of_later(tmp_path):
    rows = healthy_rows(20)
    rows[12]["actor/grad_norm"] = "NaN"
    log = write_log("rlctl", rows, matrix.spec_of(()), tmp_path)
    run = read_run(log, metrics_read())
    assert run.table.nonfinite["actor/grad_norm"].tolist() == [13]
    before, after = matrix.until(run, 12).table, matrix.until(run, 13).table
    assert before.steps.tolist() == list(range(1, 13))
    assert "actor/grad_norm" not in before.nonfinite
    assert after.nonfinite["actor/grad_norm"].tolist() == [13]
    assert matrix.until(run, 3).table.columns.keys() == run.table.columns.keys() - {
        "val/addition/reward_mean"
    }
