"""Decisive evidence: dumps and parts of the log-ratio decide what other figures leave open."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from rlctl.cli.app import run as rlctl
from rlctl.diagnose.rule import examine
from rlctl.diagnose.table import DumpEvidence, Facts
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log
from tests.unit.diagnose.test_rules_judged import BYPASS, advice, diagnosis_of, found, noisy, rising, skipped
from tests.unit.mismatch.test_who_sampled import policies, run_of  # noqa: F401

K3, ENGINE, STALE = f"{CORR}k3_kl", f"{CORR}split/engine", f"{CORR}split/staleness"
NEVER = DumpEvidence(who_sampled="never delivered: step 1", wrong_sampler="never delivered", fix="fix it")
ACCUSED = DumpEvidence(sampler="not drawn as reported", accuses_sampler=True, alarm_step=3, num_tokens=900)


def with_dumps(dumps, **columns):
    rows = [row | {key.replace("__", "/"): value for key, value in columns.items()} for row in healthy_rows()]
    return examine(replace(run_log(rows), dumps=dumps))


def test_who_sampled_is_the_first_event_and_explains_the_gap_and_the_reward():
    diagnosis = with_dumps(NEVER, **{f"{CORR}kl": 0.4, K3: 0.4, "critic/score/mean": 0.0})
    first, *others = diagnosis.findings
    assert (first.rule, first.severity) == ("who-sampled", "critical")
    assert "sync" in advice(first)
    assert others
    assert all(one.because_of == "who-sampled" for one in others if one.severity != "info")


UNKNOWN = DumpEvidence(who_sampled="none of the kept weights", wrong_sampler="unknown", fix="compare")


@pytest.mark.parametrize(
    ("rule", "dumps", "columns"),
    [
        ("missing-log-probs", UNKNOWN, {f"{CORR}rollout_log_ppl": 0.0, K3: 0.4}),
        ("policy-gap", UNKNOWN, {f"{CORR}kl": 0.4}),
        (
            "sampler-log-probs",
            replace(ACCUSED, alarm_step=1, who_sampled="none", wrong_sampler="unknown"),
            {},
        ),
    ],
)
def test_weights_that_nobody_knows_explain_nothing_that_another_rule_names(rule, dumps, columns):
    """Any gap looks like weights that the run never had."""
    diagnosis = with_dumps(dumps, **columns)
    assert diagnosis.findings[0].rule == rule
    [unknown] = [finding for finding in diagnosis.findings if finding.rule == "who-sampled"]
    assert unknown.because_of == rule


@pytest.mark.parametrize(
    ("size", "advised"), [(1e-8, "actor.lr=0.00055"), (1e-15, "steps change the weights")]
)
def test_no_rate_is_advised_where_updates_are_not_made_at_all(size, advised):
    columns = {K3: [size] * 60, "actor/lr": [1e-6] * 60, "actor/grad_norm": noisy([0.5] * 60)}
    diagnosis = diagnosis_of(BYPASS, **columns)
    assert advised in advice(found(diagnosis)["small-updates"])


def test_unknown_weights_alone_are_a_warning():
    [finding] = [each for each in with_dumps(UNKNOWN).findings if each.severity != "info"]
    assert (finding.rule, finding.severity) == ("who-sampled", "warning")


@pytest.mark.parametrize(("cut", "first"), [(0.1, "constant-reward"), (0.95, "truncated")])
def test_a_constant_reward_explains_what_a_policy_without_signal_does(cut, first):
    """Unless nearly all were cut off from the first step, which a grader may answer with one value."""
    columns = {f"critic/score/{end}": [-1.0] * 60 for end in ("mean", "max", "min")} | {
        "response_length/clip_ratio": [cut] * 15 + [0.95] * 45,
        "actor/ppo_kl": noisy([1e-3] * 15 + [0.2] * 45),
        "critic/vf_explained_var": [-50.0] * 60,
    }
    diagnosis = diagnosis_of(Facts(bypass_mode=False, updates_per_batch=2), **columns)
    assert diagnosis.findings[0].rule == first
    others = [each for each in diagnosis.findings[1:] if each.severity != "info"]
    assert {each.rule for each in others} >= {"large-updates", "truncated"} - {first}
    assert all(each.because_of == first for each in others)


def test_dumps_as_recorded_accuse_nobody():
    dumps = DumpEvidence(who_sampled="as recorded", sampler="nothing speaks against it")
    diagnosis = with_dumps(dumps)
    assert not {"who-sampled", "sampler-log-probs", "cut-vocabulary"} & found(diagnosis).keys()


@pytest.mark.parametrize(("why", "severity"), [("", "critical"), ("in flight", "warning")])
def test_the_sampler_test_of_the_dumps_is_reported_with_its_guarantee(why, severity):
    diagnosis = with_dumps(replace(ACCUSED, no_guarantee=why), **{f"{CORR}kl": 0.4})
    finding = found(diagnosis)["sampler-log-probs"]
    assert (finding.severity, finding.since) == (severity, 3)


def test_a_severed_sync_in_bypass_mode_is_not_told_to_lower_the_rate():
    gap = rising(100, start=0.005, count=60)
    parts = {ENGINE: [2 * value for value in gap], STALE: [0.04 * value for value in gap]}
    diagnosis = diagnosis_of(BYPASS, **{K3: gap}, **parts)
    first = next(one for one in diagnosis.findings if one.severity != "info")
    assert first.rule == "policy-gap"
    assert "new weights reach the engine" in first.cause
    assert "lr" not in advice(first)
    assert "mini_batch" not in advice(first)
    assert "large-updates" not in found(diagnosis)
    remark = found(diagnosis)["ratio-parts"]  # the other table of the report does not contradict
    assert "weights" in remark.cause


def test_updates_that_move_far_are_still_told_to_lower_the_rate():
    sizes = noisy([0.3] * 60)
    parts = {ENGINE: [1e-6] * 60, STALE: sizes}
    diagnosis = diagnosis_of(BYPASS, **{K3: sizes, "actor/lr": [1e-3] * 60}, **parts)
    assert "large-updates" in found(diagnosis)


def engine_rows(lengths_of, nats_of, count=40, seed=5):
    """Rows of an honest engine: responses of these lengths, whose tokens have an entropy that is −log π."""
    draw = random.Random(seed)
    rows = []
    for step in range(1, count + 1):
        lengths = [lengths_of(draw) for _ in range(64)]
        nats = [nats_of(length) for length in lengths]
        by_response = float(np.mean(nats))
        entropy = float(np.dot(lengths, nats) / np.sum(lengths))
        rows.append({
            "step": step,
            f"{CORR}training_log_ppl": by_response,
            f"{CORR}rollout_log_ppl": by_response,
            "actor/entropy": entropy,
            "response_length/min": min(lengths),
            "response_length/mean": float(np.mean(lengths)),
            "response_length/max": max(lengths),
        })  # fmt: skip
    return rows


SAMPLED = "sampled-otherwise"


@pytest.mark.parametrize(
    ("lengths_of", "nats_of"),
    [
        (lambda draw: draw.choice([2, 200]), lambda length: 2.0 if length < 10 else 0.2),
        (lambda draw: draw.choice([2, 200]), lambda length: 0.2 if length < 10 else 2.0),
        (lambda draw: draw.randint(1, 400), lambda length: 3.0 / length**0.5),
    ],
)
def test_an_honest_engine_with_uneven_lengths_is_not_accused(lengths_of, nats_of):
    diagnosis = examine(run_log(engine_rows(lengths_of, nats_of), facts=Facts()))
    assert SAMPLED not in found(diagnosis)


@pytest.mark.parametrize("times", [0.45, 2.2])
def test_with_even_lengths_another_temperature_is_seen(times):
    rows = engine_rows(lambda draw: draw.randint(95, 105), lambda length: 1.0)
    for row in rows:
        row["actor/entropy"] *= times
    assert examine(run_log(rows, facts=Facts())).findings[0].rule == SAMPLED


def own_rows(log_ppl: float, moved: float = 0.0) -> list[dict[str, float]]:
    """Rows that log both means over the same tokens, with lengths that could explain any difference."""
    rows = engine_rows(lambda draw: draw.choice([1, 200]), lambda length: 1.0)
    return [
        row
        | {
            "actor/entropy": 0.5,
            "actor/log_ppl": log_ppl,
            "actor/ppo_kl": moved,
            "reward/error_fraction": 0.1,
        }
        for row in rows
    ]


@pytest.mark.parametrize("log_ppl", [0.2, 1.1])
def test_with_both_means_of_the_same_tokens_no_length_explains_their_difference(log_ppl):
    assert found(examine(run_log(own_rows(log_ppl), facts=Facts())))[SAMPLED].severity == "critical"


def test_draws_from_the_policy_have_the_mean_of_its_entropy():
    assert SAMPLED not in found(examine(run_log(own_rows(0.52), facts=Facts())))


def test_what_the_updates_on_a_batch_move_is_not_the_samplers():
    assert SAMPLED not in found(examine(run_log(own_rows(1.1, moved=0.3), facts=Facts())))


def test_without_lengths_means_of_responses_and_of_tokens_are_not_compared():
    rows = engine_rows(lambda draw: 100, lambda length: 1.0)
    for row in rows:
        row["actor/entropy"] *= 3.0
        del row["response_length/min"]
    diagnosis = examine(run_log(rows, facts=Facts()))
    assert SAMPLED not in found(diagnosis)
    assert skipped(diagnosis)[SAMPLED].missing == ("response_length/min",)


def test_a_vocabulary_that_the_spec_cuts_is_no_finding():
    rows = [row | {f"{CORR}unit_mean_cut": 1.0, f"{CORR}unit_mean": 0.9} for row in healthy_rows()]
    assert found(examine(run_log(rows)))["cut-vocabulary"].severity == "warning"
    assert "cut-vocabulary" not in found(examine(run_log(rows, "rollout.top_p=0.9")))


@pytest.mark.parametrize("is_severed", [True, False])
def test_diagnose_asks_the_dumps_of_a_run_itself(tmp_path, policies, capsys, is_severed):  # noqa: F811
    run_dir = run_of(tmp_path, policies, (lambda version: 0) if is_severed else (lambda version: version))
    rows = [row | {"step": step, K3: 0.05} for step, row in enumerate(healthy_rows()[:6], 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    assert rlctl(["diagnose", str(run_dir), "--trust"]) == 0
    out = capsys.readouterr().out
    assert ("new weights were never delivered" in out) is is_severed
    assert ("prove-sync" in out.splitlines()[0]) is is_severed
