"""Every estimator, loss, KL penalty and source of off-policyness in runs of the embedded model."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from rlctl.metric_names import describe
from rlctl.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from tests import hooks, runs

pytestmark = pytest.mark.usefixtures("embedded")

RC = "algorithm.rollout_correction."
IN_REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05")
IN_LOSS = ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.05")
LORA = ("model.lora_rank=4", "actor.lr=5e-3")
NARROW = ("actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=4e-4")


@dataclass(frozen=True)
class Plan:
    """One run: estimator, loss, mode, and what else is special about it."""

    estimator: str
    loss: str
    bypass: bool
    more: tuple[str, ...] = field(default=())
    steps: int = 3

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            f"algorithm.adv_estimator={self.estimator}",
            f"{RC}loss_type={self.loss}",
            f"{RC}bypass_mode={str(self.bypass).lower()}",
            f"trainer.total_training_steps={self.steps}",
            *self.more,
        )


#: PPO with every option: critic with warm-up and mini-batches of its own, adaptive KL, stale data, truncated
#: sampling whose kept tokens go through micro-batches, waiting batches, ranks, checkpoints and dumps.
PPO = Plan(
    "gae",
    "ppo_clip",
    False,
    (
        *IN_REWARD,
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.gamma=0.99",
        "algorithm.lam=0.95",
        "actor.clip_ratio_c=3.0",
        "critic.ppo_mini_batch_size=8",
        "critic.lr_warmup_steps=4",
        "trainer.critic_warmup=1",
        "rollout.staleness=1",
        "rollout.top_p=0.95",
        "rollout.exact_sampling=true",
        "trainer.save_freq=2",
        "actor.ppo_epochs=2",
        "critic.ppo_epochs=3",
    ),
    steps=5,
)
PLANS = {
    "ppo": PPO,
    "ppo in bypass mode": Plan("gae", "ppo_clip", True, (*IN_LOSS, "actor.kl_loss_type=k1")),
    "grpo, gspo": Plan("grpo", "gspo", False, (*IN_LOSS, *NARROW, "actor.ppo_epochs=2")),
    "dr. grpo, cispo": Plan(
        "dr_grpo",
        "cispo",
        True,
        ("actor.entropy_coeff=0.01", "actor.loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    "opo, sapo": Plan("opo", "sapo", True, (*IN_LOSS, "actor.kl_loss_type=unbiased")),
    "reinforce++, dppo, bf16 rollouts": Plan(
        "reinforce_plus_plus",
        "dppo",
        False,
        (*IN_REWARD, "algorithm.kl_penalty=k2", "algorithm.gamma=0.95", "rollout.dtype=bf16"),
    ),
    "reinforce++ baseline, gspo, adapters": Plan(
        "reinforce_plus_plus_baseline",
        "gspo",
        True,
        (*IN_LOSS, "actor.kl_loss_type=k2", *LORA, *NARROW, "actor.entropy_coeff=0.01"),
    ),
    "remax, cispo, int8 rollouts": Plan(
        "remax", "cispo", False, ("rollout.dtype=int8", f"{RC}rollout_is=token")
    ),
    "token baseline, sapo, stale": Plan(
        "optimal_token_baseline", "sapo", False, ("rollout.staleness=2",), steps=5
    ),
    "token baseline, reinforce": Plan(
        "optimal_token_baseline",
        "reinforce",
        True,
        (
            *IN_LOSS,
            "actor.kl_loss_type=sequence",
            f"{RC}rollout_is=token",
            f"{RC}score_centering=8",
            "rollout.staleness=1",
        ),
    ),
    "rloo, dppo, adapters, stale": Plan(
        "rloo",
        "dppo",
        True,
        (*IN_REWARD, "algorithm.kl_penalty=k3", *LORA, "rollout.staleness=1", "actor.dppo_divergence=kl"),
        steps=4,
    ),
    "reinforce++, reinforce": Plan("reinforce_plus_plus", "reinforce", False, ("rollout.n=1",)),
}


def test_the_plans_leave_nothing_out() -> None:
    plans = PLANS.values()
    assert {plan.estimator for plan in plans} == set(ADVANTAGE_ESTIMATORS.stable())
    modes = {(plan.loss, plan.bypass) for plan in plans}
    assert modes == {(loss, bypass) for loss in POLICY_LOSSES.stable() for bypass in (True, False)}
    specs = [spec_of(plan) for plan in plans]
    assert {spec.actor.kl_loss_type for spec in specs if spec.actor.use_kl_loss} == set(KL_ESTIMATORS)
    in_reward = [spec.algorithm for spec in specs if spec.algorithm.use_kl_in_reward]
    assert {algorithm.kl_penalty for algorithm in in_reward} == {"k1", "k2", "k3"}


def spec_of(plan: Plan) -> RunSpec:
    return load_spec([], [], [*runs.SMALL, *runs.CORRECTED, *plan.arguments]).spec


@pytest.fixture(scope="module")
def ppo(whole_embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with everything, never written to."""
    where = tmp_path_factory.mktemp("ppo") / "run"
    return runs.train(where, *PPO.arguments, env={"RLCTL_CACHE": str(whole_embedded_cache)})


# --- what a run logs -------------------------------------------------------------------------------------


def conditional(spec: RunSpec) -> dict[str, bool]:
    """Metrics that some runs have and others must not have."""
    estimator, correction = spec.algorithm.adv_estimator, spec.algorithm.rollout_correction
    looks_again = not correction.bypass_mode or estimator == "optimal_token_baseline"
    critic = ("vf_loss", "vf_clipfrac", "vf_explained_var", "vpred_mean", "grad_norm", "lr")
    moments = [f"critic/{of}/{what}" for of in ("values", "returns") for what in ("mean", "max", "min")]
    return {
        **dict.fromkeys([f"critic/{name}" for name in critic] + moments, estimator == "gae"),
        **dict.fromkeys(["timing_s/values", "timing_s/update_critic"], estimator == "gae"),
        **dict.fromkeys(["actor/kl_loss", "actor/kl_coef"], spec.actor.use_kl_loss),
        "rollout_corr/listed_mass": correction.score_centering is not None,
        "actor/reward_kl_penalty": spec.algorithm.use_kl_in_reward,
        "actor/reward_kl_penalty_coeff": spec.algorithm.use_kl_in_reward,
        "timing_s/ref": spec.needs_reference,
        "timing_s/gen_max": estimator == "remax",
        "timing_s/old_log_prob": looks_again,
        "reward/zero_spread_groups": "group_ids" in ADVANTAGE_ESTIMATORS.part(estimator).needs,
    }


@pytest.mark.parametrize("name", PLANS)
def test_it_trains(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    plan, spec = PLANS[name], spec_of(PLANS[name])
    is_there = plan is PPO
    run = request.getfixturevalue("ppo") if is_there else runs.train(tmp_path / "run", *plan.arguments)
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, plan.steps + 1))
    expected = conditional(spec)
    for line in lines:
        for key in line.keys() - {"step", "timestamp"}:
            assert describe(key) is not None, key
            assert math.isfinite(line[key]), key
        assert {key for key in expected if key in line} == {
            key for key, is_there in expected.items() if is_there
        }
        assert line["rollout_corr/skipped_updates"] == 0
        assert line["actor/grad_norm"] > 0
    per_batch = 8 // 4 * spec.actor.ppo_epochs
    held = spec.trainer.critic_warmup
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_updates"] == (plan.steps - held) * per_batch
    updates = [max(0, step - 1 - held) * per_batch for step in range(1, plan.steps + 1)]  # before each step
    for step, line in enumerate(lines, start=1):
        sampled_at = max(1, step - spec.rollout.staleness)
        age = updates[step - 1] - updates[sampled_at - 1]
        assert line["training/staleness_mean"] == line["training/staleness_max"] == age
    if spec.rollout.staleness:
        assert lines[-1]["training/staleness_mean"] == spec.rollout.staleness * per_batch


# --- what the special ones do ------------------------------------------------------------------------------


def test_the_policy_stands_still_while_the_critic_warms_up(ppo: Path) -> None:
    rows = runs.rollouts(ppo)
    versions = {step: {row["policy_version"] for row in rows if row["step"] == step} for step in range(1, 6)}
    assert versions == {1: {0}, 2: {0}, 3: {0}, 4: {4}, 5: {8}}
    first, *others = runs.metrics(ppo)
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert first["critic/vpred_mean"] != 0.0  # after its first mini-batch it has learnt something
    assert first["critic/values/max"] == first["critic/values/min"] == 0.0
    assert all(line["critic/values/max"] > 0.0 for line in others)


def test_with_exact_sampling_trainer_and_reference_are_restricted_too(ppo: Path) -> None:
    """Before the first update trainer, sampler and reference are one policy: no gap, no KL."""
    first = runs.metrics(ppo)[0]
    assert first["rollout_corr/k3_kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["training/rollout_probs_diff_max"] < 1e-5
    rows = [row for row in runs.rollouts(ppo) if row["step"] == 1]
    sizes = [
        len(kept)
        for row in rows
        for kept, sampled in zip(row["kept_ids"], row["sampled"], strict=True)
        if sampled
    ]
    assert len(set(sizes)) > 1
    for row in rows:
        assert all(t in kept for t, kept in zip(row["token_ids"], row["kept_ids"], strict=True) if kept)


def test_the_critic_explains_more_and_more(ppo: Path) -> None:
    lines = runs.metrics(ppo)
    explained = [line["critic/vf_explained_var"] for line in lines]
    assert explained[0] == pytest.approx(0.0, abs=1e-9)
    assert lines[-1]["critic/vf_loss"] < lines[0]["critic/vf_loss"]
    assert [line["critic/lr"] for line in lines] == pytest.approx([0.75e-3] + [1e-3] * 4)  # warm-up of 4


def test_the_adaptive_coefficient_follows_the_kl(ppo: Path) -> None:
    """Ziegler's controller, 32 responses a batch: coef · (1 + clip(kl/target − 1, ±0.2) · n/horizon)."""
    lines = runs.metrics(ppo)
    pairs = [(line["actor/reward_kl_penalty"], line["actor/reward_kl_penalty_coeff"]) for line in lines]
    assert pairs[0][1] == pairs[1][1] == 0.05  # a policy that does not change does not change the coefficient
    for (kl, coefficient), (_, after) in list(pairwise(pairs))[1:]:
        error = min(max(kl / 0.01 - 1.0, -0.2), 0.2)
        assert after == pytest.approx(coefficient * (1.0 + error * 32 / 100), rel=1e-6)
    assert pairs[-1][1] != 0.05


@pytest.fixture
def half(tmp_path: Path, whole_embedded: Path) -> Path:
    """The run with everything, killed after step 3 with a checkpoint of step 2."""
    run = tmp_path / "run"
    job = runs.start_train(run, *PPO.arguments, before=partial(hooks.kill_after_logging, 3))
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    return run


def test_resumed_it_is_the_same_run(ppo: Path, half: Path) -> None:
    """Critic, coefficient and the batches sampled ahead: bit for bit."""
    job = runs.resume(half)
    assert job.wait() == 0, job.output[-4000:]
    assert "resuming after step 2" in job.output
    assert runs.reproducible(half) == runs.reproducible(ppo)
    assert runs.rollouts(half) == runs.rollouts(ppo)
    weights = "checkpoints/step_000005/model/model.safetensors"
    assert (half / weights).read_bytes() == (ppo / weights).read_bytes()


def test_two_ranks_are_one_run(ppo: Path, whole_embedded: Path, tmp_path: Path) -> None:
    two = runs.train_on_ranks(tmp_path / "run", 2, *PPO.arguments)
    runs.assert_close(two, ppo, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_coarse_rollouts_are_another_policy(dtype: str, tmp_path: Path) -> None:
    """Decoupled, nothing but the precision parts π_old from π_rollout."""
    plan = Plan("rloo", "ppo_clip", False, (f"rollout.dtype={dtype}",), steps=1)
    [line] = runs.metrics(runs.train(tmp_path / "run", *plan.arguments))
    assert 1e-4 < line["training/rollout_probs_diff_mean"] < 0.05
    assert line["rollout_corr/rollout_is_raw_std"] > 1e-3
