"""Cloud Logging through Google's own client library, against a fake Google on loopback.

The fake understands the filter's language, so that what a filter lets through is what is tested,
and not its letters.
"""

from __future__ import annotations

import asyncio
import time
import unittest
from typing import Any

from forge.parts.boundaries.google_clients import GOOGLE_ENDPOINT_VARIABLE
from forge.parts.boundaries.google_logs import (
    CLOUD_LOG_ENTRIES,
    LoggedMachine,
    rig_log_filter,
    rig_log_text,
)
from forge.parts.ground.errors import RigError
from forge.suites.fake_google import FakeGoogle
from forge.suites.fake_google_services import log_matches
from forge.suites.fake_google_world import GoogleRefusal

PROJECT, ZONE, NAME = "fake-proj", "us-east5-b", "tpu-vllm-v6e1-2b-1a2b3c"
MACHINE = LoggedMachine("gce_instance", NAME, ZONE, "7000000000000000001")
NODE = LoggedMachine("tpu_worker", NAME, ZONE, "42")
SERIAL = f"projects/{PROJECT}/logs/serialconsole.googleapis.com%2Fserial_port_1_output"
AUDIT = f"projects/{PROJECT}/logs/cloudaudit.googleapis.com%2Fsystem_event"


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        self.cloud = self.enterContext(FakeGoogle(PROJECT))

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60

    def wrote(self, text: Any, number: str = MACHINE.provider_id, **more: Any) -> None:
        """An entry of a Compute Engine machine, as its serial port's come."""
        payload = {"textPayload": text} if isinstance(text, str) else {"jsonPayload": text}
        place = {"project_id": PROJECT, "zone": ZONE, "instance_id": number}
        common: dict[str, Any] = {
            "logName": SERIAL,
            "resource": {"type": "gce_instance", "labels": place},
            "labels": {"compute.googleapis.com/resource_name": NAME},
            "severity": "INFO",
        }
        self.cloud.logging.add({**common, **payload, **more})

    def did(self, method: str, name: str = NAME, zone: str = ZONE, words: str = "") -> None:
        """An entry of the provider's audit log."""
        payload: dict[str, Any] = {
            "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
            "methodName": method,
            "resourceName": f"projects/{PROJECT}/zones/{zone}/instances/{name}",
            "authenticationInfo": {"principalEmail": "someone@example.com"},
            "request": {"metadata": {"items": [{"key": "k", "value": "v-of-metadata"}]}},
            "status": {"message": words} if words else {},
        }
        self.cloud.logging.add(
            {
                "logName": AUDIT,
                "protoPayload": payload,
                "severity": "NOTICE",
                "resource": {"type": "gce_instance", "labels": {"instance_id": "other"}},
            }
        )

    async def read(
        self, machine: LoggedMachine = MACHINE, minutes: int = 60, *rest: str, **more: Any
    ) -> list[str]:
        environment = {GOOGLE_ENDPOINT_VARIABLE: self.cloud.base}
        text = await rig_log_text(
            PROJECT, machine, minutes, *rest, **{"environment": environment, **more}
        )
        return text.splitlines()

    async def refused(self, error_class: str, **more: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await self.read(**more)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        return caught.exception


class ReadTest(Case):
    async def test_lines_oldest_first_with_stamp_and_severity(self) -> None:
        self.assertEqual(await self.read(), [])
        self.wrote("first\n")
        self.cloud.world.now += 61
        self.wrote("second", severity="ERROR")
        lines = await self.read()
        self.assertRegex(lines[0], r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO first\Z")
        self.assertRegex(lines[1], r"Z ERROR second\Z")
        self.assertLess(lines[0][:20], lines[1][:20])

    async def test_only_this_machine(self) -> None:
        self.wrote("ours")
        self.wrote("an earlier one of the name", number="7000000000000000000")
        self.wrote("a neighbour", number="8")
        self.wrote("no machine", resource={"type": "global", "labels": {}})
        for kind in ("gce_instance_group", "tpu_worker"):
            self.wrote("of another kind", resource={"type": kind, "labels": {}})
        self.assertEqual([line[26:] for line in await self.read()], ["ours"])

    async def test_by_name_also_those_that_are_gone(self) -> None:
        self.wrote("now")
        self.wrote("before", number="7000000000000000000")
        other = {"compute.googleapis.com/resource_name": f"{NAME}-q4"}
        self.wrote("a neighbour whose name begins so", number="9", labels=other)
        lines = await self.read(LoggedMachine("gce_instance", NAME, ZONE))
        self.assertEqual([line[26:] for line in lines], ["now", "before"])

    async def test_a_node_by_its_name_or_its_number(self) -> None:
        for node, text in (
            (NAME, "by name"),
            ("42", "by number"),
            ("43", "no"),
            (f"{NAME}x", "no"),
        ):
            labels = {"zone": ZONE, "node_id": node}
            self.wrote(text, resource={"type": "tpu_worker", "labels": labels})
        elsewhere = {"zone": "us-west4-a", "node_id": NAME}
        self.wrote("no", resource={"type": "tpu_worker", "labels": elsewhere})
        self.assertEqual([line[26:] for line in await self.read(NODE)], ["by name", "by number"])
        nameless = LoggedMachine("tpu_worker", NAME, ZONE)
        self.assertEqual([line[26:] for line in await self.read(nameless)], ["by name"])

    async def test_severity(self) -> None:
        for severity in ("DEFAULT", "INFO", "WARNING", "ERROR", "CRITICAL"):
            self.wrote("x", severity=severity)
        for least, wanted in (("DEFAULT", 5), ("INFO", 4), ("WARNING", 3), ("CRITICAL", 1)):
            self.assertEqual(len(await self.read(MACHINE, 60, least)), wanted, least)

    async def test_how_far_back(self) -> None:
        for minutes in (5, 90):
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60 * minutes))
            self.wrote(f"{minutes} min", timestamp=stamp)
        self.assertEqual([line[26:] for line in await self.read()], ["5 min"])
        self.assertEqual(len(await self.read(MACHINE, 10_080)), 2)

    async def test_what_the_machine_wrote_and_what_the_provider_did(self) -> None:
        self.wrote("boot")
        self.did("compute.instances.preempted", words="Instance was preempted.")
        self.did("v1.compute.instances.delete", name=f"{NAME}-2")
        self.did("v1.compute.instances.delete", name=f"x-{NAME}")
        self.did("v1.compute.instances.delete", zone="us-east5-a")
        machine = await self.read(MACHINE, 60, "DEFAULT", "machine")
        service = await self.read(MACHINE, 60, "DEFAULT", "service")
        self.assertEqual([line[26:] for line in machine], ["boot"])
        self.assertEqual(len(service), 1)
        self.assertTrue(service[0].endswith("Instance was preempted."), service)
        self.assertIn("compute.instances.preempted", service[0])
        self.assertEqual(sorted(await self.read()), sorted(machine + service))

    async def test_a_tpu_nodes_acts_and_its_requests(self) -> None:
        for kind in ("nodes", "queuedResources", "operations"):
            path = f"projects/1/locations/{ZONE}/{kind}/{NAME}"
            payload = {"methodName": f"tpu.{kind}.delete", "resourceName": path}
            self.cloud.logging.add({"logName": AUDIT, "protoPayload": payload})
        lines = await self.read(NODE, 60, "DEFAULT", "service")
        self.assertEqual(
            [line.split()[2] for line in lines],
            [
                "tpu.nodes.delete",
                "tpu.queuedResources.delete",
            ],
        )

    async def test_accounts_addresses_and_metadata_stay_out(self) -> None:
        self.did("v1.compute.instances.insert", words="done")
        [line] = await self.read()
        self.assertNotIn("example.com", line)
        self.assertNotIn("v-of-metadata", line)

    async def test_objects_by_their_message_or_without_their_secrets(self) -> None:
        self.wrote({"message": "in words", "level": 3})
        self.wrote({"a": 1, "hf_token": "plain", "deep": [{"api_key": "plain", "b": 2}]})
        lines = await self.read()
        self.assertTrue(lines[0].endswith(" in words"), lines)
        self.assertIn('"a": 1', lines[1])
        self.assertIn('"b": 2', lines[1])
        self.assertNotIn("plain", lines[1])

    async def test_hostile_text_is_data(self) -> None:
        self.wrote("hf_CANARYcanaryCANARYcanary0 \x1b[31mred\x1b[0m \u202eback\x00 \ud83d")
        self.wrote("many\nlines\nof one entry")
        lines = await self.read()
        self.assertTrue(lines[0].startswith("2"), lines)
        self.assertNotIn("CANARY", lines[0])
        self.assertNotRegex("".join(lines), "[\x00\x1b\u202e\ud800-\udfff]")
        self.assertEqual(lines[1].split()[-1], "many")
        self.assertEqual(lines[2:], ["lines", "of one entry"])

    async def test_the_newest_are_kept_and_it_is_said(self) -> None:
        for number in range(CLOUD_LOG_ENTRIES + 3):
            self.wrote(f"line {number}")
        self.cloud.script.page = 100
        lines = await self.read()
        self.assertEqual(len(lines), CLOUD_LOG_ENTRIES + 1)
        self.assertIn(f"newest {CLOUD_LOG_ENTRIES}", lines[0])
        self.assertTrue(lines[1].endswith(" line 3"), lines[1])
        self.assertTrue(lines[-1].endswith(f" line {CLOUD_LOG_ENTRIES + 2}"))
        asked = self.cloud.sent("POST", "/v2/entries:list")
        self.assertEqual(len(asked), 6)

    async def test_an_exact_number_is_whole(self) -> None:
        for number in range(CLOUD_LOG_ENTRIES):
            self.wrote(f"line {number}")
        self.assertTrue((await self.read())[0].endswith(" line 0"))

    async def test_a_text_of_any_length_is_bounded(self) -> None:
        for _ in range(150):
            self.wrote("x" * 50_000)
        text = "\n".join(await self.read())
        self.assertLess(len(text), 420_000)
        self.assertIn("left out", text)


class RefusalTest(Case):
    async def test_what_no_filter_may_hold(self) -> None:
        await self.refused("NOT_FOUND", machine=LoggedMachine("gce_instance", "", ""))
        for name in ('x" OR severity>="', "a/b", "-a", "A", "a\n", "x" * 64):
            await self.refused("INVALID", machine=LoggedMachine("gce_instance", name, ZONE))
        for zone in ('us-east5-b" OR "', "", "-", "us"):
            await self.refused("INVALID", machine=LoggedMachine("gce_instance", NAME, zone))
        for number in ("1 OR 2", "x", '"', "1" * 21):
            await self.refused("INVALID", machine=LoggedMachine("tpu_worker", NAME, ZONE, number))
        for minutes in (0, -1, 10_081):
            await self.refused("INVALID", minutes=minutes)
        self.assertEqual(self.cloud.requests, [])

    def test_severity_resource_and_project(self) -> None:
        for project, severity, resource in (
            ("Other", "INFO", "all"),
            (PROJECT, "info", "all"),
            (PROJECT, "INFO OR x", "all"),
            (PROJECT, "INFO", "everything"),
        ):
            with self.assertRaises(RigError) as caught:
                rig_log_filter(project, MACHINE, 0, severity, resource)
            self.assertEqual(caught.exception.error_class, "INVALID")

    async def test_what_the_provider_refuses(self) -> None:
        self.cloud.script.disabled.add("logging")
        refusal = await self.refused("DENIED")
        self.assertIn("services enable logging.googleapis.com", refusal.next_step)
        self.cloud.script.disabled.clear()
        self.cloud.script.html = 1
        await self.refused("UNREACHABLE")
        self.assertEqual(await self.read(), [])
        self.cloud.stop()
        await self.refused("UNREACHABLE")

    async def test_an_answer_that_does_not_come(self) -> None:
        self.cloud.script.lost = 1  # by its method a list of entries looks like a change
        await self.refused("TIMEOUT", timeout_s=0.5)

    async def test_a_foreign_project_is_refused(self) -> None:
        with self.assertRaises(RigError) as caught:
            environment = {GOOGLE_ENDPOINT_VARIABLE: self.cloud.base}
            await rig_log_text("other-proj", MACHINE, 60, environment=environment)
        self.assertEqual(caught.exception.error_class, "DENIED")


class FakeFilterTest(unittest.TestCase):
    """The fake's reading of the query language, on which the tests above rest."""

    def test_operators_and_their_order(self) -> None:
        entry = {"a": "1", "b": "two", "c": {"d.e/f": "x"}, "severity": "ERROR"}
        for expression, wanted in (
            ('a="1" b="two"', True),
            ('a="1" AND b="no"', False),
            ('a="0" OR b="two"', True),
            ('a="0" AND a="1" OR b="two"', False),  # OR binds closer than AND
            ('a="1" OR a="0" AND b="no"', False),
            ('NOT a="0" AND NOT (b="no" OR b="x")', True),
            ('c."d.e/f"="x"', True),
            ('b=~"^tw"', True),
            ('b=~"^wo"', False),
            ('b!~"^wo"', True),
            ("two", True),
            ("three", False),
            ("severity>WARNING", True),
            ("severity<ERROR", False),
            ('unknown="x"', False),
        ):
            self.assertEqual(log_matches(expression, entry), wanted, expression)

    def test_what_cannot_be_read_is_refused(self) -> None:
        for expression in ("(a=1", "a=1)", "AND a=1", "a=1 AND", "a=1 OR", "NOT", "()("):
            with self.assertRaises(GoogleRefusal, msg=expression) as caught:
                log_matches(expression, {})
            self.assertEqual(caught.exception.status, 400)


if __name__ == "__main__":
    unittest.main()
