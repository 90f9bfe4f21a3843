"""From grades to rewards: which token gets the score, which greedy response a response is compared with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlctl.batch import FINISH_REASONS, ModelInputs, Rollouts, ScoredBatch, TrainBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.errors import RunFailure
from rlctl.reward.protocol import RewardResult
from rlctl.spec.load import load_spec
from rlctl.spec.run_spec import RunSpec
from rlctl.train.sample_and_grade import greedy_baseline
from rlctl.train.score_batch import score_batch, with_advantages
from rlctl.train.step_metrics import StepTimer, batch_metrics, batch_sums
from tests.unit.train.scored import GROUPS, HORIZON, ROWS, rollouts_of
from tests.unit.train.updates import alone

#: Responses of full, partial and no length; tool output in the middle, at the end, at the start; one token.
MASKS = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 1, 0, 0, 0, 1],
    [0, 0, 1, 1, 0, 0],
    [1, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 1],
    [1, 0, 1, 0, 1, 0],
    [1, 1, 1, 1, 1, 0],
    [0, 1, 0, 0, 0, 0],
    [1, 0, 1, 1, 1, 1],
]
LAST = [5, 2, None, 4, 5, 3, 0, 5, 4, 4, 1, 5]
SCORES = torch.arange(1.0, ROWS + 1.0)
EVERYONE = torch.ones(ROWS, dtype=torch.bool)


def spec_of(estimator: str, *overrides: str) -> RunSpec:
    return load_spec([], [], [f"algorithm.adv_estimator={estimator}", *overrides]).spec


def said(scale: float, asked: list[ModelInputs] | None = None):
    """A model whose answer is different for every token."""

    def answer(batch: ModelInputs) -> Tensor:
        if asked is not None:
            asked.append(batch)
        return scale * (batch.responses + 0.1 * torch.arange(HORIZON)) * batch.scored

    return answer


def run_of(spec: RunSpec, **models: object) -> SimpleNamespace:
    def policy(batch: ModelInputs, *, sum_pi_squared: bool = False, **_: object) -> PolicyOutput:
        log_probs = said(-0.1)(batch)
        return PolicyOutput(log_probs, log_probs, said(0.01)(batch) if sum_pi_squared else None)

    known = {"actor": SimpleNamespace(policy=policy), "ref": None, "critic": None, "ranks": alone()}
    return SimpleNamespace(spec=spec, **(known | models))


def timer() -> StepTimer:
    return StepTimer(torch.device("cpu"))


def rollouts() -> Rollouts:
    found = rollouts_of()
    mask = torch.tensor(MASKS, dtype=torch.bool)
    return replace(found, response_mask=mask, rollout_log_probs=-0.5 * mask)


def scored_by(
    spec: RunSpec, scores: Tensor = SCORES, valid: Tensor = EVERYONE, baseline: RewardResult | None = None
) -> ScoredBatch:
    return score_batch(run_of(spec), rollouts(), RewardResult(scores, valid), baseline, timer())


# --- position of the score ---------------------------------------------------------------------------


def test_the_score_is_the_reward_of_the_last_token_sampled() -> None:
    rewards = scored_by(spec_of("rloo")).token_level_rewards
    expected = torch.zeros(ROWS, HORIZON)
    for row, place in enumerate(LAST):
        if place is not None:
            expected[row, place] = SCORES[row]
    assert torch.equal(rewards, expected)


def test_a_response_that_the_engine_ended_is_excluded() -> None:
    """It is neither the policy's whole answer nor cut at the limit: its score is undefined, not 0."""
    spec = spec_of("rloo")
    reason = torch.zeros(ROWS, dtype=torch.int8)
    reason[2] = FINISH_REASONS.index("abort")
    ended = replace(rollouts(), finish_reason=reason)
    graded = RewardResult(SCORES, EVERYONE)
    scored = score_batch(run_of(spec), ended, graded, None, timer())
    assert scored.score_valid.tolist() == [row != 2 for row in range(ROWS)]
    batch = with_advantages(scored, spec.algorithm, alone())
    longest = int(ended.prompt_mask.sum(-1).max())
    metrics = batch_metrics(batch_sums(scored, batch, graded, 0, longest).to_host(), compares_siblings=True)
    share = (ended.prompt_mask.sum(-1) == longest).float().mean().item()
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(share)
    assert metrics["response/num_aborted"] == 1
    assert metrics["reward/num_errors"] == 0  # the grader did not fail


def test_whole_responses_are_compared_by_their_scores() -> None:
    """A score on every token would multiply the advantage by the length."""
    scored = scored_by(spec_of("rloo"))
    found = with_advantages(scored, spec_of("rloo").algorithm, alone()).advantages
    for row, mask in enumerate(MASKS):
        siblings = [other for other in range(ROWS) if GROUPS[other] == GROUPS[row] and other != row]
        # The empty response has no token to carry its score.
        others = [SCORES[other].item() * (LAST[other] is not None) for other in siblings]
        advantage = SCORES[row].item() - sum(others) / len(others)
        assert found[row].tolist() == pytest.approx([advantage * here for here in mask]), row


def test_discounting_counts_sampled_tokens_from_the_last_one() -> None:
    """γ = 0.9: the k-th sampled token before the score gets 0.9^k of it, independent of other tokens between
    them."""
    estimator = "reinforce_plus_plus"
    spec = spec_of(estimator, "algorithm.gamma=0.9")
    found = with_advantages(scored_by(spec), spec.algorithm, alone()).advantages
    places = [(row, t) for row in range(ROWS) for t in range(HORIZON) if MASKS[row][t]]
    plain = {(row, t): SCORES[row].item() * 0.9 ** sum(MASKS[row][t + 1 :]) for row, t in places}
    values = torch.tensor(list(plain.values()), dtype=torch.float64)
    for (row, t), value in plain.items():
        assert found[row, t].item() == pytest.approx(
            ((value - values.mean()) / values.std()).item(), rel=1e-5, abs=1e-6
        )


def test_an_ungraded_response_is_left_out_of_the_update() -> None:
    valid = EVERYONE.clone()
    valid[4] = False
    scored = scored_by(spec_of("rloo"), valid=valid)
    batch = with_advantages(scored, spec_of("rloo").algorithm, alone())
    assert torch.equal(batch.sample_mask, valid)
    assert not batch.valid_mask[4].any()
    # Its siblings 0 and 2 are compared with each other only; row 2 is empty and has no reward.
    assert batch.advantages[0].tolist() == pytest.approx([1.0] * HORIZON)


# --- the greedy response to the same prompt -----------------------------------------------------------


class Greedy:
    """A rollout engine and a reward in one: the greedy response to prompt g scores 10·g, in any order."""

    def __init__(self, order: list[int], ungraded: int | None = None) -> None:
        self.order, self.ungraded = order, ungraded
        self.sampling: object = None

    def generate(self, prompts, sampling, *, n: int, **_: object) -> SimpleNamespace:
        assert n == 1
        self.sampling = sampling
        return SimpleNamespace(group_ids=torch.tensor(self.order))

    def release(self, *, weights_follow: bool) -> None:
        """The step's last response is sampled, and the sync follows."""
        assert weights_follow
        self.sampling = (self.sampling, "released")

    def score(self, greedy) -> RewardResult:
        valid = greedy.group_ids != (-1 if self.ungraded is None else self.ungraded)
        scores = torch.where(valid, 10.0 * greedy.group_ids, 0.0)
        return RewardResult(scores, valid, errors=[] if valid.all() else ["no"])


def compared(engine: Greedy, **batch: object) -> tuple[RewardResult | None, TrainBatch]:
    """Baseline and advantages by ReMax of one step."""
    spec = spec_of("remax", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4")
    prompts = SimpleNamespace(batch_indices=lambda *_, **__: [0, 1, 2, 3], prompts=lambda *_: None)
    run = run_of(spec, rollout=engine, reward=engine, train_prompts=prompts)
    sampled = replace(rollouts(), **batch)
    baseline = greedy_baseline(run, 1, sampled, timer())
    scored = score_batch(run, sampled, RewardResult(SCORES, EVERYONE), baseline, timer())
    return baseline, with_advantages(scored, spec.algorithm, alone())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
@pytest.mark.parametrize("groups", [GROUPS, [3, 3, 3, 0, 0, 0, 2, 2, 2, 1, 1, 1], [3, 0, 1, 2] * 3])
def test_a_response_is_compared_with_the_greedy_one_to_its_own_prompt(order, groups) -> None:
    engine = Greedy(order)
    _, batch = compared(engine, group_ids=torch.tensor(groups))
    sampling, then = engine.sampling
    assert sampling.greedy
    assert then == "released"
    for row, mask in enumerate(MASKS):
        reward = SCORES[row].item() * any(mask)
        expected = [(reward - 10.0 * groups[row]) * here for here in mask]
        assert batch.advantages[row].tolist() == pytest.approx(expected), row


def test_prompts_with_unlike_numbers_of_responses_keep_their_own_baseline() -> None:
    groups = [1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 3, 3]
    baseline, _ = compared(Greedy([0, 1, 2, 3]), group_ids=torch.tensor(groups))
    assert baseline.scores.tolist() == [10.0 * group for group in groups]


def test_without_a_grade_of_the_greedy_response_its_prompt_is_left_out() -> None:
    """A baseline of 0 in its place would reward every response of that prompt."""
    baseline, batch = compared(Greedy([2, 0, 3, 1], ungraded=1), group_ids=torch.tensor(GROUPS))
    graded = [group != 1 for group in GROUPS]
    assert batch.sample_mask.tolist() == graded
    assert not batch.advantages[~batch.sample_mask].any()
    assert batch.advantages[0].tolist() == pytest.approx([SCORES[0].item()] * HORIZON)
    assert baseline.errors == ["no"]


def test_only_remax_asks_for_greedy_responses() -> None:
    engine = Greedy([])
    assert greedy_baseline(run_of(spec_of("rloo"), rollout=engine), 1, rollouts(), timer()) is None
    assert engine.sampling == (None, "released")  # before anything is graded


# --- what the models say ------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("estimator", ["rloo", "optimal_token_baseline", "off_policy_optimal_baseline"])
def test_old_log_probs_are_the_rollouts_or_the_trainers(bypass: bool, estimator: str) -> None:
    spec = spec_of(estimator, f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}")
    scored = scored_by(spec)
    own = said(-0.1)(with_advantages(scored, spec.algorithm, alone()).inputs)
    sampled = rollouts()
    assert torch.equal(scored.old_log_probs, sampled.rollout_log_probs if bypass else own)
    assert (scored.score_norms is not None) == (estimator != "rloo")
    assert (scored.sequence_weights is not None) == (estimator == "off_policy_optimal_baseline")
    if scored.score_norms is not None:  # of the policy about to be updated, in both modes
        squares = said(0.01)(with_advantages(scored, spec.algorithm, alone()).inputs)
        torch.testing.assert_close(scored.score_norms, 1.0 - 2.0 * own.exp() + squares)
    if scored.sequence_weights is not None:
        gaps = torch.where(sampled.response_mask, own - sampled.rollout_log_probs, 0.0)
        torch.testing.assert_close(scored.sequence_weights, gaps.sum(-1).exp().double())


@pytest.mark.parametrize(
    ("model", "method", "words"), [("ref", "log_probs", "reference policy"), ("critic", "values", "critic's")]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stop_the_run_where_they_are_read(model, method, words, bad) -> None:
    spec = spec_of("gae")

    def broken(inside: bool):
        def answer(batch: ModelInputs) -> Tensor:
            where = batch.scored if inside else ~batch.scored
            return torch.where(where & (torch.arange(HORIZON) == 1), bad, -1.0)

        return answer

    def score(inside: bool) -> ScoredBatch:
        run = run_of(spec, **{model: SimpleNamespace(**{method: broken(inside)})})
        return score_batch(run, rollouts(), RewardResult(SCORES, EVERYONE), None, timer())

    with pytest.raises(RunFailure, match=words):
        score(inside=True)
    score(inside=False)  # padding and tool output are not read
