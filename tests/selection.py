"""Which command runs which tests: `make test` all but the kinds below, `make test-all` the kinds.

Of each kind `make test` keeps the tests named behind a file, to notice when a kind breaks as a whole.
`make help` prints the table (`python tests/selection.py`). The marker of the kinds is `thorough`. Long sweeps
of other files are divided in the same way, case by case (`tests/sweeps.py`).
"""

from __future__ import annotations

#: Kind → file below `tests` → names of its tests that `make test` runs too.
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "a real language model (SmolLM2-135M)": {
        "integration/test_llm.py": (
            "test_the_two_sides_of_a_split_share_no_sum",
            "test_what_the_name_stands_for",
        ),
    },
    "code of other frameworks beside ours (verl, TRL, OpenRLHF, AReaL, SkyRL, lm-evaluation-harness)": {
        "properties/test_peers.py": ("test_trl_off_policy_mask",),
        "properties/test_verl_agreement.py": ("test_probability_gap_equals_verl",),
        "unit/algos/test_agreement_with_verl.py": ("test_policy_losses",),
        "unit/prepare/test_beside_verl.py": (),
        "unit/evaluate/test_beside_lm_eval.py": (),
    },
    "responses of 200,000 characters through every grader": {
        "unit/reward/test_linear.py": ("test_every_grader_is_swept", "test_what_the_trainer_reads_itself"),
    },
    "runs killed, resumed and damaged": {
        "faults/test_killed_and_resumed.py": (
            "test_killed_between_checkpoints",
            "test_damaged_checkpoint_falls_back_one",
            "test_asked_once_it_saves_and_leaves",
        ),
        "faults/test_killed_in_flight.py": (),
        "faults/test_kinds_killed.py": (),
        "faults/test_nothing_left.py": (),
        "faults/test_counted.py": (),
        "unit/track/test_edited_files.py": ("test_earlier_records_that_are_fine_are_kept",),
        "unit/environment/test_busy_machine.py": (
            "test_an_episode_that_hangs_still_has_a_reward_of_0",
            "test_time_is_counted_without_waits",
            "test_waits_are_measured_from_look_to_look",
            "test_without_processes_nothing_waits",
        ),
        "unit/environment/test_no_orphans.py": (
            "test_the_trainer_is_killed",
            "test_one_process_of_an_environment_is_killed",
        ),
        "unit/rollout/test_server_orphans.py": (),
        "unit/rollout/test_garbage_answers.py": ("test_garbage_without_end_names_the_server",),
        "faults/test_stop_signals.py": ("test_within_an_import_the_process_ends_at_once",),
        "integration/test_guardrails.py": ("test_what_was_done_is_logged_and_summed_up",),
        "integration/test_resume_on_other_ranks.py": (),
    },
    "directories, files and models of someone else": {
        "faults/test_foreign_runs.py": (
            "test_a_strangers_spec_is_read_without_running_it",
            "test_another_user_is_asked",
            "test_ones_own_edited_file_is_shown_as_changed",
        ),
        "faults/test_planted_files.py": (),
        "faults/test_hostile_data.py": (
            "test_one_endless_line",
            "test_a_template_that_does_not_end",
            "test_a_template_reaches_no_python",
            "test_ordinary_columns_are_read_beside",
        ),
        "unit/engine/test_plain_state.py": ("test_a_state_with_code_is_not_converted",),
    },
    "several nodes: torchrun, Slurm, Ray, Kubernetes": {
        "integration/test_nodes.py": ("test_torchrun", "test_a_run_directory_must_be_named"),
        "unit/engine/test_launch.py": (
            "test_a_rank_that_is_still_starting_when_its_launcher_is_killed_does_not_begin",
        ),
        "integration/test_cluster_examples.py": ("test_every_example_is_tried",),
        "unit/rollout/test_ray_servers.py": ("test_ray_is_taken_where_it_is_named",),
        "unit/rollout/test_servers_on_nodes.py": (),
        "unit/prepare/test_engines.py": (
            "test_results_come_in_order_each_with_its_task",
            "test_processes_write_the_same_bytes",
        ),
    },
    "pages in Chromium": {
        "unit/evaluate/test_page.py": ("test_hostile_text_is_only_text",),
        "unit/diagnose/test_diagnosis_page.py": ("test_hostile_text_is_only_text",),
        "unit/test_site_in_chromium.py": (),
        "unit/test_run_page_layout.py": ("test_a_run_that_has_just_begun",),
    },
    "rollout engines: vLLM in process and as servers, planted gaps": {
        "integration/test_vllm_training.py": ("test_a_server_gets_weights_by_broadcast",),
        "integration/test_in_flight_vllm.py": (),
        "integration/test_lockstep_vllm.py": (),
        "unit/mismatch/test_planted_causes.py": (
            "test_a_healthy_pair_is_left_alone",
            "test_wrong_temperature",
        ),
        "unit/mismatch/test_vllm_mismatch.py": (),
        "unit/mismatch/test_who_sampled.py": (
            "test_weights_that_were_never_delivered",
            "test_one_version_cannot_be_told_apart",
        ),
        "unit/mismatch/test_ratio_split.py": (
            "test_staleness_alone",
            "test_the_cache_alone",
            "test_shares_and_intervals_are_those_of_a_ratio_of_sums",
            "test_a_step_splits_what_it_knows",
            "test_parts_of_a_step_sum_to_the_mean_square",
            "test_rows_are_spread_over_the_dump",
            "test_tokens_behind_keys_and_values_of_older_weights_are_counted",
            "test_older_weights_after_newer_ones_read_no_older_cache",
            "test_without_fresh_tokens_the_probe_is_the_engine",
            "test_truncation_is_apart_from_the_engine_only_with_a_probe",
            "test_in_bypass_mode_only_the_first_update_is_at_the_sampling_policy",
        ),
        "unit/train/test_prove_sync.py": (
            "test_a_severed_replica_is_named",
            "test_an_adapter_that_is_not_applied_is_named",
            "test_a_tied_head_that_is_not_repacked_is_named",
            "test_a_perturbation_is_of_the_size_asked_for_and_exact",
        ),
        "unit/mismatch/test_run.py": ("test_the_embedded_model_agrees_with_itself",),
        "unit/rollout/test_vllm_rollout.py": ("test_log_probs_are_those_of_the_distribution_sampled_from",),
        "unit/rollout/test_tensor_parallel.py": (),
        "unit/rollout/test_weight_broadcast.py": (
            "test_every_server_gets_every_weight_and_nothing_is_written",
            "test_chunks_hold_one_dtype_and_copies",
            "test_servers_are_started_for_the_transfer",
            "test_servers_that_run_already_decide_unless_it_is_asked_for",
        ),
        "unit/rollout/test_vllm_server_adapters.py": (
            "test_the_base_goes_once_and_each_adapter_replaces_the_last",
        ),
    },
    "variants of the training engine: ZeRO, Liger, critics, adapters, sequence parallelism, families": {
        "unit/engine/test_liger.py": ("test_an_architecture_it_does_not_know",),
        "unit/engine/test_partitioned_loading.py": ("test_experts_are_found_by_what_they_are",),
        "unit/engine/test_engine_options.py": ("test_options_reach_deepspeed",),
        "unit/engine/test_multimodal.py": ("test_a_critic_holds_the_text_decoder_alone",),
        "unit/engine/test_sequence_parallel.py": ("test_an_update_is_the_same",),
        "unit/engine/test_deepspeed_engine.py": ("test_skipped_step_changes_nothing",),
        "unit/engine/test_routing_replay.py": (
            "test_log_probs_and_gradients_are_those_of_a_forced_choice",
            "test_the_trainer_chooses_what_the_engine_chose",
        ),
        "unit/engine/test_lora.py": ("test_a_fresh_adapter_changes_nothing",),
        "unit/engine/test_critic.py": ("test_values_and_gradient_by_definition",),
        "unit/train/test_devices.py": ("test_devices_are_told_apart", "test_advantages_and_metrics"),
        "unit/train/test_update_invariance.py": (
            "test_the_case_does_something",
            "test_same_result_however_cut",
        ),
        "integration/test_train_cli.py": (
            "test_run_directory_is_complete",
            "test_every_metric_has_a_definition_and_a_finite_value",
            "test_rollout_and_trainer_agree_before_the_first_update",
            "test_checkpoint_is_the_trained_model",
            "test_same_seed_same_run",
            "test_micro_batch_size_changes_nothing",
            "test_two_ranks_are_one_run",
            "test_validation_at_start_and_end",
            "test_prompts_of_every_epoch_once",
        ),
        "integration/test_model_families.py": ("test_every_family_has_its_architecture_here",),
    },
    "installation with pip, and other Python versions": {
        "unit/test_installation.py": (
            "test_installed_it_runs_and_uninstalled_it_leaves_nothing",
            "test_the_citation_names_this_version",
        ),
    },
    "documents as written: commands of the pages, examples": {
        "integration/test_pages.py": (
            "test_commands_are_in_blocks_of_bash",
            "test_tests_that_reasons_name_exist",
        ),
        "integration/test_examples.py": ("test_a_run_with_parts_from_files",),
        "integration/test_data_examples.py": ("test_no_example_escapes",),
    },
    "every number of the spec at its extremes, and every fault of a first row": {
        "unit/train/test_first_row.py": (
            "test_all_errors_come_at_once_and_before_anything_starts",
            "test_the_dry_run_is_short_and_says_first_whether_the_run_can_start",
            "test_models_that_are_elsewhere_are_listed_as_not_checked",
            "test_rows_that_are_not_the_first_are_read_too",
        ),
        "unit/run_spec/test_extreme_numbers.py": (
            "test_a_size_at_its_extremes",
            "test_every_number_at_a_large_one",
            "test_sizes_that_fit",
        ),
    },
    "golden figures, benchmarks, faults planted in whole runs, the GPU check without a GPU": {
        "unit/tiny/test_warm_start.py": ("test_the_model_of_the_other_tests_does_too",),
        "golden/test_all_runs.py": (),
        "integration/test_pathologies.py": (),
        "integration/test_early_stop_run.py": (),
        "integration/test_tasks.py": (
            "test_every_task_has_a_test",
            "test_own_rewards_read_a_csv_and_its_columns",
            "test_every_step_is_validated_and_the_best_is_kept",
            "test_a_mix_and_an_order",
            "test_penalties_and_kl_are_logged",
            "test_thoughts_are_switched_off_with_the_default_attention",
            "test_memory_is_planned_for_another_machine",
        ),
        "unit/bench/test_gpu_kernels.py": ("test_a_difference_is_a_failure",),
        "unit/bench/test_card.py": ("test_phases_are_those_of_the_run_and_of_the_plan",),
        "unit/test_gpu_offline.py": ("test_a_case_that_fails_hangs_or_lacks_memory_does_not_end_the_others",),
    },
}
#: Files that take longest in one of the two commands, longest first. They start first: a long file at the
#: end would leave all workers but one idle.
LONGEST = (
    "integration/test_pages.py",
    "golden/test_all_runs.py",
    "integration/test_vllm_training.py",
    "faults/test_killed_and_resumed.py",
    "faults/test_killed_in_flight.py",
    "unit/reward/test_ground_truth_kinds.py",
    "unit/environment/test_environment_audit.py",
    "faults/test_bad_requests.py",
    "unit/reward/test_timeouts.py",
    "unit/train/test_update.py",
    "unit/reward/test_reward_code.py",
    "unit/train/test_update_invariance.py",
    "integration/test_train_cli.py",
    "unit/train/test_guardrails.py",
    "unit/train/test_infer.py",
)
FILES = {file: kept for files in KINDS.values() for file, kept in files.items()}


def is_thorough(file: str, name: str) -> bool:
    """Whether `make test` leaves a test to `make test-all`; `file` is relative to `tests`."""
    return file in FILES and name not in FILES[file]


def place_of(file: str) -> int:
    """Place of a file in the order of start; `file` is relative to `tests`."""
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def main() -> None:
    print("`make test` runs all tests but these; `make test-all` runs these:")
    for kind, files in KINDS.items():
        kept = sum(map(len, files.values()))
        print(f"  {kind}: {', '.join(sorted(files))}" + (f"; `make test` keeps {kept}" if kept else ""))
    print("`make test-fast` runs those of `make test` that start no process, engine or training;")
    print("`make test-llm` runs more of the real model; `make gpu`, `make gpu-offline` what needs a GPU.")


if __name__ == "__main__":
    main()
