"""A policy of seven responses: what `update` on a real engine does, averaged over every batch it may draw.

A response ends with token 0, at the latest after two tokens. π_rollout gives each response a multiple of
1/16, so every pair of responses has a multiple of 1/256. Two averages follow without sampling:

- the mean gradient over mini-batches of one group: every pair, weighted by its probability;
- the gradient of one mini-batch that holds every pair exactly as often as it is drawn: what a mini-batch
  tends to as it grows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import Segments
from rlctl.batch import TokenBatch, TokenLists
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.protocol import StepResult
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.algorithm import ActorSpec, RolloutCorrectionSpec, TeacherSpec
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import mini_batches, update
from tests.changed import changed
from tests.models import naive_log_probs, tiny_model
from tests.properties.batches import estimate, loss_rule, update_settings

PROMPT, END, HORIZON = 1, 0, 2
#: Response → sixteenths of π_rollout's probability.
SIXTEENTHS = {(0,): 4, (1, 0): 4, (1, 1): 2, (1, 2): 2, (2, 0): 1, (2, 1): 1, (2, 2): 2}
#: The same, token by token: after nothing, after 1, after 2.
ROLLOUT = {None: (4 / 16, 8 / 16, 4 / 16), 1: (4 / 8, 2 / 8, 2 / 8), 2: (1 / 4, 1 / 4, 2 / 4)}
RESPONSES = list(SIXTEENTHS)
REWARDS = torch.tensor([0.3, 1.0, -0.4, 0.1, 0.8, -1.1, 0.5])
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

#: Relative error that float32 leaves of an exact gradient (found: about 1e-6).
ROUNDING = 1e-5
UNBOUNDED = WeightRule("sequence", "truncate", upper=1e9)


@dataclass(frozen=True)
class Setting:
    """One way to correct.

    Attributes:
        old: whose log-probs π_old are: `rollout` (bypass mode), the `current` policy's (decoupled mode,
            first update of a batch) or those of an `earlier` one (its later updates).
    """

    loss: str
    old: str
    weight: WeightRule = UNBOUNDED
    reject: tuple[RejectRule, ...] = ()
    after: bool = False

    def update_settings(
        self,
        agg_mode: str,
        mini_groups: int,
        num_minis: int = 1,
        micro_sequences: int = 10_000,
        score_centering: int | None = None,
        teacher: TeacherSpec | None = None,
    ) -> UpdateSettings:
        denominator = "after_rejection" if self.after else "before_rejection"
        bypass = self.old == "rollout"
        correction = RolloutCorrectionSpec(bypass_mode=bypass, max_nonfinite_fraction=0.0)
        return update_settings(
            CorrectionRules(self.weight, self.reject, denominator),
            loss_rule(self.loss),
            actor=ActorSpec(loss_agg_mode=agg_mode, ppo_micro_batch_size_per_gpu=micro_sequences),
            correction=correction.model_copy(update={"score_centering": score_centering}),
            teacher=teacher,
            groups=(mini_groups, mini_groups * num_minis),
            horizon=HORIZON,
        )


@dataclass(frozen=True)
class Deviation:
    """A gradient against that of the expected reward: its scale, and the relative error at that scale."""

    scale: float
    error: float


@dataclass(frozen=True)
class Found:
    """Of one group per mini-batch, on average (None: not asked), and of ever larger mini-batches."""

    small: Deviation | None
    large: Deviation


class Recording(DeepSpeedEngine):
    """Keeps the gradient of every step and makes none."""

    gradients: list[Tensor]

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        gradient = torch.cat([p.grad.double().flatten() for p in self._model.parameters()])
        self.gradients.append(gradient * grad_scale)
        return super().step(lr=lr, skip=True)


def recording(ranks: Ranks) -> Recording:
    return Recording(
        model(),
        ranks,
        zero_stage=0,
        dtype=torch.float32,
        temperature=1.0,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=0.0,
    )


def model(seed: int = 0):
    return tiny_model(seed=seed, vocabulary=3)


def batch_of(rows: list[int], group_ids: Tensor | None = None) -> TokenBatch:
    """These responses, to be trained on by a policy that has not seen them; None: one group each."""
    lengths = torch.tensor([len(RESPONSES[row]) for row in rows])
    ids = torch.tensor([token for row in rows for token in (PROMPT, *RESPONSES[row])])
    sequences = Segments(lengths + 1)
    places = torch.arange(len(rows))
    zeros = torch.zeros(int(lengths.sum()))
    return TokenBatch(
        token_ids=ids,
        sampled=sequences.places > 0,
        lengths=lengths + 1,
        owners=places,
        group_ids=places if group_ids is None else group_ids,
        members=places,
        prompt_weights=torch.ones(len(rows)),
        rollout_log_probs=zeros,
        versions=zeros.long(),
        turns=zeros.long(),
        rewards=zeros,
        old_log_probs=zeros,
        advantages=zeros,
    )


def befores_of(rows: list[int]) -> list[int | None]:
    """(M,) the token before each sampled one; None: it is the first."""
    return [before for row in rows for before in (None, *RESPONSES[row][:-1])]


def rollout_log_probs(rows: list[int]) -> Tensor:
    tokens = [token for row in rows for token in RESPONSES[row]]
    return torch.tensor(
        [ROLLOUT[before][token] for before, token in zip(befores_of(rows), tokens, strict=True)]
    ).log()


@cache
def log_probs_of_responses(seed: int) -> list[Tensor]:
    """Of the tokens of each of `RESPONSES`."""
    batch = batch_of(list(range(len(RESPONSES))))
    with torch.no_grad():
        found = naive_log_probs(model(seed), batch)[0].float()
    return list(found.split(batch.units.episode.lengths.tolist()))


def groups_of(pairs: list[tuple[int, int]], old: str) -> TokenBatch:
    """Groups of two responses with RLOO's advantages."""
    rows = [row for pair in pairs for row in pair]
    batch = batch_of(rows, torch.arange(len(pairs)).repeat_interleave(2))
    sampled = rollout_log_probs(rows)
    if old == "rollout":
        old_log_probs = sampled
    else:
        known = log_probs_of_responses(0 if old == "current" else 1)
        old_log_probs = torch.cat([known[row] for row in rows])
    advantages = batch.units.episode.spread(estimate("rloo", REWARDS[rows], batch.group_ids))
    return replace(batch, rollout_log_probs=sampled, old_log_probs=old_log_probs, advantages=advantages)


def exact_gradient() -> Tensor:
    """−∇ Σ_y π_θ(y)·r(y), in float64."""
    policy = model().double()
    batch = batch_of(list(range(len(RESPONSES))))
    log_probs, _ = naive_log_probs(policy, batch)
    probabilities = batch.units.episode.sum(log_probs).exp()
    assert abs(probabilities.sum().item() - 1.0) < 1e-12
    (-(probabilities * REWARDS.double()).sum()).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


#: A sampler that truncates: eighths of the responses it can give; what it keeps, and their shares.
TRUNCATED = {(0,): 4, (1, 0): 1, (1, 2): 3}
KEPT = {None: (0, 1), 1: (0, 2)}
KEPT_SHARES = {None: {0: 4 / 8, 1: 4 / 8}, 1: {0: 1 / 4, 2: 3 / 4}}


def truncated_batch(old: str, *, exact: bool) -> TokenBatch:
    """Every pair of its responses as often as it is drawn; with `exact`, what each token was drawn from.

    Args:
        old: whose log-probs π_old are: `rollout` (bypass mode) or the `current` policy's.
        exact: with the kept sets; otherwise as if nothing were truncated.
    """
    responses = list(TRUNCATED)
    draws = [(a, b) for a in responses for b in responses for _ in range(TRUNCATED[a] * TRUNCATED[b])]
    rows = [RESPONSES.index(response) for pair in draws for response in pair]
    batch = batch_of(rows, torch.arange(len(draws)).repeat_interleave(2))
    befores = befores_of(rows)
    tokens = [token for row in rows for token in RESPONSES[row]]
    sampled = torch.tensor(
        [KEPT_SHARES[before][token] for before, token in zip(befores, tokens, strict=True)]
    ).log()
    kept = None
    if exact:
        counts = torch.tensor([len(KEPT[before]) for before in befores], dtype=torch.int32)
        ids = torch.tensor([token for before in befores for token in KEPT[before]], dtype=torch.int32)
        kept = TokenLists(counts, ids)
    advantages = batch.units.episode.spread(estimate("rloo", REWARDS[rows], batch.group_ids))
    batch = changed(batch, rollout_log_probs=sampled, advantages=advantages, kept=kept)
    own = sampled if old == "rollout" else restricted_log_probs(model(), batch, exact=exact).detach().float()
    return replace(batch, old_log_probs=own)


def restricted_log_probs(policy, batch: TokenBatch, *, exact: bool = True) -> Tensor:
    """(M,) of the policy restricted to `KEPT` and renormalised, from the full logits."""
    found = []
    for ids in batch.token_ids.split(batch.lengths.tolist()):
        logits = policy(input_ids=ids[None]).logits[0, :-1].double().clone()
        for t, before in enumerate(ids[:-1].tolist()):
            kept = KEPT.get(before if t else None, (0, 1, 2)) if exact else (0, 1, 2)
            logits[t, [token for token in range(3) if token not in kept]] = -torch.inf
        found.append(logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1))
    return torch.cat(found)


def enumerate_truncated(ranks: Ranks) -> dict[tuple[str, bool, int], Deviation]:
    """By π_old, exact sampling or not, rows per micro-batch: the gradient of `update` against that of the
    expected reward under the policy restricted to what is kept."""
    policy = model().double()
    batch = batch_of([RESPONSES.index(response) for response in TRUNCATED])
    probabilities = batch.units.episode.sum(restricted_log_probs(policy, batch)).exp()
    assert abs(probabilities.sum().item() - 1.0) < 1e-12
    rewards = torch.stack([REWARDS[RESPONSES.index(response)] for response in TRUNCATED])
    (-(probabilities * rewards.double()).sum()).backward()
    exact = torch.cat([p.grad.flatten() for p in policy.parameters()])
    actor = recording(ranks)
    found = {}
    for old, is_exact, micro_rows in itertools.product(("rollout", "current"), (True, False), (128, 5)):
        batch = truncated_batch(old, exact=is_exact)
        sizes = {"mini_groups": batch.num_episodes // 2, "micro_sequences": micro_rows}
        settings = Setting("reinforce", old).update_settings("seq-mean-token-sum", **sizes)
        actor.gradients = []
        update(batch, actor, ranks, settings, lambda _: 0.0, 0)
        found[old, is_exact, micro_rows] = deviation(actor.gradients[0], exact)
    return found


def deviation(gradient: Tensor, exact: Tensor) -> Deviation:
    scale = float(gradient @ exact / (exact @ exact))
    return Deviation(scale, float((gradient / scale - exact).norm() / exact.norm()))


def enumerate_updates(ranks: Ranks, cases: list[tuple[Setting, str]]) -> dict[tuple[Setting, str], Found]:
    """By setting and aggregation. A setting that is biased in large mini-batches is not tested in small
    ones."""
    actor = recording(ranks)
    exact = exact_gradient()
    shares = list(SIXTEENTHS.values())
    pairs = list(itertools.combinations_with_replacement(range(len(RESPONSES)), 2))
    counts = [(1 if i == j else 2) * shares[i] * shares[j] for i, j in pairs]
    assert sum(counts) == 256
    population = [pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)]

    def gradients(setting: Setting, agg_mode: str, groups: list[tuple[int, int]], size: int) -> list[Tensor]:
        """Of mini-batches of `size` groups."""
        actor.gradients = []
        batch = groups_of(groups, setting.old)
        settings = setting.update_settings(agg_mode, size, len(groups) // size)
        if setting.old == "current":  # to the last bit: the sign of a log-ratio of 1e-7 is noise
            minis = [batch.pick(episodes) for episodes in mini_batches(batch, size, len(groups) // size)]
            own = [actor.policy(mini.inputs).log_probs.detach() for mini in minis]
            batch = replace(batch, old_log_probs=torch.cat(own))
        update(batch, actor, ranks, settings, lambda _: 0.0, 0)
        return actor.gradients

    found = {}
    for setting, agg_mode in cases:
        (whole,) = gradients(setting, agg_mode, population, len(population))
        large, small = deviation(whole, exact), None
        if large.error < ROUNDING:
            each = gradients(setting, agg_mode, pairs, 1)
            mean = sum(count / 256 * gradient for count, gradient in zip(counts, each, strict=True))
            small = deviation(mean, exact)
        found[setting, agg_mode] = Found(small, large)
    return found
