"""What gcloud says, read: its own texts, as it printed them, and texts that are broken.

The texts marked "seen" are gcloud 528's output against the fake Google; "told" ones are from dated
reports of others. Which class comes of each is written beside it.
"""

from __future__ import annotations

import json
import unittest
from typing import Any

from forge.parts.boundaries.gcloud_answers import (
    GcloudAnswer,
    field_labels,
    field_text,
    read_gcloud,
)
from forge.parts.boundaries.gcloud_refusals import (
    gcloud_refusal,
    hinted_zones,
    operation_refusal,
)
from forge.parts.ground.errors import RigError

PROJECT = "fake-proj"
WHO = " This command is authenticated as me@example.com which is the active account specified by "
WHO += "the [core/account] property"
API_OFF = (
    "Cloud TPU API has not been used in project fake-proj before or it is disabled. Enable it by "
    "visiting https://console.developers.google.com/apis/api/tpu.googleapis.com/overview"
    "?project=fake-proj then retry. If you enabled this API recently, wait a few minutes."
)
# The words, the class for a read and for a change, what the refusal must name.
SAID: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (  # seen; folded over lines as gcloud's YAML is
        "ERROR: (gcloud.compute.instances.create) ---\ncode: ZONE_RESOURCE_POOL_EXHAUSTED\n"
        "message: The zone 'projects/fake-proj/zones/us-east5-b' does not have enough resources\n"
        "  available to fulfill the request.  Try a different zone, or try again later.\n\n",
        *("CAPACITY", "CAPACITY"),
        ("us-east5-b", "another zone, or later"),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.create) ---\n"
        "code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS\nerrorDetails:\n- errorInfo:\n"
        "    metadatas:\n      vmType: ct6e-standard-1t\n      zone: us-east5-b\n"
        "      zonesAvailable: us-east5-a,us-central1-a\n    reason: resource_availability\n"
        "message: A ct6e-standard-1t VM instance is currently unavailable in the us-east5-b\n"
        "  zone. Consider trying your request in the us-east5-a, us-central1-a zone(s).\n",
        *("CAPACITY", "CAPACITY"),
        ("the provider names us-east5-a, us-central1-a",),
    ),
    (  # seen; what went before the error is no part of it
        'Create request issued for: [n1]\nERROR: (gcloud.compute.tpus.tpu-vm.create) {\n  "code": 8'
        ',\n  "message": "There is no more capacity in the zone \\"us-west4-a\\"; you can try in '
        'another zone"\n}\n',
        *("CAPACITY", "CAPACITY"),
        ("no more capacity",),
    ),
    (  # told
        "ERROR: (gcloud.compute.instances.create) Could not fetch resource:\n - Invalid value for "
        "field 'resource.machineType': 'x'. Machine type with name 'ct6e-standard-1t' does not "
        "exist in zone 'us-west1-a'.",
        *("CAPACITY", "CAPACITY"),
        ("does not offer", "us-west1-a"),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.create)  - Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: "
        "0.0 in region us-east5.\n\tmetric name = compute.googleapis.com/tpus_per_tpu_family\n\t"
        "limit name = TPUS-PER-TPU-FAMILY-per-project-region\n\tlimit = 0.0\n\tdimensions = region:"
        " us-east5\nTry your request in another zone, or view documentation on how to increase.",
        *("QUOTA", "QUOTA"),
        ("TPUS_PER_TPU_FAMILY", "limit 0.0 in region us-east5"),
    ),
    (  # told
        "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' has been exceeded. "
        "Limit: 0 in zone us-west4-a.",
        *("QUOTA", "QUOTA"),
        ("TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI", "limit 0 in zone us-west4-a"),
    ),
    (  # told
        "ERROR: (gcloud.compute.instances.create) Could not fetch resource:\n - Quota "
        "'GPUS_ALL_REGIONS' exceeded. Limit: 0.0 globally.",
        *("QUOTA", "QUOTA"),
        ("GPUS_ALL_REGIONS", "limit 0.0)"),
    ),
    (  # told; a rate is no quota of machines, and no other region helps
        "ERROR: (gcloud.compute.instances.list) Quota exceeded for quota metric 'Read requests' "
        "and limit 'Read requests per minute' of service 'compute.googleapis.com'",
        *("UNREACHABLE", "DENIED"),
        ("wait a minute",),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.create) PERMISSION_DENIED: Required "
        f"'compute.instances.create' permission for 'projects/fake-proj/zones/z/instances/r'.{WHO}",
        *("DENIED", "DENIED"),
        ("lacks compute.instances.create in fake-proj",),
    ),
    (  # seen; "may not exist" is no NOT_FOUND
        "ERROR: (gcloud.compute.tpus.tpu-vm.create) PERMISSION_DENIED: Permission "
        "'tpu.nodes.create' denied on 'projects/fake-proj/locations/us-west4-a/nodes/n1' (or it "
        f"may not exist).{WHO}.",
        *("DENIED", "DENIED"),
        ("lacks tpu.nodes.create",),
    ),
    (  # told
        "ERROR: (gcloud.compute.instances.create) Could not fetch resource:\n - This user agent is "
        "not allowed to use the machine type [ct5lp-hightpu-1t].",
        *("DENIED", "DENIED"),
        ("Cloud TPU API",),
    ),
    (
        "ERROR: (gcloud.x) Constraint constraints/compute.vmExternalIpAccess violated for project",
        *("DENIED", "DENIED"),
        ("policy of the organisation",),
    ),
    (  # seen
        f"ERROR: (gcloud.compute.tpus.tpu-vm.list) PERMISSION_DENIED: {API_OFF}{WHO}.\n- '@type': "
        "type.googleapis.com/google.rpc.ErrorInfo\n  metadata:\n    service: tpu.googleapis.com\n"
        "  reason: SERVICE_DISABLED\n",
        *("DENIED", "DENIED"),
        ("gcloud services enable tpu.googleapis.com --project=fake-proj",),
    ),
    (
        "ERROR: (gcloud.x) API [secretmanager.googleapis.com] not enabled on project [fake-proj].",
        *("DENIED", "DENIED"),
        ("gcloud services enable secretmanager.googleapis.com",),
    ),
    ("ERROR: (gcloud.x) SERVICE_DISABLED", "DENIED", "DENIED", ("an API is not enabled",)),
    (
        "ERROR: (gcloud.x) This API method requires billing to be enabled. BILLING_DISABLED",
        *("DENIED", "DENIED"),
        ("a person enables billing",),
    ),
    (
        "ERROR: (gcloud.x) PERMISSION_DENIED: Permission denied on resource project fake-proj.",
        *("DENIED", "DENIED"),
        ("the project fake-proj is not there, or the account may not use it",),
    ),
    (  # a wrong project is no absence of a machine: a delete must not take it for success
        "ERROR: (gcloud.compute.instances.delete) Could not fetch resource:\n - The resource "
        "'projects/fake-proj' was not found",
        *("INVALID", "INVALID"),
        ("there is no project fake-proj", "gcloud auth list"),
    ),
    (
        "ERROR: (gcloud.x) The required property [project] is not currently set.",
        *("INVALID", "INVALID"),
        ("tpu.env",),
    ),
    (  # seen; nor is a wrong zone
        "ERROR: (gcloud.compute.instances.delete) Could not fetch resource:\n - The resource "
        "'projects/fake-proj/zones/us-nowhere1-a' was not found",
        *("INVALID", "INVALID"),
        ("us-nowhere1-a",),
    ),
    (
        "ERROR: (gcloud.compute.instances.create) Could not fetch resource:\n - The resource "
        "'projects/fake-proj/global/networks/default' was not found",
        *("INVALID", "INVALID"),
        ("networks/default",),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.delete) Could not fetch resource:\n - The resource "
        "'projects/fake-proj/zones/us-west4-a/instances/nope' was not found\n",
        *("NOT_FOUND", "NOT_FOUND"),
        ("instances/nope",),
    ),
    (  # seen
        "ERROR: (gcloud.compute.tpus.queued-resources.delete) NOT_FOUND: Resource "
        f"'projects/fake-proj/locations/us-west4-a/queuedResources/nope' was not found.{WHO}",
        *("NOT_FOUND", "NOT_FOUND"),
        ("queuedResources/nope",),
    ),
    (
        "ERROR: (gcloud.secrets.describe) NOT_FOUND: Secret [projects/1/secrets/hf-token] not "
        "found or has no versions.",
        *("NOT_FOUND", "NOT_FOUND"),
        ("hf-token",),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.create) ALREADY_EXISTS: The resource 'projects/fake-proj/"
        "zones/us-east5-b/instances/r1' already exists",
        *("EXISTS", "EXISTS"),
        ("instances/r1",),
    ),
    (  # seen
        "ERROR: (gcloud.compute.instances.list) You do not currently have an active account "
        "selected.\nPlease run:\n\n  $ gcloud auth login\n\nto obtain new credentials.",
        *("AUTH", "AUTH"),
        ("a person runs: gcloud auth login",),
    ),
    (
        "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: ("
        "'invalid_grant: Bad Request')\nPlease run:\n\n  $ gcloud auth login\n",
        *("AUTH", "AUTH"),
        ("a person runs: gcloud auth login",),
    ),
    (
        "ERROR: (gcloud.x) Reauthentication failed. cannot prompt during non-interactive "
        "execution.",
        *("AUTH", "AUTH"),
        ("a person runs: gcloud auth login",),
    ),
    (
        "Your default credentials were not found. To set up Application Default Credentials, see "
        "https://cloud.google.com/docs/authentication/external/set-up-adc",
        *("AUTH", "AUTH"),
        ("a person runs: gcloud auth application-default login",),
    ),
    (  # the login could not be refreshed, because nothing could be reached: no login helps
        "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: "
        "HTTPSConnectionPool(host='oauth2.googleapis.com', port=443): Max retries exceeded with "
        "url: /token",
        *("UNREACHABLE", "UNKNOWN"),
        ("could not be reached",),
    ),
    (  # seen
        "ERROR: gcloud crashed (ProxyError): HTTPConnectionPool(host='127.0.0.1', port=1): Max "
        "retries exceeded with url: /x (Caused by ProxyError('Unable to connect to proxy'))",
        *("UNREACHABLE", "UNKNOWN"),
        ("could not be reached",),
    ),
    (  # seen; the page's own number is nobody's answer
        "ERROR: (gcloud.compute.tpus.tpu-vm.list) HttpError accessing <http://127.0.0.1:1/tpu>: "
        "response: <{'content-type': 'text/html', 'status': 404}>, content <<!DOCTYPE html><html>"
        "<title>Error 404 (Not Found)!!1</title>\n<p>NOT_FOUND: was not found</html>\n>\n"
        "This may be due to network connectivity issues.",
        *("UNREACHABLE", "UNKNOWN"),
        ("a web page came", "Error 404 (Not Found)"),
    ),
    (
        "ERROR: (gcloud.x) HTTPError 503: The service is currently unavailable.",
        *("UNREACHABLE", "UNKNOWN"),
        ("503",),
    ),
    ("ERROR: (gcloud.x) INTERNAL: Internal error encountered.", "UNREACHABLE", "UNKNOWN", ()),
    ("ERROR: (gcloud.x) The read operation timed out", "UNREACHABLE", "UNKNOWN", ()),
    (
        "ERROR: (gcloud.x) FAILED_PRECONDITION: Resource q is in state ACTIVE: delete its node",
        *("INVALID", "INVALID"),
        ("state ACTIVE",),
    ),
    (
        "ERROR: (gcloud.x) words that nobody has seen yet",
        "UNKNOWN",
        "UNKNOWN",
        ("nobody has seen",),
    ),
    ("", "UNKNOWN", "UNKNOWN", ("said nothing",)),
)


def read(code: int, out: str = "", err: str = "", *, change: bool = False, dropped: int = 0) -> Any:
    return read_gcloud(code, out, err, change=change, project=PROJECT, dropped=dropped)


class Case(unittest.TestCase):
    def refused(
        self, code: int, out: str = "", err: str = "", *, change: bool = False, dropped: int = 0
    ) -> RigError:
        with self.assertRaises(RigError) as raised:
            read(code, out, err, change=change, dropped=dropped)
        return raised.exception


class RefusalTest(Case):
    def test_every_text_has_its_class_and_names_what_matters(self) -> None:
        for text, for_read, for_change, names in SAID:
            for change, wanted in ((False, for_read), (True, for_change)):
                with self.subTest(text=text[:90], change=change):
                    error = self.refused(1, "", text, change=change)
                    self.assertEqual(error.error_class, wanted, error)
                    for name in names:
                        self.assertIn(name, str(error))

    def test_warnings_notes_and_colours_around_it_change_nothing(self) -> None:
        around = (
            "WARNING: You have selected a disk size of under [200GB]. Quota 'X' exceeded.\n"
            "NOTE: The users will be charged for public IPs when VMs are created.\n\x1b[1;31m"
        )
        for text, for_read, _for_change, _names in SAID:
            if text.startswith("ERROR:"):
                with self.subTest(text=text[:90]):
                    error = self.refused(1, "", f"{around}{text}\x1b[0m\r\n")
                    self.assertEqual(error.error_class, for_read, error)
                    self.assertNotIn("\x1b", str(error))

    def test_the_account_and_secrets_are_not_repeated(self) -> None:
        for text, *_rest in SAID:
            error = self.refused(1, "", f"{text} token hf_CanaryCanary0123 ya29.AbCdEfGhIjKl")
            for hidden in ("me@example.com", "core/account", "hf_Canary", "ya29.Ab"):
                self.assertNotIn(hidden, str(error))

    def test_a_huge_text_is_bounded_and_still_understood(self) -> None:
        text = f"ERROR: (gcloud.x) {'x' * 3_000_000}\n Quota 'CPUS' exceeded. Limit: 8.0"
        error = self.refused(1, "", text)
        self.assertEqual(error.error_class, "QUOTA")
        self.assertLess(len(str(error)), 2000)

    def test_what_stands_on_the_output_alone_is_read_too(self) -> None:
        self.assertEqual(self.refused(1, "ERROR: (gcloud.x) already exists").error_class, "EXISTS")

    def test_hints(self) -> None:
        for text, wanted in (
            ("zonesAvailable: us-east5-a,us-central1-a reason", ("us-east5-a", "us-central1-a")),
            ("zonesAvailable: us-east5-a", ("us-east5-a",)),
            ("trying your request in the us-central1-a,\n us-central1-f zone(s)", None),
            ("'zonesAvailable': 'us-east5-a,us-east5-a'", ("us-east5-a",)),
            ("zonesAvailable: ''", ()),
            ("does not have enough resources available", ()),
            ("zonesAvailable: rm -rf, us-east5-a; x", ("us-east5-a",)),
        ):
            expected = ("us-central1-a", "us-central1-f") if wanted is None else wanted
            self.assertEqual(hinted_zones(text), expected, text)


class UsageTest(Case):
    def test_too_old(self) -> None:
        for text in (
            "ERROR: (gcloud.compute.instances.create) argument --provisioning-model: Invalid "
            "choice: 'FLEX_START'. Did you mean 'SPOT'?",
            "ERROR: (gcloud.compute.instances.create) unrecognized arguments:\n  --request-valid-"
            "for-duration=2h\n\nTo search the help text of gcloud commands, run:\n  gcloud help",
        ):
            for change in (False, True):
                error = self.refused(2, "", text, change=change)
                self.assertEqual(error.error_class, "INVALID")
                self.assertIn("too old", error.what)
                self.assertTrue(error.next_step.startswith("gcloud components update"))

    def test_another_usage_error_is_not_blamed_on_age(self) -> None:
        for text in (
            "ERROR: (gcloud.x) argument --zone: Must be specified.",
            "ERROR: (gcloud.x) Invalid choice: 'istances'.",
            "",
        ):
            error = self.refused(2, "", text, change=True)
            self.assertEqual(error.error_class, "INVALID")
            self.assertNotIn("too old", str(error))


class SuccessTest(Case):
    def test_json(self) -> None:
        answer = read(0, '[{"name": "a"}, {"name": "b"}]\n', "")
        self.assertEqual([field_text(one, "name") for one in answer.things()], ["a", "b"])
        self.assertEqual((answer.warnings, answer.unread), ((), ()))
        self.assertEqual(read(0, "[]").things(), [])
        self.assertEqual(read(0, '{"name": "a"}').thing(), {"name": "a"})
        self.assertEqual(read(0, '[{"name": "a"}]').thing(), {"name": "a"})

    def test_what_is_not_whole_json_is_unknown_and_never_an_empty_list(self) -> None:
        for out in (
            *("", " \n", '[{"name": "a"}, {"na', "[]]", "NAME ZONE\nvm-1 us-east5-b", "nul"),
            *("<!DOCTYPE html><html>Sign in</html>", "[" * 100_000, "WARNING: x\n[]"),
        ):
            error = self.refused(0, out)
            self.assertEqual(error.error_class, "UNKNOWN", out[:40])
        self.assertEqual(self.refused(0, "[]", dropped=1).error_class, "UNKNOWN")

    def test_a_change_may_print_nothing(self) -> None:
        self.assertIsNone(read(0, "", "Deleted [x].\n", change=True).value)
        self.assertEqual(self.refused(0, "half {", change=True).error_class, "UNKNOWN")

    def test_other_shapes_than_expected(self) -> None:
        for value in (None, 3, "x", True, [None], [{"a": 1}, None], ["x"], [[]]):
            with self.assertRaises(RigError) as raised:
                GcloudAnswer(value).things()
            self.assertEqual(raised.exception.error_class, "UNKNOWN")
        self.assertEqual(GcloudAnswer([]).things(), [])
        for value in (None, 3, "x", [], [{}, {}], [None]):
            with self.assertRaises(RigError):
                GcloudAnswer(value).thing()
        with self.assertRaises(RigError):
            GcloudAnswer({"items": []}).things()

    def test_nulls_anywhere(self) -> None:
        thing = json.loads(
            '{"name": null, "id": 7, "labels": {"rig": "a", "odd": null, "n": 1}, "none": null,'
            '"list": [null, {"ip": "203.0.113.7"}], "flag": true, "float": 1.5}'
        )
        self.assertEqual(field_text(thing, "id"), "7")
        self.assertEqual(field_text(thing, "float"), "1.5")
        self.assertEqual(field_text(thing, "list", 1, "ip"), "203.0.113.7")
        for path in (
            *(("name",), ("absent",), ("none", "deeper"), ("list", 0, "ip"), ("list", 9, "ip")),
            *(("labels",), ("flag",), ("name", "x"), ("list", "ip"), (0,)),
        ):
            self.assertEqual(field_text(thing, *path), "", path)
        self.assertEqual(field_labels(thing, "labels"), {"rig": "a"})
        for path in (("none",), ("absent",), ("list",), ("name",)):
            self.assertEqual(field_labels(thing, *path), {})
        for bad in (None, 3, "x", []):
            self.assertEqual((field_text(bad, "a"), field_labels(bad, "a")), ("", {}))

    def test_a_list_that_lacks_a_zone_says_so(self) -> None:
        err = (
            "WARNING: Some requests did not succeed.\n - The zone 'zones/us-west4-a' is currently "
        )
        err += "unreachable.\n\nNOTE: something else\nWARNING: a second one\n"
        answer = read(0, "[]", err)
        self.assertEqual(len(answer.warnings), 2)
        (unread,) = answer.unread
        self.assertIn("us-west4-a", unread)
        self.assertNotIn("something else", unread)

    def test_a_list_that_was_refused_is_a_refusal_though_gcloud_ended_well(self) -> None:
        head = "WARNING: Some requests did not succeed.\n - "
        for text in (
            "Permission denied on resource project fake-proj.",
            API_OFF,
            "Required 'compute.instances.list' permission for 'projects/fake-proj'",
        ):
            error = self.refused(0, "[]\n", f"{head}{text}\n\n")
            self.assertEqual(error.error_class, "DENIED", error)


class EndTest(Case):
    def test_a_program_that_was_killed(self) -> None:
        for code in (-9, -15, 137, 143):
            self.assertEqual(self.refused(code).error_class, "UNREACHABLE")
            error = self.refused(code, "[]", "", change=True)
            self.assertEqual(error.error_class, "UNKNOWN")
            self.assertIn("may have been made", error.what)


class OperationTest(unittest.TestCase):
    """What becomes of a request that was accepted first."""

    def test_without_an_error(self) -> None:
        for nothing in (None, {}, []):
            self.assertIsNone(operation_refusal(nothing, project=PROJECT))

    def test_the_errors_of_an_operation(self) -> None:
        short = {
            "code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
            "message": "A VM instance is currently unavailable in the us-east5-b zone.",
            "errorDetails": [{"errorInfo": {"metadatas": {"zonesAvailable": "us-east5-a"}}}],
        }
        quota = {
            "code": "QUOTA_EXCEEDED",
            "message": "Quota 'CPUS' exceeded.  Limit: 8.0 in region x",
        }
        expired = {"code": 4, "message": "The queued resource request has expired before it could"}
        for error, wanted in (
            ({"errors": [short]}, "CAPACITY"),
            ({"errors": [quota]}, "QUOTA"),
            ({"code": 8, "message": "There is no more capacity in the zone"}, "CAPACITY"),
            ({"code": 13, "message": "an internal error"}, "UNKNOWN"),
            (expired, "UNKNOWN"),
            ({"errors": [None]}, "UNKNOWN"),
            ("odd", "UNKNOWN"),
        ):
            refusal = operation_refusal(error, project=PROJECT)
            assert refusal is not None
            self.assertEqual(refusal.error_class, wanted, refusal)
        hint = operation_refusal({"errors": [short]}, project=PROJECT)
        assert hint is not None
        self.assertEqual(hint.next_step, "the provider names us-east5-a")

    def test_the_words_alone(self) -> None:
        refusal = gcloud_refusal("no more capacity in the zone x", change=True, project=PROJECT)
        self.assertEqual(refusal.error_class, "CAPACITY")


if __name__ == "__main__":
    unittest.main()
