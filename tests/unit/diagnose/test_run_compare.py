"""Two runs side by side: differences are found with their step, and noise is none."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.diagnose.compare import compare, comparison_document, metric_change, sentences
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import Table
from tests.unit.diagnose.logs import CORR, healthy_rows, run_log, write_run

K3 = f"{CORR}k3_kl"


def compared(tmp_path, rows_a, rows_b, *overrides_b, has_spec=True):
    runs = (
        write_run(tmp_path / "a", rows_a, has_spec=has_spec),
        write_run(tmp_path / "b", rows_b, *overrides_b, has_spec=has_spec),
    )
    return compare(*(examine(read_run(run, metrics_read())) for run in runs))


def table(values, start=1):
    values = np.asarray(values, dtype=float)
    return Table(np.arange(start, start + len(values)), {"m": values})


@pytest.mark.parametrize("seed", range(10))
def test_two_healthy_runs_do_not_differ(seed):
    found = compare(*(examine(run_log(healthy_rows(200, each))) for each in (2 * seed, 2 * seed + 1)))
    assert found.metrics == ()
    assert found.spec == {}
    assert list(sentences(found)) == ["No metric differs by more than the runs' own noise, up to step 200."]


@pytest.mark.parametrize(
    ("memory", "count", "most"), [(0.5, 500, 2), (0.8, 500, 2), (0.9, 500, 2), (0.9, 45, 5)]
)
def test_noise_that_wanders_is_no_difference(memory, count, most):
    noise = np.random.default_rng(0)

    def wandering():
        values = [0.0]
        for shock in noise.normal(size=count):
            values.append(memory * values[-1] + shock)
        return table(values)

    found = [metric_change("m", wandering(), wandering()) for _ in range(50)]
    assert sum(change is not None and change.lasts for change in found) <= most - 2
    assert sum(change is not None for change in found) <= most


def test_a_difference_that_grows_steadily_is_no_noise():
    noise = np.random.default_rng(0)
    flat, rising = (table(slope * np.arange(100) + noise.normal(size=100)) for slope in (0.0, 0.06))
    change = metric_change("m", flat, rising)
    assert change is not None
    assert change.lasts


def test_what_differs_is_told_with_its_step_and_the_spec(tmp_path):
    rows = healthy_rows(200, seed=1)
    for row in rows[119:]:
        row[K3] *= 40
        row["response_length/clip_ratio"] = 0.2
    found = compared(tmp_path, healthy_rows(200), rows, "actor.lr=1e-3")
    assert {change.key for change in found.metrics} == {K3, "response_length/clip_ratio"}
    for change in found.metrics:
        assert abs(change.first_step - 120) <= 2
        assert change.lasts
    assert {key: b for key, (_, b) in found.spec.items()} == {"actor.lr": 1e-3}
    assert [finding.rule for finding in found.findings_b] == ["truncated"]
    assert found.findings_a == ()
    first, *others = sentences(found)
    assert first.startswith("Since step 1")
    assert any("Only in B: 20.0%" in sentence for sentence in others)


def test_same_figures_are_told_to_the_last_digit(tmp_path):
    rows = healthy_rows(60)
    changed = [row | {"actor/entropy": row["actor/entropy"] + 1e-9 * (row["step"] > 40)} for row in rows]
    found = compared(tmp_path, rows, [row | {"perf/total_num_tokens": 3} for row in changed])
    assert found.identical_until == 40
    same = "Every training metric is identical up to step {} (except times and memory)."
    assert next(iter(sentences(found))) == same.format(40)
    found = compared(tmp_path, rows, rows)
    assert list(sentences(found)) == [same.format(60)]


def test_figures_that_are_not_finite_in_one_run_are_not_identical(tmp_path):
    rows = healthy_rows(60)
    broken = [row | ({"actor/grad_norm": math.nan} if row["step"] > 40 else {}) for row in rows]
    found = compared(tmp_path, rows, broken)
    assert found.identical_until == 40
    assert any("Only in B: actor/grad_norm is not" in sentence for sentence in sentences(found))
    assert compared(tmp_path, broken, broken[:50]).identical_until == 50


def test_too_few_shared_values_are_no_agreement(tmp_path):
    rows = healthy_rows(40)
    found = compared(tmp_path, rows, [row | {"actor/entropy": 9.5} for row in rows[:10]])
    assert next(iter(sentences(found))) == "No metric can be compared: that needs 11 values at shared steps."
    assert found.same == ()


def test_runs_without_a_shared_step_or_spec_are_told_so(tmp_path):
    later = [row | {"step": row["step"] + 1000} for row in healthy_rows(30)]
    found = compared(tmp_path, healthy_rows(30), later, has_spec=False)
    assert found.shared is None
    assert list(sentences(found)) == ["The runs have no step in common: nothing can be compared."]
    assert comparison_document(found)["shared_steps"] is None


@settings(max_examples=40, deadline=None)
@given(st.integers(40, 300), st.floats(0.2, 0.7), st.floats(6.0, 100.0), st.integers(0, 1000))
def test_a_step_change_is_dated(length, share, sigmas, seed):
    noise = np.random.default_rng(seed)
    at = int(length * share)
    a, b = noise.normal(10, 0.1, size=(2, length))
    b[at:] += sigmas * 0.1 + 1.0
    change = metric_change("m", table(a), table(b))
    assert change is not None
    assert change.lasts
    assert abs(change.first_step - (at + 1)) <= 6
    mirrored = metric_change("m", table(b), table(a))
    assert (mirrored.first_step, mirrored.a, mirrored.b) == (change.first_step, change.b, change.a)


def test_what_came_and_went_does_not_last():
    noise = random.Random(0)
    a, b = ([noise.gauss(1, 0.01) for _ in range(200)] for _ in range(2))
    b[50:100] = [value * 3 for value in b[50:100]]
    change = metric_change("m", table(a), table(b))
    assert not change.lasts
    assert abs(change.first_step - 51) <= 2
    assert abs(change.last_step - 100) <= 2
    assert change.ratio == pytest.approx(3, rel=0.02)


def test_a_single_spike_and_a_tiny_shift_are_no_difference():
    a, b = np.full(100, 1.0), np.full(100, 1.0)
    b[40] = 1e6
    assert metric_change("m", table(a), table(b)) is None
    assert metric_change("m", table(a), table(np.full(100, 1.05))) is None
    assert metric_change("m", table(a), table(np.full(100, 1.5))).sigmas > 2
    assert metric_change("m", table(np.zeros(100)), table(np.zeros(100))) is None


def test_a_ratio_to_noise_around_zero_is_not_told():
    a = np.random.default_rng(0).normal(0, 1e-3, 100)
    change = metric_change("m", table(a), table(a + 1.0))
    assert change.ratio is None
    assert "above A's" in str(change)
    assert metric_change("m", table(a + 1.0), table(a)).ratio is None


def test_no_difference_is_dated_before_figures_part():
    a = np.random.default_rng(0).normal(0, 1e-3, 100)
    for at in range(40, 60):
        b = np.where(np.arange(100) < at, a, 1.0)
        assert at + 1 <= metric_change("m", table(a), table(b)).first_step <= at + 3


def test_long_runs_are_compared_in_buckets():
    noise = np.random.default_rng(0)
    a, b = noise.normal(1, 0.1, size=(2, 300_000))
    b[200_000:] += 1
    change = metric_change("m", table(a), table(b))
    assert abs(change.first_step - 200_000) < 1000
    assert change.lasts
