"""A replay's figures equal those of slow loops; non-finite values affect only their own rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from rlctl.errors import UsageError
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.what_if.dumps import Step
from rlctl.what_if.replay import replay
from rlctl.what_if.setting_sums import advantages_of
from rlctl.what_if.settings import Setting, grid
from tests.reference import advantages as slow
from tests.unit.what_if.steps import make_step, outcome_of

GRID = grid()[::6]


def setting(name: str = "tried", **fields: object) -> Setting:
    return Setting(name, "rlctl", RolloutCorrectionSpec(**fields))


def rows_of(step: Step) -> list[slice]:
    ends = np.cumsum(step.lengths)
    return [slice(int(end - n), int(end)) for n, end in zip(step.lengths, ends, strict=True)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("level", "bound"), itertools.product(["token", "sequence", "geometric"], ["clip", "truncate", "mask"])
)
def test_weights_against_a_loop(level: str, bound: str, normalize: bool) -> None:
    step, low, high = make_step(), 0.5, 2.0
    tried = setting(rollout_is=level, rollout_is_bound=bound, rollout_is_batch_normalize=normalize)
    found = outcome_of(replay([step], [tried], groups_per_batch=12), "tried")
    raw, applied = [], []
    for place in rows_of(step):
        ratios = (step.log_probs[place] - step.rollout_log_probs[place]).astype(float)
        if len(ratios) == 0:
            continue
        total = ratios.sum() if level == "sequence" else ratios.mean()
        for r in ratios if level == "token" else [total]:
            w = math.exp(r)
            raw.append(w)
            if bound == "mask":
                applied.append(w if low <= w <= high else 0.0)
            else:
                applied.append(min(max(w, low if bound == "clip" else 0.0), high))
    raw, applied = np.array(raw), np.array(applied)
    applied = applied / applied.mean() if normalize else applied
    assert found.raw_ess == pytest.approx(raw.sum() ** 2 / len(raw) / (raw**2).sum(), rel=1e-4)
    ess = applied.sum() ** 2 / len(applied) / (applied**2).sum()
    assert found.applied_ess == pytest.approx(ess, rel=1e-4)
    assert found.max_weight == pytest.approx(applied.max(), rel=1e-4)
    lowest = 0.0 if bound == "truncate" else low
    assert found.at_bound == pytest.approx(np.mean((raw < lowest) | (raw > high)), abs=1e-9)
    assert found.kept_tokens == 1.0


def test_rejection_against_a_loop() -> None:
    step = make_step()
    tried = setting(rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.6")
    found = outcome_of(replay([step], [tried], groups_per_batch=12), "tried")
    kept = [
        bool(((r := np.exp(step.log_probs[p] - step.rollout_log_probs[p])) >= 0.6).all() and (r <= 1.6).all())
        for p in rows_of(step)
    ]
    tokens = step.lengths[kept].sum() / step.lengths.sum()
    nonempty = step.lengths > 0
    assert found.kept_tokens == pytest.approx(tokens)
    assert found.kept_sequences == pytest.approx(np.array(kept)[nonempty].mean())
    assert found.applied_ess == pytest.approx(tokens)  # weights are 0 and 1


def slow_error(step: Step, weigh: str, groups: int) -> float:
    """The error of a setting, token by token, from the formulas of docs/how-to/what-if.md."""
    there = (step.lengths > 0).tolist()
    advantage = slow.rloo(step.rewards.tolist(), step.group_ids.tolist(), there)
    products = 0.0
    tokens, episodes, cells = 0, 0, []
    for row, place in enumerate(rows_of(step)):
        ratios = (step.log_probs[place] - step.rollout_log_probs[place]).astype(float)
        if len(ratios):
            product = math.exp(ratios.sum())
            tokens, episodes, products = tokens + len(ratios), episodes + 1, products + product
            for log_prob, ratio in zip(step.log_probs[place].astype(float), ratios, strict=True):
                weight = {"none": 1.0, "token": min(math.exp(ratio), 2.0), "exact": product}[weigh]
                energy = (advantage[row] * (1.0 - math.exp(log_prob))) ** 2
                cells.append((weight, product, energy))
    mean = products / episodes
    kept = sum(w * e for w, _, e in cells)
    full = sum(product / mean * e for _, product, e in cells)
    squares = sum(w * w * e for w, _, e in cells)
    share = kept / full
    # The unevenness under half of each policy: a token has the mass ½(1 + W) relative to the sampler.
    uneven = (
        sum(2.0 / (1.0 + product) * (w - share / mean * product) ** 2 * e for w, product, e in cells) / full
    )
    total = min(1.0, 2.0 * episodes / tokens) * uneven / share**2 + 10.0 / groups * squares / full / share**2
    return total / (1.0 + total)


@pytest.mark.parametrize("groups", [4, 400])
def test_errors_against_a_loop(groups: int) -> None:
    step = make_step()
    plain = {"rollout_is_batch_normalize": False, "rollout_is_bound": "truncate"}
    settings = [
        setting("none", rollout_is=None),
        setting("token", rollout_is="token", **plain),
        setting("exact", rollout_is="sequence", rollout_is_threshold="1e9", **plain),
    ]
    found = replay([step], settings, groups_per_batch=groups)
    for name in ("none", "token", "exact"):
        expected = slow_error(step, name, groups)
        assert outcome_of(found, name).error.value == pytest.approx(expected, rel=1e-4), name
    assert slow_error(step, "exact", 10**9) == pytest.approx(0.0, abs=1e-6)


def figures(steps: list[Step]) -> dict[str, object]:
    return {o.setting.name: o for o in replay(steps, GRID, groups_per_batch=12).outcomes}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, outcome in one.items():
        for field in ("raw_ess", "applied_ess", "kept_tokens", "kept_sequences", "max_weight", "at_bound"):
            assert getattr(other[name], field) == pytest.approx(getattr(outcome, field), rel=1e-4), field
        assert other[name].error.value == pytest.approx(outcome.error.value, rel=1e-4, abs=1e-6), name
        assert other[name].error.high == pytest.approx(outcome.error.high, rel=1e-3, abs=1e-5), name


def test_steps_of_few_rows_are_pooled_into_a_mini_batch() -> None:
    step = make_step()
    pieces = []
    for number in range(3):
        rows = np.flatnonzero(np.isin(step.group_ids, range(4 * number, 4 * number + 4)))
        index = np.concatenate([np.arange(p.start, p.stop) for p in np.array(rows_of(step), object)[rows]])
        pieces.append(
            Step(
                number,
                step.group_ids[rows],
                step.rewards[rows],
                step.lengths[rows],
                *(flat[index] for flat in (step.rollout_log_probs, step.log_probs)),
            )
        )
    assert_same(figures([step]), figures(pieces))


def without(step: Step, rows: np.ndarray) -> Step:
    """The step without these responses; `advantages` must be set."""
    tokens = np.repeat(~rows, step.lengths)
    by_row = {name: getattr(step, name)[~rows] for name in ("group_ids", "rewards", "lengths", "advantages")}
    flat = {name: getattr(step, name)[tokens] for name in ("rollout_log_probs", "log_probs")}
    return Step(step.number, **by_row, **flat)


def test_bad_numbers_cost_their_own_sequence_only() -> None:
    step = make_step()
    step = replace(step, advantages=advantages_of(step, "rloo", []))
    broken = step.log_probs.copy()
    broken[rows_of(step)[5].start] = np.nan
    found = figures([replace(step, log_probs=broken)])
    for name, outcome in figures([without(step, np.arange(48) == 5)]).items():
        assert found[name].raw_ess == pytest.approx(outcome.raw_ess, rel=1e-5)
        assert found[name].error.value == pytest.approx(outcome.error.value, rel=1e-4, abs=1e-6)
        assert math.isfinite(found[name].error.high)


@pytest.mark.parametrize("which", ["one response", "two groups"])
def test_responses_that_were_not_graded_count_nowhere(which: str) -> None:
    """As in training, whatever their log-probs and advantages are."""
    step = make_step()
    rows = np.arange(48) == 5 if which == "one response" else step.group_ids < 2
    step = replace(step, rewards=np.where(rows, np.nan, step.rewards))
    step = replace(step, advantages=advantages_of(step, "rloo", []))
    expected = figures([without(step, rows)])
    step.log_probs[np.repeat(rows, step.lengths)] -= np.float32(3.0)
    step.advantages[rows] = 2.0
    assert_same(expected, figures([step]))


def test_nothing_finite_is_said() -> None:
    step = make_step()
    with pytest.raises(UsageError, match="no response with finite log-probs"):
        replay([replace(step, log_probs=np.full_like(step.log_probs, np.nan))], GRID, groups_per_batch=12)
    with pytest.raises(UsageError, match="no response"):
        replay([], GRID, groups_per_batch=12)


def test_without_any_advantage_nothing_is_recommended() -> None:
    step = make_step()
    found = replay([replace(step, rewards=np.ones_like(step.rewards))], GRID, groups_per_batch=12)
    assert found.recommended is None
    assert outcome_of(found, "none").error is None
    assert outcome_of(found, "sequence clip 2.0").applied_ess < 1.0
    assert any("no advantage differs" in note for note in found.notes)


def test_one_group_or_responses_without_tokens_tell_nothing() -> None:
    found = replay([make_step(groups=1)], GRID, groups_per_batch=12)
    assert found.recommended is None
    assert any("only one prompt group" in note for note in found.notes)
    step, none = make_step(), np.zeros(0, np.float32)
    empty = replace(step, lengths=step.lengths * 0, rollout_log_probs=none, log_probs=none)
    assert_same(figures([step]), figures([empty, step]))
    with pytest.raises(UsageError, match="no response"):
        replay([empty], GRID, groups_per_batch=12)


def test_a_setting_that_keeps_nothing_misses_everything() -> None:
    nothing = setting("nothing", rollout_is=None, rollout_rs="seq_max_k2", rollout_rs_threshold="1.0")
    step = make_step()
    ahead = step.rollout_log_probs + np.float32(0.1)
    found = replay([replace(step, log_probs=ahead)], [*GRID, nothing], groups_per_batch=12)
    assert outcome_of(found, "nothing").kept_tokens == 0.0
    assert outcome_of(found, "nothing").error.value == pytest.approx(1.0, abs=1e-5)
    assert found.recommended.name != "nothing"


def test_one_response_per_prompt_is_compared_with_the_step() -> None:
    step = replace(make_step(), group_ids=np.arange(48))
    found = replay([step], GRID, groups_per_batch=12)
    assert found.recommended is not None
    assert any("minus the step's mean" in note for note in found.notes)


def divided(step: Step) -> Step:
    """Pairs of siblings as one episode of two sequences, the second one of two turns where it can be."""
    order = np.argsort(step.group_ids, kind="stable")
    places = [np.arange(p.start, p.stop) for p in np.array(rows_of(step), object)[order]]
    tokens, lengths = np.concatenate(places), step.lengths[order]
    turns = [
        part for place, n in enumerate(lengths) for part in ((1, n - 1) if place % 2 and n > 1 else (n,))
    ]
    return Step(
        step.number,
        step.group_ids[order][::2],
        step.rewards[order][::2],
        lengths.reshape(-1, 2).sum(1),
        step.rollout_log_probs[tokens],
        step.log_probs[tokens],
        sequence_lengths=lengths,
        turn_lengths=np.array([n for n in turns if n]),
    )


def test_levels_are_turns_and_episodes() -> None:
    """A weight of a level has its effective sample size over the segments of this level."""
    step = divided(make_step())
    gap = (step.log_probs - step.rollout_log_probs).astype(float)
    for level, lengths in (
        ("turn", step.turn_lengths),
        ("sequence", step.lengths),
        ("episode", step.lengths),
    ):
        edges = np.cumsum(lengths) - lengths
        weights = np.exp(np.add.reduceat(gap, edges[lengths > 0]))
        found = outcome_of(replay([step], [setting(rollout_is=level)], groups_per_batch=12), "tried")
        expected = weights.sum() ** 2 / len(weights) / (weights**2).sum()
        assert found.raw_ess == pytest.approx(expected, rel=1e-4), level


@pytest.mark.parametrize("groups", [5, 40])
def test_equal_groups_leave_no_sampling_error(groups: int) -> None:
    """Every resample is then the sample itself, in blocks of one or two groups too."""
    one = make_step(3, groups=1, size=6)
    flat = (np.tile(x, groups) for x in (one.rollout_log_probs, one.log_probs))
    rows = (np.tile(x, groups) for x in (one.rewards, one.lengths))
    step = Step(1, np.arange(groups).repeat(6), *rows, *flat)
    for outcome in replay([step], GRID, groups_per_batch=8).outcomes:
        found = outcome.error
        assert (found.low, found.high) == pytest.approx((found.value, found.value), rel=1e-9, abs=1e-12)


def test_equal_policies_need_nothing() -> None:
    step = make_step()
    found = replay([replace(step, rollout_log_probs=step.log_probs)], GRID, groups_per_batch=12)
    errors = [outcome.error.value for outcome in found.outcomes]
    assert errors == pytest.approx([errors[0]] * len(errors), rel=1e-5)
    assert all(outcome.applied_ess == 1.0 for outcome in found.outcomes)
