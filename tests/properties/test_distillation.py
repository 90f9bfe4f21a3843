"""On-policy distillation: what the real update does, every response enumerated, and what is refused and why.

The policy and the responses of `enumerated_updates`; the teacher is another random model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlctl.algos.kl import kl_estimate, top_k_kl
from rlctl.algos.rules import RejectRule, WeightRule
from rlctl.batch import TokenBatch, TokenLists
from rlctl.capabilities.teacher.run import Distillation
from rlctl.engine.deepspeed import FrozenPolicy
from rlctl.engine.ranks import Ranks
from rlctl.errors import SpecError
from rlctl.registry import KL_ESTIMATORS
from rlctl.run_spec.load import load_spec
from rlctl.train.score_batch import score_batch, with_advantages, with_penalties
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import StepTimer
from rlctl.train.update import Updated, update
from tests.processes import on_ranks
from tests.properties.enumerated_updates import (
    RESPONSES,
    ROUNDING,
    SIXTEENTHS,
    Recording,
    Setting,
    batch_of,
    model,
    recording,
    rollout_log_probs,
)

ROWS = list(range(len(RESPONSES)))
TEACHER = 1  # its seed
COEF = 0.5
KEY = "algorithm.teacher."
BAND = RejectRule("sequence", "ratio", "sum", 0.5, 2.0, "sequence")


@dataclass(frozen=True)
class Form:
    """A KL in the loss, the importance weights, and sequences per micro-batch."""

    kl_type: str | None
    top_k: int = 3
    weight: str | None = "sequence"
    normalize: bool = False
    rejects: bool = False
    micro: int = 100


FORMS = [
    Form(None, micro=5),
    Form(None, normalize=True),
    Form(None, normalize=True, micro=5),
    Form(None, rejects=True, micro=5),
    Form(None, top_k=2),
    Form(None, top_k=1, micro=5),
    Form(None, top_k=50),
    Form(None, weight=None),
    Form(None, weight="token"),
    Form("k2", micro=5),
    Form("k2", weight="token"),
    Form("unbiased", weight=None),
    Form("unbiased", weight="token", micro=5),
    Form("sequence"),
    Form("sequence", weight=None),
    Form("k1"),
    Form("k3"),
]


# --- what is expected, in float64, from full logits --------------------------------------------------------
@dataclass(frozen=True)
class World:
    """Every response once: log-probs of all three tokens at each of its places, of policy and teacher."""

    policy: torch.nn.Module
    tokens: Tensor  # (M,)
    own: Tensor  # (M, 3), with gradient
    teacher: Tensor  # (M, 3)
    response: Tensor  # (M,)

    @classmethod
    def new(cls) -> World:
        batch, policy, teacher = batch_of(ROWS), model().double(), model(TEACHER).double()
        inputs = [ids[None] for ids in batch.token_ids.split(batch.lengths.tolist())]
        own, other = (
            torch.cat([one(input_ids=ids).logits[0, :-1] for ids in inputs]).log_softmax(-1)
            for one in (policy, teacher)
        )
        return cls(policy, batch.inputs.tokens, own, other.detach(), batch.units.episode.index)

    def chosen(self, log_probs: Tensor) -> Tensor:
        return log_probs.gather(1, self.tokens[:, None]).squeeze(1)

    def total(self, values: Tensor) -> Tensor:
        return torch.zeros(len(RESPONSES), dtype=torch.float64).index_add(0, self.response, values)

    @property
    def probabilities(self) -> Tensor:
        return self.total(self.chosen(self.own)).exp()

    def gradient(self, value: Tensor) -> Tensor:
        self.policy.zero_grad()
        value.backward()
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])


def bucketed(world: World, count: int) -> tuple[Tensor, Tensor]:
    """Both distributions over the teacher's most likely tokens and all others together."""
    most = world.teacher.topk(count).indices

    def merged(log_probs: Tensor) -> Tensor:
        listed = log_probs.exp().gather(1, most)
        return torch.cat([listed, 1.0 - listed.sum(1, keepdim=True)], 1).clamp(min=1e-300)

    return merged(world.own), merged(world.teacher)


SHARES = torch.tensor(list(SIXTEENTHS.values()), dtype=torch.float64) / 16


def expected(form: Form) -> Tensor:
    """The gradient that the form is said to have."""
    world = World.new()
    if form.kl_type == "sequence":  # of whole responses
        log_probs, others = (world.total(world.chosen(x)) for x in (world.own, world.teacher))
        return world.gradient((log_probs.exp() * (log_probs - others)).sum())
    own, teacher = (
        bucketed(world, min(form.top_k, 2)) if form.top_k < 3 else (world.own.exp(), world.teacher.exp())
    )
    kl = (own * (own / teacher).log()).sum(1)
    if form.kl_type == "k3":
        kl = (teacher * (teacher / own).log()).sum(1)
    if form.kl_type == "k1":
        kl = 0.0 * kl
    # Prefixes follow the policy with weights of whole responses, else the sampler.
    weighs = form.weight == "sequence"
    follows = world.probabilities.detach() if weighs else SHARES
    if form.rejects:
        ratios = world.probabilities.detach() / SHARES
        follows = follows * ((ratios >= 0.5) & (ratios <= 2.0))
    return world.gradient((follows[world.response] * kl).sum())


# --- what the update does ----------------------------------------------------------------------------------
def spec_of(*overrides: str):
    return load_spec([], [], [f"{KEY}path=teacher", f"{KEY}kl_coef={COEF}", *overrides]).spec


def scored(
    rows: list[int], ranks: Ranks, spec, actor: Recording, group_ids: Tensor | None = None
) -> TokenBatch:
    """The responses with the teacher's columns, by the code of the training loop."""
    teacher = FrozenPolicy(model(TEACHER), ranks, zero_stage=0, dtype=torch.float32, temperature=1.0)
    distillation = Distillation(spec)
    distillation.model, distillation.vocabulary = teacher, 3
    parts = {"actor": actor, "ref": None, "critic": None, "capabilities": (distillation,)}
    run = SimpleNamespace(
        spec=spec,
        estimator=EstimatorSettings.of(spec.algorithm),
        ranks=ranks,
        data_ranks=ranks,
        **parts,
    )
    batch = replace(batch_of(rows, group_ids), rollout_log_probs=rollout_log_probs(rows))
    return score_batch(run, batch, StepTimer(ranks.device))


def taught(form: Form, actor: Recording, ranks: Ranks) -> tuple[Tensor, Updated, TokenBatch]:
    rows = [row for row in ROWS for _ in range(SIXTEENTHS[RESPONSES[row]])]
    spec = spec_of(f"{KEY}top_k={form.top_k}", "algorithm.rollout_correction.bypass_mode=true")
    if form.kl_type:
        spec.algorithm.teacher.__dict__["kl_type"] = form.kl_type  # also those that are refused
    batch = scored(rows, ranks, spec, actor)
    weight = WeightRule(form.weight, "truncate", upper=1e9, normalize=form.normalize)
    setting = Setting("reinforce", "rollout", weight, (BAND,) if form.rejects else ())
    form_of = {"micro_sequences": form.micro, "teacher": spec.algorithm.teacher}
    settings = setting.update_settings("seq-mean-token-sum", len(rows), **form_of)
    actor.gradients = []
    outcome = update(batch, actor, ranks, settings, lambda _: 0.0, 0)
    return actor.gradients[0], outcome, batch


def in_reward(actor: Recording, ranks: Ranks) -> Tensor:
    """RLOO on every pair as often as it is drawn, without other rewards, decoupled."""
    rows = [row for row in ROWS for _ in range(SIXTEENTHS[RESPONSES[row]])]
    pairs = [row for pair in itertools.product(rows, rows) for row in pair]
    spec = spec_of(f"{KEY}kl_in=reward", f"{KEY}alone=true", "algorithm.rollout_correction.bypass_mode=false")
    group_ids = torch.arange(len(pairs) // 2).repeat_interleave(2)
    batch = scored(pairs, ranks, spec, actor, group_ids)
    batch = replace(batch, rewards=torch.ones_like(batch.rollout_log_probs))
    batch, _, metrics = with_penalties(batch, spec.algorithm, None, ranks, [Distillation(spec)])
    world = World.new()
    assert set(metrics) == {"distill/reverse_kl"}
    gaps = world.total(world.chosen(world.own - world.teacher)) / torch.tensor([len(r) for r in RESPONSES])
    assert metrics["distill/reverse_kl"] == pytest.approx(float(SHARES @ gaps), rel=1e-5)
    batch = with_advantages(batch, EstimatorSettings.of(spec.algorithm), ranks)
    settings = Setting("reinforce", "current").update_settings("seq-mean-token-sum", len(pairs) // 2)
    actor.gradients = []
    update(batch, actor, ranks, settings, lambda _: 0.0, 0)
    return actor.gradients[0]


def gradients(ranks: Ranks):
    actor = recording(ranks)
    found = {}
    for form in FORMS:
        found[form], outcome, batch = taught(form, actor, ranks)
        if form.kl_type is None and not form.rejects:
            check_metrics(form, outcome, batch)
    return found, in_reward(actor, ranks)


def check_metrics(form: Form, outcome: Updated, batch: TokenBatch) -> None:
    """Means over the tokens of the batch; the bound is below the KL, and the KL if all is listed."""
    world = World.new()
    full = (world.own.exp() * (world.own - world.teacher)).sum(1).detach()
    own, teacher = bucketed(world, min(form.top_k, 3))
    bound = (own * (own / teacher).log()).sum(1).detach()
    count = SHARES[world.response]
    assert (bound <= full + 1e-9).all()
    mean = float((count * bound).sum() / count.sum())
    assert outcome.metrics["distill/kl_loss"] == pytest.approx(mean, rel=1e-5)
    tail = float((count * own[:, -1].detach()).sum() / count.sum())
    assert outcome.metrics["distill/tail_mass"] == pytest.approx(tail, rel=1e-4, abs=1e-12)
    assert len(batch.column("most_likely")) == len(batch.column("teacher_log_probs"))


@cache
def enumerated(where):
    [found] = on_ranks(1, gradients, where=where)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    return enumerated(tmp_path_factory.mktemp("distillation"))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gradient_in_the_loss(form: Form, found) -> None:
    exact, scale = expected(form), expected(Form(None)).norm()
    gradient = found[0][form] / COEF
    assert (gradient - exact).norm() < 2 * ROUNDING * scale
    if form.kl_type == "k1":
        assert exact.norm() == 0.0


def test_the_gradient_in_the_reward_is_that_of_whole_responses(found) -> None:
    exact = expected(Form("sequence"))
    assert (found[1] / COEF - exact).norm() < 2 * ROUNDING * exact.norm()


def test_the_forms_differ() -> None:
    """Otherwise the test above could not tell them apart."""
    exact = [
        expected(form)
        for form in (
            Form(None),
            Form(None, top_k=1),
            Form(None, weight=None),
            Form(None, rejects=True),
            Form("sequence"),
            Form("k3"),
        )
    ]
    for one, other in itertools.combinations(exact, 2):
        assert (one - other).norm() > 0.01 * exact[0].norm()


# --- the formula -------------------------------------------------------------------------------------------
def test_the_bound_grows_with_the_list_and_ends_at_the_kl() -> None:
    draw = torch.Generator().manual_seed(0)
    own, teacher = (torch.randn(50, 9, generator=draw).double().mul(2).log_softmax(-1) for _ in range(2))
    full = (own.exp() * (own - teacher)).sum(1)
    before = torch.zeros(50)
    for count in range(1, 10):
        most = teacher.topk(count).indices
        rest = torch.ones_like(own).scatter(1, most, 0.0).bool()
        parts = [
            torch.cat([x.gather(1, most), x.masked_fill(~rest, -torch.inf).logsumexp(1, keepdim=True)], 1)
            for x in (own, teacher)
        ]
        bound = top_k_kl(*(part.clamp(min=-3e38) for part in parts))
        assert (bound >= before - 1e-12).all()
        assert (bound <= full + 1e-12).all()
        before = bound
    torch.testing.assert_close(before, full)


def test_a_tail_too_small_for_one_minus_the_sum_counts() -> None:
    """Float32 log-probs of a policy that gives 1e-9 to all but one token."""
    logits = torch.tensor([[0.0, -20.0, -21.0, -22.0, -23.0]], requires_grad=True)
    listed = torch.tensor([[0, 1]])
    found = []
    for values in (logits, logits.detach() - torch.tensor([0.0, 0.0, 9.0, 9.0, 9.0])):
        own = values.log_softmax(-1)
        tail = values.scatter(1, listed, -1e38).logsumexp(1) - values.logsumexp(1)
        found.append(torch.cat([own.gather(1, listed), tail[:, None]], 1))
    kl = top_k_kl(*found)
    tail = logits.detach().double().softmax(-1)[0, 2:].sum()
    assert kl.item() == pytest.approx(9.0 * tail.item(), rel=0.05)
    kl.sum().backward()
    assert logits.grad.isfinite().all()


def score_gradient(kind: str, logits: Tensor, teacher: Tensor) -> Tensor:
    """Σ_v π(v) k(v) ∇ log π(v): the gradient of an estimator as the reward of its own token."""
    logits = logits.clone().requires_grad_()
    own = logits.log_softmax(-1)
    values = kl_estimate(kind, own.detach(), teacher)
    (own.exp().detach() * values * own).sum().backward()
    return logits.grad


def test_what_is_refused_in_the_reward_has_another_gradient() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=draw, dtype=torch.float64)
    direction = torch.randn(6, generator=draw, dtype=torch.float64)
    sizes = {}
    for distance in (1.0, 0.01):
        teacher = (logits + distance * direction).log_softmax(-1)
        held = logits.clone().requires_grad_()
        own = held.log_softmax(-1)
        [reverse] = torch.autograd.grad((own.exp() * (own - teacher)).sum(), held, retain_graph=True)
        [forward] = torch.autograd.grad((teacher.exp() * (teacher - own)).sum(), held)
        torch.testing.assert_close(score_gradient("k1", logits, teacher), reverse)
        torch.testing.assert_close(score_gradient("k3", logits, teacher), reverse - forward)
        sizes[distance] = [
            score_gradient(kind, logits, teacher).norm() / distance for kind in ("k1", "k2", "k3")
        ]
    # A tenth, or less, of the first order remains for k2 and k3 as the distance falls to a hundredth.
    for far, near, first_order in zip(sizes[1.0], sizes[0.01], (True, False, False), strict=True):
        assert bool(near > 0.5 * far) is first_order
        assert first_order or near < 0.1 * far


# --- the spec ----------------------------------------------------------------------------------------------
def problems_of(*overrides: str) -> dict[str, str]:
    try:
        found = load_spec([], [], [f"{KEY}path=a/b", *overrides]).warnings
    except SpecError as error:
        found = error.problems
    return {problem.key: problem.what for problem in found if problem.severity == "error"}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["kl_type=k1"], "kl_type", "zero on average"),
        (["kl_type=k3"], "kl_type", "forward KL"),
        (["kl_type=low_var_kl"], "kl_type", "forward KL"),
        (["kl_type=k2", "kl_in=reward"], "kl_type", "second order"),
        (["kl_type=k3", "kl_in=reward"], "kl_type", "cancel"),
        (["kl_type=unbiased", "kl_in=reward"], "kl_type", "k1 alone"),
        (["kl_in=reward", "top_k=8"], "top_k", "same for every sampled token"),
        (["path=embedded"], "path", "no directory"),
        (["kl_coef=0"], "kl_coef", "greater than 0"),
        ([], "", ""),
        (["kl_type=k2"], "", ""),
        (["kl_in=reward", "kl_type=k1"], "", ""),
        (["kl_in=reward"], "", ""),
    ],
)
def test_forms_without_the_right_gradient_are_refused(overrides: list[str], key: str, words: str) -> None:
    found = problems_of(*(KEY + each for each in overrides))
    assert set(found) == ({KEY + key} if key else set())
    assert not key or words in found[KEY + key]


def test_every_estimator_in_the_loss_is_enumerated() -> None:
    assert {form.kl_type for form in FORMS} == {None, *KL_ESTIMATORS}


def test_what_cannot_be_combined_is_refused() -> None:
    centering = "algorithm.rollout_correction.score_centering"
    assert set(problems_of(f"{centering}=8", "algorithm.rollout_correction.rollout_is=null")) == {centering}
    remax = problems_of(f"{KEY}alone=true", "algorithm.adv_estimator=remax")
    assert set(remax) == {f"{KEY}alone"}
    assert not problems_of("algorithm.adv_estimator=remax")


def test_lists_of_the_teacher_are_columns() -> None:
    """Picked with the batch."""
    batch = batch_of([0, 1, 2])
    count = len(batch.rollout_log_probs)
    lists = TokenLists(torch.full((count,), 2), torch.arange(2 * count), torch.zeros(2 * count))
    batch = batch.with_columns(most_likely=lists, teacher_tail=torch.arange(float(count)))
    again = batch.pick([2, 0, 1]).pick([1, 2, 0])
    assert torch.equal(again.column("most_likely").ids, lists.ids)
    assert torch.equal(again.column("teacher_tail"), batch.column("teacher_tail"))
    assert again.inputs.most_likely is again.column("most_likely")
