"""Refusals in the providers' own words: what each means, whom it shuts out, and for how long.

In this process; that triage.py says the same is another module's matter.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import unittest
from pathlib import Path
from typing import cast, get_args

from forge.parts.ground.errors import ErrorClass
from forge.parts.knowledge.refusal_answer import (
    CLASS_READINGS,
    STOPPING_REASONS,
    Refusal,
    RefusalReason,
    class_refusal,
)
from forge.parts.knowledge.refusal_reading import read_refusal
from forge.parts.knowledge.sweep_refusals import (
    NOT_OFFERED_REMEMBERED_S,
    QUOTA_REMEMBERED_S,
    REMEMBERED_S,
    STOCKOUT_REMEMBERED_S,
    RefusalMemory,
    region_of,
)

NOW = 1_800_000_000.0
RUN = "when calling the RunInstances operation"

# (text, reason, scope): the providers' own texts, project names and ids made up.
TEXTS: tuple[tuple[str, str, str], ...] = (
    (
        "ERROR: (gcloud.compute.instances.create) Could not fetch resource:\n"
        " - code: ZONE_RESOURCE_POOL_EXHAUSTED\n   message: The zone "
        "'projects/a-project/zones/us-east5-a' does not have enough resources available to fulfill "
        "the request.  Try a different zone, or try again later.",
        "stockout",
        "zone",
    ),
    ("code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "stockout", "zone"),
    ("code: REGION_RESOURCE_POOL_EXHAUSTED", "stockout", "zone"),
    ("code: GPU_STOCKOUT", "stockout", "zone"),
    ("code: UNSUPPORTED_OPERATION", "stockout", "zone"),
    ("reason: insufficientCapacity", "stockout", "zone"),
    (
        '{"code": 8, "message": "There is no more capacity in the zone \\"us-west4-a\\"; you can '
        'try in another zone where Cloud TPU Nodes are offered"}',
        "stockout",
        "zone",
    ),
    (
        f"An error occurred (InsufficientInstanceCapacity) {RUN} (reached max retries: 0): We "
        "currently do not have sufficient g6.xlarge capacity in the Availability Zone you "
        "requested (us-east-1a). Our system will be working on provisioning additional capacity.",
        "stockout",
        "zone",
    ),
    (f"An error occurred (InsufficientHostCapacity) {RUN}", "stockout", "zone"),
    ("There is no Spot capacity available that matches your request.", "stockout", "zone"),
    (
        f"An error occurred (Unsupported) {RUN}: Your requested instance type (g6.xlarge) is not "
        "supported in your requested Availability Zone (us-east-1e). Please retry your request by "
        "not specifying an Availability Zone or choosing us-east-1a, us-east-1b.",
        "not offered",
        "zone",
    ),
    (
        "Invalid value for field 'resource.machineType': 'zones/us-west1-a/machineTypes/"
        "ct6e-standard-1t'. Machine type with name 'ct6e-standard-1t' does not exist in zone "
        "'us-west1-a'.",
        "not offered",
        "zone",
    ),
    ("the request was valid until 2026-11-29T10:00:00Z and has expired", "expired", "zone"),
    ("The queued resource is in state FAILED", "expired", "zone"),
    (
        " - Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-east5.\n"
        "\tmetric name = compute.googleapis.com/tpus_per_tpu_family\n"
        "\tlimit name = TPUS-PER-TPU-FAMILY-per-project-region",
        "quota",
        "region",
    ),
    (
        "failedData.error: Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has "
        "been exceeded. Limit: 0 in zone us-west4-a.",
        "quota",
        "zone",
    ),
    ("Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.", "quota", "project"),
    (
        f"An error occurred (VcpuLimitExceeded) {RUN}: You have requested more vCPU capacity than "
        "your current vCPU limit of 0 allows for the instance bucket that the specified instance "
        "type belongs to.",
        "quota",
        "region",
    ),
    (f"An error occurred (InstanceLimitExceeded) {RUN}", "quota", "region"),
    (
        f"An error occurred (MaxSpotInstanceCountExceeded) {RUN}: Max spot instance count exceeded",
        "quota",
        "region",
    ),
    (
        f"An error occurred (SpotMaxPriceTooLow) {RUN}: Your Spot request price of 0.1 is lower "
        "than the minimum required Spot request fulfillment price of 0.2.",
        "price",
        "market",
    ),
    (
        " - Required 'compute.instances.create' permission for 'projects/a-project/zones/z'",
        "permission",
        "zone",
    ),
    ("Required 'Alpha Access' permission for 'projects/a-project'", "permission", "zone"),
    (
        "This user agent is not allowed to use the machine type [ct5lp-hightpu-1t]",
        "permission",
        "zone",
    ),
    (f"An error occurred (UnauthorizedOperation) {RUN}: You are not authorized", "permission", ""),
    (f"An error occurred (OptInRequired) {RUN}", "permission", ""),
    (f"An error occurred (PendingVerification) {RUN}", "permission", ""),
    (f"An error occurred (Blocked) {RUN}: This account is currently blocked", "permission", ""),
    ("reason: SERVICE_DISABLED", "permission", ""),
    ("You do not currently have an active account selected.", "auth", ""),
    (f"An error occurred (AuthFailure) {RUN}", "auth", ""),
    ("Unable to locate credentials. You can configure credentials", "auth", ""),
    (
        "ERROR: (gcloud.compute.instances.create) argument --provisioning-model: Invalid choice: "
        "'FLEX_START'.",
        "usage",
        "",
    ),
    (
        "ERROR: (gcloud.compute.instances.create) unrecognized arguments:\n"
        "  --request-valid-for-duration=2h",
        "usage",
        "",
    ),
    (f"An error occurred (RequestExpired) {RUN}: Request has expired.", "auth", ""),
    (f"An error occurred (UnrecognizedClientException) {RUN}", "auth", ""),
    (f"An error occurred (AccessDenied) {RUN}: Access Denied", "permission", ""),
    (f"An error occurred (InvalidUserData.Malformed) {RUN}: Invalid BASE64", "usage", ""),
    (f"An error occurred (InvalidBlockDeviceMapping) {RUN}: too small", "usage", ""),
    (f"An error occurred (InvalidAMIID.NotFound) {RUN}", "usage", ""),
    (f"An error occurred (InvalidSubnetID.NotFound) {RUN}", "usage", ""),
    (
        f"An error occurred (InvalidParameterValue) {RUN}: Value (x) for parameter groupId is "
        "invalid.",
        "usage",
        "",
    ),
    (
        f"An error occurred (InvalidParameterValue) {RUN}: Value (x) for parameter "
        "iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
        "transient",
        "",
    ),
    (f"An error occurred (RequestLimitExceeded) {RUN}", "transient", ""),
    (f"An error occurred (Throttling) {RUN}: Rate exceeded", "transient", ""),
    ("code: INTERNAL_ERROR message: Internal error. Please try again.", "transient", ""),
    ("code: BACKEND_ERROR", "transient", ""),
    ("503 Service Unavailable", "transient", ""),
    (
        " - The resource 'projects/a-project/zones/us-east5-a/instances/x' already exists",
        "unknown",
        "",
    ),
    ("something that nobody has seen before", "unknown", ""),
    ("", "unknown", ""),
)
HINTED = (
    "A ct6e-standard-1t VM instance is currently unavailable in the europe-west4-a zone. Consider "
    "trying your request in the us-east5-a, us-east5-b zone(s), which currently have capacity to "
    "accommodate your request."
)


class ReadingTest(unittest.TestCase):
    def test_every_text_has_its_reason_and_its_scope(self) -> None:
        for text, reason, scope in TEXTS:
            with self.subTest(text[:80]):
                refusal = read_refusal(text)
                self.assertEqual(refusal.reason, reason)
                self.assertEqual(refusal.scope, scope or "zone")

    def test_every_reason_stands_among_the_texts(self) -> None:
        self.assertEqual({reason for _, reason, _ in TEXTS}, set(get_args(RefusalReason)))

    def test_only_permission_auth_usage_and_a_limit_of_the_project_stop(self) -> None:
        for text, reason, scope in TEXTS:
            stops = reason in STOPPING_REASONS or scope == "project"
            self.assertEqual(read_refusal(text).stops, stops, text[:80])

    def test_googles_hint_is_read_in_its_order(self) -> None:
        refusal = read_refusal(HINTED)
        self.assertEqual(refusal.reason, "stockout")
        self.assertEqual(refusal.hints, ("us-east5-a", "us-east5-b"))

    def test_amazons_hint_is_read_in_its_order(self) -> None:
        text = (
            f"An error occurred (InsufficientInstanceCapacity) {RUN}: We currently do not have "
            "sufficient g6.xlarge capacity in the Availability Zone you requested (us-east-1a). "
            "You can currently get g6.xlarge capacity by not specifying an Availability Zone in "
            "your request or choosing us-east-1b, us-east-1c."
        )
        self.assertEqual(read_refusal(text).hints, ("us-east-1b", "us-east-1c"))

    def test_what_is_no_zone_is_no_hint(self) -> None:
        text = HINTED.replace("us-east5-a, us-east5-b", "nowhere, us-east5-b, --zone-x, 1")
        self.assertEqual(read_refusal(text).hints, ("us-east5-b",))
        self.assertEqual(read_refusal(HINTED.replace("us-east5-a,", "us-east5-b,")).hints[1:], ())

    def test_a_refusal_of_another_kind_gives_no_hint(self) -> None:
        for text, reason, _ in TEXTS:
            if reason != "stockout":
                self.assertEqual(read_refusal(text).hints, (), text[:60])

    def test_a_class_that_says_nothing_is_known_wins_over_any_text(self) -> None:
        for error_class in ("UNKNOWN", "TIMEOUT", "UNREACHABLE", "PARTIAL", "CANCELLED", "EXISTS"):
            for text, _, _ in TEXTS:
                refusal = read_refusal(text, cast(ErrorClass, error_class))
                self.assertEqual(refusal.reason, "unknown", (error_class, text[:60]))

    def test_a_class_is_enough_without_a_text(self) -> None:
        expected = {
            "CAPACITY": "stockout",
            "QUOTA": "quota",
            "DENIED": "permission",
            "AUTH": "auth",
            "INVALID": "usage",
            "INTERNAL": "transient",
            "BUSY": "transient",
            "NOT_FOUND": "unknown",
        }
        for error_class, reason in expected.items():
            refusal = read_refusal("no text known", cast(ErrorClass, error_class))
            self.assertEqual(refusal.reason, reason)
            self.assertEqual(refusal.scope, "region" if reason == "quota" else "zone")

    def test_every_class_is_understood(self) -> None:
        for error_class in get_args(ErrorClass):
            self.assertIn(read_refusal("x", error_class).reason, get_args(RefusalReason))

    def test_a_class_alone_says_what_it_says_with_a_text_that_nobody_knows(self) -> None:
        for error_class in (None, *get_args(ErrorClass)):
            with self.subTest(error_class):
                read = read_refusal("no text known", error_class)
                self.assertEqual(class_refusal(error_class, "no text known"), read)
        for error_class, readings in CLASS_READINGS.items():
            self.assertEqual(class_refusal(error_class, "").reason, readings[0])
        self.assertEqual(class_refusal(None, "said").said, "said")

    def test_a_text_refines_its_class(self) -> None:
        self.assertEqual(read_refusal(HINTED, "CAPACITY").hints, ("us-east5-a", "us-east5-b"))
        zone_quota = next(text for text, _, scope in TEXTS if "failedData" in text)
        self.assertEqual(read_refusal(zone_quota, "QUOTA").scope, "zone")
        self.assertEqual(read_refusal("Quota 'GPUS_ALL_REGIONS' exceeded.", "QUOTA").stops, True)

    def test_a_text_does_not_contradict_its_class(self) -> None:
        refusal = read_refusal(HINTED, "DENIED")
        self.assertEqual((refusal.reason, refusal.hints), ("permission", ()))

    def test_quota_is_told_from_a_stockout_that_speaks_of_resources(self) -> None:
        both = "code: ZONE_RESOURCE_POOL_EXHAUSTED message: resource exhausted, no quota was used"
        self.assertEqual(read_refusal(both).reason, "stockout")

    def test_the_line_that_is_kept_is_redacted_and_short(self) -> None:
        secret = "hf_" + "a1B2" * 9
        refusal = read_refusal(f"ZONE_RESOURCE_POOL_EXHAUSTED token {secret} " + "x" * 5000)
        self.assertEqual(refusal.reason, "stockout")
        self.assertNotIn(secret, refusal.said)
        self.assertLess(len(refusal.said), 1100)
        unread = read_refusal(f"unheard of {secret} " + "y" * 50_000)
        self.assertNotIn(secret, unread.said)
        self.assertLess(len(unread.said), 1100)

    def test_a_huge_hostile_text_is_read_all_the_same(self) -> None:
        text = ("Quota 'A" + "a" * 3000 + "\n") * 2000 + "code: GPU_STOCKOUT"
        self.assertEqual(read_refusal(text).reason, "stockout")
        self.assertEqual(read_refusal("\x00\x1b[31m\ud800 GPU_STOCKOUT").reason, "stockout")


class RegionTest(unittest.TestCase):
    def test_regions_of_both_spellings(self) -> None:
        for zone, region in {
            "us-east5-a": "us-east5",
            "europe-west4-b": "europe-west4",
            "us-south1-ai1b": "us-south1",
            "us-east-1a": "us-east-1",
            "ap-southeast-2c": "ap-southeast-2",
            "us-gov-west-1a": "us-gov-west-1",
            "atl1": "atl1",
        }.items():
            self.assertEqual(region_of(zone), region)

    def test_neighbours_share_a_region_and_namesakes_do_not(self) -> None:
        self.assertEqual(region_of("us-east5-a"), region_of("us-east5-b"))
        self.assertNotEqual(region_of("us-east5-a"), region_of("us-east1-d"))


class MemoryTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "state" / "refusals.json"
        self.memory = RefusalMemory(self.path)

    def remember(self, reason: RefusalReason, scope: str, zone: str = "us-east5-a") -> None:
        refusal = Refusal(reason, scope, "said")  # type: ignore[arg-type]
        self.memory.remember("p", "m", zone, "spot", refusal, NOW)

    def held(
        self,
        zone: str = "us-east5-a",
        market: str = "spot",
        project: str = "p",
        machine: str = "m",
        later: float = 1.0,
    ) -> list[str]:
        found = self.memory.holding(project, machine, zone, market, NOW + later)
        return [refusal.reason for refusal in found]

    def test_a_stockout_shuts_its_zone_and_market_alone(self) -> None:
        self.remember("stockout", "zone")
        self.assertEqual(self.held(), ["stockout"])
        self.assertEqual(self.held(zone="us-east5-b"), [])
        self.assertEqual(self.held(market="flex-start"), [])

    def test_a_quota_shuts_its_region_and_market(self) -> None:
        self.remember("quota", "region")
        self.assertEqual(self.held(zone="us-east5-b"), ["quota"])
        self.assertEqual(self.held(zone="us-east1-d"), [])
        self.assertEqual(self.held(market="on-demand"), [])

    def test_a_price_shuts_the_market_everywhere(self) -> None:
        self.remember("price", "market")
        self.assertEqual(self.held(zone="asia-northeast1-b"), ["price"])
        self.assertEqual(self.held(market="on-demand"), [])

    def test_another_project_and_another_machine_are_not_meant(self) -> None:
        self.remember("stockout", "zone")
        self.assertEqual(self.held(project="q"), [])
        self.assertEqual(self.held(machine="n"), [])

    def test_each_reason_is_forgotten_after_its_own_time_and_not_before(self) -> None:
        for reason, lasts in REMEMBERED_S.items():
            self.remember(reason, "zone")
            self.assertEqual(self.held(later=lasts - 1), [reason])
            self.assertEqual(self.held(later=lasts), [], reason)

    def test_lengths_are_in_the_order_of_what_they_mean(self) -> None:
        self.assertLess(STOCKOUT_REMEMBERED_S, QUOTA_REMEMBERED_S)
        self.assertLess(QUOTA_REMEMBERED_S, NOT_OFFERED_REMEMBERED_S)

    def test_what_ends_a_sweep_is_not_remembered(self) -> None:
        for reason in (*STOPPING_REASONS, "unknown"):
            self.remember(reason, "zone")
        self.assertEqual(self.held(), [])
        self.assertFalse(self.path.exists())

    def test_a_restart_keeps_what_holds(self) -> None:
        self.remember("stockout", "zone")
        self.remember("quota", "region", "us-east1-d")
        self.memory = RefusalMemory(self.path)
        self.assertEqual(self.held(), [])
        self.memory.load(NOW + 10)
        self.assertEqual(self.held(), ["stockout"])
        self.assertEqual(self.held(zone="us-east1-d"), ["quota"])
        self.memory.load(NOW + STOCKOUT_REMEMBERED_S + 1)
        self.assertEqual([refusal.reason for refusal in self.memory.kept], ["quota"])

    def test_a_newer_refusal_takes_the_place_of_the_older(self) -> None:
        self.remember("stockout", "zone")
        self.remember("transient", "zone")
        self.assertEqual(self.held(), ["transient"])
        self.assertEqual(len(json.loads(self.path.read_text())["refusals"]), 1)

    def test_the_file_is_private(self) -> None:
        self.remember("stockout", "zone")
        self.assertEqual(stat.S_IMODE(os.stat(self.path).st_mode), 0o600)

    def test_it_says_when(self) -> None:
        self.remember("stockout", "zone")
        refusal = self.memory.kept[0]
        self.assertEqual(refusal.told(NOW + 180), "stockout 3 min ago")
        self.assertEqual(refusal.told(NOW + 20), "stockout just now")
        self.assertEqual(refusal.told(NOW - 20), "stockout just now")

    def test_a_damaged_or_foreign_file_shuts_nothing_out(self) -> None:
        self.remember("stockout", "zone")
        good = json.loads(self.path.read_text())["refusals"][0]
        for text in (
            "",
            "[]",
            "{}",
            "{broken",
            '{"refusals": 7}',
            '{"refusals": [7, null, "x", {}]}',
            json.dumps({"refusals": [good | {"reason": "weather"}]}),
            json.dumps({"refusals": [good | {"until": "tomorrow"}]}),
            json.dumps({"refusals": [good | {"until": NOW + 1e9}]}),
            json.dumps({"refusals": [good | {"at": NOW + 50, "until": NOW + 60}]}),
            json.dumps({"refusals": [good | {"more": 1}]}),
        ):
            self.path.write_text(text)
            self.memory.load(NOW + 1)
            self.assertEqual(self.memory.kept, [], text)
        self.path.write_text(json.dumps({"refusals": [7, good]}))
        self.memory.load(NOW + 1)
        self.assertEqual(len(self.memory.kept), 1)


if __name__ == "__main__":
    unittest.main()
