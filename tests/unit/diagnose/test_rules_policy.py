"""Noise instead of text, useless critics, formats that nobody has, full disks, and rows of few figures."""

import numpy as np
import pytest

from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import Facts
from rlctl.diagnose.thresholds import LENGTH, SCORE
from tests.unit.diagnose.test_rules_judged import (
    BYPASS,
    DEAD,
    advice,
    diagnosis_of,
    found,
    noisy,
    ok,
    skipped,
)

ENTROPY, CUT, BEST, WORST = (
    *("actor/entropy", "response_length/clip_ratio", "critic/score/max", "critic/score/min"),
)
EXPLAINED, FORMAT, K3 = "critic/vf_explained_var", "reward/format/mean", "rollout_corr/k3_kl"
UNKNOWN = Facts()


def of_text(tmp_path, text, name="run.log"):
    """The diagnosis of a log with this text."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return examine(read_run(path, metrics_read()))


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("more", [{}, {CUT: 0.6}, {CUT: 0.6, DEAD: 0.9}])
def test_noise_is_the_first_event_and_a_higher_limit_is_not_advised(count, more):
    columns = {ENTROPY: 6.1, SCORE: 0.004, BEST: 1.0, WORST: 0.0} | more
    diagnosis = diagnosis_of(first=7, **{key: [value] * count for key, value in columns.items()})
    first, *others = diagnosis.findings
    assert (first.rule, first.severity) == ("random-tokens", "critical")
    assert "max_response_length" not in advice(first)
    assert all(one.because_of for one in others if one.severity != "info")


@pytest.mark.parametrize(
    "columns",
    [
        {ENTROPY: [1.4] * 20, SCORE: [0.01] * 20},  # explores
        {ENTROPY: [5.0] * 20, SCORE: [0.7] * 20},  # what is rewarded is no noise, so the unit is another
    ],
)
def test_usual_entropies_and_rewarded_samples_are_no_noise(columns):
    assert "random-tokens" not in found(diagnosis_of(**columns))


def test_entropy_that_rose_to_noise_is_explained_by_its_rise():
    columns = {ENTROPY: noisy([0.5] * 30 + [5.0] * 40, 0.05), SCORE: noisy([0.4] * 30 + [0.01] * 40, 0.05)}
    diagnosis = diagnosis_of(first=1, **columns)
    assert found(diagnosis)["random-tokens"].because_of in {"entropy-rise", "reward-fell"}


@pytest.mark.parametrize(
    ("first", "values", "is_warned"),
    [
        (900, [-1.4, 0.05], True),
        (900, [-1.4], True),
        (300, [-0.3] * 30, True),
        (300, [0.02] * 30, False),  # of little use, and no harm
        (300, noisy([0.6] * 30), False),
        (300, [0.05, 0.04], False),  # two rows of a weak critic
        (1, [-3.0] * 15, False),  # a critic that is not trained yet
        (1, [-3.0] * 15 + [0.7] * 60, False),
        (1, [0.7] * 40 + [-2.0] * 60, True),
    ],
)
def test_a_critic_that_predicts_nothing_after_the_start_warns(first, values, is_warned):
    diagnosis = diagnosis_of(first=first, **{EXPLAINED: values})
    assert ("critic" in found(diagnosis)) is is_warned


def test_a_critic_of_a_run_that_learns_is_quiet():
    columns = {EXPLAINED: [-0.3] * 60, SCORE: noisy(np.linspace(0.2, 0.8, 60), 0.05)}
    assert "critic" not in found(diagnosis_of(first=100, **columns))


def test_a_critic_of_the_start_is_not_ok_either():
    assert "critic" not in ok(diagnosis_of(first=1, **{EXPLAINED: [-3.0] * 15}))


def late_rows(score, worst=0.1):
    return {SCORE: [score] * 2, BEST: [0.8] * 2, WORST: [worst] * 2}


@pytest.mark.parametrize(
    ("first", "score", "worst", "is_warned"),
    [(2000, 0.13, 0.1, True), (2000, 0.5, 0.1, False), (20, 0.13, 0.1, False), (2000, 0.0, 0.0, False)],
)
def test_little_reward_after_many_steps_warns_from_two_rows(first, score, worst, is_warned):
    assert ("flat-reward" in found(diagnosis_of(first=first, **late_rows(score, worst)))) is is_warned


@pytest.mark.parametrize("term", ["format", "xml_format_reward", "think_format"])
@pytest.mark.parametrize(("count", "severity"), [(1, "warning"), (4, "warning"), (30, "critical")])
def test_a_format_that_no_response_has_is_named(term, count, severity):
    columns = {f"reward/{term}/mean": [0.0] * count, SCORE: [-0.09] * count, DEAD: [0.9] * count}
    first = diagnosis_of(**columns).findings[0]
    assert (first.rule, first.severity) == ("no-format", severity)
    assert "template" in advice(first)


@pytest.mark.parametrize(
    "columns",
    [
        {FORMAT: [0.0] * 30, SCORE: [0.4] * 30},  # answers are right without it
        {FORMAT: [0.1] * 30, SCORE: [-0.2] * 30},
        {FORMAT: [0.0] * 30, "reward/soft_format/mean": [0.3] * 30, SCORE: [-0.2] * 30},
        {"reward/length/mean": [0.0] * 30, SCORE: [-0.2] * 30},
    ],
)
def test_other_terms_of_0_are_no_missing_format(columns):
    assert "no-format" not in found(diagnosis_of(**columns))


@pytest.mark.parametrize("share", [0.55, 0.8])
def test_equal_groups_belong_to_responses_that_are_cut_off(share):
    diagnosis = diagnosis_of(**{CUT: [share] * 3, DEAD: [0.8] * 3, SCORE: [0.7] * 3})
    first, second = diagnosis.findings
    assert (first.rule, second.rule, second.because_of) == ("truncated", "zero-spread-groups", "truncated")
    assert "no gradient" not in second.what


def test_equal_groups_stand_alone_where_few_responses_are_cut_off():
    diagnosis = diagnosis_of(**{CUT: [0.32] * 6, DEAD: [0.9] * 6, SCORE: [0.4] * 6})
    assert found(diagnosis)["zero-spread-groups"].because_of == ""


@pytest.mark.parametrize("count", [1, 4])
def test_a_few_rows_of_a_gap_that_staleness_may_explain_are_a_remark(count):
    for facts in (UNKNOWN, BYPASS, Facts(is_async=True)):
        finding = found(diagnosis_of(facts, **{K3: [0.6] * count}))["policy-gap"]
        assert finding.severity == "info"
        assert "training/staleness_mean" in finding.could_not_check[0]


def test_a_gap_with_a_known_age_or_of_many_rows_is_critical():
    fresh = {K3: [0.6] * 3, "training/staleness_max": [0.0] * 3}
    assert found(diagnosis_of(BYPASS, **fresh))["policy-gap"].severity == "critical"
    assert found(diagnosis_of(BYPASS, **{K3: noisy([0.6] * 20)}))["policy-gap"].severity == "critical"


TINKER = """{"step": 8, "env/all/reward/total": -0.07, "env/all/format": 0.0, "env/all/correct": 0.01,
 "optim/kl_sample_train_v1": 0.0008, "optim/entropy": 0.4, "env/all/ac_tokens_per_turn": 91.0,
 "env/all/by_group/frac_all_good": 0.25, "env/all/by_group/frac_all_bad": 0.5, "optim/lr": 1e-4}
""".replace("\n ", " ")


def test_a_row_of_tinker_is_read(tmp_path):
    diagnosis = of_text(tmp_path, TINKER, "metrics.jsonl")
    table = diagnosis.run.table
    assert diagnosis.run.framework == "tinker"
    known = {SCORE: -0.07, FORMAT: 0.0, "reward/correct/mean": 0.01, DEAD: 0.75, LENGTH: 91.0}
    assert {key: float(table.series(key).values[0]) for key in known} == pytest.approx(known)
    assert diagnosis.findings[0].rule == "no-format"


PRINTED = """{
  'reward': '0.31',
  'reward_std': '0.22',
  'kl': '0.52',
  'ratio': '0.97',
  'rewards/right/mean': '0.31',
  'completions/mean_length': '80.5',
  'weight_sync_time_s': '4.1'
}
"""


def test_a_printed_dictionary_without_step_and_loss_is_a_row(tmp_path):
    diagnosis = of_text(tmp_path, PRINTED)
    assert diagnosis.run.framework == "trl"
    assert float(diagnosis.run.table.series(K3).values[0]) == 0.52  # to the sampler, not to a reference
    assert not [one for one in diagnosis.findings if one.severity != "info"]


@pytest.mark.parametrize(
    "line", ["{'reward': 1.0, 'score': 0.5}", "{'reward': 0.3, 'kl': 0.1, 'completions/mean_length': 3.0}"]
)
def test_what_a_grader_prints_is_no_row(tmp_path, line):
    row = "{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.4, 'epoch': 0.1}"
    diagnosis = of_text(tmp_path, f"{line}\n{row}\n{line}\n{row}\n")
    assert len(diagnosis.run.table.series(SCORE).values) == 2
    assert set(diagnosis.run.table.series(SCORE).values) == {0.4}


ROW = "step:{step} - actor/grad_norm:0.2 - critic/score/mean:0.4 - response_length/mean:90.0"
FULL = (
    "(raylet) file_system_monitor.cc:116: /tmp/x is over 95% full, available space: 3.1 GB; capacity: 90 GB."
)


def test_a_disk_that_is_nearly_full_is_reported_after_what_is_wrong_with_the_run(tmp_path):
    rows = [ROW.format(step=step) for step in range(1, 12)]
    diagnosis = of_text(tmp_path, "\n".join([*rows[:4], FULL, *rows[4:], FULL]))
    finding = found(diagnosis)["disk-full"]
    assert finding.severity == "warning"
    assert "available space: 3.1 GB" in finding.what
    assert "2 such line" in finding.evidence[0].figure
    assert "disk-full" not in found(of_text(tmp_path, "\n".join(rows)))


def test_a_reference_that_is_not_the_start_says_whether_the_run_learns():
    columns = {"actor/kl_loss": noisy([1.1] * 80, 0.1), SCORE: noisy([0.3] * 80, 0.2)}
    finding = found(diagnosis_of(Facts(kl_coef=0.04), first=1, **columns))["reference-drift"]
    assert "the reward does not gain" in finding.what
    columns[SCORE] = list(np.linspace(0.1, 0.8, 80))
    finding = found(diagnosis_of(Facts(kl_coef=0.04), first=1, **columns))["reference-drift"]
    assert "does not gain" not in finding.what


def test_a_rule_that_needs_steps_says_how_many():
    assert skipped(diagnosis_of(**{SCORE: [0.3] * 2}))["flat-reward"].needs_steps == 4
