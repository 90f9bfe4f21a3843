"""The critic's update against a slow one of its own, and the same however the batch is cut."""

from __future__ import annotations

import math
from statistics import fmean, pvariance

import pytest
import torch

from rlctl.train.update_critic import update_critic
from tests.processes import on_ranks
from tests.rounding import assert_same_steps
from tests.sweeps import asked_for, swept
from tests.unit.engine.test_critic import naive_values
from tests.unit.train import critics
from tests.unit.train.critics import CASES, CLIP, PlainCritic, batch_of, lr_of, spec_of
from tests.unit.train.updates import HORIZON, ROWS, Micro, alone

#: Number of ranks → what a pass holds; on one rank, the whole batch is what the others are compared with.
PASSES: dict[int, tuple[Micro, ...]] = {1: (4, 2, 1, "30 tokens"), 2: (8, 1, "30 tokens")}
CUTS = [(ranks, name, micro) for ranks, passes in PASSES.items() for name in CASES for micro in passes]
#: Every case twice on one rank and once on two, and every size of a pass.
SAMPLE = [
    (ranks, name, passes[(2 * place + turn) % len(passes)])
    for ranks, passes in PASSES.items()
    for place, name in enumerate(CASES)
    for turn in range(3 - ranks)
]


def slow_loss(module, batch, agg_mode: str):
    """(loss, new values of counted tokens, how many were clipped) of one mini-batch."""
    values = naive_values(module.body, module.head.weight, batch)
    rows, counts, seen, clipped = [], [], [], 0
    ends = batch.units.episode.lengths.cumsum(0).tolist()
    for places in (range(start, end) for start, end in zip([0, *ends], ends, strict=False)):
        tokens = []
        for t in places:
            new, old, target = values[t], float(batch.column("values")[t]), float(batch.column("returns")[t])
            held = new.clamp(old - CLIP, old + CLIP)
            clipped += bool((held - target) ** 2 > (new - target) ** 2)
            tokens.append(0.5 * torch.maximum((new - target) ** 2, (held - target) ** 2))
            seen.append(new.item())
        total = sum(tokens, torch.zeros(()))
        rows.append(total / max(len(places), 1) if agg_mode == "seq-mean-token-mean" else total)
        counts.append(len(places))
    num_sequences = sum(count > 0 for count in counts)
    divisor = {
        "token-mean": sum(counts),
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * HORIZON,
    }[agg_mode]
    return sum(rows, torch.zeros(())) / divisor, seen, clipped


def slow_update(name: str):
    """All steps of one batch by SGD; (module, metrics)."""
    agg_mode, epochs, mini = CASES[name]
    module, batch = PlainCritic().module, batch_of()
    losses, seen, clipped, norms = [], [], 0, []
    for _ in range(epochs):
        for start in range(0, ROWS, mini):
            part = batch.pick(range(start, start + mini))
            module.zero_grad()
            loss, values, bound = slow_loss(module, part, agg_mode)
            loss.backward()
            named = dict(module.named_parameters())
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in named.values())))
            with torch.no_grad():
                for parameter in named.values():
                    parameter.sub_(lr_of(len(losses)) * parameter.grad)
            losses.append(loss.item())
            seen, clipped = seen + values, clipped + bound
    returns = batch.column("returns").tolist()
    residuals = (batch.column("returns") - batch.column("values")).tolist()
    return module, {
        "critic/vf_loss": fmean(losses),
        "critic/vf_clipfrac": clipped / len(seen),
        "critic/vpred_mean": fmean(seen),
        "critic/vf_explained_var": 1 - pvariance(residuals) / pvariance(returns),
        "critic/grad_norm": fmean(norms),
        "critic/lr": lr_of(len(losses) - 1),
        "critic/skipped_updates": 0.0,
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro", [16, 3, 1])
def test_steps_and_metrics_are_those_of_the_formula(name: str, micro: int) -> None:
    module, wanted = slow_update(name)
    critic = PlainCritic()
    metrics = update_critic(batch_of(), critic, alone(), spec_of(name, micro_sequences=micro), lr_of, 0)
    assert metrics == pytest.approx(wanted, rel=2e-4, abs=1e-6)
    assert 0.1 < metrics["critic/vf_clipfrac"] < 0.9
    start, theirs = dict(PlainCritic().module.named_parameters()), dict(module.named_parameters())
    for parameter, tensor in critic.module.named_parameters():
        torch.testing.assert_close(tensor, theirs[parameter], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(theirs["head.weight"], start["head.weight"], atol=1e-3)
    _, epochs, mini = CASES[name]
    assert critic.num_forwards == epochs * ROWS // mini * math.ceil(min(mini, ROWS) / micro)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("critics")
    plans: dict[int, list[tuple[str, Micro]]] = {1: [(name, 16) for name in CASES], 2: []}
    for ranks, *case in sorted(asked_for(request, "world_size", "name", "micro"), key=str):
        plans[ranks].append(tuple(case))
    return {n: on_ranks(n, critics.invariance, plan, where=where) for n, plan in plans.items()}


@pytest.mark.parametrize(("world_size", "name", "micro"), swept(CUTS, SAMPLE))
def test_same_result_however_cut(found, world_size: int, name: str, micro: Micro) -> None:
    metrics, weights = found[1][0][name, 16]
    assert float(weights["head.weight"].abs().max()) > 1e-3
    for result in found[world_size]:
        got, tensors = result[name, micro]
        assert got == pytest.approx(metrics, rel=2e-4, abs=2e-6)
        assert_same_steps(tensors, weights, critics.lrs_of(name), sum(critics.LENGTHS))


@pytest.mark.parametrize(("seen", "explained"), [("returns", 1.0), ("constant", 0.0), ("nothing", 0.0)])
def test_explained_variance(seen: str, explained: float) -> None:
    batch = batch_of()
    if seen == "returns":
        batch = batch.with_columns(values=batch.column("returns"))
    elif seen == "constant":
        batch = batch.with_columns(values=torch.full_like(batch.column("returns"), 0.7))
    else:  # to explain
        batch = batch.with_columns(returns=torch.full_like(batch.column("returns"), 0.7))
    metrics = update_critic(batch, PlainCritic(), alone(), spec_of("one step"), lr_of, 0)
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, abs=1e-6)


def test_learning_rate_follows_the_count_of_its_own_updates() -> None:
    asked: list[int] = []

    def schedule(number: int) -> float:
        asked.append(number)
        return 1e-4 * number

    metrics = update_critic(batch_of(), PlainCritic(), alone(), spec_of("epochs"), schedule, 40)
    assert asked == [40, 41, 42, 43]
    assert metrics["critic/lr"] == pytest.approx(0.0043)


def test_nothing_graded_makes_no_step() -> None:
    batch = batch_of().pick([])
    critic = PlainCritic()
    metrics = update_critic(batch, critic, alone(), spec_of("epochs"), lr_of, 0)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["critic/skipped_updates"] == 4.0
    start = dict(PlainCritic().module.named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in critic.module.named_parameters())
