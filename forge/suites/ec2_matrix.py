"""The faults of the rigs on EC2, row by row: the test of each, or why it has none; and the table.

D01 to D56 are those of every rented rig, I01 to I25 what EC2 does besides, B01 to B05 what a
machine that builds can meet. Knows no fault.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge.suites.ec2_threats import EC2_THREAT_ROWS
from forge.suites.ec2_told import (
    BUILDS_ELSEWHERE,
    BY_ANSWER_FAULTS,
    BY_ASKING,
    BY_AT_DEADLINE,
    BY_BESIDE_A_SEARCH,
    BY_BUILDING,
    BY_CLOCK,
    BY_CUT_SHORT,
    BY_ENDING,
    BY_FAILED_BOOTS,
    BY_FLOOD,
    BY_HOSTILE,
    BY_IN_A_CREATE,
    BY_LAUNCHING,
    BY_LOST_AND_DONE,
    BY_LOST_AND_NOT_DONE,
    BY_LOST_END,
    BY_MADE_ANEW,
    BY_NEVER_ONLINE,
    BY_NOT_REACHED,
    BY_OTHER_ACCOUNT,
    BY_OTHERS_NAME,
    BY_OURS_ALONE,
    BY_REACHING,
    BY_RECORD,
    BY_SAME_AGAIN,
    BY_SHOWN_TEXTS,
    BY_STAYS,
    BY_STRANGER_HERE,
    BY_TAKEN_BACK,
    BY_TWELVE,
    BY_TWO_ZONES,
    BY_UNREAD_LISTS,
)
from forge.suites.fault_matrix import MATRIX_NUMBERS, FaultMatrixSuite, MatrixRow, matrix_row

EC2_FAULT_ROWS: Mapping[str, MatrixRow] = {
    "D01": matrix_row(
        "no plugin, no SDK",
        f"{BY_REACHING}.test_no_tunnel_where_the_agent_is_offline_or_the_plugin_is_gone",
        "parts.test_aws_refusals.UnansweredTest.test_a_missing_sdk_says_how_to_install_it",
    ),
    "D02": matrix_row(
        "credentials end in a search",
        f"{BY_ASKING}.test_credentials_that_expire_in_the_middle_of_a_search",
        f"{BY_ASKING}.test_credentials_that_expired",
    ),
    "D03": matrix_row(
        "403",
        f"{BY_ASKING}.test_a_permission_is_no_fault_of_its_zone",
        f"{BY_ENDING}.test_an_end_that_may_not_be_ordered",
    ),
    "D04": matrix_row(
        "quota",
        f"{BY_ASKING}.test_a_quota_shuts_its_region",
        f"{BY_ASKING}.test_no_quota_at_all_asks_nowhere",
    ),
    "D05": matrix_row(
        "launch without an answer",
        BY_LOST_AND_DONE,
        BY_LOST_AND_NOT_DONE,
        f"{BY_LAUNCHING}.test_a_searched_one_whose_answer_is_lost_is_the_only_one",
        f"{BY_LAUNCHING}.test_a_launch_that_comes_to_life_after_it_was_given_up",
    ),
    "D06": matrix_row(
        "launch fails after it was done",
        f"{BY_LAUNCHING}.test_a_launch_that_fails_after_it_was_done",
        f"{BY_LAUNCHING}.test_a_searched_one_that_failed_and_shows_late_is_the_only_one",
    ),
    "D07": matrix_row(
        "seen late", f"{BY_LAUNCHING}.test_a_machine_that_shows_late_stops_every_other"
    ),
    "D08": matrix_row(
        "cleaning up fails",
        f"{BY_ENDING}.test_a_search_whose_machine_does_not_go_is_told_by_its_name",
        BY_LOST_END,
    ),
    "D09": matrix_row("the same create", BY_SAME_AGAIN),
    "D10": matrix_row("creates at once", BY_TWELVE, BY_BESIDE_A_SEARCH),
    "D11": matrix_row("other parameters", BY_SAME_AGAIN),
    "D12": matrix_row("a namesake", f"{BY_ASKING}.test_a_namesake", BY_OTHERS_NAME),
    "D13": matrix_row("stockouts", BY_TWO_ZONES),
    "D14": matrix_row("a page in the place of an answer", BY_UNREAD_LISTS),
    "D15": matrix_row("an answer that breaks off", BY_UNREAD_LISTS),
    "D16": matrix_row(
        "things that cannot be read",
        BY_UNREAD_LISTS,
        "parts.test_ec2_plane.CensusTest."
        "test_a_thing_that_cannot_be_read_is_told_and_hides_no_other",
    ),
    "D17": matrix_row("bytes that are no text", BY_SHOWN_TEXTS, BY_FLOOD),
    "D18": matrix_row(
        "endless output",
        BY_CUT_SHORT,
        BY_FLOOD,
        why="no program prints here: AWS answers in pages, and a machine in 24,000 characters",
    ),
    "D19": matrix_row("a prompt", why="the SDK asks nobody; the tunnel's program has no input"),
    "D20": matrix_row(
        "an answer that never comes",
        BY_LOST_AND_DONE,
        "Ec2LeavingSuite.test_in_the_middle_of_an_order_that_aws_took_and_did_not_answer",
        why="there is no program to end: a call hangs in a thread of the server",
    ),
    "D21": matrix_row(
        "refused",
        f"{BY_REACHING}.test_a_server_that_is_down_on_a_machine_that_is_up",
        BY_NOT_REACHED,
    ),
    "D22": matrix_row("no way there", BY_NOT_REACHED),
    "D23": matrix_row("names and TLS", why="the model is reached at loopback, through a session"),
    "D24": matrix_row(
        "another service answers",
        BY_STRANGER_HERE,
        f"{BY_ANSWER_FAULTS}.test_a_page_instead_of_a_stream",
    ),
    "D25": matrix_row("401, 403", f"{BY_ANSWER_FAULTS}.test_every_request_is_refused"),
    "D26": matrix_row("429", f"{BY_ANSWER_FAULTS}.test_every_request_is_refused"),
    "D27": matrix_row("5xx", f"{BY_ANSWER_FAULTS}.test_every_request_is_refused"),
    "D28": matrix_row("a stream breaks off", f"{BY_ANSWER_FAULTS}.test_a_stream_that_breaks_off"),
    "D29": matrix_row("a stream stalls", f"{BY_ANSWER_FAULTS}.test_a_stream_that_stalls"),
    "D30": matrix_row(
        "odd events",
        f"{BY_ANSWER_FAULTS}.test_events_without_choices",
        f"{BY_ANSWER_FAULTS}.test_an_answer_cut_into_single_bytes",
        f"{BY_ANSWER_FAULTS}.test_an_event_of_5_megabytes_is_an_event",
    ),
    "D31": matrix_row(
        "an error in a stream", f"{BY_ANSWER_FAULTS}.test_an_error_within_the_stream"
    ),
    "D32": matrix_row(
        "odd metrics",
        "parts.test_metrics.FormatTest.test_nan_and_infinity_are_absent_and_not_0",
        "parts.test_metrics.FormatTest.test_random_damage_never_raises_and_never_invents",
        why="needs a scripted page",
    ),
    "D33": matrix_row(
        "endless metrics",
        "parts.test_metrics.ClientTest.test_an_endless_page_is_left_when_it_is_long_enough",
        "parts.test_metrics.ClientTest.test_a_compressed_page_is_not_unfolded",
        why="needs a scripted page",
    ),
    "D34": matrix_row(
        "cancelled create",
        f"{BY_RECORD}.test_a_cancelled_call_is_settled_by_the_next",
        f"{BY_ENDING}.test_a_search_is_ended_and_what_it_asked_for_with_it",
        "Ec2LeavingSuite.test_cancelling_an_order_that_aws_did_not_answer",
    ),
    "D35": matrix_row("end of input", BY_IN_A_CREATE),
    "D36": matrix_row(
        "SIGTERM",
        "Ec2LeavingSuite.test_in_the_middle_of_an_order_that_aws_took_and_did_not_answer",
    ),
    "D37": matrix_row(
        "SIGKILL at any point",
        BY_IN_A_CREATE,
        "test_ec2_story.KilledStoryTests.test_killed_at_every_step_from_the_search_to_the_end",
        "test_ec2_story.KilledStoryTests.test_killed_between_the_intent_and_the_launch",
        "parts.test_sweep.KilledAnywhereTest."
        "test_a_killed_sweep_has_written_down_what_lives_and_the_next_settles_it",
    ),
    "D38": matrix_row(
        "no journal",
        f"{BY_RECORD}.test_no_journal_no_machine",
        "RentedFullDiskSuite.test_the_disk_is_full",
    ),
    "D39": matrix_row(
        "a damaged journal",
        f"{BY_RECORD}.test_what_half_a_record_tells",
        f"{BY_RECORD}.test_a_damaged_search_hides_no_machine",
    ),
    "D40": matrix_row("a wrong clock", BY_CLOCK),
    "D41": matrix_row("a late grant", why="EC2 gives a machine at once or refuses; nothing queues"),
    "D42": matrix_row(
        "taken back", BY_TAKEN_BACK, f"{BY_ENDING}.test_the_spot_machine_is_taken_back"
    ),
    "D43": matrix_row("gone already", f"{BY_ENDING}.test_terminated_behind_our_back"),
    "D44": matrix_row("still ending", BY_STAYS),
    "D45": matrix_row("ended and running", BY_LOST_END),
    "D46": matrix_row("made anew since", BY_MADE_ANEW),
    "D47": matrix_row("the agent is offline", BY_NOT_REACHED, BY_NEVER_ONLINE),
    "D48": matrix_row("SSM cuts its output", BY_CUT_SHORT),
    "D49": matrix_row("SSM at the deadline", BY_AT_DEADLINE),
    "D50": matrix_row(
        "the boot fails", BY_FAILED_BOOTS, "RentedDiagnosingSuite.test_a_failed_start_is_explained"
    ),
    "D51": matrix_row(
        "the secret store", f"{BY_HOSTILE}.test_a_secret_that_is_not_to_be_had_is_not_made_anew"
    ),
    "D52": matrix_row(
        "an odd token",
        f"{BY_HOSTILE}.test_a_token_with_a_line_end_an_empty_one_and_what_is_none",
    ),
    "D53": matrix_row("no price", f"{BY_ASKING}.test_a_place_without_a_price_and_one_over_budget"),
    "D54": matrix_row("a poisoned cache", BY_TWO_ZONES),
    "D55": matrix_row("two rigs in a zone", BY_OURS_ALONE),
    "D56": matrix_row(
        "hostile answers",
        BY_SHOWN_TEXTS,
        f"{BY_ANSWER_FAULTS}.test_an_answer_of_3_megabytes_comes_out_bounded",
    ),
}

EC2_OWN_ROWS: Mapping[str, MatrixRow] = {
    "I01": matrix_row("two zones out", BY_TWO_ZONES),
    "I02": matrix_row(
        "spot refused, on demand had",
        f"{BY_ASKING}.test_spot_is_refused_everywhere_and_on_demand_is_had",
    ),
    "I03": matrix_row("quota zero", f"{BY_ASKING}.test_no_quota_at_all_asks_nowhere"),
    "I04": matrix_row(
        "profile not visible yet", f"{BY_ASKING}.test_a_profile_that_is_not_visible_yet"
    ),
    "I05": matrix_row(
        "interrupted", BY_TAKEN_BACK, f"{BY_ENDING}.test_the_spot_machine_is_taken_back"
    ),
    "I06": matrix_row("terminated behind our back", f"{BY_ENDING}.test_terminated_behind_our_back"),
    "I07": matrix_row("agent never online", BY_NEVER_ONLINE, BY_NOT_REACHED),
    "I08": matrix_row("build fails", why=BUILDS_ELSEWHERE),
    "I09": matrix_row("disk full", BY_FAILED_BOOTS),
    "I10": matrix_row("SSM cut at 24,000 characters", BY_CUT_SHORT),
    "I11": matrix_row("SSM command running at the deadline", BY_AT_DEADLINE),
    "I12": matrix_row(
        "answer of a launch lost, done",
        BY_LOST_AND_DONE,
        f"{BY_LAUNCHING}.test_a_searched_one_whose_answer_is_lost_is_the_only_one",
    ),
    "I13": matrix_row("answer of a launch lost, not done", BY_LOST_AND_NOT_DONE),
    "I14": matrix_row(
        "IdempotentParameterMismatch", f"{BY_LAUNCHING}.test_a_token_that_stands_for_another_order"
    ),
    "I15": matrix_row("throttled", f"{BY_LAUNCHING}.test_throttled"),
    "I16": matrix_row(
        "credentials over, or another account's",
        f"{BY_ASKING}.test_credentials_that_expired",
        f"{BY_ASKING}.test_credentials_that_expire_in_the_middle_of_a_search",
        BY_OTHER_ACCOUNT,
    ),
    "I17": matrix_row(
        "others' machines that look like ours",
        BY_OURS_ALONE,
        f"{BY_HOSTILE}.test_names_and_tags_of_others",
    ),
    "I18": matrix_row("a namesake", f"{BY_ASKING}.test_a_namesake"),
    "I19": matrix_row("a token for one that was made anew", BY_MADE_ANEW),
    "I20": matrix_row("stays in shutting-down", BY_STAYS),
    "I21": matrix_row(
        "a volume that hangs on nothing",
        f"{BY_ENDING}.test_a_volume_that_hangs_on_nothing_is_an_orphan",
    ),
    "I22": matrix_row("a stopped machine", f"{BY_ENDING}.test_a_stopped_machine_is_an_orphan"),
    "I23": matrix_row("AMI parameter gone", f"{BY_ASKING}.test_an_image_whose_parameter_is_gone"),
    "I24": matrix_row("no default subnet", f"{BY_ASKING}.test_a_zone_without_a_default_subnet"),
    "I25": matrix_row(
        "security group opened",
        f"{BY_ASKING}.test_a_group_that_somebody_opened_or_that_is_somebody_elses",
    ),
}


# What is the same to the letter on both rigs, the suite of gpu-vllm-g6-2b tells.
EC2_BUILD_ROWS: Mapping[str, MatrixRow] = {
    "I08": matrix_row("build fails", f"{BY_BUILDING}.test_builds_that_fail_are_told_and_still_end"),
    "B01": matrix_row(
        "the compiler refuses", f"{BY_BUILDING}.test_builds_that_fail_are_told_and_still_end"
    ),
    "B02": matrix_row(
        "the disk is full", f"{BY_BUILDING}.test_builds_that_fail_are_told_and_still_end"
    ),
    "B03": matrix_row(
        "the source is not to be had",
        f"{BY_BUILDING}.test_a_source_that_is_not_to_be_had_or_is_another",
    ),
    "B04": matrix_row(
        "another GPU", f"{BY_BUILDING}.test_another_gpu_is_told_before_anything_is_built"
    ),
    "B05": matrix_row(
        "a compiler is killed for memory",
        f"{BY_BUILDING}.test_builds_that_fail_are_told_and_still_end",
    ),
}


class Ec2MatrixSuite(FaultMatrixSuite):
    """The table of the rig whose machine serves a container."""

    @classmethod
    def rows(cls) -> Mapping[str, MatrixRow]:
        return {**EC2_FAULT_ROWS, **EC2_THREAT_ROWS, **EC2_OWN_ROWS}

    @classmethod
    def numbers(cls) -> list[str]:
        return [*MATRIX_NUMBERS, *(f"I{n:02}" for n in range(1, 26))]


class Ec2BuildMatrixSuite(FaultMatrixSuite):
    """The table of the rig whose machine builds its server: what it can meet besides."""

    @classmethod
    def rows(cls) -> Mapping[str, MatrixRow]:
        return EC2_BUILD_ROWS

    @classmethod
    def numbers(cls) -> list[str]:
        return ["I08", *(f"B{n:02}" for n in range(1, 6))]
