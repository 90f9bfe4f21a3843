"""The page of a diagnosis, in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rlctl.diagnose import diagnosis_page
from rlctl.diagnose.diagnosis_page import diagnosis_page as page_text
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import Table
from tests.unit.diagnose.logs import CORR, healthy_rows, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028{{7*7}}${alert(3)}\ud800"
EVIL_KEY = f"val-core/<a href='http://evil.test'>{EVIL}</a>/reward/mean@1"


@pytest.fixture
def shown(opened, tmp_path):
    """Opens a page from its text."""

    def go(text):
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        return opened(path)

    return go


def diagnosed(run_dir, rows):
    return examine(read_run(write_run(run_dir, rows), metrics_read()))


@pytest.fixture
def healthy(tmp_path):
    return diagnosed(tmp_path / "healthy", healthy_rows())


@pytest.fixture
def sick(tmp_path):
    rows = healthy_rows(seed=1)
    for row in rows[30:]:
        row |= {f"{CORR}kl": 0.2, "response_length/clip_ratio": 0.2}
    return diagnosed(tmp_path / "sick", rows)


def until(page, expression):
    """Playwright's own way of waiting evaluates strings in the page, which its policy forbids."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never: {expression}")


def plots(page):
    """Metrics whose curves are shown."""
    return [figure.get_attribute("data-metric") for figure in page.locator("figure").all()]


def can_be_seen(page):
    """Its plots are drawn, light and dark, and it fits a telephone."""
    usual = page.viewport_size
    for scheme, is_right in (("dark", (50).__gt__), ("light", (200).__lt__)):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert is_right(sum(map(int, re.findall(r"\d+", ground)[:3])) / 3)
        assert len(page.locator("figure").first.screenshot()) > 8_000
    page.set_viewport_size({"width": 400, "height": 800})
    until(page, "document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size(usual)


def test_findings_are_marked_on_plots_that_can_be_chosen(sick, shown):
    page = shown(page_text([sick]))
    can_be_seen(page)
    assert "0.2 nats per token apart" in page.locator(".finding").first.inner_text()
    before = plots(page)
    assert {f"{CORR}kl", "response_length/clip_ratio", "critic/score/mean"} <= set(before)
    assert page.locator("figure path.curve").count() == len(before)
    assert page.locator("figure rect.band").count() == 2
    assert page.locator("figure .band-label").all_text_contents() == ["policy-gap", "truncated"]
    assert not page.locator("text=20.0% of the responses").is_visible()  # a consequence
    page.click("details.then summary")
    page.click("text=20.0% of the responses")
    assert "response_length/clip_ratio" in page.locator("figure.called").inner_text()
    page.click("[data-severity=warning]")
    assert page.locator(".finding:visible").count() == 1
    assert page.locator("figure .band-label").all_text_contents() == ["truncated"]
    assert page.locator("[data-severity=info]").is_hidden()
    page.click("#choose summary")
    page.fill("#search", "ACTOR/GRAD")
    assert page.locator("#metrics label:visible").all_inner_texts() == ["gradient norm (actor/grad_norm)"]
    page.check("#metrics label:visible input")
    assert set(plots(page)) == {*before, "actor/grad_norm"}
    page.click("#none")
    assert plots(page) == before
    page.fill("#search", "")
    page.click("#none")
    assert plots(page) == []


def ticks(page, place):
    """Numbers on the x axis of a plot."""
    return [
        float(one.replace(",", ""))
        for one in page.locator(f"figure >> nth={place} >> text.tick[text-anchor=middle]").all_text_contents()
    ]


def points(page, selector, place=0):
    """(x, y) pixels of the points of a curve."""
    path = page.locator(f"figure >> nth={place} >> {selector}").first.get_attribute("d")
    return [tuple(map(float, point.split())) for point in re.findall(r"[ML]([-\d.]+ [-\d.]+)", path)]


def test_several_runs_share_plots_and_zoom_together(healthy, sick, shown):
    page = shown(page_text([healthy, sick]))
    assert page.locator("figure").first.locator("path.curve").count() == 2
    box = page.locator("figure .plot").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 60)
    assert "healthy" in page.locator("figure output").first.inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 65, steps=4)
    page.mouse.up()
    assert max(ticks(page, 0)) < 40
    assert ticks(page, 0) == ticks(page, 1)
    page.click("#log")
    labels = page.locator("figure >> nth=0 >> text.tick[text-anchor=end]").all_text_contents()
    assert len(labels) > 1
    page.click("#reset")
    assert max(ticks(page, 0)) >= 50
    page.click("#runs button >> nth=0")
    assert page.locator("figure").first.locator("path.curve").count() == 1


def test_curves_over_steps_samples_and_time_and_smoothed(healthy, sick, shown):
    page = shown(page_text([healthy, sick]))
    assert page.title() == "healthy · sick"
    assert page.locator(".run h2").all_inner_texts() == ["healthy", "sick"]
    assert plots(page)[0] == "critic/score/mean"
    assert page.locator("figure b").first.inner_text() == "reward"
    assert max(ticks(page, 0)) == 60
    assert not page.evaluate("document.querySelector('#x [value=samples]').disabled")
    page.select_option("#x", "samples")
    assert max(ticks(page, 0)) == pytest.approx(60 * healthy.run.facts.batch_size, rel=0.25)
    page.select_option("#x", "time")
    minutes = healthy.run.table.series("timing_s/step").values.sum() / 60
    assert 0.5 * minutes < max(ticks(page, 0)) <= minutes * 1.02
    page.select_option("#x", "step")
    (_, first), (_, second), *_ = points(page, "path.curve")
    page.locator("#smooth").fill("0.5")
    assert page.locator("figure >> nth=0 >> path.logged").count() == 2
    logged, smooth = points(page, "path.logged"), points(page, "path.curve")
    assert smooth[0][1] == pytest.approx(logged[0][1], abs=0.1)
    assert smooth[1][1] == pytest.approx((0.5 * logged[0][1] + logged[1][1]) / 1.5, abs=0.2)
    assert (first < second) == (logged[0][1] < logged[1][1])
    columns = "getComputedStyle(document.getElementById('plots')).gridTemplateColumns.split(' ').length"
    assert page.evaluate(columns) == 1
    page.set_viewport_size({"width": 1900, "height": 900})
    assert page.evaluate(columns) == 2


def test_two_steps_draw_a_line_and_one_step_a_point(tmp_path, shown):
    for count, lines in ((2, 1), (1, 0)):
        page = shown(page_text([diagnosed(tmp_path / str(count), healthy_rows()[:count])]))
        figure = page.locator("figure[data-metric='critic/score/mean']")
        assert figure.locator("circle.point").count() == count
        path = figure.locator("path.curve").get_attribute("d")
        assert path.count("L") == lines


def test_flat_curves_are_folded_unless_a_finding_names_them(tmp_path, shown):
    rows = [row | {"response_length/mean": 5.0, "response_length/clip_ratio": 0.2} for row in healthy_rows()]
    page = shown(page_text([diagnosed(tmp_path / "run", rows)]))
    assert page.locator("#flat figure").count() == 1
    assert not page.locator("#flat figure").is_visible()
    assert page.locator("#flat-curves > summary").inner_text() == "1 flat curve"
    page.click("#flat-curves > summary")
    until(page, "document.querySelector('#flat svg').getBoundingClientRect().width > 300")
    assert page.locator("#plots figure[data-metric='response_length/clip_ratio']").is_visible()


def test_resolved_findings_are_grey(tmp_path, shown):
    rows = healthy_rows()
    for row in rows[10:30]:
        row["response_length/clip_ratio"] = 0.4
    diagnosis = diagnosed(tmp_path / "run", rows)
    [finding] = [one for one in diagnosis.findings if one.rule == "truncated"]
    assert finding.is_resolved
    page = shown(page_text([diagnosis]))
    assert "truncated, resolved" in page.locator(".finding.resolved").first.inner_text()
    for row in rows[10:]:
        row["response_length/clip_ratio"] = 0.4
    still = diagnosed(tmp_path / "still", rows)
    assert not any(one.is_resolved for one in still.findings if one.rule == "truncated")


def test_equal_names_are_shown_with_their_directories(tmp_path):
    paths = [tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "verl.log"]
    assert diagnosis_page.titles(paths) == ["a", "verl.log"]
    assert diagnosis_page.titles([paths[0], tmp_path / "c" / "a" / "metrics.jsonl"]) == [
        str(paths[0]),
        str(tmp_path / "c" / "a" / "metrics.jsonl"),
    ]


def hostile(diagnosis):
    """The diagnosis with its every text replaced."""
    table = diagnosis.run.table
    columns = {**table.columns, EVIL_KEY: np.linspace(0, 1, len(table.steps))}
    run = replace(diagnosis.run, path=diagnosis.run.path / EVIL, notes=(EVIL,))
    run = replace(run, table=Table(table.steps, columns))
    evil = {
        "what": EVIL,
        "cause": EVIL,
        "source": EVIL,
        "confidence_reason": EVIL,
        "could_not_check": (EVIL,),
    }
    first, *others = diagnosis.findings
    evidence = (replace(first.evidence[0], metric=EVIL_KEY, figure=EVIL),)
    fixes = tuple(replace(fix, spec=(EVIL,), why=EVIL) for fix in first.fixes)
    return replace(
        diagnosis,
        run=run,
        findings=(replace(first, evidence=evidence, fixes=fixes, **evil), *others),
    )


def test_hostile_text_is_only_text(sick, healthy, shown):
    evil = hostile(sick)
    page = shown(page_text([evil, healthy]))
    assert page.locator(".finding h3").first.inner_text().count("<script>alert(1)</script>") == 1
    assert page.locator("main img, main script, main a, main svg a").count() == 0
    assert "<a href='http://evil.test'>" in " ".join(plots(page))
    place = next(at for at, name in enumerate(plots(page)) if "evil.test" in name)
    page.hover(f"figure >> nth={place} >> .plot")
    assert "step" in page.locator("figure output").nth(place).inner_text()
    assert page.locator("main svg a, main svg script").count() == 0


def test_what_is_injected_does_not_run_nor_load(sick, loaded_from_elsewhere, tmp_path):
    """The policy holds even if text became markup."""
    path = tmp_path / "report.html"
    path.write_text(page_text([sick]))
    assert loaded_from_elsewhere(path, "sick") == []


def test_data_is_json_without_any_markup(sick):
    text = page_text([hostile(sick)])
    [block] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert not re.search(r"[<>&\u2028]", block)
    assert EVIL_KEY in [metric["key"] for metric in json.loads(block)["metrics"]]


def test_a_long_log_stays_a_small_page_with_its_spikes(healthy):
    steps = np.arange(1_000_000)
    values = np.ones(len(steps))
    values[777_777] = 40.0
    run = replace(healthy.run, table=Table(steps, {"actor/grad_norm": values}))
    short, long = (page_text([each]) for each in (healthy, replace(healthy, run=run, findings=())))
    assert len(long) - len(short) < 50_000
    assert "40.0" in long[long.index('id="data"') :]


def data_of(text):
    """What the page's script draws, by metric."""
    [block] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    data = json.loads(block)
    bands = data["runs"][0]["bands"]
    return {one["key"]: one | {"bands": bands[at]} for at, one in enumerate(data["metrics"])}


def test_every_page_shows_reward_validation_effective_samples_kl_entropy_and_length(healthy, sick):
    always = {
        "critic/score/mean",
        "val/addition/reward_mean",
        f"{CORR}rollout_is_raw_eff_sample_size",
        f"{CORR}rollout_is_eff_sample_size",
        f"{CORR}kl",
        "actor/entropy",
        "response_length/mean",
    }
    assert {key for key, one in data_of(page_text([healthy])).items() if one["shown"]} == always
    assert {key for key, one in data_of(page_text([sick])).items() if one["shown"]} > always


def test_the_header_names_experiment_model_steps_and_dates(healthy):
    text = page_text([healthy])
    assert "steps 1–60, logged by rlctl, experiment rloo-seq-is, model embedded, 2025-01-31 12:00" in text


def test_a_remark_shades_nothing_and_captions_say_what_was_logged(tmp_path):
    rows = [row | {"response_length/clip_ratio": 0.07} for row in healthy_rows()]
    diagnosis = diagnosed(tmp_path / "run", rows)
    assert [(one.rule, one.severity) for one in diagnosis.findings] == [("truncated", "info")]
    assert data_of(page_text([diagnosis]))["response_length/clip_ratio"]["bands"] == []
    log = tmp_path / "verl.log"
    log.write_text(
        "step:1 - actor/entropy_loss:0.5 - response_length/clip_ratio:0.9 - actor/pg_clipfrac:0.1\n"
    )
    foreign = data_of(page_text([examine(read_run(log, metrics_read()))]))
    assert foreign["actor/entropy"]["definition"].startswith("actor/entropy_loss: mean over updates")
    assert [band["severity"] for band in foreign["response_length/clip_ratio"]["bands"]] == ["critical"]
