"""Dialects become one internal form; bands known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.errors import SpecError
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.resolve import correction_rules, loss_rule
from tests.properties.padded_batches import corrected


def rules(**fields):
    return correction_rules(RolloutCorrectionSpec(**fields))


def reject(dialect, name, threshold) -> RejectRule:
    [rule] = rules(dialect=dialect, rollout_rs=name, rollout_rs_threshold=threshold).reject
    return rule


@pytest.mark.parametrize(
    ("dialect", "name", "threshold", "form", "band"),
    [
        # rlctl's "0.6_1.6,2.5": both are on ρ
        ("rlctl", "token_k1", "0.6_1.6", ("ratio", "none", "sequence"), (0.6, 1.6)),
        ("rlctl", "token_k1", "2.0", ("ratio", "none", "sequence"), (0.0, 2.0)),
        ("rlctl", "seq_max_k2", "2.5", ("ratio", "max", "sequence"), (0.0, 2.5)),
        ("rlctl", "sequence", "0.5_2", ("ratio", "sum", "sequence"), (0.5, 2.0)),
        ("rlctl", "sequence", "3", ("ratio", "sum", "sequence"), (0.0, 3.0)),
        ("rlctl", "geometric", "0.9_1.1", ("ratio", "mean", "sequence"), (0.9, 1.1)),
        ("rlctl", "token_veto", "1e-4", ("ratio", "none", "sequence"), (1e-4, math.inf)),
        # verl: k1 = −log ρ turns bounds over, k2 = ½ log² ρ widens them
        ("verl", "token_k1", "0.6_1.6", ("k1", "none", "token"), (1 / 1.6, 1 / 0.6)),
        ("verl", "token_k1", "2", ("k1", "none", "token"), (0.5, 2.0)),
        ("verl", "seq_sum_k1", "0.5_4", ("k1", "sum", "sequence"), (0.25, 2.0)),
        ("verl", "seq_mean_k1", "1.1", ("k1", "mean", "sequence"), (1 / 1.1, 1.1)),
        ("verl", "token_k2", "0.5", ("k2", "none", "token"), (math.exp(-1), math.e)),
        ("verl", "seq_max_k2", "2.5", ("k2", "max", "sequence"), (0.106878, 9.356469)),
        ("verl", "token_veto", "1e-4", ("ratio", "none", "sequence"), (1e-4, math.inf)),
    ],
)
def test_criteria(dialect, name, threshold, form, band):
    rule = reject(dialect, name, threshold)
    assert (rule.statistic, rule.reduction, rule.scope) == form
    assert rule.band() == pytest.approx(band, rel=1e-5)
    assert not rule.negative_advantage_only


@pytest.mark.parametrize("name", ["token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3"])
def test_k3_bands_solve_its_equation(name):
    rule = reject("verl", name, "0.3")
    for rho in rule.band():
        assert rho - 1 - math.log(rho) == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize("dialect", ["rlctl", "verl"])
def test_off_policy_rejects_what_deepseek_v3_2_rejects(dialect):
    """A < 0 and mean log(π_rollout/π_train) > δ; what π_train likes more, or A ≥ 0, is kept."""
    rule = reject(dialect, "off_policy", "0.1")
    assert rule.band() == pytest.approx((math.exp(-0.1), math.inf))
    log_ratios = [-0.15, -0.05, 0.15, 3.0]  # log π_train − log π_rollout, the same for each of two tokens
    expected = {-1.0: [False, True, True, True], 0.0: [True] * 4, 1.0: [True] * 4}
    mask = torch.ones(4, 2, dtype=torch.bool)
    rollout = torch.full((4, 2), -4.0)
    train = rollout + torch.tensor(log_ratios)[:, None]
    for advantage, kept in expected.items():
        given = torch.full((4, 2), advantage)
        found = corrected(train, rollout, mask, CorrectionRules(WeightRule(None), (rule,)), advantages=given)
        assert found.keep_mask[:, 0].tolist() == kept
    uneven = rollout + torch.tensor([[-3.0, 2.9]])  # large on every token, small on average
    negative = torch.full((4, 2), -1.0)
    found = corrected(uneven, rollout, mask, CorrectionRules(WeightRule(None), (rule,)), advantages=negative)
    assert found.keep_mask.all()


def test_several_criteria_keep_their_order_and_thresholds():
    both = rules(rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="0.6_1.6,2.5").reject
    assert [(rule.name, rule.lower, rule.upper) for rule in both] == [
        ("token_k1", 0.6, 1.6),
        ("seq_max_k2", None, 2.5),
    ]


def test_verl_shares_one_threshold_and_the_guide_does_not():
    names = "token_k1,seq_max_k2"
    shared = rules(dialect="verl", rollout_rs=names, rollout_rs_threshold="2.0").reject
    assert [rule.upper for rule in shared] == [pytest.approx(math.log(2)), 2.0]
    with pytest.raises(SpecError, match="1 given for 2"):
        rules(rollout_rs=names, rollout_rs_threshold="2.0")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rollout_is_threshold": "2.0"}, ("clip", 0.5, 2.0)),
        ({"rollout_is_threshold": "0.8_3"}, ("clip", 0.8, 3.0)),
        ({"rollout_is_threshold": "4", "rollout_is_bound": "mask"}, ("mask", 0.25, 4.0)),
        ({"rollout_is_threshold": "4", "dialect": "verl"}, ("truncate", 0.25, 4.0)),
        ({"rollout_is_threshold": "0.5_2", "dialect": "verl"}, ("mask", 0.5, 2.0)),
        ({"rollout_is_threshold": "0.5", "rollout_is_bound": "truncate"}, ("truncate", 2.0, 0.5)),
        ({"rollout_is_threshold": 5}, ("clip", 0.2, 5.0)),
    ],
)
def test_weight_bounds(fields, expected):
    weight = rules(**fields).weight
    assert (weight.bound, weight.lower, weight.upper) == pytest.approx(expected)


def test_the_earlier_name_of_the_dialect_is_an_alias():
    spec = load_spec([], [], ["algorithm.rollout_correction.dialect=guide"]).spec
    assert spec == load_spec([], [], []).spec
    assert spec.algorithm.rollout_correction.dialect == "rlctl"


def test_truncate_has_no_lower_bound():
    assert rules(rollout_is_threshold="2", rollout_is_bound="truncate").weight.band() == (0.0, 2.0)


def test_verl_metrics_and_normalisation_come_with_its_dialect():
    assert (rules().weight.metrics, rules().weight.normalize_over) == (None, "survivors")
    verl = rules(dialect="verl").weight
    assert (verl.metrics, verl.normalize_over) == ("verl", "all")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rollout_is_threshold": "0.9"}, r"c ≥ 1"),
        ({"rollout_is_threshold": "2_0.5"}, r"write 0.5_2"),
        ({"rollout_is_threshold": "0"}, r"positive"),
        ({"rollout_is_threshold": "-1"}, r"positive"),
        ({"rollout_is_threshold": "nan"}, r"positive"),
        ({"rollout_is_threshold": "1_2_3"}, r"positive"),
        ({"rollout_is_threshold": "two"}, r"positive"),
        ({"rollout_rs": "token_k1"}, r"missing"),
        ({"rollout_rs": "token_k7", "rollout_rs_threshold": "2"}, r"did you mean `token_k1`"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "2"}, r"dialect: verl"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": "2", "dialect": "verl"}, r"dialect: rlctl"),
        ({"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.5_2"}, r"takes one number"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2", "dialect": "verl"}, r"takes one number"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, r"leaves out ρ = 1"),
        ({"rollout_rs": "token_veto", "rollout_rs_threshold": "2"}, r"leaves out ρ = 1"),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": "2,3"}, r"named twice"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2,3"}, r"2 given for 1"),
        ({"rollout_rs": "token_k1,", "rollout_rs_threshold": "2,3"}, r"`` is no criterion"),
    ],
)
def test_bad_thresholds_are_refused(fields, words):
    with pytest.raises(SpecError, match=words):
        rules(**fields)


def test_all_bad_thresholds_at_once():
    with pytest.raises(SpecError) as caught:
        rules(
            rollout_is_threshold="x",
            rollout_rs="token_k1,nonsense,seq_max_k2",
            rollout_rs_threshold="y,1,1_2",
        )
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "gspo", "cispo", "sapo", "dppo"])
def test_the_numbers_of_a_loss_are_the_specs_defaults(loss):
    """A rule constructed in Python has the same defaults as a spec; SAPO's are those of its paper."""
    spec = load_spec([], [], [f"algorithm.rollout_correction.loss_type={loss}"]).spec
    assert loss_rule(spec) == LossRule(loss)
    assert (LossRule(loss).tau_pos, LossRule(loss).tau_neg) == (1.0, 1.05)
    assert (LossRule(loss).clip_low, LossRule(loss).clip_high, LossRule(loss).clip_c) == (0.2, 0.2, None)
