"""Asking for a machine while something goes wrong: the provider, its program, the login, the disk.

What is asserted is what costs money: how many machines there are afterwards, whether each bears its
labels and ends by itself, what was said, and what the next call does.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.suites.rented_fault_case import EASTERN, EASTERN_TOO, WESTERN, RentedFaultCase

_LOGIN_OVER = (
    "ERROR: (gcloud.compute.instances.create) There was a problem refreshing your current auth "
    "tokens: ('invalid_grant: Token has been expired or revoked.', "
    "{'error': 'invalid_grant'})\nPlease run:\n\n  $ gcloud auth login\n"
)
_BROKEN_ANSWERS: tuple[dict[str, Any], ...] = (
    {"before": "WARNING: a newer release is there\n\nUpdates are available for some components.\n"},
    {"cut": 1},
    {"said": ""},
    {"said": "null"},
    {"said": '{"items": []}'},
    {"said": '["a", "b"]'},
    {"said": "[" * 100_000},
    {"after_hex": "ff00fe80"},
)


class AskingFaultSuite(RentedFaultCase):
    """No twin, nothing unlabelled, nothing without an end, and no refusal mistaken for another."""

    boots = False

    async def search(
        self, client: Client, *zones: str, wait: bool = True, **more: Any
    ) -> dict[str, Any]:
        """A search over `zones`, followed to its end."""
        begun = await self.answer(client, "find_tpu_vm", zones=list(zones), **more)
        return await self.finished(client, begun["job_id"]) if wait else begun

    async def test_no_gcloud(self) -> None:  # D01
        bare = self.place / "bare"
        bare.mkdir(exist_ok=True)
        async with self.in_process() as client:
            with mock.patch.dict(os.environ, {"PATH": str(bare)}):
                for tool, arguments in (
                    ("list_tpu_vm_instances", {}),
                    ("create_tpu_vm_instance", {"zone": WESTERN}),
                    ("find_tpu_vm", {}),
                ):
                    fault = await self.refusal(client, tool, "DENIED", **arguments)
                    self.assertIn("gcloud is not installed", fault)
                    self.assertIn("cloud.google.com/sdk", fault)
            listing = await self.answer(client, "list_tpu_vm_instances")
        self.assertEqual(listing["rentals"], [])
        self.assertEqual(self.asked(), [])

    async def test_the_login_ends_in_the_middle_of_a_search(self) -> None:  # D02
        google = self.google
        google.script.stockout = {EASTERN}
        async with self.in_process() as client:
            begun = await self.search(client, EASTERN, WESTERN, wait=False)
            await self.until(self.asked, "no place was asked")
            fault = {"instead": True, "warned": _LOGIN_OVER, "status": 1}
            self.gcloud.fault("compute", "instances", "create", **fault)
            ended = await self.finished(client, begun["job_id"])
            self.assertEqual(ended["state"], "failed", ended)
            self.assertTrue(ended["error"].startswith("AUTH "), ended["error"])
            self.assert_marked(0)
            self.gcloud.mend()
            await self.created(client)
        self.assertEqual(self.asked(), [EASTERN, WESTERN])
        self.assert_marked(1)

    async def test_a_permission_is_no_fault_of_its_zone(self) -> None:  # D03
        self.google.script.denied = {WESTERN}
        async with self.in_process() as client:
            ended = await self.search(client, WESTERN, EASTERN)
            self.assertTrue(ended["error"].startswith("DENIED "), ended)
            self.assertIn("compute.instances.create", ended["error"])
            self.assertEqual(self.asked(), [WESTERN])
            self.google.script.denied = set()
            found = await self.search(client, WESTERN, EASTERN)
            self.assertEqual(found["result"]["zone"], WESTERN, found)
        self.assert_marked(1)

    async def test_a_service_that_is_off(self) -> None:  # D03
        self.google.script.disabled = {"compute"}
        async with self.in_process() as client:
            for tool in ("find_tpu_vm", "list_tpu_vm_instances"):
                fault = await self.refusal(client, tool, "DENIED")
                self.assertIn("compute.googleapis.com", fault)
        self.assertEqual(self.asked(), [])

    async def test_a_quota_shuts_its_region(self) -> None:  # D04
        self.google.script.quota = {EASTERN}
        self.google.script.disabled = {"quotas"}  # or it would be known beforehand
        async with self.in_process() as client:
            found = await self.search(client, EASTERN, EASTERN_TOO, WESTERN)
            self.assertEqual(found["result"]["zone"], WESTERN, found)
            self.assertIn(f"{EASTERN} (flex-start): quota", found["result"]["asked"][0])
        self.assertEqual(self.asked(), [EASTERN, WESTERN])
        self.assert_marked(1)

    async def test_no_quota_at_all_asks_nowhere(self) -> None:  # D04
        for pool in self.google.script.quotas:
            self.google.script.quotas[pool] = 0
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "QUOTA", zone=EASTERN)
            self.assertIn("TPUS-PER-TPU-FAMILY-per-project-region for us-east5-a allows 0", fault)
            ended = await self.search(client, EASTERN, WESTERN)
            self.assertTrue(ended["error"].startswith("QUOTA "), ended)
        self.assertEqual(self.asked(), [])

    async def test_a_create_whose_answer_never_comes(self) -> None:  # D05, A29
        self.google.script.lost = 1
        async with self.in_process() as client:
            with self.patience(create_s=1.5):
                outcome = await self.answer(client, "create_tpu_vm_instance", zone=WESTERN)
            self.assertIn("may have been made", outcome["note"])
            self.assert_marked(1)
            again = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
            self.assertIn(outcome["intent"], again)
        self.assertEqual(self.asked(), [WESTERN])

    async def test_a_searched_one_whose_answer_is_lost_is_the_only_one(self) -> None:  # D05, A29
        self.google.script.lost, self.google.script.lost_by = 1, "cut"
        async with self.in_process() as client:
            found = await self.search(client, WESTERN, EASTERN)
            self.assertEqual(found["result"]["zone"], WESTERN, found)
        self.assert_marked(1)
        self.assertEqual(set(self.asked()), {WESTERN})

    async def test_a_create_that_fails_after_it_created(self) -> None:  # D06
        said = "ERROR: gcloud crashed (ConnectionError): the line was cut\n"
        self.gcloud.fault("compute", "instances", "create", said="", warned=said, status=1)
        async with self.in_process() as client:
            outcome = await self.answer(client, "create_tpu_vm_instance", zone=WESTERN)
            self.assertTrue(outcome["note"], outcome)
            self.assertEqual(outcome["machine"]["state"], "running")
        self.assert_marked(1)

    async def test_half_a_machine_is_none_and_its_disk_is_told(self) -> None:  # D06
        self.google.script.stockout, self.google.script.half_made = {WESTERN}, True
        async with self.in_process() as client:
            with self.patience(follow_s=3.0):
                await self.refusal(client, "create_tpu_vm_instance", "CAPACITY", zone=WESTERN)
            self.assertEqual(list(self.rented()), ["disks"])
            orphans = await self.answer(client, "list_orphans")
            self.assertEqual([one["kind"] for one in orphans["orphans"]], ["disk"])
            reaped = await self.answer(client, "reap_orphans", token=orphans["token"])
            self.assertEqual(reaped["left"], [])
        self.assertEqual(self.rented(), {})

    async def test_a_machine_that_shows_late_stops_every_other(self) -> None:  # D07
        self.google.script.lag_s = 30.0
        async with self.in_process() as client:
            with self.patience(follow_s=1.0, read_back_s=0.5, settle_s=60.0):
                fault = await self.refusal(
                    client, "create_tpu_vm_instance", "UNKNOWN", zone=WESTERN
                )
                self.assertIn("no other create goes out", fault)
                second = await self.refusal(
                    client, "create_tpu_vm_instance", "UNKNOWN", zone=EASTERN
                )
                self.assertIn("may still come to life", second)
                self.google.advance(31)
                listing = await self.answer(client, "list_tpu_vm_instances")
                self.assertEqual(len(listing["rentals"]), 1)
                await self.refusal(client, "create_tpu_vm_instance", "EXISTS", zone=EASTERN)
        self.assertEqual(self.asked(), [WESTERN])
        self.assert_marked(1)

    async def test_the_same_again_and_with_other_values(self) -> None:  # D09, D11
        async with self.in_process() as client:
            first = await self.answer(client, "create_tpu_vm_instance", zone=WESTERN)
            for arguments in (
                {"zone": WESTERN},
                {"zone": WESTERN, "market": "spot", "hours": 2},
                {"zone": EASTERN},
            ):
                fault = await self.refusal(client, "create_tpu_vm_instance", "EXISTS", **arguments)
                self.assertIn(first["intent"], fault)
                self.assertIn(first["machine"]["name"], fault)
            await self.refusal(client, "find_tpu_vm", "EXISTS")
        self.assertEqual(self.asked(), [WESTERN])
        self.assert_marked(1)

    async def test_twelve_at_once_from_two_servers_are_one(self) -> None:  # D10, A30
        async with self.over_stdio() as one, self.over_stdio() as other:
            calls = [
                client.call_tool("create_tpu_vm_instance", {"zone": zone})
                for client in (one, other)
                for zone in (WESTERN, EASTERN) * 3
            ]
            ended = await asyncio.gather(*calls)
            words = ["".join(i.text for i in r.content if i.type == "text") for r in ended]
            created = [text for r, text in zip(ended, words, strict=True) if not r.is_error]
            self.assertEqual(len(created), 1, words)
            for text in words:
                if text not in created:
                    self.assertIn(text.split(" ")[0], ("EXISTS", "BUSY"), text)
            await self.refusal(other, "create_tpu_vm_instance", "EXISTS", zone=WESTERN)
        self.assertEqual(len(self.asked()), 1)
        self.assert_marked(1)

    async def test_a_create_beside_a_search_makes_no_twin(self) -> None:  # D10, A30
        """Between two rounds a search has no request that could be seen."""
        self.google.script.stockout = {WESTERN}
        async with self.in_process() as client:
            begun = await self.search(client, WESTERN, wait=False)
            job = {"job_id": begun["job_id"]}

            async def rests() -> bool:
                return "asking again" in str(await self.answer(client, "get_job", **job))

            while not await rests():
                await asyncio.sleep(0.1)
            fault = await self.refusal(client, "create_tpu_vm_instance", "BUSY", zone=EASTERN_TOO)
            self.assertIn(begun["job_id"], fault)
            self.assertNotIn(EASTERN_TOO, self.asked())
            await self.answer(client, "cancel_job", **job)
            await self.answer(client, "create_tpu_vm_instance", zone=EASTERN_TOO)
        self.assert_marked(1)

    async def test_a_namesake_of_somebody_else(self) -> None:  # D12
        rented = self.module.rental_name(self.module.RIG.name, self.assembled().context.owner)
        stranger = self.planted(rented, {"rig": self.module.RIG.name, "owner": "somebody-else"})
        before = dict(stranger)
        async with self.in_process() as client:
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=EASTERN)
            self.assertIn("somebody else's", fault)
        self.assertEqual(self.machine_at_google(), before)
        self.assertEqual(self.asked(), [])

    async def test_sold_out_here_and_there_and_a_poisoned_memory(self) -> None:  # D13, D54, A49
        self.google.script.stockout = {EASTERN, EASTERN_TOO}
        async with self.in_process() as client:
            found = await self.search(client, EASTERN, EASTERN_TOO, WESTERN)
            self.assertEqual(found["result"]["zone"], WESTERN)
            ends = [line.partition(": ")[2].partition(",")[0] for line in found["result"]["asked"]]
            self.assertEqual(ends, ["stockout", "stockout", "granted"])
            self.assertEqual(self.asked(), [EASTERN, EASTERN_TOO, WESTERN])
            self.assert_marked(1)
            await self.destroyed(client, found["result"])
            self._poison()
            again = await self.search(client, EASTERN, EASTERN_TOO, WESTERN)
            self.assertEqual(again["state"], "done")
        # What was heard a moment ago is not asked again, and what nobody said shuts nothing.
        self.assertEqual(self.asked(), [EASTERN, EASTERN_TOO, WESTERN, WESTERN])

    async def test_lists_that_cannot_be_read_are_never_empty(self) -> None:  # D14, D15, D16, A37
        async with self.in_process() as client:
            for fault in _BROKEN_ANSWERS:
                with self.subTest(fault=str(fault)[:60]):
                    self.gcloud.mend()
                    self.gcloud.fault("compute", "instances", "list", **fault)
                    text = await self.refusal(client, "list_tpu_vm_instances", "UNKNOWN")
                    self.assertIn("cannot be read", text)
                    await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=WESTERN)
        self.assertEqual(self.asked(), [])

    async def test_a_thing_that_cannot_be_read_is_told_and_stops_a_create(self) -> None:  # D16
        said = '[{"name": null, "id": 5, "zone": ["x"]}, {"name": "b", "status": {}, "labels": 7}]'
        self.gcloud.fault("compute", "instances", "list", said=said)
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertEqual(len(listing["unread"]), 2, listing)
            await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=WESTERN)
        self.assertEqual(self.asked(), [])

    async def test_a_zone_that_does_not_answer(self) -> None:  # D15
        self.google.script.unreachable = {EASTERN_TOO}
        async with self.in_process() as client:
            listing = await self.answer(client, "list_tpu_vm_instances")
            self.assertIn(EASTERN_TOO, str(listing["unread"]))
            await self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=WESTERN)
            await self.refusal(client, "find_tpu_vm", "UNKNOWN")
        self.assertEqual(self.asked(), [])

    async def test_output_without_an_end(self) -> None:  # D18, A22
        self.gcloud.fault("compute", "instances", "list", endless=True, instead=True)
        async with self.in_process() as client:
            before = psutil.Process().memory_info().rss
            text = await self.refusal(client, "list_tpu_vm_instances", "TIMEOUT")
            grown = psutil.Process().memory_info().rss - before
            self.assertLess(grown, 50_000_000, "all of it was kept")
            self.assertLess(len(text), 1000)
        await self.assert_none_left(*self.gcloud.pids())

    async def test_a_program_that_ignores_its_end_with_a_child(self) -> None:  # D20
        self.gcloud.fault("compute", "instances", "create", hangs=True, instead=True)
        async with self.in_process() as client:
            with self.patience(create_s=1.5, follow_s=2.0, read_back_s=0.5):
                call = asyncio.ensure_future(
                    self.refusal(client, "create_tpu_vm_instance", "UNKNOWN", zone=WESTERN)
                )
                (pid,) = await self.until(self.gcloud.pids, "it never began")
                family = await self.until(
                    lambda: psutil.Process(pid).children(recursive=True), "it has no child"
                )
                self.assertIn("may have been made all the same", await call)
            await self.assert_none_left(pid, *(one.pid for one in family))
        self.assertEqual(self.asked(), [])

    async def test_a_place_without_a_price_and_one_over_budget(self) -> None:  # D53, A28
        self.write_settings(**{**self.good_settings(), "MARKETS": "spot", "ZONES": "us-west4-a"})
        self.addCleanup(self.write_settings, **self.good_settings())
        async with self.in_process() as client:
            fault = await self.refusal(
                client, "create_tpu_vm_instance", "DENIED", zone="us-west4-a"
            )
            self.assertIn("price in us-west4-a is not known", fault)
            ended = await self.search(client, "us-west4-a")
            self.assertEqual(ended["state"], "failed", ended)
            self.write_settings(**{**self.good_settings(), "BUDGET_USD": "1"})
            fault = await self.refusal(client, "create_tpu_vm_instance", "DENIED", zone=WESTERN)
            self.assertIn("over BUDGET_USD=1", fault)
            fault = await self.refusal(
                client, "create_tpu_vm_instance", "DENIED", zone=WESTERN, hours=5
            )
            self.assertIn("MAX_HOURS=4", fault)
            await self.refusal(client, "find_tpu_vm", "DENIED", budget_usd=2)
        self.assertEqual(self.asked(), [])

    def _poison(self) -> None:
        """Put what no provider said into the file of refusals: one for ever, and no refusals."""
        path = Path(self.assembled().context.paths.state) / "sweep" / "sweep_refusals.json"
        kept = json.loads(path.read_text())
        true = kept["refusals"][0]
        forever = {**true, "place": WESTERN, "scope": "zone", "at": 0.0, "until": 1e12}
        rows = [forever, {**true, "place": WESTERN, "reason": "|\n| spot |"}, "x", None, 7]
        path.write_text(json.dumps({**kept, "refusals": [*kept["refusals"], *rows]}))
