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

import torch
from torch import Tensor

from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from rlctl.batch import TokenLists, TrainBatch
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.protocol import StepResult
from rlctl.engine.ranks import Ranks
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update
from tests.models import naive_log_probs, tiny_model
from tests.properties.batches import estimate, loss_rule

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

    def update_settings(self, agg_mode: str, mini_rows: int) -> UpdateSettings:
        denominator = "after_rejection" if self.after else "before_rejection"
        return UpdateSettings(
            rules=CorrectionRules(self.weight, self.reject, denominator),
            bypass=self.old == "rollout",
            loss=loss_rule(self.loss),
            agg_mode=agg_mode,
            horizon=HORIZON,
            ppo_epochs=1,
            mini_rows=mini_rows,
            micro_rows=mini_rows,
            max_nonfinite_fraction=0.0,
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
        gradient = torch.cat([p.grad.double().flatten() for p in self._policy.parameters()])
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


def batch_of(rows: list[int]) -> TrainBatch:
    """These responses, to be trained on by a policy that has not seen them."""
    lengths = torch.tensor([len(RESPONSES[row]) for row in rows])
    mask = torch.arange(HORIZON) < lengths[:, None]
    ids = [[PROMPT, *RESPONSES[row], *[END] * (HORIZON - len(RESPONSES[row]))] for row in rows]
    attention = torch.cat([torch.ones(len(rows), 1, dtype=torch.bool), mask], 1)
    zeros = torch.zeros(len(rows), HORIZON)
    return TrainBatch(
        input_ids=torch.tensor(ids),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
        responses=torch.tensor(ids)[:, 1:],
        response_mask=mask,
        sample_mask=torch.ones(len(rows), dtype=torch.bool),
        rollout_log_probs=zeros,
        old_log_probs=zeros,
        advantages=zeros,
    )


def rollout_log_probs(rows: list[int]) -> Tensor:
    found = torch.zeros(len(rows), HORIZON)
    for place, row in enumerate(rows):
        for t, token in enumerate(RESPONSES[row]):
            before = RESPONSES[row][t - 1] if t else None
            found[place, t] = torch.tensor(ROLLOUT[before][token]).log()
    return found


def groups_of(pairs: list[tuple[int, int]], old: str) -> TrainBatch:
    """Groups of two responses with RLOO's advantages."""
    rows = [row for pair in pairs for row in pair]
    batch = batch_of(rows)
    group_ids = torch.arange(len(pairs)).repeat_interleave(2)
    advantages = estimate("rloo", REWARDS[rows], group_ids, torch.ones(len(rows), dtype=torch.bool))
    sampled = rollout_log_probs(rows)
    if old == "rollout":
        old_log_probs = sampled
    else:
        with torch.no_grad():
            old_log_probs = naive_log_probs(model(0 if old == "current" else 1), batch)[0].float()
    spread = torch.where(batch.response_mask, advantages[:, None], 0.0)
    return replace(batch, rollout_log_probs=sampled, old_log_probs=old_log_probs, advantages=spread)


def exact_gradient() -> Tensor:
    """−∇ Σ_y π_θ(y)·r(y), in float64."""
    policy = model().double()
    log_probs, _ = naive_log_probs(policy, batch_of(list(range(len(RESPONSES)))))
    probabilities = log_probs.sum(-1).exp()
    assert abs(probabilities.sum().item() - 1.0) < 1e-12
    (-(probabilities * REWARDS.double()).sum()).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


#: A sampler that truncates: eighths of the responses it can give; what it keeps, and their shares.
TRUNCATED = {(0,): 4, (1, 0): 1, (1, 2): 3}
KEPT = {None: (0, 1), 1: (0, 2)}
KEPT_SHARES = {None: {0: 4 / 8, 1: 4 / 8}, 1: {0: 1 / 4, 2: 3 / 4}}


def truncated_batch(old: str, *, exact: bool) -> TrainBatch:
    """Every pair of its responses as often as it is drawn; with `exact`, what each token was drawn from.

    Args:
        old: whose log-probs π_old are: `rollout` (bypass mode) or the `current` policy's.
        exact: with the kept sets; otherwise as if nothing were truncated.
    """
    responses = list(TRUNCATED)
    draws = [(a, b) for a in responses for b in responses for _ in range(TRUNCATED[a] * TRUNCATED[b])]
    rows = [RESPONSES.index(response) for pair in draws for response in pair]
    batch = batch_of(rows)
    befores = [[None, *RESPONSES[row][:-1]] for row in rows]
    sampled, counts, ids = torch.zeros(len(rows), HORIZON), torch.zeros(len(rows), HORIZON), []
    for place, (row, before) in enumerate(zip(rows, befores, strict=True)):
        for t, token in enumerate(RESPONSES[row]):
            sampled[place, t] = torch.tensor(KEPT_SHARES[before[t]][token]).log()
            counts[place, t] = len(KEPT[before[t]])
            ids += KEPT[before[t]]
    kept = TokenLists(counts.int(), torch.tensor(ids, dtype=torch.int32)) if exact else None
    group_ids = torch.arange(len(draws)).repeat_interleave(2)
    advantages = estimate("rloo", REWARDS[rows], group_ids, torch.ones(len(rows), dtype=torch.bool))
    spread = torch.where(batch.response_mask, advantages[:, None], 0.0)
    batch = replace(batch, rollout_log_probs=sampled, advantages=spread, kept=kept)
    own = sampled if old == "rollout" else restricted_log_probs(model(), batch, exact=exact).detach().float()
    return replace(batch, old_log_probs=own)


def restricted_log_probs(policy, batch: TrainBatch, *, exact: bool = True) -> Tensor:
    """(B, T) of the policy restricted to `KEPT` and renormalised, from the full logits."""
    logits = policy(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    logits = logits.double().clone()
    for t in range(HORIZON):
        for row, before in enumerate(batch.input_ids[:, t].tolist()):
            kept = KEPT.get(before if t else None, (0, 1, 2)) if exact else (0, 1, 2)
            logits[row, t, [token for token in range(3) if token not in kept]] = -torch.inf
    chosen = logits.log_softmax(-1).gather(-1, batch.responses[..., None]).squeeze(-1)
    return torch.where(batch.response_mask, chosen, 0.0)


def enumerate_truncated(ranks: Ranks) -> dict[tuple[str, bool, int], Deviation]:
    """By π_old, exact sampling or not, rows per micro-batch: the gradient of `update` against that of the
    expected reward under the policy restricted to what is kept."""
    policy = model().double()
    batch = batch_of([RESPONSES.index(response) for response in TRUNCATED])
    probabilities = restricted_log_probs(policy, batch).sum(-1).exp()
    assert abs(probabilities.sum().item() - 1.0) < 1e-12
    rewards = torch.stack([REWARDS[RESPONSES.index(response)] for response in TRUNCATED])
    (-(probabilities * rewards.double()).sum()).backward()
    exact = torch.cat([p.grad.flatten() for p in policy.parameters()])
    actor = recording(ranks)
    found = {}
    for old, is_exact, micro_rows in itertools.product(("rollout", "current"), (True, False), (128, 5)):
        batch = truncated_batch(old, exact=is_exact)
        settings = Setting("reinforce", old).update_settings("seq-mean-token-sum", len(batch))
        actor.gradients = []
        update(batch, actor, ranks, replace(settings, micro_rows=micro_rows), lambda _: 0.0, 0)
        found[old, is_exact, micro_rows] = deviation(actor.gradients[0], exact)
    return found


def deviation(gradient: Tensor, exact: Tensor) -> Deviation:
    scale = float(gradient @ exact / (exact @ exact))
    return Deviation(scale, float((gradient / scale - exact).norm() / exact.norm()))


def enumerate_updates(ranks: Ranks, settings: list[Setting]) -> dict[tuple[Setting, str], Found]:
    """By setting and aggregation. A setting that is biased in large mini-batches is not tested in small
    ones."""
    actor = recording(ranks)
    exact = exact_gradient()
    shares = list(SIXTEENTHS.values())
    pairs = list(itertools.combinations_with_replacement(range(len(RESPONSES)), 2))
    counts = [(1 if i == j else 2) * shares[i] * shares[j] for i, j in pairs]
    assert sum(counts) == 256
    population = [pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)]

    def gradients(setting: Setting, agg_mode: str, groups: list[tuple[int, int]], rows: int) -> list[Tensor]:
        actor.gradients = []
        batch = groups_of(groups, setting.old)
        if setting.old == "current":  # to the last bit: the sign of a log-ratio of 1e-7 is noise
            own = [actor.policy(part.inputs).log_probs.detach() for part in batch.split(rows)]
            batch = replace(batch, old_log_probs=torch.cat(own))
        update(batch, actor, ranks, setting.update_settings(agg_mode, rows), lambda _: 0.0, 0)
        return actor.gradients

    found = {}
    for setting, agg_mode in itertools.product(settings, AGGREGATIONS):
        (whole,) = gradients(setting, agg_mode, population, 2 * len(population))
        large, small = deviation(whole, exact), None
        if large.error < ROUNDING:
            each = gradients(setting, agg_mode, pairs, 2)
            mean = sum(count / 256 * gradient for count, gradient in zip(counts, each, strict=True))
            small = deviation(mean, exact)
        found[setting, agg_mode] = Found(small, large)
    return found
