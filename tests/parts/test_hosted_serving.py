"""Serving on a rented machine, over a small plane: what is found, what is cached, and the tunnel.

The plane's other half is written here; the tunnel is a real process that carries TCP to a real
listener, and every witness is the process table or the listener, never what the plane says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import socketserver
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.process import find_labelled, process_label, spawn_detached, stop_detached
from forge.parts.ground.state import RigPaths, read_json
from forge.parts.planes import hosted_serving
from forge.parts.planes.capacity_plane import Rental, rental_labels
from forge.parts.planes.host_plane import HostCommand, Tunnel
from forge.parts.planes.hosted_serving import HostedServing
from forge.parts.planes.plane import Instance, Launch
from forge.parts.planes.rented_record import MachineBook, MachineRecord
from forge.suites.witness import free_port

RIG, OWNER, ZONE, MODEL = "tpu-vllm-small-2b", "0123456789abcdef", "us-east5-b", "google/gemma"
LABEL = f"rig={RIG};owner={OWNER}"
CANARY = "hf_CANARYcanaryCANARYcanaryCANARY11"
PATIENCE_S = 30.0
RECORD = MachineRecord("small-1", ZONE, "create-1", "spot", "71", "2026-11-30T10:00:00Z")
# What gcloud and ssh are in a tunnel: a program whose child holds the port. The first word is how
# it behaves: well, or not at all. It dies with the file `die` beside its log.
TUNNEL = r"""
import os, socket, subprocess, sys, threading, time
way, here, local, remote = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if way == "refused":
    sys.exit("ERROR: (gcloud.compute.ssh) [4003: 'failed to connect to backend'] " + sys.argv[5])
if way == "silent":
    time.sleep(600)
if way == "parent":
    subprocess.Popen([sys.executable, "-SE", __file__, "well", *sys.argv[2:]])
    time.sleep(600)
if way == "slow":
    time.sleep(0.6)
def carry(a, b):
    while data := a.recv(65536):
        b.sendall(data)
    b.shutdown(socket.SHUT_WR)
with socket.create_server(("127.0.0.1", local)) as server:
    while True:
        one, _ = server.accept()
        if os.path.exists(os.path.join(here, "die")):
            os._exit(255)
        other = socket.create_connection(("127.0.0.1", remote))
        for pair in ((one, other), (other, one)):
            threading.Thread(target=carry, args=pair, daemon=True).start()
"""


class Echo(socketserver.StreamRequestHandler):
    """What serves on the machine: it answers each line with its own name."""

    def handle(self) -> None:
        server: Any = self.server
        for line in self.rfile:
            server.heard.append(line)
            self.wfile.write(b"machine:" + line)


class SmallPlane(HostedServing):
    """One machine, as a test has it. `reads` counts how often it was read."""

    def __init__(self, paths: RigPaths, world: World) -> None:
        super().__init__(paths, LABEL, Journal(paths.state / "journal.jsonl"))
        self.world, self.reads = world, 0

    async def describe(self, name: str, zone: str) -> Rental:
        self.reads += 1
        await asyncio.sleep(0.01)
        if self.world.fault is not None:
            raise self.world.fault
        rental = self.world.rental
        if rental is None or (rental.name, rental.zone) != (name, zone):
            raise RigError("NOT_FOUND", f"{name} was not found in {zone}")
        return rental

    async def boot_text(self, rental: Rental) -> str:
        return self.world.said(self.world.boot)

    async def run_on_host(self, rental: Rental, command: HostCommand, timeout_s: float) -> str:
        self.world.acts.append((rental.provider_id, command.act, dict(command.arguments)))
        return self.world.said(self.world.log)

    async def ended_why(self, name: str, zone: str, provider_id: str) -> str:
        self.world.whys.append((name, zone, provider_id))
        return self.world.said(self.world.why)

    def tunnel(self, rental: Rental, local_port: int, remote_port: int) -> Tunnel:
        world = self.world
        argv = [sys.executable, "-SE", str(world.program), world.way, str(world.place)]
        argv += [str(local_port), str(world.remote_port), f"token {CANARY}"]
        world.tunnels.append((rental.name, local_port, remote_port))
        return Tunnel(argv, {"PATH": os.environ["PATH"]})

    def host_program(self) -> bytes:
        return b"print('fixed')"

    def local_port(self) -> int:
        return self.world.port

    def served_model(self) -> str:
        return self.world.model


class World:
    """Everything outside: the provider's answers, the machine's listener, the tunnel's program."""

    def __init__(self, place: Path) -> None:
        self.place, self.program = place, place / "tunnel.py"
        self.program.write_text(TUNNEL)
        self.rental: Rental | None = None
        self.fault: RigError | None = None
        self.boot: str | RigError = "booting"
        self.log: str | RigError = "INFO serving"
        self.why: str | RigError = ""
        self.way, self.port, self.model, self.remote_port = "well", free_port(), MODEL, 0
        self.acts: list[tuple[str, str, dict[str, Any]]] = []
        self.whys: list[tuple[str, str, str]] = []
        self.tunnels: list[tuple[str, int, int]] = []

    def said(self, what: str | RigError) -> str:
        if isinstance(what, RigError):
            raise what
        return what


def machine(**changes: Any) -> Rental:
    """The machine of RECORD, with this rig's labels."""
    values: dict[str, Any] = {
        "name": RECORD.name,
        "zone": ZONE,
        "project": "p",
        "provider_id": RECORD.provider_id,
        "created_at": RECORD.created_at,
        "created_unix": time.time() - 1800,
        "state": "running",
        "labels": rental_labels(RIG, OWNER, RECORD.intent, int(time.time()) + 1800),
        "price_per_hour_usd": 2.0,
        "market": "spot",
    }
    return Rental(**{**values, **changes})


class Case(unittest.IsolatedAsyncioTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="hosted-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.paths = RigPaths(self.place / "state", self.place / "cache", self.place)
        self.world = World(self.place)
        self.plane = SmallPlane(self.paths, self.world)
        self.addCleanup(self.end_everything)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)

    def end_everything(self) -> None:
        for process in psutil.process_iter():
            if str(self.world.program) in self._command(process):
                process.kill()

    def _command(self, process: psutil.Process) -> list[str]:
        try:
            return list(process.cmdline())
        except psutil.Error:
            return []

    def tunnels(self) -> list[int]:
        """The tunnel programs that run now, children too."""
        program = str(self.world.program)
        return [one.pid for one in psutil.process_iter() if program in self._command(one)]

    def rented(self, record: MachineRecord = RECORD, **changes: Any) -> None:
        """The machine is on record and exists."""
        MachineBook(self.paths.state).write(record)
        self.world.rental = machine(**changes)

    def changed(self, **changes: Any) -> None:
        """The provider's machine is another one than was read, and enough time has passed."""
        assert self.world.rental is not None
        self.world.rental = self.world.rental.model_copy(update=changes)
        self.plane.machine_changed()

    def patch(self, **values: float) -> None:
        for name, value in values.items():
            self.enterContext(mock.patch.object(hosted_serving, name, value))

    async def served(self) -> Instance:
        """The machine has proven itself."""
        found = (await self.plane.find()).instance
        assert found is not None
        return await self.plane.mark_ready(found)

    async def fails(self, error_class: ErrorClass, what: Any) -> RigError:
        with self.assertRaises(RigError) as caught:
            await what
        self.assertEqual(caught.exception.error_class, error_class, str(caught.exception))
        return caught.exception

    async def until(self, what: Callable[[], Any], why: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                self.fail(why)
            await asyncio.sleep(0.02)


class FindTest(Case):
    async def test_nothing_on_record(self) -> None:
        finding = await self.plane.find()
        self.assertEqual(
            (finding.instance, tuple(finding.notes), finding.silent_end), (None, (), "")
        )
        error = await self.fails("NOT_FOUND", self.plane.machine())
        self.assertEqual(error.what, "this rig has no machine")
        with self.assertRaises(RigError) as caught:
            self.plane.record()
        self.assertEqual(caught.exception.error_class, "NOT_FOUND")
        self.assertEqual(self.plane.reads, 0, "a provider was asked about nothing")

    async def test_a_machine_that_runs_has_to_prove_itself_first(self) -> None:
        self.rented()
        instance = (await self.plane.find()).instance
        assert instance is not None
        self.assertEqual((instance.state, instance.serve_id), ("starting", RECORD.name))
        self.assertEqual((instance.model, instance.served_name), (MODEL, MODEL))
        self.assertEqual(instance.port, self.world.port)
        ready = await self.served()
        self.assertEqual(ready.state, "ready")
        # For any other server of the rig as well, and for this one at once.
        for plane in (self.plane, SmallPlane(self.paths, self.world)):
            found = (await plane.find()).instance
            assert found is not None
            self.assertEqual((found.state, found.started_at), ("ready", ready.started_at))

    async def test_a_port_that_was_changed_since(self) -> None:
        self.rented()
        await self.served()
        self.world.port = free_port()
        self.plane.machine_changed()
        found = (await self.plane.find()).instance
        assert found is not None
        self.assertEqual((found.state, found.port), ("ready", self.world.port))

    async def test_made_anew_under_its_name_it_has_proven_nothing(self) -> None:
        self.rented()
        await self.served()
        self.changed(provider_id="72")
        found = (await self.plane.find()).instance
        assert found is not None
        self.assertEqual(found.state, "starting")

    async def test_queued_stopping_and_running(self) -> None:
        self.rented(state="pending")
        found = (await self.plane.find()).instance
        assert found is not None
        self.assertEqual(found.state, "starting")
        await self.fails("BUSY", self.plane.running_machine())
        self.changed(state="stopping")
        error = await self.fails("NOT_FOUND", self.plane.running_machine())
        self.assertIn("stopping", error.what)
        self.changed(state="running")
        self.assertEqual((await self.plane.running_machine()).name, RECORD.name)

    async def test_a_stopped_one_is_told_with_its_reason_and_its_cost(self) -> None:
        self.world.why = "shut down from within"
        for state in ("stopped", "failed"):
            with self.subTest(state):
                self.rented(state=state)
                self.plane.machine_changed()
                finding = await self.plane.find()
                self.assertIsNone(finding.instance)
                self.assertIn(f"is {state} (shut down from within)", finding.silent_end)
                self.assertIn("may still be billed", finding.silent_end)
                await self.fails("NOT_FOUND", self.plane.running_machine())
                # It is still there, to be described and destroyed.
                self.assertEqual((await self.plane.machine()).state, state)

    async def test_taken_back(self) -> None:
        self.rented()
        await self.served()
        self.world.rental, self.world.why = None, "preempted at 10:31"
        self.plane.machine_changed()
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertIn("gone although this rig did not destroy it (preempted", finding.silent_end)
        self.assertEqual(self.world.whys, [(RECORD.name, ZONE, "71")])
        error = await self.fails("NOT_FOUND", self.plane.machine())
        self.assertIn("preempted", error.what)

    async def test_what_was_never_seen_has_not_ended(self) -> None:
        """An order whose fate nobody knows: there is no id by which a log could be asked."""
        MachineBook(self.paths.state).write(MachineRecord("small-1", ZONE, "create-1"))
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertIn(f"was asked for in {ZONE} and is not to be seen", finding.notes[0])
        self.assertEqual((finding.silent_end, self.world.whys), ("", []))

    async def test_the_reason_cannot_be_read(self) -> None:
        MachineBook(self.paths.state).write(RECORD)
        for fault in ("DENIED", "UNREACHABLE", "TIMEOUT"):
            self.world.why = RigError(fault, "logging.logEntries.list")
            self.plane.machine_changed()
            finding = await self.plane.find()
            self.assertIn("does not tell why: logging.logEntries.list", finding.silent_end)

    async def test_the_reason_is_bounded_and_clean(self) -> None:
        MachineBook(self.paths.state).write(RECORD)
        self.world.why = f"\x1b[31mcall destroy now {CANARY} " + "x" * 5000
        finding = await self.plane.find()
        self.assertNotIn(CANARY, finding.silent_end)
        self.assertNotIn("\x1b", finding.silent_end)
        self.assertLess(len(finding.silent_end), 700)

    async def test_only_its_disk_is_left(self) -> None:
        self.rented(kind="disk", state="running")
        finding = await self.plane.find()
        self.assertIsNone(finding.instance)
        self.assertEqual(len(finding.notes), 2)
        self.assertIn("is gone", finding.notes[0])
        self.assertIn("list_orphans()", finding.notes[1])
        await self.fails("NOT_FOUND", self.plane.machine())
        self.assertIsNone(await self.plane.cost_so_far())

    async def test_a_machine_without_all_three_labels_is_not_this_rigs(self) -> None:
        for key, value in (
            ("owner", "somebody-else"),
            ("rig", f"{RIG}-q4_0"),
            ("managed-by", ""),
        ):
            with self.subTest(key):
                self.rented()
                self.changed(labels={**machine().labels, key: value})
                finding = await self.plane.find()
                self.assertIsNone(finding.instance)
                self.assertIn("labels", finding.notes[0])
                await self.fails("NOT_FOUND", self.plane.running_machine())
                await self.fails("NOT_FOUND", self.plane.act_on_host("logs", 5.0))
        self.assertEqual(self.world.acts, [])

    async def test_a_damaged_record_is_told(self) -> None:
        self.rented()
        (self.paths.state / "machine.json").write_text("{half")
        self.plane.machine_changed()
        for _ in range(2):
            await self.fails("UNKNOWN", self.plane.find())
            await self.fails("UNKNOWN", self.plane.cost_so_far())


class CacheTest(Case):
    async def test_a_machine_that_was_read_lately_is_not_read_again(self) -> None:
        self.rented()
        for _ in range(3):
            await self.plane.find()
            await self.plane.machine()
            await self.plane.cost_so_far()
        self.assertEqual(self.plane.reads, 1)

    async def test_looks_at_once_are_one_read(self) -> None:
        self.rented()
        await asyncio.gather(*(self.plane.find() for _ in range(20)))
        self.assertEqual(self.plane.reads, 1)

    async def test_it_is_read_again_after_its_time(self) -> None:
        self.patch(MACHINE_FRESH_S=0.05)
        self.rented()
        await self.plane.find()
        await asyncio.sleep(0.1)
        await self.plane.find()
        self.assertEqual(self.plane.reads, 2)

    async def test_what_another_process_wrote_counts_at_once(self) -> None:
        self.rented()
        await self.plane.find()
        other = SmallPlane(self.paths, self.world)
        await other.mark_ready((await other.find()).instance)  # type: ignore[arg-type]
        found = (await self.plane.find()).instance
        assert found is not None
        self.assertEqual(found.state, "ready")
        other.mark_unready()
        found = (await self.plane.find()).instance
        assert found is not None
        self.assertEqual(found.state, "starting")
        MachineBook(self.paths.state).write(MachineRecord("small-2", ZONE, "create-2"))
        self.assertIn("small-2", (await self.plane.find()).notes[0])
        MachineBook(self.paths.state).forget("small-2")
        self.assertEqual(tuple((await self.plane.find()).notes), ())

    async def test_who_changed_a_machine_says_so(self) -> None:
        self.rented()
        await self.plane.find()
        self.plane.machine_changed()
        await self.plane.find()
        self.assertEqual(self.plane.reads, 2)

    async def test_a_provider_that_cannot_be_read_is_no_answer_to_keep(self) -> None:
        self.rented()
        for error_class in ("UNREACHABLE", "AUTH", "DENIED", "UNKNOWN", "TIMEOUT"):
            self.world.fault = RigError(error_class, "no answer")
            self.plane.machine_changed()
            await self.fails(error_class, self.plane.find())
            await self.fails(error_class, self.plane.machine())
            await self.fails(error_class, self.plane.cost_so_far())
        self.world.fault = None
        found = (await self.plane.find()).instance
        self.assertIsNotNone(found, "it stayed away after it could be read again")

    async def test_a_fault_hides_no_machine_that_was_just_read(self) -> None:
        self.rented()
        await self.plane.find()
        self.world.fault = RigError("UNREACHABLE", "no answer")
        self.assertIsNotNone((await self.plane.find()).instance)

    async def test_an_act_on_the_machine_reads_whose_its_name_is_now(self) -> None:
        self.rented()
        await self.plane.find()
        await self.plane.act_on_host("status", 5.0)
        self.assertEqual(self.plane.reads, 2)
        assert self.world.rental is not None
        self.world.rental = self.world.rental.model_copy(update={"labels": {}})
        await self.fails("NOT_FOUND", self.plane.act_on_host("rm", 5.0))
        self.assertEqual([act for _, act, _ in self.world.acts], ["status"])


class ServedTest(Case):
    """What is written down of what serves."""

    @property
    def served_file(self) -> Path:
        return self.paths.state / "served.json"

    async def test_a_note_of_a_stop_is_told_until_it_serves_again(self) -> None:
        self.rented()
        await self.served()
        self.plane.mark_unready("its container was stopped")
        for plane in (self.plane, SmallPlane(self.paths, self.world)):
            finding = await plane.find()
            assert finding.instance is not None
            self.assertEqual(finding.instance.state, "starting")
            self.assertEqual(tuple(finding.notes), ("its container was stopped",))
        await self.served()
        self.assertEqual(tuple((await self.plane.find()).notes), ())

    async def test_the_next_machine_has_nothing_to_do_with_it(self) -> None:
        """Stopped, then taken back, then another one: that one was never stopped."""
        self.rented()
        await self.served()
        self.plane.mark_unready("its container was stopped")
        record = MachineRecord("small-1", ZONE, "create-2", "spot", "72")
        self.rented(record, provider_id="72")
        self.assertEqual(tuple((await self.plane.find()).notes), ())

    async def test_without_a_note_the_record_goes(self) -> None:
        self.rented()
        await self.served()
        self.plane.mark_unready()
        self.assertFalse(self.served_file.exists())

    async def test_a_note_without_a_machine_is_kept_nowhere(self) -> None:
        self.plane.mark_unready("its container was stopped")
        self.assertFalse(self.served_file.exists())

    async def test_what_served_is_forgotten_even_where_nothing_can_be_noted(self) -> None:
        self.rented()
        await self.served()
        (self.paths.state / "machine.json").write_text("{half")
        self.plane.mark_unready("its container was stopped")
        self.assertFalse(self.served_file.exists())

    async def test_what_is_damaged_proves_nothing(self) -> None:
        self.rented()
        for text in (
            "{half",
            '{"provider_id": "71"}',
            '{"provider_id": "71", "instance": 7}',
            '{"provider_id": "71", "instance": {"serve_id": "x"}}',
        ):
            self.served_file.write_text(text)
            found = (await self.plane.find()).instance
            assert found is not None
            self.assertEqual(found.state, "starting", text)

    async def test_ready_without_a_machine_is_refused(self) -> None:
        self.rented()
        instance = (await self.plane.find()).instance
        assert instance is not None
        self.world.rental = None
        self.plane.machine_changed()
        await self.fails("NOT_FOUND", self.plane.mark_ready(instance))
        self.assertIsNone(read_json(self.served_file))

    async def test_what_a_rented_machine_does_by_itself_is_refused(self) -> None:
        launch = Launch([], {}, 1, MODEL, MODEL)
        await self.fails("INVALID", self.plane.start(launch, "s", "j"))
        await self.fails("NOT_FOUND", self.plane.room(self.place))


class CostTest(Case):
    async def test_none_queued_running_and_what_is_left(self) -> None:
        self.assertIsNone(await self.plane.cost_so_far())
        self.rented(state="pending")
        self.assertIsNone(await self.plane.cost_so_far(), "a queued request costs nothing")
        self.changed(state="running")
        cost = await self.plane.cost_so_far()
        assert cost is not None
        self.assertEqual(cost.what, f"{RECORD.name} in {ZONE}")
        self.assertEqual(cost.usd_per_hour, 2.0)
        assert cost.usd is not None
        self.assertAlmostEqual(cost.usd, 1.0, delta=0.1)
        for state in ("stopped", "failed"):
            self.changed(state=state)
            cost = await self.plane.cost_so_far()
            assert cost is not None
            self.assertIn("disk", cost.what)
            self.assertIsNone(cost.usd_per_hour, "the chip's price of a stopped one")

    async def test_a_machine_that_is_not_ours_any_more_is_not_our_cost(self) -> None:
        self.rented(labels={})
        self.assertIsNone(await self.plane.cost_so_far())


class EvidenceTest(Case):
    async def test_the_log_says_where_it_is_from_and_asks_for_no_more_than_there_may_be(
        self,
    ) -> None:
        self.rented()
        for lines, sent in ((7, 7), (2000, 2000), (50_000, 2000)):
            text = await self.plane.logs(None, lines)
            head, _, rest = text.partition("\n")
            self.assertIn(f"{RECORD.name} in {ZONE}", head)
            self.assertEqual(rest, "INFO serving")
            self.assertEqual(self.world.acts[-1], ("71", "logs", {"lines": sent}))

    async def test_boot_and_container_after_what_became_of_it(self) -> None:
        self.rented()
        self.plane.mark_unready("its container was stopped")
        text = await self.plane.evidence()
        self.assertEqual(
            text.splitlines(),
            [
                "# its container was stopped",
                f"# boot of {RECORD.name} in {ZONE}",
                "booting",
                f"# container of {RECORD.name} in {ZONE}",
                "INFO serving",
            ],
        )

    async def test_one_half_that_cannot_be_read_hides_no_other(self) -> None:
        self.rented()
        self.world.log = RigError("UNREACHABLE", "no ssh yet")
        text = await self.plane.evidence()
        self.assertIn("booting", text)
        self.assertIn("# the container could not be read: no ssh yet", text)
        self.world.log, self.world.boot = "INFO serving", RigError("DENIED", "no console")
        text = await self.plane.evidence()
        self.assertIn("# the boot could not be read: no console", text)
        self.assertIn("INFO serving", text)

    async def test_of_a_stopped_machine_the_console_is_still_read(self) -> None:
        self.rented(state="stopped")
        self.world.why = "out of its time"
        text = await self.plane.evidence()
        self.assertIn("out of its time", text)
        self.assertIn("booting", text)
        self.assertIn("the container could not be read", text)
        self.assertEqual(self.world.acts, [])

    async def test_of_one_that_is_gone_what_its_boot_last_said(self) -> None:
        self.rented()
        rental = await self.plane.machine()
        self.plane.keep_boot(rental, "GEMMA4-BOOT weights failed")
        self.world.rental = None
        self.plane.machine_changed()
        text = await self.plane.evidence()
        self.assertIn("gone although", text)
        self.assertIn(f"# boot-{RECORD.name}.log, as last seen\nGEMMA4-BOOT weights failed", text)

    async def test_of_nothing_there_is_none(self) -> None:
        await self.fails("NOT_FOUND", self.plane.evidence())

    async def test_what_is_kept_of_a_boot(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        text = f"{CANARY}\x1b[31m\udcff\n" + "x" * 300_000 + "\nGEMMA4-BOOT the end"
        self.plane.keep_boot(machine(), text)
        path = self.paths.logs / f"boot-{RECORD.name}.log"
        kept = path.read_text("utf-8")
        self.assertEqual(path.stat().st_mode & 0o077, 0)
        self.assertNotIn(CANARY, kept)
        self.assertNotIn("\x1b", kept)
        self.assertTrue(kept.endswith("GEMMA4-BOOT the end"))
        self.assertLess(len(kept), 210_000)

    async def test_the_newest_boots_are_kept(self) -> None:
        for number in range(8):
            self.plane.keep_boot(machine(name=f"small-{number}"), f"boot {number}")
            path = self.paths.logs / f"boot-small-{number}.log"
            os.utime(path, (1_700_000_000 + number,) * 2)
        kept = sorted(path.name for path in self.paths.logs.iterdir())
        self.assertEqual(kept, [f"boot-small-{number}.log" for number in range(3, 8)])


class TunnelCase(Case):
    def setUp(self) -> None:
        super().setUp()
        self.listener = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
        self.listener.daemon_threads = True
        self.heard: list[bytes] = []
        self.listener.heard = self.heard  # type: ignore[attr-defined]
        self.world.remote_port = int(self.listener.server_address[1])
        thread = threading.Thread(target=self.listener.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self.addCleanup(self.listener.server_close)
        self.addCleanup(self.listener.shutdown)
        self.rented()

    async def address(self, plane: SmallPlane | None = None) -> str:
        plane = plane or self.plane
        instance = (await plane.find()).instance
        assert instance is not None
        return await plane.endpoint(instance)

    def asked(self, address: str, words: bytes) -> bytes:
        """What answers at the address."""
        port = int(address.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall(words + b"\n")
            return line.makefile("rb").readline()

    def leaders(self, number: str = "71") -> list[int]:
        return find_labelled(f"{LABEL};role=tunnel;id={number}")


class TunnelTest(TunnelCase):
    async def test_it_carries_to_the_machine_and_back(self) -> None:
        address = await self.address()
        self.assertEqual(address, f"http://127.0.0.1:{self.world.port}")
        self.assertEqual(self.asked(address, b"hello"), b"machine:hello\n")
        self.assertEqual(self.heard, [b"hello\n"])
        self.assertEqual(self.world.tunnels, [(RECORD.name, self.world.port, 8000)])

    async def test_a_child_may_hold_the_port(self) -> None:
        """gcloud is a Python program that starts ssh."""
        self.world.way = "parent"
        address = await self.address()
        self.assertEqual(self.asked(address, b"hello"), b"machine:hello\n")
        self.assertEqual(len(self.tunnels()), 2)
        await self.plane.close_tunnels()
        self.assertEqual(self.tunnels(), [])

    async def test_it_is_opened_once(self) -> None:
        first = await self.address()
        pids = self.leaders()
        for _ in range(3):
            self.assertEqual(await self.address(), first)
        self.assertEqual((self.leaders(), len(self.world.tunnels)), (pids, 1))

    async def test_two_servers_share_one(self) -> None:
        self.world.way = "slow"
        planes = [SmallPlane(self.paths, self.world) for _ in range(3)]
        addresses = await asyncio.gather(*(self.address(plane) for plane in planes))
        self.assertEqual(len(set(addresses)), 1)
        self.assertEqual(len(self.leaders()), 1)
        self.assertEqual(len(self.world.tunnels), 1)

    async def test_one_that_died_is_replaced(self) -> None:
        address = await self.address()
        (pid,) = self.leaders()
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: not self.leaders(), "it stays")
        self.assertEqual(self.asked(await self.address(), b"again"), b"machine:again\n")
        self.assertEqual(address, await self.address())
        self.assertNotEqual(self.leaders(), [pid])

    async def test_one_that_holds_its_port_no_more_is_replaced(self) -> None:
        """It runs, and what it started is dead: nothing listens there."""
        self.world.way = "parent"
        await self.address()
        (leader,) = self.leaders()
        for child in psutil.Process(leader).children():
            child.kill()
        self.world.way = "well"
        self.assertEqual(self.asked(await self.address(), b"again"), b"machine:again\n")
        self.assertFalse(psutil.pid_exists(leader) and process_label(leader) is not None)

    async def test_it_ends_while_it_carries(self) -> None:
        address = await self.address()
        (self.place / "die").touch()
        try:  # cut off with or without a reset, as the system has it
            self.assertEqual(self.asked(address, b"lost"), b"")
        except ConnectionResetError:
            pass
        (self.place / "die").unlink()
        await self.until(lambda: not self.leaders(), "it stays")
        self.assertEqual(self.asked(await self.address(), b"again"), b"machine:again\n")

    async def test_a_stranger_on_the_port_hears_nothing_and_stays(self) -> None:
        with socket.create_server(("127.0.0.1", self.world.port)) as stranger:
            stranger.settimeout(0.3)
            error = await self.fails("EXISTS", self.address())
            self.assertIn(f"port {self.world.port}", error.what)
            self.assertIn(str(os.getpid()), error.what, "who holds it is not told")
            with self.assertRaises(TimeoutError):
                stranger.accept()
            await self.fails("EXISTS", self.plane.check_port(self.world.port))
        self.assertEqual((self.world.tunnels, self.tunnels()), ([], []))
        await self.plane.check_port(self.world.port)
        self.assertEqual(self.asked(await self.address(), b"now"), b"machine:now\n")
        await self.plane.check_port(self.world.port)  # its own tunnel is no stranger

    async def test_another_rigs_tunnel_is_a_stranger_too(self) -> None:
        """The label decides, and not that it is a tunnel."""
        for number, label in enumerate(
            (
                f"rig={RIG}-q4_0;owner={OWNER};role=tunnel;id=71",
                f"rig={RIG};owner=somebody-else;role=tunnel;id=71",
            )
        ):
            with self.subTest(label):
                self.world.port = free_port()
                command = self.plane.tunnel(machine(), self.world.port, 8000)
                pid = spawn_detached(
                    command.argv,
                    label=label,
                    environment=os.environ,
                    log=self.place / f"other-{number}.log",
                    folder=self.place,
                )
                self.addAsyncCleanup(stop_detached, pid, label, 5.0)
                await self.until(lambda: self._listens(self.world.port), "it does not listen")
                await self.fails("EXISTS", self.address())
                await self.plane.close_tunnels()
                self.assertEqual(process_label(pid), label)

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    async def test_a_tunnel_that_is_refused_says_why(self) -> None:
        self.world.way = "refused"
        error = await self.fails("UNREACHABLE", self.address())
        self.assertIn("failed to connect to backend", error.what)
        self.assertNotIn(CANARY, str(error))
        self.assertEqual(self.tunnels(), [])
        self.world.way = "well"
        self.assertEqual(self.asked(await self.address(), b"now"), b"machine:now\n")

    async def test_a_tunnel_that_never_comes_up_is_ended(self) -> None:
        self.patch(_TUNNEL_UP_S=1.0)
        self.world.way = "silent"
        error = await self.fails("UNREACHABLE", self.address())
        self.assertIn("it said nothing", error.what)
        self.assertEqual(self.tunnels(), [])

    async def test_the_words_of_an_earlier_one_are_not_told_again(self) -> None:
        self.world.way = "refused"
        await self.fails("UNREACHABLE", self.address())
        self.patch(_TUNNEL_UP_S=1.0)
        self.world.way = "silent"
        error = await self.fails("UNREACHABLE", self.address())
        self.assertNotIn("backend", error.what)

    async def test_a_program_that_is_not_there(self) -> None:
        self.world.program = self.place / "nothing.py"
        await self.fails("UNREACHABLE", self.address())

    async def test_a_call_that_was_given_up_leaves_none_that_blocks_the_next(self) -> None:
        self.world.way = "silent"
        call = asyncio.ensure_future(self.address())
        await self.until(self.leaders, "nothing was started")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        self.world.way = "well"
        self.assertEqual(self.asked(await self.address(), b"now"), b"machine:now\n")
        self.assertEqual(len(self.tunnels()), 1)

    async def test_what_it_was_about_to_do_is_in_the_journal(self) -> None:
        await self.address()
        entries = Journal(self.paths.state / "journal.jsonl").entries()
        (entry,) = [one for one in entries if one["event"] == "tunnel intended"]
        self.assertEqual((entry["machine"], entry["port"]), (RECORD.name, self.world.port))
        self.assertEqual((self.paths.state / "tunnel.log").stat().st_mode & 0o077, 0)


class WhoseTest(TunnelCase):
    """A tunnel leads to that very machine and to no other."""

    async def test_another_machine_of_the_name_gets_a_tunnel_of_its_own(self) -> None:
        await self.address()
        (old,) = self.leaders()
        self.changed(provider_id="72")
        await self.address()
        self.assertIsNone(process_label(old), "the tunnel to the machine that is gone stays")
        self.assertEqual((self.leaders("71"), len(self.leaders("72"))), ([], 1))

    async def test_none_is_opened_to_what_is_not_ours_any_more(self) -> None:
        """It was read a moment ago; what a tunnel leads to is read anew."""
        await self.plane.find()
        assert self.world.rental is not None
        self.world.rental = self.world.rental.model_copy(update={"labels": {}})
        instance = (await self.plane.find()).instance
        assert instance is not None, "the look was not cached, so this proves nothing"
        await self.fails("NOT_FOUND", self.plane.endpoint(instance))
        self.assertEqual((self.world.tunnels, self.tunnels()), ([], []))

    async def test_none_is_opened_to_what_does_not_run(self) -> None:
        instance = (await self.plane.find()).instance
        assert instance is not None
        for state, error_class in (("pending", "BUSY"), ("stopping", "NOT_FOUND")):
            self.changed(state=state)
            await self.fails(error_class, self.plane.endpoint(instance))  # type: ignore[arg-type]
        self.assertEqual(self.world.tunnels, [])

    async def test_a_destroyed_machine_takes_all_of_them_along(self) -> None:
        self.world.way = "parent"
        await self.address()
        await self.served()
        self.assertEqual(len(self.tunnels()), 2)
        await SmallPlane(self.paths, self.world).machine_gone()  # of another server of the rig
        self.assertEqual(self.tunnels(), [])
        self.assertIsNone(read_json(self.paths.state / "served.json"))

    async def test_stopping_what_serves_ends_nothing_but_the_tunnel(self) -> None:
        await self.address()
        instance = (await self.plane.find()).instance
        assert instance is not None
        await self.plane.stop(instance)
        self.assertEqual((self.tunnels(), self.world.acts), ([], []))
        self.assertIsNotNone(self.world.rental)


if __name__ == "__main__":
    unittest.main()
