"""How much of each test runs every time, and how much at night.

Two cores run everything in less than an hour only if tests with many cases take some of them each time. `SHARES` says
which: one case in so many, from the first on. With LONGSPAN_NIGHTLY=1, or when a test is asked for by its name
(`pytest tests/unit/test_exact.py::test_exact`), all cases run. What was left out is pytest's "deselected".

For example, of 20 chunks with a share of one in 7, numbers 0, 7 and 14 run.
"""

import os
from collections import Counter

NIGHTLY = bool(os.environ.get("LONGSPAN_NIGHTLY"))
NIGHT_ONLY = 0
"""None of the cases runs every time."""

SHARES = {  # file (without tests/ and .py) and test: one case in so many
    "device/test_device::test_collectives": 2,
    "device/test_mistakes::test_mistakes_are_seen": 3,  # each mistake on one scheme or two
    "device/test_mistakes::test_no_false_alarm": 3,
    "device/test_training::test_fsdp2": 3,
    "device/test_training::test_huggingface_steps": 2,
    "fuzz/test_fuzz::test_the_printed_script_repeats_a_failure": NIGHT_ONLY,
    "gloo/test_acceptance::test_a_call_that_is_slower_than_predicted_is_red": NIGHT_ONLY,
    "gloo/test_acceptance::test_a_watch_that_names_nobody_is_red": 4,
    "gloo/test_acceptance::test_nothing_planted_and_nothing_red": NIGHT_ONLY,  # the whole page always
    "gloo/test_acceptance::test_what_is_planted_turns_its_own_line_red_and_no_other": 4,
    "gloo/test_call_order::test_any_order_that_all_ranks_share_is_right": 3,
    "gloo/test_cli::test_calibrate_answers_in_json": NIGHT_ONLY,
    "gloo/test_cli::test_calibrate_writes_a_machine_that_plan_reads": NIGHT_ONLY,  # in JSON always
    "gloo/test_cli::test_doctor_calls_untested_versions_untested": 3,
    "gloo/test_cli::test_plan_answers_in_time": 3,  # 1M packed and 10M causal tokens always
    "gloo/test_compiled::test_lengths_may_change": 2,
    "gloo/test_compiled::test_one_graph_serves_all_masks_of_a_size": NIGHT_ONLY,
    "gloo/test_compiled::test_packed_batches_over_ranks_compile_once": 2,
    "gloo/test_compiled::test_packed_batches_over_ranks_with_inductor": NIGHT_ONLY,
    "gloo/test_compiled_scores::test_a_model_of_four_layers": 5,
    "gloo/test_compiled_scores::test_lengths_may_change": 3,
    "gloo/test_compiled_scores::test_other_kernels_and_dtypes_do_what_they_do_outside": 2,
    "gloo/test_compiled_scores::test_over_ranks": NIGHT_ONLY,
    "gloo/test_compiled_scores::test_what_cannot_be_written_down_is_refused_by_name_or_run_outside": 2,
    "gloo/test_convolution::test_ranks_compute_what_documents_by_themselves_give": 3,
    "gloo/test_curves::test_the_program_in_the_page_runs_as_printed": NIGHT_ONLY,
    "gloo/test_deterministic::test_arrival_orders_change_nothing": 3,
    "gloo/test_deterministic::test_bits_do_not_depend_on_how_rows_lie_in_memory": 5,
    "gloo/test_deterministic::test_chunks_agree_however_they_are_dealt": 5,
    "gloo/test_deterministic::test_chunks_give_the_same_bits_on_every_number_of_ranks": 5,
    "gloo/test_deterministic::test_other_orders_are_noticed": 2,
    "gloo/test_deterministic::test_runs_repeat": 2,
    "gloo/test_deterministic::test_world_sizes_of_equal_chunks_agree": 2,
    "gloo/test_deterministic::test_world_sizes_of_one_chunk_agree": 3,
    "gloo/test_exit::test_jobs_end_with_the_status_that_is_theirs": 4,
    "gloo/test_faults::test_every_survivor_names_the_rank_in_time": 3,
    "gloo/test_gloo::test_compiled_and_checkpointed_transformers_equal_eager": NIGHT_ONLY,
    "gloo/test_gloo::test_ranks_compute_what_one_device_would": 6,
    "gloo/test_losses::test_a_mistake_ends_with_status_1": 4,
    "gloo/test_losses::test_loss_is_that_of_one_process": 6,
    "gloo/test_nccl_exit::test_ranks_end_with_the_status_that_is_theirs": 4,
    "gloo/test_nccl_faults::test_every_survivor_names_the_rank_in_time": 3,
    "gloo/test_nccl_faults::test_mutants_are_noticed": 3,
    "gloo/test_no_false_alarms::test_busy_cores_are_no_fault": NIGHT_ONLY,
    "gloo/test_no_false_alarms::test_who_is_struck_on_another_host_is_named": 2,
    "gloo/test_no_false_alarms::test_who_lives_is_waited_for": 3,
    "gloo/test_scan_faults::test_every_survivor_names_the_rank_in_time": 3,
    "gloo/test_scans_gloo::test_ranks_compute_what_one_device_would": 4,
    "gloo/test_scores_gloo::test_ranks_compute_what_one_device_would": 4,
    "gloo/test_sealed::test_recipes_with_mixed_precision_train_as_float32_does": 3,
    "gloo/test_training::test_labels_and_positions_are_those_of_whole_documents": 4,
    "gloo/test_training::test_losses_and_gradients_do_not_depend_on_ranks": 2,
    "gloo/test_training::test_the_fsdp2_example_learns_as_one_process_does": NIGHT_ONLY,  # README's program always
    "gloo/test_verify::test_mistakes_are_caught_on_four_ranks": 3,
    "gloo/test_verify::test_mistakes_are_caught_with_their_cause": 2,
    "gloo/test_verify::test_mistakes_of_steps_are_caught_with_their_cause": 3,
    "gloo/test_verify::test_no_false_alarm_in_100_random_right_cases": 5,
    "gloo/test_verify::test_right_calls_pass_in_loopback": 3,
    "gloo/test_verify::test_right_calls_with_extras_pass_and_their_gradients_are_compared": 2,
    "gloo/test_verify::test_the_command_under_torchrun": 2,
    "hosts/test_hf_hybrid_training::test_autocast": NIGHT_ONLY,
    "hosts/test_hf_hybrid_training::test_fifty_steps_with_fsdp2": NIGHT_ONLY,  # the Trainer with a hybrid model always
    "hosts/test_hf_hybrids::test_ranks_equal_one_device": 19,  # one on 2 ranks, one on 3
    "hosts/test_hf_hybrids::test_what_is_left_is_rounding_to_float32": 4,
    "hosts/test_hf_losses::test_same_as_alone": 3,
    "hosts/test_hf_structure::test_heads_and_positions_that_are_right": 3,
    "hosts/test_hf_structure::test_layers_that_do_not_listen_are_refused_in_any_loop": 2,
    "hosts/test_hf_training::test_accelerate_loop": NIGHT_ONLY,  # and a program of examples/
    "hosts/test_hf_training::test_resume_on_another_number_of_ranks": NIGHT_ONLY,
    "hosts/test_hf_training::test_samples_and_sequences_split": NIGHT_ONLY,
    "hosts/test_hf_training::test_trainer_with_a_parallelism_config": NIGHT_ONLY,  # a program of examples/ has one
    "hosts/test_hf_training::test_trainer_with_fsdp2": 2,
    "hosts/test_hf_training::test_trainer_with_windows_caps_and_sinks": NIGHT_ONLY,
    "hosts/test_hf_training::test_trl_packs": NIGHT_ONLY,  # TRL has a file of its own
    "hosts/test_huggingface::test_generate_equals_eager": 3,
    "hosts/test_huggingface::test_ranks_equal_one_device": 7,
    "hosts/test_memory_recipes::test_an_mlp_in_chunks_is_exact": 3,
    "hosts/test_proof::test_images_over_ranks": 2,
    "hosts/test_proof::test_what_was_widened_is_exact_over_ranks": 2,
    "hosts/test_proof_faults::test_a_planted_fault_is_refused": 2,
    "hosts/test_proof_faults::test_its_twin_is_not": 2,
    "hosts/test_sizing_models::test_a_step_under_fsdp": 4,
    "hosts/test_torch_api::test_masks_pytorch_cannot_say": 2,
    "hosts/test_torch_api::test_the_matrix_of_pytorch": 3,
    "hosts/test_torchtitan::test_one_rank_trains_as_torchtitan_with_dense_masks": NIGHT_ONLY,
    "hosts/test_torchtitan::test_two_ranks_train_as_one": NIGHT_ONLY,  # four with FSDP always
    "hosts/test_torchtitan::test_two_ranks_train_in_torchtitans_default_precision": NIGHT_ONLY,
    "hosts/test_trl::test_samples_and_sequences_split": NIGHT_ONLY,
    "hosts/test_trl::test_smoothed_labels_and_routers": 3,
    "hosts/test_trl::test_twenty_steps": 5,
    "house/test_docs::test_readme_program_prints_one_loss_on_any_number_of_ranks": NIGHT_ONLY,  # CI walks there
    "house/test_examples::test_example": 5,
    "house/test_examples::test_program": 5,
    "house/test_notebooks::test_notebooks_run_and_print_what_is_stored": 2,
    "house/test_optimised::test_one_device_without_asserts": NIGHT_ONLY,
    "house/test_optimised::test_two_ranks_without_asserts": 2,
    "house/test_release::test_readme_example_runs_in_a_clean_environment": NIGHT_ONLY,  # likewise
    "house/test_walks::test_a_clean_walk_has_nothing_and_ends_where_a_command_fails": 2,
    "house/test_walks::test_the_tutorial_runs_as_it_is_printed": NIGHT_ONLY,  # CI walks through it in a clean place
    "jobs/test_jobs::test_bad_ends_are_seen": 2,
    "mutants/test_head_mutants::test_mutants_are_killed": 5,
    "mutants/test_mutants::test_the_usual_inputs_let_mutants_live": NIGHT_ONLY,
    "mutants/test_sizing_mutants::test_mutants_are_noticed": 3,
    "simulation/test_detection::test_mutants_are_noticed": 5,
    "simulation/test_detection::test_seeds": 8,
    "simulation/test_scan_simulation::test_seeds": 3,
    "simulation/test_scan_simulation::test_whole_recurrences_whatever_arrives_when": 4,
    "simulation/test_simulation::test_1024_ranks": NIGHT_ONLY,
    "simulation/test_simulation::test_convolutions_do_not_depend_on_who_is_late": 2,
    "simulation/test_simulation::test_ranks_with_different_plans_are_named": 3,
    "simulation/test_simulation::test_seeds": 8,
    "simulation/test_streams::test_a_captured_pass": 2,
    "simulation/test_streams::test_mistakes": 11,
    "simulation/test_streams::test_no_false_alarm": 3,
    "simulation/test_streams::test_plans": 5,
    "simulation/test_streams::test_warm_calls_neither_wait_nor_copy": 3,
    "unit/test_acceptance::test_right_gpu_kernels_pass_every_case": 2,
    "unit/test_balanced::test_counts_as_the_judge_does": 3,
    "unit/test_bytes_memory::test_bytes_sent_are_those_planned": 8,
    "unit/test_bytes_memory::test_memory_held_is_within_what_the_plan_says": 3,
    "unit/test_changing_data::test_masks_that_nobody_holds_are_let_go_with_what_they_captured": 2,
    "unit/test_convolution::test_ranks_compute_what_documents_by_themselves_give": 3,
    "unit/test_edges::test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else": 3,
    "unit/test_exact::test_errors_stay_flat_in_the_number_of_chunks": 6,
    "unit/test_exact::test_errors_stay_flat_in_the_number_of_ranks_and_stages": NIGHT_ONLY,
    "unit/test_exact::test_exact": 20,
    "unit/test_exact::test_same_bits_whatever_arrives_first": 2,
    "unit/test_figures::test_bytes_in_closed_form_are_those_of_every_ranks_steps": 3,
    "unit/test_figures::test_memory_of_all_steps_at_once_is_that_of_every_position": 3,
    "unit/test_figures::test_what_the_command_prints_is_the_most_of_any_rank": 3,
    "unit/test_flat::test_tables_and_runs_give_the_same_bits": 3,
    "unit/test_flex_code::test_generated_code_becomes_machine_code": NIGHT_ONLY,
    "unit/test_flex_code::test_generated_code_does_what_reference_does": NIGHT_ONLY,
    "unit/test_flex_code::test_mistakes_show": NIGHT_ONLY,
    "unit/test_flex_kernel::test_masks_equal_reference": 3,
    "unit/test_fused::test_kernels_become_machine_code": 4,
    "unit/test_fused::test_wrong_kernels_are_caught": NIGHT_ONLY,
    "unit/test_head::test_memory_is_a_slab": 3,
    "unit/test_head::test_random_cases_are_those_of_one_device": 3,
    "unit/test_kernel_addresses::test_every_layout_of_every_operand": 4,
    "unit/test_kernel_addresses::test_kernels_read_and_write_what_is_theirs": 4,
    "unit/test_kernel_addresses::test_mistakes_are_caught": 3,
    "unit/test_kernel_addresses::test_whole_calls_by_address": 5,
    "unit/test_kernels::test_random_tiles_are_exact": 3,
    "unit/test_kernels::test_real_block_sizes": 3,
    "unit/test_numerics::test_garbage_in_padding_goes_nowhere": 5,
    "unit/test_numerics::test_no_nan_on_finite_inputs": 3,
    "unit/test_padding::test_many_runs_and_padding": 2,
    "unit/test_predictions::test_fa2_allocates_what_is_predicted": 3,
    "unit/test_prove_model::test_faults_are_found_and_named": 2,
    "unit/test_prove_model::test_healthy_twins_are_right": 3,
    "unit/test_published::test_quick_benchmark_passes": NIGHT_ONLY,  # CI runs the whole benchmark
    "unit/test_scan_kernels::test_narrow_numbers_lose_what_the_recurrence_loses": 3,
    "unit/test_scan_kernels::test_reference_does_what_the_recurrence_does": 3,
    "unit/test_scan_packages::test_what_is_made_of_their_functions": 3,
    "unit/test_scan_prices::test_prices_are_near_simulations": 2,
    "unit/test_scans::test_narrow_tokens": 3,
    "unit/test_scans::test_one_device_alone": 3,
    "unit/test_scans::test_ranks_compute_what_one_device_would": 5,
    "unit/test_schedules::test_random_plans_are_proved": 20,
    "unit/test_scores::test_exact": 10,
    "unit/test_scores::test_gradcheck": 3,
    "unit/test_scores::test_narrow_dtypes_are_as_good_as_dense": 2,
    "unit/test_scores::test_random_compositions": 10,
    "unit/test_tokens::test_gathered_tokens_give_each_rank_the_gradient_of_its_own": 3,
    "unit/test_tokens::test_numbers_of_sequences_are_those_of_one_device": 3,
    "unit/test_tokens::test_numbers_of_sequences_weigh_tokens_and_gradients_come_back_from_all_ranks": 3,
    "unit/test_tokens::test_side_tensors_line_up_with_labels": 3,
}


def share(cases, one_in):
    """The cases that a loop inside of a test goes through in this lane."""
    return list(cases) if NIGHTLY else list(cases)[::one_in]


def left_out(items, asked):
    """The items that this lane leaves out; asked: the words that pytest was called with."""
    if NIGHTLY or any("::" in word for word in asked):
        return []
    seen, out = Counter(), []
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/").replace(".py::", "::")
        if name in SHARES:
            one_in = SHARES[name]
            if one_in == NIGHT_ONLY or seen[name] % one_in:
                out.append(item)
            seen[name] += 1
    return out
