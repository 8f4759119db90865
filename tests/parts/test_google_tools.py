"""The tools of a Google project, through a real client; secrets and logs against a fake Google.

The plane is the imaginary one with a Google project: it reads its logs through the boundary that
the real ones use, and its quotas stand in a table.
"""

from __future__ import annotations

import asyncio
import base64
import os
import unittest
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

from mcp import Client
from mcp.types import CallToolResult
from pydantic import Field

from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries.google_clients import GOOGLE_ENDPOINT_VARIABLE
from forge.parts.boundaries.google_logs import LoggedMachine, rig_log_text
from forge.parts.boundaries.hf_token import read_hf_token
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.planes.capacity_plane import Offer, Quota, RentalMarket
from forge.parts.toolsets.cloud_diagnosis import CloudLogResource, CloudLogSeverity
from forge.parts.toolsets.google_tools import (
    GoogleProjectToolset,
    GoogleQuotaToolset,
)
from forge.parts.toolsets.rental_costs import HubTokenSettings
from forge.suites.fake_google import FakeGoogle
from tests.imaginary.plane import ImaginaryPlane
from tests.imaginary.rig import RIG, ImaginaryRigSettings
from tests.imaginary_case import Caller, ImaginaryCase, text_of

PROJECT, ZONE, OTHER = "fake-proj", "us-east5-b", "europe-west4-a"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY10"
MACHINE = LoggedMachine("gce_instance", "tpu-vllm-imaginary-2b-0a1b2c", ZONE, "77")


class ProjectSettings(ImaginaryRigSettings, HubTokenSettings):
    project: str = PROJECT
    hf_secret: str = Field(default="hf-token")


class ProjectPlane(ImaginaryPlane):
    """Counts how many quotas are asked for at once; `refusals` are by zone and market."""

    places: tuple[tuple[str, RentalMarket, float | None], ...] = ()
    quotas: dict[str, tuple[int, int]] = {}
    refusals: dict[tuple[str, str], ErrorClass] = {}
    asked: list[tuple[str, str]] = []
    at_once = most = 0

    async def offers(self) -> Sequence[Offer]:
        words = ("list of 2026-11-29", "unknown", "the provider tells on a create")
        return [
            Offer(zone, market, price, words[0], "unknown", words[2])
            for zone, market, price in self.places
        ]

    async def quota(self, zone: str, market: RentalMarket) -> Quota:
        kind = ProjectPlane
        kind.at_once += 1
        kind.most = max(kind.most, kind.at_once)
        kind.asked.append((zone, market))
        await asyncio.sleep(0.01)
        kind.at_once -= 1
        refusal = self.refusals.get((zone, market))
        if refusal:
            raise RigError(refusal, "the quota cannot be read")
        limit, used = self.quotas.get(f"{zone} {market}", (0, 0))
        return Quota("TPUS", limit, used)

    async def read_cloud_logs(
        self, minutes: int, severity: CloudLogSeverity, resource: CloudLogResource
    ) -> str:
        return await rig_log_text(PROJECT, MACHINE, minutes, severity, resource)


class Case(ImaginaryCase):
    def setUp(self) -> None:
        # The rig is put together from its parts here: its folder needs no bundled server.
        with mock.patch("tests.imaginary_case.bundled", lambda: ("# not run\n", ())):
            super().setUp()
        self.cloud = self.enterContext(FakeGoogle(PROJECT))
        self.home = self.folder / "home"
        self.home.mkdir()
        around = {GOOGLE_ENDPOINT_VARIABLE: self.cloud.base, "HOME": str(self.home)}
        self.enterContext(mock.patch.dict(os.environ, around))
        for name in ("HF_TOKEN", "HF_TOKEN_FILE"):
            os.environ.pop(name, None)
        places: list[tuple[str, RentalMarket, float | None]] = [
            (ZONE, "flex-start", 1.35),
            (ZONE, "spot", 1.215),
            (OTHER, "flex-start", 1.35),
            (OTHER, "on-demand", None),
        ]
        fresh: dict[str, Any] = {"places": tuple(places), "quotas": {}, "refusals": {}}
        for name, value in {**fresh, "asked": [], "at_once": 0, "most": 0}.items():
            self.enterContext(mock.patch.object(ProjectPlane, name, value))

    def rig(self, folder: Path | None = None) -> AssembledRig:
        rig = replace(
            RIG,
            settings=ProjectSettings,
            make_plane=cast(Any, ProjectPlane),
            toolsets=(GoogleProjectToolset, GoogleQuotaToolset),
        )
        return AssembledRig(rig, (folder or self.rig_folder) / "server.py")

    @asynccontextmanager
    async def tools(self, folder: Path | None = None) -> Any:
        async with Client(self.rig(folder).server()) as client:
            yield Caller(client, self)

    def set(self, **settings: str) -> None:
        with (self.rig_folder / "tpu.env").open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in settings.items())

    def token_file(self, text: str = f"{CANARY}\n", mode: int = 0o600) -> Path:
        path = self.home / "token"
        path.write_text(text)
        path.chmod(mode)
        return path

    def stored(self) -> list[str]:
        found = self.cloud.secrets.payloads.get("hf-token", [])
        return [base64.b64decode(one).decode() for one in found]


class SaveTokenTest(Case):
    async def test_from_the_environment(self) -> None:
        os.environ["HF_TOKEN"] = f"  {CANARY}\n"
        async with self.tools() as caller:
            result: CallToolResult = await caller.client.call_tool("save_hf_token", {})
        self.assertFalse(result.is_error, text_of(result))
        self.assertNotIn("CANARY", result.model_dump_json())
        done = result.structured_content or {}
        self.assertEqual((done["project"], done["secret"]), (PROJECT, "hf-token"))
        self.assertEqual((done["version"], done["made"], done["older_enabled"]), (1, True, []))
        self.assertIn("HF_TOKEN", done["taken_from"])
        self.assertEqual(self.stored(), [CANARY])
        labels = {"managed-by": "gemma4-rigs", "rig": "tpu-vllm-imaginary-2b"}
        self.assertEqual(self.cloud.secrets.labels["hf-token"], labels)

    async def test_from_a_private_file(self) -> None:
        path = self.token_file()
        self.set(HF_TOKEN_FILE=str(path))
        async with self.tools() as caller:
            done = await caller.ok("save_hf_token")
            self.assertIn("HF_TOKEN_FILE", done["taken_from"])
            self.assertEqual(self.stored(), [CANARY])
            os.environ["HF_TOKEN"] = "hf_theEnvironmentWins"
            done = await caller.ok("save_hf_token")
        self.assertEqual(self.stored(), [CANARY, "hf_theEnvironmentWins"])
        self.assertEqual(done["older_enabled"], [1])
        self.assertIn("versions destroy 1 --secret=hf-token", done["next_step"])

    async def test_from_a_file_named_in_the_environment_below_home(self) -> None:
        self.token_file()
        os.environ["HF_TOKEN_FILE"] = "~/token"
        async with self.tools() as caller:
            await caller.ok("save_hf_token")
        self.assertEqual(self.stored(), [CANARY])

    async def test_without_a_token_it_says_where_a_person_puts_it(self) -> None:
        async with self.tools() as caller:
            text = await caller.fails("AUTH", "save_hf_token")
            self.assertIn("HF_TOKEN_FILE in tpu.env", text)
            self.assertIn("never into a chat", text)
            for empty in ("", " \n"):
                self.set_file(empty)
                await caller.fails("AUTH", "save_hf_token")
        self.assertEqual(self.cloud.requests, [])

    def set_file(self, text: str) -> None:
        os.environ["HF_TOKEN_FILE"] = str(self.token_file(text))

    async def test_it_takes_no_token(self) -> None:
        async with self.tools() as caller:
            listed = {tool.name: tool for tool in (await caller.client.list_tools()).tools}
            self.assertEqual(listed["save_hf_token"].input_schema.get("properties", {}), {})
            for name in ("token", "hf_token", "file", "project"):
                text = await caller.fails("INVALID", "save_hf_token", **{name: CANARY})
                self.assertNotIn("CANARY", text)
        self.assertEqual(self.cloud.requests, [])

    async def test_a_refusal_of_the_store_is_passed_on(self) -> None:
        os.environ["HF_TOKEN"] = CANARY
        self.cloud.script.disabled.add("secrets")
        async with self.tools() as caller:
            text = await caller.fails("DENIED", "save_hf_token")
        self.assertIn("secretmanager.googleapis.com", text)
        self.assertNotIn("CANARY", text)

    async def test_read_only_and_no_secret_named(self) -> None:
        os.environ["HF_TOKEN"] = CANARY
        self.set(HF_SECRET="''")
        async with self.tools() as caller:
            await caller.ok("save_hf_token")  # empty counts as not set: the default's name
        with mock.patch("tests.imaginary_case.bundled", lambda: ("# not run\n", ())):
            folder = self.new_rig_folder("readonly", RIG_READ_ONLY="1")
        async with self.tools(folder) as caller:
            await caller.fails("DENIED", "save_hf_token")
        self.assertEqual(len(self.stored()), 1)

    async def test_the_token_stands_nowhere_on_disk(self) -> None:
        self.set(HF_TOKEN_FILE=str(self.token_file()))
        async with self.tools() as caller:
            await caller.ok("save_hf_token")
        kept = [p for p in self.folder.rglob("*") if p.is_file() and p.parent != self.home]
        self.assertTrue(any(path.name == "journal.jsonl" for path in kept))
        self.assertEqual([p for p in kept if b"CANARY" in p.read_bytes()], [])


class TokenFileTest(Case):
    """Which files are taken for private."""

    def refused(self, error_class: str, named: str) -> str:
        with self.assertRaises(RigError) as caught:
            read_hf_token(named)
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        self.assertNotIn("CANARY", str(caught.exception))
        return str(caught.exception)

    def test_modes(self) -> None:
        for mode in (0o600, 0o400, 0o700):
            self.assertEqual(read_hf_token(str(self.token_file(mode=mode)))[0], CANARY)
            self.token_file().unlink()
        for mode in (0o644, 0o640, 0o604, 0o620, 0o602, 0o601, 0o666):
            self.assertIn(f"{mode:04o}", self.refused("DENIED", str(self.token_file(mode=mode))))

    def test_links_folders_pipes_and_what_is_not_there(self) -> None:
        path = self.token_file()
        link, pipe = self.home / "link", self.home / "pipe"
        link.symlink_to(path)
        os.mkfifo(pipe, 0o600)
        missing = self.home / "missing"
        for named in (link, self.home, pipe, missing, Path("/dev/null")):
            self.refused("DENIED", str(named))
        self.refused("INVALID", "token")
        self.refused("INVALID", "./token")

    def test_another_users(self) -> None:
        path = self.token_file()
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            self.assertIn("another user", self.refused("DENIED", str(path)))

    def test_what_is_no_token(self) -> None:
        for text in (
            "sk-CANARY",
            f"{CANARY}\n{CANARY}",
            f"HF_TOKEN={CANARY}",
            f"{CANARY} x",
            "hf_",
            f'"{CANARY}"',
            f"{CANARY}\x00",
            "hf_" + "A" * 501,
        ):
            self.refused("INVALID", str(self.token_file(text)))
            with mock.patch.dict(os.environ, {"HF_TOKEN": text.replace("\x00", "\x01")}):
                self.refused("INVALID", "")
        self.refused("DENIED", str(self.token_file("hf_" + "A" * 5000)))


class CloudLogTest(Case):
    def wrote(self, text: str, severity: str = "INFO") -> None:
        labels = {"instance_id": MACHINE.provider_id, "zone": ZONE}
        place = {"type": "gce_instance", "labels": labels}
        self.cloud.logging.add({"textPayload": text, "resource": place, "severity": severity})

    async def read(self, **arguments: Any) -> str:
        async with self.tools() as caller:
            result = await caller.client.call_tool("get_cloud_logging_logs", arguments)
        self.assertFalse(result.is_error, text_of(result))
        self.assertIsNone(result.structured_content)
        return text_of(result)

    async def test_entries_as_they_are(self) -> None:
        self.assertIn("no such entry of the last 60 minutes", await self.read())
        self.wrote("GEMMA4-BOOT image begin 1")
        self.wrote("it broke hf_CANARYcanaryCANARYcanary1", "ERROR")
        text = await self.read()
        self.assertEqual(len(text.splitlines()), 2)
        self.assertIn("INFO GEMMA4-BOOT image begin 1", text)
        self.assertNotIn("CANARY", text)
        self.assertNotIn("BOOT", await self.read(severity="ERROR"))
        self.assertIn("no such entry", await self.read(resource="service", minutes=5))

    async def test_bounds_and_refusals(self) -> None:
        async with self.tools() as caller:
            for wrong in (
                {"minutes": 0},
                {"minutes": 10_081},
                {"severity": "x"},
                {"resource": "projects/other"},
                {"filter": "severity>=ERROR"},
            ):
                await caller.fails("INVALID", "get_cloud_logging_logs", **wrong)
            self.assertEqual(self.cloud.requests, [])
            self.cloud.script.disabled.add("logging")
            await caller.fails("DENIED", "get_cloud_logging_logs")


class QuotaTest(Case):
    async def test_every_zone_and_market_those_with_room_first(self) -> None:
        ProjectPlane.quotas = {
            f"{ZONE} flex-start": (1, 1),
            f"{ZONE} spot": (4, 1),
            f"{OTHER} flex-start": (0, 0),
            f"{OTHER} on-demand": (8, 9),
        }
        async with self.tools() as caller:
            done = await caller.ok("get_zones_with_quota")
        rows = [(row["zone"], row["market"], row["free"]) for row in done["places"]]
        self.assertEqual(rows[0], (ZONE, "spot", 3))
        self.assertEqual([free for _, _, free in rows[1:]], [0, 0, 0])
        self.assertIn("1 of 4 places", done["summary"])
        self.assertEqual((done["next_step"], done["unread"]), ("find_tpu()", []))
        self.assertEqual(self.world.look()["calls"], [])

    async def test_no_room_anywhere(self) -> None:
        async with self.tools() as caller:
            done = await caller.ok("get_zones_with_quota")
        self.assertIn("requests more", done["next_step"])

    async def test_few_at_once_and_not_without_end(self) -> None:
        ProjectPlane.places = tuple((f"us-east{n}-b", "spot", 1.0) for n in range(1, 31))
        async with self.tools() as caller:
            done = await caller.ok("get_zones_with_quota")
        self.assertEqual(ProjectPlane.most, 3)
        self.assertEqual(len(ProjectPlane.asked), 24)
        self.assertEqual(len(done["places"]), 24)
        self.assertEqual(len(done["unread"]), 6)
        self.assertIn("us-east30-b", done["unread"][-1])

    async def test_what_is_not_read_is_told_and_never_counted_as_none(self) -> None:
        ProjectPlane.quotas = {f"{ZONE} spot": (1, 0)}
        ProjectPlane.refusals = {(ZONE, "flex-start"): "TIMEOUT", (OTHER, "on-demand"): "UNKNOWN"}
        async with self.tools() as caller:
            done = await caller.ok("get_zones_with_quota")
        self.assertEqual(len(done["places"]), 2)
        self.assertEqual(
            done["unread"],
            [
                f"{ZONE} flex-start: TIMEOUT the quota cannot be read",
                f"{OTHER} on-demand: UNKNOWN the quota cannot be read",
            ],
        )
        self.assertIn("2 were not read", done["summary"])

    async def test_nothing_read_at_all_is_a_failure(self) -> None:
        for zone, market, _ in ProjectPlane.places:
            ProjectPlane.refusals[(zone, market)] = "AUTH"
        async with self.tools() as caller:
            await caller.fails("AUTH", "get_zones_with_quota")
            ProjectPlane.refusals[(ZONE, "on-demand")] = "AUTH"
            await caller.fails("AUTH", "check_quota", zone=ZONE)

    async def test_one_zone_in_the_rigs_markets(self) -> None:
        ProjectPlane.quotas = {f"{ZONE} spot": (2, 0)}
        self.set(MARKETS="'spot, flex-start'")
        async with self.tools() as caller:
            done = await caller.ok("check_quota", zone=ZONE)
        self.assertEqual(ProjectPlane.asked, [(ZONE, "spot"), (ZONE, "flex-start")])
        self.assertEqual(done["places"][0]["quota"], "TPUS")

    async def test_without_markets_those_on_offer_and_no_unknown_word(self) -> None:
        async with self.tools() as caller:
            await caller.ok("check_quota", zone="us-west4-a")
            asked = {market for _, market in ProjectPlane.asked}
            self.assertEqual(asked, {"flex-start", "spot", "on-demand"})
        ProjectPlane.asked.clear()
        self.set(MARKETS="spot,cheap")
        async with self.tools() as caller:
            await caller.ok("check_quota", zone=ZONE)
            self.assertEqual(ProjectPlane.asked, [(ZONE, "spot")])
            for zone in ("", "US", "us-east5-b/x", "../x", "-"):
                await caller.fails("INVALID", "check_quota", zone=zone)


class CostTest(Case):
    async def test_hours_by_price_with_its_source_cheapest_first(self) -> None:
        async with self.tools() as caller:
            done = await caller.ok("estimate_deployment_cost", hours=2)
        rows = [(row["zone"], row["market"], row["usd"]) for row in done["places"]]
        self.assertEqual(rows[0], (ZONE, "spot", 2.43))
        self.assertEqual(rows[-1], (OTHER, "on-demand", None))
        self.assertIn("2026-11-29", done["places"][0]["price_source"])
        self.assertIn("2.43 USD", done["summary"])
        self.assertTrue(any("boot disk" in one for one in done["not_included"]))
        self.assertEqual(self.world.look()["calls"], [])

    async def test_the_limits_of_a_create(self) -> None:
        for hours, allowed in ((3.7, 3), (3.8, 1), (4.2, 0), (9, 0)):
            async with self.tools() as caller:
                done = await caller.ok("estimate_deployment_cost", hours=hours)
            wanted = {3.7: 3, 3.8: 1, 4.2: 0, 9: 0}[hours]
            self.assertEqual(sum(row["allowed"] for row in done["places"]), wanted, hours)
            self.assertEqual(allowed, wanted)
            self.assertIn(f"{wanted} of 4 places", done["summary"])

    async def test_an_unknown_price_takes_the_setting(self) -> None:
        self.set(UNKNOWN_PRICE_OK="1")
        async with self.tools() as caller:
            done = await caller.ok("estimate_deployment_cost", zone=OTHER)
        self.assertEqual([row["allowed"] for row in done["places"]], [True, True])
        ProjectPlane.places = ((OTHER, "on-demand", None),)
        async with self.tools() as caller:
            done = await caller.ok("estimate_deployment_cost")
        self.assertIn("nobody knows the price", done["summary"])

    async def test_one_zone_and_bounds(self) -> None:
        async with self.tools() as caller:
            done = await caller.ok("estimate_deployment_cost", zone=ZONE)
            self.assertEqual({row["zone"] for row in done["places"]}, {ZONE})
            await caller.fails("NOT_FOUND", "estimate_deployment_cost", zone="us-west4-a")
            for wrong in ({"hours": 0}, {"hours": 169}, {"zone": "x y"}, {"price": 1}):
                await caller.fails("INVALID", "estimate_deployment_cost", **wrong)


class ListingTest(Case):
    async def test_every_parameter_is_described_and_nothing_needs_a_filled_word(self) -> None:
        async with self.tools() as caller:
            tools = (await caller.client.list_tools()).tools
        names = [tool.name for tool in tools]
        for name in (
            *("save_hf_token", "get_cloud_logging_logs", "get_zones_with_quota"),
            *("check_quota", "estimate_deployment_cost"),
        ):
            self.assertIn(name, names)
            self.assertLessEqual(len(name), 28)
        for tool in tools:
            self.assertNotIn("{", tool.description or "")
            for parameter, schema in tool.input_schema.get("properties", {}).items():
                self.assertIn("description", schema, f"{tool.name}.{parameter}")


if __name__ == "__main__":
    unittest.main()
