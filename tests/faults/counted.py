"""How many faults the table in `docs/how-to/runs.md` stands for: counted from the tests, never by hand.

`python -m tests.faults.counted` prints the numbers of the column "cases".
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "runs.md"
_F, _U, _I = "faults/test_", "unit/", "integration/test_"
#: Beginning of a row → the tests that cause its faults: file:test, and after a star a table of the file over
#: which the test loops.
ROWS: dict[str, tuple[str, ...]] = {
    "killed between checkpoints": (
        f"{_F}killed_and_resumed:test_killed_between_checkpoints",
        f"{_F}killed_and_resumed:test_killed_while_saving",
        f"{_F}killed_and_resumed:test_killed_while_a_thread_writes_a_checkpoint",
        f"{_F}killed_and_resumed:test_killed_during_a_validation",
        f"{_F}killed_and_resumed:test_killed_right_after_the_metrics_of_a_saved_step",
        f"{_F}killed_and_resumed:test_killed_at_any_time_in_an_environment_in_lockstep",
        f"{_F}killed_in_flight:test_every_prompt_is_used_as_often_as_without_a_kill",
    ),
    "runs with FSDP2": (f"{_F}kinds_killed:test_killed_and_resumed_bit_for_bit",),
    "two ranks write an export together": (
        f"{_F}killed_and_resumed:test_killed_while_ranks_write_an_export_together",
        f"{_F}killed_and_resumed:test_the_rank_that_must_not_write_is_named",
    ),
    "a checkpoint is damaged": (
        f"{_F}killed_and_resumed:test_damaged_checkpoint_falls_back_one",
        f"{_F}killed_and_resumed:test_half_a_last_line_of_metrics",
        f"{_F}bad_requests:test_resume_with_every_checkpoint_damaged",
        f"{_U}track/test_edited_files:test_an_edited_manifest_is_a_damaged_checkpoint",
    ),
    "a real vLLM server is killed": (
        f"{_I}in_flight_vllm:test_a_server_that_fails_while_it_samples_loses_no_request",
        f"{_I}in_flight_vllm:test_a_server_that_fails_in_a_weight_update_gets_the_whole_update",
        f"{_I}lockstep_vllm:test_in_sampling",
        f"{_I}lockstep_vllm:test_in_a_weight_update",
        f"{_I}lockstep_vllm:test_garbage_for_answers",
    ),
    "a server answers with other weights": (
        f"{_U}rollout/test_reported_weights:test_answers_of_other_weights_are_sampled_again",
        f"{_U}rollout/test_reported_weights:test_a_server_that_never_has_the_newest_weights_is_named",
    ),
    "answers that are none of vLLM's": (
        f"{_U}rollout/test_garbage_answers:test_garbage_while_sampling_is_asked_again*GARBAGE",
        f"{_U}rollout/test_garbage_answers:test_garbage_while_sampling_is_asked_again*CHANGES",
        f"{_U}rollout/test_garbage_answers:test_garbage_in_flight_is_asked_again*GARBAGE",
        f"{_U}rollout/test_garbage_answers:test_garbage_in_a_weight_update_is_repeated*GARBAGE",
        f"{_U}rollout/test_garbage_answers:test_garbage_without_end_names_the_server",
    ),
    "the trainer, a launcher or a rank is killed": (
        f"{_F}nothing_left:test_nothing_is_left_of_a_run",
        f"{_U}rollout/test_server_orphans:test_no_process_and_no_port_is_left_within_15_s",
        f"{_U}test_leftovers:test_nothing_is_left_of_a_killed_process_within_15_s",
    ),
    "the trainer, or one of the four processes of an environment": (
        f"{_U}environment/test_no_orphans:test_the_trainer_is_killed",
        f"{_U}environment/test_no_orphans:test_the_trainer_is_killed_while_the_file_is_imported",
        f"{_U}environment/test_no_orphans:test_one_process_of_an_environment_is_killed",
        f"{_U}environment/test_no_orphans:test_it_ends_with_its_episode_and_not_with_another_one",
        f"{_U}environment/test_no_orphans:test_a_tool_that_forks_without_end",
    ),
    "1,300 half-open requests": (
        f"{_U}environment/test_endpoint_flood:test_1300_half_open_requests_lose_no_episode",
        f"{_U}environment/test_endpoint_flood:test_headers_have_few_seconds_however_slowly_they_come",
        f"{_U}environment/test_endpoint_flood:test_the_accept_loop_outlives_every_error",
    ),
    "episodes of a machine": (
        f"{_U}environment/test_busy_machine:test_a_call_may_wait_for_a_processor",
        f"{_U}environment/test_busy_machine:test_a_call_that_gets_no_processor_is_excluded",
        f"{_U}environment/test_busy_machine:test_a_starved_episode_is_excluded_and_never_0",
    ),
    "every value of the six JSON and YAML files": (f"{_U}track/test_edited_files:test_no_edit_is_a_bug",),
    "a run fails before its first checkpoint": (
        f"{_F}bad_requests:test_a_run_that_failed_before_its_first_checkpoint_is_started_again",
        f"{_F}bad_requests:test_an_attempt_that_fails_at_once_keeps_the_files_of_an_earlier_one",
        f"{_F}bad_requests:test_resume_without_a_checkpoint",
        f"{_F}bad_requests:test_resume_of_what_is_no_run",
    ),
    "something is changed before a resume": (
        f"{_F}bad_requests:test_resume_with_another_learning_rate",
        f"{_F}bad_requests:test_resume_with_other_ranks_and_batches_sampled_ahead",
        f"{_F}bad_requests:test_a_resume_with_other_rows",
        f"{_F}faulty_parts:test_a_resumed_run_refuses_a_changed_file_unless_it_is_accepted",
        f"{_F}foreign_runs:test_ones_own_edited_file_is_shown_as_changed",
    ),
    "a run directory of someone else": (
        f"{_F}foreign_runs:test_a_strangers_spec_is_read_without_running_it",
        f"{_F}foreign_runs:test_no_command_runs_what_a_strangers_spec_names*COMMANDS",
        f"{_F}foreign_runs:test_what_a_strangers_spec_can_do_without_a_file",
        f"{_F}foreign_runs:test_a_named_grader_allows_nothing_else_of_a_strangers_reward",
        f"{_F}foreign_runs:test_code_that_another_model_ships",
        f"{_F}foreign_runs:test_a_signature_covers_parameters",
        f"{_F}foreign_runs:test_a_record_cannot_be_written_by_others",
        f"{_F}foreign_runs:test_code_that_is_planted_in_a_checkpoint",
        f"{_F}planted_files:test_no_command_executes_a_planted_file*PICKLES",
        f"{_F}planted_files:test_no_command_executes_a_planted_file*MODULES",
        f"{_F}planted_files:test_a_tag_of_yaml_makes_no_object",
        f"{_U}engine/test_plain_state:test_a_state_with_code_is_refused",
    ),
    "a file of a run directory is a pipe": (
        f"{_F}hostile_records:test_no_odd_file_holds_what_reads_it",
        f"{_F}hostile_records:test_an_edited_line_of_metrics_is_no_bug",
        f"{_F}hostile_records:test_no_loop_goes_over_the_steps_of_a_run",
        f"{_F}hostile_records:test_a_checkpoint_has_no_links",
    ),
    "a directory or a file of a run is a link": (
        f"{_F}links_in_runs:test_a_directory_that_is_a_link_is_not_entered",
        f"{_F}links_in_runs:test_a_link_in_a_directory_is_not_followed",
        f"{_F}links_in_runs:test_a_resume_refuses_a_link_that_leads_out",
        f"{_F}links_in_runs:test_a_resume_refuses_a_link_further_in",
        f"{_F}links_in_runs:test_a_new_run_keeps_links_of_one_that_ended_too_early",
        f"{_F}links_in_runs:test_a_directory_that_becomes_a_link_while_it_is_removed",
    ),
    "a line of 1.5 GB": (
        f"{_F}hostile_data:test_one_endless_line",
        f"{_F}hostile_data:test_columns_that_expand",
        f"{_F}hostile_data:test_a_template_that_does_not_end",
        f"{_F}hostile_data:test_a_template_reaches_no_python",
    ),
    "a teacher's server": (f"{_U}engine/test_served_teacher:test_a_server_that_lies_is_refused",),
    "a grader": (
        f"{_F}bad_requests:test_grader_that_fails_now_and_then",
        f"{_F}bad_requests:test_grader_that_fails_often",
        f"{_F}bad_requests:test_responses_that_crash_the_grader_are_wrong_and_do_not_stop_the_run",
    ),
    "NaN in log-probs": (
        f"{_F}bad_requests:test_some_bad_numbers_cost_their_sequences",
        f"{_F}bad_requests:test_many_bad_numbers_stop_the_run",
        f"{_F}bad_requests:test_everything_rejected_goes_on_and_says_so",
        f"{_F}bad_requests:test_weights_lost_on_the_way_to_the_rollout",
    ),
    "the disk is full": (
        f"{_F}killed_and_resumed:test_full_disk_keeps_earlier_checkpoints",
        f"{_F}bad_requests:test_read_only_parent",
        f"{_U}engine/test_checkpoint:test_full_disk_leaves_the_others",
    ),
    "a part of yours returns": (f"{_F}faulty_parts:test_the_error_names_the_part",),
    "a data file is broken": (
        f"{_F}prepare_faults:test_a_broken_file_is_refused_by_name",
        f"{_F}prepare_faults:test_a_bad_row_is_named_when_refused_and_kept_when_set_aside",
        f"{_F}prepare_faults:test_a_worker_that_is_killed_ends_the_run_with_a_reason",
        f"{_F}prepare_faults:test_a_killed_run_takes_its_workers_with_it",
    ),
    "Ctrl-C and SIGTERM": (
        f"{_F}killed_and_resumed:test_asked_once_it_saves_and_leaves",
        f"{_F}killed_and_resumed:test_ctrl_c_reaches_every_process_of_the_terminal",
        f"{_F}killed_and_resumed:test_preempted_on_two_ranks",
        f"{_F}killed_and_resumed:test_asked_twice_it_leaves_at_once",
        f"{_F}killed_and_resumed:test_asked_to_stop_while_starting_it_leaves_at_once_and_leaves_nothing",
        f"{_F}stop_signals:test_random_moments",
        f"{_F}stop_signals:test_within_an_import_the_process_ends_at_once",
    ),
    "a rank is stopped": (
        f"{_F}killed_and_resumed:test_a_stopped_rank_is_named_and_ends_the_run",
        f"{_F}killed_and_resumed:test_killed_rank_takes_the_others_with_it",
    ),
    "an archive of logs": (
        f"{_U}diagnose/test_readers_runs:test_an_archive_that_unpacks_to_too_much_is_refused",
        f"{_U}diagnose/test_readers_runs:test_an_archive_writes_nowhere_else",
        f"{_U}diagnose/test_readers_runs:test_an_archive_that_cannot_be_read_is_refused",
    ),
    "the clock jumps": (f"{_F}killed_and_resumed:test_the_clock_jumps",),
}


def cases(reference: str) -> int:
    """The number of cases of a test: of its parameters, and of the table over which it loops.

    Raises:
        AttributeError, ModuleNotFoundError: there is no such test or table.
    """
    file, _, names = reference.partition(":")
    test, _, table = names.partition("*")
    module: Any = importlib.import_module("tests." + file.replace("/", "."))
    marks = getattr(getattr(module, test), "pytestmark", [])
    sizes = [len(list(mark.args[1])) for mark in marks if mark.name == "parametrize"]
    return math.prod(sizes) * (len(getattr(module, table)) if table else 1)


def counted() -> dict[str, int]:
    """Row → number of cases."""
    return {row: sum(map(cases, references)) for row, references in ROWS.items()}


def in_page() -> Iterator[tuple[str, int]]:
    """The fault and the number of each row of the page's table."""
    table = PAGE.read_text(encoding="utf-8").partition("## Faults")[2]
    for fault, number in re.findall(r"^\| (.+?) \| .+ \| (\d+) \|$", table, re.MULTILINE):
        yield fault, int(number)


def main() -> None:
    numbers = counted()
    for row, number in numbers.items():
        print(f"{number:5}  {row}")
    print(f"{sum(numbers.values()):5}  in all")


if __name__ == "__main__":
    main()
