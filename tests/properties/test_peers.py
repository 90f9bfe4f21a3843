"""Other frameworks' loss and correction code and ours on the same batches: values, weights, masks, gradients.

`make conformance` installs the packages and runs this; without them the tests are skipped. What is equal here
is the matrix in docs/evidence/conformance.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from rlctl.algos.losses import coefficients, policy_loss
from rlctl.algos.rules import LossRule
from rlctl.algos.segments import Segments
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules
from tests.properties.batches import loss_rule
from tests.properties.padded_batches import Corrected, corrected
from tests.reference import peer_packages, verl_helper

pytestmark = pytest.mark.slow  # imports the frameworks
ROWS, HORIZON, SEEDS = 16, 24, range(5)
OPENRLHF, AREAL = "openrlhf.models.loss", "areal.utils.functional.functional"
SKYRL = "skyrl.backends.skyrl_train.utils.off_policy_correction_utils"
TRL = "trl.trainer.grpo_trainer"


class Batch:
    """Log-probs of three policies that are near one another, advantages per response, lengths from 1."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, HORIZON, generator=random)

        lengths = torch.randint(1, HORIZON + 1, (ROWS,), generator=random)
        self.mask = torch.arange(HORIZON) < lengths[:, None]
        self.rollout = (-1.5 + noise(0.6)).clamp(max=-0.01) * self.mask
        far = (torch.rand(ROWS, HORIZON, generator=random) < 0.05) * noise(1.5)
        self.old = (self.rollout + noise(0.15) + far) * self.mask
        self.log_probs = ((self.old + noise(0.2)) * self.mask).requires_grad_()
        self.advantages = torch.randn(ROWS, 1, generator=random).expand(ROWS, HORIZON)
        self.num_tokens = float(self.mask.sum())


def correction_of(batch: Batch, options: dict[str, Any]) -> Corrected:
    """Of π_old against π_rollout."""
    spec = RolloutCorrectionSpec(**({"rollout_is": None} | options), rollout_is_batch_normalize=False)
    policies = (batch.old, batch.rollout, batch.mask)
    return corrected(*policies, correction_rules(spec), advantages=batch.advantages)


def ours(batch: Batch, loss: LossRule, mode: str, correction: dict[str, Any] | None) -> Tensor:
    """The decoupled loss: weights of π_old against π_rollout, rejected tokens in the denominator."""
    found = correction_of(batch, correction or {})
    mask, kept = batch.mask, found.keep_mask
    weights = None if correction is None else found.weights[kept]
    columns = (batch.log_probs[kept], batch.old[kept], batch.advantages[kept])
    tokens = policy_loss(loss, *columns, Segments(kept.sum(1)), weights)
    counts = (Segments(mask.sum(1)), batch.num_tokens, float(ROWS))
    c = coefficients(mode, kept[mask], torch.ones_like(kept[mask]), *counts, horizon=HORIZON)
    return (c[kept[mask]] * tokens.values).sum()


def assert_same(batch: Batch, one: Tensor, other: Tensor) -> None:
    """Values and gradients."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(loss, batch.log_probs, retain_graph=True)[0] for loss in (one, other)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def peer(name: str) -> Any:
    module = peer_packages.load(name)
    if module is None:
        pytest.skip(peer_packages.why_not(name))
    return module


CLIP = LossRule("ppo_clip", 0.2, 0.28)
TOKEN_BAND = {"rollout_is": "token", "rollout_is_threshold": "0.5_1.8"}
OPENRLHF_CASES: dict[str, tuple[LossRule, str, dict[str, Any] | None, dict[str, Any]]] = {
    "no correction": (CLIP, "token-mean", None, {}),
    "mean per response": (CLIP, "seq-mean-token-mean", None, {"token_level_loss": False}),
    "dual clip": (LossRule("ppo_clip", 0.2, 0.28, clip_c=1.5), "token-mean", None, {"dual_clip": 1.5}),
    "gspo": (LossRule("gspo", 0.01, 0.02), "seq-mean-token-mean", None, {"policy_loss_type": "gspo"}),
    "level token, mode clip": (
        CLIP,
        "token-mean",
        TOKEN_BAND | {"rollout_is_bound": "clip"},
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.5, 1.8]},
    ),
    "level token, mode mask": (
        CLIP,
        "token-mean",
        TOKEN_BAND | {"rollout_is_bound": "mask"},
        {"is_correction_level": "token", "is_correction_threshold": [0.5, 1.8]},
    ),
    "level seq, mode mask": (
        CLIP,
        "token-mean",
        {
            "rollout_is": "token",
            "rollout_is_bound": "truncate",
            "rollout_is_threshold": "1e9",
            "rollout_rs": "geometric",
            "rollout_rs_threshold": "0.95_1.05",
        },
        {"is_correction_level": "seq", "is_correction_threshold": [0.95, 1.05]},
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", OPENRLHF_CASES)
def test_openrlhf(case: str, seed: int) -> None:
    module, batch = peer(OPENRLHF), Batch(seed)
    loss, mode, correction, options = OPENRLHF_CASES[case]
    clips = {"clip_eps_low": loss.clip_low, "clip_eps_high": loss.clip_high}
    theirs = module.PolicyLoss(**(clips | options))(
        batch.log_probs,
        batch.old,
        batch.advantages,
        action_mask=batch.mask.float(),
        rollout_log_probs=batch.rollout,
        batch_num_tokens=batch.num_tokens,
        global_batch_size=float(ROWS),
    )[0]
    assert_same(batch, ours(batch, loss, mode, correction), theirs)


AREAL_CASES: dict[str, tuple[LossRule, dict[str, Any] | None, dict[str, Any]]] = {
    "no correction": (CLIP, None, {}),
    "token ratio, clamp": (
        CLIP,
        TOKEN_BAND | {"rollout_is_bound": "clip"},
        {"level": "token", "action": "clamp", "metric": "ratio", "lower": 0.5, "upper": 1.8},
    ),
    "token ratio, mask": (
        CLIP,
        TOKEN_BAND | {"rollout_is_bound": "mask"},
        {"level": "token", "action": "mask", "metric": "ratio", "lower": 0.5, "upper": 1.8},
    ),
    "sequence ratio, clamp: the geometric mean": (
        CLIP,
        {"rollout_is": "geometric", "rollout_is_bound": "clip", "rollout_is_threshold": "0.97_1.03"},
        {
            "level": "sequence",
            "action": "clamp",
            "metric": "ratio",
            "agg": "mean",
            "lower": 0.97,
            "upper": 1.03,
        },
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", AREAL_CASES)
def test_areal(case: str, seed: int) -> None:
    module, batch = peer(AREAL), Batch(seed)
    loss, correction, options = AREAL_CASES[case]
    config = SimpleNamespace(agg="mean", **options) if options and "agg" not in options else None
    if options and config is None:
        config = SimpleNamespace(**options)
    theirs, _ = module.ppo_actor_loss_fn(
        batch.log_probs,
        batch.old,
        batch.rollout,
        batch.advantages,
        loss.clip_low,
        batch.mask,
        eps_clip_higher=loss.clip_high,
        rejection_sampling=config,
    )
    assert_same(batch, ours(batch, loss, "token-mean", correction), theirs)


_OFF = dict.fromkeys(
    (
        "tis_ratio_type",
        "sequence_mask_metric",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
        "token_mask_is_threshold_high",
    )
)
SKYRL_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tis token": (
        {"rollout_is": "token", "rollout_is_bound": "truncate", "rollout_is_threshold": "1.5"},
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.5},
    ),
    "tis sequence": (
        {"rollout_is": "sequence", "rollout_is_bound": "truncate", "rollout_is_threshold": "1.5"},
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
    ),
    "geometric mask": (
        {"rollout_rs": "geometric", "rollout_rs_threshold": "0.97_1.03"},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.97, "geo_mask_high": 1.03},
    ),
    "product mask": (
        {"rollout_rs": "sequence", "rollout_rs_threshold": "0.5_2.0"},
        {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 2.0},
    ),
    "outlier mask": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.4_3.0"},
        {"outlier_token_is_threshold_low": 0.4, "outlier_token_is_threshold_high": 3.0},
    ),
    "token mask": (
        {"dialect": "verl", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0},
    ),
    "tis token and product mask": (
        {
            "rollout_is": "token",
            "rollout_is_bound": "truncate",
            "rollout_is_threshold": "1.5",
            "rollout_rs": "sequence",
            "rollout_rs_threshold": "0.5_2.0",
        },
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1.5,
            "sequence_mask_metric": "product",
            "product_mask_low": 0.5,
            "product_mask_high": 2.0,
        },
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", SKYRL_CASES)
def test_skyrl(case: str, seed: int) -> None:
    module, batch = peer(SKYRL), Batch(seed)
    correction, options = SKYRL_CASES[case]
    weights, _, kept = module.compute_off_policy_correction(
        batch.old, batch.rollout, batch.mask.float(), SimpleNamespace(**(_OFF | options))
    )
    found = correction_of(batch, correction)
    theirs = torch.ones_like(batch.old) if weights is None else weights.expand_as(batch.old)
    used = found.keep_mask
    assert torch.equal(used, kept.bool() & batch.mask)
    torch.testing.assert_close(found.weights[used], theirs[used], rtol=1e-5, atol=1e-6)


TRL_CASES: dict[str, tuple[LossRule, str, dict[str, Any]]] = {
    "dapo": (CLIP, "token-mean", {}),
    "grpo": (CLIP, "seq-mean-token-mean", {"loss_type": "grpo"}),
    "bnpo": (CLIP, "token-mean", {"loss_type": "bnpo"}),
    "dr_grpo": (CLIP, "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
    "gspo": (
        LossRule("gspo", 0.01, 0.02),
        "seq-mean-token-mean",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.02,
        },
    ),
    "sapo": (LossRule("sapo", tau_pos=1.0, tau_neg=1.05), "seq-mean-token-mean", {"loss_type": "sapo"}),
    "vespo": (loss_rule("vespo"), "token-mean", {"loss_type": "vespo"}),
    "luspo": (
        LossRule("gspo", 0.01, 0.02),
        "seq-mean-token-sum",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.01}
        | {"epsilon_high": 0.02},
    ),
    # TRL bounds CISPO's ratio above only: rlctl's lower bound is moved out of reach.
    "cispo": (LossRule("cispo", 0.9999, 0.5), "token-mean", {"loss_type": "cispo", "epsilon_high": 1.5}),
}


@pytest.mark.verl
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", TRL_CASES)
def test_trl_loss(case: str, seed: int) -> None:
    module = verl_helper.load(TRL)
    if module is None:
        pytest.skip(verl_helper.why_not(TRL))
    batch = Batch(seed)
    loss, mode, options = TRL_CASES[case]
    trainer = MagicMock(
        **(
            {
                "importance_sampling_level": "token",
                "loss_type": "dapo",
                "epsilon_low": loss.clip_low,
                "epsilon_high": loss.clip_high,
                "beta": 0.0,
                "off_policy_mask_threshold": None,
                "top_entropy_quantile": 1.0,
                "use_vllm": False,
                "max_completion_length": HORIZON,
                "current_gradient_accumulation_steps": 1,
                "aux_loss_enabled": False,
                "router_aux_loss_coef": 0.0,
                "_entropy_bonus_enabled": False,
                "tools": None,
            }
            | options
        )
    )
    trainer.get_gamma_weights = module.GRPOTrainer.get_gamma_weights
    trainer.args = SimpleNamespace(
        delta=None,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda tensor, **_: tensor
    trainer._get_per_token_logps_and_entropies.return_value = (
        batch.log_probs,
        torch.zeros_like(batch.old),
        None,
    )
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(ROWS, HORIZON, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old,
        "num_items_in_batch": batch.mask.sum(),
    }
    theirs = module.GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)
    assert_same(batch, ours(batch, loss, mode, None), theirs)


@pytest.mark.verl
@pytest.mark.parametrize("seed", SEEDS)
def test_trl_off_policy_mask(seed: int) -> None:
    module = verl_helper.load(TRL)
    if module is None:
        pytest.skip(verl_helper.why_not(TRL))
    batch = Batch(seed)
    theirs = module.GRPOTrainer.get_off_policy_mask(
        batch.advantages[:, :1], batch.old, batch.rollout, batch.mask.float(), 0.02
    )
    found = correction_of(batch, {"rollout_rs": "off_policy", "rollout_rs_threshold": "0.02"})
    assert torch.equal(found.keep_mask, theirs.bool() & batch.mask)
