"""The shared suites on a rented rig: its list, bad input, read-only, settings, leaving, full disk.

What differs is how something is begun and ended there; the tests are the shared ones.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.suites.bad_input import ATTACK_CORPUS, STAND_INS, BadInputSuite
from forge.suites.catalogue import CatalogueSuite, listed_tools, parameters_of
from forge.suites.full_disk import NO_FILE_GROWS, FullDiskSuite
from forge.suites.leaving import LeavingSuite
from forge.suites.raw_stdio import RawServer, call_fault, raw_server
from forge.suites.read_only import ReadOnlySuite
from forge.suites.rented_case import IMPATIENT, RentedCase
from forge.suites.rig_case import rig_under_test, spelled
from forge.suites.settings_faults import SettingsSuite

# The rig's own names of the tools that the shared suites call by the first rig's.
RENTED_WORDS = {
    "wait_for_model_ready": "wait_for_vllm_ready",
    "get_server_logs": "get_vllm_docker_logs",
    "get_endpoint": "get_vllm_endpoint",
    "run_benchmark": "run_vllm_benchmark",
}
_NOWHERE = "gemma4-rig-none00"  # a name that nothing has
# Lifts the limit of the rig's process for another program, whose own disk is another one.
_UNLIMITED = """#!{python} -SE
import os, resource, sys
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


class RentedCatalogueSuite(RentedCase, CatalogueSuite):
    """The list that is loaded by default, and the whole one."""

    plan_tokens = frozenset(
        (
            *("destroy_tpu_vm_instance", "destroy_queued_resource", "destroy_gpu_instance"),
            "reap_orphans",
        )
    )

    async def test_all_toolsets_are_the_default_ones_and_more(self) -> None:
        with mock.patch.dict("os.environ", RIG_TOOLSETS="all"):
            async with self.in_process() as client:
                tools = {tool.name: tool for tool in await listed_tools(client)}
                page = await self.text(client, "get_help")
        self.assertLess(set(rig_under_test().tools), set(tools))
        for name, tool in tools.items():
            self.assertIn(f"`{name}`", page)
            self.assertGreater(len(tool.description or ""), 60, name)
            self.assertNotIn("{", tool.description or "", name)
            for parameter, schema in parameters_of(tool).items():
                self.assertTrue(schema.get("description"), f"{name}.{parameter}")


class RentedBadInputSuite(RentedCase, BadInputSuite):
    """The corpus over every tool of every toolset: nothing of it reaches the provider either."""

    stand_ins = {
        **STAND_INS,
        "name": _NOWHERE,
        "token": "plan-" + "A" * 32,
    }

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.stand_ins = {**cls.stand_ins, "zone": cls.zone}

    @classmethod
    def _clean_environment(cls) -> dict[str, str]:
        return {**super()._clean_environment(), "RIG_TOOLSETS": "all"}

    async def asyncSetUp(self) -> None:
        await super().asyncSetUp()
        self.before = (self.rented(), self.provider().changes())

    async def asyncTearDown(self) -> None:
        self.assertEqual((self.rented(), self.provider().changes()), self.before)
        heard = self.provider().heard()
        for attack in ATTACK_CORPUS:
            if len(attack.strip()) > 3:
                self.assertNotIn(attack, heard, "the provider was told an attack")
        await super().asyncTearDown()

    def test_attacks_within_lists_are_refused_by_name(self) -> None:
        lists = 0
        with self.unharmed() as server:
            for tool in self.tools:
                for name, schema in parameters_of(tool).items():
                    if schema.get("type") != "array":
                        continue
                    lists += 1
                    for attack in ATTACK_CORPUS:
                        if len(attack) > 1_000_000:
                            continue
                        given = {**self.required(tool), name: [attack]}
                        fault = call_fault(server.call(tool.name, given))
                        where = f"{tool.name}.{name}: {fault[:200]}"
                        self.assertTrue(fault.startswith(f"INVALID {name}"), where)
        self.assertGreaterEqual(lists, 4)


class RentedReadOnlySuite(RentedCase, ReadOnlySuite):
    """Nothing is rented, and nothing destroyed, while it is on."""

    stopping_tool = "destroy_tpu_vm_instance"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.stopping_tool = spelled(cls.stopping_tool)

    async def nothing_is_waited_for(self, client: Client) -> None:
        await self.refusal(client, "wait_for_model_ready", "NOT_FOUND", wait_s=0)

    async def stop(self, client: Client) -> None:
        listing = await self.answer(client, "list_tpu_vm_instances")
        (machine,) = listing["rentals"]
        await self.destroyed(client, machine)


class RentedSettingsSuite(RentedCase, SettingsSuite):
    """tpu.env at fault, a missing project first of all: nothing is asked for."""

    starting_tool = "create_tpu_vm_instance"
    stopping_tool = ""
    defaulted = ("MAX_HOURS", "4.0")

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.starting_arguments = {"zone": cls.zone}

    @classmethod
    def good_settings(cls) -> dict[str, str]:
        more = cls.provider().more_values
        return {**super().good_settings(), "BUDGET_USD": "12", **more}

    def _faults(self) -> dict[str, tuple[str, str]]:
        good, given = self._good(), self.good_settings()

        def but(name: str, instead: str = "") -> str:
            lines = [f"{key}={value}\n" for key, value in given.items() if key != name]
            return "".join(lines) + instead

        payer, port = next(iter(self.provider().values)), f"PORT={self.port}\n"
        line, pays = list(given).index(payer) + 1, f"{payer}={given[payer]}\n"
        return {
            "no payer": (but(payer), f"{payer} is missing"),
            "an empty payer": (but(payer, f"{payer}=\n"), payer),
            "a payer that cannot be one": (but(payer, f"{payer}=My!\n"), f"{payer} (from"),
            "no budget": (but("BUDGET_USD"), "BUDGET_USD is missing"),
            "no model": (but("MODEL_NAME"), "MODEL_NAME is missing"),
            "an unknown key": (good + "PROT=8000\n", "PROT is not a key of this rig"),
            "a key twice": (good + pays, f"{payer} stands in line {line} already"),
            "garbage": (
                good + "this is no assignment\n",
                f"line {len(given) + 1} is not KEY=value",
            ),
            "interpolation": (but(payer, f"{payer}=${{ME}}\n"), f"{payer} holds a '$'"),
            "a port that is no number": (good.replace(port, "PORT=http\n"), "PORT (from tpu.env)"),
            "hours without end": (good + "MAX_HOURS=9999\n", "MAX_HOURS (from tpu.env)"),
        }

    async def asyncTearDown(self) -> None:
        self.write_settings_text(self._good())
        await super().asyncTearDown()


class RentedLeavingSuite(RentedCase, LeavingSuite):
    """The provider's program is the attached child here; what goes on without the server is a
    search."""

    starting_tool = "create_tpu_vm_instance"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.starting_arguments = {"zone": cls.zone}

    async def children(self, server: RawServer) -> list[psutil.Process]:
        process = psutil.Process(server.process.pid)
        program = str(self.provider().bin / self.provider().programs[0])

        def found() -> list[psutil.Process]:
            return [child for child in process.children() if program in child.cmdline()]

        children: list[psutil.Process] = await self.until(found, "it was not started")
        return children

    def assert_starts(self, server: RawServer) -> None:
        call = {**self.starting_arguments}
        self.assertEqual(call_fault(server.call(self.starting_tool, call)), "")
        self.assertEqual(len(self.rented()["instances"]), 1)

    async def test_a_start_goes_on_without_the_server_that_began_it(self) -> None:
        with self.server() as server:
            begun = server.call(spelled("find_tpu_vm"), {})["result"]["structuredContent"]
            self.leave(server, 0)
        with self.server() as server:
            found = {"state": "queued"}
            while found["state"] in ("queued", "running"):
                answer = server.call("get_job", {"job_id": begun["job_id"], "wait_s": 20})
                found = answer["result"]["structuredContent"]
            self.assertEqual(found["state"], "done", found)
            ready = server.call(spelled("wait_for_model_ready"), {"wait_s": 50}, 60.0)
            self.assertEqual(ready["result"]["structuredContent"]["state"], "ready", ready)
            answered = server.call("query_gemma4", {"prompt": "still there?"})
            self.assertEqual(call_fault(answered), "")


class RentedFullDiskSuite(RentedCase, FullDiskSuite):
    """No intent on the disk, no machine; the disk of the provider's program is a good one."""

    starting_tool = "find_tpu_vm"
    preamble = IMPATIENT

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.starting_tool = spelled(cls.starting_tool)
        cls.looking = ("get_system_status", spelled("list_tpu_vm_instances"), "get_help")
        folder = cls.place / "unlimited"
        folder.mkdir()
        for name in cls.provider().programs:
            real = str(cls.provider().bin / name)
            (folder / name).write_text(_UNLIMITED.format(python=sys.executable, real=real))
            (folder / name).chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        cls.environment = {**cls.environment, "PATH": path}
        patch = mock.patch.dict(os.environ, PATH=path)
        patch.start()
        cls.addClassCleanup(patch.stop)

    def _refused(self, server: RawServer, *words: str) -> None:
        super()._refused(server, *words)
        self.assertEqual(self.rented(), {})
        # A create by hand is no different.
        fault = call_fault(server.call(spelled("create_tpu_vm_instance"), {"zone": self.zone}))
        self.assertTrue(fault.startswith("DENIED "), fault)
        self.assertEqual(self.rented(), {})

    def test_what_is_started_after_the_mending_is_found_again(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.write_text("not a folder")
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            self.state.unlink()
            answer = server.call(spelled("create_tpu_vm_instance"), {"zone": self.zone})
            made = self.rented()
            self.assertEqual(bool(call_fault(answer)), not made, answer)
        with raw_server(self.server_file, self.environment, self.stderr_file) as server:
            listing = server.call(spelled("list_tpu_vm_instances"), {})["result"]
            names = [one["name"] for one in listing["structuredContent"]["rentals"]]
            self.assertEqual(names, made.get("instances", []))

    def test_a_model_that_runs_can_be_asked_and_stopped_on_a_full_disk(self) -> None:
        """It can be asked; what cannot be noted is not destroyed either, and that is said."""
        asyncio.run(self._served())
        runner = self.write_runner("full.py", self.preamble + NO_FILE_GROWS)
        machine = self.rented()["instances"][0]
        where: Mapping[str, Any] = {"name": machine, "zone": self.zone}
        with raw_server(runner, self.environment, self.stderr_file) as server:
            self.assertEqual(call_fault(server.call("query_gemma4", {"prompt": "hello"})), "")
            fault = call_fault(server.call("plan_destroy", dict(where)))
            self.assertTrue(fault.startswith("DENIED "), fault)
            self.assertIn(" Next: ", fault)
            status = server.call("get_system_status", {})["result"]["structuredContent"]
            self.assertEqual(status["state"], "ready", status)
        self.assertEqual(self.rented()["instances"], [machine])
        asyncio.run(self._ended(where))
        self.assertEqual(self.rented(), {})

    async def _served(self) -> None:
        async with self.in_process() as client:
            await self.serve(client)

    async def _ended(self, machine: Mapping[str, Any]) -> None:
        async with self.in_process() as client:
            await self.destroyed(client, machine)
