"""Groups with failed, missing, rejected or fanned-out members: the expected gradient of every estimator.

Two prompts and three responses; every group of three is enumerated, with every way in which members are
missing, in one batch that holds each group exactly as often as it is drawn: what a batch tends to as it
grows. The table of `docs/evidence/groups.md` is what comes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlctl.algos.losses import coefficients
from rlctl.algos.segments import Segments
from rlctl.batch import TokenBatch
from rlctl.engine.ranks import Ranks
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import with_advantages
from rlctl.train.settings import EstimatorSettings
from tests.properties.batches import estimate
from tests.reference import peer_packages, verl_helper

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "groups.md"
ESTIMATORS = ADVANTAGE_ESTIMATORS
N = 3
#: Responses: (token, token before it or None); each is the only one with its last token after its prefix.
RESPONSES = [((0, None),), ((1, None), (0, 1)), ((1, None), (2, 1))]
#: By prompt and prefix, probabilities of the two next tokens.
POLICY = [{None: {0: 0.5, 1: 0.5}, 1: {0: 0.5, 2: 0.5}}, {None: {0: 0.25, 1: 0.75}, 1: {0: 1 / 3, 2: 2 / 3}}]
#: By prompt, of each response, in quarters: what the probabilities above multiply to.
QUARTERS = [(2, 1, 1), (1, 1, 2)]
REWARDS = [(0.0, 1.0, 0.25), (1.0, -0.5, 0.5)]
#: Values of a critic by prompt and prefix, and the reward of a greedy response: independent of the members.
VALUES = [{None: 0.2, 1: 0.6}, {None: 0.1, 1: 0.3}]
GREEDY = [0.25, -0.5]
ROUNDING = 1e-5


@dataclass(frozen=True)
class Member:
    prompt: int
    response: int
    group: int
    kept: bool = True


def scores_of(prompt: int, response: int) -> np.ndarray:
    """(tokens, 8): ∇ log π of each token; four logits per prompt."""
    found = np.zeros((len(RESPONSES[response]), 8))
    for place, (token, before) in enumerate(RESPONSES[response]):
        start = 4 * prompt + (0 if before is None else 2)
        for column, (other, probability) in enumerate(POLICY[prompt][before].items()):
            found[place, start + column] = (other == token) - probability
    return found


# --- which members there are --------------------------------------------------------------------------------
Chance = Callable[[int, int], float]


@dataclass(frozen=True)
class Case:
    """How members are missing.

    Attributes:
        survives: of prompt and response, the chance 1/2 or 1 that a member can be graded.
        sizes: members per group, by prompt.
        rejects: the correction rejects the last response.
        in_pieces: each token of a response is a sequence of its own.
    """

    survives: Chance = lambda prompt, response: 1.0
    sizes: tuple[int, int] = (N, N)
    rejects: bool = False
    in_pieces: bool = False

    @property
    def coins(self) -> tuple[float, ...]:
        """Equally likely; a member is graded if its coin is below its chance."""
        chances = [self.survives(prompt, response) for prompt in range(2) for response in range(3)]
        return (0.25, 0.75) if min(chances) < 1.0 else (0.25,)

    @cached_property
    def members(self) -> list[Member]:
        """The graded members of every group, each as often as it is drawn; equally many groups per prompt."""
        found, group = [], 0
        for prompt, size in enumerate(self.sizes):
            for responses in itertools.product(range(3), repeat=size):
                times = int(np.prod([QUARTERS[prompt][response] for response in responses])) * 4 ** (N - size)
                for coins in itertools.product(self.coins, repeat=size):
                    kept = [coin < self.survives(prompt, r) for r, coin in zip(responses, coins, strict=True)]
                    for _ in range(times):
                        there = itertools.compress(responses, kept)
                        found += [Member(prompt, r, group, kept=not (self.rejects and r == 2)) for r in there]
                        group += 1
        return found


CASES = {
    "complete": Case(),
    "failed at random": Case(lambda *_: 0.5),
    "uneven": Case(sizes=(3, 2)),
    "failed more for one prompt": Case(lambda prompt, _: 0.5 if prompt else 1.0),
    "failed more for one response": Case(lambda _, response: 0.5 if response == 2 else 1.0),
    "rejected": Case(rejects=True),
    "fanned out": Case(in_pieces=True),
}


# --- what rlctl makes of them -------------------------------------------------------------------------------
@cache
def batch_of(case: Case) -> TokenBatch:
    """The graded episodes; in pieces, each token of a response is a sequence after what precedes it."""
    members, counts = case.members, [len(RESPONSES[member.response]) for member in case.members]
    owners = [place for place, count in enumerate(counts) for _ in range(count if case.in_pieces else 1)]
    lengths = [
        length
        for count in counts
        for length in ([place + 2 for place in range(count)] if case.in_pieces else [count + 1])
    ]
    sequences = Segments(torch.tensor(lengths))
    sampled = sequences.places > 0
    if case.in_pieces:
        sampled = sequences.places == sequences.spread(sequences.lengths) - 1
    episodes = Segments(torch.tensor(counts))
    last = episodes.places == episodes.spread(episodes.lengths) - 1
    tokens = [(m.prompt, token, before) for m in members for token, before in RESPONSES[m.response]]
    chances = [POLICY[prompt][before] for prompt, _, before in tokens]
    log_probs = torch.tensor([p[token] for p, (_, token, _) in zip(chances, tokens, strict=True)]).log()
    norms = [
        1 - 2 * p[token] + sum(q * q for q in p.values())
        for p, (_, token, _) in zip(chances, tokens, strict=True)
    ]
    rewards = torch.tensor([REWARDS[m.prompt][m.response] for m in members])
    zeros, places = torch.zeros(len(tokens)), torch.arange(len(members))
    return TokenBatch(
        token_ids=torch.zeros(sequences.total, dtype=torch.int64),
        sampled=sampled,
        lengths=sequences.lengths,
        owners=torch.tensor(owners),
        group_ids=torch.tensor([m.group for m in members]),
        members=places,
        prompt_weights=torch.ones(len(members)),
        rollout_log_probs=log_probs,
        versions=zeros.long(),
        turns=zeros.long(),
        old_log_probs=log_probs,
        rewards=torch.where(last, episodes.spread(rewards), 0.0),
    ).with_columns(
        values=torch.tensor([VALUES[prompt][before] for prompt, _, before in tokens]),
        score_norms=torch.tensor(norms),
        sequence_weights=torch.ones(len(members)),
        baseline_scores=torch.tensor([GREEDY[m.prompt] for m in members]),
    )


@cache
def _scores(case: Case) -> np.ndarray:
    return np.concatenate([scores_of(m.prompt, m.response) for m in case.members])


def gradient_of(estimator: str, case: Case) -> np.ndarray:
    """(8,): Σ c · A · ∇ log π by the loop's own advantages and coefficients (`seq-mean-token-sum`)."""
    batch, ranks = batch_of(case), Ranks(0, 1, torch.device("cpu"))
    advantages = with_advantages(
        batch, EstimatorSettings.of(AlgorithmSpec(adv_estimator=estimator)), ranks
    ).advantages
    unit = batch.units.episode
    keep = unit.spread(torch.tensor([m.kept for m in case.members]))
    everything = torch.ones_like(keep)
    c = coefficients(
        "seq-mean-token-sum", keep, everything, unit, float(len(keep)), float(batch.num_episodes), horizon=2
    )
    scores = _scores(case)
    return (c * advantages).double().numpy() @ scores


# --- what it should be --------------------------------------------------------------------------------------
def expected_reward(case: Case, *, neutral: bool = False) -> np.ndarray:
    """(2, 8): for each prompt, ∇ of the expected reward given that a response can be graded.

    With `neutral`: ∇ of the expected reward if a rejected response had the mean reward of its prompt.
    """
    found = np.zeros((2, 8))
    for prompt in range(2):
        share = np.array(QUARTERS[prompt]) / 4 * [case.survives(prompt, response) for response in range(3)]
        share /= share.sum()
        rewards = np.array(REWARDS[prompt])
        centred = rewards - share @ rewards
        if neutral:
            centred[2] = 0.0
        found[prompt] = sum(share[r] * centred[r] * scores_of(prompt, r).sum(0) for r in range(3))
    return found


def deviation(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative error of the direction, at the best scale."""
    scale = found @ wanted / (wanted @ wanted)
    return float(np.linalg.norm(found / scale - wanted) / np.linalg.norm(wanted)) if scale > 0 else np.inf


def word(estimator: str, name: str) -> str:
    case, plain = CASES[name], expected_reward(CASES["complete"])
    found = gradient_of(estimator, case)

    def is_of_each_prompt(wanted: np.ndarray) -> bool:
        return all(deviation(found * (wanted[p] != 0), wanted[p]) < ROUNDING for p in range(2))

    if deviation(found, plain.mean(0)) < ROUNDING:
        return "exact"
    if is_of_each_prompt(plain):
        return "per prompt"
    if is_of_each_prompt(expected_reward(case)):
        return "given graded"
    if case.rejects and deviation(found, expected_reward(case, neutral=True).mean(0)) < ROUNDING:
        return "neutral"
    return f"biased, {deviation(found, plain.mean(0)):.2f}"


def test_the_table_is_what_comes_out() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines = [f"| | {' | '.join(CASES)} |"]
    lines += [f"| `{name}` | {' | '.join(word(name, case) for case in CASES)} |" for name in ESTIMATORS]
    missing = [line for line in lines if line not in text]
    assert not missing, f"put these rows into {PAGE.name}:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", [part.name for part in ESTIMATORS.parts() if part.unbiased])
def test_an_unbiased_estimator_stays_so_if_members_fail_at_random(name: str) -> None:
    assert {word(name, case) for case in ("complete", "failed at random", "fanned out")} == {"exact"}


def test_siblings_that_are_rejected_belong_into_the_baseline() -> None:
    """With all members in it the gradient is closer to the expected reward's than with the kept ones alone,
    in over nine of ten policies of six responses of which some are always rejected."""
    random, closer = np.random.default_rng(0), []
    for _ in range(1000):
        share, rewards, kept = random.dirichlet(np.ones(6)), random.normal(size=6), random.random(6) < 0.7
        if kept.all() or kept.sum() < 2:
            continue
        scores, among = np.eye(6) - share, share * kept / (share @ kept)
        wanted = (share * rewards) @ scores
        both = [(share * kept * (rewards - weights @ rewards)) @ scores for weights in (share, among)]
        cosines = [found @ wanted / np.linalg.norm(found) for found in both]
        closer.append(cosines[0] > cosines[1])
    assert np.mean(closer) > 0.9


# --- other frameworks' code ---------------------------------------------------------------------------------
SCORES = torch.tensor([1.0, 0.0, 0.25, 0.5, 1.0, -1.0])
GROUPS = torch.tensor([0, 0, 0, 1, 2, 2])  # of three, of one, of two
LONE = 3  # its only member
VERL = "verl.trainer.ppo.core_algos"
SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils"
AREAL = "areal.utils.data"


def module_of(name: str):
    helper = verl_helper if name == VERL else peer_packages
    found = helper.load(name)
    if found is None:
        pytest.skip(helper.why_not(name))
    return found


@pytest.mark.slow  # imports the frameworks
@pytest.mark.parametrize(
    ("name", "alone"), [(VERL, {"rloo": 0.5, "grpo": 0.5}), (SKYRL, {"rloo": 0.0, "grpo": 0.5})]
)
def test_uneven_groups_of_verl_and_skyrl(name: str, alone: dict[str, float]) -> None:
    """As here, but for the only member of a group: its advantage may be its plain reward."""
    rewards, mask = SCORES[:, None] * torch.tensor([0.0, 1.0]), torch.ones(len(SCORES), 2)
    for estimator, value in alone.items():
        compute = getattr(module_of(name), f"compute_{estimator}_outcome_advantage")
        found = compute(rewards.clone(), mask, index=GROUPS.numpy())[0][:, 0]
        wanted = estimate(estimator, SCORES, GROUPS)
        assert wanted[LONE] == 0.0
        wanted[LONE] = value
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_rejected_members_are_in_the_baseline_of_verl_and_skyrl() -> None:
    """A mask of zeros removes the member's own advantage, and changes no sibling's."""
    rewards, mask = SCORES[:, None] * torch.tensor([0.0, 1.0]), torch.ones(len(SCORES), 2)
    masked = mask.clone()
    masked[1] = 0.0
    for name in (VERL, SKYRL):
        compute = module_of(name).compute_rloo_outcome_advantage
        whole, without = (compute(rewards.clone(), each, index=GROUPS.numpy())[0] for each in (mask, masked))
        torch.testing.assert_close(without, whole * masked)


@pytest.mark.slow
def test_groups_of_areal_have_one_size() -> None:
    """Groups are consecutive rows of a constant number; what remains at the end is not centred."""
    config = SimpleNamespace(
        mean_level="group", mean_leave1out=True, std_level=None, std_unbiased=True, group_size=3, eps=1e-5
    )
    found = module_of(AREAL).Normalization(config)(SCORES[:5])
    torch.testing.assert_close(found[:3], estimate("rloo", SCORES[:3], GROUPS[:3]))
    torch.testing.assert_close(found[3:], SCORES[3:5])
