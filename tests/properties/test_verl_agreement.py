"""`dialect: verl` computes what verl 0.9.1 computes: weights, masks and every metric both have.

`make verl` installs what it needs (30 MB: no GPU, no vLLM, no ray); without that it is skipped.

verl runs in float64 here, so that its own rounding (its variances are float32 differences of nearly
equal squares) does not blur the comparison; ours runs as always. Log-probs are multiples of 2⁻¹²,
hence their differences are exact in both. No empty rows: verl counts them in its means.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules
from tests.properties.padded_batches import Batch, factor_and_metrics, make_batch
from tests.reference import verl_helper

verl = verl_helper.Lazy()
pytestmark = pytest.mark.verl

#: Criterion → a threshold that rejects part of the batch.
CRITERIA = {
    "token_k1": "0.6_1.6",
    "token_k2": "0.1",
    "token_k3": "0.08",
    "seq_sum_k1": "0.5_1.9",
    "seq_sum_k2": "0.4",
    "seq_sum_k3": "0.4",
    "seq_mean_k1": "1.2",
    "seq_mean_k2": "0.08",
    "seq_mean_k3": "0.08",
    "seq_max_k2": "0.3",
    "seq_max_k3": "0.3",
}
SEVERAL = [None, *CRITERIA, "token_k1,seq_max_k2", "seq_mean_k1,token_k3,seq_sum_k2"]

#: verl logs these too; this project has no such figures.
NOT_SHARED = re.compile(r"rollout_corr/(rollout_is_oob_ratio|rollout_rs_\w+_k\d_seq_(?!masked_fraction)\w+)")


def quantised(seed: int, scale: float) -> Batch:
    batch = make_batch(seed, rows=24, horizon=20, scale=scale, empty=False)
    exact = [(x.nan_to_num(0.0) * 4096).round() / 4096 for x in (batch.log_probs, batch.rollout_log_probs)]
    return Batch(*exact, batch.mask, batch.advantages)


def settings(level, threshold, normalize, criteria) -> dict[str, object]:
    limits = [CRITERIA[name] for name in criteria.split(",")] if criteria else []
    return {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": criteria,
        "rollout_rs_threshold": ",".join(limits) or None,
    }


@pytest.mark.parametrize("criteria", SEVERAL)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("threshold", ["2.0", "0.5_1.8"])
@pytest.mark.parametrize("level", [None, "token", "sequence"])
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_equals_verl(level, threshold, normalize, criteria, scale) -> None:
    chosen = settings(level, threshold, normalize, criteria)
    batch = quantised(len(str(chosen)), scale)
    proto, their_mask, theirs = verl.compute_rollout_correction_and_rejection_mask(
        batch.log_probs.double(), batch.rollout_log_probs.double(), batch.mask.double(), **chosen
    )

    rules = correction_rules(RolloutCorrectionSpec(dialect="verl", **chosen))
    ours = batch.correct(rules)
    factor, metrics = factor_and_metrics(ours, rules)
    metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor

    keep = ours.keep_mask & batch.mask
    assert torch.equal(keep, their_mask.bool())
    if level is None:
        assert proto is None
        assert torch.equal(ours.weights[batch.mask], keep[batch.mask].float())
    else:  # verl leaves a weight on rejected tokens, where its mask makes it meaningless
        expected = torch.where(keep, proto.batch["rollout_is_weights"], 0.0).float()
        torch.testing.assert_close(
            torch.where(keep, ours.weights / factor, 0.0), expected, rtol=1e-6, atol=1e-7
        )
    shared = theirs.keys() & metrics.keys()
    assert all(NOT_SHARED.fullmatch(name) for name in theirs.keys() - shared)
    for name in shared:
        assert metrics[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-6), name


def test_probability_gap_equals_verl() -> None:
    batch = quantised(2, 0.3)
    tensors = {"rollout_log_probs": batch.rollout_log_probs, "old_log_probs": batch.log_probs}
    data = verl.DataProto.from_dict(
        tensors | {"response_mask": batch.mask.long(), "responses": batch.mask.long()}
    )
    debug = verl_helper.load("verl.utils.debug.metrics")
    assert debug is not None
    theirs = debug.calculate_debug_metrics(data)
    rules = correction_rules(RolloutCorrectionSpec(dialect="verl"))
    _, metrics = factor_and_metrics(batch.correct(rules), rules)
    del theirs["training/rollout_probs_diff_valid"]
    assert {name: metrics[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)


def test_where_verl_divides_by_zero_there_is_an_answer() -> None:
    batch = quantised(1, 0.3)
    shifted = Batch(batch.log_probs - 4.0, batch.rollout_log_probs, batch.mask, batch.advantages)
    chosen = settings("token", "0.5_1.8", True, None)
    with pytest.raises(ZeroDivisionError):
        verl.compute_rollout_correction_and_rejection_mask(
            shifted.log_probs, shifted.rollout_log_probs, shifted.mask.float(), **chosen
        )
    rules = correction_rules(RolloutCorrectionSpec(dialect="verl", **chosen))
    ours = shifted.correct(rules)
    factor, metrics = factor_and_metrics(ours, rules)
    assert factor == 1.0
    assert not ours.weights.any()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_nothing_of_verls_environment_stays() -> None:
    """The product's tests must not find a package that only verl needs."""
    module = verl._module
    side = verl_helper.SIDE
    files = {name: getattr(module, "__file__", None) or "/" for name, module in sys.modules.items()}
    assert not [name for name, file in files.items() if side in Path(file).parents]
    assert not [entry for entry in sys.path if side in (Path(entry), *Path(entry).parents)]
    assert verl_helper.load() is module
