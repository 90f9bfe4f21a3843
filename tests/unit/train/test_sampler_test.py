"""The test of the sampler's log-probs within a run: which tokens it reads, and what it resumes with."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from rlctl.algos.sampler_test import Wealth, sampler_sums, with_unscored
from rlctl.capabilities.sampler_test.run import GUARANTEED, LOG_WEALTH, SamplerTest, Z
from rlctl.run_spec.load import load_spec
from rlctl.train.capability import StepRecord
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update
from tests.models import tiny_model
from tests.unit.train.updates import BYPASS, DECOUPLED, REINFORCE, Case, PlainEngine, alone, settings_of

BATCH = Case(BYPASS | REINFORCE).batch(tiny_model())
OVERRIDES = (
    "data.train_batch_size=16",
    "actor.ppo_mini_batch_size=8",
    "algorithm.rollout_correction.rollout_is=token",
)


def record_of(before: torch.Tensor, more_tokens: int = 0, **metrics: float) -> StepRecord:
    """Every group drew what it trained on; one episode of group 0 drew `more_tokens` that were not."""
    lengths, group_ids = BATCH.units.episode.lengths.tolist(), BATCH.group_ids.tolist()
    drawn = SimpleNamespace(
        num_sampled=torch.tensor([*lengths, more_tokens]),
        tokens=SimpleNamespace(group_ids=torch.tensor([*group_ids, 0])),
    )
    return StepRecord(
        step=1,
        ranks=alone(),
        data_ranks=alone(),
        graded=SimpleNamespace(episodes=drawn),
        batch=BATCH,
        before_updates=before,
        policy_version=0,
        withheld=False,
        metrics=metrics,
    )


def spec_of(*overrides: str):
    return load_spec([], [], [*OVERRIDES, *overrides]).spec


def expected(log_ratio: torch.Tensor, unscored: int = 0) -> float:
    sums = {name: float(value) for name, value in sampler_sums(log_ratio).items()}
    return Wealth().after(with_unscored(sums, unscored)).log_value


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("dropped", [0, 7])
def test_it_reads_what_was_scored_before_any_update(bypass: bool, dropped: int) -> None:
    """In bypass mode the first mini-batch's tokens; what was drawn and dropped counts against an alarm."""
    own = BATCH.rollout_log_probs + 0.2 * torch.sin(torch.arange(len(BATCH.turns)).float())
    test = SamplerTest(spec_of(f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}"))
    metrics = test.updated(record_of((own), dropped))
    first = BATCH.units.episode.spread(BATCH.group_ids < (8 if bypass else 16))
    wanted = expected((own - BATCH.rollout_log_probs)[first], dropped)
    assert metrics[LOG_WEALTH] == pytest.approx(wanted, abs=1e-6)
    assert metrics[GUARANTEED] == 1.0
    assert math.isfinite(metrics[Z])


def test_equal_log_probs_have_no_z() -> None:
    assert Z not in SamplerTest(spec_of()).updated(record_of(BATCH.rollout_log_probs))


def test_a_resumed_run_continues_the_wealth() -> None:
    own = BATCH.rollout_log_probs + 0.1
    first = SamplerTest(spec_of())
    one = first.updated(record_of(own))
    second = SamplerTest(spec_of())
    second.restore(json.loads(json.dumps(first.state())))
    two, again = (test.updated(record_of(own)) for test in (first, second))
    assert two == again
    assert two[LOG_WEALTH] > one[LOG_WEALTH]
    fresh = SamplerTest(spec_of())
    fresh.restore(json.loads(json.dumps(SamplerTest(spec_of()).state())))
    assert fresh.updated(record_of(own)) == one


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.filter_groups.enable=true", "rollout.n=4"],
        ["rollout.in_flight=true", "rollout.max_staleness=1", "rollout.name=vllm", "rollout.mode=server"],
    ],
)
def test_where_what_is_scored_depends_on_what_was_drawn_there_is_no_guarantee(overrides: list[str]) -> None:
    test = SamplerTest(spec_of(*overrides))
    assert test.updated(record_of(BATCH.rollout_log_probs + 0.1))[GUARANTEED] == 0.0


def test_failed_episodes_of_an_environment_end_the_guarantee_for_good() -> None:
    test = SamplerTest(spec_of("environment.name=guess_number"))
    seen = BATCH.rollout_log_probs + 0.1
    assert test.updated(record_of(seen))[GUARANTEED] == 1.0
    assert test.updated(record_of(seen, **{"episode/num_failed": 1.0}))[GUARANTEED] == 0.0
    resumed = SamplerTest(spec_of("environment.name=guess_number"))
    resumed.restore(test.state())
    assert resumed.updated(record_of(seen))[GUARANTEED] == 0.0


def test_episodes_that_a_resume_starts_again_end_the_guarantee() -> None:
    """Those that had ended were kept: the shorter ones."""
    test = SamplerTest(spec_of("rollout.max_staleness=1"))
    seen = BATCH.rollout_log_probs + 0.1
    assert test.updated(record_of(seen, **{"rollout/restarted_episodes": 0.0}))[GUARANTEED] == 1.0
    assert test.updated(record_of(seen, **{"rollout/restarted_episodes": 2.0}))[GUARANTEED] == 0.0


@pytest.mark.parametrize("mode", [BYPASS, DECOUPLED])
@pytest.mark.parametrize("micro", [16, 3])
def test_updates_keep_the_log_probs_of_before_them(mode: dict[str, object], micro: int) -> None:
    """Those of the first mini-batch are of the model before its step, in every epoch's order of passes."""
    engine = PlainEngine(tiny_model())
    settings = settings_of(mode | REINFORCE, epochs=2, mini_rows=8, micro_sequences=micro)
    assert isinstance(settings, UpdateSettings)
    with torch.no_grad():
        before = engine.policy(BATCH.inputs).log_probs
    outcome = update(BATCH, engine, alone(), settings, lambda _: 0.5, 0)
    kept = outcome.seen.before_updates
    is_first = BATCH.units.episode.spread(BATCH.group_ids < 8)
    if mode is BYPASS:
        torch.testing.assert_close(kept[is_first], before[is_first], atol=2e-5, rtol=0)
        assert kept[~is_first].isnan().all()
    else:
        assert torch.equal(kept, BATCH.old_log_probs)
