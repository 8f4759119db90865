"""The fake Google, asked over HTTP as gcloud asks the real one: what lives, what fails, what ends.

gcloud itself is run in the test of its boundary; here its requests are made by hand.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.suites.fake_google import FakeGoogle, gcloud_wrapper
from forge.suites.fake_google_services import log_matches
from forge.suites.fake_google_world import GoogleScript, seconds_of

PROJECT = "fake-proj"
ZONE = "us-east5-b"
HOUR = 3600.0


class Case(unittest.TestCase):
    """A fake Google, and requests to it."""

    def setUp(self) -> None:
        self.cloud = self.enterContext(FakeGoogle(PROJECT))

    @property
    def script(self) -> GoogleScript:
        return self.cloud.script

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
        """The status and the parsed answer."""
        line = http.client.HTTPConnection("127.0.0.1", self.cloud.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            line.request(method, path, data, {"Authorization": "Bearer hidden-from-the-record"})
            answer = line.getresponse()
            raw = answer.read()
            if answer.headers["Content-Type"] != "application/json":
                return answer.status, raw
            return answer.status, json.loads(raw)
        finally:
            line.close()

    def good(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = self.ask(method, path, body)
        self.assertEqual(status, 200, answer)
        return answer

    def bad(self, method: str, path: str, body: Any = None) -> tuple[int, str, str]:
        status, answer = self.ask(method, path, body)
        self.assertGreaterEqual(status, 400, answer)
        error = answer["error"]
        self.assertEqual(error["code"], status)
        return status, error["status"], error["message"]

    def machines(self, zone: str = ZONE, rest: str = "") -> str:
        return f"/compute/v1/projects/{PROJECT}/zones/{zone}/instances{rest}"

    def tpus(self, kind: str, zone: str = "us-west4-a", rest: str = "") -> str:
        return f"/tpu/v2alpha1/projects/{PROJECT}/locations/{zone}/{kind}{rest}"

    def machine(self, name: str = "vm", model: str = "SPOT", **scheduling: Any) -> dict[str, Any]:
        return {
            "name": name,
            "machineType": "x/machineTypes/ct6e-standard-1t",
            "labels": {"rig": "a"},
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "9"}}],
            "networkInterfaces": [{"accessConfigs": [{"name": "external-nat"}]}],
            "scheduling": {"provisioningModel": model, **scheduling},
        }

    def queued(self, name: str = "q", **more: Any) -> Any:
        spec = {"nodeId": f"{name}-node", "node": {"acceleratorType": "v5litepod-1"}}
        body = {"tpu": {"nodeSpec": [spec]}, **more}
        path = self.tpus("queuedResources", rest=f"?queuedResourceId={name}")
        return self.good("POST", path, body)

    def state(self, name: str = "q") -> Any:
        found = self.good("GET", self.tpus("queuedResources", rest=f"/{name}"))
        return found["state"]["state"]


class MachineTest(Case):
    """Compute Engine."""

    def test_a_machine_its_disk_and_its_address(self) -> None:
        operation = self.good("POST", self.machines(), self.machine())
        self.assertEqual((operation["status"], operation["operationType"]), ("DONE", "insert"))
        found = self.good("GET", self.machines(rest="/vm"))
        self.assertEqual((found["status"], found["labels"]), ("RUNNING", {"rig": "a"}))
        self.assertTrue(found["id"].isdigit())
        self.assertEqual(operation["targetId"], found["id"])
        self.assertEqual(found["networkInterfaces"][0]["accessConfigs"][0]["natIP"], "203.0.113.7")
        self.assertNotIn("_born", found)
        self.assertNotIn("_name", found["disks"][0])
        self.assertEqual(self.cloud.held(), {"instances": ["vm"], "disks": ["vm"]})
        disk = self.good("GET", f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/disks/vm")
        self.assertEqual(disk["sizeGb"], "9")
        self.good("DELETE", self.machines(rest="/vm"))
        self.assertEqual(self.cloud.held(), {})
        self.assertEqual(self.bad("GET", self.machines(rest="/vm"))[:2], (404, "NOT_FOUND"))
        self.assertEqual(self.bad("DELETE", self.machines(rest="/vm"))[0], 404)

    def test_a_second_of_the_name_is_refused_in_its_zone_alone(self) -> None:
        first = self.good("POST", self.machines(), self.machine())
        status, code, message = self.bad("POST", self.machines(), self.machine())
        self.assertEqual((status, code), (409, "ALREADY_EXISTS"))
        self.assertIn("already exists", message)
        other = self.good("POST", self.machines("us-east5-a"), self.machine())
        self.assertNotEqual(first["targetId"], other["targetId"])
        self.assertEqual(self.cloud.held()["instances"], ["vm", "vm"])

    def test_a_flex_start_waits_runs_and_is_deleted_at_its_hard_stop(self) -> None:
        self.script.queue_s = 600
        life = {"maxRunDuration": {"seconds": "14400"}, "instanceTerminationAction": "DELETE"}
        self.good("POST", self.machines(), self.machine(model="FLEX_START", **life))
        states = []
        for seconds in (0, 599, 1, 14_399):
            self.cloud.advance(seconds)
            states.append(self.good("GET", self.machines(rest="/vm"))["status"])
        self.assertEqual(states, ["PENDING", "PENDING", "RUNNING", "RUNNING"])
        self.cloud.advance(1)
        self.assertEqual(self.bad("GET", self.machines(rest="/vm"))[0], 404)
        self.assertEqual(self.cloud.held(), {})
        kinds = [one["operationType"] for one in self.cloud.compute.operations.values()]
        self.assertIn("compute.instances.automaticallyTerminate", kinds)

    def test_a_flex_start_that_is_never_served_is_withdrawn(self) -> None:
        self.script.never.add(ZONE)
        body = self.machine(model="FLEX_START")
        self.good(
            "POST",
            self.machines(),
            {**body, "params": {"requestValidForDuration": {"seconds": "7200"}}},
        )
        self.cloud.advance(7199)
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "PENDING")
        self.cloud.advance(1)
        self.assertEqual(self.bad("GET", self.machines(rest="/vm"))[0], 404)

    def test_only_a_flex_start_waits(self) -> None:
        self.script.queue_s = 600
        for name, model in (("a", "SPOT"), ("b", "STANDARD")):
            self.good("POST", self.machines(), self.machine(name, model))
            found = self.good("GET", self.machines(rest=f"/{name}"))
            self.assertEqual(found["status"], "RUNNING")

    def test_the_hard_stop_stops_where_that_was_ordered_and_the_disk_stays(self) -> None:
        life = {"maxRunDuration": {"seconds": "60"}, "instanceTerminationAction": "STOP"}
        self.good("POST", self.machines(), self.machine(model="STANDARD", **life))
        self.cloud.advance(60)
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "TERMINATED")
        self.assertEqual(self.cloud.held(), {"instances": ["vm"], "disks": ["vm"]})

    def test_preemption(self) -> None:
        action = {"instanceTerminationAction": "DELETE"}
        self.good("POST", self.machines(), self.machine("gone", **action))
        self.good("POST", self.machines(), self.machine("stopped"))
        self.cloud.preempt("gone")
        self.cloud.preempt("stopped")
        self.assertEqual(self.bad("GET", self.machines(rest="/gone"))[0], 404)
        found = self.good("GET", self.machines(rest="/stopped"))
        self.assertEqual(found["status"], "TERMINATED")

    def test_operations_take_their_time(self) -> None:
        self.script.operation_s = 30
        self.script.stockout.add("us-east5-a")
        running = self.good("POST", self.machines("us-east5-a"), self.machine())
        self.assertEqual(running["status"], "RUNNING")
        self.assertNotIn("error", running)
        path = f"/compute/v1/projects/{PROJECT}/zones/us-east5-a/operations/{running['name']}"
        self.cloud.advance(29)
        self.assertEqual(self.good("GET", path)["status"], "RUNNING")
        self.cloud.advance(1)
        done = self.good("POST", f"{path}/wait")
        self.assertEqual(done["status"], "DONE")
        self.assertEqual(done["error"]["errors"][0]["code"], "ZONE_RESOURCE_POOL_EXHAUSTED")
        self.assertEqual(done["httpErrorStatusCode"], 503)

    def test_a_delete_takes_its_time_and_says_so(self) -> None:
        self.good("POST", self.machines(), self.machine())
        self.script.operation_s = 30
        operation = self.good("DELETE", self.machines(rest="/vm"))
        self.assertEqual(operation["status"], "RUNNING")
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "STOPPING")
        self.assertEqual(self.bad("POST", self.machines(), self.machine())[0], 409)
        self.cloud.advance(30)
        self.assertEqual(self.bad("GET", self.machines(rest="/vm"))[0], 404)
        self.assertEqual(self.cloud.held(), {})

    def test_what_was_made_is_not_seen_at_once(self) -> None:
        self.script.lag_s = 5
        self.good("POST", self.machines(), self.machine())
        self.assertEqual(self.bad("GET", self.machines(rest="/vm"))[0], 404)
        self.assertEqual(self.good("GET", self.machines())["items"], [])
        self.assertEqual(self.bad("POST", self.machines(), self.machine())[0], 409)
        self.cloud.advance(5)
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["name"], "vm")
        self.assertEqual(len(self.good("GET", self.machines())["items"]), 1)

    def test_refusals_leave_nothing(self) -> None:
        self.script.stockout.add("us-east5-a")
        self.script.quota.add("us-central1-a")
        self.script.denied.add("us-west4-a")
        short = self.good("POST", self.machines("us-east5-a"), self.machine())
        self.assertIn("not have enough resources", short["error"]["errors"][0]["message"])
        self.script.hint = ("us-east5-b",)
        hinted = self.good("POST", self.machines("us-east5-a"), self.machine())
        (error,) = hinted["error"]["errors"]
        info = error["errorDetails"][0]["errorInfo"]
        self.assertEqual(info["metadatas"]["zonesAvailable"], "us-east5-b")
        full = self.good("POST", self.machines("us-central1-a"), self.machine())
        (error,) = full["error"]["errors"]
        self.assertEqual((error["code"], full["httpErrorStatusCode"]), ("QUOTA_EXCEEDED", 403))
        self.assertIn("Limit: 0.0 in region us-central1", error["message"])
        refused = self.bad("POST", self.machines("us-west4-a"), self.machine())
        self.assertEqual(refused[:2], (403, "PERMISSION_DENIED"))
        self.assertIn("Required 'compute.instances.create' permission", refused[2])
        self.assertEqual(self.bad("POST", self.machines("us-nowhere1-a"), self.machine())[0], 404)
        self.assertEqual(self.cloud.held(), {})

    def test_a_half_made_machine_leaves_its_disk(self) -> None:
        self.script.stockout.add(ZONE)
        self.script.half_made = True
        self.assertIn("error", self.good("POST", self.machines(), self.machine()))
        self.assertEqual(self.cloud.held(), {"disks": ["vm"]})
        self.good("DELETE", f"/compute/v1/projects/{PROJECT}/zones/{ZONE}/disks/vm")
        self.assertEqual(self.cloud.held(), {})

    def test_a_delete_that_does_not_take(self) -> None:
        self.script.stubborn.add("vm")
        self.good("POST", self.machines(), self.machine())
        gone = self.good("DELETE", self.machines(rest="/vm"))
        self.assertEqual((gone["status"], gone["operationType"]), ("DONE", "delete"))
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "RUNNING")

    def test_lists_in_pages_and_over_all_zones(self) -> None:
        for zone, name in ((ZONE, "a"), (ZONE, "b"), ("us-east5-a", "c"), ("us-west4-a", "d")):
            self.good("POST", self.machines(zone), self.machine(name))
        self.script.page = 2
        path = f"/compute/v1/projects/{PROJECT}/aggregated/instances"
        seen: list[str] = []
        query = "?maxResults=500"
        while query:
            page = self.good("GET", path + query)
            for scope in page["items"].values():
                seen += [one["name"] for one in scope.get("instances", [])]
            token = page.get("nextPageToken", "")
            query = f"?pageToken={token}" if token else ""
        self.assertEqual(sorted(seen), ["a", "b", "c", "d"])
        self.assertEqual(len(self.cloud.sent("GET", "/aggregated/instances")), 2)
        self.assertEqual(len(self.good("GET", self.machines())["items"]), 2)

    def test_a_zone_that_cannot_be_read_is_named(self) -> None:
        self.script.unreachable.add(ZONE)
        self.good("POST", self.machines(), self.machine())
        items = self.good("GET", f"/compute/v1/projects/{PROJECT}/aggregated/instances")["items"]
        self.assertEqual(items[f"zones/{ZONE}"]["warning"]["code"], "UNREACHABLE")
        self.assertNotIn("instances", items[f"zones/{ZONE}"])
        self.assertEqual(items["zones/us-east5-a"]["warning"]["code"], "NO_RESULTS_ON_PAGE")

    def test_stop_start_labels_and_the_serial_port(self) -> None:
        self.good("POST", self.machines(), self.machine())
        self.good("POST", self.machines(rest="/vm/stop"), {})
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "TERMINATED")
        self.good("POST", self.machines(rest="/vm/start"), {})
        self.good("POST", self.machines(rest="/vm/setLabels"), {"labels": {"x": "y"}})
        found = self.good("GET", self.machines(rest="/vm"))
        self.assertEqual((found["status"], found["labels"]), ("RUNNING", {"x": "y"}))
        part = self.good("GET", self.machines(rest="/vm/serialPort?start=5"))
        self.assertEqual((part["contents"], part["next"]), ("ok\n", "8"))
        self.assertEqual(self.bad("POST", self.machines(rest="/vm/explode"), {})[0], 404)

    def test_the_surroundings(self) -> None:
        root = f"/compute/v1/projects/{PROJECT}"
        self.assertEqual(self.good("GET", root)["name"], PROJECT)
        self.assertIn(ZONE, [zone["name"] for zone in self.good("GET", f"{root}/zones")["items"]])
        self.assertEqual(self.good("GET", f"{root}/zones/{ZONE}")["status"], "UP")
        region = self.good("GET", f"{root}/regions/us-east5")
        self.assertGreater(region["quotas"][0]["limit"], 0)
        self.script.quota.add(ZONE)
        region = self.good("GET", f"{root}/regions/us-east5")
        self.assertEqual({one["limit"] for one in region["quotas"]}, {0.0})
        types = self.good("GET", f"{root}/aggregated/machineTypes")["items"]
        names = [one["name"] for one in types[f"zones/{ZONE}"]["machineTypes"]]
        self.assertIn("ct6e-standard-1t", names)
        image = self.good("GET", "/compute/v1/projects/images/global/images/family/ubuntu")
        self.assertEqual(image["family"], "ubuntu")
        keys = {"items": [{"key": "ssh-keys", "value": "x"}]}
        done = self.good("POST", f"{root}/setCommonInstanceMetadata", keys)
        self.assertNotIn("zone", done, "gcloud crashes over a zone in a global operation")
        self.assertEqual(self.bad("GET", f"{root}/regions/mars")[0], 404)
        self.assertEqual(self.bad("GET", f"{root}/aggregated/rockets")[0], 404)


class TpuTest(Case):
    """Cloud TPU."""

    def test_a_node(self) -> None:
        body = {"acceleratorType": "v5litepod-1", "labels": {"rig": "a"}}
        operation = self.good("POST", self.tpus("nodes", rest="?nodeId=n"), body)
        self.assertTrue(operation["done"])
        self.assertTrue(operation["metadata"]["target"].endswith("/nodes/n"))
        self.assertTrue(operation["metadata"]["target"].startswith(f"projects/{PROJECT}/"))
        found = self.good("GET", self.tpus("nodes", rest="/n"))
        self.assertEqual((found["state"], found["labels"]), ("READY", {"rig": "a"}))
        refused = self.bad("POST", self.tpus("nodes", rest="?nodeId=n"), body)
        self.assertEqual(refused[:2], (409, "ALREADY_EXISTS"))
        self.cloud.preempt("n")
        self.assertEqual(self.good("GET", self.tpus("nodes", rest="/n"))["state"], "PREEMPTED")
        self.good("DELETE", self.tpus("nodes", rest="/n"))
        self.assertEqual(self.bad("GET", self.tpus("nodes", rest="/n"))[0], 404)

    def test_the_refusals_of_a_node(self) -> None:
        path = self.tpus("nodes", rest="?nodeId=n")
        self.script.stockout.add("us-west4-a")
        operation = self.good("POST", path, {})
        self.assertEqual(operation["error"]["code"], 8)
        self.assertIn("There is no more capacity in the zone", operation["error"]["message"])
        self.script.quota.add("us-west4-a")
        self.assertEqual(self.bad("POST", path, {})[:2], (429, "RESOURCE_EXHAUSTED"))
        self.script.denied.add("us-west4-a")
        self.assertIn("(or it may not exist)", self.bad("POST", path, {})[2])
        self.assertEqual(self.cloud.held(), {})

    def test_a_queued_resource_goes_its_way(self) -> None:
        self.script.queue_s = 600
        self.queued(runDuration={"maxRunDuration": "14400s"}, provisioningModel="FLEX_START")
        states = [self.state()]
        for seconds in (1, 599, 1, 1):
            self.cloud.advance(seconds)
            states.append(self.state())
        wanted = ["ACCEPTED", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING"]
        self.assertEqual(states, [*wanted, "ACTIVE"])
        self.assertEqual(self.cloud.held(), {"nodes": ["q-node"], "queued": ["q"]})
        self.cloud.advance(14_399)
        self.assertEqual(self.state(), "ACTIVE")
        self.cloud.advance(1)
        self.assertEqual(self.state(), "SUSPENDED")
        self.assertEqual(self.cloud.held(), {"queued": ["q"]}, "the dead request holds its name")

    def test_the_clock_may_go_far_at_once(self) -> None:
        self.queued(runDuration={"maxRunDuration": "60s"})
        self.cloud.advance(30 * 24 * HOUR)
        self.assertEqual(self.state(), "SUSPENDED")
        self.assertEqual(self.cloud.held(), {"queued": ["q"]})

    def test_a_dead_request_keeps_its_name_until_it_is_deleted(self) -> None:
        self.script.quota.add("us-west4-a")
        self.queued()
        self.assertEqual(self.state(), "FAILED")
        found = self.good("GET", self.tpus("queuedResources", rest="/q"))
        self.assertIn("Limit: 0 in zone us-west4-a", json.dumps(found["state"]["failedData"]))
        again = self.tpus("queuedResources", rest="?queuedResourceId=q")
        self.assertEqual(self.bad("POST", again, {})[:2], (409, "ALREADY_EXISTS"))
        self.good("DELETE", self.tpus("queuedResources", rest="/q"))
        self.script.quota.clear()
        self.queued()

    def test_a_request_that_waits_too_long_fails(self) -> None:
        self.script.never.add("us-west4-a")
        self.queued(queueingPolicy={"validUntilDuration": "7200s"})
        self.cloud.advance(7199)
        self.assertEqual(self.state(), "WAITING_FOR_RESOURCES")
        self.cloud.advance(1)
        self.assertEqual(self.state(), "FAILED")
        self.assertEqual(self.cloud.held(), {"queued": ["q"]})

    def test_a_stockout_is_a_wait_without_an_end(self) -> None:
        self.script.stockout.add("us-west4-a")
        self.queued()
        self.cloud.advance(100 * HOUR)
        self.assertEqual(self.state(), "WAITING_FOR_RESOURCES")

    def test_the_delete_of_an_active_one_needs_force_and_takes_the_node(self) -> None:
        self.queued()
        self.assertEqual(self.state(), "ACTIVE")
        path = self.tpus("queuedResources", rest="/q")
        self.assertEqual(self.bad("DELETE", path)[:2], (400, "FAILED_PRECONDITION"))
        self.good("DELETE", f"{path}?force=True")
        self.assertEqual(self.cloud.held(), {})

    def test_deletes_and_creates_take_their_time(self) -> None:
        self.queued()
        self.good("POST", self.tpus("nodes", rest="?nodeId=n"), {})
        self.script.operation_s = 30
        self.good("DELETE", self.tpus("queuedResources", rest="/q?force=true"))
        self.good("DELETE", self.tpus("nodes", rest="/n"))
        self.assertEqual(self.state(), "DELETING")
        self.assertEqual(self.good("GET", self.tpus("nodes", rest="/n"))["state"], "DELETING")
        self.cloud.advance(30)
        self.assertEqual(self.cloud.held(), {})
        self.script.lag_s = 5
        self.queued("late")
        self.assertEqual(self.bad("GET", self.tpus("queuedResources", rest="/late"))[0], 404)
        self.assertEqual(self.good("GET", self.tpus("queuedResources"))["queuedResources"], [])
        self.cloud.advance(5)
        self.assertEqual(self.state("late"), "ACTIVE")

    def test_a_preempted_one_is_suspended(self) -> None:
        self.queued(spot={})
        self.assertEqual(self.state(), "ACTIVE")
        self.cloud.preempt("q-node")
        self.assertEqual(self.state(), "SUSPENDED")
        self.assertEqual(self.cloud.held(), {"queued": ["q"]})

    def test_a_delete_that_does_not_take(self) -> None:
        self.script.stubborn.add("q")
        self.queued()
        path = self.tpus("queuedResources", rest="/q?force=true")
        self.assertTrue(self.good("DELETE", path)["done"])
        self.assertEqual(self.state(), "ACTIVE")

    def test_a_list_over_all_zones_names_what_it_could_not_read(self) -> None:
        self.queued()
        self.good("POST", self.tpus("nodes", "us-east5-a", "?nodeId=n"), {})
        self.script.unreachable.add("us-west4-a")
        found = self.good("GET", self.tpus("nodes", "-"))
        self.assertEqual([one["name"].rsplit("/", 1)[-1] for one in found["nodes"]], ["n"])
        self.assertEqual(found["unreachable"], [f"projects/{PROJECT}/locations/us-west4-a"])
        self.assertEqual(self.bad("GET", self.tpus("nodes"))[:2], (503, "UNAVAILABLE"))

    def test_an_operation_takes_its_time(self) -> None:
        self.script.operation_s = 5
        operation = self.queued()
        self.assertFalse(operation["done"])
        self.assertNotIn("response", operation)
        path = f"/tpu/v2/{operation['name']}"
        self.assertFalse(self.good("GET", path)["done"])
        self.cloud.advance(5)
        done = self.good("GET", path)
        self.assertTrue(done["done"])
        self.assertIn("response", done)

    def test_what_a_zone_has(self) -> None:
        path = f"/tpu/v1/projects/{PROJECT}/locations/us-west4-a"
        types = self.good("GET", f"{path}/acceleratorTypes")["acceleratorTypes"]
        self.assertEqual([one["type"] for one in types], ["v5litepod-1", "v5litepod-4"])
        versions = self.good("GET", f"{path}/runtimeVersions")["runtimeVersions"]
        self.assertIn("v2-alpha-tpuv5-lite", [one["version"] for one in versions])
        places = self.good("GET", f"/tpu/v2/projects/{PROJECT}/locations")["locations"]
        self.assertIn("us-west4-a", [one["locationId"] for one in places])
        self.assertEqual(self.bad("GET", f"{path}/rockets")[0], 404)
        self.assertEqual(self.bad("GET", self.tpus("nodes", "us-nowhere1-a"))[0], 403)


class ServiceTest(Case):
    """Secret Manager, Cloud Logging, OS Login."""

    def test_a_secret_is_kept_and_its_payload_is_in_no_record(self) -> None:
        root = f"/v1/projects/{PROJECT}/secrets"
        payload = base64.b64encode(b"a canary that nobody may see").decode()
        self.good("POST", f"{root}?secretId=hf-token", {"replication": {"automatic": {}}})
        self.assertEqual(self.bad("GET", f"{root}/hf-token/versions/latest:access")[0], 404)
        body = {"payload": {"data": payload, "dataCrc32c": "1"}}
        added = self.good("POST", f"{root}/hf-token:addVersion", body)
        self.assertTrue(added["clientSpecifiedPayloadChecksum"])
        read = self.good("GET", f"{root}/hf-token/versions/latest:access")
        self.assertEqual(read["payload"]["data"], payload)
        self.assertEqual(len(self.good("GET", f"{root}/hf-token/versions")["versions"]), 1)
        self.assertEqual(len(self.good("GET", root)["secrets"]), 1)
        self.assertNotIn(payload, repr(self.cloud.requests))
        self.assertNotIn("hidden-from-the-record", repr(self.cloud.requests))
        refused = self.bad("POST", f"{root}?secretId=hf-token", {})
        self.assertEqual(refused[:2], (409, "ALREADY_EXISTS"))
        self.assertEqual(self.cloud.held(), {"secrets": ["hf-token"]})
        self.good("DELETE", f"{root}/hf-token")
        self.assertEqual(self.bad("GET", f"{root}/hf-token")[0], 404)

    def test_log_entries(self) -> None:
        self.cloud.logging.add({"textPayload": "boot", "severity": "INFO"})
        self.cloud.advance(60)
        name = f"projects/{PROJECT}/logs/rig"
        entries = [{"textPayload": "out of memory", "severity": "ERROR"}]
        self.good("POST", "/v2/entries:write", {"logName": name, "entries": entries})
        path, names = "/v2/entries:list", [f"projects/{PROJECT}"]
        read = {"resourceNames": names, "filter": "severity>=WARNING", "pageSize": 10}
        (found,) = self.good("POST", path, read)["entries"]
        self.assertEqual((found["textPayload"], found["logName"]), ("out of memory", name))
        newest = {"resourceNames": names, "orderBy": "timestamp desc", "pageSize": 1}
        answer = self.good("POST", path, newest)
        self.assertEqual(answer["entries"][0]["textPayload"], "out of memory")
        self.assertIn("nextPageToken", answer)
        foreign = {"resourceNames": ["projects/other"], "filter": ""}
        self.assertEqual(self.bad("POST", path, foreign)[0], 403)

    def test_filters(self) -> None:
        entry = {
            "timestamp": "2026-01-02T00:00:00.000Z",
            "severity": "ERROR",
            "resource": {"type": "gce_instance", "labels": {"zone": "us-east5-b"}},
            "textPayload": "oh no",
        }
        for expression, wanted in (
            ("", True),
            ('resource.type="gce_instance"', True),
            ('resource.type="other"', False),
            ('resource.labels.zone="us-east5-b" AND severity>=ERROR', True),
            ('timestamp>="2026-01-01T00:00:00Z"', True),
            ('timestamp>="2026-01-03T00:00:00Z"', False),
            ('textPayload:"no"', True),
            ('severity!="ERROR"', False),
            ("severity<=INFO", False),
        ):
            self.assertEqual(log_matches(expression, entry), wanted, expression)

    def test_a_login_profile(self) -> None:
        path = "/v1/users/me@example.com"
        done = self.good("POST", f"{path}:importSshPublicKey", {"key": "ssh-ed25519 AAAA"})
        self.assertIn("loginProfile", done)
        profile = self.good("GET", f"{path}/loginProfile")
        self.assertEqual(profile["posixAccounts"][0]["username"], "me_example_com")
        self.assertEqual(profile["sshPublicKeys"], {"0": {"key": "ssh-ed25519 AAAA"}})

    def test_a_foreign_project_and_a_service_that_is_off(self) -> None:
        for path in (
            *("/compute/v1/projects/other/zones", "/v1/projects/other/secrets"),
            *("/tpu/v2/projects/other/locations", "/v1/projects/other"),
        ):
            refused = self.bad("GET", path)
            self.assertEqual(refused[:2], (403, "PERMISSION_DENIED"), path)
            self.assertIn("Permission denied on resource project other", refused[2])
        self.script.disabled.update(("compute", "tpu", "secrets"))
        for path, host in (
            (f"/compute/v1/projects/{PROJECT}/zones", "compute.googleapis.com"),
            (f"/tpu/v2/projects/{PROJECT}/locations", "tpu.googleapis.com"),
            (f"/v1/projects/{PROJECT}/secrets", "secretmanager.googleapis.com"),
        ):
            status, answer = self.ask("GET", path)
            self.assertEqual(status, 403)
            self.assertIn(f"apis/api/{host}/overview", answer["error"]["message"])
            self.assertEqual(answer["error"]["details"][0]["reason"], "SERVICE_DISABLED")

    def test_projects_and_services_looked_at_by_the_way(self) -> None:
        self.assertEqual(self.good("GET", f"/v1/projects/{PROJECT}")["projectId"], PROJECT)
        path = f"/v1/projects/{PROJECT}/services/compute.googleapis.com"
        self.assertEqual(self.good("GET", path)["state"], "ENABLED")
        for path in ("/v1/rockets", "/compute/v1/x", "/tpu/v2/x", "/v2/entries:burn"):
            self.assertEqual(self.bad("GET", path)[0], 404)


class ServerTest(Case):
    """The server itself: its record, what it refuses, how it fails and how it ends."""

    def test_the_record_has_every_request_with_its_body(self) -> None:
        self.good("POST", self.machines(rest="?alt=json"), self.machine("x"))
        self.bad("GET", "/nowhere")
        first, second = self.cloud.requests
        self.assertEqual((first.method, first.path), ("POST", self.machines()))
        self.assertEqual((first.query, first.body["name"]), ({"alt": "json"}, "x"))
        self.assertNotIn("_name", json.dumps(first.body), "the record is what was sent")
        self.assertEqual((second.path, second.body), ("/nowhere", None))

    def test_a_request_to_any_other_host_is_refused_and_noted(self) -> None:
        for target in ("http://metadata.google.internal/x", "http://127.0.0.1:1/x"):
            status, _page = self.ask("GET", target)
            self.assertEqual(status, 403)
        with socket.create_connection(("127.0.0.1", self.cloud.port), 30) as line:
            line.sendall(b"CONNECT oauth2.googleapis.com:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertTrue(line.recv(100).startswith(b"HTTP/1.1 403"))
        wanted = ["metadata.google.internal", "127.0.0.1:1", "oauth2.googleapis.com:443"]
        self.assertEqual(self.cloud.escapes, wanted)
        self.assertEqual(self.cloud.requests, [])
        own = self.good("GET", f"{self.cloud.base}/v1/projects/{PROJECT}")
        self.assertEqual(own["projectId"], PROJECT)
        self.assertEqual(self.cloud.escapes, wanted, "itself as a proxy is no escape")

    def test_a_change_whose_answer_never_arrives_is_made(self) -> None:
        self.script.lost = 1
        with self.assertRaises(TimeoutError):
            self.ask("POST", self.machines(), self.machine(), timeout_s=0.5)
        self.assertEqual(self.cloud.held()["instances"], ["vm"])
        self.assertEqual(self.good("GET", self.machines(rest="/vm"))["status"], "RUNNING")
        self.good("DELETE", self.machines(rest="/vm"))

    def test_a_change_whose_answer_is_cut_off_is_made(self) -> None:
        self.script.lost, self.script.lost_by = 1, "cut"
        with self.assertRaises(http.client.RemoteDisconnected):
            self.ask("POST", self.machines(), self.machine())
        self.assertEqual(self.cloud.held()["instances"], ["vm"])

    def test_a_refused_change_is_not_the_one_that_is_lost(self) -> None:
        self.script.lost = 1
        self.script.denied.add(ZONE)
        self.assertEqual(self.bad("POST", self.machines(), self.machine())[0], 403)
        self.assertEqual(self.script.lost, 1)

    def test_a_page_instead_of_an_answer(self) -> None:
        self.script.html = 1
        status, page = self.ask("GET", self.machines())
        self.assertEqual((status, page[:15]), (502, b"<!DOCTYPE html>"))
        self.assertEqual(self.good("GET", self.machines()), {"items": []})

    def test_what_is_no_json(self) -> None:
        line = http.client.HTTPConnection("127.0.0.1", self.cloud.port, timeout=30)
        self.addCleanup(line.close)
        line.request("POST", self.machines(), b"{broken")
        self.assertEqual(line.getresponse().status, 400)
        self.assertEqual(self.cloud.held(), {})

    def test_a_body_in_chunks(self) -> None:
        line = http.client.HTTPConnection("127.0.0.1", self.cloud.port, timeout=30)
        self.addCleanup(line.close)
        data = json.dumps(self.machine()).encode()
        line.request("POST", self.machines(), iter([data[:20], data[20:]]), encode_chunked=True)
        self.assertEqual(line.getresponse().status, 200)
        self.assertEqual(self.cloud.held()["instances"], ["vm"])

    def test_many_at_once_make_one_machine(self) -> None:
        answers: list[int] = []

        def make() -> None:
            answers.append(self.ask("POST", self.machines(), self.machine())[0])

        threads = [threading.Thread(target=make) for _number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(sorted(answers), [200] + [409] * 11)
        self.assertEqual(self.cloud.held()["instances"], ["vm"])

    def test_durations(self) -> None:
        for form, wanted in (
            ("14400s", 14400),
            ({"seconds": "60"}, 60),
            (None, 0),
            ({}, 0),
            ("", 0),
        ):
            self.assertEqual(seconds_of(form), wanted)

    def test_a_wrapper_notes_and_hands_on(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            real = folder / "real"
            real.write_text(f"#!{sys.executable}\nimport sys; print(sys.argv[1:])\n")
            real.chmod(0o755)
            flexible = ["compute", "instances", "create", "vm", "--provisioning-model=FLEX_START"]
            flexible.append("--request-valid-for-duration=2h")
            for reroute, given, wanted in (
                (True, flexible, ["alpha", *flexible[:-1]]),
                (False, flexible, flexible),
                (True, ["compute", "instances", "list"], ["compute", "instances", "list"]),
            ):
                journal = gcloud_wrapper(folder / "bin", str(real), reroute=reroute)
                program = [str(folder / "bin" / "gcloud"), *given]
                ended = subprocess.run(program, capture_output=True, text=True, check=True)
                self.assertEqual(ended.stdout.strip(), repr(wanted))
                self.assertEqual(json.loads(journal.read_text().splitlines()[-1])[1:], given)


class EndTest(unittest.TestCase):
    """How it dies."""

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not what():
            self.assertLess(time.monotonic(), deadline, "it did not come")
            time.sleep(0.01)

    def test_the_port_is_free_again_and_nobody_is_kept_waiting(self) -> None:
        cloud = FakeGoogle()
        cloud.start()
        self.addCleanup(cloud.stop)
        cloud.script.lost = 1
        port = cloud.port
        before = threading.active_count()
        idle = socket.create_connection(("127.0.0.1", port), 30)
        held = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.addCleanup(idle.close)
        self.addCleanup(held.close)
        held.request(
            "POST", f"/compute/v1/projects/fake-proj/zones/{ZONE}/instances", '{"name":"v"}'
        )
        self.wait_until(lambda: bool(cloud.held()))
        cloud.stop()
        with self.assertRaises((http.client.RemoteDisconnected, ConnectionError)):
            held.getresponse()
        self.assertEqual(idle.recv(10), b"")
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
        self.wait_until(lambda: threading.active_count() < before)
        cloud.stop()  # a second time does nothing

    def test_two_at_a_time_know_nothing_of_each_other(self) -> None:
        with FakeGoogle("first-proj") as first, FakeGoogle("second-proj") as second:
            self.assertNotEqual(first.port, second.port)
            first.script.stockout.add(ZONE)
            first.logging.add({"textPayload": "x"})
            self.assertEqual((second.script.stockout, second.logging.entries), (set(), []))

    def test_a_test_that_fails_ends_it_too(self) -> None:
        with self.assertRaises(ZeroDivisionError), FakeGoogle() as cloud:
            port = cloud.port
            raise ZeroDivisionError
        with self.assertRaises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


if __name__ == "__main__":
    unittest.main()
