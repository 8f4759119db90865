"""The threats A01 to A50 as a rig on EC2 meets them: the test of each, or why it has none."""

from __future__ import annotations

from collections.abc import Mapping

from forge.suites.ec2_told import (
    BY_ANSWER_FAULTS,
    BY_AS_DATA,
    BY_ASKING,
    BY_ATTACKS,
    BY_BAD_INPUT,
    BY_BESIDE_A_SEARCH,
    BY_CLOCK,
    BY_CUT_SHORT,
    BY_ENDING,
    BY_FLOOD,
    BY_HOSTILE,
    BY_IN_A_CREATE,
    BY_LAUNCHED,
    BY_LOST_AND_DONE,
    BY_LOST_AND_NOT_DONE,
    BY_LOST_END,
    BY_MADE_ANEW,
    BY_NO_SECRET,
    BY_NOT_REACHED,
    BY_OTHER_ACCOUNT,
    BY_OTHERS_NAME,
    BY_OURS_ALONE,
    BY_OUTGOING,
    BY_REACHING,
    BY_RECORD,
    BY_SHOWN_TEXTS,
    BY_STAYS,
    BY_STRANGER_HERE,
    BY_TOKEN_NOWHERE,
    BY_TWELVE,
    BY_TWO_ZONES,
    BY_UNREAD_LISTS,
)
from forge.suites.fault_matrix import MatrixRow, matrix_row

EC2_THREAT_ROWS: Mapping[str, MatrixRow] = {
    "A01": matrix_row(
        "arguments to argv",
        BY_ATTACKS,
        f"{BY_BAD_INPUT}.test_attacks_within_lists_are_refused_by_name",
    ),
    "A02": matrix_row("options in arguments", BY_AS_DATA, BY_ATTACKS),
    "A03": matrix_row(
        "names that are paths",
        BY_ATTACKS,
        why="every act is by the id that EC2 gave, in one region",
    ),
    "A04": matrix_row("the remote shell", BY_AS_DATA),
    "A05": matrix_row("user data", BY_LAUNCHED, f"{BY_HOSTILE}.test_settings_are_data_too"),
    "A06": matrix_row("templates", f"{BY_HOSTILE}.test_settings_are_data_too"),
    "A07": matrix_row(
        "additional flags",
        "RentedCatalogueSuite.test_unknown_arguments_are_refused_by_name_in_every_tool",
        BY_LAUNCHED,
        why="no tool takes flags",
    ),
    "A08": matrix_row(
        "docker's grants", BY_LAUNCHED, f"{BY_REACHING}.test_every_privilege_has_its_reason"
    ),
    "A09": matrix_row(
        "paths as names",
        BY_ATTACKS,
        "parts.test_reports_toolset.TestTools.test_links_are_not_followed",
    ),
    "A10": matrix_row(
        "addresses", BY_NO_SECRET, f"{BY_ANSWER_FAULTS}.test_a_redirect_is_not_followed"
    ),
    "A11": matrix_row("the machine's role and metadata", BY_LAUNCHED),
    "A12": matrix_row("the token in user data", BY_TOKEN_NOWHERE),
    "A13": matrix_row("the token in arguments", BY_TOKEN_NOWHERE),
    "A14": matrix_row("the token in a trace", BY_TOKEN_NOWHERE, BY_LAUNCHED),
    "A15": matrix_row("the token in the chat", BY_NO_SECRET),
    "A16": matrix_row(
        "modes of files",
        f"{BY_RECORD}.test_a_state_folder_that_is_nobody_elses",
        "Ec2CommandLineSuite.test_the_token_goes_from_its_file_to_the_account",
    ),
    "A17": matrix_row(
        "secrets in errors",
        f"{BY_HOSTILE}.test_the_words_of_ec2",
        f"{BY_OUTGOING}.test_a_secret_that_others_say_does_not_pass_through",
        f"{BY_BAD_INPUT}.test_a_value_that_looks_like_a_secret_never_comes_back",
    ),
    "A18": matrix_row(
        "secrets in reports",
        BY_TOKEN_NOWHERE,
        "parts.test_reports_toolset.TestSaving.test_nothing_private_is_written",
    ),
    "A19": matrix_row(
        "orders in a log",
        BY_SHOWN_TEXTS,
        "parts.test_diagnosis_toolset.TestHostileLogs."
        "test_a_model_that_obeys_the_log_changes_nothing_but_its_own_field",
    ),
    "A20": matrix_row("orders to the agent", BY_SHOWN_TEXTS, f"{BY_HOSTILE}.test_the_words_of_ec2"),
    "A21": matrix_row("names and tags of others", f"{BY_HOSTILE}.test_names_and_tags_of_others"),
    "A22": matrix_row(
        "floods",
        BY_FLOOD,
        BY_CUT_SHORT,
        f"{BY_ANSWER_FAULTS}.test_an_event_beyond_all_bounds_is_refused",
    ),
    "A23": matrix_row(
        "any bytes",
        BY_FLOOD,
        BY_SHOWN_TEXTS,
        f"{BY_BAD_INPUT}.test_a_lone_surrogate_on_the_wire_reaches_no_tool",
    ),
    "A24": matrix_row(
        "destroying by token alone",
        f"{BY_ENDING}.test_without_the_token_of_that_very_thing",
        f"{BY_ENDING}.test_two_of_one_name_are_told_by_their_ids",
        BY_MADE_ANEW,
        BY_CLOCK,
    ),
    "A25": matrix_row("the wrong account", BY_OTHER_ACCOUNT),
    "A26": matrix_row("ownership", BY_OURS_ALONE),
    "A27": matrix_row("whatever serves", BY_OURS_ALONE),
    "A28": matrix_row(
        "no end, no budget",
        BY_LAUNCHED,
        f"{BY_ASKING}.test_a_place_without_a_price_and_one_over_budget",
        f"{BY_ENDING}.test_a_stopped_machine_is_an_orphan",
    ),
    "A29": matrix_row("twins by repeating", BY_LOST_AND_DONE, BY_LOST_AND_NOT_DONE),
    "A30": matrix_row("at once", BY_TWELVE, BY_BESIDE_A_SEARCH),
    "A31": matrix_row("a crash in a create", BY_IN_A_CREATE),
    "A32": matrix_row(
        "the client leaves",
        BY_IN_A_CREATE,
        "Ec2LeavingSuite.test_a_start_goes_on_without_the_server_that_began_it",
    ),
    "A33": matrix_row("clocks", BY_CLOCK),
    "A34": matrix_row("partitions", BY_NOT_REACHED, BY_UNREAD_LISTS),
    "A35": matrix_row("streams", f"{BY_ANSWER_FAULTS}.test_a_stream_that_breaks_off"),
    "A36": matrix_row(
        "metrics by name",
        "parts.test_metrics.RecordedTest.test_vllm_s_names",
        "parts.test_metrics.FormatTest.test_a_name_is_exact",
        why="held beside a page that a real vLLM wrote",
    ),
    "A37": matrix_row("AWS's output", BY_UNREAD_LISTS),
    "A38": matrix_row("the protocol's own line", BY_FLOOD),
    "A39": matrix_row("TLS", why="the model is reached at loopback; the SDK does its own"),
    "A40": matrix_row(
        "open ports",
        BY_LAUNCHED,
        f"{BY_ASKING}.test_a_group_that_somebody_opened_or_that_is_somebody_elses",
    ),
    "A41": matrix_row("an API key", why="the server listens on the machine's loopback alone"),
    "A42": matrix_row(
        "unsafe weights",
        BY_LAUNCHED,
        "parts.test_vllm_docker.ServeTest.test_only_hub_ids_are_served",
    ),
    "A43": matrix_row("supply chain", BY_LAUNCHED),
    "A44": matrix_row("docker's socket", BY_LAUNCHED),
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
    "A48": matrix_row("an address of somebody else", BY_OTHERS_NAME, BY_STRANGER_HERE),
    "A49": matrix_row(
        "shared state files",
        f"{BY_RECORD}.test_a_state_folder_that_is_nobody_elses",
        BY_TWO_ZONES,
    ),
    "A50": matrix_row(
        "false success",
        BY_STAYS,
        BY_LOST_END,
        f"{BY_HOSTILE}.test_a_console_that_says_ready_makes_nothing_ready",
    ),
}
