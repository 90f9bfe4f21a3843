"""`rlctl explain` answers for what people paste: flags, assignments, parts of keys, keys of old releases."""

from __future__ import annotations

import json

import pytest

from rlctl.cli.app import run
from rlctl.cli.explain_entries import entries_of

#: Of TRL's trainers by PPO and RLOO of several releases, and of scripts.
OLDER = """
exp_name reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards
kl_estimator cliprange vf_coef cliprange_value gamma lam num_mini_batches total_episodes
num_sample_generations response_length stop_token_id missing_eos_penalty sft_model_path world_size
mini_batch_size init_kl_coef adap_kl_ctrl target_kl ppo_epochs whiten_advantages use_score_scaling
use_score_norm score_clip ratio_threshold early_stopping tracker_project_name rloo_k token_level_kl
normalize_advantages reward_clip_range callbacks rollout_func reward_processing_classes
quantization_config peft_config ddp_timeout use_liger_loss wandb_log_unique_prompts sweep curriculum
"""
#: verl's keys by their last parts, and of recipes.
PARTS = """
overlong_buffer.enable overlong_buffer.len overlong_buffer_cfg.penalty_factor multi_turn.enable
agent.num_workers rollout.multi_turn.enable use_remove_padding kl_ctrl.kl_coef sandbox_fusion
ptx_coef
"""


@pytest.mark.parametrize("name", [*OLDER.split(), *PARTS.split()])
def test_a_name_is_known(name: str) -> None:
    for entry in entries_of(name):
        assert entry.get("becomes") or entry.get("note") or entry.get("meaning") != "no name of rlctl", entry


@pytest.mark.parametrize("flag", ["--init_kl_coef", "--algo.kl.init_coef", "--init_kl_coef=0.01"])
def test_a_flag_is_explained_as_it_is_pasted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", flag, "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert entry["name"] == "algo.kl.init_coef"


def test_an_assignment_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "++actor.lr=1e-6"]) == 0
    assert capsys.readouterr().out.startswith("actor.lr\n")
    assert run(["explain", "--no_such_flag"]) == 2
