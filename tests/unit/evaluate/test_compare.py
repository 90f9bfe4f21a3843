import json
import random
from dataclasses import replace

import pytest
from scipy.stats import ttest_rel

from rlctl.errors import UsageError
from rlctl.evaluate.compare import compare, comparison_page
from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.evaluate.intervals import paired, questions_needed
from rlctl.evaluate.scores import score_range, summarise
from rlctl.run_spec.rollout import RewardSpec


@pytest.fixture
def stored(tmp_path, make_samples):
    """Writes an evaluation of these rewards and returns its directory."""

    def make(name, samples, n=None, template="t", reward=None, **sampling):
        n = n or 1 + max(sample.sample_index for sample in samples)
        about = {
            "model": {"path": name, "run_dir": None, "step": None, "template_sha256": template},
            "data": {"files": ["x.parquet"], "num_overlong_prompts": 0},
            "sampling": {"n": n, "seed": 1, "greedy": False, "temperature": 1.0, "top_p": 1.0}
            | {"max_response_length": 9}
            | sampling,
        }
        bounds = score_range(reward or RewardSpec(), samples)
        scores = summarise(samples, [1], n, bounds=bounds)
        evaluation = Evaluation(about, reward or RewardSpec(), scores, [], 1.0, bounds)
        write_evaluation(tmp_path / name, evaluation, samples, page=False)
        return tmp_path / name

    return make


def rewards(count, n, chance, seed):
    draw = random.Random(seed)
    return [[float(draw.random() < chance) for _ in range(n)] for _ in range(count)]


def test_figures_are_those_of_a_paired_test(stored, make_samples):
    a, b = rewards(60, 4, 0.3, 1), rewards(60, 4, 0.6, 2)
    report = compare(stored("a", make_samples("s", a)), stored("b", make_samples("s", b)))
    [found] = report.comparisons
    avg = found.figures[0]
    oracle = ttest_rel([sum(row) / 4 for row in b], [sum(row) / 4 for row in a])
    low, high = oracle.confidence_interval(0.95)
    assert avg.difference.value == pytest.approx(avg.b - avg.a)
    assert (avg.difference.low, avg.difference.high) == pytest.approx((low, high))
    assert avg.difference.p_value == pytest.approx(oracle.pvalue)
    points = [round(100 * value, 1) for value in (avg.difference.value, low, high)]
    assert found.conclusion == f"B is better by {points[0]} points (95 %: {points[1]} to {points[2]})"
    assert [figure.name for figure in found.figures] == ["avg", "pass@1", "pass@4"]
    assert report.warnings == []


def test_the_better_one_is_named_whichever_side_it_is_on(stored, make_samples):
    good, bad = (
        stored(name, make_samples("s", rewards(80, 2, p, 3))) for name, p in (("good", 0.9), ("bad", 0.2))
    )
    forth = compare(bad, good).comparisons[0].conclusion
    back = compare(good, bad).comparisons[0].conclusion
    assert forth.startswith("B is better by")
    assert back == forth.replace("B is", "A is")


def test_questions_are_paired_by_what_is_asked_not_by_their_place(stored, make_samples):
    a = make_samples("s", rewards(30, 2, 0.5, 1))
    shuffled = list(range(30))
    random.Random(0).shuffle(shuffled)
    b = [replace(sample, question_index=shuffled[sample.question_index]) for sample in a]
    b.sort(key=lambda sample: sample.question_index)
    b = [replace(sample, prompt=f"<|im_start|>{sample.prompt}") for sample in b]  # another template
    report = compare(stored("a", a), stored("b", b, template="u"))
    [found] = report.comparisons
    assert found.num_shared == 30
    assert found.conclusion == "no difference on any question"
    assert "templates differ" in report.warnings[0]


def test_repeats_of_a_question_are_paired_one_by_one(stored, make_samples):
    a = [
        replace(sample, messages=({"role": "user", "content": "same"},))
        for sample in make_samples("s", [[1.0], [0.0], [1.0]])
    ]
    [found] = compare(stored("a", a), stored("b", a[:2])).comparisons
    assert (found.num_shared, found.num_only_a, found.num_only_b) == (2, 1, 0)
    assert found.figures[0].a == 0.5


def test_only_what_both_have_counts_and_each_source_for_itself(stored, make_samples):
    a = make_samples("x", [[1.0]] * 5) + make_samples("y", [[0.0]] * 5, first=5)
    b = make_samples("x", [[1.0]] * 3) + make_samples("y", [[0.0]] * 4 + [[None]], first=5)
    report = compare(stored("a", a), stored("b", b))
    x, y, overall = report.comparisons
    assert report.warnings[-1].startswith("2 data sources are compared at the 95% level each")
    assert "in about 10% of cases" in report.warnings[-1]  # 1 − 0.95²
    assert (x.num_shared, x.num_only_a) == (3, 2)
    assert (y.num_shared, y.figures[0].difference.num_questions) == (5, 4)
    assert (overall.num_shared, overall.figures[0].difference.num_questions) == (8, 7)


def test_votes_of_different_n_are_counted_among_as_many(stored, make_samples):
    few = make_samples("s", [[1.0, 0.0]] * 3, [["7", "8"]] * 3)
    many = make_samples("s", [[1.0, 0.0, 0.0, 0.0]] * 3, [["7", "8", "8", "8"]] * 3)
    [found] = compare(stored("a", few), stored("b", many)).comparisons
    votes = {figure.name: figure for figure in found.figures}["maj@2"]
    assert (votes.a, votes.b) == (0.5, 0.5)


def test_no_telling_says_how_many_questions_would_tell(stored, make_samples):
    a, b = make_samples("s", rewards(40, 1, 0.5, 1)), make_samples("s", rewards(40, 1, 0.5, 2))
    [found] = compare(stored("a", a), stored("b", b)).comparisons
    count = questions_needed(found.figures[0].difference.deviation, 0.02)
    expected = f"no difference detected; about {count:,} questions would be needed to see 2 points"
    assert found.conclusion == expected


def test_so_many_questions_do_tell():
    """A paired test with that many questions finds the difference in four of five cases."""
    draw = random.Random(0)
    count = questions_needed(1.0, 0.5)
    found = 0
    for _ in range(2000):
        difference = paired([draw.gauss(0.5, 1.0) for _ in range(count)])
        found += not difference.low <= 0.0 <= difference.high
    assert 0.75 < found / 2000 < 0.85


@pytest.mark.parametrize(
    ("count", "value", "words"),
    [
        (9, 1.0, "no conclusion: B − A is +100 points on each of 9 questions, which gives no interval"),
        (1, 0.5, "no conclusion: B − A is +50 points on one question, which gives no interval"),
        (9, 0.0, "no difference on any question"),
    ],
)
def test_without_an_interval_there_is_no_conclusion(stored, make_samples, count, value, words):
    a, b = stored("a", make_samples("s", [[0.0]] * count)), stored("b", make_samples("s", [[value]] * count))
    [found] = compare(a, b).comparisons
    assert found.figures[0].difference.low is None
    assert found.conclusion == words


@pytest.mark.parametrize("values", [[0, 0, 90], [1, 2, 0], [0, 0, 0, 0, 5]])
def test_no_interval_leaves_its_range(stored, make_samples, values):
    tokens = [make_samples("s", [[1.0]], first=at, tokens=value)[0] for at, value in enumerate(values)]
    length = summarise(tokens, [1], 1)[0].mean_length
    assert 0.0 <= length.low < length.value < length.high
    rewards = [[float(value > 0)] for value in values]
    a, b = stored("a", make_samples("s", [[0.0]] * len(values))), stored("b", make_samples("s", rewards))
    difference = compare(a, b).comparisons[0].figures[0].difference
    assert -1.0 <= difference.low < difference.value < difference.high <= 1.0


def test_questions_that_flipped_are_counted_and_shown(stored, make_samples):
    """Right: most graded responses are. A question that one side has no grade for does not flip."""
    a = make_samples("s", [[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 1, 0], *[[1, 1, 1]] * 4])
    b = make_samples("s", [[0, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [None] * 3, *[[0, 0, 0]] * 4])
    report = compare(stored("a", a), stored("b", b))
    assert report.num_flipped == {"A": 5, "B": 2}
    shown = [(one.right_in, one.question, one.a_response, one.b_response) for one in report.flipped]
    assert shown[:3] == [("A", f"question {at}?", "response 0", "response 0") for at in (5, 6, 7)]
    assert shown[3:] == [
        ("B", "question 1?", "response 0", "response 0"),
        ("B", "question 3?", "response 0", "response 0"),
    ]
    assert [(one.a, one.b) for one in report.flipped[3:]] == [(0.0, 1.0), (1 / 3, 2 / 3)]
    page = comparison_page(report)
    assert "5 questions are right only in A, 2 only in B" in page
    assert page.count("<article>") == 5


def test_the_same_rewards_in_another_order_are_no_difference(stored, make_samples):
    """In floating point, 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ."""
    a = stored("a", make_samples("s", [[0.1, 0.2, 0.3]] * 9))
    b = stored("b", make_samples("s", [[0.3, 0.2, 0.1]] * 9))
    [found] = compare(a, b).comparisons
    assert found.conclusion == "no difference on any question"


def test_what_was_done_differently_is_said(stored, make_samples):
    samples = make_samples("s", [[1.0], [0.0]])
    report = compare(stored("a", samples), stored("b", samples, temperature=0.6, seed=2))
    assert report.warnings == ["sampled differently: temperature is 1.0 in A and 0.6 in B"]


def test_rewards_beyond_shares_are_not_points(stored, make_samples):
    a = make_samples("s", [[float(place % 7)] for place in range(50)])
    b = make_samples("s", [[float(place % 7) + 2 + place % 2] for place in range(50)])
    [found] = compare(stored("a", a), stored("b", b)).comparisons
    assert found.conclusion == "B is better by 2.5 of reward (95 %: 2.36 to 2.64)"


def test_strangers_are_refused(stored, make_samples, tmp_path):
    a = stored("a", make_samples("s", [[1.0]]))
    with pytest.raises(UsageError, match="have no question in common"):
        compare(a, stored("b", make_samples("s", [[1.0]], first=7)))
    with pytest.raises(UsageError, match="pass@2 cannot"):
        compare(a, a, [2])
    with pytest.raises(UsageError, match="no such directory"):
        compare(a, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no results"):
        compare(a, tmp_path)
    damaged = stored("damaged", make_samples("s", [[1.0]]))
    (damaged / "samples.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UsageError, match="cannot be read"):
        compare(a, damaged)
    for text in ("{", "[]", "{}", json.dumps({"format": 1})):
        (damaged / "results.json").write_text(text)
        with pytest.raises(UsageError, match="not the results of an evaluation"):
            compare(a, damaged)


def test_nothing_is_concluded_from_what_could_not_be_graded(stored, make_samples):
    a = stored("a", make_samples("x", [[0.0]] * 8 + [[None]] * 2))
    b = stored("b", make_samples("x", [[1.0]] * 6 + [[0.0]] * 2 + [[1.0]] * 2))
    assert "no conclusion" in compare(a, b).comparisons[0].conclusion
    assert "no conclusion" in compare(b, a).comparisons[0].conclusion


def test_other_graders_and_other_ground_truths_are_named(stored, make_samples, tmp_path):
    samples, file = make_samples("s", [[1.0, 0.0]] * 3), tmp_path / "reward.py"
    reward = RewardSpec(name=f"{file}:grade")
    file.write_text("one = 1")
    a = stored("a", samples, reward=reward)
    file.write_text("two = 2")
    b = stored("b", [replace(sample, ground_truth="2") for sample in samples], reward=reward)
    results = json.loads((b / "results.json").read_text())
    results["versions"]["math-verify"] = "0.1"
    (b / "results.json").write_text(json.dumps(results))
    graded, version, truths = compare(a, b).warnings
    assert graded.startswith("graded differently")
    assert "math-verify is " in version
    assert truths.startswith("3 shared questions have another ground truth in B")


def test_other_prompts_with_the_same_template_are_said(stored, make_samples):
    """As by variables of the template, which turn thoughts on or off."""
    samples = make_samples("gsm8k", [[1.0], [0.0], [1.0]])
    changed = [replace(sample, prompt=f"{sample.prompt}<think></think>") for sample in samples[:2]]
    same, other = stored("same", samples), stored("other", [*changed, samples[2]])
    assert not any(
        "different prompts" in warning for warning in compare(same, stored("again", samples)).warnings
    )
    [warning] = [warning for warning in compare(same, other).warnings if "different prompts" in warning]
    assert warning.startswith("2 shared questions")
