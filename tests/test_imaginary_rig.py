"""A second rig from the same parts: another plane, another runtime, one bundled file.

What it proves: toolsets are not made for one rig only. Its file is linted, compiled, and driven
over stdio and in process by a real client.
"""

from __future__ import annotations

import asyncio
import json
import os
import py_compile
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from mcp.types import Tool

from tests.imaginary_case import (
    MODES,
    OTHER_ZONE,
    ROOT,
    ZONE,
    Caller,
    ImaginaryCase,
    bundled,
    bundled_module,
    says,
    text_of,
)

CAPACITY_TOOLS = [
    "find_tpu",
    "create_tpu",
    "list_tpus",
    "describe_tpu",
    "plan_destroy",
    "destroy_tpu",
    "list_orphans",
    "reap_orphans",
]
SERVED = "google/gemma-4-E2B-it"


def lint(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ruff", *arguments[:1], "--isolated", "--no-cache"]
    argv += ["--line-length", "100", "--target-version", "py311", *arguments[1:]]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def words_of(tool: Tool) -> str:
    """All that a client may show of a tool."""
    schema = json.dumps(tool.input_schema, sort_keys=True)
    return f"{tool.name} {tool.title} {tool.description} {schema}"


class BundleTest(unittest.TestCase):
    file: Path

    @classmethod
    def setUpClass(cls) -> None:
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.file = Path(scratch.name) / "server.py"
        cls.file.write_text(bundled()[0])

    def test_it_is_clean_and_compiles(self) -> None:
        for arguments in (("check", "--select", "E,F,I,UP,B"), ("format", "--check")):
            done = lint(*arguments, str(self.file))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        py_compile.compile(str(self.file), cfile=f"{self.file}c", doraise=True)

    def test_it_needs_nothing_of_the_forge(self) -> None:
        text = bundled()[0]
        self.assertIsNone(re.search(r"^\s*(from|import) (forge|tests)\b", text, re.M))
        wanted = {"filelock", "httpx2", "mcp", "platformdirs", "psutil", "pydantic"}
        self.assertEqual(set(bundled()[1]), wanted | {"pydantic_settings"})

    def test_it_carries_no_part_of_another_plane_or_runtime(self) -> None:
        self.assertNotIn("class TransformersServe", bundled()[0])
        self.assertIn("class CapacityToolset", bundled()[0])


class CatalogueTest(ImaginaryCase):
    async def tools(self, mode: str) -> list[Tool]:
        async with self.calling(mode) as caller:
            return list((await caller.client.list_tools()).tools)

    async def test_names_follow_the_vocabulary(self) -> None:
        names = [tool.name for tool in await self.tools("auto")]
        self.assertEqual(names[: len(CAPACITY_TOOLS)], CAPACITY_TOOLS)
        self.assertIn("wait_for_vllm_ready", names)
        self.assertIn("get_vllm_logs", names)
        self.assertIn("get_vllm_endpoint", names)
        for name in ("wait_for_model_ready", "get_server_logs", "get_endpoint"):
            self.assertNotIn(name, names)
        for name in names:
            self.assertRegex(name, r"\A[a-z][a-z0-9_]{2,27}\Z")
        self.assertLessEqual(len(names), 28)

    async def test_every_word_is_filled_in(self) -> None:
        for tool in await self.tools("auto"):
            with self.subTest(tool=tool.name):
                self.assertNotRegex(f"{tool.name} {tool.title} {tool.description}", r"[{}]")

    async def test_no_tool_speaks_of_the_local_rig(self) -> None:
        for tool in await self.tools("auto"):
            with self.subTest(tool=tool.name):
                text = words_of(tool)
                self.assertNotRegex(text, r"(?i)this computer|transformers|pytorch|costs nothing b")
                self.assertNotIn("It costs nothing", text)

    async def test_descriptions_say_cost_and_deletion(self) -> None:
        described = {tool.name: tool.description or "" for tool in await self.tools("auto")}
        self.assertIn("COSTS MONEY", described["create_tpu"])
        self.assertIn("DELETES", described["destroy_tpu"])
        for name in CAPACITY_TOOLS:
            self.assertIn("TPU machine" if name[-1] == "u" else " ", described[name])

    async def test_hints(self) -> None:
        for tool in await self.tools("auto"):
            with self.subTest(tool=tool.name):
                assert tool.annotations is not None
                changes = tool.name in ("create_tpu", "destroy_tpu", "reap_orphans")
                changes |= tool.name in ("serve_model", "stop_model", "cancel_job")
                self.assertEqual(tool.annotations.read_only_hint, not changes)
                destroys = tool.name in ("destroy_tpu", "reap_orphans", "stop_model", "cancel_job")
                self.assertEqual(bool(tool.annotations.destructive_hint), destroys)

    async def test_parameters_are_described_bounded_and_closed(self) -> None:
        for tool in await self.tools("auto"):
            if tool.name not in CAPACITY_TOOLS:
                continue
            self.assertIs(tool.input_schema["additionalProperties"], False)
            for name, schema in tool.input_schema["properties"].items():
                with self.subTest(tool=tool.name, parameter=name):
                    self.assertTrue(schema["description"])
                    bounded = {"maxLength", "maximum", "enum"} & schema.keys()
                    self.assertTrue(bounded or schema["type"] == "boolean")

    async def test_the_list_is_one_on_every_way(self) -> None:
        lists = [[words_of(tool) for tool in await self.tools(mode)] for mode in MODES]
        async with self.calling_over_stdio() as caller:
            lists.append([words_of(tool) for tool in (await caller.client.list_tools()).tools])
        self.assertEqual(lists[0], lists[1])
        self.assertEqual(lists[0], lists[2])

    async def test_an_irregular_plane_has_its_own_names(self) -> None:
        module = bundled_module()
        for words, names in (
            (
                {"hardware": "gpu", "order": "g4dn_instance", "rental": "g4dn_instance"}
                | {"destroy": "terminate"},
                {"find_gpu", "create_g4dn_instance", "terminate_g4dn_instance"},
            ),
            (
                {"order": "tpu_queued_resource", "rental": "queued_resource"},
                {"create_tpu_queued_resource", "describe_queued_resource"},
            ),
            (
                {"hardware": "tpu_vm", "order": "tpu_vm_instance", "rental": "tpu_vm_instance"},
                {"find_tpu_vm", "list_tpu_vm_instances", "destroy_tpu_vm_instance"},
            ),
        ):
            with self.subTest(words=words):
                context = self.assembled().context
                context.vocabulary = {**context.vocabulary, **words}
                made = {m.name for m in module.CapacityToolset(context).tool_methods()}
                self.assertLessEqual(names, made)
                self.assertLessEqual(max(map(len, made)), 28)

    async def test_a_faulty_tpu_env_is_said_by_every_tool_and_can_be_mended(self) -> None:
        path = self.rig_folder / "tpu.env"
        good = path.read_text()
        path.write_text(good.replace("BUDGET_USD=5", "BUDGET_USD=much"))
        async with self.calling() as caller:
            for tool in ("find_tpu", "list_tpus", "list_orphans"):
                self.assertIn("BUDGET_USD", await caller.fails("INVALID", tool))
            self.assertIn("BUDGET_USD", await caller.fails("INVALID", "create_tpu", zone=ZONE))
            path.write_text(good)
            os.utime(path, ns=(1, 1))
            await caller.ok("find_tpu")


class StoryTest(ImaginaryCase):
    """Rent, serve, ask, give back: the serving and model toolsets, as they are, on such a plane."""

    def tearDown(self) -> None:
        # Should a test have failed half-way: the server that it started goes with it.
        rig = self.assembled()
        plane = rig.context.plane
        found = asyncio.run(plane.find()).instance
        if found is not None:
            asyncio.run(plane.stop(found))

    async def test_from_nothing_to_nothing_over_stdio(self) -> None:
        async with self.calling_over_stdio("legacy") as caller:
            await self.story(caller)

    async def test_from_nothing_to_nothing_in_process(self) -> None:
        for mode in MODES:
            with self.subTest(mode=mode):
                async with self.calling(mode) as caller:
                    await self.story(caller)

    async def story(self, caller: Caller) -> None:
        await caller.fails("NOT_FOUND", "serve_model")  # no machine yet
        best = (await caller.ok("find_tpu"))["offers"][0]["zone"]
        created = await caller.ok("create_tpu", zone=best, hours=1)
        place = {"name": created["machine"]["name"], "zone": best}
        state = await caller.ok("serve_model", wait_s=20)
        if state["state"] != "ready":
            state = await caller.ok("wait_for_vllm_ready", wait_s=30)
        self.assertEqual(state["state"], "ready", state)
        self.assertTrue((await caller.ok("verify_model_health"))["healthy"])
        answer = await caller.ok("query_gemma4", prompt="What is the capital of France?")
        self.assertEqual((answer["text"], answer["completion_tokens"]), ("Paris.", 2))
        measured = await caller.ok("query_gemma4_with_stats", prompt="And of Peru, please?")
        self.assertTrue(measured["complete"])
        self.assertEqual((await caller.ok("get_vllm_endpoint"))["model"], SERVED)
        self.assertEqual((await caller.ok("get_model_details"))["engine"], "vLLM")
        status = await caller.ok("get_system_status")
        self.assertEqual(status["state"], "ready")
        self.assertIn("billed", " ".join(status["notes"]))
        log = await caller.client.call_tool("get_vllm_logs", {})
        self.assertIn("Application startup complete", text_of(log))
        plan = await caller.ok("plan_destroy", **place)
        await caller.ok("destroy_tpu", **place, token=plan["token"])
        self.assertEqual(self.world.machines(), [])
        await caller.fails("NOT_FOUND", "query_gemma4", prompt="Are you there?")
        self.assertEqual((await caller.ok("get_system_status"))["state"], "stopped")

    async def test_no_prompt_goes_to_a_machine_that_is_not_ours_any_more(self) -> None:  # A48
        async with self.calling() as caller:
            await self.created(caller)
            await caller.ok("serve_model", wait_s=20)
            await caller.ok("wait_for_vllm_ready", wait_s=30)
            with self.world.changing() as world:
                world["rentals"][0]["labels"]["owner"] = "0" * 16
            await caller.fails("NOT_FOUND", "query_gemma4", prompt="What is the capital of France?")


class StdioTest(ImaginaryCase):
    async def test_of_twenty_creates_of_two_servers_one_creates(self) -> None:  # A30, D10
        async with self.calling_over_stdio() as one, self.calling_over_stdio("legacy") as other:
            calls = [
                caller.client.call_tool("create_tpu", {"zone": zone})
                for _ in range(5)
                for caller in (one, other)
                for zone in (ZONE, OTHER_ZONE)
            ]
            results = await asyncio.gather(*calls)
            listed = [(await caller.ok("list_tpus"))["rentals"] for caller in (one, other)]
        self.assertEqual(len(results), 20)
        self.assertEqual(sum(not result.is_error for result in results), 1)
        refusals = {text_of(result).split()[0] for result in results if result.is_error}
        self.assertLessEqual(refusals, {"EXISTS", "BUSY"})
        self.assertEqual(len(self.world.machines()), 1)
        self.assertEqual(len(self.world.calls("create")), 1)
        self.assertEqual([len(rows) for rows in listed], [1, 1])

    async def test_a_plan_of_one_server_is_carried_out_by_the_next(self) -> None:
        async with self.calling_over_stdio() as caller:
            arguments = await self.planned(caller)
        async with self.calling_over_stdio() as caller:
            await caller.ok("destroy_tpu", **arguments)
            await caller.fails("DENIED", "destroy_tpu", **arguments)
        self.assertEqual(self.world.machines(), [])

    async def test_the_user_is_asked_in_both_protocols(self) -> None:
        for mode in MODES:
            with self.subTest(mode=mode):
                questions: list[str] = []

                def declines_first(question: str, kept: list[str] = questions) -> Any:
                    kept.append(question)
                    return says("accept", confirm=len(kept) == 2)(question)

                async with self.calling_over_stdio(mode, declines_first) as caller:
                    arguments = await self.planned(caller)
                    await caller.fails("CANCELLED", "destroy_tpu", **arguments)
                    self.assertEqual(len(self.world.machines()), 1)
                    place = {key: arguments[key] for key in ("name", "zone")}
                    plan = await caller.ok("plan_destroy", **place)
                    await caller.ok("destroy_tpu", **place, token=plan["token"])
                self.assertEqual(self.world.machines(), [])
                self.assertEqual(len(questions), 2)
                self.assertIn(arguments["name"], questions[1])

    async def test_read_only_by_the_environment(self) -> None:
        async with self.calling_over_stdio(RIG_READ_ONLY="1") as caller:
            await caller.fails("DENIED", "create_tpu", zone=ZONE)
            await caller.ok("find_tpu")
        self.assertEqual(self.world.look()["calls"], [])

    async def test_the_command_line_goes_the_same_way(self) -> None:
        argv = [sys.executable, str(self.rig_folder / "server.py"), "call", "create_tpu"]
        for word, status, said in (
            ("zone=--help", 1, "INVALID zone"),
            (f"zone={ZONE}", 0, "Created"),
        ):
            done = await asyncio.to_thread(
                subprocess.run, [*argv, word], capture_output=True, text=True, cwd=ROOT, timeout=60
            )
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(said, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
