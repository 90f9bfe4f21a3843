"""Score centering: the gradient does not contain the expected score under the sampler, for every
implementation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rlctl
from rlctl.algos.correction import bound
from rlctl.algos.rules import WeightRule
from rlctl.algos.score_centering import expected_score, score_factors
from rlctl.batch import Episode, Task, TokenBatch, TokenLists, TokenSequence, Turn
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.ranks import Ranks
from rlctl.errors import SpecError, UsageError
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from rlctl.run_spec import memory
from rlctl.run_spec.load import load_spec
from rlctl.train.update import update
from tests.changed import changed
from tests.processes import on_ranks
from tests.properties.enumerated_updates import (
    RESPONSES,
    REWARDS,
    ROLLOUT,
    ROUNDING,
    SIXTEENTHS,
    Setting,
    batch_of,
    befores_of,
    model,
    recording,
    rollout_log_probs,
)
from tests.unit.rollout.test_hf_rollout import TOKENIZER, make_requests, random_model

PLAIN = WeightRule(None)
WEIGHTS = {
    "none": PLAIN,
    "truncated": WeightRule("token", "truncate", upper=1.1),
    "clipped and normalised": WeightRule("token", "clip", 0.8, 1.2, normalize=True),
    "masked": WeightRule("token", "mask", 0.7, 1.3),
}


def weight_of(log_ratio: Tensor, rule: WeightRule) -> Tensor:
    return torch.ones_like(log_ratio) if rule.level is None else bound(log_ratio.exp(), rule)


# --- the formula -------------------------------------------------------------------------------------------
def score_gradient(logits: Tensor, sampler: Tensor, rule: WeightRule, listed: Tensor | None = None) -> Tensor:
    """Gradient of `expected_score` with respect to the logits (N, V); `listed`: (N, K) tokens."""
    listed = torch.arange(logits.shape[1]).expand(len(logits), -1) if listed is None else listed
    logits = logits.clone().requires_grad_()
    given = logits.log_softmax(-1).gather(1, listed), sampler.gather(1, listed)
    expected_score(*given, rule).sum().backward()
    return logits.grad


@pytest.mark.parametrize("rule", WEIGHTS.values(), ids=WEIGHTS)
def test_the_gradient_is_the_expectation_over_the_vocabulary(rule: WeightRule) -> None:
    """Σ_v μ(v) w(ρ_v) (e_v − π), summed by hand; one token outside the list is still exact."""
    torch.manual_seed(0)
    logits, other = torch.randn(2, 5, 7, dtype=torch.float64)
    policy, sampler = logits.softmax(-1), other.log_softmax(-1)
    weighted = sampler.exp() * weight_of(policy.log() - sampler, rule)
    by_hand = weighted - weighted.sum(-1, keepdim=True) * policy
    torch.testing.assert_close(score_gradient(logits, sampler, rule), by_hand)
    most = sampler.topk(6).indices
    torch.testing.assert_close(score_gradient(logits, sampler, rule, most), by_hand)


@pytest.mark.parametrize("rule", WEIGHTS.values(), ids=WEIGHTS)
def test_outside_the_list_the_sampler_is_taken_to_be_proportional_to_the_policy(rule: WeightRule) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 9, dtype=torch.float64)
    policy = logits.softmax(-1)
    sampler = policy.clone()
    sampler[:, :3] *= torch.tensor([1.3, 0.6, 1.1], dtype=torch.float64)
    sampler[:, 3:] *= (1 - sampler[:, :3].sum(-1, keepdim=True)) / policy[:, 3:].sum(-1, keepdim=True)
    listed = torch.arange(3).expand(4, 3)
    whole = score_gradient(logits, sampler.log(), rule)
    torch.testing.assert_close(score_gradient(logits, sampler.log(), rule, listed), whole)
    assert whole.abs().max() > 0.01


def test_factors_are_those_of_torchtitans_example() -> None:
    """Of the docstring of its loss: both tails are 0.2."""
    sampled, trained = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.4, 0.4]])
    factors = score_factors(trained.log(), sampled.log(), PLAIN)
    torch.testing.assert_close(factors, torch.tensor([[0.1, -0.1]]))


def test_it_is_zero_where_the_policies_agree_and_where_nothing_is_listed() -> None:
    logits = torch.randn(3, 6)
    same = score_gradient(logits, logits.log_softmax(-1), WEIGHTS["truncated"], logits.topk(2).indices)
    assert same.abs().max() < 1e-6
    unknown = torch.full((3, 6), -torch.inf)
    assert (score_gradient(logits, unknown, PLAIN) == 0).all()


def test_a_token_that_only_one_policy_gives_is_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -90.0, 1.0]])
    sampler = torch.tensor([[0.5, 1e-38, 0.5, 0.0]]).log()
    for rule in WEIGHTS.values():
        assert score_gradient(logits, sampler, rule).isfinite().all()


# --- update on DeepSpeed, every batch enumerated ------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """`alike`: every response has advantage 1, so that the gradient is the expected score alone."""

    weight: str
    listed: int
    micro_rows: int
    alike: bool


CASES = [
    *(Case(weight, 3, rows, alike=True) for weight, rows in itertools.product(WEIGHTS, (16, 5))),
    *(Case(weight, 2, 5, alike=False) for weight in WEIGHTS),
    Case("truncated", 0, 16, alike=True),  # without it
]


def whole_batch(case: Case) -> TokenBatch:
    """Every response as often as it is drawn, of 16."""
    rows = [place for place, response in enumerate(RESPONSES) for _ in range(SIXTEENTHS[response])]
    batch, sampled = batch_of(rows), rollout_log_probs(rows)
    advantages = torch.ones(len(rows)) if case.alike else REWARDS[rows]
    lists: list[tuple[int, float]] = []
    for before in befores_of(rows):
        lists += sorted(enumerate(ROLLOUT[before]), key=lambda pair: -pair[1])[: case.listed]
    most_likely = None
    if case.listed:
        ids, probabilities = (torch.tensor(x) for x in zip(*lists, strict=True))
        counts = torch.full((len(sampled),), case.listed, dtype=torch.int32)
        most_likely = TokenLists(counts, ids.int(), probabilities.log())
    given = {"rollout_log_probs": sampled, "old_log_probs": sampled}
    return changed(batch, **given, advantages=batch.units.episode.spread(advantages), most_likely=most_likely)


def covariance_gradient(case: Case) -> Tensor:
    """−∇ Σ_t A (sg w log π − Σ_v sg(μ_v w_v) log π_v), mean over responses, in float64 from full logits."""
    rule, policy, batch = WEIGHTS[case.weight], model().double(), whole_batch(case)
    sequences = batch.token_ids.split(batch.lengths.tolist())
    logits = torch.cat([policy(input_ids=ids[None]).logits[0, :-1] for ids in sequences])
    log_probs, tokens = logits.log_softmax(-1), batch.inputs.tokens
    befores = [before if t else None for ids in sequences for t, before in enumerate(ids[:-1].tolist())]
    sampler = torch.tensor([ROLLOUT[before] for before in befores], dtype=torch.float64)
    weights = weight_of(log_probs.detach() - sampler.log(), rule)
    own = weights.gather(-1, tokens[:, None]).squeeze(-1)
    factor = own.mean() if rule.normalize else 1.0
    chosen = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
    expected = (sampler * weights * log_probs).sum(-1)
    values = batch.advantages * (own * chosen - expected)
    (-values.sum() / batch.num_episodes / factor).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def gradients(ranks: Ranks) -> dict[Case, Tensor]:
    actor, found = recording(ranks), {}
    for case in CASES:
        batch = whole_batch(case)
        settings = Setting("reinforce", "rollout", WEIGHTS[case.weight])
        sizes = {"mini_groups": batch.num_episodes, "micro_sequences": case.micro_rows}
        settings = settings.update_settings(
            "seq-mean-token-sum", **sizes, score_centering=case.listed or None
        )
        actor.gradients = []
        result = update(batch, actor, ranks, settings, lambda _: 0.0, 0)
        [found[case]] = actor.gradients
        if case.listed:
            mass = 1.0 if case.listed == 3 else 0.75
            assert result.metrics["rollout_corr/listed_mass"] == pytest.approx(mass)
    return found


def test_update_has_the_covariance_alone(tmp_path) -> None:
    """With equal advantages nothing is left; without centering, the same batch has a gradient."""
    (found,) = on_ranks(1, gradients, where=tmp_path)
    [bare] = [found[case] for case in CASES if not case.listed]
    assert bare.norm() > 0.1
    for case in CASES:
        if case.listed and case.alike:
            assert found[case].norm() < ROUNDING * bare.norm(), case
        elif case.listed:
            exact = covariance_gradient(case)
            assert (found[case] - exact).norm() < ROUNDING * exact.norm(), case


# --- sampler and trainer ------------------------------------------------------------------------------------
def batch_of_turns(turns: list[Turn], requests: list[Request]) -> TokenBatch:
    task = Task(prompt_ids=(), text="")
    sequences = [
        TokenSequence.of_turn(request.token_ids, turn) for request, turn in zip(requests, turns, strict=True)
    ]
    return TokenBatch.of([Episode(task, place, (one,), "") for place, one in enumerate(sequences)])


@pytest.mark.parametrize("way", ["packed", "padded", "in chunks", "model's own head"])
def test_sampler_and_trainer_list_the_same(monkeypatch, way) -> None:
    """Responses that end early, chunks of the sampler, responses in another order."""
    if way == "in chunks":
        monkeypatch.setattr(memory, "MAX_LOGITS", 100)
    network = random_model(1, sharpness=3.0)
    sampling = Sampling(max_response_length=9, temperature=0.8, num_most_likely=5)
    requests = make_requests(n=6, step_seed=3)
    whole, cut = (
        batch_of_turns(HFRollout(network, TOKENIZER, "cpu", rows).sample(requests, sampling), requests)
        for rows in (None, 5)
    )
    assert (whole.column("most_likely").counts == 5).all()
    assert torch.equal(whole.column("most_likely").ids, cut.column("most_likely").ids)
    assert torch.equal(whole.column("most_likely").counts, cut.column("most_likely").counts)
    policy = PolicyModule(network, 0.8)
    policy.reader.layout = "padded" if way == "padded" else "packed"
    policy.head.is_linear = way != "model's own head"
    for part in (whole, whole.pick([30, 3, 17, 3]), whole.pick(range(7, 20))):
        with torch.no_grad():
            found = policy(part.inputs)
        ids, log_probs = part.column("most_likely").padded()
        torch.testing.assert_close(found.most_likely, log_probs, atol=1e-5, rtol=0)
        assert (log_probs.diff() <= 0).all()  # the most likely first
        at, own = ids == part.inputs.tokens[:, None], found.log_probs
        torch.testing.assert_close(found.most_likely[at], own[at.any(1)])
        assert (log_probs[~at.any(1), -1] >= own[~at.any(1)] - 1e-5).all()


# --- the spec ----------------------------------------------------------------------------------------------
RC = "algorithm.rollout_correction."


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout_is=sequence"], "sequence weights depend on other tokens"),
        (["rollout_is=token", "bypass_mode=false"], "REINFORCE in bypass mode"),
        (["rollout_is=token", "loss_type=ppo_clip"], "REINFORCE in bypass mode"),
        (
            ["dialect=verl", "rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold=0.5_2"],
            "rejects single tokens",
        ),
        (["rollout_is=token"], ""),
        (["rollout_is=null", "rollout_rs=seq_max_k2", "rollout_rs_threshold=2"], ""),
    ],
)
def test_what_it_does_not_fit_is_refused(settings: list[str], words: str) -> None:
    given = ("bypass_mode=true", "loss_type=reinforce", "score_centering=128", *settings)
    overrides = [RC + setting for setting in given]
    try:
        found = load_spec([], [], overrides).warnings
    except SpecError as error:
        found = error.problems
    errors = [problem.what for problem in found if problem.severity == "error"]
    assert [words in what for what in errors] == ([True] if words else [])


def test_stale_data_count_as_corrected() -> None:
    settings = [
        "rollout.staleness=8",
        f"{RC}rollout_is=null",
        f"{RC}bypass_mode=true",
        f"{RC}loss_type=reinforce",
    ]
    bare, centered = (
        load_spec([], [], [*settings, *more]).warnings for more in ([], [f"{RC}score_centering=8"])
    )
    assert {problem.key for problem in bare} >= {"rollout.staleness", "actor.ppo_mini_batch_size"}
    assert not centered


def test_an_engine_that_lists_nothing_is_refused(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def engine(context): ...\n")
    given = [f"rollout.name={tmp_path}/mine.py:engine", f"{RC}rollout_is=null", f"{RC}score_centering=8"]
    with pytest.raises(SpecError) as caught:
        load_spec([], [], given)
    assert any("does not report the most likely tokens" in problem.what for problem in caught.value.problems)


def test_correct_says_that_it_does_not_center() -> None:
    given = (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(UsageError, match="score_centering: has no effect on weights and rejection"):
        rlctl.correct(*given, rollout_is=None, score_centering=4)
