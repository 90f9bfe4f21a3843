"""The update against a slow computation of its own, and with everything that can be wrong in a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from rlctl.algos.segments import Segments
from rlctl.batch import TokenBatch
from rlctl.errors import RunFailure
from rlctl.run_spec.run_spec import GuardrailsSpec
from rlctl.train.update import update
from tests.models import naive_log_probs, tiny_model
from tests.reference.correction import reference
from tests.unit.train.slow import slow_loss
from tests.unit.train.updates import (
    BYPASS,
    CASES,
    CLIP,
    DECOUPLED,
    REINFORCE,
    ROWS,
    RS,
    Case,
    PlainEngine,
    alone,
    batch_of,
    by_row,
    settings_of,
)

LR = 0.05


def updated(correction, batch=None, *, seed: int = 0, **settings):
    """(outcome, engine, weights before) of one `update` by plain SGD."""
    model = tiny_model(seed=seed)
    batch = batch_of(model) if batch is None else batch
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = PlainEngine(model)
    outcome = update(batch, engine, alone(), settings_of(correction, **settings), lambda _: LR, 0)
    return outcome, engine, before


def tokens_of(batch: TokenBatch, row: int) -> torch.Tensor:
    """Indices of the tokens of an episode."""
    return batch.units.episode.entries_of(torch.tensor([row]))


def moved(engine: PlainEngine, before: dict[str, torch.Tensor]) -> float:
    return max(float((p.detach() - before[n]).abs().max()) for n, p in engine.model.named_parameters())


# --- the gradient ---------------------------------------------------------------------------------


@cache
def by_the_formula(name: str):
    """The batch of a case, its loss and the gradient."""
    case = CASES[name]
    model = tiny_model()
    batch = case.batch(model)
    if case.correction["bypass_mode"]:
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    loss = slow_loss(model, batch, settings_of(case.correction, **case.options))
    loss.total.backward()
    return batch, loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("micro", [16, 5])
def test_gradient_is_that_of_the_formula(name: str, micro: int) -> None:
    case = CASES[name]
    batch, loss, wanted = by_the_formula(name)
    outcome, engine, _ = updated(case.correction, batch, micro_sequences=micro, **case.options)
    assert outcome.metrics["actor/pg_loss"] == pytest.approx(loss.policy.item(), rel=1e-4, abs=1e-6)
    if loss.kl is not None:
        assert outcome.metrics["actor/kl_loss"] == pytest.approx(loss.kl.item(), rel=1e-4, abs=1e-6)
        assert outcome.metrics["actor/kl_coef"] == case.terms["kl_loss_coef"]
    assert any(gradient.abs().max() > 1e-3 for gradient in wanted.values())
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(engine.gradient[parameter], gradient, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("micro", [ROWS, 5])
def test_figures_of_the_policy_are_means_over_all_response_tokens(micro: int) -> None:
    """`ppo_kl` is the mean of log π_old − log π_θ: positive where sampled tokens have become less likely."""
    model = tiny_model()
    batch = batch_of(model)
    own, entropy = (x.detach() for x in naive_log_probs(model, batch))
    # Half of the tokens are far from π_old, upwards and downwards: past the clip of [0.8, 1.3].
    shift = torch.where(batch.units.episode.places % 2 == 0, 0.5, -0.1)
    old = own.float() + shift
    batch = replace(batch, old_log_probs=old, advantages=-torch.ones_like(old))
    outcome, engine, _ = updated(DECOUPLED | CLIP | RS | {"rollout_is": None}, batch, micro_sequences=micro)
    assert 0.05 < outcome.metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.95
    assert outcome.metrics["actor/ppo_kl"] == pytest.approx((old - own).mean().item(), rel=1e-4)
    assert outcome.metrics["actor/ppo_kl"] > 0.0
    assert outcome.metrics["actor/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert outcome.metrics["actor/log_ppl"] == pytest.approx(-own.mean().item(), rel=1e-4)
    clipped = outcome.seen.keep & (shift > 0)
    assert outcome.metrics["actor/pg_clipfrac"] == pytest.approx(clipped.double().mean().item(), rel=1e-5)
    norm = math.sqrt(sum(float(g.square().sum()) for g in engine.gradient.values()))
    assert outcome.metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_figures_of_several_steps_are_their_means() -> None:
    """Loss and gradient norm per step; the rate is the last one's; what is counted is counted once a step."""
    batch = batch_of(tiny_model())
    correction = DECOUPLED | CLIP | {"rollout_is": "sequence"}
    options = {"kl_loss_type": "k2", "kl_loss_coef": 0.5}
    model = tiny_model()
    engine = PlainEngine(model)
    settings = settings_of(correction, mini_rows=4, **options)
    whole = update(batch, engine, alone(), settings, lambda number: 0.01 * (number + 1), 6)
    model = tiny_model()
    engine = PlainEngine(model)
    steps = []
    for place in range(4):
        part = replace(batch.pick(range(4 * place, 4 * place + 4)), group_ids=torch.arange(4))
        alike = settings_of(correction, mini_rows=4, rows=4, **options)
        outcome = update(part, engine, alone(), alike, lambda number: 0.01 * (number + 1), 6 + place)
        steps.append(outcome.metrics)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
        mean = sum(metrics[name] for metrics in steps) / 4
        assert whole.metrics[name] == pytest.approx(mean, rel=1e-5, abs=1e-6), name
    assert whole.metrics["actor/lr"] == pytest.approx(0.10)
    factors = [metrics["rollout_corr/rollout_is_batch_norm_factor"] for metrics in steps]
    assert max(factors) > 1.01 * min(factors)
    found = whole.metrics["rollout_corr/rollout_is_batch_norm_factor"]
    assert found == pytest.approx(sum(factors) / 4, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_epoch_has_the_same_sequences(name: str) -> None:
    """Without a change of the weights, three epochs measure what one does: each sequence counts once."""
    batch = batch_of(tiny_model())
    far = batch.rollout_log_probs.clone()
    far[tokens_of(batch, 2)] -= 12.0  # out of the clamp
    old = far if CASES[name].correction["bypass_mode"] else batch.old_log_probs
    batch = replace(batch, rollout_log_probs=far, old_log_probs=old)
    found = []
    for epochs in (1, 3):
        settings = settings_of(CASES[name].correction, epochs=epochs, mini_rows=8)
        outcome = update(batch, PlainEngine(tiny_model()), alone(), settings, lambda _: 0.0, 0)
        found.append(outcome.metrics)
    once, thrice = found
    assert once["rollout_corr/saturated_sequences"] == 1.0
    names = [key for key in once if key.startswith(("rollout_corr/", "training/"))]
    assert len(names) > 25
    for key in names:
        assert thrice[key] == pytest.approx(once[key], rel=1e-9, abs=1e-12), key


def test_a_sequence_that_saturates_in_one_epoch_is_counted() -> None:
    """In bypass mode its ratio changes from epoch to epoch."""
    batch = batch_of(tiny_model())
    settings = settings_of(BYPASS | REINFORCE | {"rollout_is": "token"}, epochs=2)
    saturated = {}
    for lr in (0.0, 300.0):  # the second epoch finds a policy far away
        outcome = update(batch, PlainEngine(tiny_model()), alone(), settings, lambda _, lr=lr: lr, 0)
        saturated[lr] = outcome.metrics["rollout_corr/saturated_sequences"]
    assert saturated[0.0] == 0.0
    assert saturated[300.0] == int(saturated[300.0]) > 0


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.correction["bypass_mode"]])
def test_logged_metrics_are_the_oracles(name: str) -> None:
    model = tiny_model()
    batch = batch_of(model)
    log_probs, _ = naive_log_probs(model, batch)
    correction = CASES[name].correction
    known = reference(
        *([x.tolist() for x in by_row(batch, column)] for column in (log_probs, batch.rollout_log_probs)),
        [[True] * len(x) for x in by_row(batch, log_probs)],
        settings_of(correction).rules,
        [x.tolist() for x in by_row(batch, batch.advantages)],
    )
    outcome, _, _ = updated(correction, batch, micro_sequences=4)
    for key, value in known.metrics.items():
        assert outcome.metrics[key] == pytest.approx(value, rel=1e-3, abs=2e-5), key


def test_one_forward_pass_where_one_is_enough() -> None:
    for correction, micro, passes in [
        (BYPASS | REINFORCE | {"rollout_is": "sequence"}, ROWS, 1),  # normalizers by the pass of the loss
        (BYPASS | REINFORCE | {"rollout_is": "sequence"}, 4, 4),  # normalising scales the gradient afterwards
        (BYPASS | REINFORCE | {"rollout_is": "sequence", "rollout_is_batch_normalize": False}, 4, 4),
        (BYPASS | CLIP | RS | {"rollout_is": "token"}, 4, 4),
        (DECOUPLED | CLIP | {"rollout_is": "sequence"}, 4, 4),
    ]:
        _, engine, _ = updated(correction, micro_sequences=micro)
        assert engine.num_forwards == passes, (correction, micro)
    # The mean weight divides the policy-gradient term alone: with another term it must be computed before the
    # backward pass.
    _, engine, _ = updated(BYPASS | REINFORCE | {"rollout_is": "token"}, micro_sequences=4, entropy_coeff=0.1)
    assert engine.num_forwards == 8


def test_rows_without_advantage_have_no_backward_pass() -> None:
    some, every = (0, 1, 2, 5, 6, 7, 9, 10, 12), tuple(range(ROWS))

    def passes(rows: tuple[int, ...], loss: str = "reinforce", **options: object) -> tuple[int, list[bool]]:
        """Number of forward passes, and of each backward pass whether it was the last before the step."""
        batch = Case(BYPASS, zero_advantage=rows).batch(tiny_model())
        correction = BYPASS | {"loss_type": loss, "rollout_is": "sequence"}
        _, engine, _ = updated(correction, batch, **{"micro_sequences": 4, **options})
        return engine.num_forwards, engine.last

    assert passes(()) == (4, [False, False, False, True])
    assert passes(some) == (5, [False, True])  # nine without and seven with an advantage
    num_forwards, last = passes(some, micro_sequences=1, micro_tokens=24)
    assert len(last) < 0.7 * num_forwards
    # The step is taken, from the last pass, even where nothing has an advantage.
    assert passes(every) == (4, [True])
    # Another term of the loss, or the loss itself, has a gradient there.
    assert len(passes(some, entropy_coeff=0.1)[1]) == 4
    assert len(passes(some, loss="p3o")[1]) == 4


@pytest.mark.parametrize("mode", [BYPASS | REINFORCE, DECOUPLED | CLIP])
def test_the_last_pass_of_every_mini_batch_closes_its_step(mode) -> None:
    """An engine adds gradients over ranks there, and there only."""
    for mini, micro, flags in [(16, 16, [True]), (16, 6, [False, False, True]), (8, 4, [False, True] * 2)]:
        _, engine, _ = updated(mode, mini_rows=mini, micro_sequences=micro)
        assert engine.last == flags


def test_a_guard_scales_the_rate_of_a_step_or_withholds_it() -> None:
    correction = BYPASS | REINFORCE | {"rollout_is": "sequence"}
    for action in ("warn", "scale_lr", "skip_step"):
        engine = PlainEngine(tiny_model())
        before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        guard = GuardrailsSpec(mode="act", ess_floor=0.999, on_low_ess=action, on_drift="warn")
        batch, settings = batch_of(tiny_model()), settings_of(correction)
        outcome = update(batch, engine, alone(), settings, lambda _: LR, 0, guard=guard)
        ess = outcome.metrics["rollout_corr/rollout_is_raw_eff_sample_size"]
        assert ess < 0.9
        rate = LR * ess / 0.999 if action == "scale_lr" else LR
        assert outcome.metrics["actor/lr"] == pytest.approx(rate)
        for name, parameter in engine.model.named_parameters():
            step = torch.zeros(()) if action == "skip_step" else rate * engine.gradient[name]
            torch.testing.assert_close(parameter.detach(), before[name] - step, rtol=1e-4, atol=1e-7)
        # What a guard withholds is its decision, not a step that could not be made.
        assert outcome.metrics["rollout_corr/skipped_updates"] == 0.0
        assert outcome.num_updates == (action != "skip_step")


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_makes_no_step(bad: float) -> None:
    batch = batch_of(tiny_model())
    advantages = batch.advantages.clone()
    advantages[tokens_of(batch, 4)[0]] = bad
    outcome, engine, before = updated(BYPASS | REINFORCE, replace(batch, advantages=advantages))
    assert outcome.metrics["rollout_corr/skipped_updates"] == 1.0
    assert moved(engine, before) == 0.0


# --- rejection and bad numbers ----------------------------------------------------------------------


def far_batch():
    """Every token's ratio is about e³: outside any band of RS."""
    batch = batch_of(tiny_model())
    return replace(batch, rollout_log_probs=batch.rollout_log_probs - 3.0)


@pytest.mark.parametrize("denominator", ["before_rejection", "after_rejection"])
@pytest.mark.parametrize("mode", [BYPASS | REINFORCE, BYPASS | CLIP, DECOUPLED | CLIP, DECOUPLED | REINFORCE])
@pytest.mark.parametrize("micro", [16, 4])
def test_everything_rejected_makes_no_step(mode, denominator: str, micro: int) -> None:
    correction = mode | RS | {"rollout_is": "sequence", "loss_denominator": denominator}
    outcome, engine, before = updated(correction, far_batch(), micro_sequences=micro)
    assert outcome.metrics["rollout_corr/skipped_updates"] == 1.0
    assert outcome.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert outcome.num_updates == 0
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert moved(engine, before) == 0.0


@pytest.mark.parametrize(
    ("name", "bad", "micro"),
    [
        (name, bad, (16, 4)[(place + turn) % 2])
        for place, name in enumerate(CASES)
        for turn, bad in enumerate((math.nan, math.inf, -math.inf))
    ],
)
def test_one_bad_rollout_log_prob_costs_one_sequence(name: str, bad: float, micro: int) -> None:
    case = CASES[name]
    batch = batch_of(tiny_model())
    poisoned = batch.rollout_log_probs.clone()
    poisoned[tokens_of(batch, 5)[0]] = bad
    fields = {"rollout_log_probs": poisoned}
    if case.correction["bypass_mode"]:
        fields["old_log_probs"] = poisoned  # as `score_batch` has it
    outcome, engine, before = updated(
        case.correction, replace(batch, **fields), micro_sequences=micro, **case.options
    )
    assert outcome.metrics["rollout_corr/nonfinite_sequences"] == 1.0
    assert outcome.seen.nonfinite.nonzero().flatten().tolist() == [5]
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert abs(outcome.metrics["actor/ppo_kl"]) < 1.0
    assert all(gradient.isfinite().all() for gradient in engine.gradient.values())
    assert 0.0 < moved(engine, before) < 1.0
    there = tokens_of(batch, 5)
    assert not outcome.seen.keep[there].any()
    assert not outcome.seen.weights[there].any()


@pytest.mark.parametrize("mode", [BYPASS | REINFORCE, BYPASS | CLIP, DECOUPLED | CLIP])
def test_bad_sequence_weighs_as_much_as_a_rejected_one(mode) -> None:
    """It stays in the denominator before rejection, and leaves it after."""
    batch = batch_of(tiny_model())
    if mode["bypass_mode"]:
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    poisoned = batch.rollout_log_probs.clone()
    poisoned[tokens_of(batch, 5)] = math.nan
    with_bad = replace(batch, rollout_log_probs=poisoned)
    without = batch.pick([row for row in range(ROWS) if row != 5])
    correction = mode | {"rollout_is": "sequence", "loss_denominator": "after_rejection"}
    _, bad, _ = updated(correction, with_bad)
    _, clean, _ = updated(correction, without)
    for name, gradient in clean.gradient.items():
        torch.testing.assert_close(bad.gradient[name], gradient, rtol=1e-4, atol=1e-6)


def test_too_many_bad_sequences_stop_the_run() -> None:
    batch = batch_of(tiny_model())
    poisoned = batch.rollout_log_probs.clone()
    poisoned[[int(tokens_of(batch, row)[0]) for row in (0, 1)]] = math.nan
    batch = replace(batch, rollout_log_probs=poisoned)
    outcome, _, _ = updated(BYPASS | REINFORCE, batch, max_nonfinite_fraction=0.125)
    assert outcome.metrics["rollout_corr/nonfinite_sequences"] == 2.0
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = PlainEngine(model)
    with pytest.raises(RunFailure, match="2 of 16 sequences") as caught:
        update(batch, engine, alone(), settings_of(BYPASS | REINFORCE), lambda _: LR, 0)
    assert "max_nonfinite_fraction" in caught.value.where
    assert moved(engine, before) == 0.0


def test_nothing_graded_makes_no_step() -> None:
    batch = batch_of(tiny_model()).pick([])
    outcome, engine, before = updated(BYPASS | REINFORCE | {"rollout_is": "sequence"}, batch)
    assert outcome.metrics["rollout_corr/skipped_updates"] == 1.0
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert moved(engine, before) == 0.0


# --- values passed to the loss
# ----------------------------------------------------------------------------------


def test_on_policy_rollouts_change_nothing() -> None:
    """π_train = π_rollout: weights 1, nothing rejected, the gradient of no correction at all."""
    model = tiny_model()
    batch = batch_of(model)
    with torch.no_grad():
        own = PlainEngine(model).policy(batch.inputs).log_probs
    batch = replace(batch, rollout_log_probs=own, old_log_probs=own)
    outcome, engine, _ = updated(BYPASS | REINFORCE | RS | {"rollout_is": "sequence"}, batch)
    _, bare, _ = updated(BYPASS | REINFORCE | {"rollout_is": None}, batch)
    assert outcome.metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert outcome.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert (outcome.seen.weights == 1.0).all()
    for name, gradient in bare.gradient.items():
        assert torch.equal(engine.gradient[name], gradient)


def test_learning_rate_follows_the_count_of_updates() -> None:
    model = tiny_model()
    asked: list[int] = []

    def schedule(number: int) -> float:
        asked.append(number)
        return 1e-3 * number

    settings = settings_of(BYPASS | REINFORCE, epochs=2, mini_rows=8, micro_sequences=4)
    outcome = update(batch_of(model), PlainEngine(model), alone(), settings, schedule, 40)
    assert asked == [40, 41, 42, 43]
    assert outcome.num_updates == 4
    assert outcome.metrics["actor/lr"] == pytest.approx(0.043)


@pytest.mark.parametrize("level", ["sequence", "token", None])
def test_learning_rate_follows_the_effective_sample_size_where_asked(level: str | None) -> None:
    """VCPO: by its root, that of the raw weights; a bound does not change it."""
    correction = BYPASS | REINFORCE | {"rollout_is": level, "rollout_is_threshold": "1.1"}
    rates = {}
    for scaling in (False, True):
        model = tiny_model()
        settings = settings_of(correction, lr_ess_scaling=scaling)
        outcome = update(batch_of(model), PlainEngine(model), alone(), settings, lambda _: 1e-3, 0)
        rates[scaling] = outcome.metrics["actor/lr"]
    ess = outcome.metrics["rollout_corr/rollout_is_raw_eff_sample_size"]
    assert rates[False] == 1e-3
    assert 0.1 < ess < 0.99
    assert rates[True] == pytest.approx(1e-3 * math.sqrt(ess), rel=1e-6)


def test_nothing_is_written_to_the_batch() -> None:
    batch = far_batch()
    copies = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    updated(BYPASS | REINFORCE | RS, batch)
    assert all(torch.equal(getattr(batch, name), x) for name, x in copies.items())


def test_dumped_log_probs_are_of_the_policy_the_ratios_were_formed_with() -> None:
    """Bypass: π_θ in the last pass over each row. Decoupled: π_old, however far π_θ has moved since."""
    batch = batch_of(tiny_model())
    first, _, _ = updated(BYPASS | CLIP | {"rollout_is": None}, batch, epochs=1)
    second, _, _ = updated(BYPASS | CLIP | {"rollout_is": None}, batch, epochs=2)
    start, _ = naive_log_probs(tiny_model(), batch)
    torch.testing.assert_close(first.seen.training_log_probs.double(), start.detach(), rtol=1e-5, atol=2e-6)
    assert (second.seen.training_log_probs - first.seen.training_log_probs).abs().max() > 1e-4
    decoupled, _, _ = updated(DECOUPLED | CLIP | {"rollout_is": "sequence"}, batch, epochs=2)
    assert torch.equal(decoupled.seen.training_log_probs, batch.old_log_probs)


@pytest.mark.parametrize("micro", [ROWS, 5])
def test_dumped_weights_are_those_that_multiplied_the_loss(micro: int) -> None:
    """A loss with its own ratio is not weighted in bypass mode: 1 where kept, 0 where rejected."""
    level = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    batch = batch_of(tiny_model())
    measured, _, _ = updated(BYPASS | CLIP | RS | level, batch, micro_sequences=micro)
    kept = measured.seen.keep
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(measured.seen.weights, kept.float())
    assert measured.metrics["rollout_corr/rollout_is_std"] > 0.0  # measured all the same
    for mode in (BYPASS | REINFORCE, DECOUPLED | CLIP):
        applied, _, _ = updated(mode | RS | level, batch, micro_sequences=micro)
        unit = batch.units.episode
        sequences = unit.max(applied.seen.weights)[unit.any(applied.seen.keep)]
        assert sequences.mean().item() == pytest.approx(1.0, rel=1e-5)
        assert sequences.std() > 0.01


class NaNPolicy(PlainEngine):
    """A policy whose forward pass gives NaN for some sequences of every batch, known by their tokens."""

    def __init__(self, model, bad: list[torch.Tensor]) -> None:
        super().__init__(model)
        self.bad = bad

    def policy(self, inputs, **options):
        output = super().policy(inputs, **options)
        lengths = inputs.lengths.tolist()
        is_bad = [any(torch.equal(ids, bad) for bad in self.bad) for ids in inputs.token_ids.split(lengths)]
        there = Segments(inputs.lengths).spread(torch.tensor(is_bad))[inputs.scored]
        return output._replace(log_probs=torch.where(there, math.nan, 1.0) * output.log_probs)


@pytest.mark.parametrize("mode", [BYPASS | REINFORCE, BYPASS | CLIP, DECOUPLED | CLIP, DECOUPLED | REINFORCE])
@pytest.mark.parametrize("micro", [ROWS, 4])
def test_nan_of_the_updated_policy_is_counted_and_withholds_the_step(mode, micro: int) -> None:
    batch = batch_of(tiny_model())
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = settings_of(mode | {"rollout_is": "sequence"}, micro_sequences=micro, epochs=2)
    engine = NaNPolicy(model, [batch.pick([5]).token_ids])
    outcome = update(batch, engine, alone(), settings, lambda _: LR, 0)
    assert outcome.metrics["rollout_corr/nonfinite_sequences"] == 1.0
    assert outcome.seen.nonfinite.nonzero().flatten().tolist() == [5]
    # 0 · NaN is NaN: the gradient of the whole step is lost, not the sequence's alone.
    assert any(not gradient.isfinite().all() for gradient in engine.gradient.values())
    assert outcome.metrics["rollout_corr/skipped_updates"] == 2.0
    assert moved(engine, before) == 0.0

    engine = NaNPolicy(tiny_model(), [batch.pick([row]).token_ids for row in (5, 6)])
    with pytest.raises(RunFailure, match="2 of 16 sequences"):
        update(batch, engine, alone(), settings, lambda _: LR, 0)


def test_settings_of_a_spec_resolve_nulls() -> None:
    from rlctl.run_spec.load import load_spec
    from rlctl.train.settings import UpdateSettings

    overrides = ["actor.clip_ratio_high=0.28", "algorithm.rollout_correction.bypass_mode=false"]
    settings = UpdateSettings.of(load_spec(["rloo-seq-is"], [], overrides).spec, ())
    assert (settings.loss.clip_low, settings.loss.clip_high) == (0.2, 0.28)
    assert settings.weights_are_applied
