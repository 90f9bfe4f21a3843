"""Dynamic sampling: what the filter and the curriculum do to the expected gradient, by enumeration.

Prompts whose responses are right with different probabilities; every group of n is enumerated. The policy has
one logit per prompt and token, so that a gradient says which prompt it is of.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlctl.algos.estimators import has_spread, spread_probability
from rlctl.batch import Rollouts, TokenLists
from rlctl.engine.ranks import Ranks
from rlctl.reward.build import Reward
from rlctl.reward.protocol import RewardResult, Scorer
from rlctl.spec.load import load_spec
from rlctl.spec.rollout import OverlongSpec
from rlctl.train.filter_groups import DrawnPrompt, _group, draw_next_prompts
from rlctl.train.score_batch import with_advantages
from rlctl.train.step_metrics import batch_sums
from rlctl.train.stream import PromptDraws
from tests.properties.batches import estimate
from tests.unit.train.scored import HORIZON, ROWS, rollouts_of, scored_batch

ONE_RANK = Ranks(0, 1, torch.device("cpu"))

#: Probabilities of three responses per prompt, of which the first is right: easy, medium, hard.
POLICIES = np.array([[0.95, 0.03, 0.02], [0.5, 0.3, 0.2], [0.04, 0.5, 0.46]])
REWARDS = torch.tensor([1.0, 0.0, 0.0])
ESTIMATORS = ["rloo", "grpo"]


@dataclass(frozen=True)
class Enumerated:
    """Of one prompt: probability of a group with spread, and means over groups, each (prompts · 3,)."""

    spread: float
    gradient: np.ndarray  # of the policy gradient's estimate
    spread_gradient: np.ndarray  # the same, over groups with spread alone
    entropy: np.ndarray  # of what every group adds, such as the gradient of an entropy bonus


def enumerated(prompt: int, n: int, estimator: str) -> Enumerated:
    policy, found = POLICIES[prompt], np.zeros(9)
    alive, total = 0.0, np.zeros(9)
    for group in itertools.product(range(3), repeat=n):
        chance = float(np.prod(policy[list(group)]))
        scores, ids = REWARDS[list(group)], torch.zeros(n, dtype=torch.int64)
        valid = torch.ones(n, dtype=torch.bool)
        advantages = estimate(estimator, scores, ids, valid).numpy()
        gradient = np.zeros(9)
        for response, advantage in zip(group, advantages, strict=True):
            score = (np.arange(3) == response) - policy  # ∇ log softmax
            gradient[3 * prompt : 3 * prompt + 3] += advantage * score / n
        total += chance * gradient
        if has_spread(scores, ids, valid).all():
            alive += chance
            found += chance * gradient
        else:
            assert not advantages.any()
    entropy = np.zeros(9)
    entropy[3 * prompt : 3 * prompt + 3] = -policy * (np.log(policy) - (policy * np.log(policy)).sum())
    return Enumerated(alive, total, found / alive, entropy)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("n", [2, 4])
def test_the_filter_only_enlarges_the_step(estimator: str, n: int) -> None:
    """Groups of a filtered batch are drawn from those with spread: prompts by how often theirs have it. Both
    effects cancel: the mean gradient is the plain one over the share of groups with spread."""
    prompts = [enumerated(prompt, n, estimator) for prompt in range(3)]
    plain = np.mean([each.gradient for each in prompts], 0)
    shares = np.array([each.spread for each in prompts])
    filtered = sum(
        share * each.spread_gradient for share, each in zip(shares / shares.sum(), prompts, strict=True)
    )
    np.testing.assert_allclose(filtered, plain / shares.mean(), rtol=1e-6, atol=1e-12)


def test_terms_that_dead_groups_have_too_change_direction() -> None:
    """An entropy bonus (or a KL loss) is then taken mostly on prompts of medium difficulty."""
    prompts = [enumerated(prompt, 4, "rloo") for prompt in range(3)]
    plain = np.mean([each.entropy for each in prompts], 0)
    filtered = sum(each.spread * each.entropy for each in prompts)
    assert cosine(plain, filtered) < 0.9


def measured() -> PromptDraws:
    """An easy, a medium and a hard prompt."""
    draws = PromptDraws()
    for prompt, mean in enumerate((1.0, 0.5, 0.0)):
        draws.note(prompt, mean, 4)
    return draws


def test_a_curriculum_without_its_weights_would_change_direction() -> None:
    chances = [measured().chance(prompt, 4, 0.2) for prompt in range(3)]
    assert chances[0] == chances[2] < 0.6 < chances[1]
    prompts = [enumerated(prompt, 4, "rloo").gradient for prompt in range(3)]
    drawn = np.mean([chance * each for chance, each in zip(chances, prompts, strict=True)], 0)
    assert cosine(np.mean(prompts, 0), drawn) < 0.999


@pytest.mark.slow
def test_prompts_are_drawn_with_the_chance_that_their_advantages_are_divided_by() -> None:
    """So Σ 1/chance over the times that a prompt was drawn tends to the times that it was its turn."""
    dataset = SimpleNamespace(row_at=lambda position, **_: position % 3)
    spec = load_spec([], [], ["algorithm.filter_groups.curriculum=true", "rollout.n=4"]).spec
    draws = measured()
    drawn = draw_next_prompts(SimpleNamespace(spec=spec, train_prompts=dataset), draws, 6000, first=5)
    turns = draws.position / 3
    assert [each.place for each in drawn] == list(range(5, 6005))
    for prompt in range(3):
        chances = [each.chance for each in drawn if each.row == prompt]
        assert set(chances) == {draws.chance(prompt, 4, 0.2)}
        spread = (turns * (1 / chances[0] - 1)) ** 0.5
        assert len(chances) / chances[0] == pytest.approx(turns, abs=4 * spread + 1)


def test_advantages_are_multiplied_by_the_weights_of_their_prompts() -> None:
    scored, algorithm = scored_batch(), load_spec([], [], []).spec.algorithm
    weights = torch.arange(1.0, len(scored.scores) + 1)
    weighted = replace(scored, rollouts=replace(scored.rollouts, prompt_weights=weights))
    plain, found = (with_advantages(each, algorithm, ONE_RANK).advantages for each in (scored, weighted))
    assert plain.any()
    torch.testing.assert_close(found, plain * weights[:, None])


def test_parts_of_a_batch_are_joined_whatever_their_widths() -> None:
    whole = rollouts_of()
    counts = whole.response_mask.int() * 2
    whole = replace(whole, kept=TokenLists(counts, torch.arange(int(counts.sum()), dtype=torch.int32)))
    first, second = whole.pick(slice(0, 3)), whole.pick(slice(3, None))
    length = int(first.response_mask.sum(1).max())
    narrow = replace(
        first,
        **{name: getattr(first, name)[:, : getattr(first, name).shape[1] - whole.responses.shape[1] + length]
           for name in ("input_ids", "attention_mask", "position_ids", "responses", "response_mask",
                        "rollout_log_probs")},
        kept=TokenLists(first.kept.counts[:, :length], first.kept.ids),
    )  # fmt: skip
    joined = Rollouts.joined([narrow, second])
    for name in ("attention_mask", "response_mask", "rollout_log_probs", "group_ids", "prompt_mask"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    mask = whole.attention_mask
    assert torch.equal(joined.input_ids[mask], whole.input_ids[mask])
    assert torch.equal(joined.kept.counts, counts)
    assert torch.equal(joined.kept.ids, whole.kept.ids)
    assert joined.prompt_texts == whole.prompt_texts


@pytest.mark.parametrize("score", [0.0, 1.0, 1 / 3, 0.1, 1e-3, -0.7])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_groups_are_compared_without_the_length_penalty(score: float, factor: float) -> None:
    """Equal grades have no spread, however long the responses are; unequal ones have."""
    terms = {"first": (0.7, Worth(score)), "second": (0.2, Worth(score))}
    reward = Reward(terms, OverlongSpec(buffer_length=4, penalty_factor=factor), HORIZON)
    for words in ("a" * ROWS, "aabbabaabaab"):
        rollouts, is_mixed = replace(rollouts_of(), response_texts=tuple(words)), "b" in words
        graded = reward.score(rollouts)
        assert graded.scores.unique().numel() > 2  # the penalties differ
        group = _group(DrawnPrompt(0, 0, 1.0), rollouts, graded)
        assert group.has_spread == is_mixed
        assert group.mean == pytest.approx(0.9 * (score + 0.25 * words.count("b") / ROWS), abs=1e-6)
        scored = replace(scored_batch(), rollouts=rollouts, scores=graded.scores)
        batch = with_advantages(scored, load_spec([], [], []).spec.algorithm, ONE_RANK)
        sums = batch_sums(scored, batch, graded, 0, 99).to_host()
        assert sums.flat_groups == pytest.approx(0.0 if is_mixed else sums.groups)
        halves = [graded.pick(slice(0, 6)), graded.pick(slice(6, None))]
        assert torch.equal(RewardResult.joined(halves).graded, graded.graded)


class Worth(Scorer):
    """`b` is worth 0.25 more than any other response."""

    def __init__(self, score: float) -> None:
        self._score = score

    def grade(self, samples) -> list[float]:
        return [self._score + 0.25 * (sample.response == "b") for sample in samples]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_probability_of_a_live_group(n: int) -> None:
    for rate in (0.0, 0.1, 0.5, 1.0):
        each = [np.prod([rate if r else 1 - rate for r in g]) for g in itertools.product((0, 1), repeat=n)]
        mixed = sum(
            p for p, g in zip(each, itertools.product((0, 1), repeat=n), strict=True) if len(set(g)) > 1
        )
        assert spread_probability(rate, n) == pytest.approx(mixed)


def test_a_prompt_that_was_never_tried_is_never_passed_over(tmp_path) -> None:
    draws = PromptDraws()
    assert draws.chance(3, 4, 0.2) == 1.0
    draws.note(3, 0.0, 4)
    assert draws.chance(3, 4, 0.2) == 1.0  # no other score is known: 0 may be all there is
    draws.note(4, 1.0, 4)
    assert draws.chance(3, 4, 0.2) == pytest.approx(spread_probability(1 / 6, 4))
    assert draws.chance(3, 2, 0.9) == 0.9
    draws.position = 17
    draws.save(tmp_path / "prompts.json")
    assert PromptDraws.load(tmp_path / "prompts.json") == draws
