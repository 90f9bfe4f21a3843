"""Which finding is the first event, what it explains, and the remedy that fits."""

from dataclasses import replace

import pytest

from rlctl.diagnose.diagnosis_report import as_markdown, diagnosis_document, run_report
from rlctl.diagnose.finding import Evidence, Finding
from rlctl.diagnose.rule import all_rules, examine, in_chains
from rlctl.diagnose.spec_patch import propose_patch
from rlctl.diagnose.table import Facts, LoggedException
from tests.unit.diagnose.logs import run_log
from tests.unit.diagnose.test_rules import CORR, ONE_UPDATE, PPO, RC, always, both, corr, diagnose

CUT_OFF, NORM, SCORE = "response_length/clip_ratio", "actor/grad_norm", "critic/score/mean"


def finding(rule, since, *explains, severity="critical", **others):
    return Finding(
        severity, rule, (Evidence(SCORE, "1"),), "", "", rule=rule, since=since, explains=explains, **others
    )


def chains(*findings):
    return [(one.rule, one.because_of) for one in in_chains(findings)]


def firsts(diagnosis):
    return [one.rule for one in diagnosis.findings if not one.because_of and one.severity != "info"]


def test_an_earlier_event_explains_a_later_one_and_what_that_explains():
    found = chains(finding("c", 9), finding("b", 7, "c"), finding("a", 5, "b"))
    assert found == [("a", ""), ("b", "a"), ("c", "a")]


def test_a_later_event_explains_nothing():
    assert chains(finding("a", 7, "b"), finding("b", 5)) == [("b", ""), ("a", "")]


def test_of_events_in_one_step_the_cause_comes_first_in_any_order():
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        found = (finding("a", 5, "b"), finding("b", 5, "c"), finding("c", 5))
        assert chains(*(found[place] for place in order)) == [("a", ""), ("b", "a"), ("c", "a")]


def test_settings_are_there_before_every_step():
    assert chains(finding("b", 0), finding("a", None, "b")) == [("a", ""), ("b", "a")]


def test_rules_that_explain_each_other_are_ordered_by_their_onset():
    for first, second in (("a", "b"), ("b", "a")):
        assert chains(finding(first, 3, second), finding(second, 4, first)) == [(first, ""), (second, first)]


def test_a_remark_neither_explains_nor_is_explained_and_comes_last():
    found = chains(finding("a", 1, "b", severity="info"), finding("b", 5, "a"))
    assert found == [("b", ""), ("a", "")]


def test_a_mild_first_event_with_severe_consequences_comes_before_a_later_severe_one():
    mild = finding("a", 3, "b", severity="warning")
    assert chains(finding("c", 2, severity="warning"), finding("d", 8), mild, finding("b", 5)) == [
        ("a", ""), ("b", "a"), ("d", ""), ("c", ""),
    ]  # fmt: skip


def test_what_the_figures_exclude_as_a_consequence_is_none():
    assert chains(finding("a", 3, "b"), finding("b", 3, is_first=True)) == [("a", ""), ("b", "")]


def test_rules_explain_rules_that_exist():
    rules = all_rules()
    assert {name for rule in rules for name in rule.explains} <= {rule.name for rule in rules}


nan = always(
    actor__grad_norm=lambda s: 0.8 if s < 40 else float("nan"),
    response_length__clip_ratio=lambda s: 0.01 if s < 41 else 1.0,
    critic__score__mean=lambda s: 0.5 if s < 41 else 0.0,
    critic__score__max=lambda s: 1.0 if s < 41 else 0.0,
)


def test_nan_comes_before_cut_off_responses_and_missing_rewards():
    diagnosis = diagnose(nan, count=80)
    assert firsts(diagnosis) == ["not-finite"]
    assert {one.rule for one in diagnosis.findings if one.because_of} >= {
        "truncated",
        "reward-fell",
        "zero-reward",
    }
    assert not any("max_response_length" in key for key in propose_patch(diagnosis).changes)


def test_a_run_that_collapsed_under_its_learning_rate_gets_a_lower_one():
    collapse = both(
        corr(k3_kl=lambda s: 0.5 if s < 4 else 1e-6),
        always(critic__score__mean=lambda s: 0.3 if s == 1 else 0.0, actor__lr=1e-3,
               critic__score__max=lambda s: 1.0 if s < 3 else 0.0,
               reward__zero_spread_groups=lambda s: 0.1 if s < 3 else 1.0,
               actor__grad_norm=lambda s: 0.5 if s < 4 else 0.0),
    )  # fmt: skip
    diagnosis = diagnose(collapse, "actor.lr=1e-3")
    assert firsts(diagnosis) == ["large-updates"]
    rate = float(propose_patch(diagnosis).changes["actor.lr"])
    assert 5e-5 < rate < 1e-4  # the size of an update grows with the rate's square: √(0.003 / 0.5)
    assert len(propose_patch(diagnosis).applied) == 1


def test_a_gap_that_grows_from_nothing_is_of_weights_that_do_not_arrive():
    for size, words in (
        (lambda s: 0.002 * s, "weights reach the engine late"),
        (lambda s: 0.02, "precision"),
        (lambda s: 0.15, "too large for kernels and precision"),
    ):
        found = diagnose(always(training__rollout_probs_diff_mean=size), ONE_UPDATE).findings
        [one] = [one for one in found if one.rule == "probability-gap"]
        assert words in one.cause


def test_stale_samples_without_correction_come_before_the_gap_they_make():
    stale = both(
        always(training__staleness_max=lambda s: 0.0 if s < 3 else 16.0),
        corr(kl=lambda s: 0.0 if s < 4 else 0.4),
    )
    diagnosis = diagnose(stale, "rollout.staleness=8", f"{RC}rollout_is=null")
    assert firsts(diagnosis) == ["staleness"]
    assert propose_patch(diagnosis).changes == {"rollout.staleness": "0"}


def test_dead_groups_from_the_start_are_not_blamed_on_the_learning_rate():
    for since in (0, 1):
        rows = [{"step": step, NORM: 0.5, "actor/entropy": 0.001, SCORE: 0.1} for step in range(since, 30)]
        for one in examine(run_log(rows, facts=Facts(lr=1e-6))).findings:
            assert not any("actor.lr" in str(fix) for fix in one.fixes)


@pytest.mark.parametrize(("first", "can_resume"), [(1, False), (40, True)])
def test_nothing_is_resumed_from_before_the_first_step(first, can_resume):
    found = diagnose(always(actor__grad_norm=lambda s: 0.8 if s < first else float("nan")))
    [one] = [one for one in found.findings if one.rule == "not-finite"]
    assert any("resume" in str(fix) for fix in one.fixes) == can_resume
    assert any("actor.lr" in str(fix) for fix in one.fixes) == can_resume
    assert one.fixes


def test_what_ended_the_run_comes_first_unless_it_is_a_consequence():
    run = diagnose(corr(kl=0.3)).run
    ended = replace(run, exception=LoggedException("RuntimeError: no space left on device", "", 9))
    assert firsts(examine(ended)) == ["exception", "policy-gap"]
    overflow = replace(diagnose(nan, count=80).run, exception=LoggedException("ValueError: NaN", "", 9))
    assert firsts(examine(overflow)) == ["not-finite"]


def test_a_healthy_loss_is_not_explained_beside_an_alarm():
    still = always(actor__pg_loss=1e-4, actor__ppo_kl=0.0)
    assert [one.rule for one in diagnose(still, PPO).findings] == ["healthy-loss"]
    alarmed = diagnose(both(still, always(actor__grad_norm=lambda s: float("nan") if s % 2 else 0.5)), PPO)
    assert "healthy-loss" not in {one.rule for one in alarmed.findings}


def test_exactly_half_counts_as_half():
    for key, rule in (
        ("reward/zero_spread_groups", "zero-spread-groups"),
        (f"{CORR}rollout_rs_masked_fraction", "rejected"),
    ):
        [one] = [one for one in diagnose(always(**{key: 0.5})).findings if one.rule == rule]
        assert one.severity != "info"


def test_a_limit_is_not_inferred_where_no_response_is_cut_off():
    rows = [{"step": step, "response_length/mean": 200.0, "response_length/max": 256.0} for step in range(20)]
    assert examine(run_log(rows, facts=Facts())).run.facts.max_response_length == 256
    finished = [row | {CUT_OFF: 0.0} for row in rows]
    assert examine(run_log(finished, facts=Facts())).run.facts.max_response_length is None


def test_rlctl_does_not_mask_cut_off_responses():
    spoil = always(actor__grad_norm=0.0, response_length__clip_ratio=1.0, reward__zero_spread_groups=0.2)
    [own] = [one for one in diagnose(spoil).findings if one.rule == "no-gradient"]
    assert "masked" not in own.cause
    [other] = [one for one in diagnose(spoil, facts=Facts()).findings if one.rule == "no-gradient"]
    assert "masked" in other.cause


def test_too_few_steps_are_not_missing_metrics():
    report = run_report(diagnose(always(), count=8))
    assert "need more steps" in report.skipped
    assert "would run with: actor/entropy" not in report.skipped
    assert "SKIPPED" not in report.skipped.partition("need more")[2]


def test_consequences_are_folded_under_the_first_event_in_every_output():
    diagnosis = diagnose(nan, count=80)
    [report] = [one for one in run_report(diagnosis).findings if one.severity != "info"]
    [chain] = [line.text for line in report.lines if line.label == "chain"]
    assert chain.startswith("first not-finite in step 40, then ")
    assert {one.rule for one in report.consequences} == {
        one.rule for one in diagnosis.findings if one.because_of
    }
    assert {line.label for one in report.consequences for line in one.lines} == {"seen"}
    markdown = as_markdown([diagnosis])
    assert markdown.count("### CRITICAL") == 1
    assert markdown.count("- then ") == len(report.consequences)
    [document] = diagnosis_document([diagnosis])["runs"]
    assert document["findings"][0] | {"since": 40, "because_of": ""} == document["findings"][0]
    assert {one["because_of"] for one in document["findings"][1:] if one["severity"] != "info"} == {
        "not-finite"
    }
