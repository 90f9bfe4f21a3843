"""The metric registry: complete, unambiguous."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlctl.metric_names import METRICS, SECTIONS, describe, key_pattern, validation_rewards

ROOT = Path(__file__).parents[2]
#: Keys the guides of this project and existing dashboards name: none may go missing.
REQUIRED = [
    *(
        f"rollout_corr/rollout_is_{kind}{stat}"
        for kind in ("", "raw_")
        for stat in (
            *("mean", "std", "max", "min", "eff_sample_size", "eff_sample_size_token"),
            *("seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation"),
        )
    ),
    *(
        f"rollout_corr/rollout_is_{stat}"
        for stat in (
            *("ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low"),
            "batch_norm_factor",
        )
    ),
    *(
        f"rollout_corr/{key}"
        for key in (
            *("rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction", "training_ppl", "rollout_ppl"),
            *("training_log_ppl", "rollout_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max"),
            *("log_ppl_diff_min", "ppl_ratio", "kl", "k3_kl", "chi2_token", "chi2_seq"),
            *("nonfinite_sequences", "saturated_sequences", "skipped_updates"),
        )
    ),
    *(
        f"rollout_corr/rollout_rs_{criterion}_{stat}"
        for criterion in ("token_k1", "seq_max_k2", "sequence", "seq_mean_k3")
        for stat in (
            *("mean", "max", "min", "std", "fraction_high", "fraction_low"),
            *("masked_fraction", "seq_masked_fraction"),
        )
    ),
    *(
        f"training/{key}"
        for key in (
            *("rollout_probs_diff_mean", "rollout_probs_diff_max", "rollout_probs_diff_std"),
            *("rollout_actor_probs_pearson_corr", "global_step", "epoch", "staleness_mean", "staleness_max"),
        )
    ),
    *(
        f"actor/{key}"
        for key in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
    ),
    *(
        f"critic/{what}/{stat}"
        for what in ("score", "rewards", "advantages")
        for stat in ("mean", "max", "min")
    ),
    *(
        f"{what}_length/{stat}"
        for what in ("response", "prompt")
        for stat in ("mean", "max", "min", "clip_ratio")
    ),
    *("perf/throughput", "perf/total_num_tokens", "perf/time_per_step", "perf/max_memory_allocated_gb"),
    *(
        f"timing_s/{stage}"
        for stage in (
            *("gen", "reward", "old_log_prob", "adv", "update_actor"),
            *("sync_weights", "save_checkpoint", "testing", "step"),
        )
    ),
    *("reward/num_errors", "reward/num_timeouts", "reward/error_fraction", "reward/zero_spread_groups"),
    *("val/openai/gsm8k/reward_mean", "val/tiny_addition/response_length_mean"),
]


@pytest.mark.parametrize("key", REQUIRED)
def test_every_expected_key_is_described(key: str) -> None:
    metric = describe(key)
    assert metric is not None
    assert metric.name == key
    assert not any("<" in name for name in metric.peers.values())


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda m: m.name)
def test_every_metric_has_unit_and_definition(metric) -> None:  # type: ignore[no-untyped-def]
    assert metric.unit
    assert len(metric.definition.split()) >= 2
    assert METRICS[metric.name] is metric


def test_no_name_is_defined_twice() -> None:
    assert sum(len(section) for section in SECTIONS.values()) == len(METRICS)


@pytest.mark.parametrize(
    "key", ["actor/pg_los", "rollout_corr/", "val/reward_mean", "", "val/<data_source>/reward_mean"]
)
def test_unknown_keys_stay_unknown(key: str) -> None:
    assert describe(key) is None


@pytest.mark.parametrize("pattern", ["a/<x>/<x>_mean", "a/<1>/<any text>_mean", "a/<>/<x>_mean"])
def test_any_placeholder_stands_for_any_text(pattern: str) -> None:
    assert key_pattern(pattern).fullmatch("a/b/c.d_mean")
    assert not key_pattern(pattern).fullmatch("a/b/c.d_max")


def test_a_data_source_may_have_any_name() -> None:
    rewards = {f"val/{name}/reward_mean": 0.5 for name in ("a", "a/b", "a\nb")}
    assert validation_rewards({**rewards, "val/a/num_tokens": 3.0}) == {"a": 0.5, "a/b": 0.5, "a\nb": 0.5}


def test_the_batch_total_is_not_taken_for_a_criterion() -> None:
    assert (
        describe("rollout_corr/rollout_rs_seq_masked_fraction")
        is METRICS["rollout_corr/rollout_rs_seq_masked_fraction"]
    )
    one = describe("rollout_corr/rollout_rs_token_k1_seq_masked_fraction")
    assert one is not None
    assert one.definition.startswith("share of sequences")


def test_criteria_equal_verls_under_its_dialect_only() -> None:
    """`rollout_rs_token_k1_mean` is the mean of ρ under dialect rlctl, and of −log ρ in verl."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8").splitlines()
    for key in METRICS:
        if "<criterion>" in key:
            assert "verl" not in METRICS[key].peers
            [row] = [line for line in page if line.startswith(f"| `{key}` |")]
            assert row.endswith("| verl (under `dialect: verl`) |")
            assert "rlctl" in METRICS[key].definition or "alone rejects" in METRICS[key].definition


def test_no_torch() -> None:
    code = "import sys, rlctl.metric_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("convention", [None, "verl"])
@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
def test_correction_logs_only_what_is_described(level, convention) -> None:
    from rlctl.algos.correction import correct, correction_metrics
    from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
    from rlctl.algos.segments import Units, to_host

    log_probs = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0])
    units = Units.of_responses(torch.tensor([2, 3]))
    rules = CorrectionRules(
        WeightRule(level, normalize=True, metrics=convention),
        (
            RejectRule("token_k1", "ratio", "none", 0.6, 1.6, "sequence"),
            RejectRule("seq_max_k2", "k2", "max", None, 2.5, "sequence"),
        ),
    )
    sums = to_host(correct(log_probs, log_probs + 0.1, units, rules).sums)
    logged = correction_metrics(sums, rules)
    assert len(logged) > 40
    assert [key for key in logged if describe(key) is None] == []
