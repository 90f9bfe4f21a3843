"""Logs as the frameworks write them: recognised, under canonical names, with what the figures mean there.

`samples/` holds what TRL 1.16 and verl 0.9 wrote; the other lines follow the frameworks' sources.
"""

import json
import pprint
from pathlib import Path

import numpy as np
import pytest

from rlctl.diagnose.facts import configured_facts
from rlctl.diagnose.readers.collect import Collector
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.readers.reader_files import BUILT_IN, STEP, MetricFilter
from rlctl.diagnose.readers.reading import LogReading, canonical_table
from rlctl.diagnose.rule import examine
from rlctl.diagnose.table import Facts, RunLog
from rlctl.metric_names import ELSEWHERE, METRICS, describe
from tests.unit.diagnose import formats

SAMPLES = Path(__file__).parent / "samples"
EVERYTHING = (*METRICS, *ELSEWHERE)


def read(tmp_path, text, keys=EVERYTHING):
    path = tmp_path / "some.log"
    path.write_text(text, encoding="utf-8")
    return read_run(path, keys)


def values(run, key):
    return run.table.series(key).values.tolist()


# --- verl --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verl_console.log", "verl_file_logger.jsonl"])
def test_verls_own_logs(name):
    run = read_run(SAMPLES / name, EVERYTHING)
    assert run.framework == "verl"
    assert run.table.steps.tolist() == list(range(13))
    assert values(run, "critic/score/mean") == pytest.approx([0.3 + 0.01 * step for step in range(1, 13)])
    assert run.table.series("val/openai/gsm8k/reward_mean").steps.tolist() == [0, 6, 12]
    # The console prints nan; the file logger has no word for it and writes null.
    assert run.table.nonfinite["actor/grad_norm"].tolist() == [5]
    assert "rejection" in run.origins["rollout_corr/rollout_is_eff_sample_size"].meaning
    assert run.origins["rollout_corr/kl"].meaning == ""
    assert (run.facts.logs_correction, run.facts.naming) == (True, "verl")
    assert run.notes == ()


def test_verls_printed_configuration_gives_facts():
    facts = read_run(SAMPLES / "verl_console.log", EVERYTHING).facts
    assert facts == Facts(
        bypass_mode=False,
        updates_per_batch=2,
        ppo_epochs=1,
        rollout_is="sequence",
        rollout_is_threshold=2.0,
        rollout_rs="off",
        batch_size=32,
        group_size=4,
        has_critic=False,
        max_response_length=512,
        kl_coef=0.001,
        dtype="bf16",
        lr=1e-6,
        ess_length_weighted=True,
        logs_correction=True,
        naming="verl",
    )


def test_verl_through_ray_with_colours_and_other_processes_between(tmp_path):
    lines = (SAMPLES / "verl_console.log").read_text().splitlines()
    other = "\x1b[36m(WorkerDict pid=77)\x1b[0m INFO loading: {'weights': [\n"
    ray = "".join(f"\x1b[36m(TaskRunner pid=1, ip=10.0.0.7)\x1b[0m {line}\n{other}" for line in lines)
    plain, through_ray = read_run(SAMPLES / "verl_console.log", EVERYTHING), read(tmp_path, ray)
    assert through_ray.facts == plain.facts
    assert through_ray.table.columns.keys() == plain.table.columns.keys()
    for key, column in plain.table.columns.items():
        np.testing.assert_array_equal(through_ray.table.columns[key], column)


GRADER = "{'format': 1.0, 'answer': 0.5, 'ok': true, 'note': 'x'}"


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_a_graders_printed_dictionary_is_no_row(tmp_path, place):
    """... and neither is one with a trainer's keys in the log of another trainer."""
    rows = [f"step:{step} - actor/entropy:0.5 - critic/score/mean:0.{step}" for step in (1, 2, 3)]
    prints = [GRADER, "{'epoch': 3, 'loss': 9.0, 'reward': 7.0}", "{'score': 1, 'reward': 0.25}"]
    lines = {
        "before": [*prints, *rows],
        "between": [line for pair in zip(rows, prints, strict=True) for line in pair],
        "after": [*rows, *prints],
    }[place]
    run = read(tmp_path, "\n".join(lines))
    assert run.framework == "verl"
    assert run.table.steps.tolist() == [1, 2, 3]
    assert values(run, "critic/score/mean") == [0.1, 0.2, 0.3]
    assert "actor/pg_loss" not in run.table.columns
    assert run.notes == ()


def test_a_graders_prints_are_no_steps_of_the_trainer(tmp_path):
    rows = [f"{{'loss': 0.{step}, 'reward': 0.5, 'epoch': 0.{step}}}\n{GRADER}" for step in (1, 2, 3)]
    run = read(tmp_path, "\n".join(rows))
    assert run.table.steps.tolist() == [1, 2, 3]
    assert values(run, "actor/pg_loss") == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("word", ["true", "false", "True", "FALSE", "NaN", "inf"])
def test_words_in_printed_values_are_numbers(tmp_path, word):
    run = read(
        tmp_path, f"{{'loss': 0.5, 'epoch': 1, 'done': {word}}}\nstep:1 - actor/entropy:{word} - actor/lr:1\n"
    )
    assert run.table.steps.tolist() == [1]


def test_verls_older_names(tmp_path):
    text = "step:1 - mismatch/mismatch_kl:0.25 - mismatch/rollout_is_mean:1.5 - actor/entropy_loss:0.5\n"
    run = read(tmp_path, text)
    assert values(run, "rollout_corr/kl") == [0.25]
    assert values(run, "rollout_corr/rollout_is_mean") == [1.5]
    assert values(run, "actor/entropy") == [0.5]


@pytest.mark.parametrize(
    ("name", "bypass_mode"),
    [("training/rollout_probs_diff_valid", False), ("perf/mfu/actor_infer", False), ("perf/mfu/actor", None),
     ("actor/rollout_corr/kl", True)],
)  # fmt: skip
def test_verls_names_tell_its_mode(tmp_path, name, bypass_mode):
    run = read(tmp_path, f"step:1 - actor/grad_norm:0.5 - timing_s/old_log_prob:0.1 - {name}:1\n")
    assert run.facts.bypass_mode is bypass_mode


VERL_DATA = {"data": {"train_batch_size": 32, "max_response_length": 9}}
VERL_CONFIG = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "ppo_epochs": 1},
                                     "rollout": {"n": 4}}, **VERL_DATA}  # fmt: skip


def test_verls_staleness_is_counted_in_updates_from_the_oldest_tokens(tmp_path):
    """verl counts batches; a response sampled under two versions is as old as its older part."""
    age = "training/off_policy/trajectory_staleness"
    ages = f"{age}/max:0 - {age}/mean:0 - {age}_worst/max:2 - {age}_worst/mean:1"
    row = f"step:1 - actor/grad_norm:0.5 - {ages} - training/rollout_probs_diff_valid:1"
    run = read(tmp_path, f"{pprint.pformat(VERL_CONFIG, width=1)}\n{row}\n")
    assert run.facts.updates_per_batch == 4
    assert (values(run, "training/staleness_max"), values(run, "training/staleness_mean")) == ([8.0], [4.0])
    assert not run.gap_is_mismatch


@pytest.mark.parametrize("name", ["fully_async/trainer/idle_ratio", "timing_s/sync_rollout_weights"])
def test_the_gap_of_an_asynchronous_run_is_mismatch_only_if_it_logs_no_age(tmp_path, name):
    row = f"step:1 - actor/grad_norm:0.5 - training/rollout_probs_diff_valid:1 - {name}:0.1"
    assert read(tmp_path, row.replace(name, "timing_s/gen")).gap_is_mismatch
    assert not read(tmp_path, row).gap_is_mismatch
    assert read(tmp_path, f"{row} - training/off_policy/trajectory_staleness_worst/max:0").gap_is_mismatch


def test_verls_entropy_is_that_before_the_updates(tmp_path):
    run = read(tmp_path, "step:1 - actor/entropy_loss:0.4 - actor/entropy:0.5 - perf/mfu/actor:1\n")
    assert values(run, "actor/entropy") == [0.5]


@pytest.mark.parametrize(("mode", "is_mean"), [("token-mean", True), ("seq-mean-token-sum", False)])
def test_verls_figures_that_are_summed_over_a_response_are_not_read(tmp_path, mode, is_mean):
    row = "step:1 - actor/entropy:300.0 - actor/kl_loss:9.0 - actor/grad_norm:0.5 - perf/mfu/actor:1"
    for setting in (f"actor_rollout_ref.actor.loss_agg_mode={mode}",
                    {"actor_rollout_ref": {"actor": {"loss_agg_mode": mode}}}):  # fmt: skip
        text = setting if isinstance(setting, str) else pprint.pformat(setting | VERL_DATA, width=1)
        run = read(tmp_path, f"{text}\n{row}\n")
        assert {"actor/entropy", "actor/kl_loss"} <= run.table.columns.keys() or not is_mean
        assert "actor/grad_norm" in run.table.columns
        assert len(run.notes) == (0 if is_mean else 2)
        assert is_mean or "actor/kl_loss" not in run.table.columns


@pytest.mark.parametrize(
    ("algorithm", "level", "threshold"),
    [
        ({"rollout_correction": {"rollout_is": None}}, "off", None),
        ({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}}, "token", 2.0),
        ({}, "off", None),
        # verl 0.6
        ({"rollout_is": False, "rollout_is_threshold": 2.0, "rollout_is_level": "token"}, "off", 2.0),
        ({"rollout_is": True, "rollout_is_threshold": 5, "rollout_is_level": "geometric"}, "geometric", 5.0),
    ],
)
def test_verls_correction_under_its_present_and_older_keys(algorithm, level, threshold):
    facts = configured_facts("verl", BUILT_IN.named("verl").config, {**VERL_CONFIG, "algorithm": algorithm})
    assert (facts.rollout_is, facts.rollout_is_threshold, facts.rollout_rs) == (level, threshold, "off")


@pytest.mark.parametrize(
    ("actor", "algorithm", "expected"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, {"use_kl_in_reward": False}, 0.1),
        ({"use_kl_loss": False}, {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.2}}, 0.2),
        ({"use_kl_loss": False}, {"use_kl_in_reward": True}, 0.001),
        ({"use_kl_loss": False}, {"use_kl_in_reward": False}, 0.0),
        ({}, {}, None),
    ],
)
def test_verls_kl_coefficient(actor, algorithm, expected):
    config = {**VERL_CONFIG, "algorithm": algorithm, "actor_rollout_ref": {"actor": actor}}
    assert configured_facts("verl", BUILT_IN.named("verl").config, config).kl_coef == expected


def test_verls_correction_in_bypass_mode(tmp_path):
    ess = "rollout_corr/rollout_is_eff_sample_size"
    run = read(tmp_path, f"step:1 - actor/{ess}:0.9 - actor/rollout_corr/k3_kl:0.01\n")
    assert (values(run, ess), values(run, "rollout_corr/k3_kl")) == ([0.9], [0.01])
    assert "bounded weights" in run.origins[ess].meaning
    for key in (ess, "rollout_corr/k3_kl"):
        assert "micro-batches" in run.origins[key].meaning


def test_ours_and_verls_are_told_apart_by_what_only_one_of_them_logs(tmp_path):
    shared = {"step": 1, "actor/grad_norm": 1.0, "rollout_corr/kl": 0.1}
    marks = {"rlctl": "rollout_corr/rollout_is_raw_mean", "verl": "perf/mfu/actor"}
    for framework, mark in marks.items():
        assert read(tmp_path, json.dumps({**shared, mark: 1.0}) + "\n").framework == framework


# --- TRL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trl_trainer_state.json", "trl_console.log"])
def test_trls_own_logs(name):
    run = read_run(SAMPLES / name, EVERYTHING)
    assert run.framework == "trl"
    assert run.table.steps.tolist() == list(range(1, 13))
    history = json.loads((SAMPLES / "trl_trainer_state.json").read_text())["log_history"]
    theirs_of = {
        "critic/score/mean": "reward",
        "actor/grad_norm": "grad_norm",
        "actor/kl_loss": "kl",
        "actor/pg_loss": "loss",
        "response_length/clip_ratio": "completions/clipped_ratio",
        "val/eval/reward_mean": "eval_reward",
        "reward/reward/mean": "rewards/reward/mean",
    }
    for key, theirs in theirs_of.items():
        expected = [row[theirs] for row in history if theirs in row]
        assert values(run, key) == pytest.approx(expected, rel=2e-3)  # printed with four digits
    assert run.table.series("val/eval/reward_mean").steps.tolist() == [6, 12]
    assert "KL" in run.origins["actor/pg_loss"].meaning
    assert "all rewards" in run.origins["reward/group_std"].meaning
    assert run.facts.bypass_mode is False
    assert run.gap_is_mismatch
    numbered = ("the printed lines have no step: it is taken from the progress bar",)
    assert run.notes == (numbered if name.endswith(".log") else ())


def test_trls_sampling_metrics_and_training_arguments(tmp_path):
    row = {"step": 5, "train/reward": 0.5, "train/sampling/importance_sampling_ratio/mean": 0.9,
           "train/sampling/sampling_logp_difference/mean": 0.01}  # fmt: skip
    run = read(tmp_path, json.dumps(row) + "\n")
    assert values(run, "rollout_corr/rollout_is_mean") == [0.9]
    assert values(run, "mismatch/log_prob_abs_diff_mean") == [0.01]
    trl = BUILT_IN.named("trl")
    arguments = {"num_generations": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 8,
                 "num_iterations": 2, "use_vllm": True, "vllm_importance_sampling_correction": True,
                 "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
                 "bf16": True, "beta": 0.0}  # fmt: skip
    facts = configured_facts("trl", trl.config, arguments)
    assert (facts.updates_per_batch, facts.rollout_is, facts.rollout_is_threshold) == (4, "sequence", 3.0)
    assert (facts.dtype, facts.kl_coef, facts.group_size) == ("bf16", 0.0, 8)


def test_trls_asynchronous_grpo_is_compared_with_its_sampler(tmp_path):
    """There `kl` and `ratio` are to the policy that sampled: no reference, no π_old of its own."""
    row = {"reward": 0.5, "completions/mean_length": 9.0, "kl": 0.3, "ratio": 1.02, "perf/step_s": 2.0,
           "sample/staleness_max": 3.0, "sample/staleness_mean": 1.0, "num_tokens": 100}  # fmt: skip
    rows = [json.dumps({"step": step, **row}) for step in range(1, 31)]
    run = read(tmp_path, "\n".join(rows))
    assert run.framework == "trl"
    assert values(run, "rollout_corr/k3_kl")[:1] == [0.3]
    assert values(run, "rollout_corr/rollout_is_raw_mean")[:1] == [1.02]
    assert "actor/kl_loss" not in run.table.columns
    assert (run.facts.bypass_mode, run.facts.kl_coef, run.facts.rollout_is) == (True, 0.0, "off")
    found = {finding.rule: finding.severity for finding in examine(run).findings}
    assert found["policy-gap"] == "critical"
    assert "reference-drift" not in found


# --- the others ----------------------------------------------------------------------------------


def test_openrlhf(tmp_path):
    status = (
        "{'policy_loss': -0.01, 'actor_lr': 5e-07, 'actor_grad_norm': 0.4, 'ppo_clip_ratio': 0.02, "
        "'ppo_kl': 1e-3, 'vllm_kl': 0.004, 'kl': 0.1, 'response_length': tensor(300.5, device='cuda:0'), "
        "'rollout/reward_mean': np.float64(0.5)}"
    )
    lines = [f"INFO 08-13 19:25:45 ppo_trainer.py:547] ✨ Global step {step}: {status}" for step in (1, 2)]
    run = read(tmp_path, "Sample: ['text', 0.1]\n" + "\n".join(lines))
    assert run.framework == "openrlhf"
    assert run.table.steps.tolist() == [1, 2]
    expected = {
        "rollout_corr/kl": 0.004,
        "actor/ppo_kl": 0.001,
        "actor/kl_loss": 0.1,
        "actor/grad_norm": 0.4,
        "critic/score/mean": 0.5,
        "response_length/mean": 300.5,
    }
    for key, value in expected.items():
        assert values(run, key) == [value, value]
    assert "reference" in run.origins["actor/kl_loss"].meaning


@pytest.mark.parametrize(
    ("settings", "level", "threshold"),
    [
        ({"is_correction_level": "off", "is_correction_threshold": [0.5, 5.0]}, "off", 5.0),
        ({"is_correction_level": "token", "is_correction_threshold": [0.5, 2.0]}, "token", 2.0),
        ({"is_correction_enable": True}, "token", None),  # before 0.11.2
    ],
)
def test_openrlhfs_correction_under_its_present_and_older_options(settings, level, threshold):
    names = BUILT_IN.named("openrlhf")
    config = {"rollout": {"batch_size": 4, "n_samples_per_prompt": 2}, "train": {"async_enable": True},
              "algo": {"advantage": settings}}  # fmt: skip
    facts = configured_facts("openrlhf", names.config, config)
    assert (facts.rollout_is, facts.rollout_is_threshold, facts.is_async) == (level, threshold, True)


@pytest.mark.parametrize(
    ("mode", "level"),
    [(None, "off"), ("token_mask", "token"), ("sequence_truncate", "geometric"), ("sequence_mask", "token")],
)
def test_ms_swifts_correction_has_its_own_keys(mode, level):
    """Its sequence ratios are geometric means; as a mask, they leave the tokens' ratios as weights."""
    names = BUILT_IN.named("ms-swift")
    arguments = {"num_generations": 8, "use_vllm": True, "vllm_importance_sampling_correction": True,
                 "rollout_importance_sampling_mode": mode,
                 "rollout_importance_sampling_threshold": 2.0}  # fmt: skip
    facts = configured_facts("ms-swift", names.config, arguments)
    assert (facts.rollout_is, facts.rollout_is_threshold) == (level, 2.0)


def test_ms_swifts_perplexities_are_ours(tmp_path):
    names = ("training_log_ppl", "rollout_log_ppl", "log_ppl_abs_diff", "chi2_seq", "clipped_frac")
    row = {f"rollout_correction/{name}": 0.25 for name in names}
    run = read(tmp_path, json.dumps({"step": 1, "reward": 0.5, **row}) + "\n")
    assert run.framework == "ms-swift"
    for key in ("training_log_ppl", "rollout_log_ppl", "log_ppl_abs_diff", "rollout_is_outside_fraction"):
        assert values(run, f"rollout_corr/{key}") == [0.25]
    assert "rollout_corr/chi2_seq" not in run.table.columns  # of geometric means


def test_areals_kls_have_the_opposite_sign_and_its_longest_sequences_are_not_cut_off(tmp_path):
    """It logs log π_θ − log π_prox, and log π_prox − log π_rollout; the longest sequence fills the batch."""
    row = {"update/approx_kl": 0.25, "update/behave_approx_kl": 0.5, "no_eos_ratios": 0.125, "seq_len": 9.0}
    named = {f"ppo_actor/{name}/avg": value for name, value in row.items()}
    run = read(tmp_path, json.dumps({"step": 1, **named}) + "\n")
    assert (values(run, "actor/ppo_kl"), values(run, "rollout_corr/kl")) == ([-0.25], [-0.5])
    assert "response_length/clip_ratio" not in run.table.columns


def test_areals_staleness_is_that_of_the_proximal_policy(tmp_path):
    logged = {"proximal_avg": 0.5, "proximal_max": 2.0, "theta_max": 3.0}
    ages = {f"ppo_actor/update/version_stats/sample_staleness_{name}": age for name, age in logged.items()}
    run = read(tmp_path, json.dumps({"step": 1, "ppo_actor/update/grad_norm": 0.5, **ages}) + "\n")
    assert (values(run, "training/staleness_mean"), values(run, "training/staleness_max")) == ([0.5], [2.0])


def test_slimes_two_clocks_are_brought_to_rollouts(tmp_path):
    when = "[2026-01-01 00:00:00]"
    lines = []
    for rollout in range(3):
        lines += [
            f"{when} rollout_metrics.py:268 - perf {rollout}: {{'rollout/response_len/mean': 100.0}}",
            f"{when} x.py:135 - rollout {rollout}: {{'rollout/raw_reward': {rollout / 4}}}",
        ]
        for step in range(4 * rollout, 4 * rollout + 4):
            metrics = {"train/pg_loss": float(step), "train/tis": 1.01, "train/step": step}
            lines.append(f"{when} model.py:918 - step {step}: {metrics}")
    lines.append(f"{when} x.py:247 - eval 2: {{'eval/aime': 0.25, 'eval/aime-truncated_ratio': 0.5}}")
    run = read(tmp_path, "\n".join(lines))
    assert run.framework == "slime"
    assert run.table.steps.tolist() == [0, 1, 2]
    assert values(run, "critic/score/mean") == [0.0, 0.25, 0.5]
    assert values(run, "actor/pg_loss") == [3.0, 7.0, 11.0]
    assert values(run, "rollout_corr/rollout_is_raw_mean") == [1.01] * 3
    assert values(run, "val/aime/reward_mean") == [0.25]
    assert run.facts.updates_per_batch == 4
    assert run.notes == ("4 updates per rollout: a step is a rollout, its last update is shown",)


@pytest.mark.parametrize("write", [formats.list_of_rows, formats.comma_separated, formats.parquet])
def test_slimes_clocks_in_one_table(tmp_path, write):
    """Every row has all columns; those of the other clocks are empty."""
    logged = [
        {"rollout/step": 0, "rollout/raw_reward": 0.5},
        *({"train/step": step, "train/pg_loss": float(step)} for step in (0, 1)),
        {"eval/step": 0, "eval/aime": 0.25},
    ]
    columns = dict.fromkeys(key for row in logged for key in row)
    write([columns | row for row in logged], tmp_path / "log")
    run = read_run(tmp_path / "log", EVERYTHING)
    assert run.table.steps.tolist() == [0]
    assert values(run, "critic/score/mean") == [0.5]
    assert values(run, "actor/pg_loss") == [1.0]
    assert values(run, "val/aime/reward_mean") == [0.25]
    assert run.facts.updates_per_batch == 2


def test_slimes_newest_rollout_may_not_be_trained_on_yet(tmp_path):
    lines = []
    for rollout in range(3):
        lines.append(f"x.py:135 - rollout {rollout}: {{'rollout/raw_reward': 0.5}}")
        for step in range(4 * rollout, min(4 * rollout + 4, 8)):
            lines.append(f"model.py:918 - step {step}: {{'train/pg_loss': 0.1, 'train/step': {step}}}")
    run = read(tmp_path, "\n".join(lines))
    assert run.table.steps.tolist() == [0, 1, 2]
    assert run.facts.updates_per_batch == 4


def test_prime_rl_spreads_a_step_over_rows(tmp_path):
    per_step = [
        {"time": 1.5, "optim/lr": 1e-6, "optim/grad_norm": 0.5},
        {"time": 1.6, "entropy/all/mean": 0.4, "mismatch_kl/all/mean": 0.002, "is_masked/mean": 0.1},
        {"train/agg/effective/agent/reward/mean": 0.3, "off_policy/max": 3.0},
        {"train/agg/all/agent/solved_none": 0.25, "train/agg/all/agent/solved_all": 0.5},
    ]
    rows = [{"step": step, **row} for step in range(1, 4) for row in per_step]
    rows.append({"step": 2, "eval/aime/effective/agent/avg@8": 0.125})  # evaluations come late
    run = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert run.framework == "prime-rl"
    assert run.table.steps.tolist() == [1, 2, 3]
    assert values(run, "rollout_corr/k3_kl") == [0.002] * 3
    assert values(run, "reward/zero_spread_groups") == [0.75] * 3
    assert values(run, "training/staleness_max") == [3.0] * 3
    assert run.table.series("val/aime/reward_mean").steps.tolist() == [2]
    assert not run.gap_is_mismatch
    assert run.notes == ()


def test_prime_rls_console(tmp_path):
    text = (
        "10:00:00 SUCCESS Step 7 |   12.3s | Loss -0.0012 | Entropy 0.4100 | Mismatch KL 0.0021 "
        "| Grad. Norm 0.5 | LR 1.00e-06 | Throughput 100 tokens/s | MFU 30.1%\n"
        "10:00:01 SUCCESS Step 7 |   12.3s | Reward 0.5000 | Trainable 3/4 (75.0%) | Max Off-Policy 2 "
        "| Error 1.0% | Truncation 12.5%\n"
    )
    run = read(tmp_path, text)
    assert run.framework == "prime-rl"
    expected = {
        "rollout_corr/k3_kl": 0.0021,
        "actor/lr": 1e-6,
        "critic/score/mean": 0.5,
        "rollout/error_fraction": 0.01,
        "response_length/clip_ratio": 0.125,
        "training/staleness_max": 2.0,
    }
    for key, value in expected.items():
        assert values(run, key) == pytest.approx([value])


def test_losses_that_always_weigh_tokens_are_known_to_do_so(tmp_path):
    prime = '{"step": 1, "optim/grad_norm": 0.5, "mismatch_kl/all/mean": 0.4}\n'
    areal = '{"step": 1, "ppo_actor/update/grad_norm": 0.5, "ppo_actor/update/behave_imp_weight/avg": 0.4}\n'
    for row in (prime, areal):
        run = read(tmp_path, row)
        assert run.facts.rollout_is == "token"
        fixes = [setting for one in examine(run).findings for fix in one.fixes for setting in fix.spec]
        assert not any("rollout_is" in setting for setting in fixes)
    assert read(tmp_path, areal.replace("behave_imp_weight", "importance_weight")).facts.rollout_is is None


def test_shares_of_several_agents_of_prime_rl_are_not_summed(tmp_path):
    shares = {
        "proposer/solved_all": 0.5,
        "proposer/solved_none": 0.25,
        "solver/solved_all": 0.5,
        "solver/solved_none": 0.5,
    }
    row = {
        "step": 1,
        "optim/grad_norm": 0.5,
        **{f"train/agg/all/{name}": share for name, share in shares.items()},
    }
    run = read(tmp_path, json.dumps(row) + "\n")
    assert values(run, "reward/zero_spread_groups") == [0.75]


def test_skyrls_gap_before_the_updates_its_masks_and_its_kl(tmp_path):
    row = {
        "trainer/global_step": 3, "policy/policy_loss": 0.01, "loss/avg_kl": 0.25,
        "policy/rollout_train_logprobs_abs_diff_mean": 0.01,
        "policy/minibatch_rollout_logprobs_abs_diff_mean": 0.02,
        "policy/loss_metrics/outlier_seq_masked_ratio": 0.125,
        "policy/loss_metrics/geo_sequence_mask_masked_ratio": 0.75,
    }  # fmt: skip
    run = read(tmp_path, json.dumps(row) + "\n")
    assert values(run, "mismatch/log_prob_abs_diff_mean") == [0.01]
    assert values(run, "rollout_corr/rollout_rs_masked_fraction") == [0.75]
    assert values(run, "actor/reward_kl_penalty") == [0.25]
    assert run.facts.bypass_mode is False
    skipped = {name: value for name, value in row.items() if not name.startswith("policy/rollout_train")}
    run = read(tmp_path, json.dumps(skipped) + "\n")  # the loss does not need the pass before the updates
    assert values(run, "mismatch/log_prob_abs_diff_mean") == [0.02]
    assert run.facts.bypass_mode is True


@pytest.mark.parametrize(
    "name", ["fully_async/count/dropped_stale_samples", "training/off_policy/evicted_samples"]
)
def test_verls_asynchronous_trainers_count_the_prompts_that_they_drop(tmp_path, name):
    run = read(tmp_path, f"step:3 - actor/pg_loss:0.1 - perf/mfu/actor:0.1 - {name}:7\n")
    assert values(run, "training/stale_dropped") == [7.0]


def test_nemo_rl_by_step_and_on_the_console(tmp_path):
    series = {"train/gen_kl_error": 0.001, "train/token_mult_prob_error": 1.02, "train/reward": 0.5,
              "train/baseline_reward/pct_0": 25.0, "train/baseline_reward/pct_1": 50.0,
              "validation/accuracy": 0.75}  # fmt: skip
    run = read(tmp_path, json.dumps({name: {"1": value, "2": value} for name, value in series.items()}))
    assert run.framework == "nemo-rl"
    assert values(run, "rollout_corr/k3_kl") == [0.001] * 2
    assert values(run, "mismatch/token_mult_prob_error") == [1.02] * 2
    assert values(run, "reward/zero_spread_groups") == pytest.approx([0.75] * 2)
    assert values(run, "val/validation/reward_mean") == [0.75] * 2
    console = "".join(
        f"========================= Step {step}/9 =========================\n  • Loss: 0.0100\n"
        "  • Generation KL Error: 0.0020\n  • Avg Reward: 0.5000\n  • Total step time: 3.00s\n"
        for step in (1, 2)
    )
    run = read(tmp_path, console)
    assert run.framework == "nemo-rl"
    assert values(run, "rollout_corr/k3_kl") == [0.002] * 2
    assert run.facts.ppo_epochs == 1
    assert run.fact_origins["ppo_epochs"] == "fixed in nemo-rl"  # the log has no setting


def test_figures_summed_over_updates_are_divided_where_their_number_is_known():
    nemo = BUILT_IN.named("nemo-rl")
    wanted = MetricFilter(EVERYTHING)
    config = {"grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4},
              "policy": {"train_global_batch_size": 16, "precision": "bfloat16"}}  # fmt: skip
    reading = LogReading(Collector(wanted.by_any_name), BUILT_IN, config=config)
    reading.collector.add(
        {"step": 1, "train/token_mult_prob_error": 2.04, "train/reward": 0.5, "train/avg_trajectory_age": 0.5}
    )
    table, _, facts, _ = canonical_table(reading.collector.finish(), nemo, wanted, reading, None)
    assert facts.updates_per_batch == 2
    assert table.columns["mismatch/token_mult_prob_error"].tolist() == [1.02]
    assert table.columns["training/staleness_mean"].tolist() == [1.0]  # counted in batches
    assert not RunLog(Path("log"), table, facts=facts).gap_is_mismatch
    assert table.columns["critic/score/mean"].tolist() == [0.5]


@pytest.mark.parametrize(("kind", "read_as"), [("k3", [0.25]), ("k1", []), ("k2", [])])
def test_nemos_generation_kl_has_the_estimator_of_the_reference_kl(kind, read_as):
    nemo = BUILT_IN.named("nemo-rl")
    wanted = MetricFilter(EVERYTHING)
    config = {"loss_fn": {"reference_policy_kl_type": kind}}
    reading = LogReading(Collector(wanted.by_any_name), BUILT_IN, config=config)
    reading.collector.add({"step": 1, "train/gen_kl_error": 0.25, "train/reward": 0.5})
    table, *_ = canonical_table(reading.collector.finish(), nemo, wanted, reading, None)
    assert table.series("rollout_corr/k3_kl").values.tolist() == read_as
    assert len(reading.notes) == (not read_as)


def test_an_unknown_log_is_read_by_its_plain_names_only(tmp_path):
    run = read(tmp_path, "step,loss,kl,ratio,entropy\n1,0.5,0.1,1.0,0.2\n2,0.25,0.1,1.0,0.2\n")
    assert run.framework == "unknown"
    assert values(run, "actor/pg_loss") == [0.5, 0.25]
    assert set(run.table.columns) == {"actor/pg_loss", "actor/entropy"}
    assert "not known" in run.origins["actor/pg_loss"].meaning


def test_every_name_leads_to_a_described_metric():
    for framework in BUILT_IN.frameworks:
        for name, named in framework.names.items():
            assert named.key == STEP or describe(named.key), (framework.framework, name)


def test_the_page_lists_every_name_with_its_meaning():
    path = Path(__file__).parents[3] / "docs" / "reference" / "diagnose-inputs.md"
    page = path.read_text(encoding="utf-8")
    for framework in BUILT_IN.frameworks:
        for name, named in framework.names.items():
            row = f"| `{name}` | `{named.key}` | {named.meaning or '—'} |\n"
            assert row in page, (framework.framework, name)


def test_every_column_says_where_it_comes_from():
    for sample in SAMPLES.iterdir():
        run = read_run(sample, EVERYTHING)
        assert run.origins.keys() == run.table.columns.keys()
