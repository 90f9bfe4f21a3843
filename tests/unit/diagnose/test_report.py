"""The terminal and Markdown reports: what they show, and that hostile texts stay texts."""

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlctl.diagnose.diagnosis_page import thinned
from rlctl.diagnose.diagnosis_report import as_markdown, diagnosis_document, visible
from rlctl.diagnose.finding import Evidence, Finding, Fix, Skipped
from rlctl.diagnose.output_text import print_diagnosis, sparkline
from rlctl.diagnose.rule import Diagnosis, examine
from rlctl.diagnose.table import Facts, MetricOrigin, RunLog, Series, Table
from tests.unit.diagnose.logs import healthy_rows, run_log

HOSTILE = "[red]x[/] \x1b[2J\u202e</script><b>`|`\ud800 [y](http://z)"
KEY = f"val-core/{HOSTILE}/reward/mean@1"
floats = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300)


def series(values):
    return Series(np.arange(len(values)) * 3, np.array(values, dtype=float))


@pytest.fixture
def hostile(tmp_path):
    """A finding whose every text is hostile."""
    steps = np.arange(1, 41)
    run = RunLog(
        tmp_path / "[bold]x\x1b[31m",
        Table(steps, {KEY: np.where(steps > 20, 5.0, 1.0)}),
        notes=(HOSTILE,),
        framework="trl",
        origins={KEY: MetricOrigin(HOSTILE, HOSTILE)},
    )
    finding = Finding(
        "warning",
        HOSTILE,
        (Evidence(KEY, HOSTILE, 21, 40),),
        HOSTILE,
        HOSTILE,
        (Fix(("actor.lr=1e-6",), HOSTILE, {"trl": "learning_rate=1e-6"}), Fix(("actor.grad_clip=1",))),
        could_not_check=(HOSTILE,),
        rule="some-rule",
    )
    return Diagnosis(run, (finding,), (), (Skipped(HOSTILE, (HOSTILE,), rule="other-rule"),))


def printed(diagnosis, **options):
    out = io.StringIO()
    print_diagnosis(Console(file=out, highlight=False, **options), diagnosis)
    return out.getvalue()


def test_hostile_text_reaches_no_terminal(hostile):
    text = printed(hostile, width=200)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    assert "[red]x[/] \\x1b[2J\\u202e</script>" in text
    assert "[bold]x\\x1b[31m" in text


def test_evidence_is_drawn_with_its_steps_marked(hostile):
    lines = printed(hostile, width=200).splitlines()
    [place] = [at for at, line in enumerate(lines) if "▁" in line]
    assert "▁" * 20 + "█" * 20 + "  1 … 5" in lines[place]
    assert lines[place + 1].index("└") == lines[place].index("█")
    assert lines[place + 1].rindex("┘") == lines[place].rindex("█")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_charts_fit_the_terminal(hostile, width):
    drawn = [line for line in printed(hostile, width=width).splitlines() if "█" in line]
    assert drawn
    assert all(len(line) <= width for line in drawn)


@pytest.mark.parametrize(
    ("framework", "facts", "setting"),
    [
        ("trl", Facts(bypass_mode=False), "vllm_importance_sampling_correction"),
        ("ms-swift", Facts(bypass_mode=False), "--rollout_importance_sampling_mode"),
        # Neither TRL's PPO and asynchronous GRPO nor LLaMA-Factory's PPO has a setting for these metrics.
        ("trl", Facts(has_critic=True), None),
        ("trl", Facts(bypass_mode=True), None),
        ("llama-factory", Facts(), None),
    ],
)
def test_the_setting_that_would_enable_rules_exists_in_the_framework(framework, facts, setting):
    logged = ("actor/grad_norm", "critic/score/mean", "actor/entropy", "response_length/mean")
    table = Table(np.arange(1, 3), {key: np.ones(2) for key in logged})
    text = printed(examine(RunLog(Path("a.log"), table, framework=framework, facts=facts)), width=400)
    line = next(line for line in text.splitlines() if "would run with" in line)
    assert setting in line if setting else "importance_sampling" not in line


def test_a_fix_is_written_in_the_frameworks_own_keys(hostile):
    text = printed(hostile, width=200)
    assert "try         learning_rate=1e-6" in text
    assert "or          actor.grad_clip=1  # in rlctl's keys" in text
    assert "logged" in text


@pytest.mark.parametrize(
    ("framework", "row", "words"),
    [
        ("slime", {"response_length/clip_ratio": 0.5}, "--rollout-max-response-len  # raise the length"),
        ("trl", {"response_length/clip_ratio": 0.5}, "mask_truncated_completions=True  # against overlong"),
        (
            "verl",
            {"rollout_corr/rollout_rs_masked_fraction": 0.6},
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0  # wider bounds",
        ),
    ],
)
def test_what_to_change_is_named_where_the_configuration_is_unknown(framework, row, words):
    columns = {key: np.full(20, value) for key, value in row.items()}
    facts = Facts(max_response_length=100) if framework == "trl" else Facts()
    run = RunLog(Path("log"), Table(np.arange(20), columns), framework=framework, facts=facts)
    assert words in printed(examine(run), width=200)


def test_what_a_spec_would_tell_is_asked_for_in_the_frameworks_terms(hostile):
    unknown = replace(hostile, skipped=(Skipped("not told by the log: ppo_epochs", ("spec.yaml",), "rule"),))
    wanted = "1 rule SKIPPED: the log lacks their metrics. 1 of them would run with: spec.yaml, or "
    wanted += "the training arguments"
    assert wanted in printed(unknown, width=200)
    assert wanted in as_markdown([unknown]).replace("\\", "")
    assert "training arguments" not in printed(hostile, width=200)


def test_markdown_shows_hostile_text_without_markup(hostile):
    text = as_markdown([hostile])
    unescaped = re.sub(r"\\.", "", text)
    assert "</script>" not in unescaped
    assert "](http" not in unescaped
    assert "[red]" not in unescaped
    assert "`learning_rate=1e-6`" in text


def test_markdown_code_ends_where_it_should(hostile):
    [finding] = hostile.findings
    other = replace(finding, fixes=(Fix(others={"trl": "a=`b``"}),))
    assert "``` a=`b`` ```" in as_markdown([replace(hostile, findings=(other,))])


@given(floats, st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes(values, most):
    whole = series(values)
    few = thinned(whole, most)
    assert len(few) <= max(most, 4)
    assert {0, few.steps[-1]} == {few.steps[0], whole.steps[-1]}
    assert (few.values.min(), few.values.max()) == (whole.values.min(), whole.values.max())
    assert np.all(np.diff(few.steps) > 0)
    assert np.array_equal(whole.values[few.steps // 3], few.values)


@given(floats, st.integers(1, 80))
def test_a_sparkline_has_room_and_shows_a_spike(values, width):
    text, steps = sparkline(series(values), width)
    assert len(text) == len(steps) == min(width, len(values))
    if np.ptp(values) > 0 and width >= 2 and len(values) >= 2:
        spiked, _ = sparkline(series([*values, max(values) + 10 * np.ptp(values)]), width)
        assert spiked[-1] == "█"


@given(st.text(st.characters()))
def test_visible_text_is_one_harmless_line(text):
    shown = visible(text)
    assert shown.encode("utf-8") or not text
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


def test_few_steps_or_rules_are_insufficient_data():
    assert examine(run_log(healthy_rows(4))).status == "insufficient data"
    assert examine(run_log(healthy_rows(40))).status == "no warnings"
    bare = [{"step": step, "actor/grad_norm": 0.5} for step in range(1, 41)]
    diagnosis = examine(run_log(bare, facts=Facts()))
    assert diagnosis.status == "insufficient data"
    assert "Too little data for a conclusion" in printed(diagnosis, width=200)
    assert "Too little data for a conclusion" in as_markdown([diagnosis])
    [document] = diagnosis_document([diagnosis])["runs"]
    assert document["status"] == "insufficient data"
    bad = [row | {"actor/grad_norm": 3e9} for row in bare]
    assert examine(run_log(bad, facts=Facts())).status == "critical"
