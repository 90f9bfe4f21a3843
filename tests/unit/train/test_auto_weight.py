"""`rollout_correction.auto`: what it estimates, what it chooses, and that a resumed run chooses the same."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rlctl
from rlctl.algos.gradient_error import (
    CANDIDATES,
    AutoChoice,
    CandidateMoments,
    averaged,
    choose,
    gradient_error,
)
from rlctl.diagnose import fixes
from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.table import RunLog, Table
from rlctl.engine.ranks import Ranks
from rlctl.errors import SpecError, UsageError
from rlctl.metric_names import describe
from rlctl.spec.load import load_spec
from rlctl.train import update as module
from rlctl.train.gradient_error import AutoCorrection, GradientSketches, logged_moments, moment_metrics
from rlctl.train.settings import UpdateSettings
from rlctl.train.stream import RolloutStream
from tests.models import tiny_model
from tests.processes import on_ranks
from tests.unit.train.scored import rollouts_of
from tests.unit.train.test_gradient_sketches import ROWS, Sketching, batch
from tests.unit.train.updates import alone, settings_of

C = "algorithm.rollout_correction."
AUTO = (f"{C}auto=true", f"{C}rollout_is=null")
REINFORCE = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": None}


def moments(norm: float, inner: float, signal: float = 1.0) -> CandidateMoments:
    return CandidateMoments(norm, inner, signal)


# --- what is estimated ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e8])
def test_the_merit_is_that_of_the_error_of_gradient_error(scale: float) -> None:
    draw = torch.Generator().manual_seed(1)
    exact = torch.randn(40, 6, generator=draw) + 0.5
    used = exact * torch.rand(40, 1, generator=draw) + 0.1 * torch.randn(40, 6, generator=draw)
    for num_groups in (1.0, 8.0):
        expected = gradient_error(used, exact, ess=1.0, num_groups=num_groups).estimate
        found = CandidateMoments.of(3.0 * used, scale * exact)
        assert 0.0 < expected < 1.0
        assert 1.0 - found.merit(num_groups) / found.signal == pytest.approx(expected, rel=1e-5)


def test_the_squared_cosine_is_that_of_the_expected_gradients() -> None:
    draw, angle = torch.Generator().manual_seed(2), 0.6
    noise = torch.randn(2, 200_000, 2, generator=draw, dtype=torch.float64)
    exact = noise[0] + torch.tensor([3.0, 0.0])
    used = noise[1] + 5.0 * torch.tensor([np.cos(angle), np.sin(angle)])
    assert CandidateMoments.of(used, exact).squared_cosine == pytest.approx(np.cos(angle) ** 2, abs=0.01)
    assert CandidateMoments.of(-used, exact).squared_cosine == 0.1  # opposed: the lowest factor
    assert moments(1.0, 1.0, signal=-0.1).squared_cosine is None
    assert CandidateMoments.of(torch.zeros(4, 2), exact[:4]).merit(8.0) == 0.0


def test_a_row_that_is_not_finite_changes_only_its_group() -> None:
    """0 · NaN is NaN: one such response would make the averages NaN, and with them the learning rate."""
    clean, spoiled = batch(), batch()
    engine = Sketching(tiny_model())
    found = []
    for given, broken in ((clean, False), (spoiled, True)):
        sketches = GradientSketches(candidates=CANDIDATES)
        output = engine.policy(given.inputs, sketch=True)
        if broken:
            first = int(given.response_mask[0].sum())
            log_probs = output.log_probs.clone()
            log_probs[0] = torch.nan
            sketch = output.sketch.clone()
            sketch[:first] = torch.nan
            output = replace(output, log_probs=log_probs, sketch=sketch)
        sketches.add(given, output, -(output.log_probs * given.advantages)[given.valid_mask].sum())
        found.append(sketches)
    ours, theirs = found
    kinds = ((x.used, x.exact, *x.of_candidates.values()) for x in (ours, theirs))
    for expected, kind in zip(*kinds, strict=True):
        for group, value in kind.items():
            assert value.isfinite().all()
            assert group == 0 or torch.equal(value, expected[group])
    history = [{"step": 1.0} | moment_metrics("none", moments(np.nan, 0.5))]
    assert AutoCorrection(run_of(alone(), history)).choice == AutoChoice()


@pytest.mark.parametrize("micro_rows", [ROWS, 5])
@pytest.mark.parametrize("name", CANDIDATES)
def test_the_gradients_of_a_candidate_are_those_of_a_run_with_it(
    monkeypatch, name: str, micro_rows: int
) -> None:
    collected: list[GradientSketches] = []

    class Kept(GradientSketches):
        def __init__(self, **given) -> None:
            super().__init__(**given)
            collected.append(self)

    monkeypatch.setattr(module, "GradientSketches", Kept)
    settings = settings_of(REINFORCE, mini_rows=ROWS, micro_rows=micro_rows, agg_mode="seq-mean-token-sum")
    rules = replace(settings.rules, weight=CANDIDATES[name])
    settings = replace(settings, rules=rules, measure_grad_error=True, auto=True)
    done = module.update(batch(), Sketching(tiny_model()), alone(), settings, lambda _: 0.0, 0)
    [found] = collected
    for group, used in found.used.items():
        torch.testing.assert_close(found.of_candidates[name][group], used * ROWS, rtol=1e-4, atol=1e-5)
    used, exact = (
        torch.stack([kind[group] for group in sorted(kind)])
        for kind in (found.of_candidates[name], found.exact)
    )
    assert logged_moments(name, done.metrics) == CandidateMoments.of(used, exact)
    assert all(describe(key) for key in done.metrics if "/auto_" in key)


def test_the_learning_rate_is_scaled() -> None:
    settings = settings_of(REINFORCE, mini_rows=ROWS, micro_rows=ROWS)
    engine = Sketching(tiny_model())
    done = module.update(batch(), engine, alone(), replace(settings, auto_lr_scale=0.25), lambda _: 0.5, 0)
    assert done.metrics["actor/lr"] == 0.125


# --- what is chosen -------------------------------------------------------------------------------


def test_the_smallest_error_wins_and_its_cosine_scales_the_rate() -> None:
    last = AutoChoice("sequence_5", 0.7)
    assert choose({}, 8.0, last) == last
    found = {"none": moments(0.5, 0.3), "token_2": moments(0.5, 0.6), "sequence_2": moments(0.02, 0.2)}
    choice = choose(found, 8.0, last)
    assert choice == AutoChoice("token_2", pytest.approx(0.72))
    assert choose(found, 1e6, last) == AutoChoice("sequence_2", 1.0)  # noise does not count


def test_what_is_not_determined_stays() -> None:
    last = AutoChoice("sequence_5", 0.3)
    unknown = {name: replace(one, signal=-0.01) for name, one in {"none": moments(0.5, 0.3)}.items()}
    assert choose(unknown, 8.0, last) == AutoChoice("none", 0.3)
    opposed = {"none": moments(0.5, -0.3), "token_2": moments(-0.1, -0.2)}
    assert choose(opposed, 8.0, last) == last


def test_moments_are_averaged_over_batches() -> None:
    means = averaged({}, {"none": moments(1.0, 1.0)})
    means = averaged(means, {"none": moments(2.0, 0.0), "token_2": moments(5.0, 5.0)})
    assert means == {
        "none": moments(pytest.approx(1.1), pytest.approx(0.9)),
        "token_2": moments(5.0, 5.0),
    }


def rows_of(count: int) -> list[dict[str, float]]:
    """Metrics of steps whose best weight changes; in some, the expected gradient is far from the true one."""
    draw = np.random.default_rng(3)
    found = []
    for step in range(1, count + 1):
        row = {"step": float(step)}
        for name in CANDIDATES:
            row |= moment_metrics(name, moments(1.0, float(draw.uniform(0.1, 1.0) ** (1 + step // 12))))
        found.append(row)
    return found


def run_of(ranks: Ranks, history: list[dict[str, float]], *overrides: str) -> SimpleNamespace:
    spec = load_spec([], [], [*AUTO, "rollout.staleness=2", *overrides]).spec
    discards: list[int] = []
    stream = SimpleNamespace(discard=lambda: discards.append(1))
    return SimpleNamespace(spec=spec, ranks=ranks, history=history, stream=stream, discards=discards)


def followed(ranks: Ranks, history: list[dict[str, float]], rows: list[dict[str, float]]):
    """The choices, what is logged, and the history after the last row."""
    run = run_of(ranks, list(history))
    auto = AutoCorrection(run)
    found, logged = [auto.choice], []
    for row in rows:
        logged.append(auto.observe(int(row["step"]), row))
        found.append(auto.choice)
    return found, logged, len(run.discards)


def test_a_resumed_run_chooses_the_same() -> None:
    rows = rows_of(40)
    choices, logged, discards = followed(alone(), [], rows)
    assert len({choice.name for choice in choices}) > 2
    steps = [row["step"] for row, own in zip(rows, logged, strict=True) if own["rollout_corr/auto_discarded"]]
    assert len(steps) == discards > 1
    assert min(np.diff(steps)) == 3  # the batches sampled after a discard are as old as allowed again
    for cut in (1, 17, 33):
        history = [row | own for row, own in zip(rows[:cut], logged[:cut], strict=True)]
        again, more, _ = followed(alone(), json.loads(json.dumps(history)), rows[cut:])
        assert again == choices[cut:]
        assert more == logged[cut:]


def deciding(ranks: Ranks, rows: list[dict[str, float]]):
    """The other rank has a discard that is not in the checkpoint, and no moments."""
    other = [{"step": row["step"], "rollout_corr/auto_discarded": 1.0} for row in rows]
    own = rows if ranks.is_main else other
    return followed(ranks, own[:3], own[3:])


def test_the_main_rank_decides(tmp_path) -> None:
    rows = rows_of(30)
    one, other = on_ranks(2, deciding, rows, where=tmp_path)
    assert one == other == followed(alone(), rows[:3], rows[3:])


def test_the_settings_of_the_next_batch() -> None:
    auto = AutoCorrection(run_of(alone(), rows_of(9)))
    settings = UpdateSettings.of(auto._run.spec)
    assert settings.measure_grad_error
    adjusted = auto.adjusted(settings)
    assert adjusted.rules.weight == CANDIDATES[auto.choice.name] != settings.rules.weight
    assert adjusted.auto_lr_scale == auto.choice.lr_scale < 1.0
    off = run_of(alone(), rows_of(9), f"{C}auto=false")
    assert AutoCorrection(off).adjusted(settings) is settings
    assert AutoCorrection(off).observe(1, rows_of(1)[0]) == {}


def test_discarded_batches_are_sampled_again() -> None:
    asked: list[tuple[int, int]] = []
    version = 0

    def sample(step: int):
        asked.append((step, version))
        return rollouts_of(seed=step, policy_version=version)

    stream = RolloutStream(sample, ahead=2, last_step=6)
    for version in range(3):
        assert stream.take(version + 1).policy_version.unique().tolist() == [max(0, version - 2)]
    stream.discard()
    version = 3
    assert stream.take(4).policy_version.unique().tolist() == [3]
    assert asked[-3:] == [(4, 3), (5, 3), (6, 3)]


# --- what fits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{C}rollout_is=token",), "rollout_is: null"),
        ((f"{C}bypass_mode=false",), "bypass_mode: true"),
        ((f"{C}loss_type=ppo_clip",), "loss_type: reinforce"),
        ((f"{C}rollout_rs=seq_mean_k1", f"{C}rollout_rs_threshold=0.5_2.0"), "rollout_rs: null"),
        ((f"{C}score_centering=8",), "score_centering: null"),
        (("actor.lr_ess_scaling=true",), "lr_ess_scaling: false"),
        (("trainer.guardrails.mode=act",), "mode: warn"),
        (("model.lora_rank=4",), "auto: false"),
        (("actor.loss_agg_mode=seq-mean-token-mean",), "token-mean"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], words: str) -> None:
    load_spec([], [], list(AUTO))
    with pytest.raises(SpecError) as refused:
        load_spec([], [], [*AUTO, *overrides])
    assert any(words in problem.fix for problem in refused.value.problems)


def test_diagnosis_sees_a_correction_and_its_fixes_are_accepted(tmp_path) -> None:
    spec = load_spec([], [], list(AUTO)).spec
    run = RunLog(tmp_path, Table(np.array([1]), {}, {}), spec, facts=facts_of(spec))
    assert run.facts.rollout_is == "auto"
    assert not [*fixes.correct_tokens(run)]
    for fix in (*fixes.geometric(run), *fixes.reject_outliers(run)):
        load_spec([], [], [*AUTO, *fix.spec])


def test_the_api_refuses_it() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(UsageError, match="auto"):
        rlctl.correct(zeros, zeros, torch.ones(1, 2, dtype=torch.bool), auto=True)
