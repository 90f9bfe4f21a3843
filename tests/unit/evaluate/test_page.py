"""The page of samples, in a real browser."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from rlctl.evaluate.compare import compare, comparison_page
from rlctl.evaluate.evaluate_report import Evaluation, results_document, write_evaluation
from rlctl.evaluate.page import chosen, write_page
from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import summarise
from rlctl.run_spec.rollout import RewardSpec

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SCRIPT = "<script>alert('run')</script>"
HOSTILE = [
    f"</script>{SCRIPT}<img src=x onerror=\"alert('image')\">",
    f"<!--<script>{SCRIPT}",
    "]]>\u2028alert(1)\u2029//\u0000\u0007",
    "lone \ud800 and \udfff surrogates",
    "\u202eright to left\u2066 and on",
    "x" * 1_000_000,
    "{{ 7 * 7 }} ${alert(2)} &lt;b&gt; <svg onload=alert(3)>",
]


def sample(question, place, response, reward, **changes):
    values = {
        "question_index": question,
        "sample_index": place,
        "data_source": "openai/gsm8k" if question % 2 else "some/maths",
        "prompt": f"<|user|>\nWhat is {question} + {question}?",
        "response": response,
        "ground_truth": str(2 * question),
        "truncated": False,
        "num_tokens": 12,
        "reward": reward,
        "answer": str(2 * question) if reward else None,
    }
    return EvalSample(**values | changes)


def ordinary(count):
    said = "First we add.\n\nThen the answer is {}. "
    for question in range(count):
        yield sample(question, 0, said.format(2 * question) * 5, 1.0)
        yield sample(question, 1, "Hard to say.", 0.0, truncated=question % 3 == 0)
        yield sample(question, 2, "It breaks the grader.", None if question == 4 else 0.0)


@pytest.fixture
def page_of(tmp_path):
    def make(samples, **options):
        evaluation = Evaluation(
            about={
                "model": {"path": f"models/{SCRIPT}", "run_dir": None, "step": None},
                "data": {"files": ["data/test.parquet"], "num_overlong_prompts": 0},
                "sampling": {"n": 3, "seed": 1, "engine": "hf", "dtype": "fp32"}
                | {"greedy": False, "temperature": 1.0, "top_p": 1.0, "max_response_length": 64},
            },
            reward=RewardSpec(),
            scores=summarise(samples, [1, 2], 3),
            score_range=(0.0, 1.0),
            grader_errors=[f"Traceback\nValueError: {SCRIPT}"],
            seconds=1.0,
        )
        path = tmp_path / "samples.html"
        write_page(path, results_document(evaluation), samples, **options)
        return path

    return make


def counted(page):
    return [int(number) for number in re.findall(r"\d+", page.locator("#count").inner_text())]


def await_count(page, responses):
    """Searching waits for the typing to pause."""
    playwright.expect(page.locator("#count")).to_have_text(re.compile(rf"^{responses} "))


def test_filters_search_and_pages(page_of, opened):
    page = opened(page_of(list(ordinary(30))))
    assert counted(page) == [90, 30]
    assert page.locator("article").count() == 20
    page.click("[data-outcome=error]")
    assert counted(page) == [1, 1]
    assert "Question 4" in page.locator("article").inner_text()
    assert "grader error" in page.locator("section.response h3").inner_text()
    page.click("text=show the other 2 responses")
    assert page.locator("section.response").count() == 3
    page.click("[data-outcome=wrong]")
    assert counted(page) == [60, 30]
    page.click("[data-outcome=error]")
    assert counted(page) == [59, 30]
    page.click("#truncated")
    assert counted(page) == [10, 10]
    page.keyboard.press("Escape")
    assert counted(page) == [90, 30]
    page.select_option("#source", "openai/gsm8k")
    assert counted(page) == [45, 15]
    page.fill("#search", "ANSWER IS 58")
    await_count(page, 1)
    assert "58" in page.locator("article pre").nth(1).inner_text()
    page.fill("#search", "what is 29")
    await_count(page, 3)


def test_keys(page_of, opened):
    page = opened(page_of(list(ordinary(30))))
    page.keyboard.press("n")
    assert page.locator("#page").inner_text() == "page 2 of 2"
    assert page.locator("article").count() == 10
    page.keyboard.press("p")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert "Question 1" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("w")
    assert counted(page) == [59, 30]
    page.keyboard.press("t")
    assert counted(page) == [10, 10]
    page.keyboard.press("/")
    page.keyboard.type("wet")  # letters, not filters
    await_count(page, 0)
    assert "No response fits" in page.locator("main").inner_text()


def test_hostile_text_is_only_text(page_of, opened):
    samples = [sample(0, place, text, 0.0, answer=text[:50]) for place, text in enumerate(HOSTILE)]
    samples += [
        sample(place, 0, "fine", 1.0, prompt=text, ground_truth=text, data_source=text)
        for place, text in enumerate(HOSTILE[:5], 1)
    ]
    page = opened(page_of(samples))
    shown = page.locator("section.response pre").all_inner_texts()
    assert shown[0] == HOSTILE[0]
    assert shown[1] == HOSTILE[1]
    assert "⟨U+0000⟩⟨U+0007⟩" in shown[2]
    assert shown[4] == "⟨U+202E⟩right to left⟨U+2066⟩ and on"
    assert len(shown[5]) == 6000
    page.click("text=show all 1,000,000 characters")
    assert len(page.locator("section.response pre").nth(5).inner_text()) == 1_000_000
    assert page.locator("img, main script, main svg").count() == 0
    assert page.title() == f"models/{SCRIPT}"
    page.fill("#search", "onerror")
    await_count(page, 2)


def test_what_is_injected_does_not_run_nor_load(page_of, loaded_from_elsewhere):
    """The policy holds even if text became markup."""
    assert loaded_from_elsewhere(page_of(list(ordinary(2))), f"models/{SCRIPT}") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_seen(page_of, opened, scheme, tmp_path):
    page = opened(page_of(list(ordinary(8))))
    page.emulate_media(color_scheme=scheme)
    picture = page.screenshot(path=tmp_path / f"{scheme}.png")
    assert len(picture) > 20_000
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 50
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("svg circle").count() > 4


def test_figures_are_those_of_the_results(page_of, opened):
    samples = list(ordinary(9))
    page = opened(page_of(samples))
    overall = summarise(samples, [1, 2], 3)[-1]
    text = page.locator("table", has_text="overall").inner_text()
    assert f"{overall.figures['avg'].value:.3f}" in text
    assert f"{overall.figures['pass@2'].low:.3f} – {overall.figures['pass@2'].high:.3f}" in text


def test_too_many_samples_keep_what_is_to_learn_from_and_say_so(page_of):
    samples = list(ordinary(200))
    whole = sum(len(each.prompt + each.response + each.ground_truth) for each in samples)
    assert chosen(samples, whole) == samples
    kept = chosen(samples, whole // 2)
    wrong = [each for each in samples if each.reward != 1.0]
    assert [each for each in kept if each.reward != 1.0] == wrong
    assert len(wrong) < len(kept) < len(samples)
    assert chosen(samples, whole // 2) == kept
    few = chosen(samples, 5_000)
    assert few
    assert all(each.reward != 1.0 for each in few)
    assert max(each.question_index for each in few) > 100  # not only the first ones
    text = page_of(samples, max_text=whole // 2).read_text()
    assert f"{len(kept):,} of 600 responses are on this page" in text
    assert text.count('"right":1,"of":3}') == 200  # counts are of all responses


def test_data_block_is_json_without_any_markup(page_of):
    text = page_of([replace(sample(0, 0, "".join(HOSTILE), 0.0))]).read_text()
    [block] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert not re.search(r"[<>&\u2028\u2029]", block)
    assert block.isascii()
    assert json.loads(block)["questions"][0]["responses"][0]["text"] == "".join(HOSTILE)


@pytest.fixture
def compared(tmp_path):
    """A page of two evaluations whose directories have hostile names."""
    draw = random.Random(0)
    for name, chance in ((f"a{HOSTILE[1][:20]}", 0.2), ("b", 0.7)):
        samples = [
            sample(question, place, "said", float(draw.random() < chance))
            for question in range(60)
            for place in range(2)
        ]
        about = {
            "model": {"path": name, "run_dir": None, "step": None},
            "data": {"files": ["x"], "num_overlong_prompts": 0},
            "sampling": {"n": 2, "seed": 1, "greedy": False, "temperature": chance, "top_p": 1.0}
            | {"max_response_length": 9},
        }
        evaluation = Evaluation(about, RewardSpec(), summarise(samples, [1, 2], 2), [], 1.0, (0.0, 1.0))
        write_evaluation(tmp_path / name.replace("/", "_"), evaluation, samples, page=False)
    first = next(path for path in tmp_path.iterdir() if path.name.startswith("a"))
    report = compare(first, tmp_path / "b")
    path = tmp_path / "compared.html"
    path.write_text(comparison_page(report))
    return report, path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_a_comparison_is_a_page(compared, opened, scheme, width):
    report, path = compared
    page = opened(path)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "Is B better than A?"
    text = page.locator("body").inner_text()
    for comparison in report.comparisons:
        assert comparison.conclusion in text
        avg = comparison.figures[0]
        assert f"{avg.difference.low:+.3f} to {avg.difference.high:+.3f}" in text
    assert report.a in text, "the hostile name is text"
    assert "sampled differently: temperature" in text
    assert page.locator("script").count() == 0
    places = [float(each.get_attribute("cx")) for each in page.locator("svg circle").all()]
    differences = [figure.difference.value for one in report.comparisons for figure in one.figures]
    assert len(places) == len(differences)
    assert all(
        (place > 100) == (difference > 0) for place, difference in zip(places, differences, strict=True)
    )
    assert max(places) <= 196
