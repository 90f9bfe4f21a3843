"""A replay's figures equal those of slow loops, for every chunk size; non-finite values affect only their own
rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from rlctl.errors import UsageError
from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.what_if import moments
from rlctl.what_if.dumps import Step
from rlctl.what_if.moments import BLOCKS, CLASSES
from rlctl.what_if.replay import replay
from rlctl.what_if.setting_sums import SettingSums, advantages_of
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
    assert found.raw_ess.value == pytest.approx(raw.sum() ** 2 / len(raw) / (raw**2).sum(), rel=1e-4)
    ess = applied.sum() ** 2 / len(applied) / (applied**2).sum()
    assert found.applied_ess.value == pytest.approx(ess, rel=1e-4)
    assert found.max_weight == pytest.approx(applied.max(), rel=1e-4)
    lowest = 0.0 if bound == "truncate" else low
    assert found.at_bound == pytest.approx(np.mean((raw < lowest) | (raw > high)), abs=1e-9)
    assert found.kept_tokens == 1.0
    assert found.raw_ess.low <= found.raw_ess.value <= found.raw_ess.high


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
    assert found.applied_ess.value == pytest.approx(tokens)  # weights are 0 and 1


def slow_gradients(step: Step, weigh: str) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Centred surrogate gradients by group id, token by token; and the means that centre them."""
    scores, seen = np.zeros((CLASSES, CLASSES)), np.zeros(CLASSES)
    cells = []
    for row, place in enumerate(rows_of(step)):
        before = -1
        ratios = (step.log_probs[place] - step.rollout_log_probs[place]).astype(float)
        for token, log_prob, ratio in zip(step.token_ids[place], step.log_probs[place], ratios, strict=True):
            context, kappa = before % CLASSES, 1.0 - math.exp(log_prob)
            weight = {"none": 1.0, "exact": math.exp(ratios.sum()), "token": min(math.exp(ratio), 2.0)}[weigh]
            cells.append((row, context, int(token) % CLASSES, weight, kappa))
            rho = min(math.exp(ratio), 10.0)
            scores[context, int(token) % CLASSES] += rho * kappa
            seen[context] += rho
            before = int(token)
    mean = scores / np.maximum(seen, 1e-12)[:, None]
    advantage = slow.rloo(step.rewards.tolist(), step.group_ids.tolist(), [True] * len(step.rewards))
    found = {int(g): np.zeros((CLASSES, CLASSES)) for g in step.group_ids}
    for row, context, token, weight, kappa in cells:
        gradient = found[int(step.group_ids[row])]
        gradient[context, token] += weight * advantage[row] * kappa
        gradient[context] -= weight * advantage[row] * mean[context]
    return found, mean


def test_surrogate_gradients_against_a_loop() -> None:
    step = make_step()
    settings = [
        setting("none", rollout_is=None),
        setting("token", rollout_is="token", rollout_is_bound="truncate", rollout_is_batch_normalize=False),
    ]
    sums = SettingSums([one.rules for one in settings])
    sums.add(replace(step, advantages=advantages_of(step, "rloo", [])))
    gradient, exact, noise = sums.moments.centred()
    assert BLOCKS > 12  # every group has a block of its own, in the order of group ids
    for found, weigh in ((gradient[0], "none"), (gradient[1], "token"), (exact, "exact")):
        expected, _ = slow_gradients(step, weigh)
        for group, values in expected.items():
            np.testing.assert_allclose(found[group], values.ravel(), rtol=1e-4, atol=1e-5)
    expected, _ = slow_gradients(step, "none")
    np.testing.assert_allclose(noise[:12], [np.square(expected[g]).sum() for g in range(12)], rtol=1e-4)


def figures(steps: list[Step]) -> dict[str, object]:
    return {o.setting.name: o for o in replay(steps, GRID, groups_per_batch=12).outcomes}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, outcome in one.items():
        for field in ("kept_tokens", "kept_sequences", "max_weight", "at_bound"):
            assert getattr(other[name], field) == pytest.approx(getattr(outcome, field), rel=1e-4), field
        for field in ("raw_ess", "applied_ess", "error"):
            expected = getattr(outcome, field)
            found = getattr(other[name], field)
            assert found.value == pytest.approx(expected.value, rel=1e-4, abs=1e-6), (name, field)
            assert found.high == pytest.approx(expected.high, rel=1e-3, abs=1e-5), (name, field)


@pytest.mark.slow
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [make_step(seed) for seed in range(2)]
    whole = figures(steps)
    monkeypatch.setattr(moments, "CHUNK_TOKENS", 40)
    assert_same(whole, figures(steps))


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
                *(flat[index] for flat in (step.token_ids, step.rollout_log_probs, step.log_probs)),
            )
        )
    assert_same(figures([step]), figures(pieces))


def without(step: Step, rows: np.ndarray) -> Step:
    """The step without these responses; `advantages` must be set."""
    tokens = np.repeat(~rows, step.lengths)
    by_row = {name: getattr(step, name)[~rows] for name in ("group_ids", "rewards", "lengths", "advantages")}
    flat = {name: getattr(step, name)[tokens] for name in ("token_ids", "rollout_log_probs", "log_probs")}
    return Step(step.number, **by_row, **flat)


def test_bad_numbers_cost_their_own_sequence_only() -> None:
    step = make_step()
    step = replace(step, advantages=advantages_of(step, "rloo", []))
    broken = step.log_probs.copy()
    broken[rows_of(step)[5].start] = np.nan
    found = figures([replace(step, log_probs=broken)])
    for name, outcome in figures([without(step, np.arange(48) == 5)]).items():
        assert found[name].raw_ess.value == pytest.approx(outcome.raw_ess.value, rel=1e-5)
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
    assert outcome_of(found, "sequence clip 2.0").applied_ess.value < 1.0
    assert any("no advantage differs" in note for note in found.notes)


def test_one_group_or_responses_without_tokens_tell_nothing() -> None:
    found = replay([make_step(groups=1)], GRID, groups_per_batch=12)
    assert found.recommended is None
    assert any("only one prompt group" in note for note in found.notes)
    step, none = make_step(), np.zeros(0, np.float32)
    empty = replace(
        step, lengths=step.lengths * 0, token_ids=none.astype(int), rollout_log_probs=none, log_probs=none
    )
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


def test_responses_may_begin_with_tokens_that_were_not_sampled() -> None:
    """Tool output, of the class that the surrogate has before the first token."""
    step = make_step()
    step = replace(step, advantages=advantages_of(step, "rloo", []))
    starts = np.cumsum(step.lengths) - step.lengths

    def prefixed(values: np.ndarray, value: float) -> np.ndarray:
        return np.insert(values, starts, np.asarray(value, values.dtype))

    longer = replace(
        step,
        lengths=step.lengths + 1,
        token_ids=prefixed(step.token_ids, CLASSES - 1),
        rollout_log_probs=prefixed(step.rollout_log_probs, -0.1),
        log_probs=prefixed(step.log_probs, -7.0),
        mask=prefixed(np.ones(len(step.token_ids), bool), False),
    )
    assert_same(figures([step]), figures([longer]))


@pytest.mark.parametrize("groups", [5, 40])
def test_equal_groups_leave_no_sampling_error(groups: int) -> None:
    """Every resample is then the sample itself, in blocks of one or two groups too."""
    one = make_step(3, groups=1, size=6)
    flat = (np.tile(x, groups) for x in (one.token_ids, one.rollout_log_probs, one.log_probs))
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
    assert all(outcome.applied_ess.value == 1.0 for outcome in found.outcomes)
