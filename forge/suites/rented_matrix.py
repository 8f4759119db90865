"""The fault matrix D01 to D56 and the threats A01 to A50, row by row: its test, or why it has none.

The rows of the rigs that rent from Google. Knows no fault.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.suites.fault_matrix import FaultMatrixSuite, MatrixRow, matrix_row

_ASKING, _ENDING, _REACHING = "AskingFaultSuite", "EndingFaultSuite", "ReachingFaultSuite"
_HOSTILE, _ANSWERS = "HostileTextSuite", "RentedAnswerFaultSuite"
_INPUT, _OUTGOING = "RentedBadInputSuite", "RentedOutgoingSuite"
_CORPUS = f"{_INPUT}.test_every_attack_on_every_string_of_every_tool"
_SENT_OUT = f"{_REACHING}.test_what_went_out_with_the_machine"
_AS_DATA = f"{_REACHING}.test_what_a_machine_is_told_is_data"
_CANARY = f"{_OUTGOING}.test_a_canary_in_the_environment_appears_nowhere"
_NO_SECRET_TAKEN = "RentedCatalogueSuite.test_no_tool_takes_a_secret_or_an_address"
_SERVER_ENDS = f"{_ENDING}.test_the_server_ends_in_the_middle_of_a_create"
_TEXTS = f"{_HOSTILE}.test_the_console_the_log_and_the_model"
_THREE_MARKS = f"{_ENDING}.test_only_what_bears_all_three_marks_is_ours"
_UNREADABLE = f"{_ASKING}.test_lists_that_cannot_be_read_are_never_empty"
_AT_ONCE = f"{_ASKING}.test_twelve_at_once_from_two_servers_are_one"
_PARTS = "parts"


FAULT_ROWS: Mapping[str, MatrixRow] = {
    "D01": matrix_row("no gcloud", f"{_ASKING}.test_no_gcloud"),
    "D02": matrix_row(
        "the login ends in a sweep", f"{_ASKING}.test_the_login_ends_in_the_middle_of_a_search"
    ),
    "D03": matrix_row(
        "API off, 403",
        f"{_ASKING}.test_a_permission_is_no_fault_of_its_zone",
        f"{_ASKING}.test_a_service_that_is_off",
    ),
    "D04": matrix_row(
        "quota",
        f"{_ASKING}.test_a_quota_shuts_its_region",
        f"{_ASKING}.test_no_quota_at_all_asks_nowhere",
    ),
    "D05": matrix_row(
        "create without an answer",
        f"{_ASKING}.test_a_create_whose_answer_never_comes",
        f"{_ASKING}.test_a_searched_one_whose_answer_is_lost_is_the_only_one",
    ),
    "D06": matrix_row(
        "create fails after creating",
        f"{_ASKING}.test_a_create_that_fails_after_it_created",
        f"{_ASKING}.test_half_a_machine_is_none_and_its_disk_is_told",
    ),
    "D07": matrix_row("seen late", f"{_ASKING}.test_a_machine_that_shows_late_stops_every_other"),
    "D08": matrix_row(
        "cleaning up fails",
        f"{_ENDING}.test_a_cancel_that_does_nothing_stops_the_search_by_name",
    ),
    "D09": matrix_row("the same create", f"{_ASKING}.test_the_same_again_and_with_other_values"),
    "D10": matrix_row(
        "creates at once", _AT_ONCE, f"{_ASKING}.test_a_create_beside_a_search_makes_no_twin"
    ),
    "D11": matrix_row("other parameters", f"{_ASKING}.test_the_same_again_and_with_other_values"),
    "D12": matrix_row(
        "a namesake",
        f"{_ASKING}.test_a_namesake_of_somebody_else",
        f"{_REACHING}.test_a_name_that_somebody_else_has_now",
    ),
    "D13": matrix_row("stockouts", f"{_ASKING}.test_sold_out_here_and_there_and_a_poisoned_memory"),
    "D14": matrix_row("a warning before the JSON", _UNREADABLE),
    "D15": matrix_row(
        "half a JSON, none", _UNREADABLE, f"{_ASKING}.test_a_zone_that_does_not_answer"
    ),
    "D16": matrix_row(
        "wrong types",
        _UNREADABLE,
        f"{_ASKING}.test_a_thing_that_cannot_be_read_is_told_and_stops_a_create",
    ),
    "D17": matrix_row("bytes that are no text", _UNREADABLE, _TEXTS),
    "D18": matrix_row("endless output", f"{_ASKING}.test_output_without_an_end"),
    "D19": matrix_row("a prompt", f"{_ENDING}.test_a_deletion_that_asks_and_one_that_only_helps"),
    "D20": matrix_row(
        "a program that hangs", f"{_ASKING}.test_a_program_that_ignores_its_end_with_a_child"
    ),
    "D21": matrix_row(
        "refused",
        f"{_REACHING}.test_a_server_that_is_down_on_a_machine_that_is_up",
        f"{_REACHING}.test_a_machine_that_cannot_be_reached",
    ),
    "D22": matrix_row("no way there", f"{_REACHING}.test_a_machine_that_cannot_be_reached"),
    "D23": matrix_row(
        "names and TLS", why="the model is reached at loopback, through IAP's tunnel"
    ),
    "D24": matrix_row(
        "another service answers",
        f"{_REACHING}.test_a_stranger_at_this_end_of_the_tunnel",
        f"{_ANSWERS}.test_a_page_instead_of_a_stream",
    ),
    "D25": matrix_row("401, 403", f"{_ANSWERS}.test_every_request_is_refused"),
    "D26": matrix_row("429", f"{_ANSWERS}.test_every_request_is_refused"),
    "D27": matrix_row("5xx", f"{_ANSWERS}.test_every_request_is_refused"),
    "D28": matrix_row("a stream breaks off", f"{_ANSWERS}.test_a_stream_that_breaks_off"),
    "D29": matrix_row("a stream stalls", f"{_ANSWERS}.test_a_stream_that_stalls"),
    "D30": matrix_row(
        "odd events",
        f"{_ANSWERS}.test_events_without_choices",
        f"{_ANSWERS}.test_an_answer_cut_into_single_bytes",
        f"{_ANSWERS}.test_an_event_of_5_megabytes_is_an_event",
    ),
    "D31": matrix_row("an error in a stream", f"{_ANSWERS}.test_an_error_within_the_stream"),
    "D32": matrix_row(
        "odd metrics",
        f"{_PARTS}.test_metrics.FormatTest.test_nan_and_infinity_are_absent_and_not_0",
        f"{_PARTS}.test_metrics.FormatTest.test_random_damage_never_raises_and_never_invents",
        why="needs a scripted page",
    ),
    "D33": matrix_row(
        "endless metrics",
        f"{_PARTS}.test_metrics.ClientTest.test_an_endless_page_is_left_when_it_is_long_enough",
        f"{_PARTS}.test_metrics.ClientTest.test_a_compressed_page_is_not_unfolded",
        why="needs a scripted page",
    ),
    "D34": matrix_row(
        "cancelled create",
        f"{_ENDING}.test_a_cancelled_call_is_settled_by_the_next",
        f"{_ENDING}.test_a_search_is_ended_and_what_it_asked_for_with_it",
    ),
    "D35": matrix_row("end of input", _SERVER_ENDS, "RentedLeavingSuite.test_when_it_is_idle"),
    "D36": matrix_row(
        "SIGTERM", "RentedLeavingSuite.test_in_the_middle_of_a_call_with_an_attached_child"
    ),
    "D37": matrix_row(
        "SIGKILL at any point",
        _SERVER_ENDS,
        f"{_PARTS}.test_capacity.CreateTest."
        "test_killed_at_any_point_the_next_server_tells_the_truth",
        f"{_PARTS}.test_sweep.KilledAnywhereTest."
        "test_a_killed_sweep_has_written_down_what_lives_and_the_next_settles_it",
    ),
    "D38": matrix_row(
        "no journal",
        f"{_ENDING}.test_no_journal_no_machine",
        "RentedFullDiskSuite.test_the_disk_is_full",
    ),
    "D39": matrix_row(
        "a damaged journal",
        f"{_ENDING}.test_what_half_a_record_tells",
        f"{_ENDING}.test_a_damaged_search_hides_no_machine",
    ),
    "D40": matrix_row("a wrong clock", f"{_ENDING}.test_a_clock_that_was_put_forward_or_back"),
    "D41": matrix_row("a late grant", f"{_ENDING}.test_a_grant_that_comes_when_nobody_waits"),
    "D42": matrix_row("preempted", f"{_HOSTILE}.test_taken_back_in_the_middle_of_a_measurement"),
    "D43": matrix_row("gone already", f"{_ENDING}.test_gone_before_and_gone_twice"),
    "D44": matrix_row("still deleting", f"{_ENDING}.test_accepted_and_still_there"),
    "D45": matrix_row("deleted and running", f"{_ENDING}.test_accepted_and_still_there"),
    "D46": matrix_row("made anew since", f"{_ENDING}.test_made_anew_under_the_same_name"),
    "D47": matrix_row(
        "ssh refuses",
        f"{_REACHING}.test_a_machine_that_cannot_be_reached",
        why="host keys are not checked: IAP names the machine, and every machine is a new one",
    ),
    "D48": matrix_row(
        "SSM cuts its output",
        f"{_OUTGOING}.test_the_end_of_a_noisy_log_is_what_is_shown",
        why="SSM is of another cloud; ssh's output keeps its end",
    ),
    "D49": matrix_row(
        "SSM at the deadline",
        f"{_PARTS}.test_gcloud_ssh.RefusalTest.test_no_end_is_awaited_for_ever_and_nothing_is_left",
        why="SSM is of another cloud; an act over ssh ends with its connection",
    ),
    "D50": matrix_row(
        "the boot fails",
        f"{_HOSTILE}.test_a_boot_that_fails_is_told_and_still_ends",
        "RentedDiagnosingSuite.test_a_failed_start_is_explained",
    ),
    "D51": matrix_row(
        "the secret store", f"{_HOSTILE}.test_a_secret_that_is_not_to_be_had_is_not_made_anew"
    ),
    "D52": matrix_row(
        "an odd token",
        f"{_HOSTILE}.test_a_token_with_a_line_end_an_empty_one_and_what_is_none",
    ),
    "D53": matrix_row("no price", f"{_ASKING}.test_a_place_without_a_price_and_one_over_budget"),
    "D54": matrix_row(
        "a poisoned cache", f"{_ASKING}.test_sold_out_here_and_there_and_a_poisoned_memory"
    ),
    "D55": matrix_row("two rigs in a zone", _THREE_MARKS),
    "D56": matrix_row(
        "hostile answers", _TEXTS, f"{_ANSWERS}.test_an_answer_of_3_megabytes_comes_out_bounded"
    ),
}

THREAT_ROWS: Mapping[str, MatrixRow] = {
    "A01": matrix_row(
        "arguments to argv", _CORPUS, f"{_INPUT}.test_attacks_within_lists_are_refused_by_name"
    ),
    "A02": matrix_row(
        "options in arguments",
        _AS_DATA,
        _CORPUS,
        f"{_PARTS}.test_gcloud.ArgumentTest.test_every_place_of_a_value_refuses_the_corpus",
    ),
    "A03": matrix_row("names that are paths", _CORPUS),
    "A04": matrix_row("the remote shell", _AS_DATA),
    "A05": matrix_row("the start-up script", _SENT_OUT, f"{_HOSTILE}.test_settings_are_data_too"),
    "A06": matrix_row("templates", f"{_HOSTILE}.test_settings_are_data_too"),
    "A07": matrix_row(
        "additional flags",
        "RentedCatalogueSuite.test_unknown_arguments_are_refused_by_name_in_every_tool",
        _SENT_OUT,
        why="no tool takes flags",
    ),
    "A08": matrix_row(
        "docker's grants", _SENT_OUT, f"{_REACHING}.test_every_privilege_has_its_reason"
    ),
    "A09": matrix_row(
        "paths as names",
        _CORPUS,
        f"{_PARTS}.test_reports_toolset.TestTools.test_links_are_not_followed",
    ),
    "A10": matrix_row("addresses", _NO_SECRET_TAKEN, f"{_ANSWERS}.test_a_redirect_is_not_followed"),
    "A11": matrix_row("the machine's account", _SENT_OUT, why="its roles, not its scope, bound it"),
    "A12": matrix_row("the token in metadata", _CANARY),
    "A13": matrix_row("the token in arguments", _CANARY),
    "A14": matrix_row(
        "the token in a trace", _CANARY, "test_boot_program.TestText.test_it_knows_no_shell"
    ),
    "A15": matrix_row("the token in the chat", _NO_SECRET_TAKEN),
    "A16": matrix_row(
        "modes of files",
        f"{_ENDING}.test_a_state_folder_that_is_nobody_elses",
        "RentedCommandLineSuite.test_the_token_goes_from_its_file_to_the_project",
    ),
    "A17": matrix_row(
        "secrets in errors",
        f"{_HOSTILE}.test_the_words_of_the_provider",
        f"{_OUTGOING}.test_a_secret_that_others_say_does_not_pass_through",
        f"{_INPUT}.test_a_value_that_looks_like_a_secret_never_comes_back",
    ),
    "A18": matrix_row(
        "secrets in reports",
        _CANARY,
        f"{_PARTS}.test_reports_toolset.TestSaving.test_nothing_private_is_written",
    ),
    "A19": matrix_row(
        "orders in a log",
        _TEXTS,
        f"{_PARTS}.test_diagnosis_toolset.TestHostileLogs."
        "test_a_model_that_obeys_the_log_changes_nothing_but_its_own_field",
    ),
    "A20": matrix_row("orders to the agent", _TEXTS, f"{_HOSTILE}.test_the_words_of_the_provider"),
    "A21": matrix_row("names and labels of others", f"{_HOSTILE}.test_names_and_labels_of_others"),
    "A22": matrix_row(
        "floods",
        f"{_ASKING}.test_output_without_an_end",
        f"{_OUTGOING}.test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log",
        f"{_ANSWERS}.test_an_event_beyond_all_bounds_is_refused",
    ),
    "A23": matrix_row(
        "any bytes",
        f"{_OUTGOING}.test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log",
        _TEXTS,
        f"{_INPUT}.test_a_lone_surrogate_on_the_wire_reaches_no_tool",
    ),
    "A24": matrix_row(
        "destroying by token alone",
        f"{_ENDING}.test_without_the_token_of_that_very_thing",
        f"{_ENDING}.test_made_anew_under_the_same_name",
        f"{_ENDING}.test_a_clock_that_was_put_forward_or_back",
    ),
    "A25": matrix_row("the wrong project", f"{_HOSTILE}.test_a_wrong_project_asks_for_nothing"),
    "A26": matrix_row("ownership", _THREE_MARKS),
    "A27": matrix_row("whatever serves", _THREE_MARKS),
    "A28": matrix_row(
        "no end, no budget",
        _SENT_OUT,
        f"{_ASKING}.test_a_place_without_a_price_and_one_over_budget",
        f"{_ENDING}.test_a_grant_that_comes_when_nobody_waits",
    ),
    "A29": matrix_row("twins by repeating", f"{_ASKING}.test_a_create_whose_answer_never_comes"),
    "A30": matrix_row(
        "at once", _AT_ONCE, f"{_ASKING}.test_a_create_beside_a_search_makes_no_twin"
    ),
    "A31": matrix_row("a crash in a create", _SERVER_ENDS),
    "A32": matrix_row(
        "the client leaves",
        _SERVER_ENDS,
        "RentedLeavingSuite.test_a_start_goes_on_without_the_server_that_began_it",
    ),
    "A33": matrix_row("clocks", f"{_ENDING}.test_a_clock_that_was_put_forward_or_back"),
    "A34": matrix_row("partitions", f"{_REACHING}.test_a_machine_that_cannot_be_reached"),
    "A35": matrix_row("streams", f"{_ANSWERS}.test_a_stream_that_breaks_off"),
    "A36": matrix_row(
        "metrics by name",
        f"{_PARTS}.test_metrics.RecordedTest.test_vllm_s_names",
        f"{_PARTS}.test_metrics.FormatTest.test_a_name_is_exact",
        why="held beside a page that a real vLLM wrote",
    ),
    "A37": matrix_row("gcloud's output", _UNREADABLE),
    "A38": matrix_row(
        "the protocol's own line",
        f"{_OUTGOING}.test_30_megabytes_of_any_bytes_and_an_endless_line_in_the_log",
    ),
    "A39": matrix_row("TLS", why="the model is reached at loopback; gcloud and ssh do their own"),
    "A40": matrix_row("open ports", _SENT_OUT, _AS_DATA, why="the rig makes no firewall rule"),
    "A41": matrix_row("an API key", why="the server listens on the machine's loopback alone"),
    "A42": matrix_row(
        "unsafe weights",
        _SENT_OUT,
        f"{_PARTS}.test_vllm_docker.ServeTest.test_only_hub_ids_are_served",
    ),
    "A43": matrix_row("supply chain", _SENT_OUT),
    "A44": matrix_row("docker's socket", _SENT_OUT),
    "A45": matrix_row(
        "files that start programs",
        "test_check.ManifestRuleTests.test_server_keys_and_starts",
        why="they are written by the build",
    ),
    "A46": matrix_row(
        "read-only",
        "RentedReadOnlySuite.test_in_process_in_both_modes",
        "RentedReadOnlySuite.test_over_stdio",
    ),
    "A47": matrix_row("HTTP", why="the server speaks stdio and nothing else"),
    "A48": matrix_row(
        "an address of somebody else",
        f"{_REACHING}.test_a_name_that_somebody_else_has_now",
        f"{_REACHING}.test_a_stranger_at_this_end_of_the_tunnel",
    ),
    "A49": matrix_row(
        "shared state files",
        f"{_ENDING}.test_a_state_folder_that_is_nobody_elses",
        f"{_ASKING}.test_sold_out_here_and_there_and_a_poisoned_memory",
    ),
    "A50": matrix_row(
        "false success",
        f"{_ENDING}.test_accepted_and_still_there",
        f"{_ENDING}.test_a_deletion_that_asks_and_one_that_only_helps",
        f"{_HOSTILE}.test_a_console_that_says_ready_makes_nothing_ready",
    ),
}


def matrix_rows() -> dict[str, MatrixRow]:
    """All rows, by their number."""
    return {**FAULT_ROWS, **THREAT_ROWS}


class MatrixSuite(FaultMatrixSuite):
    """The Google rigs' table."""

    @classmethod
    def rows(cls) -> Mapping[str, MatrixRow]:
        return matrix_rows()
