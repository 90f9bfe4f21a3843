"""From grades to rewards: which token gets the score, and what enters the update."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlctl.algos.segments import Segments, to_host
from rlctl.batch import Episode, ModelInputs, TokenBatch, TokenSequence
from rlctl.engine.protocol import PolicyOutput
from rlctl.errors import RunFailure
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.score_batch import score_batch, train_batch, with_advantages
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import StepTimer, episode_metrics, episode_sums
from tests.episodes import flat, task_of
from tests.unit.train.updates import alone

#: Responses with tool output in the middle, at the end, at the start; one token; none.
MASKS = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1],
    [],
    [1, 1, 0, 0, 1],
    [1, 1, 0, 0, 0, 1],
    [0, 0, 1, 1, 0, 0],
    [1],
    [0, 0, 0, 0, 0, 1],
    [1, 0, 1, 0, 1],
    [1, 1, 1, 1, 1],
    [0, 1],
    [1, 0, 1, 1, 1, 1],
]
ROWS = len(MASKS)
#: Group and member of each episode.
GROUPS = [row // 3 for row in range(ROWS)]
LENGTHS = [sum(mask) for mask in MASKS]
SCORES = torch.arange(1.0, ROWS + 1.0)
EVERYONE = torch.ones(ROWS, dtype=torch.bool)


def spec_of(estimator: str, *overrides: str) -> RunSpec:
    return load_spec([], [], [f"algorithm.adv_estimator={estimator}", *overrides]).spec


def said(scale: float):
    """A model whose answer is different for every token."""

    def answer(inputs: ModelInputs) -> Tensor:
        places = Segments(inputs.lengths).places[inputs.scored]
        return scale * (inputs.tokens + 0.1 * places)

    return answer


def run_of(spec: RunSpec, **models: object) -> SimpleNamespace:
    def policy(inputs: ModelInputs, *, sum_pi_squared: bool = False, **_: object) -> PolicyOutput:
        log_probs = said(-0.1)(inputs)
        return PolicyOutput(log_probs, log_probs, said(0.01)(inputs) if sum_pi_squared else None)

    known = {"actor": SimpleNamespace(policy=policy), "ref": None, "capabilities": (), "critic": None}
    estimator = EstimatorSettings.of(spec.algorithm)
    return SimpleNamespace(
        spec=spec, estimator=estimator, ranks=alone(), data_ranks=alone(), **(known | models)
    )


def timer() -> StepTimer:
    return StepTimer(torch.device("cpu"))


def episode(row: int, **given: object) -> Episode:
    """The episode of a row of MASKS."""
    task, count = task_of(GROUPS[row]), LENGTHS[row]
    sampled = torch.tensor([False] * len(task.prompt_ids) + [bool(x) for x in MASKS[row]])
    ids = torch.arange(len(sampled)) + row
    turns = torch.zeros(count, dtype=torch.int64)
    sequence = TokenSequence(ids, sampled, torch.full((count,), -0.5), turns, turns)
    return Episode(task, row % 3, (sequence,), "", **given)


def graded_by(
    scores: Tensor = SCORES,
    valid: Tensor = EVERYONE,
    baseline: RewardResult | None = None,
    changed: dict[int, Episode] | None = None,
) -> Graded:
    episodes = [(changed or {}).get(row) or episode(row) for row in range(ROWS)]
    groups = [tuple(episodes[start : start + 3]) for start in range(0, ROWS, 3)]
    return Graded(flat(groups), RewardResult(scores, valid), baseline, {})


def trained_on(spec: RunSpec, graded: Graded) -> TokenBatch:
    return train_batch(spec, alone(), graded, 5)


def scored_by(spec: RunSpec, graded: Graded) -> TokenBatch:
    return score_batch(run_of(spec), trained_on(spec, graded), timer())


def rows_of(column: Tensor, rows: list[int] | None = None) -> dict[int, list[float]]:
    """The values of each row's tokens."""
    rows = list(range(ROWS)) if rows is None else rows
    parts = column.split([LENGTHS[row] for row in rows])
    return {row: part.tolist() for row, part in zip(rows, parts, strict=True)}


# --- the rewards ---------------------------------------------------------------------------------------


def test_the_score_is_the_reward_of_the_last_token_sampled() -> None:
    batch = trained_on(spec_of("rloo"), graded_by())
    for row, rewards in rows_of(batch.rewards).items():
        assert rewards == [0.0] * (LENGTHS[row] - 1) + [SCORES[row].item()] * (LENGTHS[row] > 0)
    assert batch.column("age").tolist() == [5] * sum(LENGTHS)


def test_rewards_of_the_environment_stay_where_they_are() -> None:
    """The rest of the score is at the last token of the last sequence."""
    plain = episode(3)
    given = replace(plain.sequences[0], rewards=torch.tensor([0.5, -1.0, 2.0]))
    spec = spec_of("rloo")
    batch = trained_on(spec, graded_by(changed={3: replace(plain, sequences=(given, *plain.sequences))}))
    found = batch.units.episode.padded(batch.rewards)[3]
    assert found[:6].tolist() == [0.5, -1.0, 2.0, 0.0, 0.0, SCORES[3].item() - 1.5]


def alternating() -> Episode:
    """Two sequences that take turns: the policy spoke in the first, the second, and again in the first."""
    first, second = ([2, 6], [0, 2]), ([4], [1])

    def sequence(ids: list[int], turns: list[int], rewards: list[float]) -> TokenSequence:
        sampled, zeros = torch.tensor([False] + [True] * len(ids)), torch.zeros(len(ids))
        numbers = torch.tensor(turns)
        given = torch.tensor([1, *ids]), sampled, zeros, numbers * 0, numbers
        return TokenSequence(*given, torch.tensor(rewards))

    sequences = sequence(*first, [0.25, 0.0]), sequence(*second, [0.5])
    return replace(episode(0), sequences=sequences, reward=0.75)


def test_alternating_sequences_are_read_in_the_order_of_their_turns() -> None:
    """G of the turns: 0.25 + γ·(0.5 + γ·2.25), 0.5 + γ·2.25, and 2.25 = 3 − 0.75; A_t + V_t of GAE alike."""
    scores = torch.where(torch.arange(ROWS) == 0, 3.0, SCORES)
    graded = graded_by(scores, changed={0: alternating()})
    for estimator, name in (("reinforce_plus_plus", "advantages"), ("gae", "returns")):
        batch = trained_on(spec_of(estimator), graded)
        assert batch.rewards[:3].tolist() == [0.25, 2.25, 0.5]
        values = torch.arange(len(batch.turns)) / 8
        spec = spec_of(estimator, "algorithm.gamma=0.5", "algorithm.lam=1.0")
        found = with_advantages(
            batch.with_columns(values=values), EstimatorSettings.of(spec.algorithm), alone()
        ).column(name)
        if name == "advantages":  # whitened: a linear function of G
            slope = (found[1] - found[2]) / (2.25 - 1.625)
            found = 2.25 + (found - found[1]) / slope
        torch.testing.assert_close(found[:3], torch.tensor([1.0625, 2.25, 1.625]))


def test_a_response_that_the_engine_ended_is_excluded() -> None:
    """It is neither the policy's whole answer nor cut at the limit: its score is undefined, not 0."""
    spec = spec_of("rloo")
    graded = graded_by(changed={2: episode(2, stop_reason="aborted")})
    batch = with_advantages(scored_by(spec, graded), EstimatorSettings.of(spec.algorithm), alone())
    members = list(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True))
    assert members == [(GROUPS[row], row % 3) for row in range(ROWS) if row != 2]
    metrics = episode_metrics(to_host(episode_sums(graded, 5, 3)), compares_siblings=True)
    assert metrics["prompt_length/clip_ratio"] == 1.0
    assert metrics["response/num_aborted"] == 1
    assert metrics["reward/num_errors"] == 0  # the grader did not fail


def test_whole_responses_are_compared_by_their_scores() -> None:
    """A score on every token would multiply the advantage by the length."""
    spec = spec_of("rloo")
    batch = with_advantages(scored_by(spec, graded_by()), EstimatorSettings.of(spec.algorithm), alone())
    for row, found in rows_of(batch.advantages).items():
        siblings = [other for other in range(ROWS) if GROUPS[other] == GROUPS[row] and other != row]
        others = [SCORES[other].item() for other in siblings]
        advantage = SCORES[row].item() - sum(others) / len(others)
        assert found == pytest.approx([advantage] * LENGTHS[row]), row


def test_discounting_counts_sampled_tokens_from_the_last_one() -> None:
    """γ = 0.9: the k-th sampled token before the score gets 0.9^k of it, independent of other tokens between
    them."""
    spec = spec_of("reinforce_plus_plus", "algorithm.gamma=0.9")
    batch = with_advantages(scored_by(spec, graded_by()), EstimatorSettings.of(spec.algorithm), alone())
    plain = torch.tensor(
        [SCORES[row] * 0.9 ** (LENGTHS[row] - 1 - t) for row in range(ROWS) for t in range(LENGTHS[row])],
        dtype=torch.float64,
    )
    expected = (plain - plain.mean()) / plain.std()
    torch.testing.assert_close(batch.advantages.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_ungraded_response_is_left_out_of_the_update() -> None:
    valid = EVERYONE.clone()
    valid[4] = False
    spec = spec_of("rloo")
    batch = with_advantages(
        scored_by(spec, graded_by(valid=valid)), EstimatorSettings.of(spec.algorithm), alone()
    )
    rows = [row for row in range(ROWS) if row != 4]
    assert batch.num_episodes == ROWS - 1
    # Its siblings 3 and 5 are compared with each other only.
    found = rows_of(batch.advantages, rows)
    assert found[3] == pytest.approx([-2.0] * 3)
    assert found[5] == pytest.approx([2.0] * 2)


def test_each_response_is_compared_with_its_own_baseline() -> None:
    """Without a grade of the greedy response, its prompt is left out."""
    baseline = RewardResult(10.0 * torch.tensor(GROUPS), torch.tensor(GROUPS) != 1)
    spec = spec_of("remax")
    batch = with_advantages(
        scored_by(spec, graded_by(baseline=baseline)), EstimatorSettings.of(spec.algorithm), alone()
    )
    rows = [row for row in range(ROWS) if GROUPS[row] != 1]
    for row, found in rows_of(batch.advantages, rows).items():
        assert found == pytest.approx([SCORES[row].item() - 10.0 * GROUPS[row]] * LENGTHS[row]), row


# --- what the models say -----------------------------------------------------------------------------


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("estimator", ["rloo", "optimal_token_baseline", "off_policy_optimal_baseline"])
def test_old_log_probs_are_the_rollouts_or_the_trainers(bypass: bool, estimator: str) -> None:
    spec = spec_of(estimator, f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}")
    scored = scored_by(spec, graded_by())
    own = said(-0.1)(scored.inputs)
    assert torch.equal(scored.old_log_probs, scored.rollout_log_probs if bypass else own)
    assert ("score_norms" in scored.columns) == (estimator != "rloo")
    assert ("sequence_weights" in scored.columns) == (estimator == "off_policy_optimal_baseline")
    if "score_norms" in scored.columns:  # of the policy about to be updated, in both modes
        squares = said(0.01)(scored.inputs)
        torch.testing.assert_close(scored.column("score_norms"), 1.0 - 2.0 * own.exp() + squares)
    if "sequence_weights" in scored.columns:
        gaps = [sum(row) for row in rows_of(own - scored.rollout_log_probs).values()]
        expected = torch.tensor(gaps).clamp(-20.0, 20.0).exp()
        torch.testing.assert_close(scored.column("sequence_weights").float(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "method", "words"), [("ref", "log_probs", "reference policy"), ("critic", "values", "critic's")]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stop_the_run(model: str, method: str, words: str, bad: float) -> None:
    spec = spec_of("gae")

    def broken(inputs: ModelInputs) -> Tensor:
        places = torch.arange(len(inputs.tokens))
        return torch.where(places == 1, bad, -1.0)

    run = run_of(spec, **{model: SimpleNamespace(**{method: broken})})
    with pytest.raises(RunFailure, match=words):
        score_batch(run, trained_on(spec, graded_by()), timer())
