"""`benchmarks/studies/gradients`: exact moments by brute force, resumption, pinned figures, the command."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch

from benchmarks.studies.gradients import measure as bench
from benchmarks.studies.gradients.__main__ import main, rule_of
from benchmarks.studies.gradients.exact import BenchRule, ess_against_length
from benchmarks.studies.gradients.learned import LearnedWorld, length_shares
from benchmarks.studies.gradients.report import (
    SHOWN,
    _bounds,
    decision_table,
    error_of,
    markdown,
    picture,
    worlds_to_separate,
)
from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA
from tests.properties.padded_batches import corrected

#: Of the small part with two worlds of each kind.
PINNED = "1576ff5be8d72c10d8340992eeb08cc356b620e3344d6abc3c8cff179b148956"
#: Of the learned world in it: sampled groups, so a change of what is drawn shows too.
PINNED_LEARNED = "5f1ea2655198ebef422995f4af3aeedf345c24571bc123d32c2cd92ba62182bc"
PLACE = bench.BenchPlace("KL", horizon=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("bench")
    found = list(bench.measured(directory, bench.rules(small=True), bench.places(small=True), 2))
    assert all(is_new for _, is_new in found)
    return [row for row, _ in found]


@pytest.mark.slow
def test_figures_are_pinned(small) -> None:
    learned = [row for row in small if row["axis"] == "learned"]
    assert bench.digest([row for row in small if row not in learned]) == PINNED
    assert bench.digest(learned) == PINNED_LEARNED


@pytest.mark.slow
def test_exact_weights_have_no_bias_and_every_rule_has_less_than_none_at_all(small) -> None:
    small = [row for row in small if row["axis"] != "learned"]  # those are sampled
    exact = [row for row in small if row["rule"] == "exact"]
    assert all(row["distance"] < 1e-12 * row["signal"] for row in exact)
    none = {(row["place"], row["seed"]): row for row in small if row["rule"] == "no correction"}
    assert all(row["distance"] > 1e-4 * row["signal"] for row in none.values())
    for row in small:
        if row["rule"] == "prefix, no bound":
            assert row["distance"] < none[row["place"], row["seed"]]["distance"]


@pytest.mark.parametrize("rule", [BenchRule.of(rollout_is="token"), BenchRule.of(loss_type="p3o")])
def test_moments_are_those_of_all_groups_of_two(rule: BenchRule) -> None:
    """Every pair of responses to a prompt, drawn by the sampler, with RLOO's advantages."""
    world = PLACE.world(0)
    mean, square = 0.0, 0.0
    for prompt in range(world.num_prompts):
        share = world.rollout[prompt] / world.rollout[prompt].sum()
        by_k = np.einsum("ykt,ytp->ykp", world.token_factors(rule, 2, prompt), world.scores[prompt])
        rewards = world.rewards[prompt].astype(int)
        for i, j in itertools.product(range(len(share)), repeat=2):
            group = 0.5 * (by_k[i, rewards[j]] + by_k[j, rewards[i]])
            mean = mean + share[i] * share[j] * group / world.num_prompts
            square = square + share[i] * share[j] * group @ group / world.num_prompts
    found = world.moments(rule, 2)
    assert found.norm == pytest.approx(mean @ mean, rel=1e-9)
    assert found.noise == pytest.approx(square - mean @ mean, rel=1e-9)


def test_factors_are_the_weights() -> None:
    world, rule = PLACE.world(1), BenchRule.of(rollout_is="token", rollout_is_threshold="1.2")
    found = world.token_factors(rule, 3, 0)
    mask = torch.from_numpy(world.mask)
    given = (torch.from_numpy(x[0]) for x in (world.log_probs, world.rollout_log_probs))
    weights = corrected(*given, mask, rule.correction).weights
    for k in range(3):
        advantage = (world.rewards[0] - k / 2)[:, None]
        np.testing.assert_allclose(found[:, k], advantage * np.where(world.mask, weights, 0.0), rtol=1e-6)


@pytest.mark.parametrize("listed", [3, 4])
def test_score_centering_takes_the_mean_of_every_prefix_away(listed: int) -> None:
    """Against averages over the responses that share a prefix; three of four tokens give the fourth."""
    world, n = PLACE.world(2), 3
    rule = BenchRule.of(rollout_is=None, score_centering=listed)
    mean = 0.0
    for prompt in range(world.num_prompts):
        share = world.rollout[prompt] / world.rollout[prompt].sum()
        rewards, scores = world.rewards[prompt], world.scores[prompt]
        success = share @ rewards
        for y, t in zip(*world.mask.nonzero(), strict=True):
            alike = world.mask[:, t] & (world.ids[:, :t] == world.ids[y, :t]).all(1)
            expected = share[alike] @ scores[alike, t] / share[alike].sum()
            mean = mean + share[y] * (rewards[y] - success) * (scores[y, t] - expected) / world.num_prompts
    found = world.moments(rule, n)
    assert found.norm == pytest.approx(mean @ mean, rel=1e-6)
    assert found.norm != pytest.approx(world.moments(BenchRule.of(rollout_is=None), n).norm, rel=1e-3)


def test_exact_token_weights_have_no_expected_score_to_subtract() -> None:
    exact = {"rollout_is": "token", "rollout_is_bound": "truncate", "rollout_is_threshold": "1e9"}
    for world in (PLACE.world(3), LearnedWorld(1, "noise", 0.1, 16)):
        bare, centered = (
            world.moments(BenchRule.of(**exact, **more), 4).as_json() for more in ({}, {"score_centering": 4})
        )
        assert centered == pytest.approx(bare, rel=1e-5)


def test_a_learned_world_subtracts_the_expected_score() -> None:
    """Of one group, by hand, with respect to the logits of each context."""
    world = LearnedWorld(2, "noise", 0.3, 16)
    drawn = world.sample(2, 3)
    bare, centered = (
        world.group_gradients(BenchRule.of(rollout_is=None, **more), drawn, 2)
        for more in ({}, {"score_centering": 4})
    )
    expected = np.zeros((3, *world.train.shape))
    for row, t in zip(*drawn.mask.nonzero(), strict=True):
        context = drawn.contexts[row, t]
        gap = np.exp(world.rollout[context]) - np.exp(world.train[context])
        expected[row // 2, context] += drawn.advantages[row] * gap / 2
    np.testing.assert_allclose(bare - centered, expected.reshape(3, -1), atol=1e-6)


def test_every_registered_part_is_measured() -> None:
    specs = [rule.spec for rule in bench.rules().values()]
    assert {spec.rollout_is for spec in specs} >= set(CORRECTION_WEIGHTS)
    assert {spec.loss_type for spec in specs} == set(POLICY_LOSSES)
    criteria = {name for name in REJECTION_CRITERIA if name not in {"ratio", "k1", "k2", "k3", "age"}}
    assert {spec.rollout_rs for spec in specs} >= criteria


def test_an_interrupted_bench_goes_on(tmp_path) -> None:
    rules = dict(list(bench.rules(small=True).items())[:3])
    whole = [row for row, _ in bench.measured(tmp_path / "whole", rules, [PLACE], 2)]
    part = tmp_path / "part"
    half = bench.measured(part, rules, [PLACE], 2)
    for _ in range(4):
        next(half)
    half.close()
    with (part / "results.jsonl").open("a") as file:
        file.write('{"rule": "cut o')
    again = list(bench.measured(part, rules, [PLACE], 2))
    assert [is_new for _, is_new in again] == [False] * 4 + [True] * 2
    assert bench.digest([row for row, _ in again]) == bench.digest(whole)
    assert all(not is_new for _, is_new in bench.measured(part, rules, [PLACE], 2))


def test_a_learned_world_is_exact_where_it_says_so() -> None:
    """Its gradient against finite differences, its effective sample size against all responses."""
    world = LearnedWorld(0, "noise", 0.5, 4)
    for place in np.ndindex(*world.train.shape):
        shifted = [world.train.copy(), world.train.copy()]
        shifted[0][place] += 1e-5
        shifted[1][place] -= 1e-5
        high, low = (world.expected(logits)[0] for logits in shifted)
        assert (high - low) / 2e-5 == pytest.approx(
            world.gradient.reshape(world.train.shape)[place], abs=1e-8
        )
    squares, masses = np.zeros(2), np.zeros(2)
    responses = [
        [*body, *end]
        for length in range(5)
        for body in itertools.product((1, 2, 3), repeat=length)
        for end in ([[0]] if length < 4 else [[]])
    ]
    for prompt, tokens in itertools.product(range(2), responses):
        before, ratio = 3, np.zeros(2)
        for t, token in enumerate(tokens):
            context = (prompt * 4 + t) * 4 + before
            ratio += world.train[context, token], world.rollout[context, token]
            before = token
        masses[prompt] += np.exp(ratio[1])
        squares[prompt] += np.exp(2 * ratio[0] - ratio[1])
    np.testing.assert_allclose(masses, 1.0)
    assert world.ess == pytest.approx(np.mean(1.0 / squares))


def test_exact_weights_give_a_learned_world_its_gradient() -> None:
    world = LearnedWorld(1, "noise", 0.1, 16)
    exact = world.moments(bench.rules(small=True)["exact"], 8)
    assert exact.cosine == pytest.approx(1.0, abs=0.03)
    assert exact.inner / exact.signal == pytest.approx(1.0, abs=0.1)
    none = world.moments(bench.rules(small=True)["no correction"], 8)
    assert none.noise < exact.noise
    stale = LearnedWorld(1, "stale", 4, 16)
    assert LearnedWorld(1, "stale", 1, 16).ess > stale.ess > 0.0


def test_what_is_trained_on_has_another_length() -> None:
    """Weights give the policy's own mean length back; who does not wait takes short responses."""
    shares = length_shares("stale", 4, 32, 0)
    assert shares["weighted by Π ρ"] == pytest.approx(1.0, abs=0.02)
    assert shares["first half to finish"] < 0.95 < shares["unchanged"]
    same = length_shares("noise", 0.0, 16, 0)
    assert all(same[name] == pytest.approx(1.0) for name in list(same)[:-1])


def test_how_many_worlds_tell_two_rules_apart() -> None:
    draws = np.random.default_rng(0).normal(0.5, 1.0, 100_000)
    assert worlds_to_separate(draws) == "32"  # (1.96 + 0.84)² / 0.5²
    assert worlds_to_separate(draws - draws.mean()) == "over 10,000"
    assert worlds_to_separate(np.array([0.2])) == "—"


def test_length_and_ess() -> None:
    found = ess_against_length(0.1, [1, 10, 100])
    assert found[100][0] == pytest.approx(found[1][0] ** 100)
    assert found[10][1] == pytest.approx(found[10][0], rel=0.05)
    near, far = (bench.BenchPlace("KL", size=size).world(0) for size in (0.05, 1.2))
    assert near.ess > 0.99 > far.ess


@pytest.mark.slow
def test_reports(small) -> None:
    text = markdown(small)
    for title in ("what to use", "by place", "every rule", "number of seeds needed to distinguish two rules"):
        assert f"## Enumerated worlds: {title}" in text
        assert f"## Learned worlds: {title}" in text
    assert "## Effective sample size against length" in text
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:200]
    best = min(small, key=lambda row: error_of(row, 512))
    assert 0.0 <= error_of(best, 512) < error_of(best, 8) <= 1.0
    drawing = picture(small)
    assert drawing.count("<polyline") == 4 * len(SHOWN)  # along one axis
    assert picture([row for row in small if row["is_learned"]]) == ""


def rows_of(errors: dict[str, list[list[float]]]) -> list[dict]:
    """By rule, seed and place: rows without noise whose error is as given."""
    return [
        {
            "rule": rule, "place": f"place {place}", "seed": seed, "ess": 0.95, "is_learned": False,
            "inner": (1.0 - error) ** 0.5, "norm": 1.0, "signal": 1.0, "distance": 0.0, "noise": 0.0,
        }
        for rule, by_seed in errors.items()
        for seed, by_place in enumerate(by_seed)
        for place, error in enumerate(by_place)
    ]  # fmt: skip


def test_intervals_draw_whole_seeds() -> None:
    """Twenty places of four seeds are four independent figures: the interval is as wide as of the seeds."""
    seeds = [0.1, 0.2, 0.3, 0.4]
    table = decision_table(rows_of({"one": [[error] * 20 for error in seeds]}), best=1)
    low, high = (float(x) for x in table.splitlines()[2].split("(")[1].split(")")[0].split("–"))
    assert "0.250" in table
    assert high - low == pytest.approx(2 * 2.353 * np.std(seeds, ddof=1) / 2, abs=2e-3)  # t of 3 degrees
    alone = decision_table(rows_of({"one": [[0.2, 0.3]]}), best=1)
    assert "`one` 0.250 |" in alone


@pytest.mark.parametrize("num_seeds", [5, 8])
@pytest.mark.parametrize(("spread", "least"), [(0.0, 0.89), (0.5, 0.86)])
def test_the_interval_covers_as_often_as_it_says(num_seeds: int, spread: float, least: float) -> None:
    """Of 2,000 studies; three worlds of a seed share most of their deviation. `spread` 0: normal figures."""
    draw = np.random.default_rng(num_seeds)
    covered = 0
    for _ in range(2000):
        shared = draw.normal(size=num_seeds)
        figures = {
            (f"world {place}", seed): float(np.exp(spread * x) if spread else x)
            for seed, shift in enumerate(shared)
            for place, x in enumerate(shift + 0.3 * draw.normal(size=3))
        }
        low, high = _bounds(figures)
        covered += low <= (np.exp(0.5 * spread**2 * 1.09) if spread else 0.0) <= high
    assert least <= covered / 2000 <= 0.92  # 0.9 ± three standard errors


def test_rules_as_good_as_the_best_are_counted_in_pairs() -> None:
    """`near` is worse on one seed and better on others; `worse` by little, but on every seed."""
    errors = {
        "best": [[0.1], [0.3], [0.5], [0.7]],
        "near": [[0.2], [0.29], [0.49], [0.69]],
        "worse": [[0.11], [0.32], [0.52], [0.71]],
    }
    row = decision_table(rows_of(errors), best=1).splitlines()[2]
    assert "`best`" in row
    assert "| 1 of 2 |" in row


@pytest.mark.slow
def test_the_command_takes_a_rule_of_ones_own(tmp_path, capsys) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def root(log_ratio, params):\n    return 0.5 * log_ratio.token\n")
    out = tmp_path / "out"
    rule = f"rollout_is={mine}:root rollout_is_threshold=9"
    arguments = ["--out", str(out), "--small", "--only", "--seeds", "1"]
    assert main([*arguments, "--rule", rule]) == 0
    assert "8 measurements, 8 of them new" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["rule"] for row in rows} == {"no correction", rule}
    assert (out / "error.svg").read_text().startswith("<svg")
    assert main([*arguments, "--rule", rule]) == 0
    assert "0 of them new" in capsys.readouterr().out
    mine.write_text("def root(log_ratio, params):\n    return 0.25 * log_ratio.token\n")
    assert main([*arguments, "--rule", rule]) == 0
    assert "4 of them new" in capsys.readouterr().out


def test_a_rule_may_have_parameters() -> None:
    rule = rule_of("rollout_is=selective rollout_is_params.bound=0.5")
    assert rule.correction.weight.params.bound == 0.5


def test_measurements_of_another_version_are_repeated(tmp_path, monkeypatch) -> None:
    rules = dict(list(bench.rules(small=True).items())[:2])
    assert all(is_new for _, is_new in bench.measured(tmp_path, rules, [PLACE], 1))
    monkeypatch.setattr(bench, "version", lambda _name: "9.9")
    assert all(is_new for _, is_new in bench.measured(tmp_path, rules, [PLACE], 1))
    assert not any(is_new for _, is_new in bench.measured(tmp_path, rules, [PLACE], 1))


@pytest.mark.parametrize(
    "rule",
    [
        "rollout_is",
        "rollout_is=nothing",
        "rollout_rs=kpop",
        "loss_type=dro loss_params=3",
        'rollout_is="token',
        "a=b",
        "rollout_is=sequence score_centering=4",
    ],
)
def test_a_wrong_rule_is_a_usage_error(tmp_path, capsys, rule: str) -> None:
    assert main(["--out", str(tmp_path), "--small", "--rule", rule]) == 2
    err = capsys.readouterr().err
    assert "--rule" in err or "algorithm.rollout_correction." in err
    assert "warning" not in err


@pytest.mark.parametrize("content", ["no JSON\n", '{"rule": "exact"}\n', "[1]\n", None])
def test_an_output_that_cannot_hold_measurements_is_a_usage_error(tmp_path, capsys, content) -> None:
    out = tmp_path / "out"
    if content is None:
        out.touch()
    else:
        out.mkdir()
        (out / "results.jsonl").write_text(content)
    assert main(["--out", str(out), "--small", "--seeds", "1"]) == 2
    assert "choose another directory with --out" in capsys.readouterr().err
