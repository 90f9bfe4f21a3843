"""What one row of a log is enough for, and what the figures of a log say about its settings.

The rows are synthetic; their shape is that of rows that people paste into issues.
"""

from dataclasses import replace

import pytest

from rlctl.diagnose.rule import examine
from rlctl.diagnose.table import Facts, LoggedException
from tests.unit.diagnose.logs import healthy_rows, run_log

NORM, REWARD, STD = "actor/grad_norm", "critic/score/mean", "reward/group_std"
DEAD, LOSS, KL = "reward/zero_spread_groups", "actor/pg_loss", "actor/kl_loss"
LENGTH, CUT = "response_length/mean", "response_length/clip_ratio"
RC = "rollout_corr/"


def diagnosis_of(*rows, **facts):
    return examine(run_log([{"step": step, **row} for step, row in enumerate(rows, 1)], facts=Facts(**facts)))


def finding_of(diagnosis, rule):
    [finding] = [one for one in diagnosis.findings if one.rule == rule]
    return finding


@pytest.mark.parametrize(
    ("row", "rule", "severity"),
    [
        ({NORM: 0.0, DEAD: 0.2}, "no-gradient", "critical"),
        ({NORM: 3e9}, "gradient-norm", "critical"),
        ({CUT: 1.0}, "truncated", "critical"),
        ({DEAD: 1.0, REWARD: 0.0}, "zero-spread-groups", "warning"),
        ({STD: 0.0}, "zero-spread-groups", "warning"),
        ({REWARD: 0.0, LOSS: 0.0}, "zero-reward", "warning"),
        ({REWARD: 0.0, STD: 0.0}, "zero-reward", "warning"),
        ({REWARD: 0.0, "critic/advantages/mean": 0.0}, "zero-reward", "warning"),
        ({"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}, "zero-advantages", "critical"),
        ({f"{RC}rollout_is_mean": 5.7e-6}, "weight-mean", "critical"),
        ({f"{RC}rollout_log_ppl": 0.0, f"{RC}training_log_ppl": 0.4}, "missing-log-probs", "critical"),
        ({KL: 40.0}, "reference-drift", "critical"),
        ({f"{RC}rollout_is_eff_sample_size": 0.01}, "effective-samples", "critical"),
        ({LENGTH: 512.0, "response_length/max": 512.0}, "truncated", "critical"),
    ],
)
def test_one_step_is_enough(row, rule, severity):
    finding = finding_of(diagnosis_of(row), rule)
    assert finding.severity == severity
    assert "one step only" in finding.confidence_reason
    assert finding.confidence != "high"
    assert "best single reward" not in finding.confidence_reason  # none of these logs has it


@pytest.mark.parametrize(
    "row",
    [
        {REWARD: 0.0},  # rewards of −1 and 1 average 0
        {NORM: 30.0},  # some losses have such norms
        {STD: 0.2, REWARD: 0.3},
        {CUT: 0.2},
        {KL: 1.0},
        {LENGTH: 300.0, "response_length/max": 512.0},
        {LOSS: 0.0, NORM: 0.3},
    ],
)
def test_one_step_is_not_enough_for_what_healthy_runs_show_too(row):
    diagnosis = diagnosis_of(row)
    assert not diagnosis.reaches("warning")
    assert diagnosis.status == "insufficient data"


def test_a_zero_gradient_says_why_where_the_log_does():
    cases = {
        "do not reach": {DEAD: 0.3},
        "does not reach the trained parameters": {STD: 0.4},
        "same reward": {DEAD: 1.0},
        "rejected": {f"{RC}rollout_rs_masked_fraction": 1.0, DEAD: 0.3},
        "cut off": {CUT: 1.0, DEAD: 0.3},
    }
    cases["does not reach"] = cases.pop("do not reach")
    for words, row in cases.items():
        finding = finding_of(diagnosis_of(*[{NORM: 0.0, **row}] * 8), "no-gradient")
        assert words in finding.cause
        assert finding.confidence == "high"
    unknown = finding_of(diagnosis_of(*[{NORM: 0.0}] * 8), "no-gradient")
    assert unknown.could_not_check


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ((0.0, 0.0, 0.0), "mostly all wrong"),
        ((1.0, 1.0, 0.0), "mostly all right"),
        ((0.5, 0.5, 0.5), "some all right, some all wrong"),
        (None, "all right or all wrong"),
    ],
)
def test_dead_groups_are_told_apart_by_the_reward_of_their_steps(rewards, words):
    """Mean rewards that reach 0 and 1 show the range; the spread is exactly 0 on three of four steps."""
    rows = []
    for at in range(40):
        mean = (0.0, 1.0)[at % 8 // 4] if at % 4 == 3 else (rewards or (0.4,))[at % 4 % len(rewards or (1,))]
        row = {STD: 0.3 if at % 4 == 3 else 0.0}
        rows.append(row | ({REWARD: mean} if rewards else {}))
    assert words in finding_of(diagnosis_of(*rows), "zero-spread-groups").what


def test_a_coefficient_is_inferred_from_loss_and_kl_and_raised_by_what_is_missing():
    rows = [
        {KL: 0.1 * step, LOSS: 0.002 * step * (1.02 if step % 2 else 0.99), NORM: 1.0}
        for step in range(1, 41)
    ]
    diagnosis = diagnosis_of(*rows)
    finding = finding_of(diagnosis, "reference-drift")
    assert finding.severity == "critical"
    assert finding.fixes[0].spec == ("actor.kl_loss_coef=0.1",)  # 5 × 0.02: a KL of 3.5 is 7 × 0.5
    assert finding.fixes[0].others["trl"] == "beta=0.1"
    assert "inferred" in finding.fixes[0].why
    assert diagnosis.run.facts.kl_coef == 0.02
    known = diagnosis_of(*rows, kl_coef=0.04)
    assert known.run.facts.kl_coef == 0.04
    assert finding_of(known, "reference-drift").fixes[0].spec == ("actor.kl_loss_coef=0.2",)


def test_without_a_coefficient_a_larger_one_is_still_the_first_fix():
    rows = [{KL: 0.1 * step, LOSS: (-1.0) ** step, NORM: 1.0} for step in range(1, 41)]
    fix = finding_of(diagnosis_of(*rows), "reference-drift").fixes[0]
    assert (fix.spec, fix.others["trl"], fix.others["ms-swift"]) == ((), "beta", "--beta")


def test_a_limit_is_inferred_where_many_rows_end_at_the_same_length():
    lengths = [256.0 if at % 6 == 0 else 150.0 + at for at in range(60)]
    diagnosis = diagnosis_of(*({LENGTH: length} for length in lengths))
    finding = finding_of(diagnosis, "truncated")
    assert finding.severity == "warning"
    assert "256 tokens, inferred" in finding.what
    assert finding.fixes[0].spec == ("data.max_response_length=512",)
    fixed = diagnosis_of(*({LENGTH: 12.0} for _ in range(60)))  # answers of one form
    assert not fixed.findings
    once = diagnosis_of(*({LENGTH: 150.0 + at} for at in range(60)))
    assert once.run.facts.max_response_length is None


@pytest.mark.parametrize(
    ("text", "severity", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "critical", "memory"),
        ("KeyError: 'ground_truth'", "critical", "program failed"),
        (
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            "critical",
            "finite",
        ),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly", "critical", "did not answer"),
        ("OSError: [Errno 28] No space left on device", "critical", "disk is full"),
        (
            "RuntimeError: PytorchStreamWriter failed writing file data/7: file write failed",
            "critical",
            "disk",
        ),
        ("oom-kill:constraint=CONSTRAINT_MEMCG, task=python", "critical", "host ran out of memory"),
        ("worker 3 exited with exit code 137", "critical", "host ran out of memory"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "critical", "did not"),
        ("TimeoutError: timed out after 1800 s", "critical", "did not answer"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***", "info", "scheduler"),
        ("KeyboardInterrupt", "info", "stopped"),
        ("torch.distributed.elastic.SignalException: Process 7 got signal: 15", "info", "stopped"),
    ],
)
def test_the_exception_at_the_end_is_named_first(text, severity, words):
    run = run_log([row | {f"{RC}kl": 0.3} for row in healthy_rows()])
    assert "exception" not in {one.rule for one in examine(run).findings}
    ended = examine(replace(run, exception=LoggedException(text, "a.py, line 3, in f", 77)))
    finding = finding_of(ended, "exception")
    assert (finding.severity, words in finding.cause) == (severity, True)
    assert finding.what == f"the log ends after step {run.table.steps[-1]} with {text}"
    assert finding.since == run.table.steps[-1]
    assert (ended.findings[0].rule == "exception") == (severity == "critical")


def test_a_jump_is_measured_against_the_steps_before_it():
    rows = [{NORM: 1.0 + 0.01 * (step % 5)} for step in range(40)] + [{NORM: 40.0}] * 3
    rows += [{NORM: 40.0 + step} for step in range(120)]
    finding = finding_of(diagnosis_of(*rows), "gradient-norm")
    assert finding.severity == "warning"
    spiked = [{NORM: 9.0 if step in {30, 34, 38} else 1.0 + 0.01 * (step % 5)} for step in range(45)]
    assert (
        "at most to 8.8 times the median before it" in finding_of(diagnosis_of(*spiked), "gradient-norm").what
    )


@pytest.mark.parametrize(
    "key", [NORM, LOSS, KL, "actor/entropy", "critic/vf_loss", "critic/grad_norm", "critic/score/mean"]
)
def test_a_figure_of_the_update_that_is_not_finite_is_critical_at_one_step(key):
    finding = finding_of(diagnosis_of({REWARD: 0.5, key: float("nan")}), "not-finite")
    assert finding.severity == "critical"
    assert key in finding.what


def test_figures_that_are_logged_at_few_steps_are_never_finite_there():
    rows = [{REWARD: 0.5} | ({NORM: float("nan")} if step % 25 == 0 else {}) for step in range(100)]
    assert finding_of(diagnosis_of(*rows), "not-finite").severity == "critical"


def test_a_zero_of_a_rounded_log_may_be_a_small_number():
    """verl's older console prints three decimals."""
    rows = [{NORM: 0.0, REWARD: 0.512, "actor/entropy": 0.001 * step} for step in range(1, 30)]
    finding = finding_of(diagnosis_of(*rows), "no-gradient")
    assert finding.severity == "info"
    assert "printed as 0" in finding.what
    exact = [row | {REWARD: 0.51234567} for row in rows]
    assert finding_of(diagnosis_of(*exact), "no-gradient").severity == "critical"
    dead = [row | {DEAD: 1.0} for row in rows]  # where another figure shows it, no decimals are needed
    assert finding_of(diagnosis_of(*dead), "no-gradient").severity == "critical"
